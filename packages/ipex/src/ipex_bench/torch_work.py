# SPDX-License-Identifier: Apache-2.0
"""Running a task with torch: what the stock engines, torchao, zentorch and our compiler have in common."""

from __future__ import annotations

import contextlib
import itertools
import json
import mmap
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from . import workloads
from .result import SIDE, footprint
from .shapes import LAST_STEPS
from .task import Prepared, Task

#: Weights that share a scale, where they have four bits.
GROUP = 32

Change = Callable[[Any], Any]


def prepare(
    task: Task,
    *,
    change: Change | None = None,
    compile_with: Change | None = None,
    precision: str = "",
    note: str = "",
) -> Prepared:
    """Return a task ready to run with torch.

    Args:
        task: The task.
        change: Changes the model, already in its float type, before it is compiled.
        compile_with: Compiles a model or a function.
        precision: What it computes in, if not the float type of the task.
        note: Goes into the table.
    """
    precision = precision or task.float_dtype
    if task.kind == "train":
        return training(task, stock_training(task), compile_with, precision, note)
    model = workloads.load(task)
    if task.kind != "llm":
        model = model.to(getattr(torch, task.float_dtype))
    if change is not None:
        model = change(model)
    if task.kind == "llm":
        if compile_with is not None:
            model.forward = compile_with(model.forward)
        return generator(task, model, precision, note, static=compile_with is not None)
    return inference(task, compile_with(model) if compile_with else model, precision, note)


def tensors(task: Task, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """Return the inputs of a task; floating-point ones in ``dtype``."""
    inputs = map(torch.from_numpy, task.inputs().values())
    return tuple(x.to(dtype) if x.is_floating_point() else x for x in inputs)


def inference(
    task: Task, model: Any, precision: str, note: str = "", context: Any = None
) -> Prepared:
    """Return a model and its inputs ready to run."""
    inputs = tensors(task, getattr(torch, task.float_dtype) if context is None else torch.float32)
    around = context if context is not None else contextlib.nullcontext

    def call() -> Any:
        with torch.no_grad(), around():
            return model(*inputs)

    return Prepared(precision, lambda: call().float().numpy(), {"call": call}, note)


def generator(
    task: Task,
    model: Any,
    precision: str,
    note: str = "",
    *,
    static: bool = False,
    context: Any = None,
) -> Prepared:
    """Return a language model ready to decode; ``static``: with a cache of fixed size, which compilers need."""
    ids, forced = torch.from_numpy(task.inputs()["input_ids"]), torch.from_numpy(task.forced())
    around = context if context is not None else contextlib.nullcontext
    more = {"cache_implementation": "static"} if static else {}

    def make(count: int, ids: torch.Tensor = ids, **others: Any) -> Any:
        # no_grad and not inference_mode: frozen graphs refuse inference tensors.
        with torch.no_grad(), around():
            return model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=count,
                min_new_tokens=count,
                do_sample=False,
                num_beams=1,
                pad_token_id=0,
                **more,
                **others,
            )

    new = task.shape["new"]

    def said(count: int, ids: torch.Tensor) -> Any:
        teacher = Teacher(ids.shape[1], forced)
        make(count, ids, logits_processor=[teacher])
        return torch.stack(teacher.logits, 1).numpy()

    return Prepared(
        precision,
        lambda: said(new, ids),
        {"first": lambda: make(1), "all": lambda: make(new)},
        note,
        None if static else lambda: said(1, torch.cat([ids, forced], 1))[:, 0],
    )


class Teacher:
    """A processor of logits that keeps them and makes ``generate`` go on with given tokens.

    Args:
        length: Tokens of the prompt.
        tokens: What follows it, [batch, tokens].
    """

    def __init__(self, length: int, tokens: torch.Tensor) -> None:
        self.length = length
        self.tokens = tokens
        self.logits: list[torch.Tensor] = []

    def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.logits.append(scores.detach().float().clone())
        place = ids.shape[1] - self.length
        if place >= self.tokens.shape[1]:  # nothing follows the last one
            return scores
        return torch.full_like(scores, -torch.inf).scatter_(1, self.tokens[:, place, None], 0.0)


# -- training ---------------------------------------------------------------------------------------------------------


def stock_training(task: Task) -> Step:
    """Return the step of a training task."""
    model = workloads.load(task).train()
    if task.name == "dlrm":
        bags = nn.ModuleList(workloads.tables(task.shape, sparse=True))
        optimizer: Any = torch.optim.SGD([*model.parameters(), *bags.parameters()], lr=0.1)
        starts = torch.arange(task.shape["batch"])

        def look_up(rows: torch.Tensor) -> list[torch.Tensor]:
            return [bag(r, starts) for bag, r in zip(bags, rows, strict=True)]

        return Step(model, [optimizer], look_up, task)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    return Step(model, [optimizer], None, task)


class Step:
    """A training step: the call takes a batch and returns its loss."""

    def __init__(
        self, model: Any, optimizers: list[Any], look_up: Change | None, task: Task
    ) -> None:
        self.model = model
        self.optimizers = optimizers
        self.look_up = look_up
        self.half = task.float_dtype == "bfloat16"

    def __call__(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=self.half):
            if self.look_up is not None:
                logits = self.model(batch["x"], self.look_up(batch["rows"])).float()
                loss = nn.functional.binary_cross_entropy_with_logits(logits, batch["y"])
            else:
                loss = self.model(input_ids=batch["input_ids"], labels=batch["labels"]).loss
        loss.backward()
        for optimizer in self.optimizers:
            optimizer.step()
        return loss.detach().float()


def training(
    task: Task, step: Any, compile_with: Change | None, precision: str, note: str = ""
) -> Prepared:
    """Return training steps ready to run. The answer is the losses of the first steps, so it can be asked for once."""
    data = workloads.batches(task)
    turn = itertools.cycle(data)
    if compile_with is not None:
        step.model = compile_with(step.model)
    first = torch.stack([step(next(turn)) for _ in range(LAST_STEPS)])
    return Prepared(precision, first.numpy, {"call": lambda: step(next(turn))}, note)


def _decoded(task: Task) -> Any:
    """Return the logits of each new token, [batch, new, vocabulary], of a model that knows no cache."""
    ids = torch.from_numpy(task.inputs()["input_ids"])
    text = torch.cat([ids, torch.from_numpy(task.forced())], 1)
    with torch.no_grad():
        logits = workloads.load(task)(input_ids=text, use_cache=False).logits
    return logits[:, ids.shape[1] - 1 :].float().numpy()


def make(task: Task) -> None:
    """Write weights, inputs and the answer of float32 into the folder of a task, and facts about the work."""
    import numpy
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.utils.flop_counter import FlopCounterMode

    torch.manual_seed(0)
    model: Any
    model, inputs = workloads.build(task)
    if task.kind == "llm":
        model.save_pretrained(task.path / "model")
        size = (task.shape["batch"], task.shape["new"] - 1)
        forced = torch.randint(3, task.shape["vocab_size"], size)
        numpy.savez(task.path / "forced.npz", ids=forced.numpy())
    else:
        torch.save(model.state_dict(), task.path / "weights.pt")
    arrays: dict[str, Any] = {k: v.numpy() for k, v in inputs.items()}
    numpy.savez(task.path / "inputs.npz", **arrays)
    tables_of = [m for m in model.modules() if isinstance(m, nn.Embedding)]
    weights = sum(p.numel() for p in model.parameters())
    weights -= sum(m.weight.numel() for m in tables_of)  # only some of their rows are read
    del model
    exact = Task(**{**{f: getattr(task, f) for f in task.__slots__}, "dtype": "float32"})
    reference = prepare(exact)
    answer = _decoded(exact) if task.kind == "llm" else reference.answer()
    call = next(iter(reference.calls.values()))
    # The counter knows products, not the fused attention of CPUs.
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        call()
    flops = counter.get_total_flops()
    moved = sum(v.numel() for v in inputs.values() if v.is_floating_point()) + answer.size
    numpy.savez(task.path / "answer.npz", answer=answer)
    facts = {
        "flops": flops,
        "weights": weights,
        "activations": 0 if task.kind == "train" else moved,
    }
    (task.path / "facts.json").write_text(json.dumps(facts), encoding="utf-8")


# -- What the machine can do: reading memory and multiplying matrices, measured in the same rounds as the engines -----


def limit_calls(n_bytes: int) -> dict[str, Callable[[], Any]]:
    """Return the calls: ``read`` and one product for each element type."""
    memory = mmap.mmap(-1, footprint(n_bytes))
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):
            memory.madvise(mmap.MADV_HUGEPAGE)
    numbers = torch.frombuffer(memory, dtype=torch.float32).fill_(1.0)
    found: dict[str, Callable[[], Any]] = {"read": lambda: torch.sum(numbers)}
    for name in ("float32", "bfloat16", "int8"):
        a = torch.ones(SIDE, SIDE, dtype=getattr(torch, name))
        product = torch._int_mm if name == "int8" else torch.mm
        found[name] = _call(product, a)
    return found


def _call(function: Callable[..., Any], a: torch.Tensor) -> Callable[[], Any]:
    return lambda: function(a, a)

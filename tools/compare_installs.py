# SPDX-License-Identifier: Apache-2.0
"""Time two installs of this project against each other: what a change of the sources costs a caller.

    python tools/compare_installs.py BEFORE/bin/python AFTER/bin/python [PATTERN ...]

Each Python runs the same work in a process of its own. The two take turns on the same CPUs, so that a neighbour on the
machine slows both. A line shows the medians, the median ratio within a round with its 10th and 90th percentile, and the
ratio of the least times: above 1 the second install is faster. The work:

- ``eager NAME``: a call of each op at its smallest shape of the benchmark;
- ``fake NAME``: the same call with fake tensors;
- ``grad NAME``: the same call where a backward pass may follow;
- ``compiled NAME``: a compiled function with one op;
- ``model NAME``: forward passes, generation and training steps of small models;
- ``convert NAME``: `ipex.optimize`, `ipex.llm.optimize`, `prepare` and `convert` themselves.
"""

from __future__ import annotations

import argparse
import fnmatch
import functools
import importlib
import json
import os
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from typing import Any, TypeAlias

from house_paths import llama

#: Makes what is timed, with its model and inputs.
Work: TypeAlias = Callable[[], Callable[[], object]]

#: Ops whose compiled call is timed: one of a family each.
COMPILED = ("rms_norm", "layer_norm", "silu_mul", "linear", "woq_linear", "softmax")


def main() -> None:
    """Let the two installs take turns, or serve as one of them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("pythons", nargs="*", metavar="PYTHON ... PATTERN")
    parser.add_argument("--rounds", type=int, default=21, help="turns of each install")
    parser.add_argument("--milliseconds", type=float, default=20, help="least time of one turn")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", help="also write the figures to this file")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(options.threads)
        return
    if len(options.pythons) < 2:
        parser.error("expected two paths of Pythons: the install before and the one after")
    before, after = (Worker(python, options.threads) for python in options.pythons[:2])
    patterns = options.pythons[2:] or ["*"]
    other = set(after.names())
    rows = []
    for name in before.names():
        if name in other and any(fnmatch.fnmatch(name, pattern) for pattern in patterns):
            rows.append(compare(name, before, after, options.rounds, options.milliseconds))
            print(line(rows[-1]), flush=True)
    for kind in dict.fromkeys(row["name"].split()[0] for row in rows):
        ratios = [row["ratio"] for row in rows if row["name"].startswith(kind) and row["ratio"]]
        if ratios:
            print(
                f"{kind}: {len(ratios)} rows, median {statistics.median(ratios):.3f}, least {min(ratios):.3f}"
            )
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump(rows, file, indent=1)


def compare(
    name: str, before: Worker, after: Worker, rounds: int, milliseconds: float
) -> dict[str, Any]:
    """Return the medians of one piece of work in microseconds, and the ratio with its 10th and 90th percentile."""
    errors = [worker.ask("prepare", name, milliseconds) for worker in (before, after)]
    if any(errors):
        return {"name": name, "ratio": None, "error": errors}
    pairs = []
    for turn in range(rounds):
        order = (before, after) if turn % 2 else (after, before)
        times = {worker: worker.ask("run") for worker in order}
        pairs.append((times[before], times[after]))
    ratios = sorted(old / new for old, new in pairs)
    return {
        "name": name,
        "before_us": statistics.median(old for old, _ in pairs) * 1e6,
        "after_us": statistics.median(new for _, new in pairs) * 1e6,
        "ratio": statistics.median(ratios),
        "best": min(old for old, _ in pairs) / min(new for _, new in pairs),
        "low": ratios[len(ratios) // 10],
        "high": ratios[-1 - len(ratios) // 10],
    }


def line(row: dict[str, Any]) -> str:
    """Return one result as text."""
    if row["ratio"] is None:
        return f"{row['name']:44} not measured: {row['error']}"
    medians = f"{row['before_us']:12.1f} us {row['after_us']:12.1f} us"
    ratio = f"{row['ratio']:.3f} ({row['low']:.3f}-{row['high']:.3f})"
    return f"{row['name']:44} {medians}   {ratio}   best {row['best']:.3f}"


class Worker:
    """One install, in a process that answers one question at a time."""

    def __init__(self, python: str, threads: int) -> None:
        command = [python, __file__, "--serve", "--threads", str(threads)]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def ask(self, *question: Any) -> Any:
        """Return the answer to a question."""
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(json.dumps(question) + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())

    def names(self) -> list[str]:
        """Return the names of the work that this install can do."""
        names: list[str] = self.ask("names")
        return names


def serve(threads: int) -> None:
    """Answer questions on standard input until it ends."""
    answers = sys.stdout
    sys.stdout = sys.stderr
    warnings.simplefilter("ignore")
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[-threads:])
    import torch

    torch.set_num_threads(threads)
    work = {**ops_work(), **model_work(), **convert_work()}
    call: Callable[[], object] = object
    count = 1
    for question in sys.stdin:
        kind, *rest = json.loads(question)
        answer: object = None
        if kind == "names":
            answer = list(work)
        elif kind == "prepare":
            try:
                torch.manual_seed(0)
                torch._dynamo.reset()
                call = work[rest[0]]()
                count = calls_within(call, rest[1] / 1e3)
            except Exception as error:
                answer = f"{type(error).__name__}: {error}"[:200]
        else:
            begin = time.perf_counter()
            for _ in range(count):
                call()
            answer = (time.perf_counter() - begin) / count
        print(json.dumps(answer), file=answers, flush=True)


def calls_within(call: Callable[[], object], seconds: float) -> int:
    """Return how many calls fill this time."""
    for _ in range(3):
        call()
    begin = time.perf_counter()
    call()
    return max(1, round(seconds / max(time.perf_counter() - begin, 1e-7)))


def ops_work() -> dict[str, Work]:
    """Return the calls of ops, of the public list that the benchmark has."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    from ipex_core import benchmark

    def eager(spec: Any, case: Any, dtype: torch.dtype, grad: bool = False) -> Callable[[], object]:
        arguments = case.make(dtype)
        if grad:
            for value in arguments:
                if isinstance(value, torch.Tensor) and value.is_floating_point():
                    value.requires_grad_()
                    break
            return lambda: spec.op(*arguments)
        return without_gradients(lambda: spec.op(*arguments))

    def fake(spec: Any, case: Any, dtype: torch.dtype) -> Callable[[], object]:
        mode: Any = FakeTensorMode()

        def convert(value: Any) -> Any:
            return mode.from_tensor(value) if isinstance(value, torch.Tensor) else value

        arguments = [
            [convert(item) for item in value]
            if isinstance(value, (list, tuple))
            else convert(value)
            for value in case.make(dtype)
        ]

        def call() -> None:
            with mode:
                spec.op(*arguments)

        return without_gradients(call)

    def compiled(spec: Any, case: Any, dtype: torch.dtype) -> Callable[[], object]:
        arguments = case.make(dtype)
        function: Any = torch.compile(spec.op, dynamic=False)
        return without_gradients(lambda: function(*arguments))

    work: dict[str, Work] = {}
    for spec, case, dtype in benchmark.chosen(
        (), dtypes=(torch.bfloat16, torch.float32), smallest=True
    ):
        if f"eager {spec.name}" in work:
            continue
        work[f"eager {spec.name}"] = functools.partial(eager, spec, case, dtype)
        work[f"fake {spec.name}"] = functools.partial(fake, spec, case, dtype)
        if spec.backward is not None and not spec.mutates:
            work[f"grad {spec.name}"] = functools.partial(eager, spec, case, dtype, grad=True)
        if spec.name in COMPILED:
            work[f"compiled {spec.name}"] = functools.partial(compiled, spec, case, dtype)
    return work


def without_gradients(call: Callable[[], object]) -> Callable[[], object]:
    """Return the call under `torch.inference_mode`."""
    import torch

    def run() -> object:
        with torch.inference_mode():
            return call()

    return run


def model_work() -> dict[str, Work]:
    """Return forward passes, generation and training steps."""
    import torch

    ipex: Any = importlib.import_module("ipex")

    def forward(model: Any, *inputs: Any) -> Callable[[], object]:
        return without_gradients(lambda: model(*inputs))

    def optimized(model: torch.nn.Module, dtype: torch.dtype, *inputs: Any) -> Callable[[], object]:
        return forward(ipex.optimize(model.eval(), dtype=dtype), *inputs)

    def generate(**options: Any) -> Callable[[], object]:
        model = ipex.llm.optimize(decoder(), inplace=True, **options)
        ids = torch.arange(32).view(1, -1) % 500
        return without_gradients(
            lambda: model.generate(ids, max_new_tokens=16, do_sample=False, pad_token_id=0)
        )

    def woq(weight: torch.dtype) -> Callable[[], object]:
        config = ipex.quantization.get_weight_only_quant_qconfig_mapping(weight_dtype=weight)
        return generate(dtype=torch.bfloat16, quantization_config=config)

    def train(optimizer: str) -> Callable[[], object]:
        model = mlp().train()
        steps = getattr(torch.optim, optimizer)(model.parameters(), lr=1e-3)
        model, steps = ipex.optimize(model, dtype=torch.bfloat16, optimizer=steps)
        x, y = torch.randn(32, 256), torch.randn(32, 256)

        def step() -> None:
            with torch.autocast("cpu", torch.bfloat16):
                loss = torch.nn.functional.mse_loss(model(x), y)
            loss.backward()
            steps.step()
            steps.zero_grad()

        return step

    def compiled() -> Callable[[], object]:
        model = torch.compile(mlp().eval(), backend="ipex")
        return forward(model, torch.randn(4, 256))

    def int8() -> Callable[[], object]:
        x = torch.randn(4, 256)
        prepared = ipex.quantization.prepare(
            mlp().eval(), ipex.quantization.default_static_qconfig_mapping, example_inputs=(x,)
        )
        with torch.no_grad():
            prepared(x)
        return forward(ipex.quantization.convert(prepared), x)

    return {
        "model mlp float32": lambda: optimized(mlp(), torch.float32, torch.randn(4, 256)),
        "model mlp bfloat16": lambda: optimized(mlp(), torch.bfloat16, torch.randn(4, 256)),
        "model convolutions bfloat16": lambda: optimized(
            convolutions(), torch.bfloat16, torch.randn(1, 3, 64, 64)
        ),
        "model encoder bfloat16": lambda: optimized(encoder(), torch.bfloat16, encoder_ids()),
        "model encoder float32": lambda: optimized(encoder(), torch.float32, encoder_ids()),
        "model mlp compiled": compiled,
        "model mlp int8": int8,
        "model generate bfloat16": lambda: generate(dtype=torch.bfloat16),
        "model generate int8": lambda: woq(torch.qint8),
        "model generate int4": lambda: woq(torch.quint4x2),
        "model train SGD": lambda: train("SGD"),
        "model train AdamW": lambda: train("AdamW"),
    }


def convert_work() -> dict[str, Work]:
    """Return the calls that change a model."""
    import torch

    ipex: Any = importlib.import_module("ipex")

    def optimize(make: Callable[[], torch.nn.Module]) -> Callable[[], object]:
        model = make().eval()
        return lambda: ipex.optimize(model, dtype=torch.bfloat16)

    def llm() -> Callable[[], object]:
        model = decoder()
        return lambda: ipex.llm.optimize(model, dtype=torch.bfloat16)

    def prepare() -> Callable[[], object]:
        model, x = mlp().eval(), torch.randn(4, 256)
        mapping = ipex.quantization.default_static_qconfig_mapping
        return lambda: ipex.quantization.prepare(model, mapping, example_inputs=(x,))

    def convert() -> Callable[[], object]:
        prepared = prepare()()
        assert isinstance(prepared, torch.nn.Module)
        with torch.no_grad():
            prepared(torch.randn(4, 256))
        return lambda: ipex.quantization.convert(prepared)

    return {
        "convert optimize mlp": lambda: optimize(mlp),
        "convert optimize encoder": lambda: optimize(encoder),
        "convert llm.optimize": llm,
        "convert prepare": prepare,
        "convert convert": convert,
    }


def mlp() -> Any:
    """Return two blocks of linear layers with norms."""
    from torch import nn

    block = [nn.Linear(256, 512), nn.GELU(), nn.Linear(512, 256), nn.LayerNorm(256)]
    return nn.Sequential(*block, nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 256))


def convolutions() -> Any:
    """Return three convolutions with batch norms."""
    from torch import nn

    layers: list[nn.Module] = []
    for i, o in ((3, 16), (16, 32), (32, 32)):
        layers += [nn.Conv2d(i, o, 3, padding=1), nn.BatchNorm2d(o), nn.ReLU()]
    return nn.Sequential(*layers)


def encoder() -> Any:
    """Return BERT with two layers and random weights."""
    from transformers import BertConfig, BertModel

    config = BertConfig(
        hidden_size=128,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=4,
        vocab_size=1000,
    )
    return BertModel(config)


def encoder_ids() -> Any:
    """Return tokens for the encoder."""
    import torch

    return torch.arange(64).view(1, -1)


def decoder() -> Any:
    """Return Llama with two layers and random weights, whose texts have no end."""
    model = llama(256)
    model.generation_config.eos_token_id = None
    return model


if __name__ == "__main__":
    main()

# SPDX-License-Identifier: Apache-2.0
"""What runs in the processes of `test_parallel`: each function is called on all ranks of a group."""

from __future__ import annotations

import contextlib
import copy
import datetime
import io
import os
import pickle
import signal
import sys
import traceback
import warnings
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from deepspeed_like import divided_in_two
from families import FAMILIES, randomize, tokens
from torch import nn

import ipex_core
from ipex_llm.arch.detect import match
from ipex_llm.arch.reference import run_plan
from ipex_llm.distributed import adopt_deepspeed, parallel_plan, shard_model
from ipex_llm.optimization import optimize, plan
from ipex_llm.records import record_of
from ipex_llm.utils import load_low_precision_checkpoint

__all__ = ["every", "llama"]

NEW = 10
IDS = (2, 9)

DENSE = ["qwen2", "gemma2", "phi", "gpt_neox", "gpt2", "opt", "falcon_gqa", "phi3"]
MIXTURES = ["mixtral", "qwen2_moe", "gpt_oss"]
LLAMAS = ["llama_4_4", "llama_8_2", "llama_8_4_biased"]


def llama(heads: int = 4, kv_heads: int = 2, **options: Any) -> nn.Module:
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=97,
        hidden_size=64,
        intermediate_size=112,
        num_hidden_layers=2,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=16,
        max_position_embeddings=128,
        bos_token_id=1,
        eos_token_id=None,
        pad_token_id=0,
        **options,
    )
    return randomize(transformers.LlamaForCausalLM(config))


def made(name: str) -> nn.Module:
    if name.startswith("llama_"):
        heads, kv_heads = map(int, name.split("_")[1:3])
        biased = name.endswith("biased")
        return llama(heads, kv_heads, attention_bias=biased, mlp_bias=biased)
    return FAMILIES[name]()


def prompt(model: Any) -> torch.Tensor:
    return tokens(*IDS).remainder(model.config.vocab_size)


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(prompt(model)).logits.float()


def generated(model: Any, **options: Any) -> list[list[int]]:
    options = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0, **options}
    with torch.no_grad():
        return model.generate(prompt(model), **options).tolist()


def off(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got - want).abs().max() / want.abs().max())


def done(model: nn.Module) -> bool:
    return next(row for row in ipex_core.explain(model).rows if row.step == "llm").done


# ------------------------------------------------------------------------------------------------------------ division


def compared(names: list[str], steps: bool) -> list[Any]:
    """Return what is wrong with each model, sharded, against the whole one in the same process."""
    found = []
    for name in names:
        whole, model = made(name), made(name)
        size = sum(p.numel() for p in model.parameters())
        want = logits(whole)
        same = shard_model(model)
        part = parallel_plan(model, match(model))
        wrong = []
        if same is not model or off(logits(model), want) > 1e-5:
            wrong.append(f"logits {off(logits(model), want):.1e}")
        result = run_plan(part, tokens(*IDS))
        if off(result, want) > 1e-4:
            wrong.append(f"plan {off(result, want):.1e}")
        if steps and generated(model) != generated(whole):
            wrong.append("tokens")
        if steps and generated(model, cache_implementation="static") != generated(whole):
            wrong.append("tokens with a static cache")
        if sum(p.numel() for p in model.parameters()) > 0.8 * size:
            wrong.append("not smaller")
        heads = sum(layer.attention.heads for layer in part.layers)
        found.append((name, wrong, heads))
    return found


def llamas(rank: int, ranks: int, folder: str) -> Any:
    return compared(LLAMAS, True)


def families(rank: int, ranks: int, folder: str) -> Any:
    return compared([name for name in (*DENSE, *MIXTURES) if name in FAMILIES], False)


def refused(rank: int, ranks: int, folder: str) -> list[str]:
    models = {
        "too few heads": llama(2, 1),
        "norm over all heads": FAMILIES["olmo2"](),
        "alibi": FAMILIES["bloom"](),
        "not understood": FAMILIES["jamba"](),
        "other weights": llama(),
    }
    if rank == 0:
        with torch.no_grad():
            models["other weights"].model.embed_tokens.weight.mul_(-1.5)
    model = optimize(llama(), tp_group=True)
    checkpoint = load_low_precision_checkpoint(f"{folder}/gptq")
    actions = [
        *(lambda m=m: optimize(m, tp_group=True, inplace=True) for m in models.values()),
        lambda: optimize(model, tp_group=True),
        lambda: shard_model(llama()).train()(tokens()),
        lambda: optimize(llama(), tp_group="all"),
        lambda: optimize(small(), tp_group=True, low_precision_checkpoint=checkpoint),
        lambda: load_low_precision_checkpoint(f"{folder}/gptq", 0, 5),
    ]
    found = []
    for action in actions:
        try:
            action()
            found.append("no error")
        except (ValueError, RuntimeError, TypeError) as error:
            found.append(str(error))
    return found


# ------------------------------------------------------------------------------------------------------------ optimize


def optimized(rank: int, ranks: int, folder: str) -> dict[str, Any]:
    """Return for each way to call `optimize` whether a program runs, and what is wrong."""
    found: dict[str, Any] = {}
    whole = llama(8, 4, attention_bias=True)
    want, text = logits(whole), generated(whole)
    model = optimize(whole, tp_group=torch.distributed.group.WORLD)
    found["float32"] = done(model), off(logits(model), want) < 1e-5, generated(model) == text
    found["copy"] = generated(copy.deepcopy(model)) == text
    beams = {"num_beams": 3, "num_return_sequences": 2}
    found["beams"] = generated(model, **beams) == generated(whole, **beams)
    model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()})
    found["loaded"] = generated(model) == text
    ipex_core.restore(model)
    found["restored"] = off(logits(model), want) < 1e-5, generated(model) == text
    layers = optimize(whole, tp_group=True, deployment_mode=False)
    found["layers"] = not done(layers), off(logits(layers), want) < 1e-5, generated(layers) == text
    for dtype, limit in ((torch.bfloat16, 0.05), (torch.float16, 0.01)):
        model = optimize(whole, dtype=dtype, tp_group=True)
        found[str(dtype)] = done(model), off(logits(model), want) < limit
        found[f"same {dtype}"] = generated(model)
    for name in ("gemma2", "qwen3_moe", "phi3") if ranks == 2 else ():
        whole = FAMILIES[name]()
        model = optimize(whole, tp_group=True)
        found[name] = done(model), generated(model) == generated(whole)
    return found


def quantized(rank: int, ranks: int, folder: str) -> dict[str, Any]:
    from ipex_quant import WoqLowpMode, WoqWeightDtype, woq_qconfig

    found: dict[str, Any] = {}
    # Groups lie within heads and pieces of the mlp, so that the parts have the scales of the whole.
    for kind, group in (("INT4", 16), ("INT8", 16), ("INT8", -1)):
        config = woq_qconfig(
            weight_dtype=WoqWeightDtype[kind], group_size=group, lowp_mode=WoqLowpMode.BF16
        )
        one = optimize(llama(8, 4), quantization_config=config)
        model = optimize(llama(8, 4), quantization_config=config, tp_group=True)
        near = off(logits(model), logits(one)) < (1e-5 if group > 0 else 0.05)
        found[f"{kind} {group}"] = done(model), near
        if group > 0:
            found[f"{kind} tokens"] = generated(model) == generated(one)
    layers = optimize(llama(8, 4), quantization_config=config, tp_group=True, deployment_mode=False)
    found["layers"] = off(logits(layers), logits(one)) < 0.05
    return found


def small(meta: bool = False) -> Any:
    import transformers

    config = transformers.AutoConfig.from_pretrained(os.environ["IPEX_TEST_MODEL"])
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    with torch.device("meta" if meta else "cpu"):
        return transformers.AutoModelForCausalLM.from_config(config).eval()


def loaded(rank: int, ranks: int, folder: str) -> dict[str, Any]:
    """Quantized checkpoints, of which each rank loads its part."""
    found: dict[str, Any] = {}
    for name in ("gptq", "awq"):
        path = f"{folder}/{name}"
        one = optimize(small(), low_precision_checkpoint=load_low_precision_checkpoint(path))
        part = load_low_precision_checkpoint(path, rank, ranks)
        model = optimize(small(name == "gptq"), low_precision_checkpoint=part, tp_group=True)
        found[name] = done(model), off(logits(model), logits(one)) < 1e-5, generated(model)
        found[f"{name} tokens"] = generated(model) == generated(one)
    return found


def planned(rank: int, ranks: int, folder: str) -> dict[str, Any]:
    """Return what is wrong with the plans of divided models, by what they are made from."""
    from ipex_quant import WoqWeightDtype, woq_qconfig

    config = woq_qconfig(weight_dtype=WoqWeightDtype.INT4, group_size=16)
    checkpoint = load_low_precision_checkpoint(f"{folder}/gptq", rank, ranks)
    cases: dict[str, tuple[nn.Module, dict[str, Any]]] = {
        "float": (llama(8, 4), {"tp_group": True}),
        "quantized": (llama(8, 4), {"tp_group": True, "quantization_config": config}),
        "flat": (llama(8, 4), {"tp_group": True, "deployment_mode": False}),
        "tied": (llama(8, 2, tie_word_embeddings=True), {"tp_group": True}),
        "gpt2": (FAMILIES["gpt2"](), {"tp_group": True}),
        "loaded": (small(), {"tp_group": True, "low_precision_checkpoint": checkpoint}),
    }
    if ranks == 2:
        cases["deepspeed"] = divided_in_two(llama(), rank), {}
    return {name: _planned(*case) for name, case in cases.items()}


def _planned(model: nn.Module, options: dict[str, Any]) -> list[str]:
    kept = {name: (id(p), p.detach().clone()) for name, p in model.named_parameters()}
    kinds = [type(module) for module in model.modules()]
    found = plan(model, **options)
    wrong = []
    for name, parameter in model.named_parameters():
        if (id(parameter), True) != (kept[name][0], torch.equal(parameter, kept[name][1])):
            wrong.append(f"{name} has changed")
    if kinds != [type(module) for module in model.modules()]:
        wrong.append("modules have changed")
    fast = optimize(model, **options)
    text = next(row.text for row in ipex_core.explain(fast).rows if row.step == "llm")
    if text != found.summary:
        wrong.append(f"{found.summary!r} became {text!r}")
    runner = next((r for m in fast.modules() if (r := record_of(m).runner) is not None), 0)
    if (runner != 0) != (found.depth == 3):
        wrong.append(f"depth {found.depth}")
    for shard in found.shards:
        if runner and shard.heads:
            attention = runner.plan.layers[int(shard.module.rpartition(".")[2])].attention
            if (shard.heads, shard.kv_heads) != (attention.heads, attention.kv_heads):
                wrong.append(f"{shard} became {attention.heads}, {attention.kv_heads}")
        elif runner and runner.plan.parallel.head.sizes[found.rank] != shard.features:
            wrong.append(f"{shard} became {runner.plan.parallel.head}")
    if not found.shards or "ranks" not in str(found):
        wrong.append("no shards")
    return wrong


# ------------------------------------------------------------------------------------------------------------- sampling


class OnlyRank0:
    """A stopping criterion that says something else on each rank."""

    def __init__(self, rank: int) -> None:
        self.stop = rank == 0

    def __call__(self, ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        return torch.full((len(ids),), self.stop and ids.shape[1] >= IDS[1] + 4)


def sampled(rank: int, ranks: int, folder: str) -> list[Any]:
    found: list[Any] = []
    model = optimize(llama(), tp_group=True)
    layers = optimize(llama(), tp_group=True, deployment_mode=False)
    for one in (model, layers):
        for options in ({}, {"top_k": 5, "temperature": 0.7}, {"num_beams": 2}):
            torch.manual_seed(7 + rank)
            found.append(generated(one, do_sample=True, **options))
    torch.manual_seed(7)
    again = generated(model, do_sample=True)
    found.append(again == found[0] if rank == 0 else True)
    short = generated(model, stopping_criteria=[OnlyRank0(rank)])
    found.append(len(short[0]) == IDS[1] + 4)
    return found


# ---------------------------------------------------------------------------------------------------- divided by others


def deepspeed(rank: int, ranks: int, folder: str) -> list[bool]:
    options = {"attention_bias": True, "mlp_bias": True}
    model = divided_in_two(llama(**options), rank)
    names = sorted(k for k in model.state_dict() if rank == 0 or "bias" not in k)
    whole = llama(**options)
    want = logits(whole)
    theirs = logits(model)
    changed = adopt_deepspeed(model)
    result = run_plan(parallel_plan(model, match(model)), tokens(*IDS))
    kept = sorted(k for k in model.state_dict() if rank == 0 or "bias" not in k)
    fast = optimize(divided_in_two(llama(**options), rank), inplace=True)
    return [
        changed,
        off(theirs, want) < 1e-5,
        off(logits(model), want) < 1e-5,
        off(result, want) < 1e-4,
        kept == names,
        adopt_deepspeed(model) is False,
        done(fast),
        off(logits(fast), want) < 1e-5,
        generated(fast) == generated(whole),
    ]


def transformers_plan(rank: int, ranks: int, folder: str) -> list[Any]:
    import transformers

    path = f"{folder}/whole"
    load = transformers.AutoModelForCausalLM.from_pretrained
    whole = load(path).eval()
    model = load(path, tp_plan="auto").eval()
    theirs = off(logits(model), logits(whole))
    fast = optimize(model, inplace=True)
    return [
        theirs < 1e-5,
        done(fast),
        off(logits(fast), logits(whole)) < 1e-5,
        generated(fast) == generated(whole),
    ]


# ---------------------------------------------------------------------------------------------------------- the manual


class Tokenizer:
    """Stands for the tokenizer of a model that has none."""

    def __call__(self, text: str, return_tensors: str) -> dict[str, torch.Tensor]:
        return {"input_ids": tokens(1, len(text.split()))}

    def decode(self, ids: torch.Tensor) -> str:
        return f"{len(ids)} tokens"


def documented(rank: int, ranks: int, folder: str) -> str | None:
    """Run the script of the manual, in a group that is there already, and return what it prints."""
    import importlib.util

    import transformers

    page = Path(__file__).parents[3] / "docs" / "distributed.md"
    if not page.exists() or importlib.util.find_spec("ipex") is None:
        return None
    import ipex

    script = page.read_text(encoding="utf-8").split("```python\n")[1].split("```")[0]
    printed = io.StringIO()
    with (
        mock.patch.object(ipex.distributed, "init_process_group"),
        mock.patch.object(transformers.AutoTokenizer, "from_pretrained", lambda path: Tokenizer()),
        mock.patch.object(sys, "argv", ["generate.py", f"{folder}/whole"]),
        contextlib.redirect_stdout(printed),
    ):
        exec(compile(script, str(page), "exec"), {})
    return printed.getvalue()


# ----------------------------------------------------------------------------------------------------------- processes


def one_dies(rank: int, ranks: int) -> Any:
    """End the last rank in the middle, and return what the others are told."""
    wait = datetime.timedelta(seconds=5)
    group = torch.distributed.new_group(list(range(ranks)), timeout=wait)
    model = optimize(llama(), tp_group=group)
    generated(model)
    if rank == ranks - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        generated(model, max_new_tokens=100)
    except RuntimeError as error:
        return str(error)
    return "no error"


#: What runs with so many ranks.
CASES: dict[int, list[Any]] = {
    2: [
        *(llamas, families, optimized, quantized, loaded, planned, sampled),
        *(deepspeed, transformers_plan, documented),
    ],
    3: [llamas, optimized, quantized, loaded, planned, sampled, refused],
}


def every(rank: int, ranks: int, folder: str) -> Any:
    """Run all cases of a number of ranks in one set of processes, which take longer to start than to run.

    What they return is in a file for each rank, since `one_dies` comes last.
    """
    warnings.simplefilter("ignore")
    os.environ["IPEX_TEST_MODEL"] = f"{folder}/gptq"
    found: dict[str, Any] = {}
    for case in CASES[ranks]:
        try:
            found[case.__name__] = case(rank, ranks, folder)
        except Exception as error:
            found[case.__name__] = "".join(traceback.format_exception(error))
    Path(folder, f"{rank} of {ranks}").write_bytes(pickle.dumps(found))
    return one_dies(rank, ranks)

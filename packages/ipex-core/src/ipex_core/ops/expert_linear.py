# SPDX-License-Identifier: Apache-2.0
"""One linear layer of each expert that a token goes to, alone or summed: a projection that is a mixture."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.nn import functional

from ipex_core.library.checks import (
    PRODUCT_TOLERANCE,
    acc,
    check_device,
    check_dtype_in,
    check_kind,
    check_one_of,
    check_shape,
    check_tensor,
    randn,
    strided,
)
from ipex_core.library.kernels import register
from ipex_core.library.spec import Arguments, BenchCase, OpSpec, Sample
from ipex_core.ops.fused_experts import quantized_experts
from ipex_core.ops.moe import (
    check_experts,
    check_quantized_expert,
    has_data,
    is_quantized,
    plain_expert,
)
from ipex_core.packing import experts as _experts

Tensor = torch.Tensor
OP = "expert_linear"


def _expert_linear(
    x: Tensor,
    packed_weight: Tensor,
    ids: Tensor,
    out_features: int,
    weights: Tensor | None = None,
    lowp_mode: str = "none",
) -> Tensor:
    """Multiply rows with the weights of the experts that they go to.

    ``y[t, i] = weight[ids[t, i]] @ x[t]``, or ``x[t, i]`` where each expert has a row of its own. With weights it is
    the sum ``y[t] = sum over i of weights[t, i] * weight[ids[t, i]] @ x[t, i]``. Products and sums are accumulated in
    float32 and rounded once; the sum runs in the order of the experts.

    Args:
        x: ``[T, K]`` or ``[T, top_k, K]``, float32, bfloat16 or float16.
        packed_weight: Result of ``pack_moe_weight(weight)`` for ``[E, N, K]`` in the dtype of ``x``; or quantized, as
            in `fused_experts`.
        ids: ``[T, top_k]``, int32 or int64. -1 means no expert: zeros. An id may occur twice in a row.
        out_features: N.
        weights: ``[T, top_k]``, float32 or the dtype of ``x``, or None.
        lowp_mode: As in `fused_experts`.

    Returns:
        A contiguous tensor in the dtype of ``x``: ``[T, top_k, N]``, with weights ``[T, N]``.

    Raises:
        RuntimeError: A shape or dtype does not fit, or an id is not in ``[-1, E)``. Nothing has been computed then.
    """
    tokens, top_k = ids.shape
    wide = acc(x)
    each = wide.unsqueeze(1).expand(-1, top_k, -1) if x.dim() == 2 else wide
    y = wide.new_zeros(tokens, top_k, out_features)
    for index in range(packed_weight.shape[0]):
        token, place = torch.where(ids == index)
        if token.numel() == 0:
            continue
        shape = (index, out_features, x.shape[-1])
        weight = plain_expert(OP, "packed_weight", packed_weight, *shape, x.dtype, False)
        y[token, place] = functional.linear(each[token, place], weight.to(wide.dtype))
    if weights is not None:
        y = (y * weights.unsqueeze(-1).to(wide.dtype)).sum(1)
    return y.to(x.dtype)


def _check(a: Arguments) -> None:
    check_tensor(OP, "x", a.x)
    a.require(a.x.dim() in (2, 3), "x", "be 2-D or 3-D", list(a.x.shape))
    a.require(a.x.shape[-1] > 0, "x", "have at least one feature", list(a.x.shape))
    a.require(a.out_features > 0, "out_features", "be positive")
    check_device(OP, "packed_weight", a.packed_weight, a.x)
    packed, size = a.packed_weight, (a.out_features, a.x.shape[-1])
    quantized = has_data(packed) and is_quantized(packed)
    if quantized:
        check_quantized_expert(OP, "packed_weight", packed, 0, *size, False)
    elif has_data(packed) or packed.dim() != 2:
        check_experts(OP, "packed_weight", packed, *size, a.x.dtype, False)
    check_device(OP, "ids", a.ids, a.x)
    check_dtype_in(OP, "ids", a.ids, torch.int32, torch.int64)
    shape = list(a.ids.shape)
    fits = len(shape) == 2 and shape[0] == a.x.shape[0]
    a.require(fits, "ids", f"be 2-D with {a.x.shape[0]} rows", shape)
    rows = a.x.dim() == 2 or a.x.shape[1] == shape[1]
    a.require(rows, "x", f"have a row for each of {shape[1]} ids", list(a.x.shape))
    check_one_of(OP, "lowp_mode", a.lowp_mode, ("none", "fp16", "bf16"))
    a.require(
        quantized or a.lowp_mode == "none" or not has_data(packed),
        "lowp_mode",
        "be none for weights that are not quantized",
    )
    if a.weights is not None:
        check_kind(OP, "weights", a.weights, a.x, or_float32=True)
        check_shape(OP, "weights", a.weights, shape)
    # Only the data tell, so tensors without data (fake tensors during a trace) pass.
    if has_data(a.ids):
        experts, ids = packed.shape[0], a.ids.cpu().long()
        wrong = ids[(ids < -1) | (ids >= experts)].tolist()
        a.require(not wrong, "ids", f"be -1 or in [0, {experts})", *wrong[:1])


def _fake(a: Arguments) -> Tensor:
    kept = tuple(a.ids.shape) if a.weights is None else (a.ids.shape[0],)
    return a.x.new_empty(*kept, a.out_features)


def _case(dtype: torch.dtype, tokens: int, experts: int, top_k: int, k: int, n: int) -> Any:
    """Return rows, packed weights, ids and weights of experts."""
    x = randn(tokens, k, dtype=dtype, seed=91)
    weight = randn(experts, n, k, dtype=dtype, seed=92, scale=k**-0.5)
    weights, ids = randn(tokens, experts, seed=93).softmax(-1).topk(top_k, dim=-1)
    return x, torch.ops.ipex.pack_moe_weight(weight), ids.to(torch.int32), weights


def _samples(dtype: torch.dtype) -> Iterator[Sample]:
    for tokens, experts, top_k, k, n in (
        (1, 1, 1, 1, 1),
        (1, 8, 2, 64, 96),
        (4, 8, 3, 70, 33),
        (33, 4, 2, 129, 65),
        (300, 3, 2, 40, 72),
        (1100, 2, 1, 17, 130),
    ):
        x, packed, ids, weights = _case(dtype, tokens, experts, top_k, k, n)
        each = randn(tokens, top_k, k, dtype=dtype, seed=94)
        name = f"{tokens}x{top_k}of{experts}_{k}_{n}"
        yield Sample((x, packed, ids, n), id=name)
        yield Sample((each, packed, ids, n, weights), id=f"{name}-sum")
    x, packed, ids, weights = _case(dtype, 9, 4, 2, 66, 40)
    each = randn(9, 2, 66, dtype=dtype, seed=94)
    yield Sample((x, packed, ids.long(), 40, weights.to(dtype)), id="one_row-sum")
    yield Sample((each, packed, ids, 40), id="own_rows")
    yield Sample((strided(x), packed, strided(ids), 40), id="noncontiguous")
    heads = each.transpose(0, 1).contiguous().transpose(0, 1)
    yield Sample((heads, packed, ids, 40, strided(weights)), id="noncontiguous-sum")
    skipped = torch.where(ids == 1, -1, ids)
    yield Sample((x, packed, skipped, 40), id="skipped")
    yield Sample((each, packed, skipped, 40, weights), id="skipped-sum")
    yield Sample((each, packed, torch.full_like(ids, -1), 40, weights), id="all_skipped")
    yield Sample((each, packed, torch.zeros_like(ids), 40, weights), id="duplicates")
    yield Sample((x[:0], packed, ids[:0], 40), id="no_tokens")
    special = each.clone()
    special[0, 1, 3], special[2, 0, 5] = float("nan"), float("inf")
    yield Sample((special, packed, ids, 40, weights), id="special_values")
    for format, group, scales in (
        ("int8", -1, torch.float32),
        ("int4", 32, torch.bfloat16),
        ("nf4", 16, torch.float32),
    ):
        for tokens in (3, 150):
            x, _, ids, weights = _case(dtype, tokens, 4, 2, 66, 40)
            weight = randn(4, 40, 66, seed=92, scale=66**-0.5)
            packed4 = quantized_experts(weight, False, format, group, scales)
            own = randn(tokens, 2, 66, dtype=dtype, seed=94)
            yield Sample((x, packed4, ids, 40), id=f"{format}_{tokens}")
            yield Sample((own, packed4, ids, 40, weights), id=f"{format}_{tokens}-sum")


def _bench() -> Iterator[BenchCase]:
    for tokens in (1, 16, 128, 512):
        for name, experts, top_k, k, n in (("small", 4, 2, 256, 128), ("jetmoe", 8, 2, 2048, 2048)):
            used = min(experts, tokens * top_k)
            yield BenchCase(
                f"{name}-{tokens}x{top_k}of{experts}x{k}x{n}",
                lambda dtype, a=(tokens, experts, top_k, k, n): (*_case(dtype, *a)[:3], a[4]),
                lambda dtype, w=used * k * n, a=tokens * (k + top_k * n): (w + a) * dtype.itemsize,
                flops=2 * tokens * top_k * k * n,
                rotate=tokens <= 32,
            )


def _stock_args(x: Tensor, packed: Tensor, ids: Tensor, out_features: int) -> tuple[Any, ...]:
    return x, _experts.unpack(packed, out_features, x.shape[-1], x.dtype, False), ids.long()


def _stock(x: Tensor, weight: Tensor, ids: Tensor) -> Tensor:
    """The loop over the experts that models of the Hugging Face library have."""
    y = x.new_zeros(*ids.shape, weight.shape[1])
    for expert in range(weight.shape[0]):
        token, place = torch.where(ids == expert)
        y[token, place] = functional.linear(x[token], weight[expert])
    return y


register(
    OpSpec(
        name=OP,
        schema=(
            "(Tensor x, Tensor packed_weight, Tensor ids, int out_features, Tensor? weights=None,"
            ' str lowp_mode="none") -> Tensor'
        ),
        reference=_expert_linear,
        check=_check,
        fake=_fake,
        samples=_samples,
        stock=_stock,
        stock_args=_stock_args,
        tolerance=PRODUCT_TOLERANCE,
        bench=_bench,
        summary="Linear layers of the experts that tokens go to, alone or as a weighted sum",
    )
)

# SPDX-License-Identifier: Apache-2.0
"""Linear layers of several groups of rows, each with a weight of its own (grouped GEMM), and batches of products."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional

from ipex_core.library.checks import (
    PRODUCT_TOLERANCE,
    acc,
    check_device,
    check_dtype,
    check_dtype_in,
    check_kind,
    check_shape,
    check_tensor,
    dtype_name,
    randn,
    strided,
)
from ipex_core.library.kernels import register_op
from ipex_core.library.spec import Arguments, BenchCase, Sample, check
from ipex_core.ops.linear import (
    apply_epilogue,
    check_activation,
    check_operands,
    stored_dtype,
    weight_rows,
)
from ipex_core.packing import dense
from ipex_core.packing.dense import interleave_gate_up

OP = "grouped_linear"


def check_offset_values(op: str, offsets: Tensor, rows: int) -> list[int]:
    """Return the offsets after checking that they cut ``rows`` rows into groups."""
    values: list[int] = offsets.tolist()
    check(values[0] == 0, op, "offsets", "start with 0", values[0])
    for before, value in itertools.pairwise(values):
        check(before <= value, op, "offsets", "not decrease", f"{value} after {before}")
    check(values[-1] == rows, op, "offsets", f"end with x.shape[0] = {rows}", values[-1])
    return values


def check_packed_rows(
    op: str, name: str, packed: Tensor, count: int, n: int, k: int, dtype: torch.dtype
) -> None:
    """Check that a tensor has the dtype and shape of ``count`` packed ``[n, k]`` weights."""
    size = dense.packed_bytes(n, k, dtype)
    check(
        packed.dtype == torch.uint8 and packed.shape == (count, size) and packed.is_contiguous(),
        op,
        name,
        f"be {count} {dtype_name(dtype)} weights of shape [{n}, {k}] packed by"
        f" pack_linear_weight, a row of {size} bytes each",
        dense.bytes_text(packed),
    )


def unpack_rows(
    op: str, name: str, packed: Tensor, n: int, k: int, dtype: torch.dtype
) -> list[Tensor]:
    """Return the weights of a tensor of packed ones."""
    for i, row in enumerate(packed):
        check(
            dense.read_header(row) == (dense.FORMATS[dtype], n, k),
            op,
            name,
            f"be {len(packed)} {dtype_name(dtype)} weights of shape [{n}, {k}] packed by"
            " pack_linear_weight",
            f"{dense.header_text(row)} in row {i}",
        )
    return [dense.unpack(row, n, k, dtype) for row in packed]


def _grouped_linear(
    x: Tensor,
    offsets: Tensor,
    packed_weight: Tensor,
    out_features: int,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    activation: str = "none",
    mul: Tensor | None = None,
    residual2: Tensor | None = None,
    gate: str = "none",
) -> Tensor:
    """Apply `linear` to consecutive groups of rows, each with its own weight.

    Rows ``offsets[g]`` up to ``offsets[g + 1]`` of ``x`` are multiplied with weight ``g``; a group may be empty.

    Args:
        x: ``[T, K]``, float32, bfloat16 or float16, sorted by group.
        offsets: ``[G + 1]``, int32 or int64: 0, then the end of each group; the last is T.
        packed_weight: uint8 ``[G, bytes]``, each row the result of `pack_linear_weight` for a weight of one shape in
            the dtype of ``x``: ``[N, K]``, or with a gate ``[2 * N', K]`` with N' = N rounded up to a multiple of 32.
        out_features: The number of output features, N.
        bias: ``[G, rows of a weight]`` in the dtype of ``x`` or float32, or None.
        residual: ``[T, N]`` in the dtype of ``x``, or None.
        activation: As in `linear`.
        mul: ``[T, N]`` in the dtype of ``x``, or None.
        residual2: ``[T, N]`` in the dtype of ``x``, or None.
        gate: As in `linear`.

    Returns:
        A contiguous ``[T, N]`` tensor in the dtype of ``x``.
    """
    ends = check_offset_values(OP, offsets, x.shape[0])
    stored = x.dtype if packed_weight.shape[0] == 0 else stored_dtype(x, packed_weight[0])
    n = weight_rows(out_features, gate)
    weights = unpack_rows(OP, "packed_weight", packed_weight, n, x.shape[1], stored)
    wide = acc(x)
    parts = [wide.new_empty(0, n)]
    for g, weight in enumerate(weights):
        part = functional.linear(wide[ends[g] : ends[g + 1]], weight.to(wide.dtype))
        parts.append(part if bias is None else part + bias[g].to(wide.dtype))
    y = torch.cat(parts)
    y = apply_epilogue(y, out_features, None, activation, mul, residual, residual2, gate)
    return y.to(x.dtype)


def _check(a: Arguments) -> None:
    check_tensor(OP, "x", a.x)
    a.require(a.x.dim() == 2, "x", "be 2-D", list(a.x.shape))
    a.require(a.out_features > 0, "out_features", "be positive")
    check_activation(a.op, a.activation, a.gate)
    n = weight_rows(a.out_features, a.gate)
    check_device(OP, "offsets", a.offsets, a.x)
    check_dtype_in(OP, "offsets", a.offsets, torch.int32, torch.int64)
    fits = a.offsets.dim() == 1 and a.offsets.shape[0] > 0
    a.require(fits, "offsets", "be 1-D and not empty", list(a.offsets.shape))
    groups = a.offsets.shape[0] - 1
    check_device(OP, "packed_weight", a.packed_weight, a.x)
    check_packed_rows(OP, "packed_weight", a.packed_weight, groups, n, a.x.shape[1], a.x.dtype)
    if a.bias is not None:
        check_kind(OP, "bias", a.bias, a.x, or_float32=True)
        check_shape(OP, "bias", a.bias, [groups, n])
    check_operands(a, bias=False)


def _case(
    dtype: torch.dtype, counts: tuple[int, ...], k: int, n: int
) -> tuple[Tensor, Tensor, Tensor, int, Tensor]:
    offsets = torch.tensor((0, *counts)).cumsum(0)
    x = randn(sum(counts), k, dtype=dtype, seed=1)
    weights = (randn(n, k, dtype=dtype, seed=9 + g, scale=k**-0.5) for g in range(len(counts)))
    packed = torch.stack([dense.pack(w) for w in weights])
    return x, offsets, packed, n, randn(len(counts), n, dtype=dtype, seed=2)


def _samples(dtype: torch.dtype) -> Iterator[Sample]:
    for counts, k, n in (
        ((1,), 1, 1),
        ((2, 3), 33, 65),
        ((0, 5, 0, 1, 0), 64, 96),
        ((7, 1, 30, 2), 100, 40),
        ((70, 0, 200), 96, 130),
        ((0, 0), 8, 8),
    ):
        yield Sample(_case(dtype, counts, k, n)[:4], id="-".join(map(str, (*counts, k, n))))
    x, offsets, packed, n, bias = _case(dtype, (4, 0, 9), 40, 72)
    rows = [randn(13, 72, dtype=dtype, seed=seed) for seed in (3, 4, 5)]
    yield Sample((x, offsets.int(), packed, n, bias, None, "gelu"), id="int32_offsets")
    yield Sample((x, offsets, packed, n, bias.float(), rows[0], "silu"), id="float32_bias")
    yield Sample(
        (strided(x), offsets, packed, n, strided(bias), rows[0], "relu", strided(rows[1]), rows[2]),
        id="noncontiguous-mul-add-add",
    )
    parts = randn(2, 3, 72, 40, dtype=dtype, seed=6, scale=0.2)
    gated = torch.stack(
        [dense.pack(interleave_gate_up(parts[0, g], parts[1, g])) for g in range(3)]
    )
    gate_bias = randn(3, 192, dtype=dtype, seed=7)
    yield Sample((x, offsets, gated, n, gate_bias, rows[0], "none", None, None, "silu"), id="gate")
    yield Sample((x[:0], offsets[:1], packed[:0], n), id="no_groups")


def _bench() -> Iterator[BenchCase]:
    for groups, m, k, n in (
        (4, 8, 256, 128),
        (8, 1, 2048, 1024),
        (8, 16, 2048, 1024),
        (8, 128, 2048, 1024),
    ):
        counts = (m,) * groups
        yield BenchCase(
            f"{groups}x{m}x{k}x{n}",
            lambda dtype, c=counts, k=k, n=n: _case(dtype, c, k, n)[:4],
            lambda dtype, g=groups, m=m, k=k, n=n: g * (m * (k + n) + n * k) * dtype.itemsize,
            flops=2 * groups * m * k * n,
            rotate=m <= 32,
        )


def _stock(x: Tensor, ends: list[int], weights: list[Tensor]) -> Tensor:
    groups = zip(itertools.pairwise(ends), weights, strict=True)
    return torch.cat([functional.linear(x[a:b], w) for (a, b), w in groups])


def _stock_args(
    x: Tensor, offsets: Tensor, packed_weight: Tensor, out_features: int
) -> tuple[Tensor, list[int], list[Tensor]]:
    plain = unpack_rows(OP, "packed_weight", packed_weight, out_features, x.shape[1], x.dtype)
    return x, offsets.tolist(), plain


register_op(
    reference=_grouped_linear,
    check=_check,
    fake=lambda a: a.x.new_empty(a.x.shape[0], a.out_features),
    samples=_samples,
    stock=_stock,
    stock_args=_stock_args,
    tolerance=PRODUCT_TOLERANCE,
    bench=_bench,
    summary="Linear layers of groups of rows, each group with its own packed weight",
)


# --- batches of matrix products ---------------------------------------------------------------------------------------


BMM_OP = "bmm"


def _bmm(
    a: Tensor, b: Tensor, add: Tensor | None = None, alpha: float = 1.0, out_features: int = 0
) -> Tensor:
    """Compute ``alpha * (a @ b) + add`` for each matrix of a batch.

    Products are accumulated in float32 and the result is rounded once.

    Args:
        a: ``[B, M, K]``, float32, bfloat16 or float16.
        b: ``[B, K, N]`` in the dtype of ``a``; a transposed ``[B, N, K]`` is read in place. Or packed, for factors
            that are used again and again: uint8 ``[B, bytes]``, each row the result of `pack_linear_weight` for the
            ``[N, K]`` transpose of a factor.
        add: ``[B, M, N]`` in the dtype of ``a``, or None.
        alpha: Factor of the products.
        out_features: N where ``b`` is packed; else N or 0.

    Returns:
        A contiguous ``[B, M, N]`` tensor in the dtype of ``a``.
    """
    wide = acc(a)
    if b.dtype == torch.uint8:
        stored = a.dtype if b.shape[0] == 0 else stored_dtype(a, b[0])
        weights = unpack_rows(BMM_OP, "b", b, out_features, a.shape[2], stored)
        parts = [m @ w.to(wide.dtype).t() for m, w in zip(wide, weights, strict=True)]
        y = torch.stack(parts) if parts else wide.new_empty(0, a.shape[1], out_features)
    else:
        y = torch.bmm(wide, b.to(wide.dtype))
    y = y * alpha
    if add is not None:
        y = y + acc(add)
    return y.to(a.dtype)


def _bmm_check(a: Arguments) -> None:
    check_tensor(BMM_OP, "a", a.a, min_dim=3)
    a.require(a.a.dim() == 3, "a", "be 3-D", list(a.a.shape))
    batch, m, k = a.a.shape
    check_device(BMM_OP, "b", a.b, a.a, "a")
    if a.b.dtype == torch.uint8:
        a.require(a.out_features > 0, "out_features", "be positive where b is packed")
        check_packed_rows(BMM_OP, "b", a.b, batch, a.out_features, k, a.a.dtype)
        n = a.out_features
    else:
        check_dtype(BMM_OP, "b", a.b, a.a, "a")
        fits = a.b.dim() == 3 and list(a.b.shape[:2]) == [batch, k]
        a.require(fits, "b", f"have shape [{batch}, {k}, N]", list(a.b.shape))
        n = a.b.shape[2]
        a.require(a.out_features in (0, n), "out_features", f"be b.shape[2] = {n} or 0")
    if a.add is not None:
        check_kind(BMM_OP, "add", a.add, a.a, "a")
        shape = [batch, m, n]
        check_shape(BMM_OP, "add", a.add, shape)


def _bmm_fake(a: Arguments) -> Tensor:
    n = a.out_features if a.b.dtype == torch.uint8 else a.b.shape[2]
    return a.a.new_empty(a.a.shape[0], a.a.shape[1], n)


def _factors(dtype: torch.dtype, batch: int, m: int, k: int, n: int) -> tuple[Tensor, Tensor]:
    a = randn(batch, m, k, dtype=dtype, seed=1)
    return a, randn(batch, k, n, dtype=dtype, seed=2, scale=max(k, 1) ** -0.5)


def _pack(b: Tensor) -> Tensor:
    return torch.stack([dense.pack(one.t()) for one in b])


def _bmm_samples(dtype: torch.dtype) -> Iterator[Sample]:
    for shape in (
        (1, 1, 1, 1),
        (2, 3, 5, 7),
        (3, 1, 65, 40),
        (4, 33, 32, 64),
        (2, 70, 100, 130),
        (1, 300, 17, 33),
    ):
        name = "x".join(map(str, shape))
        a, b = _factors(dtype, *shape)
        yield Sample((a, b), id=name)
        yield Sample((a, b.mT.contiguous().mT), id=f"{name}-transposed")
        yield Sample((a, _pack(b), None, 1.0, shape[3]), id=f"{name}-packed")
    a, b = _factors(dtype, 3, 9, 40, 50)
    add = randn(3, 9, 50, dtype=dtype, seed=3)
    yield Sample((a, b, add, 0.25), id="add")
    yield Sample((a, _pack(b), add, -2.0, 50), id="packed-add")
    heads = randn(9, 3, 40, dtype=dtype, seed=4).transpose(0, 1)
    yield Sample((heads, b, strided(add)), id="heads")
    # One product by columns, as gradients of weights are, and one with many rows.
    a1, b1 = _factors(dtype, 1, 70, 45, 40)
    add1 = randn(1, 1, 40, dtype=dtype, seed=5).expand(1, 70, 40)
    yield Sample((a1.mT.contiguous().mT, b1, add1, 0.5), id="one-by_columns")
    yield Sample(_factors(dtype, 1, 1030, 19, 35), id="one-many_rows")
    yield Sample((strided(a), strided(b), None, 1.0, 50), id="noncontiguous")
    yield Sample((a[:, :0], b), id="no_rows")
    yield Sample((a[:, :, :0], b[:, :0], add), id="no_sums")
    yield Sample((a[:0], b[:0]), id="no_batch")
    a = a.clone()
    a[0, 1, 2], a[1, 2, 3] = float("nan"), float("inf")
    yield Sample((a, b), id="special_values")


def _bmm_bench() -> Iterator[BenchCase]:
    def make(shape: tuple[int, ...], transposed: bool, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        a, b = _factors(dtype, *shape)
        return a, b.mT.contiguous().mT if transposed else b

    for shape in (
        (16, 1, 512, 128),
        (32, 1, 128, 1024),
        (32, 4, 128, 128),
        (32, 128, 128, 128),
        (16, 512, 64, 512),
        (8, 512, 512, 512),
    ):
        batch, m, k, n = shape
        for name, transposed in (("", False), ("-transposed", True)):
            yield BenchCase(
                "x".join(map(str, shape)) + name,
                functools.partial(make, shape, transposed),
                lambda dtype, moved=batch * (m * k + k * n + m * n): moved * dtype.itemsize,
                flops=2 * batch * m * k * n,
            )


register_op(
    reference=_bmm,
    check=_bmm_check,
    fake=_bmm_fake,
    autocast="lower_precision_unless_packed",
    samples=_bmm_samples,
    stock=torch.bmm,
    tolerance=PRODUCT_TOLERANCE,
    bench=_bmm_bench,
    summary="Batch of matrix products, scaled, with a sum; second factor plain or packed",
)

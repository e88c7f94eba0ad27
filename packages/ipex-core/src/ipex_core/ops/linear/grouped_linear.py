# SPDX-License-Identifier: Apache-2.0
"""Linear layers of several groups of rows, each with a weight of its own (grouped GEMM)."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch
from torch.nn import functional

from ipex_core.library.arguments import Arguments
from ipex_core.library.checks import (
    acc,
    check_device,
    check_dtype,
    check_dtype_in,
    check_shape,
    check_tensor,
    dtype_name,
    randn,
    strided,
)
from ipex_core.library.kernels import register
from ipex_core.library.spec import BenchCase, OpSpec, Sample, check
from ipex_core.ops.linear.epilogue import (
    apply_epilogue,
    check_activation,
    check_operands,
    weight_rows,
)
from ipex_core.ops.linear.linear import stored_dtype
from ipex_core.packing import dense
from ipex_core.packing.dense import interleave_gate_up

Tensor = torch.Tensor
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
    check(a.x.dim() == 2, OP, "x", "be 2-D", list(a.x.shape))
    check(a.out_features > 0, OP, "out_features", "be positive", a.out_features)
    check_activation(OP, a.activation, a.gate)
    n = weight_rows(a.out_features, a.gate)
    check_device(OP, "offsets", a.offsets, a.x)
    check_dtype_in(OP, "offsets", a.offsets, torch.int32, torch.int64)
    check(
        a.offsets.dim() == 1 and a.offsets.shape[0] > 0,
        OP,
        "offsets",
        "be 1-D and not empty",
        list(a.offsets.shape),
    )
    groups = a.offsets.shape[0] - 1
    check_device(OP, "packed_weight", a.packed_weight, a.x)
    check_packed_rows(OP, "packed_weight", a.packed_weight, groups, n, a.x.shape[1], a.x.dtype)
    if a.bias is not None:
        check_device(OP, "bias", a.bias, a.x)
        check_dtype(OP, "bias", a.bias, a.x, or_float32=True)
        check_shape(OP, "bias", a.bias, [groups, n])
    check_operands(OP, a.x, a.out_features, None, a.mul, a.residual, a.residual2, a.gate)


def _fake(a: Arguments) -> Tensor:
    return a.x.new_empty(a.x.shape[0], a.out_features)


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


register(
    OpSpec(
        name=OP,
        schema=(
            "(Tensor x, Tensor offsets, Tensor packed_weight, int out_features, Tensor? bias=None,"
            ' Tensor? residual=None, str activation="none", Tensor? mul=None, Tensor? residual2=None,'
            ' str gate="none") -> Tensor'
        ),
        reference=_grouped_linear,
        check=_check,
        fake=_fake,
        samples=_samples,
        stock=_stock,
        stock_args=_stock_args,
        tolerance={
            torch.float32: (1e-4, 1e-4),
            torch.bfloat16: (1.6e-2, 2e-2),
            torch.float16: (4e-3, 4e-3),
        },
        bench=_bench,
        summary="Linear layers of groups of rows, each group with its own packed weight",
    )
)

# SPDX-License-Identifier: Apache-2.0
"""Many embedding bags of int8 tables in one call."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.nn import functional as F

from ipex_core.library.arguments import Arguments
from ipex_core.library.checks import acc, check_device, check_shape, check_tensor, randn, strided
from ipex_core.library.kernels import register
from ipex_core.library.spec import BenchCase, OpSpec, Sample
from ipex_core.ops.embedding.bags import (
    bags_of,
    check_bags,
    check_dense,
    check_table_list,
    check_values,
    indices_for,
    large_tables,
    tables_for,
)

Tensor = torch.Tensor

_NAME = "merged_embeddingbag_int8_cat_forward"


def quantize_table(table: Tensor) -> tuple[Tensor, Tensor]:
    """Return int8 numbers and a float32 scale for each row, whose products are next to a table.

    Args:
        table: ``[rows, D]``, floating and finite.

    Returns:
        ``[rows, D]`` int8 in [-127, 127], and ``[rows]`` float32.
    """
    wide = table.detach().float()
    most = wide.abs().amax(1) if wide.shape[1] else wide.new_zeros(wide.shape[0])
    scale = torch.where(most > 0, most / 127, 1.0)
    return (wide / scale[:, None]).round().clamp(-127, 127).to(torch.int8), scale


def _forward(
    dense: Tensor,
    weights: Sequence[Tensor],
    scales: Sequence[Tensor],
    indices: Sequence[Tensor],
    offsets: Sequence[Tensor],
    pooling_mode: str = "sum",
    include_last_offset: bool = False,
) -> Tensor:
    """Dense features of each sample and the bags of T int8 tables, side by side.

    Args:
        dense: ``[B, D]``, float32, bfloat16 or float16.
        weights: T int8 tables ``[rows, D]`` of one D.
        scales: T vectors ``[rows]``, float32: what the numbers of a row are multiplied by.
        indices: T vectors of rows, int32 or int64, the bags of a table one after the other.
        offsets: T vectors in the dtype of the indices: where each of the B bags begins.
        pooling_mode: ``"sum"`` or ``"mean"`` of the rows of a bag; an empty bag gives zeros.
        include_last_offset: Whether the last offset is the end of the last bag.

    Returns:
        ``[B, (T + 1) * D]`` in the dtype of ``dense``, contiguous; summed in float32 and rounded once.

    Raises:
        RuntimeError: An argument does not fit, an index is not in its table, or offsets decrease.
    """
    check_values(_NAME, weights, indices, offsets)
    dtype = acc(dense).dtype
    bags = bags_of(indices, offsets, [], pooling_mode, include_last_offset, dtype)
    results = [dense]
    for weight, scale, table in zip(weights, scales, bags, strict=True):
        factors = scale[table.rows].to(dtype) * table.scale
        rows = weight[table.rows].to(dtype) * factors[:, None]
        results.append(table.pool(rows).to(dense.dtype))
    return torch.cat(results, 1)


def _check(a: Arguments) -> None:
    check_tensor(_NAME, "dense", a.dense)
    check_bags(
        _NAME,
        a.weights,
        a.indices,
        a.offsets,
        [],
        a.pooling_mode,
        a.include_last_offset,
        (torch.int8,),
    )
    check_table_list(_NAME, "scales", a.scales, len(a.weights))
    for i, scale in enumerate(a.scales):
        name = f"scales[{i}]"
        check_device(_NAME, name, scale, a.weights[0], "weights[0]")
        check_tensor(_NAME, name, scale, (torch.float32,))
        wanted = [a.weights[i].shape[0]]
        check_shape(_NAME, name, scale, wanted)
    check_device(_NAME, "dense", a.dense, a.weights[0], "weights[0]")
    check_dense(_NAME, a.dense, a.weights, a.offsets, a.include_last_offset)


def _fake(a: Arguments) -> Tensor:
    return a.dense.new_empty(a.dense.shape[0], (len(a.weights) + 1) * a.dense.shape[1])


def _quantized(tables: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    pairs = [quantize_table(table) for table in tables]
    return [pair[0] for pair in pairs], [pair[1] for pair in pairs]


def _samples(dtype: torch.dtype) -> Iterator[Sample]:
    for rows, bags, most, dim in (
        ((1,), 1, 1, 1),
        ((5, 1, 9), 4, 3, 7),
        ((30, 17), 6, 5, 16),
        ((50, 3, 8), 33, 1, 64),
        ((40, 200), 9, 30, 130),
    ):
        tables = _quantized(tables_for(rows, dim, torch.float32))
        lookups = indices_for(rows, bags, most, seed=dim)
        dense = randn(bags, dim, dtype=dtype, seed=95)
        for mode in ("sum", "mean"):
            name = f"{len(rows)}x{bags}x{dim}-{mode}"
            yield Sample((dense, *tables, *lookups, mode, False), id=name)
    rows, dim = (50, 3, 8), 24
    weights, scales = _quantized(tables_for(rows, dim, torch.float32))
    dense = randn(12, dim, dtype=dtype, seed=96)
    narrow = indices_for(rows, 12, 4, dtype=torch.int32, include_last_offset=True, seed=1)
    yield Sample((dense, weights, scales, *narrow, "mean", True), id="int32-last_offset")
    indices, offsets = indices_for(rows, 12, 4, seed=2)
    wide = [strided(value) for value in weights]
    args = (strided(dense), wide, [strided(s) for s in scales], indices, offsets, "sum", False)
    yield Sample(args, id="noncontiguous")
    none, zeros = [i[:0] for i in indices], [torch.zeros_like(o) for o in offsets]
    yield Sample((dense, weights, scales, none, zeros, "mean", False), id="no_indices")
    no_bags = [o[:0] for o in offsets]
    yield Sample((dense[:0], weights, scales, none, no_bags, "sum", False), id="no_bags")


def _stock(dense: Tensor, weights: Sequence[Tensor], *lookups: Any) -> Tensor:
    """Stock tables have no int8 form for training frameworks: those in the dtype of the result."""
    indices, offsets = lookups
    bags = [
        F.embedding_bag(i, w, o, mode="sum")
        for w, i, o in zip(weights, indices, offsets, strict=True)
    ]
    return torch.cat([dense, *bags], 1)


def _stock_args(
    dense: Tensor,
    weights: Sequence[Tensor],
    scales: Sequence[Tensor],
    indices: Sequence[Tensor],
    offsets: Sequence[Tensor],
    *_: Any,
) -> tuple[Any, ...]:
    whole = [(w * s[:, None]).to(dense.dtype) for w, s in zip(weights, scales, strict=True)]
    return dense, whole, indices, offsets


def _bench() -> Iterator[BenchCase]:
    for name, count, rows, bags, most, dim in (
        ("26x2048x128", 26, 20000, 2048, 1, 128),
        ("26x2048x128-10", 26, 20000, 2048, 20, 128),
        ("26x128x128", 26, 2000, 128, 1, 128),
    ):

        def make(
            dtype: torch.dtype,
            count: int = count,
            rows: int = rows,
            bags: int = bags,
            most: int = most,
            dim: int = dim,
        ) -> tuple[Any, ...]:
            tables = _quantized(large_tables(count, rows, dim, torch.float32))
            lookups = indices_for([rows] * count, bags, most)
            return randn(bags, dim, dtype=dtype), *tables, *lookups, "sum", False

        lookups = count * bags * (most if most == 1 else most / 2)
        outputs = (count + 2) * bags * dim
        yield BenchCase(
            name,
            make,
            lambda dtype, n=lookups, m=outputs, d=dim: int(n * (d + 12) + m * dtype.itemsize),
        )


register(
    OpSpec(
        name=_NAME,
        schema=(
            "(Tensor dense, Tensor[] weights, Tensor[] scales, Tensor[] indices, Tensor[] offsets,"
            " str pooling_mode, bool include_last_offset) -> Tensor"
        ),
        reference=_forward,
        check=_check,
        fake=_fake,
        samples=_samples,
        stock=_stock,
        stock_args=_stock_args,
        backward=None,
        bench=_bench,
        summary="Dense features and many embedding bags of int8 tables, side by side",
    )
)

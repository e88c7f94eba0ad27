# SPDX-License-Identifier: Apache-2.0
"""Many embedding bags in one call."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.nn import functional as F

from ipex_core.library.arguments import Arguments
from ipex_core.library.checks import acc, check_device, check_dtype, randn, strided
from ipex_core.library.kernels import register
from ipex_core.library.spec import PORTABLE, BenchCase, OpSpec, Sample
from ipex_core.ops.embedding.bags import (
    bag_count,
    bags_of,
    check_bags,
    check_dense,
    check_values,
    indices_for,
    large_tables,
    tables_for,
)

Tensor = torch.Tensor

_FORWARD, _CAT = "merged_embeddingbag_forward", "merged_embeddingbag_cat_forward"


def _forward(
    weights: Sequence[Tensor],
    indices: Sequence[Tensor],
    offsets: Sequence[Tensor],
    per_sample_weights: Sequence[Tensor],
    pooling_mode: str = "sum",
    include_last_offset: bool = False,
) -> Tensor:
    """Look up rows of T embedding tables and add the rows of each bag, as T calls of ``embedding_bag`` do.

    Args:
        weights: T tables ``[rows, D]`` of one D and dtype: float32, bfloat16 or float16.
        indices: T vectors of rows, int32 or int64, the bags of a table one after the other.
        offsets: T vectors in the dtype of the indices: where each of the B bags begins. A bag may be empty.
        per_sample_weights: A factor for each index, in the dtype of the tables; an empty list for none.
        pooling_mode: ``"sum"`` or ``"mean"`` of the rows of a bag; an empty bag gives zeros.
        include_last_offset: Whether the last offset is the end of the last bag.

    Returns:
        ``[T, B, D]``, contiguous; summed in float32 and rounded once.

    Raises:
        RuntimeError: An argument does not fit, an index is not in its table, or offsets decrease.
    """
    check_values(_FORWARD, weights, indices, offsets)
    dtype = acc(weights[0]).dtype
    bags = bags_of(indices, offsets, per_sample_weights, pooling_mode, include_last_offset, dtype)
    results = []
    for weight, table in zip(weights, bags, strict=True):
        results.append(table.pool(acc(weight[table.rows]) * table.scale[:, None]))
    return torch.stack(results).to(weights[0].dtype)


def _cat(
    weights: Sequence[Tensor],
    indices: Sequence[Tensor],
    offsets: Sequence[Tensor],
    dense: Tensor,
    pooling_mode: str = "sum",
    include_last_offset: bool = False,
) -> Tensor:
    """The result of `merged_embeddingbag_forward` for each sample, side by side behind its dense features.

    Args:
        weights: T tables ``[rows, D]`` of one D and dtype: float32, bfloat16 or float16.
        indices: T vectors of rows, int32 or int64.
        offsets: T vectors in the dtype of the indices: where each of the B bags begins.
        dense: ``[B, D]`` in the dtype of the tables.
        pooling_mode: ``"sum"`` or ``"mean"``.
        include_last_offset: Whether the last offset is the end of the last bag.

    Returns:
        ``[B, (T + 1) * D]``, contiguous.

    Raises:
        RuntimeError: An argument does not fit, an index is not in its table, or offsets decrease.
    """
    check_values(_CAT, weights, indices, offsets)
    bags = _forward(weights, indices, offsets, [], pooling_mode, include_last_offset)
    return torch.cat([dense[None], bags]).transpose(0, 1).flatten(1)


def _check(a: Arguments) -> None:
    check_bags(
        _FORWARD,
        a.weights,
        a.indices,
        a.offsets,
        a.per_sample_weights,
        a.pooling_mode,
        a.include_last_offset,
    )


def _check_cat(a: Arguments) -> None:
    check_bags(_CAT, a.weights, a.indices, a.offsets, [], a.pooling_mode, a.include_last_offset)
    check_device(_CAT, "dense", a.dense, a.weights[0], "weights[0]")
    check_dtype(_CAT, "dense", a.dense, a.weights[0], "weights[0]")
    check_dense(_CAT, a.dense, a.weights, a.offsets, a.include_last_offset)


def _fake(a: Arguments) -> Tensor:
    bags = bag_count(a.offsets, a.include_last_offset)
    return a.weights[0].new_empty(len(a.weights), bags, a.weights[0].shape[1])


def _fake_cat(a: Arguments) -> Tensor:
    return a.weights[0].new_empty(a.dense.shape[0], (len(a.weights) + 1) * a.dense.shape[1])


def _samples(dtype: torch.dtype) -> Iterator[Sample]:
    for rows, bags, most, dim in (
        ((1,), 1, 1, 1),
        ((5, 1, 9), 4, 3, 7),
        ((30, 17), 6, 5, 16),
        ((50, 3, 8, 20), 33, 1, 64),
        ((40, 200), 9, 30, 130),
        ((60,) * 26, 20, 2, 32),
    ):
        name = f"{len(rows)}x{bags}x{dim}"
        tables = tables_for(rows, dim, dtype)
        lookups = indices_for(rows, bags, most, seed=dim)
        yield Sample((tables, *lookups, [], "sum", False), id=f"{name}-sum")
        yield Sample((tables, *lookups, [], "mean", False), id=f"{name}-mean")
    rows, dim = (50, 3, 8), 24
    tables = tables_for(rows, dim, dtype)
    narrow = indices_for(rows, 12, 4, dtype=torch.int32, include_last_offset=True, seed=1)
    yield Sample((tables, *narrow, [], "mean", True), id="int32-last_offset")
    indices, offsets = indices_for(rows, 12, 4, seed=2)
    factors = [randn(i.shape[0], dtype=dtype, seed=90) for i in indices]
    yield Sample((tables, indices, offsets, factors, "sum", False), id="factors")
    wide = [strided(value) for value in tables]
    spread = [torch.stack([i, i], 1)[:, 0] for i in indices]
    yield Sample((wide, spread, offsets, [], "sum", False), id="noncontiguous")
    slices = [randn(n, 40, dtype=dtype, seed=91)[:, 8:32] for n in rows]
    yield Sample((slices, indices, offsets, [], "sum", False), id="row_stride")
    shared = [tables[0]] * 3
    yield Sample((shared, [indices[1]] * 3, [offsets[1]] * 3, [], "sum", False), id="one_table")
    ends = [torch.cat([o, o[-1:]]) for o in offsets]
    yield Sample((tables, indices, ends, [], "sum", True), id="unused_indices")
    none = [i[:0] for i in indices]
    zeros = [torch.zeros_like(o) for o in offsets]
    yield Sample((tables, none, zeros, [], "mean", False), id="no_indices")
    yield Sample((tables, none, [o[:0] for o in offsets], [], "sum", False), id="no_bags")
    special = tables_for(rows, dim, dtype)
    special[0][:, 3], special[1][:, 5] = float("nan"), float("inf")
    yield Sample((special, indices, offsets, [], "sum", False), id="special_values")


def _samples_cat(dtype: torch.dtype) -> Iterator[Sample]:
    for sample in _samples(dtype):
        weights, indices, offsets, factors, pooling_mode, last = sample.args
        if factors:
            continue
        shape = (bag_count(offsets, last), weights[0].shape[1])
        dense = randn(*shape, dtype=dtype, seed=95)
        yield Sample((weights, indices, offsets, dense, pooling_mode, last), id=sample.id)
    yield Sample(
        (weights, indices, offsets, strided(dense), pooling_mode, last), id="dense_noncontiguous"
    )


def _stock(
    weights: Sequence[Tensor],
    indices: Sequence[Tensor],
    offsets: Sequence[Tensor],
    per_sample_weights: Sequence[Tensor],
    pooling_mode: str = "sum",
    include_last_offset: bool = False,
) -> list[Tensor]:
    return [
        F.embedding_bag(i, w, o, mode=pooling_mode, include_last_offset=include_last_offset)
        for w, i, o in zip(weights, indices, offsets, strict=True)
    ]


def _portable(
    weights: Sequence[Tensor],
    indices: Sequence[Tensor],
    offsets: Sequence[Tensor],
    per_sample_weights: Sequence[Tensor],
    pooling_mode: str = "sum",
    include_last_offset: bool = False,
) -> Any:
    """Do without the op in an exported program that cannot call it: torch 2.13 hands empty lists over as None."""
    if per_sample_weights:
        return NotImplemented
    return torch.stack(
        _stock(weights, indices, offsets, per_sample_weights, pooling_mode, include_last_offset)
    )


def _stock_cat(
    weights: Sequence[Tensor],
    indices: Sequence[Tensor],
    offsets: Sequence[Tensor],
    dense: Tensor,
    pooling_mode: str = "sum",
    include_last_offset: bool = False,
) -> Tensor:
    return torch.cat(
        [dense, *_stock(weights, indices, offsets, [], pooling_mode, include_last_offset)], 1
    )


def _bench_shapes() -> Iterator[tuple[str, int, int, int, int, int]]:
    """Tables, rows, bags, lookups per bag at most (or exactly 1), numbers per row."""
    yield "26x2048x128", 26, 20000, 2048, 1, 128
    yield "26x2048x128-10", 26, 20000, 2048, 20, 128
    yield "26x128x128", 26, 2000, 128, 1, 128
    yield "8x64x32", 8, 1000, 64, 4, 32


def _make(dtype: torch.dtype, shape: tuple[int, ...], cat: bool) -> tuple[Any, ...]:
    count, rows, bags, most, dim = shape
    tables = large_tables(count, rows, dim, dtype)
    indices, offsets = indices_for([rows] * count, bags, most)
    more: Tensor | list[Tensor] = randn(bags, dim, dtype=dtype) if cat else []
    return tables, indices, offsets, more, "sum", False


def _bench_for(cat: bool) -> Iterator[BenchCase]:
    for name, count, rows, bags, most, dim in _bench_shapes():
        shape = (count, rows, bags, most, dim)
        lookups = count * bags * (most if most == 1 else most / 2)
        outputs = (count + 2 * cat) * bags
        yield BenchCase(
            name,
            lambda dtype, s=shape: _make(dtype, s, cat),
            lambda dtype, n=lookups, m=outputs, d=dim: int(
                n * (d * dtype.itemsize + 8) + m * d * dtype.itemsize
            ),
        )


_SCHEMA = (
    "(Tensor[] weights, Tensor[] indices, Tensor[] offsets, {}, str pooling_mode, "
    "bool include_last_offset) -> Tensor"
)

register(
    OpSpec(
        name=_FORWARD,
        schema=_SCHEMA.format("Tensor[] per_sample_weights"),
        reference=_forward,
        check=_check,
        fake=_fake,
        samples=_samples,
        stock=_stock,
        backward=None,
        bench=lambda: _bench_for(False),
        summary="Many embedding bags in one call",
    )
)

PORTABLE[torch.ops.ipex.merged_embeddingbag_forward.default] = _portable

register(
    OpSpec(
        name=_CAT,
        schema=_SCHEMA.format("Tensor dense"),
        reference=_cat,
        check=_check_cat,
        fake=_fake_cat,
        samples=_samples_cat,
        stock=_stock_cat,
        backward=None,
        bench=lambda: _bench_for(True),
        summary="Dense features and many embedding bags, side by side",
    )
)

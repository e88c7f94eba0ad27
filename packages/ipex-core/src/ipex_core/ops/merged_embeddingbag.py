# SPDX-License-Identifier: Apache-2.0
"""Many embedding bags in one call, of float and of int8 tables; checks and samples for their update, too."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ipex_core.library.checks import (
    acc,
    check_device,
    check_kind,
    check_shape,
    check_tensor,
    dtype_name,
    randn,
    strided,
)
from ipex_core.library.kernels import register_op
from ipex_core.library.spec import FLOATS, PORTABLE, Arguments, BenchCase, Sample, check

_INDEX_DTYPES = (torch.int32, torch.int64)


def check_table_list(op: str, name: str, values: Sequence[Tensor], tables: int) -> None:
    """Check that a list has one tensor per table."""
    check(len(values) == tables, op, name, f"hold {tables} tensor(s), one per table", len(values))


def _check_index(op: str, name: str, value: Tensor, weight: Tensor, dtype: torch.dtype) -> None:
    check_device(op, name, value, weight, "weights[0]")
    check_tensor(op, name, value, _INDEX_DTYPES)
    check(value.dim() == 1, op, name, "be 1-D", f"{value.dim()}-D")
    text = f"have the dtype of indices[0] = {dtype_name(dtype)}"
    check(value.dtype == dtype, op, name, text, dtype_name(value.dtype))


def check_bags(a: Arguments, dtypes: Sequence[torch.dtype] = FLOATS) -> None:
    """Check everything but the values of indices and offsets."""
    a.require(len(a.weights) > 0, "weights", "hold at least 1 tensor", 0)
    first = a.weights[0]
    check_tensor(a.op, "weights[0]", first, dtypes)
    a.require(first.dim() == 2, "weights[0]", "be 2-D [rows, D]", f"{first.dim()}-D")
    dim = first.shape[1]
    for i, weight in enumerate(a.weights):
        name = f"weights[{i}]"
        check_kind(a.op, name, weight, first, "weights[0]")
        fits = weight.dim() == 2 and weight.shape[1] == dim
        a.require(fits, name, f"have shape [rows, {dim}]", list(weight.shape))
    known, mode = a.pooling_mode in ("sum", "mean"), repr(a.pooling_mode)
    a.require(known, "pooling_mode", "be 'sum' or 'mean'", mode)
    tables = len(a.weights)
    check_table_list(a.op, "indices", a.indices, tables)
    check_table_list(a.op, "offsets", a.offsets, tables)
    for i, value in enumerate(a.indices):
        _check_index(a.op, f"indices[{i}]", value, first, a.indices[0].dtype)
    for i, value in enumerate(a.offsets):
        name = f"offsets[{i}]"
        _check_index(a.op, name, value, first, a.indices[0].dtype)
        least = 1 if a.include_last_offset else 0
        a.require(value.shape[0] >= least, name, f"have at least {least} element(s)", 0)
        wanted = f"have the shape of offsets[0] = {list(a.offsets[0].shape)}"
        a.require(value.shape == a.offsets[0].shape, name, wanted, list(value.shape))
    factors = vars(a).get("per_sample_weights")
    if not factors:
        return
    check_table_list(a.op, "per_sample_weights", factors, tables)
    a.require(a.pooling_mode == "sum", "pooling_mode", "be 'sum' with per_sample_weights", mode)
    for i, value in enumerate(factors):
        name = f"per_sample_weights[{i}]"
        check_kind(a.op, name, value, first, "weights[0]")
        check_shape(a.op, name, value, list(a.indices[i].shape))


def _check_dense(a: Arguments) -> None:
    """Check that there is a row of features for each bag, of the size of the rows of the tables."""
    shape = [bag_count(a.offsets, a.include_last_offset), a.weights[0].shape[1]]
    check_shape(a.op, "dense", a.dense, shape)


def bag_count(offsets: Sequence[Tensor], include_last_offset: bool) -> int:
    """Return how many bags each table has."""
    return offsets[0].shape[0] - int(include_last_offset)


def check_values(
    op: str, weights: Sequence[Tensor], indices: Sequence[Tensor], offsets: Sequence[Tensor]
) -> None:
    """Check the values of indices and offsets."""
    for i, (weight, index, offset) in enumerate(zip(weights, indices, offsets, strict=True)):
        starts = offset.tolist()
        if starts:
            check(starts[0] == 0, op, f"offsets[{i}]", "begin with 0", starts[0])
        for before, after in itertools.pairwise(starts):
            check(after >= before, op, f"offsets[{i}]", "not decrease", f"{after} after {before}")
        count = index.shape[0]
        if starts:
            expected = f"not exceed the number of indices = {count}"
            check(starts[-1] <= count, op, f"offsets[{i}]", expected, starts[-1])
        rows = weight.shape[0]
        for row in index[(index < 0) | (index >= rows)].tolist():
            check(False, op, f"indices[{i}]", f"hold rows in [0, {rows})", row)


class Bags:
    """The bags of one table.

    Attributes:
        rows: The row of each lookup that is in a bag, int64.
        bag: The bag of each, int64.
        scale: The factor of each, in the dtype it was made for.
        count: The number of bags.
    """

    def __init__(
        self,
        indices: Tensor,
        offsets: Tensor,
        factors: Tensor | None,
        pooling_mode: str,
        include_last_offset: bool,
        dtype: torch.dtype,
    ) -> None:
        starts = offsets.long()
        if not include_last_offset:
            starts = torch.cat([starts, starts.new_tensor([indices.shape[0]])])
        sizes = starts.diff()
        self.count = sizes.shape[0]
        self.bag = torch.repeat_interleave(torch.arange(self.count, device=sizes.device), sizes)
        self.rows = indices[: self.bag.shape[0]].long()
        if factors is not None:
            self.scale = factors[: self.bag.shape[0]].to(dtype)
        elif pooling_mode == "mean":
            self.scale = sizes.to(dtype).reciprocal()[self.bag]
        else:
            self.scale = torch.ones(self.bag.shape[0], dtype=dtype, device=sizes.device)

    def pool(self, rows: Tensor) -> Tensor:
        """Return the sums ``[count, D]`` of the rows ``[lookups, D]`` of each bag."""
        return rows.new_zeros(self.count, rows.shape[1]).index_add_(0, self.bag, rows)


def bags_of(
    indices: Sequence[Tensor],
    offsets: Sequence[Tensor],
    per_sample_weights: Sequence[Tensor],
    pooling_mode: str,
    include_last_offset: bool,
    dtype: torch.dtype,
) -> list[Bags]:
    """Return the bags of each table."""
    factors: Sequence[Tensor | None] = per_sample_weights or [None for _ in indices]
    return [
        Bags(i, o, f, pooling_mode, include_last_offset, dtype)
        for i, o, f in zip(indices, offsets, factors, strict=True)
    ]


def tables_for(rows: Sequence[int], dim: int, dtype: torch.dtype, seed: int = 80) -> list[Tensor]:
    """Return random tables with these numbers of rows."""
    return [randn(n, dim, dtype=dtype, seed=seed + i) for i, n in enumerate(rows)]


def large_tables(count: int, rows: int, dim: int, dtype: torch.dtype) -> list[Tensor]:
    """Return tables for a benchmark: random numbers, the same in each thousand rows, so quickly made."""
    block = randn(1000, dim, dtype=dtype, seed=80)
    return [block.repeat(-(-rows // 1000), 1)[:rows] for _ in range(count)]


def indices_for(
    rows: Sequence[int],
    bags: int,
    most: int,
    *,
    dtype: torch.dtype = torch.int64,
    include_last_offset: bool = False,
    seed: int = 0,
) -> tuple[list[Tensor], list[Tensor]]:
    """Return random indices and offsets: ``bags`` bags of 0 to ``most`` lookups per table; exactly 1 if that is 1."""
    generator = torch.Generator().manual_seed(seed)
    indices, offsets = [], []
    for n in rows:
        sizes = torch.randint(int(most == 1), most + 1, (bags,), generator=generator)
        ends = torch.cat([torch.zeros(1, dtype=torch.int64), sizes.cumsum(0)])
        indices.append(torch.randint(n, (int(ends[-1]),), generator=generator).to(dtype))
        offsets.append((ends if include_last_offset else ends[:-1]).to(dtype))
    return indices, offsets


# --- float tables -----------------------------------------------------------------------------------------------------


_FORWARD, _CAT = "merged_embeddingbag_forward", "merged_embeddingbag_cat_forward"


def _float_forward(
    weights: Sequence[Tensor],
    indices: Sequence[Tensor],
    offsets: Sequence[Tensor],
    per_sample_weights: Sequence[Tensor],
    pooling_mode: str,
    include_last_offset: bool,
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
    pooling_mode: str,
    include_last_offset: bool,
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
    bags = _float_forward(weights, indices, offsets, [], pooling_mode, include_last_offset)
    return torch.cat([dense[None], bags]).transpose(0, 1).flatten(1)


def _check_cat(a: Arguments) -> None:
    check_bags(a)
    check_kind(_CAT, "dense", a.dense, a.weights[0], "weights[0]")
    _check_dense(a)


def _float_fake(a: Arguments) -> Tensor:
    bags = bag_count(a.offsets, a.include_last_offset)
    return a.weights[0].new_empty(len(a.weights), bags, a.weights[0].shape[1])


def _fake_cat(a: Arguments) -> Tensor:
    return a.weights[0].new_empty(a.dense.shape[0], (len(a.weights) + 1) * a.dense.shape[1])


def _float_samples(dtype: torch.dtype) -> Iterator[Sample]:
    for rows, bags, most, dim in (
        ((1,), 1, 1, 1),
        ((5, 1, 9), 4, 3, 7),
        ((30, 17), 6, 5, 16),
        ((50, 3, 8, 20), 33, 1, 64),
        ((40, 200), 9, 30, 130),
        ((60,) * 26, 20, 2, 32),
        ((12, 25), 5, 4, 90),  # as many vectors as no other case has
        ((12, 25), 5, 4, 247),
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
    for sample in _float_samples(dtype):
        weights, indices, offsets, factors, pooling_mode, last = sample.args
        if factors:
            continue
        shape = (bag_count(offsets, last), weights[0].shape[1])
        dense = randn(*shape, dtype=dtype, seed=95)
        yield Sample((weights, indices, offsets, dense, pooling_mode, last), id=sample.id)
    yield Sample(
        (weights, indices, offsets, strided(dense), pooling_mode, last), id="dense_noncontiguous"
    )


def _float_stock(
    weights: Sequence[Tensor],
    indices: Sequence[Tensor],
    offsets: Sequence[Tensor],
    per_sample_weights: Sequence[Tensor],
    pooling_mode: str,
    include_last_offset: bool,
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
    pooling_mode: str,
    include_last_offset: bool,
) -> Any:
    """Do without the op in an exported program that cannot call it: torch 2.13 hands empty lists over as None."""
    if per_sample_weights:
        return NotImplemented
    return torch.stack(
        _float_stock(weights, indices, offsets, [], pooling_mode, include_last_offset)
    )


def _stock_cat(
    weights: Sequence[Tensor],
    indices: Sequence[Tensor],
    offsets: Sequence[Tensor],
    dense: Tensor,
    pooling_mode: str,
    include_last_offset: bool,
) -> Tensor:
    return torch.cat(
        [dense, *_float_stock(weights, indices, offsets, [], pooling_mode, include_last_offset)], 1
    )


#: Tables, rows, bags, lookups of a bag at most (or exactly 1), numbers of a row.
Shape = tuple[int, int, int, int, int]
SHAPES: dict[str, Shape] = {
    "26x2048x128": (26, 20000, 2048, 1, 128),
    "26x2048x128-10": (26, 20000, 2048, 20, 128),
    "26x128x128": (26, 2000, 128, 1, 128),
    "8x64x32": (8, 1000, 64, 4, 32),
}


def bag_bench(
    make: Callable[[Shape, torch.dtype], tuple[Any, ...]],
    moved: Callable[[float, Shape, torch.dtype], float],
    leave_out: str = "",
) -> Iterator[BenchCase]:
    """Yield the benchmark cases of an op: what it is called with, and the bytes that its number of lookups moves."""
    for name, shape in SHAPES.items():
        if name == leave_out:
            continue
        count, _, bags, most, _ = shape
        lookups = count * bags * (most if most == 1 else most / 2)
        yield BenchCase(
            name,
            functools.partial(make, shape),
            lambda dtype, n=lookups, shape=shape: int(moved(n, shape, dtype)),
        )


def _bench_for(cat: bool) -> Iterator[BenchCase]:
    def make(shape: Shape, dtype: torch.dtype) -> tuple[Any, ...]:
        count, rows, bags, most, dim = shape
        tables = large_tables(count, rows, dim, dtype)
        indices, offsets = indices_for([rows] * count, bags, most)
        more: Tensor | list[Tensor] = randn(bags, dim, dtype=dtype) if cat else []
        return tables, indices, offsets, more, "sum", False

    def moved(lookups: float, shape: Shape, dtype: torch.dtype) -> float:
        count, _, bags, _, dim = shape
        outputs = (count + 2 * cat) * bags
        return lookups * (dim * dtype.itemsize + 8) + outputs * dim * dtype.itemsize

    return bag_bench(make, moved)


register_op(
    name=_FORWARD,
    reference=_float_forward,
    check=check_bags,
    fake=_float_fake,
    samples=_float_samples,
    stock=_float_stock,
    backward=None,
    bench=lambda: _bench_for(False),
    summary="Many embedding bags in one call",
)

PORTABLE[torch.ops.ipex.merged_embeddingbag_forward.default] = _portable

register_op(
    name=_CAT,
    reference=_cat,
    check=_check_cat,
    fake=_fake_cat,
    samples=_samples_cat,
    stock=_stock_cat,
    backward=None,
    bench=lambda: _bench_for(True),
    summary="Dense features and many embedding bags, side by side",
)


# --- int8 tables ------------------------------------------------------------------------------------------------------


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


def _int8_forward(
    dense: Tensor,
    weights: Sequence[Tensor],
    scales: Sequence[Tensor],
    indices: Sequence[Tensor],
    offsets: Sequence[Tensor],
    pooling_mode: str,
    include_last_offset: bool,
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


def _int8_check(a: Arguments) -> None:
    check_tensor(_NAME, "dense", a.dense)
    check_bags(a, (torch.int8,))
    check_table_list(_NAME, "scales", a.scales, len(a.weights))
    for i, scale in enumerate(a.scales):
        name = f"scales[{i}]"
        check_device(_NAME, name, scale, a.weights[0], "weights[0]")
        check_tensor(_NAME, name, scale, (torch.float32,))
        wanted = [a.weights[i].shape[0]]
        check_shape(_NAME, name, scale, wanted)
    check_device(_NAME, "dense", a.dense, a.weights[0], "weights[0]")
    _check_dense(a)


def _quantized(tables: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    pairs = [quantize_table(table) for table in tables]
    return [pair[0] for pair in pairs], [pair[1] for pair in pairs]


def _int8_samples(dtype: torch.dtype) -> Iterator[Sample]:
    for rows, bags, most, dim in (
        ((1,), 1, 1, 1),
        ((5, 1, 9), 4, 3, 7),
        ((30, 17), 6, 5, 16),
        ((50, 3, 8), 33, 1, 64),
        ((40, 200), 9, 30, 130),
        ((12, 25), 5, 4, 247),
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


def _int8_stock(dense: Tensor, weights: Sequence[Tensor], *lookups: Any) -> Tensor:
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
    def make(shape: Shape, dtype: torch.dtype) -> tuple[Any, ...]:
        count, rows, bags, most, dim = shape
        tables = _quantized(large_tables(count, rows, dim, torch.float32))
        lookups = indices_for([rows] * count, bags, most)
        return randn(bags, dim, dtype=dtype), *tables, *lookups, "sum", False

    def moved(lookups: float, shape: Shape, dtype: torch.dtype) -> float:
        count, _, bags, _, dim = shape
        return lookups * (dim + 12) + (count + 2) * bags * dim * dtype.itemsize

    return bag_bench(make, moved, "8x64x32")


register_op(
    name=_NAME,
    reference=_int8_forward,
    check=_int8_check,
    fake=lambda a: a.dense.new_empty(a.dense.shape[0], (len(a.weights) + 1) * a.dense.shape[1]),
    samples=_int8_samples,
    stock=_int8_stock,
    stock_args=_stock_args,
    backward=None,
    bench=_bench,
    summary="Dense features and many embedding bags of int8 tables, side by side",
)

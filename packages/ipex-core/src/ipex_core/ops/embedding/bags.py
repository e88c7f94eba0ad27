# SPDX-License-Identifier: Apache-2.0
"""Checks, definitions and samples shared by the ops on many embedding tables."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch

from ipex_core.library.checks import (
    check_device,
    check_dtype,
    check_shape,
    check_tensor,
    dtype_name,
    randn,
)
from ipex_core.library.spec import FLOATS, check

__all__ = [
    "Bags",
    "bag_count",
    "bags_of",
    "check_bags",
    "check_dense",
    "check_table_list",
    "check_values",
    "indices_for",
    "large_tables",
    "tables_for",
]

Tensor = torch.Tensor

_INDEX_DTYPES = (torch.int32, torch.int64)


def check_table_list(op: str, name: str, values: Sequence[Tensor], tables: int) -> None:
    """Check that a list has one tensor per table."""
    check(len(values) == tables, op, name, f"hold {tables} tensor(s), one per table", len(values))


def _check_index(op: str, name: str, value: Tensor, weight: Tensor, dtype: torch.dtype) -> None:
    check_device(op, name, value, weight, "weights[0]")
    check_tensor(op, name, value, _INDEX_DTYPES)
    check(value.dim() == 1, op, name, "be 1-D", f"{value.dim()}-D")
    check(
        value.dtype == dtype,
        op,
        name,
        f"have the dtype of indices[0] = {dtype_name(dtype)}",
        dtype_name(value.dtype),
    )


def check_bags(
    op: str,
    weights: Sequence[Tensor],
    indices: Sequence[Tensor],
    offsets: Sequence[Tensor],
    per_sample_weights: Sequence[Tensor],
    pooling_mode: str,
    include_last_offset: bool,
    dtypes: Sequence[torch.dtype] = FLOATS,
) -> None:
    """Check everything but the values of indices and offsets."""
    check(len(weights) > 0, op, "weights", "hold at least 1 tensor", 0)
    first = weights[0]
    check_tensor(op, "weights[0]", first, dtypes)
    check(first.dim() == 2, op, "weights[0]", "be 2-D [rows, D]", f"{first.dim()}-D")
    dim = first.shape[1]
    for i, weight in enumerate(weights):
        name = f"weights[{i}]"
        check_device(op, name, weight, first, "weights[0]")
        check_dtype(op, name, weight, first, "weights[0]")
        fits = weight.dim() == 2 and weight.shape[1] == dim
        check(fits, op, name, f"have shape [rows, {dim}]", list(weight.shape))
    known, mode = pooling_mode in ("sum", "mean"), repr(pooling_mode)
    check(known, op, "pooling_mode", "be 'sum' or 'mean'", mode)
    tables = len(weights)
    check_table_list(op, "indices", indices, tables)
    check_table_list(op, "offsets", offsets, tables)
    for i, value in enumerate(indices):
        _check_index(op, f"indices[{i}]", value, first, indices[0].dtype)
    for i, value in enumerate(offsets):
        name = f"offsets[{i}]"
        _check_index(op, name, value, first, indices[0].dtype)
        least = 1 if include_last_offset else 0
        check(value.shape[0] >= least, op, name, f"have at least {least} element(s)", 0)
        wanted = f"have the shape of offsets[0] = {list(offsets[0].shape)}"
        check(value.shape == offsets[0].shape, op, name, wanted, list(value.shape))
    if not per_sample_weights:
        return
    check_table_list(op, "per_sample_weights", per_sample_weights, tables)
    check(pooling_mode == "sum", op, "pooling_mode", "be 'sum' with per_sample_weights", mode)
    for i, value in enumerate(per_sample_weights):
        name = f"per_sample_weights[{i}]"
        check_device(op, name, value, first, "weights[0]")
        check_dtype(op, name, value, first, "weights[0]")
        shape = list(indices[i].shape)
        check_shape(op, name, value, shape)


def check_dense(
    op: str,
    dense: Tensor,
    weights: Sequence[Tensor],
    offsets: Sequence[Tensor],
    include_last_offset: bool,
) -> None:
    """Check that there is a row of features for each bag, of the size of the rows of the tables."""
    shape = [bag_count(offsets, include_last_offset), weights[0].shape[1]]
    check_shape(op, "dense", dense, shape)


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

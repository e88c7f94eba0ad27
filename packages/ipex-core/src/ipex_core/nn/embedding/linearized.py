# SPDX-License-Identifier: Apache-2.0
"""Lookups of all tables in one tensor, and the call with one argument, as IPEX 2.0 had them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

__all__ = ["linearize", "lookups_of_input"]

Tensor = torch.Tensor


def linearize(
    owner: Any,
    indices: Sequence[Tensor],
    offsets: Sequence[Tensor | None],
    include_last_offsets: Sequence[bool] | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return what `MergedEmbeddingBag.linearize_indices_and_offsets` does."""
    indices, offsets = _by_table(owner, indices, offsets, include_last_offsets, False)
    sizes = [table.numel() for table in indices]
    starts = [sum(sizes[:i]) for i in range(len(sizes) + 1)]
    rows = [0]
    for weight in owner.weights:
        rows.append(rows[-1] + weight.shape[0])
    merged = torch.cat([table.long() for table in indices])
    begins = [offset.long() + start for offset, start in zip(offsets, starts[:-1], strict=True)]
    wide = [table.long() + row for table, row in zip(indices, rows[:-1], strict=True)]
    return merged, torch.cat([*begins, merged.new_tensor(starts[-1:])]), torch.cat(wide)


def lookups_of_input(owner: Any, given: Any, needed: Any) -> tuple[list[Tensor], list[Tensor]]:
    """Return indices and offsets by table of the one argument that a module was called with.

    Args:
        owner: The module.
        given: ``(indices, offsets, include_last_offsets)`` by table, or a result of `linearize`.
        needed: Whether it is the former: a bool, or a tensor with one element.

    Raises:
        TypeError: It is neither.
        ValueError: The parts do not fit the tables.
    """
    name = type(owner).__name__
    if not isinstance(given, (tuple, list)) or len(given) != 3:
        raise TypeError(
            f"{name}: input must be (indices, offsets, include_last_offsets), or the result of"
            f" linearize_indices_and_offsets with need_linearize_indices_and_offsets=False, got {type(given).__name__}"
        )
    if bool(needed):
        if isinstance(given[0], Tensor):
            raise TypeError(
                f"{name}: offsets must be a list of tensors, one per table, got None; the result of"
                " linearize_indices_and_offsets needs need_linearize_indices_and_offsets=False"
            )
        return _by_table(owner, given[0], given[1], given[2], owner.include_last_offset)
    indices, offsets, _ = given
    if not isinstance(indices, Tensor) or not isinstance(offsets, Tensor):
        raise TypeError(
            f"{name}: input must be a result of linearize_indices_and_offsets where"
            f" need_linearize_indices_and_offsets is False, got {type(indices).__name__}"
        )
    bags, rest = divmod(offsets.numel() - 1, owner.n_tables)
    if rest:
        raise ValueError(
            f"{name}: merged offsets must have {owner.n_tables} * bags + 1 elements, got {offsets.numel()}"
        )
    edges = (
        offsets[:: max(bags, 1)][: owner.n_tables + 1].tolist()
        if bags
        else [0] * (owner.n_tables + 1)
    )
    tables, starts = [], []
    for i in range(owner.n_tables):
        tables.append(indices[edges[i] : edges[i + 1]])
        end = (i + 1) * bags + int(owner.include_last_offset)
        starts.append(offsets[i * bags : end] - edges[i])
    return tables, starts


def _by_table(
    owner: Any,
    indices: Sequence[Tensor],
    offsets: Sequence[Tensor | None],
    last: Sequence[bool] | None,
    wanted: bool,
) -> tuple[list[Tensor], list[Tensor]]:
    """Return 1-D indices, and offsets that have the end of the last bag if ``wanted``."""
    name = type(owner).__name__
    last = [owner.include_last_offset] * owner.n_tables if last is None else last
    for field, given in (
        ("indices", indices),
        ("offsets", offsets),
        ("include_last_offsets", last),
    ):
        if len(given) != owner.n_tables:
            raise ValueError(
                f"{name}: {field} must have an element per table, {owner.n_tables}, got {len(given)}"
            )
    found: list[Tensor] = []
    starts: list[Tensor] = []
    for i, (table, offset, has_last) in enumerate(zip(indices, offsets, last, strict=True)):
        if table.dim() == 2:
            if offset is not None:
                raise ValueError(f"{name}: offsets[{i}] must be None for 2-D indices, got a tensor")
            size, has_last = max(table.shape[1], 1), False
            offset = torch.arange(table.shape[0], dtype=table.dtype) * size
        elif offset is None:
            raise ValueError(f"{name}: offsets[{i}] must be a tensor for 1-D indices, got None")
        if has_last and not wanted:
            offset = offset[:-1]
        elif wanted and not has_last:
            offset = torch.cat([offset, offset.new_tensor([table.numel()])])
        found.append(table.reshape(-1))
        starts.append(offset)
    bags = {offset.numel() for offset in starts}
    if len(bags) > 1:
        raise ValueError(f"{name}: all tables must have as many bags, got {sorted(bags)}")
    return found, starts

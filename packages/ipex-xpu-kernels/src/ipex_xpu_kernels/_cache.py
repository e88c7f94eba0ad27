# SPDX-License-Identifier: Apache-2.0
"""Writes to paged caches and rotary embeddings by one table, on the kernels of the device."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from ipex_core.library.checks import read_once
from ipex_core.library.spec import FLOATS, Arguments
from ipex_core.ops.kv_cache import check_slots
from ipex_core.ops.rotary_embedding import check_rows, rows_with_offsets, table_rows
from ipex_core.ops.rotary_embedding_and_cache import cache_places
from ipex_xpu_kernels._launch import dense, kernel, launch_columns, launch_rows


def _last_of_each(slots: Tensor) -> Tensor:
    """Return the slots of tokens, -1 in the place of those that a later token has, too."""
    used = slots[slots >= 0]
    if used.unique().numel() == used.numel():
        return slots
    later: dict[int, int] = {slot: token for token, slot in enumerate(slots.tolist())}
    return torch.tensor([s if later[s] == t else -1 for t, s in enumerate(slots.tolist())])


@dataclasses.dataclass(frozen=True, slots=True)
class _Places:
    """Reads slots: where in a cache of ``capacity`` rows each token is written, int64 on the device."""

    op: str
    capacity: int

    def __call__(self, slot_mapping: Tensor) -> Tensor:
        slots = slot_mapping.cpu().long()
        check_slots(self.op, slots, self.capacity)
        return _last_of_each(slots).to(slot_mapping.device)


def _places(op: str, cache: Tensor, slot_mapping: Tensor) -> Tensor:
    """Return where in a cache tokens are written; of slots that several layers share it is found out once."""
    return read_once(slot_mapping, _Places(op, cache.shape[0] * cache.shape[2]))


@dataclasses.dataclass(frozen=True, slots=True)
class _Rows:
    """Reads positions: the rows of both tables that belong to them, float32 ``[tokens, C]``."""

    op: str
    tables: tuple[Tensor, Tensor]
    versions: tuple[int, int]

    def __call__(self, positions: Tensor) -> list[Tensor]:
        return _rows_of(self.op, self.tables, positions.shape, positions)


def _rows_of(
    op: str, tables: Iterable[Tensor], lead: Sequence[int], position_ids: Tensor | None
) -> list[Tensor]:
    found = [table_rows(op, x, x.new_empty(*lead, 1, 1), position_ids) for x in tables]
    return [rows.reshape(-1, rows.shape[-1]).float().contiguous() for rows in found]


def _rows(
    op: str, sin: Tensor, cos: Tensor, query: Tensor, position_ids: Tensor | None
) -> list[Tensor]:
    """Return rows as `_Rows` does; of positions that several layers share they are looked up once."""
    lead = query.shape[:-2]
    known = position_ids is not None and position_ids.shape == lead
    if not known or sin.is_inference() or cos.is_inference():
        return _rows_of(op, (sin, cos), lead, position_ids)
    assert position_ids is not None
    return read_once(position_ids, _Rows(op, (sin, cos), (sin._version, cos._version)))


@functools.cache
def _inverse(scale: float) -> float:
    """Return the reciprocal, rounded to float32 as the definition has it."""
    return (1.0 / torch.tensor(scale, dtype=torch.float32)).item()


def _write(x: Tensor, cache: Tensor, slots: Tensor, scale: float, scales: Tensor | None) -> None:
    """Write rows ``[tokens, heads, size]`` to the int64 ``slots`` of a cache, all on the device."""
    x = dense(x)
    tokens, heads, size = x.shape
    if cache.numel() == 0:
        return
    place = slots, heads, size, cache.shape[2], *x.stride()[:2], *cache.stride()[:3]
    if scales is not None:
        name = kernel("write_cache_scaled", x.dtype)
        launch_rows(name, x, tokens * heads, cache, scales, x, *place, *scales.stride())
        return
    name = kernel("write_cache", x.dtype, cache.dtype)
    launch_columns(name, x, tokens * heads, size, cache, x, *place, _inverse(scale))


def _reshape_and_cache(a: Arguments) -> bool:
    if a.key.dtype not in FLOATS:
        return False
    places = _places(a.op, a.key_cache, a.slot_mapping)
    _write(a.key, a.key_cache, places, a.k_scale, a.key_scales)
    _write(a.value, a.value_cache, places, a.v_scale, a.value_scales)
    return True


def _rotary_embedding_and_cache(a: Arguments) -> bool:
    if a.query.dtype not in FLOATS:
        return False
    rows = _rows(a.op, a.sin, a.cos, a.query, a.position_ids)
    if a.slot_mapping is None:
        slots = cache_places(a.query, a.key_cache, None, a.position_ids)
    else:
        slots = _places(a.op, a.key_cache, a.slot_mapping)
    heads, size = a.key.shape[-2:]
    queries, keys, values = (dense(x.flatten(0, -3)) for x in (a.query, a.key, a.value))
    tokens, query_heads = queries.shape[:2]
    pairs = a.rotary_dim // 2
    launch_columns(
        kernel("rope_and_cache", a.query.dtype, a.key_cache.dtype),
        a.query,
        tokens * (query_heads + 2 * heads),
        size,
        *(queries, keys, values, a.key_cache, a.value_cache, *rows, slots),
        *(query_heads, heads, size, pairs, rows[0].shape[1], a.rotary_half),
        max(a.key_cache.shape[2], 1),
        *(x for one in (queries, keys, values) for x in one.stride()[:2]),
        *(*a.key_cache.stride()[:3], *a.value_cache.stride()[:3]),
        *(_inverse(a.k_scale), _inverse(a.v_scale)),
    )
    if queries.data_ptr() != a.query.data_ptr():  # a copy, where a view cannot be
        a.query.copy_(queries.view_as(a.query))
    return True


def _rotate(
    positions: Tensor,
    query: Tensor,
    key: Tensor | None,
    head_size: int,
    rows: Tensor,
    is_neox: bool,
    first: int = 0,
    inverse: bool = False,
) -> bool:
    """Rotate in place by ``rows`` ``[tokens, rotary_dim]``: the cosines and sines of each token."""
    cos, sin = rows.view(*positions.shape, rows.shape[-1]).chunk(2, -1)

    def heads(x: Tensor) -> Tensor:
        flat = x.dim() == positions.dim() + 1
        return (x.unflatten(-1, (x.shape[-1] // head_size, head_size)) if flat else x)[..., first:]

    parts = [heads(x) for x in (query, key) if x is not None]
    turned = [dense(x) for x in parts]
    other = turned[1] if key is not None else turned[0][..., :0, :]
    sin = -sin if inverse else sin
    torch.ops.ipex.rotary_embedding(turned[0], other, sin, cos, rows.shape[1], is_neox)
    for x, y in zip(parts, turned, strict=True):
        if x is not y:
            x.copy_(y)
    return True


def _batched(a: Arguments) -> bool:
    if a.query.dtype not in FLOATS:
        return False
    places = rows_with_offsets(a.positions, a.cos_sin_cache_offsets, a.cos_sin_cache.shape[0])
    rows = places.to(a.positions.device)
    return _rotate(a.positions, a.query, a.key, a.head_size, a.cos_sin_cache[rows], a.is_neox)


def _table(a: Arguments) -> bool:
    if a.query.dtype not in FLOATS:
        return False
    check_rows(a.op, a.positions.cpu(), a.cos_sin_cache.shape[0])
    rows = a.cos_sin_cache[a.positions.long().flatten()]
    return _rotate(
        a.positions, a.query, a.key, a.head_size, rows, a.is_neox, a.rope_dim_offset, a.inverse
    )


#: Name of an op -> what runs for tensors of the device; False: as it is defined.
FUNCTIONS: dict[str, Callable[..., Any]] = {
    "reshape_and_cache": _reshape_and_cache,
    "reshape_and_cache_flash": _reshape_and_cache,
    "rotary_embedding_and_cache": _rotary_embedding_and_cache,
    "rotary_embedding_batched": _batched,
    "rotary_embedding_table": _table,
}

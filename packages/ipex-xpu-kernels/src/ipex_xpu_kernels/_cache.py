# SPDX-License-Identifier: Apache-2.0
"""Writes to paged caches and rotary embeddings by one table, on the kernels of the device."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from ipex_core.library.checks import read_once
from ipex_core.library.spec import FLOATS
from ipex_core.ops.kv_cache import check_slots
from ipex_core.ops.rotary_embedding import check_rows, rows_with_offsets, table_rows
from ipex_core.ops.rotary_embedding_and_cache import cache_places
from ipex_xpu_kernels._launch import dense, kernel, launch_columns, launch_rows

Tensor = torch.Tensor


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


def _writer(op: str) -> Callable[..., bool]:
    def write(
        key: Tensor,
        value: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        slot_mapping: Tensor,
        kv_cache_dtype: str = "auto",
        k_scale: float = 1.0,
        v_scale: float = 1.0,
        key_scales: Tensor | None = None,
        value_scales: Tensor | None = None,
    ) -> bool:
        if key.dtype not in FLOATS:
            return False
        places = _places(op, key_cache, slot_mapping)
        _write(key, key_cache, places, k_scale, key_scales)
        _write(value, value_cache, places, v_scale, value_scales)
        return True

    return write


def _rotary_embedding_and_cache(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    sin: Tensor,
    cos: Tensor,
    slot_mapping: Tensor | None,
    rotary_dim: int,
    rotary_half: bool,
    position_ids: Tensor | None = None,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> bool:
    op = "rotary_embedding_and_cache"
    if query.dtype not in FLOATS:
        return False
    rows = _rows(op, sin, cos, query, position_ids)
    if slot_mapping is None:
        slots = cache_places(query, key_cache, None, position_ids)
    else:
        slots = _places(op, key_cache, slot_mapping)
    heads, size = key.shape[-2:]
    queries, keys, values = (dense(x.flatten(0, -3)) for x in (query, key, value))
    tokens, query_heads = queries.shape[:2]
    pairs = rotary_dim // 2
    launch_columns(
        kernel("rope_and_cache", query.dtype, key_cache.dtype),
        query,
        tokens * (query_heads + 2 * heads),
        size,
        *(queries, keys, values, key_cache, value_cache, *rows, slots),
        *(query_heads, heads, size, pairs, rows[0].shape[1], rotary_half),
        max(key_cache.shape[2], 1),
        *(x for one in (queries, keys, values) for x in one.stride()[:2]),
        *(*key_cache.stride()[:3], *value_cache.stride()[:3], _inverse(k_scale), _inverse(v_scale)),
    )
    if queries.data_ptr() != query.data_ptr():  # a copy, where a view cannot be
        query.copy_(queries.view_as(query))
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


def _batched(
    positions: Tensor,
    query: Tensor,
    key: Tensor,
    head_size: int,
    cos_sin_cache: Tensor,
    is_neox: bool,
    rot_dim: int,
    cos_sin_cache_offsets: Tensor | None = None,
) -> bool:
    if query.dtype not in FLOATS:
        return False
    places = rows_with_offsets(positions, cos_sin_cache_offsets, cos_sin_cache.shape[0])
    rows = places.to(positions.device)
    return _rotate(positions, query, key, head_size, cos_sin_cache[rows], is_neox)


def _table(
    positions: Tensor,
    query: Tensor,
    key: Tensor | None,
    head_size: int,
    cos_sin_cache: Tensor,
    is_neox: bool,
    rope_dim_offset: int = 0,
    inverse: bool = False,
) -> bool:
    if query.dtype not in FLOATS:
        return False
    check_rows("rotary_embedding_table", positions.cpu(), cos_sin_cache.shape[0])
    rows = cos_sin_cache[positions.long().flatten()]
    return _rotate(positions, query, key, head_size, rows, is_neox, rope_dim_offset, inverse)


#: Name of an op -> what runs for tensors of the device; False: as it is defined.
FUNCTIONS: dict[str, Callable[..., Any]] = {
    "reshape_and_cache": _writer("reshape_and_cache"),
    "reshape_and_cache_flash": _writer("reshape_and_cache_flash"),
    "rotary_embedding_and_cache": _rotary_embedding_and_cache,
    "rotary_embedding_batched": _batched,
    "rotary_embedding_table": _table,
}

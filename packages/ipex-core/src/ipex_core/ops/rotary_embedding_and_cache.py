# SPDX-License-Identifier: Apache-2.0
"""Rotary position embedding fused with the write of keys and values into a cache."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ipex_core.library.checks import check_like, check_not_expanded, randn
from ipex_core.library.kernels import register_op
from ipex_core.library.spec import Arguments, BenchCase, Sample, check, dtype_name
from ipex_core.ops.kv_cache import (
    QUANTIZED,
    check_caches,
    check_index_tensor,
    check_slots,
    quantize,
)
from ipex_core.ops.rotary_embedding import (
    check_heads,
    check_position_ids,
    check_rotary_dim,
    check_tables,
    rotate,
    stock_rotary,
    table_rows,
    tables,
)

_OP = "rotary_embedding_and_cache"


def _and_cache(
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
) -> None:
    """Rotate the query in place and write the rotated key and the value into a cache, in one pass.

    The same as `rotary_embedding` followed by the write, without a rotated key in between; ``key`` is not written
    to.

    Args:
        query: ``[tokens, heads, head_dim]`` or ``[batch, positions, heads, head_dim]``, float32, bfloat16 or
            float16; overwritten.
        key: Like ``query`` with ``kv_heads`` heads.
        value: Like ``key``.
        key_cache: ``[num_blocks, kv_heads, block_size, head_dim]`` in the dtype of ``query``, int8,
            float8_e5m2 or float8_e4m3fn;
            written to. A contiguous cache ``[batch, kv_heads, max_positions, head_dim]`` is the same with one block
            per sequence.
        value_cache: Like ``key_cache``; written to.
        sin: As for `rotary_embedding`.
        cos: As for `rotary_embedding`.
        slot_mapping: ``[tokens]`` int32 or int64: the place of each token, ``block * block_size + row``, all
            different. A negative slot leaves the cache as it is. None: token ``p`` of sequence ``b`` goes to row
            ``position_ids[b, p]`` of block ``b``.
        rotary_dim: As for `rotary_embedding`.
        rotary_half: As for `rotary_embedding`.
        position_ids: As for `rotary_embedding`; needed without ``slot_mapping``.
        k_scale: What the elements of a quantized key cache stand for is multiplied by: ``key / k_scale`` is stored.
        v_scale: The same for values.

    Raises:
        RuntimeError: An argument does not fit, or a position or slot is out of range; nothing is written then.
    """
    rows = [table_rows(_OP, table, query, position_ids) for table in (cos, sin)]
    slots = cache_places(query, key_cache, slot_mapping, position_ids)
    rotated = rotate(key, rows[0], rows[1], rotary_dim, rotary_half)
    query.copy_(rotate(query, rows[0], rows[1], rotary_dim, rotary_half))
    keep = slots >= 0
    slots = slots[keep]
    block_size = max(1, key_cache.shape[2])
    for cache, x, scale in ((key_cache, rotated, k_scale), (value_cache, value, v_scale)):
        tokens = x.reshape(-1, *x.shape[-2:])[keep]
        if cache.dtype != x.dtype:
            tokens = quantize(tokens, cache.dtype, scale)
        # Bytes, because 8-bit floats have no indexing kernels.
        view = cache.view(torch.uint8) if cache.dtype.itemsize == 1 else cache
        view[slots // block_size, :, slots % block_size] = tokens.view(view.dtype)


def cache_places(
    query: Tensor, cache: Tensor, slot_mapping: Tensor | None, position_ids: Tensor | None
) -> Tensor:
    """Return the slot of each token, int64, after checking them. Reads data: references call it, fakes do not."""
    blocks, block_size = cache.shape[0], cache.shape[2]
    if slot_mapping is not None:
        check_slots(_OP, slot_mapping, blocks * block_size)
        return slot_mapping.long()
    assert position_ids is not None
    batch, length = query.shape[:2]
    for position in position_ids.flatten().tolist():
        text = f"be below the {block_size} rows of key_cache without slot_mapping"
        check(position < block_size, _OP, "position_ids", text, position)
    positions = position_ids.long().reshape(-1, length).expand(batch, length)
    starts = torch.arange(batch, device=query.device).unsqueeze(1) * block_size
    return (starts + positions).flatten()


def _check(a: Arguments) -> None:
    check_heads(a)
    check_like(_OP, "value", a.value, a.key, "key")
    check_rotary_dim(_OP, "rotary_dim", a.rotary_dim, a.query.shape[-1])
    check_tables(a)
    shape = "[num_blocks, kv_heads, block_size, head_dim]"
    check_caches(a, "query", shape, written=True)
    heads, size = a.key.shape[-2:]
    fits = a.key_cache.shape[1] == heads and a.key_cache.shape[3] == size
    text = f"have shape [num_blocks, {heads}, block_size, {size}]"
    a.require(fits, "key_cache", text, list(a.key_cache.shape))
    check_not_expanded(_OP, "query", a.query)
    a.require(a.k_scale > 0, "k_scale", "be positive", f"{a.k_scale:g}")
    a.require(a.v_scale > 0, "v_scale", "be positive", f"{a.v_scale:g}")
    check_position_ids(a)
    tokens = math.prod(a.query.shape[:-2])
    if a.slot_mapping is not None:
        check_index_tensor(_OP, "slot_mapping", a.slot_mapping, 1, a.query)
        fits = a.slot_mapping.shape[0] == tokens
        text = f"have an entry for each of {tokens} tokens"
        a.require(fits, "slot_mapping", text, list(a.slot_mapping.shape))
        return
    a.require(a.query.dim() == 4, "query", "be 4-D without slot_mapping", f"{a.query.dim()}-D")
    a.require(a.position_ids is not None, "position_ids", "be given without slot_mapping", None)
    text = f"have a block for each of {a.query.shape[0]} sequences without slot_mapping"
    a.require(a.key_cache.shape[0] >= a.query.shape[0], "key_cache", text, list(a.key_cache.shape))


def _cache(*shape: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return a pair of caches that hold something, so that rows which must stay are seen to stay."""
    narrow = dtype.itemsize == 1
    wide = (randn(*shape, seed=s) for s in (81, 82))
    k, v = ((x * 20).round().clamp(-9, 9).to(dtype) if narrow else x.to(dtype) for x in wide)
    return k, v


def _samples(dtype: torch.dtype) -> Iterator[Sample]:
    slots = torch.tensor([17, -1, 3, 16, 40, 5, -7])
    args: tuple[Any, ...]
    for half in (True, False):
        for dim, rotary in ((64, 64), (80, 32), (22, 10)):
            q, k, v = (randn(7, h, dim, dtype=dtype, seed=s) for h, s in ((4, 1), (2, 2), (2, 3)))
            args = (q, k, v, *_cache(6, 2, 8, dim, dtype=dtype))
            args = (*args, *tables(7, rotary // 2, torch.float32), slots, rotary, half)
            yield Sample(args, id=f"paged-{dim}-{rotary}-{half}")
        for cache in QUANTIZED:
            args = (q, k, v, *_cache(6, 2, 8, 22, dtype=cache))
            args = (*args, *tables(20, 22, torch.float32), slots.int(), 22, half)
            ids = torch.tensor([19, 0, 3, 3, 1, 18, 7])
            name = dtype_name(cache)
            yield Sample((*args, ids, 0.04, 0.05), id=f"{name}-{half}")
    fused = randn(2, 3, 8, 64, dtype=dtype, seed=4)
    q, k, v = fused[:, :, :4], fused[:, :, 4:6], fused[:, :, 6:]
    args = (q, k, v, *_cache(2, 2, 9, 64, dtype=dtype), *tables(9, 64, dtype))
    yield Sample((*args, None, 64, True, torch.tensor([5, 6, 7])), id="contiguous-shared-positions")
    ids = torch.tensor([[0, 1, 2], [6, 8, 7]], dtype=torch.int32)
    yield Sample((*args, None, 64, True, ids), id="contiguous")
    wide = randn(4, 2, 5, 2, 64, dtype=dtype, seed=5)
    caches = (wide[..., 0, :], wide[..., 1, :].clone())
    slots = torch.tensor([0, 19, 18, 4, -1, 7])
    args = (q, k, v, *caches, *tables(6, 64, dtype), slots, 64, True)
    yield Sample(args, id="strided-cache")
    args = (q[:0], k[:0], v[:0], *caches, *tables(3, 64, dtype), slots[:0], 64, True)
    yield Sample(args, id="no_tokens")


def _stock(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    sin: Tensor,
    cos: Tensor,
    slot_mapping: Tensor,
    rotary_dim: int,
    rotary_half: bool,
) -> Tensor:
    """The chain of transformers' Llama model, which makes a new query, and an indexed write."""
    query, key = stock_rotary(query, key, sin, cos, rotary_dim, rotary_half)
    block_size = key_cache.shape[2]
    block, row = slot_mapping // block_size, slot_mapping % block_size
    key_cache[block, :, row] = key.to(key_cache.dtype)
    value_cache[block, :, row] = value.to(key_cache.dtype)
    return query


def _bench() -> Iterator[BenchCase]:
    for tokens, heads, kv_heads, dim in ((1, 32, 8, 128), (32, 32, 8, 128), (512, 32, 8, 128)):

        def make(
            dtype: torch.dtype, t: int = tokens, h: int = heads, k: int = kv_heads, d: int = dim
        ) -> tuple[object, ...]:
            blocks = 2 * t // 16 + 8
            # Whole blocks in any order, as an allocator of pages hands them out.
            order = torch.randperm(blocks, generator=torch.Generator().manual_seed(1))
            slots = (order[:, None] * 16 + torch.arange(16)).flatten()[:t]
            q, key, value = (randn(t, n, d, dtype=dtype) for n in (h, k, k))
            caches = (torch.zeros(blocks, k, 16, d, dtype=dtype) for _ in range(2))
            return (q, key, value, *caches, *tables(t, d, dtype), slots, d, True)

        yield BenchCase(
            f"{tokens}x{heads}+{kv_heads}x{dim}",
            make,
            lambda dtype, n=tokens * (2 * heads + 4 * kv_heads + 2) * dim: n * dtype.itemsize,
        )


register_op(
    name=_OP,
    mutates=("query", "key_cache", "value_cache"),
    reference=_and_cache,
    check=_check,
    samples=_samples,
    stock=_stock,
    backward=None,
    lift=False,
    tolerance={
        torch.float32: (1e-5, 1e-5),
        torch.bfloat16: (1.6e-2, 1e-2),
        torch.float16: (2e-3, 1e-3),
        torch.int8: (0.0, 1.0),
        torch.float8_e5m2: (0.26, 1e-4),
        torch.float8_e4m3fn: (0.13, 2.0**-9),
    },
    bench=_bench,
    summary="Rotary position embedding fused with the write of keys and values into a cache",
)

# SPDX-License-Identifier: Apache-2.0
"""Rotary position embedding with cosines and sines in one table, as serving engines keep them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from ipex_core.library.arguments import Arguments
from ipex_core.library.checks import (
    check_device,
    check_dtype,
    check_not_expanded,
    check_tensor,
    dtype_name,
    randn,
)
from ipex_core.library.kernels import register
from ipex_core.library.spec import BenchCase, OpSpec, Sample, check
from ipex_core.ops.rotary._common import check_rotary_dim, rotate

Tensor = torch.Tensor

_OP = "rotary_embedding_batched"
_INDEX = (torch.int32, torch.int64)


def _batched(
    positions: Tensor,
    query: Tensor,
    key: Tensor,
    head_size: int,
    cos_sin_cache: Tensor,
    is_neox: bool,
    rot_dim: int,
    cos_sin_cache_offsets: Tensor | None = None,
) -> None:
    """Rotate query and key in place; see `rotary_embedding`.

    Args:
        positions: int32 or int64, ``[tokens]`` or ``[batch, positions]``.
        query: ``positions.shape + [heads * head_size]`` or ``+ [heads, head_size]``, float32, bfloat16 or float16;
            overwritten.
        key: Like ``query``, with its own number of heads; overwritten.
        head_size: Elements of a head.
        cos_sin_cache: ``[rows, rot_dim]`` in the dtype of ``query`` or float32: cosines, then sines, one of each per
            pair.
        is_neox: True: element ``i`` pairs with ``i + rot_dim / 2``. False: element ``2 i`` pairs with ``2 i + 1``.
        rot_dim: The first elements of a head that are rotated.
        cos_sin_cache_offsets: int32 or int64, one per token, not negative, added to ``positions``: the start of the
            table of each token where several lie in one cache. None: 0.

    Raises:
        RuntimeError: An argument does not fit, or a position has no row; nothing is written then.
    """
    rows = positions.long().flatten()
    count = cos_sin_cache.shape[0]
    given = rows.tolist()
    if cos_sin_cache_offsets is not None:
        offsets = cos_sin_cache_offsets.flatten().long()
        valid = (rows >= 0) & (rows < count) & (offsets >= 0) & (offsets < count)
        rows = torch.where(valid, rows + offsets, -1)
    for position, row in zip(given, rows.tolist(), strict=True):
        check(
            0 <= row < count,
            _OP,
            "positions",
            f"hold (with their offsets) rows of cos_sin_cache in [0, {count})",
            position,
        )
    cos, sin = cos_sin_cache[rows].view(*positions.shape, rot_dim).chunk(2, -1)
    for x in (query, key):
        flat = x.dim() == positions.dim() + 1
        heads = x.unflatten(-1, (x.shape[-1] // head_size, head_size)) if flat else x
        rotated = rotate(heads, cos, sin, rot_dim, is_neox)
        x.copy_(rotated.flatten(-2) if flat else rotated)


def _check(a: Arguments) -> None:
    dtype = dtype_name(a.positions.dtype)
    check(a.positions.dtype in _INDEX, _OP, "positions", "have dtype int32, int64", dtype)
    check(
        a.positions.dim() in (1, 2),
        _OP,
        "positions",
        "be 1-D [tokens] or 2-D [batch, positions]",
        f"{a.positions.dim()}-D",
    )
    check(a.head_size > 0, _OP, "head_size", "be positive", a.head_size)
    for name, x in (("query", a.query), ("key", a.key)):
        check_device(_OP, name, x, a.positions, "positions")
        check_tensor(_OP, name, x)
        _check_shape(name, x, a.positions, a.head_size)
        check_not_expanded(_OP, name, x)
    check_dtype(_OP, "key", a.key, a.query, "query")
    check_rotary_dim(_OP, "rot_dim", a.rot_dim, a.head_size)
    cache = a.cos_sin_cache
    check_device(_OP, "cos_sin_cache", cache, a.query, "query")
    check_dtype(_OP, "cos_sin_cache", cache, a.query, "query", or_float32=True)
    check(
        cache.dim() == 2 and cache.shape[1] == a.rot_dim,
        _OP,
        "cos_sin_cache",
        f"be 2-D with rot_dim = {a.rot_dim} columns",
        list(cache.shape),
    )
    if a.cos_sin_cache_offsets is None:
        return
    offsets, name = a.cos_sin_cache_offsets, "cos_sin_cache_offsets"
    check_device(_OP, name, offsets, a.query, "query")
    dtype = dtype_name(offsets.dtype)
    check(offsets.dtype in _INDEX, _OP, name, "have dtype int32, int64", dtype)
    check(
        offsets.numel() == a.positions.numel(),
        _OP,
        name,
        f"have an entry for each of {a.positions.numel()} tokens",
        list(offsets.shape),
    )


def _check_shape(name: str, x: Tensor, positions: Tensor, head_size: int) -> None:
    lead = positions.dim()
    tail = list(x.shape[lead:])
    check(
        x.shape[:lead] == positions.shape
        and (
            (len(tail) == 1 and tail[0] % head_size == 0)
            or (len(tail) == 2 and tail[1] == head_size)
        ),
        _OP,
        name,
        f"have shape {list(positions.shape)} + [heads * head_size] or + [heads, head_size]"
        f" with head_size = {head_size}",
        list(x.shape),
    )


def _fake(a: Arguments) -> None:
    return None


def _cache(rows: int, rot_dim: int, dtype: torch.dtype) -> Tensor:
    angles = randn(rows, rot_dim // 2, seed=71, scale=3.0)
    return torch.cat([angles.cos(), angles.sin()], -1).to(dtype)


def _samples(dtype: torch.dtype) -> Iterator[Sample]:
    positions = torch.tensor([3, 0, 11, 11, 7])
    args: tuple[Any, ...]
    for neox in (True, False):
        for size, rot in ((64, 64), (80, 32), (6, 6)):
            q = randn(5, 4 * size, dtype=dtype, seed=1)
            k = randn(5, 2 * size, dtype=dtype, seed=2)
            name = f"{'half' if neox else 'pairs'}-{size}-{rot}"
            yield Sample((positions, q, k, size, _cache(12, rot, dtype), neox, rot), id=name)
        fused = randn(2, 5, 6, 32, dtype=dtype, seed=3)
        batch = torch.stack([positions, positions.flip(0)]).int()
        args = (batch, fused[:, :, :4], fused[:, :, 4:5], 32, _cache(12, 32, torch.float32))
        yield Sample((*args, neox, 32), id=f"4d-{neox}")
        offsets = torch.tensor([0, 12, 12, 0, 24])
        q, k = (randn(5, h, 16, dtype=dtype, seed=h) for h in (4, 2))
        args = (positions, q, k, 16, _cache(36, 16, dtype), neox, 16, offsets)
        yield Sample(args, id=f"offsets-{neox}")
    yield Sample((positions[:0], q[:0], k[:0], 16, _cache(2, 8, dtype), True, 8), id="no_tokens")


def _stock(
    positions: Tensor,
    query: Tensor,
    key: Tensor,
    head_size: int,
    cos_sin_cache: Tensor,
    is_neox: bool,
    rot_dim: int,
) -> tuple[Tensor, Tensor]:
    cos, sin = (t.unsqueeze(-2) for t in cos_sin_cache[positions].chunk(2, -1))

    def turned(x: Tensor) -> Tensor:
        heads = x.view(*positions.shape, -1, head_size)
        one, two = heads.chunk(2, -1)
        return torch.cat((one * cos - two * sin, two * cos + one * sin), -1).view_as(x)

    return turned(query), turned(key)


def _bench() -> Iterator[BenchCase]:
    for tokens, heads, kv_heads, size in ((1, 32, 8, 128), (512, 32, 8, 128)):
        yield BenchCase(
            f"{tokens}x{heads}+{kv_heads}x{size}",
            lambda dtype, t=tokens, h=heads, k=kv_heads, s=size: (
                torch.arange(t),
                randn(t, h * s, dtype=dtype),
                randn(t, k * s, dtype=dtype),
                s,
                _cache(4096, s, dtype),
                True,
                s,
            ),
            lambda dtype, n=tokens * (2 * heads + 2 * kv_heads + 1) * size: n * dtype.itemsize,
        )


register(
    OpSpec(
        name=_OP,
        schema=(
            "(Tensor positions, Tensor(a!) query, Tensor(b!) key, int head_size,"
            " Tensor cos_sin_cache, bool is_neox, int rot_dim,"
            " Tensor? cos_sin_cache_offsets=None) -> ()"
        ),
        reference=_batched,
        check=_check,
        fake=_fake,
        samples=_samples,
        stock=_stock,
        backward=None,
        bench=_bench,
        summary="Rotary position embedding in place, with cosines and sines in one table",
    )
)

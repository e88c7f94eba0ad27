# SPDX-License-Identifier: Apache-2.0
"""Rotary embedding as the references compute it, and the checks the rotary ops share.

Kernels repeat these checks with the same text (``rotary_glue.h``).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ipex_core.library.checks import (
    acc,
    check_device,
    check_dtype,
    check_dtype_in,
    check_kind,
    check_like,
    check_not_expanded,
    check_tensor,
    dtype_name,
    fake_like,
    randn,
    strided,
)
from ipex_core.library.kernels import register_op
from ipex_core.library.spec import Arguments, BenchCase, Sample, check

MAX_ROTARY_DIM = 1024
_INDEX = (torch.int32, torch.int64)


def rotate(x: Tensor, cos: Tensor, sin: Tensor, rotary_dim: int, half_split: bool) -> Tensor:
    """Rotate the first ``rotary_dim`` elements of the last dimension of ``x``.

    Args:
        x: ``[..., heads, head_dim]``.
        cos: ``[..., rotary_dim]`` or ``[..., rotary_dim / 2]``, without the dimension of heads.
        sin: Like ``cos``.
        rotary_dim: How many elements are rotated; the others are copied.
        half_split: Element ``i`` pairs with ``i + rotary_dim / 2``, else ``2 i`` with ``2 i + 1``.
    """

    def spread(table: Tensor) -> Tensor:
        table = acc(table).unsqueeze(-2)
        if table.shape[-1] == rotary_dim:
            return table
        return torch.cat([table, table], -1) if half_split else table.repeat_interleave(2, -1)

    y = acc(x[..., :rotary_dim])
    if half_split:
        one, two = y.chunk(2, -1)
        turned = torch.cat([-two, one], -1)
    else:
        turned = torch.stack([-y[..., 1::2], y[..., ::2]], -1).flatten(-2)
    y = y * spread(cos) + turned * spread(sin)
    return torch.cat([y.to(x.dtype), x[..., rotary_dim:]], -1)


def table_rows(op: str, table: Tensor, query: Tensor, position_ids: Tensor | None) -> Tensor:
    """Return the row of ``table`` for each token, shaped ``[tokens, C]`` or ``[batch, positions, C]``.

    Reads the position ids, so references call it and fakes do not.
    """
    flat = table.reshape(-1, table.shape[-1])
    lead = query.shape[:-2]
    if position_ids is None:
        rows = flat if flat.shape[0] == lead.numel() else flat[: lead[-1]]
    else:
        for position in position_ids.flatten().tolist():
            text = f"hold rows of sin and cos in [0, {flat.shape[0]})"
            check(0 <= position < flat.shape[0], op, "position_ids", text, position)
        rows = flat[position_ids.flatten().long()]
    if rows.shape[0] == lead.numel():
        return rows.reshape(*lead, rows.shape[-1])
    return rows.expand(*lead, -1)


def check_rotary_dim(op: str, name: str, rotary_dim: int, head_dim: int) -> None:
    """Check that a part of a head is rotated that consists of pairs."""
    most = min(head_dim, MAX_ROTARY_DIM)
    fits = 2 <= rotary_dim <= most and rotary_dim % 2 == 0
    check(fits, op, name, f"be an even number between 2 and {most}", rotary_dim)


def check_heads(a: Arguments) -> None:
    """Check query and key: 3-D or 4-D, alike but for the number of heads."""
    query, key = a.query, a.key
    check_tensor(a.op, "query", query)
    text = "be 3-D [tokens, heads, head_dim] or 4-D [batch, positions, heads, head_dim]"
    a.require(query.dim() in (3, 4), "query", text, f"{query.dim()}-D")
    check_kind(a.op, "key", key, query, "query")
    a.require(
        key.dim() == query.dim()
        and key.shape[:-2] == query.shape[:-2]
        and key.shape[-1] == query.shape[-1],
        "key",
        f"have the shape of query but for the number of heads = {list(query.shape)}",
        list(key.shape),
    )


def check_tables(a: Arguments) -> None:
    """Check the tables of sines and cosines."""
    check_kind(a.op, "sin", a.sin, a.query, "query", or_float32=True)
    whole, half = a.rotary_dim, a.rotary_dim // 2
    fits = a.sin.dim() >= 2 and a.sin.shape[-1] in (whole, half)
    text = f"have at least 2 dimensions, the last of size {whole} or {half}"
    a.require(fits, "sin", text, list(a.sin.shape))
    check_like(a.op, "cos", a.cos, a.sin, "sin")


def check_position_ids(a: Arguments) -> None:
    """Check that there is a row of the tables for each token."""
    lead, ids = a.query.shape[:-2], a.position_ids
    # torch.Size.numel() would turn symbolic sizes into numbers.
    tokens, positions = math.prod(lead), lead[-1]
    each = f"for each of {tokens} tokens or {positions} positions"
    if ids is None:
        rows = math.prod(a.sin.shape[:-1])
        enough = rows == tokens or rows >= positions
        a.require(enough, "sin", f"have a row {each}", f"{rows} rows")
        return
    check_device(a.op, "position_ids", ids, a.query, "query")
    check_dtype_in(a.op, "position_ids", ids, *_INDEX)
    fits = ids.numel() in (tokens, positions)
    a.require(fits, "position_ids", f"have an entry {each}", list(ids.shape))


# --- queries and keys -------------------------------------------------------------------------------------------------


def _rotary_embedding(
    query: Tensor,
    key: Tensor,
    sin: Tensor,
    cos: Tensor,
    rotary_dim: int,
    rotary_half: bool,
    position_ids: Tensor | None = None,
) -> None:
    """Rotate pairs of elements of each head by the angle of the token's position, in place.

    A pair ``(x1, x2)`` becomes ``(x1 cos - x2 sin, x2 cos + x1 sin)``. Computed in float32 and rounded once.

    Args:
        query: ``[tokens, heads, head_dim]`` or ``[batch, positions, heads, head_dim]``, float32, bfloat16 or
            float16; overwritten. Views, for instance of a fused projection, are welcome.
        key: Like ``query``, with its own number of heads; overwritten.
        sin: ``[..., rotary_dim]``, or ``[..., rotary_dim / 2]`` with one number per pair, in the dtype of ``query``
            or float32. All leading dimensions together count the rows of the table.
        cos: Like ``sin``.
        rotary_dim: The first elements of a head that are rotated, an even number up to 1024; the rest stays.
        rotary_half: True: element ``i`` pairs with ``i + rotary_dim / 2`` (GPT-NeoX, Llama). False: element ``2 i``
            pairs with ``2 i + 1`` (GPT-J).
        position_ids: int32 or int64: the row of the tables of each token or, where all sequences agree, of each
            position. None: row ``t`` for token ``t`` where there are as many rows as tokens, else row ``p`` for
            position ``p``.

    Raises:
        RuntimeError: An argument does not fit, or a position has no row; nothing is written then.

    Source: Su et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding", 2021.
    """
    rows = [table_rows("rotary_embedding", table, query, position_ids) for table in (cos, sin)]
    for x in (query, key):
        x.copy_(rotate(x, rows[0], rows[1], rotary_dim, rotary_half))


def _rotary_embedding_functional(
    query: Tensor,
    key: Tensor,
    sin: Tensor,
    cos: Tensor,
    rotary_dim: int,
    rotary_half: bool,
    position_ids: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Rotate query and key as `rotary_embedding` does and return the results as new tensors.

    The form for training and for rewriting traced graphs; it can be differentiated.

    Args:
        query: As for `rotary_embedding`; not written to.
        key: As for `rotary_embedding`; not written to.
        sin: As for `rotary_embedding`.
        cos: As for `rotary_embedding`.
        rotary_dim: As for `rotary_embedding`.
        rotary_half: As for `rotary_embedding`.
        position_ids: As for `rotary_embedding`.

    Returns:
        The rotated query and the rotated key, contiguous.
    """
    op = "rotary_embedding_functional"
    rows = [table_rows(op, table, query, position_ids) for table in (cos, sin)]
    q, k = (rotate(x, rows[0], rows[1], rotary_dim, rotary_half) for x in (query, key))
    return q, k


def _check_functional(a: Arguments) -> None:
    check_heads(a)
    check_rotary_dim(a.op, "rotary_dim", a.rotary_dim, a.query.shape[-1])
    check_tables(a)
    check_position_ids(a)


def _plain_check(a: Arguments) -> None:
    _check_functional(a)
    check_not_expanded(a.op, "query", a.query)
    check_not_expanded(a.op, "key", a.key)


def tables(rows: int, columns: int, dtype: torch.dtype, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Return sines and cosines of random angles: ``(sin, cos)``."""
    angles = randn(rows, columns, seed=seed + 61, scale=3.0)
    return angles.sin().to(dtype), angles.cos().to(dtype)


def _plain_samples(dtype: torch.dtype) -> Iterator[Sample]:
    for half in (True, False):
        name = "half" if half else "pairs"
        for dim, rotary in ((64, 64), (128, 128), (80, 32), (96, 96), (22, 10), (2, 2)):
            q, k = randn(7, 4, dim, dtype=dtype, seed=1), randn(7, 2, dim, dtype=dtype, seed=2)
            sin, cos = tables(7, rotary // 2, torch.float32)
            yield Sample((q, k, sin, cos, rotary, half), id=f"{name}-{dim}-{rotary}")
        q, k = (randn(2, 5, h, 64, dtype=dtype, seed=h) for h in (6, 3))
        ids = torch.tensor([[3, 0, 9, 9, 1], [8, 7, 2, 0, 5]])
        sin, cos = tables(10, 48, dtype, seed=1)
        yield Sample((q, k, sin, cos, 48, half, ids), id=f"{name}-full-tables-positions")
        fused = randn(2, 5, 12 * 32, dtype=dtype, seed=3).view(2, 5, 12, 32)
        sin, cos = (t.view(1, 9, 16) for t in tables(9, 16, dtype, seed=2))
        args = (fused[:, :, :8], fused[:, :, 8:10], sin, cos, 32, half)
        yield Sample((*args, ids[1].int()), id=f"{name}-views-of-fused")
        yield Sample(args, id=f"{name}-longer-tables")
    q, k = (randn(2, h, 5, 64, dtype=dtype, seed=h).transpose(1, 2) for h in (6, 3))
    sin, cos = (t.view(2, 5, 1, 32) for t in tables(10, 32, torch.float32, seed=3))
    yield Sample((q, k, sin, cos, 64, True), id="transposed-one-row-per-token")
    q, k = strided(randn(3, 4, 16, dtype=dtype, seed=4)), randn(3, 1, 16, dtype=dtype, seed=5)
    sin, cos = tables(3, 16, dtype)
    yield Sample((q, k, sin, cos, 16, True), id="scattered-heads")
    yield Sample((q[:0], k[:0], sin, cos, 16, False), id="no_tokens")


def stock_rotary(
    query: Tensor,
    key: Tensor,
    sin: Tensor,
    cos: Tensor,
    rotary_dim: int,
    rotary_half: bool,
    position_ids: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The chain of transformers' Llama model, for one table row per token and whole heads."""

    def rotate_half(x: Tensor) -> Tensor:
        return torch.cat((-x[..., x.shape[-1] // 2 :], x[..., : x.shape[-1] // 2]), -1)

    c, s = cos.unsqueeze(-2), sin.unsqueeze(-2)
    return query * c + rotate_half(query) * s, key * c + rotate_half(key) * s


def _plain_bench() -> Iterator[BenchCase]:
    for tokens, heads, kv_heads, dim in (
        (1, 32, 8, 128),
        (512, 32, 8, 128),
        (512, 32, 32, 128),
        (2048, 16, 8, 64),
    ):
        yield BenchCase(
            f"{tokens}x{heads}+{kv_heads}x{dim}",
            lambda dtype, t=tokens, h=heads, k=kv_heads, d=dim: (
                randn(t, h, d, dtype=dtype),
                randn(t, k, d, dtype=dtype),
                *tables(t, d, dtype),
                d,
                True,
            ),
            lambda dtype, n=tokens * (heads + kv_heads + 1) * dim: 2 * n * dtype.itemsize,
        )


register_op(
    mutates=("query", "key"),
    reference=_rotary_embedding,
    check=_plain_check,
    samples=_plain_samples,
    stock=stock_rotary,
    backward=None,
    bench=_plain_bench,
    summary="Rotary position embedding of query and key in place",
)
register_op(
    reference=_rotary_embedding_functional,
    check=_check_functional,
    fake=lambda a: (fake_like(a.query), fake_like(a.key)),
    samples=_plain_samples,
    stock=stock_rotary,
    bench=_plain_bench,
    summary="Rotary position embedding of query and key as new tensors",
)


# --- one table of cosines and sines -----------------------------------------------------------------------------------


_OP = "rotary_embedding_batched"


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
    rows = rows_with_offsets(positions, cos_sin_cache_offsets, cos_sin_cache.shape[0])
    cos, sin = cos_sin_cache[rows].view(*positions.shape, rot_dim).chunk(2, -1)
    for x in (query, key):
        flat = x.dim() == positions.dim() + 1
        heads = x.unflatten(-1, (x.shape[-1] // head_size, head_size)) if flat else x
        rotated = rotate(heads, cos, sin, rot_dim, is_neox)
        x.copy_(rotated.flatten(-2) if flat else rotated)


def rows_with_offsets(positions: Tensor, offsets: Tensor | None, count: int) -> Tensor:
    """Return the row of a table of ``count`` rows for each token, int64 on the host, after checking them."""
    given = positions.cpu().flatten().long()
    rows = given
    if offsets is not None:
        offsets = offsets.cpu().flatten().long()
        valid = (rows >= 0) & (rows < count) & (offsets >= 0) & (offsets < count)
        rows = torch.where(valid, rows + offsets, -1)
    for position in given[(rows < 0) | (rows >= count)][:1].tolist():
        wanted = f"hold (with their offsets) rows of cos_sin_cache in [0, {count})"
        check(False, _OP, "positions", wanted, position)
    return rows


def check_rows(op: str, positions: Tensor, count: int) -> None:
    """Check that positions are rows of a table of ``count`` rows. Reads data: references call it, fakes do not."""
    for row in positions[(positions < 0) | (positions >= count)][:1].tolist():
        check(False, op, "positions", f"hold rows of cos_sin_cache in [0, {count})", row)


def _check_positions(a: Arguments) -> None:
    dtype = dtype_name(a.positions.dtype)
    a.require(a.positions.dtype in _INDEX, "positions", "have dtype int32, int64", dtype)
    text = "be 1-D [tokens] or 2-D [batch, positions]"
    a.require(a.positions.dim() in (1, 2), "positions", text, f"{a.positions.dim()}-D")
    a.require(a.head_size > 0, "head_size", "be positive")
    for name, x in (("query", a.query), ("key", a.key)):
        if x is None:
            continue
        check_device(a.op, name, x, a.positions, "positions")
        check_tensor(a.op, name, x)
        _check_shape(a, name, x)
        check_not_expanded(a.op, name, x)
    if a.key is not None:
        check_dtype(a.op, "key", a.key, a.query, "query")


def _batched_check(a: Arguments) -> None:
    _check_positions(a)
    check_rotary_dim(_OP, "rot_dim", a.rot_dim, a.head_size)
    cache = a.cos_sin_cache
    check_kind(_OP, "cos_sin_cache", cache, a.query, "query", or_float32=True)
    fits = cache.dim() == 2 and cache.shape[1] == a.rot_dim
    text = f"be 2-D with rot_dim = {a.rot_dim} columns"
    a.require(fits, "cos_sin_cache", text, list(cache.shape))
    if a.cos_sin_cache_offsets is None:
        return
    offsets, name = a.cos_sin_cache_offsets, "cos_sin_cache_offsets"
    check_device(_OP, name, offsets, a.query, "query")
    dtype = dtype_name(offsets.dtype)
    a.require(offsets.dtype in _INDEX, name, "have dtype int32, int64", dtype)
    text = f"have an entry for each of {a.positions.numel()} tokens"
    a.require(offsets.numel() == a.positions.numel(), name, text, list(offsets.shape))


def _check_shape(a: Arguments, name: str, x: Tensor) -> None:
    places, size = list(a.positions.shape), a.head_size
    lead, tail = list(x.shape[: len(places)]), list(x.shape[len(places) :])
    heads = (len(tail) == 1 and tail[0] % size == 0) or (len(tail) == 2 and tail[1] == size)
    a.require(
        lead == places and heads,
        name,
        f"have shape {places} + [heads * head_size] or + [heads, head_size]"
        f" with head_size = {size}",
        list(x.shape),
    )


def _cache(rows: int, rot_dim: int, dtype: torch.dtype) -> Tensor:
    angles = randn(rows, rot_dim // 2, seed=71, scale=3.0)
    return torch.cat([angles.cos(), angles.sin()], -1).to(dtype)


def _batched_samples(dtype: torch.dtype) -> Iterator[Sample]:
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


def _batched_bench() -> Iterator[BenchCase]:
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


register_op(
    name=_OP,
    mutates=("query", "key"),
    reference=_batched,
    check=_batched_check,
    samples=_batched_samples,
    stock=_stock,
    backward=None,
    bench=_batched_bench,
    summary="Rotary position embedding in place, with cosines and sines in one table",
)


# --- one table, a part of each head -----------------------------------------------------------------------------------


def _rotary_embedding_table(
    positions: Tensor,
    query: Tensor,
    key: Tensor | None,
    head_size: int,
    cos_sin_cache: Tensor,
    is_neox: bool,
    rope_dim_offset: int = 0,
    inverse: bool = False,
) -> None:
    """Rotate query and key in place by a table whose columns say how much of a head is rotated.

    Args:
        positions: int32 or int64, ``[tokens]`` or ``[batch, positions]``: rows of the table.
        query: ``positions.shape + [heads * head_size]`` or ``+ [heads, head_size]``, float32, bfloat16 or float16;
            overwritten.
        key: Like ``query``, with its own number of heads; overwritten. None: only the query is rotated.
        head_size: Elements of a head.
        cos_sin_cache: ``[rows, rotary_dim]`` in the dtype of ``query`` or float32: cosines, then sines, one of each
            per pair.
        is_neox: True: element ``i`` pairs with ``i + rotary_dim / 2``. False: element ``2 i`` pairs with ``2 i + 1``.
        rope_dim_offset: The first element of a head that is rotated.
        inverse: Whether to rotate by the negative angles.

    Raises:
        RuntimeError: An argument does not fit, or a position has no row; nothing is written then.
    """
    op = "rotary_embedding_table"
    count, size = cos_sin_cache.shape
    check_rows(op, positions, count)
    rows = cos_sin_cache[positions.long().flatten()].view(*positions.shape, size)
    cos, sin = rows.chunk(2, -1)
    sin = -sin if inverse else sin
    for x in (query, key):
        if x is None:
            continue
        flat = x.dim() == positions.dim() + 1
        heads = x.unflatten(-1, (x.shape[-1] // head_size, head_size)) if flat else x
        heads = heads.clone()
        part = heads[..., rope_dim_offset:]
        part.copy_(rotate(part, cos, sin, size, is_neox))
        x.copy_(heads.flatten(-2) if flat else heads)


def _table_check(a: Arguments) -> None:
    _check_positions(a)
    cache = a.cos_sin_cache
    check_device(a.op, "cos_sin_cache", cache, a.query, "query")
    check_dtype(a.op, "cos_sin_cache", cache, a.query, "query", or_float32=True)
    offset, size = a.rope_dim_offset, a.head_size
    a.require(0 <= offset < size, "rope_dim_offset", f"be in [0, {size})", offset)
    most = min(size - offset, MAX_ROTARY_DIM)
    columns = cache.shape[1] if cache.dim() == 2 else 0
    wanted = f"be 2-D with an even number of columns between 2 and {most}"
    fits = 2 <= columns <= most and columns % 2 == 0
    a.require(fits, "cos_sin_cache", wanted, list(cache.shape))


def _table_samples(dtype: torch.dtype) -> Iterator[Sample]:
    positions = torch.tensor([3, 0, 11, 11, 7])
    for neox in (True, False):
        for size, rot, offset in ((64, 64, 0), (80, 32, 0), (80, 32, 48), (24, 10, 6), (6, 6, 0)):
            q = randn(5, 4 * size, dtype=dtype, seed=1)
            k = randn(5, 2 * size, dtype=dtype, seed=2)
            name = f"{'half' if neox else 'pairs'}-{size}-{rot}-{offset}"
            cache = _cache(12, rot, dtype)
            yield Sample((positions, q, k, size, cache, neox, offset), id=name)
            yield Sample((positions, q, k, size, cache, neox, offset, True), id=f"{name}-inverse")
        fused = randn(2, 5, 6, 32, dtype=dtype, seed=3)
        batch = torch.stack([positions, positions.flip(0)]).int()
        cache = _cache(12, 32, torch.float32)
        yield Sample((batch, fused[:, :, :4], fused[:, :, 4:5], 32, cache, neox), id=f"4d-{neox}")
        yield Sample((batch, fused[:, :, :4], None, 32, cache, neox), id=f"no_key-{neox}")
        scattered = strided(randn(5, 4, 16, dtype=dtype, seed=4))
        yield Sample(
            (positions, scattered, None, 16, _cache(12, 8, dtype), neox, 4),
            id=f"scattered_without_key-{neox}",
        )
    yield Sample((positions[:0], q[:0], k[:0], 6, _cache(2, 6, dtype), True), id="no_tokens")


register_op(
    mutates=("query", "key"),
    reference=_rotary_embedding_table,
    check=_table_check,
    samples=_table_samples,
    backward=None,
    summary="Rotary position embedding of a part of each head in place, by one table",
)

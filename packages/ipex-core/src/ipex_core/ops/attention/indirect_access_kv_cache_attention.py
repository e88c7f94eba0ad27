# SPDX-License-Identifier: Apache-2.0
"""Attention over a cache that beams share through indices."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch.nn import functional

from ipex_core.library.arguments import Arguments
from ipex_core.library.checks import (
    check_device,
    check_dtype,
    check_dtype_in,
    check_like,
    check_score_scale,
    check_shape,
    check_tensor,
    randn,
)
from ipex_core.library.kernels import register
from ipex_core.library.spec import BenchCase, OpSpec, Sample, check, dtype_name
from ipex_core.ops.attention.checks import (
    TOLERANCE,
    attend,
    check_head_groups,
    check_head_size,
    check_head_vector,
    check_mask,
)
from ipex_core.ops.kv_cache.checks import check_caches, dequantize, quantize

Tensor = torch.Tensor

OP = "indirect_access_kv_cache_attention"


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    beam_idx: Tensor,
    offset: int,
    scale: float = 0.0,
    mask: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    is_causal: bool = True,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> Tensor:
    """Write new keys and values into the cache and attend to them and to the history of each beam.

    The caches have a column per sequence, which are the beams of all prompts, and are never reordered: entry
    ``beam_idx[p, c]`` says in which column the row at position p is, for a sequence whose row at position p + 1 is in
    column c. The new rows of a sequence go to its own column, at positions ``offset`` and on; its history is found by
    following the indices from ``beam_idx[offset - 1, sequence]`` back to position 0. Rows of a prompt are in the first
    column of its beams. Beams that share rows are computed together, so that each row is read from memory once.

    Args:
        query: ``[sequences, Q, heads, head_size]``, float32, bfloat16 or float16.
        key: ``[sequences, Q, kv_heads, head_size]``.
        value: Like ``key``.
        key_cache: ``[max_positions, sequences, kv_heads, head_size]``, written; the dtype of ``query``, int8,
            float8_e5m2 or float8_e4m3fn.
        value_cache: Like ``key_cache``, written.
        beam_idx: ``[max_positions + 2, sequences]`` int64; element 0 of row max_positions is the length of the prompts,
            element 0 of the last row their number. The beams of a prompt follow each other.
        offset: Position of the first query.
        scale: Factor on the scores; 0 means ``1 / sqrt(head_size)``.
        mask: Broadcastable to ``[sequences, heads, Q, offset + Q]``: boolean (True takes part) or additive in the dtype
            of ``query`` or float32; or None.
        alibi_slopes: ``[heads]`` float32: ``slope * (key position - query position)`` is added to the scores; or None.
        is_causal: Whether a query sees only positions up to its own.
        k_scale: Value of 1 in a quantized ``key_cache``.
        v_scale: Value of 1 in a quantized ``value_cache``.

    Returns:
        ``[sequences, heads, Q, head_size]``, stored as ``[sequences, Q, heads, head_size]``.

    Source: the indirect-access KV cache of Intel Extension for PyTorch.
    """
    sequences, queries = query.shape[:2]
    positions = key_cache.shape[0]
    out = query.new_empty(query.shape).transpose(1, 2)
    if out.numel() == 0:
        return out
    columns = _histories(beam_idx, positions, sequences, offset, queries)
    length = offset + queries
    for rows, cache, factor in ((key, key_cache, k_scale), (value, value_cache, v_scale)):
        cache[offset:length] = quantize(rows.transpose(0, 1), cache.dtype, factor)
    wide = torch.float64 if query.dtype == torch.float64 else torch.float32
    steps = torch.arange(length, device=query.device)
    if mask is not None:
        mask = mask.expand(sequences, query.shape[2], queries, length)
    for s in range(sequences):
        past_key, past_value = (
            dequantize(cache[steps, columns[s]].transpose(0, 1), factor).to(wide)
            for cache, factor in ((key_cache, k_scale), (value_cache, v_scale))
        )
        q = query[s].transpose(0, 1)
        mine = None if mask is None else mask[s]
        if is_causal:
            out[s] = attend(
                q, past_key, past_value, scale=scale, mask=mine, alibi_slopes=alibi_slopes
            )
            continue
        for t in range(
            queries
        ):  # each query as the last one, its alibi shifted to its own position
            one = slice(t, t + 1)
            bias = torch.zeros(query.shape[2], 1, length, dtype=wide, device=query.device)
            if mine is not None:
                bias = _additive(mine[:, one], bias)
            if alibi_slopes is not None:
                bias = bias + alibi_slopes.to(wide)[:, None, None] * (steps - (offset + t))
            out[s, :, one] = attend(q[:, one], past_key, past_value, scale=scale, mask=bias)
    return out


def _additive(mask: Tensor, zeros: Tensor) -> Tensor:
    """Return a mask as numbers to add, in the dtype of ``zeros``, which has the shape of the result."""
    if mask.dtype != torch.bool:
        return mask.to(zeros.dtype)
    return zeros.masked_fill(~mask, -float("inf"))


def _check(a: Arguments) -> None:
    check_tensor(OP, "query", a.query)
    text = "be 4-D [sequences, Q, heads, head_size]"
    check(a.query.dim() == 4, OP, "query", text, f"{a.query.dim()}-D")
    sequences, queries, heads, size = a.query.shape
    check_head_size(OP, size)
    check_score_scale(OP, "scale", a.scale)
    check_device(OP, "key", a.key, a.query, "query")
    check_dtype(OP, "key", a.key, a.query, "query")
    check(
        a.key.dim() == 4 and (*a.key.shape[:2], a.key.shape[3]) == (sequences, queries, size),
        OP,
        "key",
        f"have shape [{sequences}, {queries}, kv_heads, {size}]",
        list(a.key.shape),
    )
    check_like(OP, "value", a.value, a.key, "key")
    shape = "[max_positions, sequences, kv_heads, head_size]"
    check_caches(OP, a.key_cache, a.value_cache, a.query, "query", shape, written=True)
    kv_heads = a.key.shape[2]
    check(
        list(a.key_cache.shape[1:]) == [sequences, kv_heads, size],
        OP,
        "key_cache",
        f"have shape [max_positions, {sequences}, {kv_heads}, {size}]",
        list(a.key_cache.shape),
    )
    check_head_groups(OP, heads, kv_heads)
    positions = a.key_cache.shape[0]
    check_device(OP, "beam_idx", a.beam_idx, a.query, "query")
    check_dtype_in(OP, "beam_idx", a.beam_idx, torch.int64)
    check_shape(OP, "beam_idx", a.beam_idx, [positions + 2, sequences])
    check(
        0 <= a.offset <= positions - queries,
        OP,
        "offset",
        f"be between 0 and max_positions - Q = {positions - queries}",
        a.offset,
    )
    check_mask(OP, a.mask, a.query, (sequences, heads, queries, a.offset + queries))
    check_head_vector(OP, "alibi_slopes", a.alibi_slopes, heads, a.query)


def _fake(a: Arguments) -> Tensor:
    return a.query.new_empty(a.query.shape).transpose(1, 2)


def _histories(
    beam_idx: Tensor, positions: int, sequences: int, offset: int, queries: int
) -> list[Tensor]:
    """Return for each sequence the column of the row at each position."""
    indices = beam_idx.tolist()
    prompts = indices[positions + 1][0]
    check(
        prompts > 0 and sequences % prompts == 0,
        OP,
        "beam_idx",
        f"hold in its last row a number of prompts that divides {sequences}",
        prompts,
    )
    columns = []
    for s in range(sequences):
        column, history = s, [s] * queries
        for p in range(offset - 1, -1, -1):
            column = indices[p][column]
            text = f"hold numbers of sequences in [0, {sequences})"
            check(0 <= column < sequences, OP, "beam_idx", text, column)
            if p < indices[positions][0]:
                column -= column % (sequences // prompts)
            history.append(column)
        columns.append(torch.tensor(history[::-1], device=beam_idx.device))
    return columns


def _arguments(
    dtype: torch.dtype,
    prompts: int,
    beams: int,
    heads: int,
    kv_heads: int,
    size: int,
    prompt: int,
    offset: int,
    queries: int = 1,
    cache_dtype: torch.dtype | None = None,
    seed: int = 0,
) -> tuple[Any, ...]:
    """Return arguments after some steps of a beam search: a shared prompt, then random reordering."""
    sequences, positions = prompts * beams, offset + queries + 3
    generator = torch.Generator().manual_seed(seed)
    first = torch.arange(sequences) // beams * beams
    beam_idx = first.repeat(positions + 2, 1)
    for p in range(prompt, offset):
        choice = torch.randint(0, beams, (sequences,), generator=generator)
        keep = torch.rand(sequences, generator=generator) < 0.9
        beam_idx[p] = torch.where(keep, torch.arange(sequences), first + choice)
    beam_idx[offset : offset + queries] = torch.arange(sequences)
    beam_idx[positions] = prompt
    beam_idx[positions + 1] = prompts
    new = [
        randn(sequences, queries, n, size, dtype=dtype, seed=i)
        for i, n in enumerate((heads, kv_heads, kv_heads))
    ]
    caches = [
        quantize(
            randn(positions, sequences, kv_heads, size, dtype=dtype, seed=i),
            cache_dtype or dtype,
            0.1,
        )
        for i in (4, 5)
    ]
    return *new, *caches, beam_idx, offset


def _samples(dtype: torch.dtype) -> Iterator[Sample]:
    yield Sample(_arguments(dtype, 1, 1, 1, 1, 8, 0, 0), id="first")
    yield Sample(_arguments(dtype, 2, 1, 4, 2, 64, 5, 20), id="greedy")
    base = _arguments(dtype, 2, 4, 4, 2, 64, 70, 150)
    yield Sample(base, id="beams")
    yield Sample(_arguments(dtype, 1, 3, 8, 8, 32, 40, 45, 1), id="heads_together")
    yield Sample(_arguments(dtype, 1, 4, 2, 1, 128, 500, 600), id="splits")
    yield Sample(_arguments(dtype, 1, 2, 6, 3, 80, 10, 30, 4), id="four_queries")
    keep = randn(8, 1, 1, 151, seed=8) > -0.5
    keep[3] = False
    yield Sample((*base, 0.2, keep), id="bool_mask")
    slopes = randn(4, seed=9).abs() * 0.1
    additive = torch.where(keep, 0.0, torch.finfo(dtype).min).to(dtype)
    yield Sample((*base, 0.2, additive, slopes), id="additive_mask_and_alibi")
    several = _arguments(dtype, 2, 2, 4, 2, 32, 10, 30, 3)
    yield Sample((*several, 0.0, None, slopes, False), id="not_causal")
    bias = randn(4, 1, 3, 33, dtype=dtype, seed=10)
    yield Sample((*several, 0.0, bias, slopes, False), id="not_causal_additive_mask")
    views = [torch.cat([t, t], -1)[..., ::2].transpose(0, 1).contiguous() for t in several[:3]]
    yield Sample((*(t.transpose(0, 1) for t in views), *several[3:]), id="noncontiguous")
    for kind in (torch.float8_e5m2, torch.float8_e4m3fn):
        paged = _arguments(dtype, 1, 4, 4, 2, 64, 20, 90, 1, kind)
        name = dtype_name(kind)
        yield Sample((*paged, 0.0, None, None, True, 0.1, 0.1), id=name)
    yield Sample(
        (
            *_arguments(dtype, 1, 4, 4, 2, 64, 20, 90, 2, torch.int8),
            0.0,
            None,
            None,
            True,
            0.1,
            0.1,
        ),
        id="int8",
    )


def _stock_args(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    beam_idx: Tensor,
    offset: int,
) -> tuple[Any, ...]:
    """Caches whose columns are the histories: stock has reordered them after each step."""
    columns = _histories(beam_idx, key_cache.shape[0], query.shape[0], offset, 0)
    steps = torch.arange(offset)
    caches = [
        torch.stack([cache[steps, history] for history in columns], dim=1)
        for cache in (key_cache, value_cache)
    ]
    return query, key, value, *caches, beam_idx, offset


def _stock(
    query: Tensor, key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, *rest: Any
) -> Tensor:
    """What a cache without indices does: reorder, append, attend."""
    n, offset = query.shape[0], rest[1]
    past = [
        torch.cat([cache[:offset].index_select(1, torch.arange(n)), new.transpose(0, 1)])
        for cache, new in ((key_cache, key), (value_cache, value))
    ]
    return functional.scaled_dot_product_attention(
        query.transpose(1, 2),
        past[0].permute(1, 2, 0, 3),
        past[1].permute(1, 2, 0, 3),
        enable_gqa=query.shape[2] != key.shape[2],
    )


def _bench() -> Iterator[BenchCase]:
    # Four beams share the prompt.
    for heads, kv_heads, prompt in ((32, 32, 1024), (32, 8, 1024), (8, 2, 128)):
        n = 2 * kv_heads * 128 * (prompt + 4 * 64)
        yield BenchCase(
            f"4beams-{prompt}+64x{heads}({kv_heads})x128",
            functools.partial(
                _arguments,
                prompts=1,
                beams=4,
                heads=heads,
                kv_heads=kv_heads,
                size=128,
                prompt=prompt,
                offset=prompt + 64,
            ),
            lambda dtype, n=n: n * dtype.itemsize,
            rotate=prompt == 1024,
        )


register(
    OpSpec(
        name=OP,
        schema=(
            "(Tensor query, Tensor key, Tensor value, Tensor(a!) key_cache, Tensor(b!) value_cache,"
            " Tensor beam_idx, int offset, float scale=0.0, Tensor? mask=None, Tensor? alibi_slopes=None,"
            " bool is_causal=True, float k_scale=1.0, float v_scale=1.0) -> Tensor"
        ),
        reference=_attention,
        check=_check,
        fake=_fake,
        samples=_samples,
        stock=_stock,
        stock_args=_stock_args,
        backward=None,
        tolerance=TOLERANCE,
        bench=_bench,
        summary="Attention over a cache that beams share through indices",
    )
)

# SPDX-License-Identifier: Apache-2.0
"""Attention of one query per sequence over a paged cache, and over a cache that beams share through indices."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ipex_core.library.checks import (
    PRODUCT_TOLERANCE,
    check_device,
    check_dtype_in,
    check_kind,
    check_like,
    check_not_expanded,
    check_score_scale,
    check_shape,
    check_tensor,
    randn,
)
from ipex_core.library.kernels import register_op
from ipex_core.library.spec import Arguments, BenchCase, Sample, check, dtype_name
from ipex_core.ops.attention import (
    attend,
    check_head_groups,
    check_head_size,
    check_head_vector,
    check_mask,
    check_window,
    near_shape,
)
from ipex_core.ops.kv_cache import (
    check_block_tables,
    check_caches,
    check_index_tensor,
    check_longest,
    check_row_scales,
    dequantize,
    gather_blocks,
    quantize,
)

OP = "single_query_cached_kv_attention"


def _single_query(
    output: Tensor,
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    head_mapping: Tensor | None,
    scale: float,
    block_tables: Tensor,
    context_lens: Tensor,
    block_size: int,
    max_context_len: int,
    alibi_slopes: Tensor | None,
    window_size: int = -1,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    softcap: float = -1.0,
    sinks: Tensor | None = None,
    key_scales: Tensor | None = None,
    value_scales: Tensor | None = None,
) -> None:
    """Attend with the newest token of each sequence to its keys and values in a paged cache; write ``output``.

    Position ``p`` of sequence ``s`` is row ``p % block_size`` of block ``block_tables[s, p // block_size]``; the query
    is position ``context_lens[s] - 1``. A sequence of length 0 gives zeros.

    Args:
        output: ``[sequences, heads, head_size]``, written.
        query: Like ``output``; float32, bfloat16 or float16, head size up to 1024.
        key_cache: ``[num_blocks, kv_heads, block_size, head_size]``: the dtype of ``query``, int8,
            float8_e5m2 or float8_e4m3fn.
        value_cache: Like ``key_cache``.
        head_mapping: ``[heads]``, the cache head of each query head, which must be ``h // (heads / kv_heads)``; or
            anything of size kv_heads, or None.
        scale: Factor on the scores; 0 means ``1 / sqrt(head_size)``.
        block_tables: ``[sequences, max_blocks]`` int32 or int64; entries behind the length are not looked at.
        context_lens: ``[sequences]`` int32 or int64, the token of the query included.
        block_size: ``key_cache.shape[2]``.
        max_context_len: At least the largest of ``context_lens``.
        alibi_slopes: ``[heads]`` float32: ``slope * (key position - query position)`` is added to the scores; or
            ``[sequences, heads, n]`` in the dtype of ``query``: numbers added to the scores of the last n keys.
        window_size: How many keys a query sees, itself included; -1: all.
        k_scale: Factor on the numbers of ``key_cache``.
        v_scale: Factor on the numbers of ``value_cache``.
        softcap: If positive, scores become ``softcap * tanh(scores / softcap)``, before alibi.
        sinks: ``[heads]`` float32: a logit per head that joins the denominator of the softmax.
        key_scales: ``[num_blocks, kv_heads, block_size]`` float32, a further factor per row of an int8 cache, or None.
        value_scales: Like ``key_scales``.

    Source: Kwon et al., "Efficient Memory Management for Large Language Model Serving with PagedAttention", 2023.
    """
    heads, kv_heads = query.shape[1], key_cache.shape[1]
    if head_mapping is not None and head_mapping.shape[0] == heads:
        for h, mapped in enumerate(head_mapping.tolist()):
            want = h // (heads // kv_heads)
            check(mapped == want, OP, "head_mapping", f"map head {h} to {want}", mapped)
    lengths = context_lens.tolist()
    check_block_tables(OP, "context_lens", lengths, block_tables, block_size, key_cache.shape[0])
    check_longest(OP, lengths, max_context_len)
    wide = torch.float64 if query.dtype == torch.float64 else torch.float32
    near = alibi_slopes if near_shape(query, alibi_slopes) else None
    for s, length in enumerate(lengths):
        key, value = (
            dequantize(
                gather_blocks(cache, block_tables[s], length),
                factor,
                None if scales is None else gather_blocks(scales, block_tables[s], length),
            ).to(wide)
            for cache, factor, scales in (
                (key_cache, k_scale, key_scales),
                (value_cache, v_scale, value_scales),
            )
        )
        output[s] = attend(
            query[s].unsqueeze(1),
            key,
            value,
            scale=scale,
            alibi_slopes=near[s : s + 1] if near is not None else alibi_slopes,
            window_size=window_size,
            softcap=softcap,
            sinks=sinks,
        ).squeeze(1)


def _check(a: Arguments) -> None:
    check_tensor(OP, "query", a.query)
    text = "be 3-D [sequences, heads, head_size]"
    a.require(a.query.dim() == 3, "query", text, f"{a.query.dim()}-D")
    sequences, heads, size = a.query.shape
    check_head_size(OP, size)
    check_score_scale(OP, "scale", a.scale)
    check_like(OP, "output", a.output, a.query, "query")
    check_not_expanded(OP, "output", a.output)
    stride = a.output.stride(2)
    fine = stride == 1 or size <= 1
    a.require(fine, "output", "have a contiguous last dimension", f"stride {stride}")
    shape = "[num_blocks, kv_heads, block_size, head_size]"
    check_caches(a, "query", shape)
    fits = a.key_cache.shape[2] == a.block_size and a.key_cache.shape[3] == size
    text = f"have shape [num_blocks, kv_heads, {a.block_size}, {size}]"
    a.require(fits, "key_cache", text, list(a.key_cache.shape))
    a.require(a.block_size > 0, "block_size", "be positive")
    check_head_groups(OP, heads, a.key_cache.shape[1])
    if a.head_mapping is not None:
        check_index_tensor(OP, "head_mapping", a.head_mapping, 1, a.query)
        have = a.head_mapping.shape[0]
        fits = have in (heads, a.key_cache.shape[1])
        a.require(fits, "head_mapping", f"have size heads = {heads}", have)
    check_index_tensor(OP, "block_tables", a.block_tables, 2, a.query)
    check_index_tensor(OP, "context_lens", a.context_lens, 1, a.query)
    have = a.block_tables.shape[0]
    a.require(have == sequences, "block_tables", f"have {sequences} rows", have)
    have = a.context_lens.shape[0]
    a.require(have == sequences, "context_lens", f"have size sequences = {sequences}", have)
    check_window(OP, a.window_size)
    if near_shape(a.query, a.alibi_slopes):
        check_kind(OP, "alibi_slopes", a.alibi_slopes, a.query, "query")
    else:
        check_head_vector(OP, "alibi_slopes", a.alibi_slopes, heads, a.query)
    check_head_vector(OP, "sinks", a.sinks, heads, a.query)
    check_row_scales(OP, "key_scales", a.key_scales, a.key_cache)
    check_row_scales(OP, "value_scales", a.value_scales, a.value_cache)


def _tables(lengths: list[int], block_size: int, extra: int = 1) -> tuple[Tensor, int]:
    """Return block tables with blocks in random order, padded with -1, and the number of blocks."""
    counts = [-(-n // block_size) for n in lengths]
    blocks = sum(counts) + extra
    order = torch.randperm(blocks, generator=torch.Generator().manual_seed(blocks)).tolist()
    tables = torch.full((len(lengths), max([*counts, 1])), -1, dtype=torch.int32)
    for row, count in zip(tables, counts, strict=True):
        row[:count] = torch.tensor([order.pop() for _ in range(count)], dtype=torch.int32)
    return tables, blocks


def _arguments(
    dtype: torch.dtype,
    lengths: list[int],
    heads: int,
    kv_heads: int,
    size: int,
    block_size: int,
    scale: float = 0.0,
    alibi_slopes: Tensor | None = None,
) -> tuple[Any, ...]:
    tables, blocks = _tables(lengths, block_size)
    query = randn(len(lengths), heads, size, dtype=dtype, seed=1)
    return (
        torch.zeros_like(query),
        query,
        randn(blocks, kv_heads, block_size, size, dtype=dtype, seed=2),
        randn(blocks, kv_heads, block_size, size, dtype=dtype, seed=3),
        (torch.arange(heads) // (heads // kv_heads)).int(),
        scale or size**-0.5,
        tables,
        torch.tensor(lengths, dtype=torch.int32),
        block_size,
        max([*lengths, 0]),
        alibi_slopes,
    )


def _samples(dtype: torch.dtype) -> Iterator[Sample]:
    yield Sample(_arguments(dtype, [1], 1, 1, 8, 1), id="one")
    yield Sample(_arguments(dtype, [5, 17, 0, 64], 4, 2, 32, 16), id="lengths")
    base = _arguments(dtype, [100, 1, 33], 6, 2, 64, 16)
    yield Sample(base, id="group")
    yield Sample(_arguments(dtype, [700, 300], 8, 1, 128, 32, 0.2), id="splits")
    yield Sample(_arguments(dtype, [90, 40], 3, 3, 80, 7), id="odd_sizes")
    yield Sample(_arguments(dtype, [33, 65], 2, 1, 256, 128), id="large_blocks")
    slopes, sinks = randn(6, seed=4).abs(), randn(6, seed=5)
    yield Sample((*base[:10], slopes), id="alibi")
    near = randn(3, 6, 40, dtype=dtype, seed=16)
    yield Sample((*base[:10], near, 50, 1.0, 1.0, 3.0, sinks), id="near")
    yield Sample((*base, 20), id="window")
    yield Sample((*base, -1, 1.0, 1.0, 2.0), id="softcap")
    yield Sample((*base, -1, 1.0, 1.0, -1.0, sinks), id="sinks")
    yield Sample((*base[:10], slopes, 50, 1.0, 1.0, 3.0, sinks), id="everything")
    out, query, key, value, _, scale, tables, lengths, *rest = base
    longer = (None, scale, tables.long(), lengths.long(), *rest)
    yield Sample((out, query, key, value, *longer), id="int64_tables")
    stored = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in (key, value)]
    yield Sample((out, query, *stored, *longer), id="transposed_cache")
    strided = randn(3, 6, 128, dtype=dtype, seed=6)
    views = strided.clone()[..., :64], strided[..., ::2]
    yield Sample((*views, key, value, *longer), id="noncontiguous")
    for kind in (torch.float8_e5m2, torch.float8_e4m3fn):
        fp8 = [quantize(t, kind, 0.5) for t in (key, value)]
        name = dtype_name(kind)
        yield Sample((out, query, *fp8, *longer, -1, 0.5, 0.25), id=name)
    int8 = [quantize(t, torch.int8, 0.03) for t in (key, value)]
    yield Sample((out, query, *int8, *longer, -1, 0.03, 0.04), id="int8")
    scales = [randn(*key.shape[:3], seed=i).abs() * 0.02 for i in (7, 8)]
    yield Sample((out, query, *int8, *longer, -1, 1.5, 0.5, -1.0, None, *scales), id="row_scales")
    broken = value.clone()
    broken[tables[0, 1], 0, 3, 5] = float("nan")
    yield Sample((out, query, key, broken, *longer), id="nan")
    yield Sample(_arguments(dtype, [], 2, 2, 32, 16), id="no_sequences")


def _stock(
    output: Tensor, query: Tensor, key_cache: Tensor, value_cache: Tensor, *rest: Any
) -> None:
    scale, tables, lengths = rest[1], rest[2].long(), rest[3].tolist()
    for s, length in enumerate(lengths):
        key, value = (gather_blocks(c, tables[s], length) for c in (key_cache, value_cache))
        output[s] = functional.scaled_dot_product_attention(
            query[s, None, :, None],
            key[None],
            value[None],
            scale=scale,
            enable_gqa=query.shape[1] != key_cache.shape[1],
        )[0, :, 0]


def _bench() -> Iterator[BenchCase]:
    for sequences, heads, kv_heads, length in ((1, 32, 8, 2048), (8, 32, 8, 1024)):
        n = 2 * sequences * kv_heads * length * 128
        yield BenchCase(
            f"{sequences}x{heads}({kv_heads})x{length}x128",
            functools.partial(
                _arguments,
                lengths=[length] * sequences,
                heads=heads,
                kv_heads=kv_heads,
                size=128,
                block_size=32,
            ),
            lambda dtype, n=n: n * dtype.itemsize,
            rotate=True,
        )


register_op(
    name=OP,
    schema=(
        "(Tensor(a!) output, Tensor query, Tensor key_cache, Tensor value_cache, Tensor? head_mapping,"
        " float scale, Tensor block_tables, Tensor context_lens, int block_size, SymInt max_context_len,"
        " Tensor? alibi_slopes, int window_size=-1, float k_scale=1.0, float v_scale=1.0,"
        " float softcap=-1.0, Tensor? sinks=None, Tensor? key_scales=None, Tensor? value_scales=None) -> ()"
    ),
    reference=_single_query,
    check=_check,
    samples=_samples,
    stock=_stock,
    backward=None,
    tolerance=PRODUCT_TOLERANCE,
    bench=_bench,
    summary="Attention of one query per sequence over a paged cache",
)


# --- over a cache that beams share ------------------------------------------------------------------------------------


INDIRECT_OP = "indirect_access_kv_cache_attention"


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


def _indirect_check(a: Arguments) -> None:
    check_tensor(INDIRECT_OP, "query", a.query)
    text = "be 4-D [sequences, Q, heads, head_size]"
    a.require(a.query.dim() == 4, "query", text, f"{a.query.dim()}-D")
    sequences, queries, heads, size = a.query.shape
    check_head_size(INDIRECT_OP, size)
    check_score_scale(INDIRECT_OP, "scale", a.scale)
    check_kind(INDIRECT_OP, "key", a.key, a.query, "query")
    fits = a.key.dim() == 4 and (*a.key.shape[:2], a.key.shape[3]) == (sequences, queries, size)
    text = f"have shape [{sequences}, {queries}, kv_heads, {size}]"
    a.require(fits, "key", text, list(a.key.shape))
    check_like(INDIRECT_OP, "value", a.value, a.key, "key")
    shape = "[max_positions, sequences, kv_heads, head_size]"
    check_caches(a, "query", shape, written=True)
    kv_heads = a.key.shape[2]
    fits = list(a.key_cache.shape[1:]) == [sequences, kv_heads, size]
    text = f"have shape [max_positions, {sequences}, {kv_heads}, {size}]"
    a.require(fits, "key_cache", text, list(a.key_cache.shape))
    check_head_groups(INDIRECT_OP, heads, kv_heads)
    positions = a.key_cache.shape[0]
    check_device(INDIRECT_OP, "beam_idx", a.beam_idx, a.query, "query")
    check_dtype_in(INDIRECT_OP, "beam_idx", a.beam_idx, torch.int64)
    check_shape(INDIRECT_OP, "beam_idx", a.beam_idx, [positions + 2, sequences])
    fits = 0 <= a.offset <= positions - queries
    a.require(fits, "offset", f"be between 0 and max_positions - Q = {positions - queries}")
    check_mask(INDIRECT_OP, a.mask, a.query, (sequences, heads, queries, a.offset + queries))
    check_head_vector(INDIRECT_OP, "alibi_slopes", a.alibi_slopes, heads, a.query)


def _histories(
    beam_idx: Tensor, positions: int, sequences: int, offset: int, queries: int
) -> list[Tensor]:
    """Return for each sequence the column of the row at each position."""
    indices = beam_idx.tolist()
    prompts = indices[positions + 1][0]
    text = f"hold in its last row a number of prompts that divides {sequences}"
    check(prompts > 0 and sequences % prompts == 0, INDIRECT_OP, "beam_idx", text, prompts)
    columns = []
    for s in range(sequences):
        column, history = s, [s] * queries
        for p in range(offset - 1, -1, -1):
            column = indices[p][column]
            text = f"hold numbers of sequences in [0, {sequences})"
            check(0 <= column < sequences, INDIRECT_OP, "beam_idx", text, column)
            if p < indices[positions][0]:
                column -= column % (sequences // prompts)
            history.append(column)
        columns.append(torch.tensor(history[::-1], device=beam_idx.device))
    return columns


def _indirect_arguments(
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


def _indirect_samples(dtype: torch.dtype) -> Iterator[Sample]:
    yield Sample(_indirect_arguments(dtype, 1, 1, 1, 1, 8, 0, 0), id="first")
    yield Sample(_indirect_arguments(dtype, 2, 1, 4, 2, 64, 5, 20), id="greedy")
    base = _indirect_arguments(dtype, 2, 4, 4, 2, 64, 70, 150)
    yield Sample(base, id="beams")
    yield Sample(_indirect_arguments(dtype, 1, 3, 8, 8, 32, 40, 45, 1), id="heads_together")
    yield Sample(_indirect_arguments(dtype, 1, 4, 2, 1, 128, 500, 600), id="splits")
    yield Sample(_indirect_arguments(dtype, 1, 2, 6, 3, 80, 10, 30, 4), id="four_queries")
    keep = randn(8, 1, 1, 151, seed=8) > -0.5
    keep[3] = False
    yield Sample((*base, 0.2, keep), id="bool_mask")
    slopes = randn(4, seed=9).abs() * 0.1
    additive = torch.where(keep, 0.0, torch.finfo(dtype).min).to(dtype)
    yield Sample((*base, 0.2, additive, slopes), id="additive_mask_and_alibi")
    several = _indirect_arguments(dtype, 2, 2, 4, 2, 32, 10, 30, 3)
    yield Sample((*several, 0.0, None, slopes, False), id="not_causal")
    bias = randn(4, 1, 3, 33, dtype=dtype, seed=10)
    yield Sample((*several, 0.0, bias, slopes, False), id="not_causal_additive_mask")
    views = [torch.cat([t, t], -1)[..., ::2].transpose(0, 1).contiguous() for t in several[:3]]
    yield Sample((*(t.transpose(0, 1) for t in views), *several[3:]), id="noncontiguous")
    for kind in (torch.float8_e5m2, torch.float8_e4m3fn):
        paged = _indirect_arguments(dtype, 1, 4, 4, 2, 64, 20, 90, 1, kind)
        name = dtype_name(kind)
        yield Sample((*paged, 0.0, None, None, True, 0.1, 0.1), id=name)
    yield Sample(
        (
            *_indirect_arguments(dtype, 1, 4, 4, 2, 64, 20, 90, 2, torch.int8),
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


def _indirect_stock(
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


def _indirect_bench() -> Iterator[BenchCase]:
    # Four beams share the prompt.
    for heads, kv_heads, prompt in ((32, 32, 1024), (32, 8, 1024), (8, 2, 128)):
        n = 2 * kv_heads * 128 * (prompt + 4 * 64)
        yield BenchCase(
            f"4beams-{prompt}+64x{heads}({kv_heads})x128",
            functools.partial(
                _indirect_arguments,
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


register_op(
    name=INDIRECT_OP,
    mutates=("key_cache", "value_cache"),
    reference=_attention,
    check=_indirect_check,
    fake=lambda a: a.query.new_empty(a.query.shape).transpose(1, 2),
    samples=_indirect_samples,
    stock=_indirect_stock,
    stock_args=_stock_args,
    backward=None,
    tolerance=PRODUCT_TOLERANCE,
    bench=_indirect_bench,
    summary="Attention over a cache that beams share through indices",
)

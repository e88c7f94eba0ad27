# SPDX-License-Identifier: Apache-2.0
"""Attention of one query per sequence over a paged cache."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch.nn import functional

from ipex_core.library.arguments import Arguments
from ipex_core.library.checks import (
    check_like,
    check_not_expanded,
    check_score_scale,
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
    check_window,
)
from ipex_core.ops.kv_cache.checks import (
    check_block_tables,
    check_caches,
    check_index_tensor,
    check_longest,
    check_row_scales,
    dequantize,
    gather_blocks,
    quantize,
)

Tensor = torch.Tensor

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
        alibi_slopes: ``[heads]`` float32: ``slope * (key position - query position)`` is added to the scores; or None.
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
            alibi_slopes=alibi_slopes,
            window_size=window_size,
            softcap=softcap,
            sinks=sinks,
        ).squeeze(1)


def _check(a: Arguments) -> None:
    check_tensor(OP, "query", a.query)
    text = "be 3-D [sequences, heads, head_size]"
    check(a.query.dim() == 3, OP, "query", text, f"{a.query.dim()}-D")
    sequences, heads, size = a.query.shape
    check_head_size(OP, size)
    check_score_scale(OP, "scale", a.scale)
    check_like(OP, "output", a.output, a.query, "query")
    check_not_expanded(OP, "output", a.output)
    stride = a.output.stride(2)
    fine = stride == 1 or size <= 1
    check(fine, OP, "output", "have a contiguous last dimension", f"stride {stride}")
    shape = "[num_blocks, kv_heads, block_size, head_size]"
    check_caches(OP, a.key_cache, a.value_cache, a.query, "query", shape)
    check(
        a.key_cache.shape[2] == a.block_size and a.key_cache.shape[3] == size,
        OP,
        "key_cache",
        f"have shape [num_blocks, kv_heads, {a.block_size}, {size}]",
        list(a.key_cache.shape),
    )
    check(a.block_size > 0, OP, "block_size", "be positive", a.block_size)
    check_head_groups(OP, heads, a.key_cache.shape[1])
    if a.head_mapping is not None:
        check_index_tensor(OP, "head_mapping", a.head_mapping, 1, a.query)
        have = a.head_mapping.shape[0]
        fits = have in (heads, a.key_cache.shape[1])
        check(fits, OP, "head_mapping", f"have size heads = {heads}", have)
    check_index_tensor(OP, "block_tables", a.block_tables, 2, a.query)
    check_index_tensor(OP, "context_lens", a.context_lens, 1, a.query)
    have = a.block_tables.shape[0]
    check(have == sequences, OP, "block_tables", f"have {sequences} rows", have)
    have = a.context_lens.shape[0]
    check(have == sequences, OP, "context_lens", f"have size sequences = {sequences}", have)
    check_window(OP, a.window_size)
    check_head_vector(OP, "alibi_slopes", a.alibi_slopes, heads, a.query)
    check_head_vector(OP, "sinks", a.sinks, heads, a.query)
    check_row_scales(OP, "key_scales", a.key_scales, a.key_cache)
    check_row_scales(OP, "value_scales", a.value_scales, a.value_cache)


def _fake(a: Arguments) -> None:
    return None


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


register(
    OpSpec(
        name=OP,
        schema=(
            "(Tensor(a!) output, Tensor query, Tensor key_cache, Tensor value_cache, Tensor? head_mapping,"
            " float scale, Tensor block_tables, Tensor context_lens, int block_size, SymInt max_context_len,"
            " Tensor? alibi_slopes, int window_size=-1, float k_scale=1.0, float v_scale=1.0,"
            " float softcap=-1.0, Tensor? sinks=None, Tensor? key_scales=None, Tensor? value_scales=None) -> ()"
        ),
        reference=_single_query,
        check=_check,
        fake=_fake,
        samples=_samples,
        stock=_stock,
        backward=None,
        tolerance=TOLERANCE,
        bench=_bench,
        summary="Attention of one query per sequence over a paged cache",
    )
)

# SPDX-License-Identifier: Apache-2.0
"""Attention over packed sequences of different lengths, and of packed queries over a paged cache."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ipex_core.library.checks import (
    PRODUCT_TOLERANCE,
    check_kind,
    check_score_scale,
    randn,
)
from ipex_core.library.kernels import register_op
from ipex_core.library.spec import Arguments, BenchCase, Sample
from ipex_core.ops.attention import (
    attention_reference,
    check_offset_tensor,
    check_offsets,
    check_options,
    check_rows,
)
from ipex_core.ops.kv_cache import (
    check_block_tables,
    check_cache_kind,
    check_caches,
    check_index_tensor,
    check_row_scales,
    dequantize,
    gather_blocks,
    quantize,
)

OP = "varlen_attention"


def _varlen_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    seqlen_q: Tensor,
    seqlen_k: Tensor,
    alibi_slopes: Tensor | None,
    max_seqlen_q: int,
    max_seqlen_k: int,
    pdropout: float,
    softmax_scale: float,
    zero_tensors: bool,
    is_causal: bool,
    return_softmax: bool,
    window_size_left: int = -1,
    window_size_right: int = -1,
    softcap: float = -1.0,
    sinks: Tensor | None = None,
) -> None:
    """Write the attention of each sequence to its own keys and values into ``out``.

    Sequence b owns the rows ``seqlen_q[b]`` to ``seqlen_q[b + 1]`` of ``query`` and ``out`` and the rows
    ``seqlen_k[b]`` to ``seqlen_k[b + 1]`` of ``key`` and ``value``. Where it has more keys than queries, the queries
    are the last positions: query i of n stands at the key ``p = keys - n + i``, which ``is_causal``, the window and
    the slopes refer to. A query that sees no key gets zeros. Rows of ``out`` of no sequence stay as they are, unless
    ``zero_tensors``.

    Args:
        query: ``[tokens, heads, head_size]``, float32, bfloat16 or float16.
        key: ``[key_tokens, kv_heads, head_size]``; heads is a multiple of kv_heads.
        value: Like ``key``.
        out: Like ``query``, with a contiguous last dimension; written.
        seqlen_q: ``[sequences + 1]`` int32 or int64, offsets of the sequences in ``query``, non-decreasing.
        seqlen_k: ``[sequences + 1]``, offsets in ``key``.
        alibi_slopes: ``[heads]`` or ``[sequences, heads]`` in the dtype of ``query`` or float32:
            ``-slope * |p - j|`` is added to the score of the key j; or None.
        max_seqlen_q: Length of the longest sequence; not needed here.
        max_seqlen_k: The same for the keys.
        pdropout: 0: there is no dropout.
        softmax_scale: Factor on the scores; 0 means ``1 / sqrt(head_size)``.
        zero_tensors: Fill ``out`` with zeros first.
        is_causal: Let a query see the keys up to its place p only.
        return_softmax: False: the weights never exist as a whole.
        window_size_left: How many keys before p a query sees; negative: all.
        window_size_right: How many keys behind p a query sees; negative: all.
        softcap: If positive, scores become ``softcap * tanh(scores / softcap)``, before alibi.
        sinks: ``[heads]`` in the dtype of ``query`` or float32: a score per head that takes part in the sum of the
            softmax, but has no value; or None.

    Source: Dao, "FlashAttention-2", 2023.
    """
    queries = check_offsets(OP, "seqlen_q", seqlen_q, query.shape[0])
    keys = check_offsets(OP, "seqlen_k", seqlen_k, key.shape[0])
    if zero_tensors:
        out.zero_()
    for b, ((q0, q1), (k0, k1)) in enumerate(zip(queries, keys, strict=True)):
        slopes = alibi_slopes
        if slopes is not None and slopes.dim() == 2:
            slopes = slopes[b]
        result = attention_reference(
            query[None, q0:q1].transpose(1, 2),
            key[None, k0:k1].transpose(1, 2),
            value[None, k0:k1].transpose(1, 2),
            scale=softmax_scale,
            is_causal=is_causal,
            alibi_slopes=slopes,
            window_left=window_size_left,
            window_right=window_size_right,
            softcap=softcap,
            sinks=sinks,
            bottom_right=True,
        )
        out[q0:q1] = result[0].transpose(0, 1)


def _check(a: Arguments) -> None:
    check_rows(a)
    check_score_scale(OP, "softmax_scale", a.softmax_scale)
    heads, size = a.query.shape[1:]
    for name, tensor in (("key", a.key), ("value", a.value)):
        check_kind(OP, name, tensor, a.query, "query")
    text = f"have shape [tokens, kv_heads, {size}]"
    a.require(a.key.dim() == 3 and a.key.shape[2] == size, "key", text, list(a.key.shape))
    text = f"have the shape of key = {list(a.key.shape)}"
    a.require(list(a.value.shape) == list(a.key.shape), "value", text, list(a.value.shape))
    text = f"have a number of heads that divides the {heads} heads of query"
    a.require(a.key.shape[1] > 0 and heads % a.key.shape[1] == 0, "key", text, a.key.shape[1])
    check_offset_tensor(OP, "seqlen_q", a.seqlen_q, a.query)
    check_offset_tensor(OP, "seqlen_k", a.seqlen_k, a.query, a.seqlen_q.shape[0])
    a.require(a.pdropout == 0, "pdropout", "be 0", f"{a.pdropout:g}")
    a.require(not a.return_softmax, "return_softmax", "be False")
    check_options(a, a.seqlen_q.shape[0] - 1, heads)


def _make(
    dtype: torch.dtype,
    heads: int,
    kv_heads: int,
    size: int,
    queries: tuple[int, ...],
    keys: tuple[int, ...],
) -> tuple[Tensor, ...]:
    rows = sum(queries) + 2, sum(keys) + 3  # the last ones belong to no sequence
    return (
        randn(rows[0], heads, size, dtype=dtype, seed=81),
        randn(rows[1], kv_heads, size, dtype=dtype, seed=82),
        randn(rows[1], kv_heads, size, dtype=dtype, seed=83),
        randn(rows[0], heads, size, dtype=dtype, seed=84),
        torch.tensor([0, *queries]).cumsum(0),
        torch.tensor([0, *keys]).cumsum(0),
    )


def _samples(dtype: torch.dtype) -> Iterator[Sample]:
    def rest(queries: tuple[int, ...], keys: tuple[int, ...], causal: bool, *more: Any) -> Any:
        slopes, *others = more or (None,)
        return slopes, max(queries), max(keys), 0.0, 0.0, False, causal, False, *others

    few = (5, 1, 0, 70, 33), (5, 40, 8, 70, 0)
    mixed = (100, 300, 3, 1), (100, 300, 700, 520)
    for causal in (False, True):
        yield Sample((*_make(dtype, 4, 4, 32, *few), *rest(*few, causal)), id=f"few-{causal}")
        yield Sample((*_make(dtype, 8, 2, 64, *mixed), *rest(*mixed, causal)), id=f"mixed-{causal}")
    yield Sample((*_make(dtype, 3, 1, 33, *few), *rest(*few, True)), id="odd_head")
    slopes, sinks = 2.0 ** -torch.arange(1, 5), randn(4, seed=85)
    args = _make(dtype, 4, 2, 40, *few)
    yield Sample((*args, *rest(*few, True, slopes)), id="alibi")
    slopes = slopes.repeat(5, 1) * torch.arange(1, 6)[:, None]
    yield Sample((*args, *rest(*few, False, slopes.to(dtype))), id="alibi_per_sequence")
    yield Sample((*args, *rest(*few, False, None, 7, 3)), id="window")
    long = _make(dtype, 4, 2, 40, *mixed)
    yield Sample((*long, *rest(*mixed, True, None, 60, -1, 2.0, sinks)), id="everything")
    yield Sample((*args, None, 0, 0, 0.0, 0.3, True, True, False), id="zero_tensors")
    short = (*args[:4], args[4].int(), args[5].int())
    yield Sample((*short, *rest(*few, True)), id="int32_offsets")
    qkv = randn(112, 8, 40, dtype=dtype, seed=86)
    split = (qkv[:, :4], qkv[:, 4:6], qkv[:, 6:], torch.zeros(112, 8, 40, dtype=dtype)[:, 2:6])
    yield Sample((*split, args[4], args[4], *rest(*few, True)), id="split_projection")
    none = torch.zeros(1, dtype=torch.int64)
    yield Sample((*args[:4], none, none, *rest(*few, True)), id="no_sequences")


def _stock(
    query: Tensor, key: Tensor, value: Tensor, out: Tensor, seqlen_q: Tensor, *rest: Any
) -> None:
    offsets = seqlen_q.tolist()
    for begin, end in itertools.pairwise(offsets):
        q, k, v = (x[None, begin:end].transpose(1, 2) for x in (query, key, value))
        result = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        out[begin:end] = result[0].transpose(0, 1)


def _bench() -> Iterator[BenchCase]:
    def make(lengths: tuple[int, ...], dtype: torch.dtype) -> tuple[Any, ...]:
        args = _make(dtype, 16, 4, 128, lengths, lengths)
        return *args, None, max(lengths), max(lengths), 0.0, 0.0, False, True, False

    def n_bytes(lengths: tuple[int, ...], dtype: torch.dtype) -> int:
        return 2 * sum(lengths) * 128 * (16 + 4) * dtype.itemsize

    for name, lengths in (
        ("8 prompts of 37..900", (37, 900, 120, 256, 64, 480, 33, 75)),
        ("1 prompt of 1024", (1024,)),
    ):
        yield BenchCase(
            name,
            functools.partial(make, lengths),
            functools.partial(n_bytes, lengths),
            flops=2 * 16 * 128 * sum(n * n for n in lengths),
        )


register_op(
    schema=(
        "(Tensor query, Tensor key, Tensor value, Tensor(a!) out, Tensor seqlen_q, Tensor seqlen_k,"
        " Tensor? alibi_slopes, SymInt max_seqlen_q, SymInt max_seqlen_k, float pdropout, float softmax_scale,"
        " bool zero_tensors, bool is_causal, bool return_softmax, int window_size_left=-1,"
        " int window_size_right=-1, float softcap=-1.0, Tensor? sinks=None) -> ()"
    ),
    reference=_varlen_attention,
    check=_check,
    samples=_samples,
    stock=_stock,
    backward=None,
    tolerance=PRODUCT_TOLERANCE,
    bench=_bench,
    summary="Attention over packed sequences of different lengths",
)


# --- over a paged cache -----------------------------------------------------------------------------------------------


FLASH_OP = "flash_attn_varlen_func"

#: The largest offset: more keys than any cache has.
_MOST_KEYS = 2**62


def _flash_attn_varlen_func(
    out: Tensor,
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_kv: Tensor,
    max_seqlen_q: int,
    max_seqlen_kv: int,
    softmax_scale: float,
    is_causal: bool,
    block_table: Tensor,
    alibi_slopes: Tensor | None = None,
    window_left: int = -1,
    window_right: int = -1,
    kv_cache_dtype: str = "auto",
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    softcap: float = -1.0,
    sinks: Tensor | None = None,
    key_scales: Tensor | None = None,
    value_scales: Tensor | None = None,
) -> None:
    """Write the attention of each sequence to its rows of a paged cache into ``out``.

    Sequence b owns the rows ``cu_seqlens_q[b]`` to ``cu_seqlens_q[b + 1]`` of ``query`` and ``out``. Its keys are the
    first ``cu_seqlens_kv[b + 1] - cu_seqlens_kv[b]`` rows of the blocks that ``block_table[b]`` names, with the keys
    of its queries: the queries are the last positions, query i of n stands at the key ``p = keys - n + i``. So one
    batch may hold whole prompts, pieces of prompts and single new tokens. A query that sees no key gets zeros. Rows
    of ``out`` of no sequence stay as they are.

    Args:
        out: Like ``query``, with a contiguous last dimension; written.
        query: ``[tokens, heads, head_size]``, float32, bfloat16 or float16.
        key_cache: ``[num_blocks, kv_heads, block_size, head_size]`` in the dtype of ``query``, int8,
            float8_e5m2 or float8_e4m3fn,
            of any strides but with a contiguous last dimension; heads is a multiple of kv_heads.
        value_cache: Like ``key_cache``.
        cu_seqlens_q: ``[sequences + 1]`` int32 or int64, offsets of the sequences in ``query``, non-decreasing.
        cu_seqlens_kv: ``[sequences + 1]``, running sum of the numbers of keys.
        max_seqlen_q: Length of the longest sequence; not needed here.
        max_seqlen_kv: The same for the keys.
        softmax_scale: Factor on the scores; 0 means ``1 / sqrt(head_size)``.
        is_causal: Let a query see the keys up to its place p only.
        block_table: ``[sequences, blocks]`` int32 or int64; entries that are not needed may hold anything.
        alibi_slopes: ``[heads]`` or ``[sequences, heads]`` in the dtype of ``query`` or float32:
            ``-slope * |p - j|`` is added to the score of the key j. Or ``[tokens, heads, n]`` in the dtype of
            ``query``: numbers added to the scores of the last n keys up to p, the last one to the score of p. Or None.
        window_left: How many keys before p a query sees; negative: all.
        window_right: How many keys behind p a query sees; negative: all.
        kv_cache_dtype: ``"auto"`` (what the caches are), or a demand: ``"fp8"`` or ``"fp8_e5m2"``,
            ``"fp8_e4m3"``, ``"int8"``.
        k_scale: Factor on the numbers of ``key_cache``, positive.
        v_scale: Factor on the numbers of ``value_cache``, positive.
        softcap: If positive, scores become ``softcap * tanh(scores / softcap)``, before alibi.
        sinks: ``[heads]`` in the dtype of ``query`` or float32: a score per head that takes part in the sum of the
            softmax, but has no value; or None.
        key_scales: ``[num_blocks, kv_heads, block_size]`` float32, a further factor per row of an int8 cache; or None.
        value_scales: Like ``key_scales``.

    Source: Kwon et al., "Efficient Memory Management for Large Language Model Serving with PagedAttention", 2023;
    Dao, "FlashAttention-2", 2023; Agrawal et al., "SARATHI" (chunked prefill), 2023.
    """
    queries = check_offsets(FLASH_OP, "cu_seqlens_q", cu_seqlens_q, query.shape[0])
    keys = check_offsets(FLASH_OP, "cu_seqlens_kv", cu_seqlens_kv, _MOST_KEYS)
    lengths = [end - begin for begin, end in keys]
    blocks, _, block_size, _ = key_cache.shape
    check_block_tables(
        FLASH_OP, "cu_seqlens_kv", lengths, block_table, block_size, blocks, "block_table"
    )
    for b, (begin, end) in enumerate(queries):

        def rows(cache: Tensor, scale: float, scales: Tensor | None, b: int = b) -> Tensor:
            def of(x: Tensor) -> Tensor:
                return gather_blocks(x, block_table[b], lengths[b])

            values = dequantize(of(cache), scale, None if scales is None else of(scales))
            return values[None].to(torch.promote_types(query.dtype, values.dtype))

        slopes = alibi_slopes
        if slopes is not None and slopes.dim() > 1:
            slopes = slopes[b] if slopes.dim() == 2 else slopes[begin:end]
        key = rows(key_cache, k_scale, key_scales)
        result = attention_reference(
            query[None, begin:end].transpose(1, 2).to(key.dtype),
            key,
            rows(value_cache, v_scale, value_scales),
            scale=softmax_scale,
            is_causal=is_causal,
            alibi_slopes=slopes,
            window_left=window_left,
            window_right=window_right,
            softcap=softcap,
            sinks=sinks,
            bottom_right=True,
        )
        out[begin:end] = result[0].transpose(0, 1).to(out.dtype)


def _flash_check(a: Arguments) -> None:
    check_rows(a)
    check_score_scale(FLASH_OP, "softmax_scale", a.softmax_scale)
    heads, size = a.query.shape[1:]
    layout = "[num_blocks, kv_heads, block_size, head_size]"
    check_caches(a, "query", layout)
    fits = a.key_cache.shape[2] > 0 and a.key_cache.shape[3] == size
    text = f"have shape [num_blocks, kv_heads, block_size, {size}]"
    a.require(fits, "key_cache", text, list(a.key_cache.shape))
    fits = a.key_cache.shape[1] > 0 and heads % a.key_cache.shape[1] == 0
    text = f"have a number of heads that divides the {heads} heads of query"
    a.require(fits, "key_cache", text, a.key_cache.shape[1])
    check_offset_tensor(FLASH_OP, "cu_seqlens_q", a.cu_seqlens_q, a.query)
    check_offset_tensor(
        FLASH_OP, "cu_seqlens_kv", a.cu_seqlens_kv, a.query, a.cu_seqlens_q.shape[0]
    )
    sequences = a.cu_seqlens_q.shape[0] - 1
    check_index_tensor(FLASH_OP, "block_table", a.block_table, 2, a.query)
    have = a.block_table.shape[0]
    a.require(have == sequences, "block_table", f"have {sequences} rows", have)
    check_cache_kind(FLASH_OP, a.kv_cache_dtype, a.key_cache)
    for name, scale in (("k_scale", a.k_scale), ("v_scale", a.v_scale)):
        fine = scale > 0 and math.isfinite(scale)
        a.require(fine, name, "be positive and finite", f"{scale:g}")
    check_row_scales(FLASH_OP, "key_scales", a.key_scales, a.key_cache)
    check_row_scales(FLASH_OP, "value_scales", a.value_scales, a.value_cache)
    check_options(a, sequences, heads)


def _flash_make(
    dtype: torch.dtype,
    heads: int,
    kv_heads: int,
    size: int,
    block_size: int,
    queries: tuple[int, ...],
    keys: tuple[int, ...],
) -> tuple[Any, ...]:
    """Return the arguments up to the block table; the blocks of the sequences are mixed up."""
    tokens = sum(queries) + 2  # the last ones belong to no sequence
    needed = [-(-n // block_size) for n in keys]
    blocks = sum(needed) + 1
    order = torch.randperm(blocks, generator=torch.Generator().manual_seed(blocks)).tolist()
    table = torch.full((len(keys), max(needed, default=0) + 1), -7, dtype=torch.int32)
    for b, n in enumerate(needed):
        table[b, :n] = torch.tensor([order.pop() for _ in range(n)], dtype=torch.int32)
    return (
        randn(tokens, heads, size, dtype=dtype, seed=94),
        randn(tokens, heads, size, dtype=dtype, seed=91),
        randn(blocks, kv_heads, block_size, size, dtype=dtype, seed=92),
        randn(blocks, kv_heads, block_size, size, dtype=dtype, seed=93),
        torch.tensor([0, *queries]).cumsum(0).int(),
        torch.tensor([0, *keys]).cumsum(0).int(),
        max(queries, default=0),
        max(keys, default=0),
        0.0,
        True,
        table,
    )


def _flash_samples(dtype: torch.dtype) -> Iterator[Sample]:
    few = (5, 1, 0, 40, 1, 3), (5, 33, 8, 70, 0, 19)
    mixed = (60, 1, 20, 1), (60, 300, 570, 280)
    yield Sample(_flash_make(dtype, 4, 4, 32, 16, *few), id="few")
    yield Sample(_flash_make(dtype, 8, 2, 64, 16, *mixed), id="mixed")
    yield Sample(_flash_make(dtype, 3, 1, 33, 7, *few), id="odd_head_and_block")
    slopes, sinks = 2.0 ** -torch.arange(1, 5), randn(4, seed=95)
    args = _flash_make(dtype, 4, 2, 40, 8, *few)
    out, query, keys, values, *rest = args
    yield Sample((*args[:9], False, args[10]), id="not_causal")
    yield Sample((*args[:8], 0.3, False, args[10], slopes, 7, 3), id="alibi_window")
    per_sequence = slopes.repeat(6, 1) * torch.arange(1, 7)[:, None]
    yield Sample((*args, per_sequence.to(dtype)), id="alibi_per_sequence")
    near = randn(query.shape[0], 4, 24, dtype=dtype, seed=99)
    yield Sample((*args, near), id="near")
    yield Sample((*args, near, 20), {"softcap": 2.0, "sinks": sinks}, id="near_everything")
    yield Sample(
        (*_flash_make(dtype, 8, 2, 64, 16, *mixed), randn(84, 8, 300, dtype=dtype)), id="near_long"
    )
    yield Sample((*args, slopes, 20), {"softcap": 2.0, "sinks": sinks}, id="everything")
    yield Sample((*args, None, 4), {"sinks": sinks.to(dtype)}, id="sliding")
    wide = tuple(x.long() if x.dtype == torch.int32 else x for x in args[4:6])
    yield Sample((*args[:4], *wide, *args[6:10], args[10].long()), id="int64")
    flash = (keys.transpose(1, 2).contiguous().transpose(1, 2) for keys in args[2:4])
    yield Sample((out, query, *flash, *rest), id="transposed_cache")
    qkv = randn(query.shape[0], 8, 40, dtype=dtype, seed=96)
    yield Sample((qkv.clone()[:, 2:6], qkv[:, 1:5], keys, values, *rest), id="split_projection")
    for kind, cache in (("fp8_e5m2", torch.float8_e5m2), ("fp8_e4m3", torch.float8_e4m3fn)):
        fp8 = (quantize(x, cache, 0.5) for x in (keys, values))
        more = (None, -1, -1, kind, 0.5, 0.25)
        yield Sample((out, query, *fp8, *rest, *more), {"softcap": 3.0}, id=kind)
    codes = [quantize(x, torch.int8, 0.03) for x in (keys, values)]
    yield Sample((out, query, *codes, *rest, None, -1, -1, "auto", 0.03, 0.04), id="int8")
    scales = [randn(*keys.shape[:3], seed=s).abs() * 0.02 for s in (97, 98)]
    yield Sample(
        (out, query, *codes, *rest),
        {"key_scales": scales[0], "value_scales": scales[1], "k_scale": 1.5, "v_scale": 0.5},
        id="int8_row_scales",
    )
    yield Sample(_flash_make(dtype, 2, 2, 16, 4, (), ()), id="no_sequences")


def _flash_stock(
    out: Tensor,
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_kv: Tensor,
    max_seqlen_q: int,
    max_seqlen_kv: int,
    softmax_scale: float,
    is_causal: bool,
    block_table: Tensor,
) -> None:
    offsets, keys = cu_seqlens_q.tolist(), cu_seqlens_kv.diff().tolist()
    for b, length in enumerate(keys):
        begin, end = offsets[b : b + 2]
        rows = [gather_blocks(cache, block_table[b], length) for cache in (key_cache, value_cache)]
        place = torch.arange(length - (end - begin), length)[:, None]
        result = functional.scaled_dot_product_attention(
            query[begin:end].transpose(0, 1)[None],
            rows[0][None],
            rows[1][None],
            attn_mask=torch.arange(length) <= place,
            enable_gqa=True,
        )
        out[begin:end] = result[0].transpose(0, 1)


def _flash_bench() -> Iterator[BenchCase]:
    def n_bytes(queries: int, keys: int, dtype: torch.dtype) -> int:
        return (2 * queries * 16 + 2 * keys * 4) * 128 * dtype.itemsize

    for name, queries, keys in (
        ("chunk of 256 after 768", (256,), (1024,)),
        ("chunk of 256 and 8 tokens", (256, *(1,) * 8), (512, *range(400, 1200, 100))),
    ):
        yield BenchCase(
            name,
            lambda dtype, q=queries, k=keys: _flash_make(dtype, 16, 4, 128, 32, q, k),
            functools.partial(n_bytes, sum(queries), sum(keys)),
            flops=4
            * 16
            * 128
            * sum(q * k - q * (q - 1) // 2 for q, k in zip(queries, keys, strict=True)),
        )


register_op(
    schema=(
        "(Tensor(a!) out, Tensor query, Tensor key_cache, Tensor value_cache, Tensor cu_seqlens_q,"
        " Tensor cu_seqlens_kv, SymInt max_seqlen_q, SymInt max_seqlen_kv, float softmax_scale, bool is_causal,"
        " Tensor block_table, Tensor? alibi_slopes=None, int window_left=-1, int window_right=-1,"
        ' str kv_cache_dtype="auto", float k_scale=1.0, float v_scale=1.0, float softcap=-1.0,'
        " Tensor? sinks=None, Tensor? key_scales=None, Tensor? value_scales=None) -> ()"
    ),
    reference=_flash_attn_varlen_func,
    check=_flash_check,
    samples=_flash_samples,
    stock=_flash_stock,
    backward=None,
    tolerance=PRODUCT_TOLERANCE,
    bench=_flash_bench,
    summary="Attention of packed queries over a paged cache",
)

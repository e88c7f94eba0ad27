# SPDX-License-Identifier: Apache-2.0
"""Attention of the newest tokens over a contiguous cache, and over a latent cache that all heads share (MLA)."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ipex_core.library.checks import (
    PRODUCT_TOLERANCE,
    acc,
    check_kind,
    check_not_expanded,
    check_score_scale,
    check_tensor,
    randn,
    read_once,
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
    random_qkv,
)
from ipex_core.ops.kv_cache import (
    check_block_tables,
    check_caches,
    check_index_tensor,
    check_lengths,
    check_row_scales,
    dequantize,
    quantize,
)

OP = "decode_attention"


def _decode_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    lengths: Tensor | None = None,
    mask: Tensor | None = None,
    scale: float = 0.0,
    alibi_slopes: Tensor | None = None,
    window_size: int = -1,
    softcap: float = -1.0,
    sinks: Tensor | None = None,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    key_scales: Tensor | None = None,
    value_scales: Tensor | None = None,
) -> Tensor:
    """Attend with the last tokens of each sequence to its cached keys and values.

    The queries are the last Q of the ``lengths[b]`` positions of a sequence, so query i sees the first
    ``lengths[b] - Q + 1 + i`` rows of the cache. Heads of ``query`` share the heads of the cache in groups; each row of
    the cache is read once for all of them. A query that sees no key gives zeros.

    Args:
        query: ``[B, heads, Q, D]``, float32, bfloat16 or float16; Q is small, 1 as a rule; D up to 1024.
        key_cache: ``[B, kv_heads, S, D]`` of any strides but with a contiguous last dimension; the dtype of ``query``,
            int8, float8_e5m2 or float8_e4m3fn.
        value_cache: Like ``key_cache``.
        lengths: ``[B]`` int32 or int64, rows in use, with the rows of the queries; None: S.
        mask: Broadcastable to ``[B, heads, Q, S]``: boolean (True takes part) or additive in the dtype of ``query`` or
            float32; or None.
        scale: Factor on the scores; 0 means ``1 / sqrt(D)``.
        alibi_slopes: ``[heads]`` float32: ``slope * (key position - query position)`` is added to the scores.
        window_size: How many keys a query sees, itself included; -1: all.
        softcap: If positive, scores become ``softcap * tanh(scores / softcap)``, before alibi and mask.
        sinks: ``[heads]`` float32: a logit per head that joins the denominator of the softmax.
        k_scale: Factor on the numbers of ``key_cache``.
        v_scale: Factor on the numbers of ``value_cache``.
        key_scales: ``[B, kv_heads, S]`` float32, a further factor per row of an int8 cache, or None.
        value_scales: Like ``key_scales``.

    Returns:
        ``[B, heads, Q, D]`` in the dtype of ``query``, stored as ``[B, Q, heads, D]``.

    Source: Dao et al., "Flash-Decoding for long-context inference", 2023; Press et al., "Train Short, Test Long"
    (alibi), 2022; Xiao et al., "Efficient Streaming Language Models with Attention Sinks", 2024.
    """
    batch, heads, queries, _ = query.shape
    capacity = key_cache.shape[2]
    used = [capacity] * batch if lengths is None else lengths.tolist()
    check_lengths(OP, used, capacity)
    full = None if mask is None else mask.expand(batch, heads, queries, capacity)
    out = query.new_empty(batch, queries, heads, query.shape[3]).transpose(1, 2)
    for b, n in enumerate(used):

        def rows(
            cache: Tensor, factor: float, scales: Tensor | None, b: int = b, n: int = n
        ) -> Tensor:
            return dequantize(
                cache[b, :, :n], factor, None if scales is None else scales[b, :, :n]
            ).to(torch.float64 if query.dtype == torch.float64 else torch.float32)

        out[b] = attend(
            query[b],
            rows(key_cache, k_scale, key_scales),
            rows(value_cache, v_scale, value_scales),
            scale=scale,
            mask=None if full is None else full[b, ..., :n],
            alibi_slopes=alibi_slopes,
            window_size=window_size,
            softcap=softcap,
            sinks=sinks,
        ).to(query.dtype)
    return out


def _check(a: Arguments) -> None:
    check_tensor(OP, "query", a.query)
    a.require(a.query.dim() == 4, "query", "be 4-D [B, H, Q, D]", f"{a.query.dim()}-D")
    batch, heads, queries, size = a.query.shape
    check_head_size(OP, size)
    check_score_scale(OP, "scale", a.scale)
    check_caches(a, "query", "[B, kv_heads, S, D]")
    fits = a.key_cache.shape[0] == batch and a.key_cache.shape[3] == size
    text = f"have shape [{batch}, kv_heads, S, {size}]"
    a.require(fits, "key_cache", text, list(a.key_cache.shape))
    check_head_groups(OP, heads, a.key_cache.shape[1])
    if a.lengths is not None:
        check_index_tensor(OP, "lengths", a.lengths, 1, a.query)
        have = a.lengths.shape[0]
        a.require(have == batch, "lengths", f"have size B = {batch}", have)
    check_mask(OP, a.mask, a.query, (batch, heads, queries, a.key_cache.shape[2]))
    check_window(OP, a.window_size)
    check_head_vector(OP, "alibi_slopes", a.alibi_slopes, heads, a.query)
    check_head_vector(OP, "sinks", a.sinks, heads, a.query)
    check_row_scales(OP, "key_scales", a.key_scales, a.key_cache)
    check_row_scales(OP, "value_scales", a.value_scales, a.value_cache)


def _fake(a: Arguments) -> Tensor:
    batch, heads, queries, size = a.query.shape
    return a.query.new_empty(batch, queries, heads, size).transpose(1, 2)


_qkv = functools.partial(random_qkv, seed=1)


def _samples(dtype: torch.dtype) -> Iterator[Sample]:
    for b, h, kv, n, s, d in (
        (1, 1, 1, 1, 1, 8),
        (2, 3, 3, 1, 7, 32),
        (2, 8, 2, 1, 130, 64),
        (1, 4, 1, 3, 600, 128),
        (1, 7, 1, 1, 65, 80),
        (1, 2, 2, 5, 70, 256),
        (3, 20, 1, 1, 33, 40),
    ):
        yield Sample(_qkv(dtype, b, h, kv, n, s, d), id=f"{b}x{h}x{kv}x{n}x{s}x{d}")
    lengths = torch.tensor([0, 1, 64, 300])
    q, k, v = _qkv(dtype, 4, 6, 2, 2, 300, 48)
    yield Sample((q, k, v, lengths), id="lengths")
    keep = randn(4, 1, 2, 300, seed=4) > -0.3
    keep[3] = False
    additive = torch.where(keep, 0.0, torch.finfo(dtype).min).to(dtype)
    yield Sample((q, k, v, lengths.int(), keep), id="bool_mask")
    yield Sample((q, k, v, None, additive[:1, :, :1]), id="additive_mask")
    yield Sample((q, k, v, None, additive[:, :, :, :1].float()), id="mask_per_query")
    slopes, sinks = randn(6, seed=5).abs(), randn(6, seed=6)
    yield Sample((q, k, v, lengths, None, 0.3, slopes), id="alibi")
    yield Sample((q, k, v, lengths, None, 0.0, None, 70), id="window")
    yield Sample((q, k, v, lengths, None, 0.0, None, -1, 2.0), id="softcap")
    yield Sample((q, k, v, lengths, None, 0.0, None, -1, -1.0, sinks), id="sinks")
    everything = (q, k, v, lengths, additive, 0.2, slopes, 90, 5.0, sinks)
    yield Sample(everything, id="everything")
    wide = randn(2, 300, 4, 64, dtype=dtype, seed=7).transpose(1, 2)
    q = randn(2, 4, 1, 128, dtype=dtype, seed=8)[..., ::2]
    yield Sample((q, wide, wide.flip(2).contiguous()), id="noncontiguous")
    q = randn(4, 6, 2, 48, dtype=dtype, seed=1)
    plain = (lengths, None, 0.0, None, -1, -1.0, None)
    for kind in (torch.float8_e5m2, torch.float8_e4m3fn):
        k8, v8 = (quantize(t, kind, 0.5) for t in (k, v))
        name = dtype_name(kind)
        yield Sample((q, k8, v8, *plain, 0.5, 0.25), id=name)
    ki, vi = (quantize(t, torch.int8, 0.03) for t in (k, v))
    yield Sample((q, ki, vi, *plain, 0.03, 0.04), id="int8")
    scales = randn(4, 2, 300, seed=9).abs() * 0.02, randn(4, 2, 300, seed=10).abs() * 0.02
    yield Sample((q, ki, vi, *plain, 1.5, 0.5, *scales), id="int8_row_scales")
    one = randn(4, 12, 1, 48, dtype=dtype, seed=1)
    yield Sample((one, ki, vi, *plain, 1.5, 0.5, *scales), id="int8_group")
    q, k, v = _qkv(dtype, 1, 2, 2, 1, 90, 32)
    v[0, 0, 3, 5] = float("nan")
    k[0, 1, 80, 1] = float("nan")
    yield Sample((q, k, v), id="nan")
    yield Sample((q[:0], k[:0], v[:0]), id="no_sequences")
    yield Sample((q, k[:, :, :0], v[:, :, :0]), id="no_keys")


def _stock(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    *options: Any,
) -> Tensor:
    if key_cache.dtype != query.dtype:
        k_scale, v_scale = options[7:9]
        key_cache = key_cache.to(query.dtype) * k_scale
        value_cache = value_cache.to(query.dtype) * v_scale
    return functional.scaled_dot_product_attention(
        query, key_cache, value_cache, enable_gqa=query.shape[1] != key_cache.shape[1]
    )


def _bench() -> Iterator[BenchCase]:
    def make(
        b: int, h: int, kv: int, s: int, d: int, quantized: bool, dtype: torch.dtype
    ) -> tuple[Any, ...]:
        q, k, v = _qkv(dtype, b, h, kv, 1, s, d)
        if not quantized:
            return q, k, v
        rest = (None, None, 0.0, None, -1, -1.0, None, 0.03, 0.03)
        return q, quantize(k, torch.int8, 0.03), quantize(v, torch.int8, 0.03), *rest

    for b, h, kv, s, d, quantized in (
        (1, 32, 32, 2048, 128, False),
        (1, 32, 8, 2048, 128, False),
        (8, 32, 8, 1024, 128, False),
        (1, 32, 8, 2048, 128, True),
    ):
        name = f"{b}x{h}({kv})x{s}x{d}" + ("-int8kv" if quantized else "")
        n = 2 * b * kv * s * d
        yield BenchCase(
            name,
            functools.partial(make, b, h, kv, s, d, quantized),
            lambda dtype, n=n, one=quantized: n * (1 if one else dtype.itemsize),
            rotate=True,
        )


register_op(
    reference=_decode_attention,
    check=_check,
    fake=_fake,
    samples=_samples,
    stock=_stock,
    backward=None,
    tolerance=PRODUCT_TOLERANCE,
    bench=_bench,
    summary="Attention of the newest tokens over a contiguous cache",
)


# --- latent attention -------------------------------------------------------------------------------------------------


MLA_OP = "mla_decode_attention"


def _mla(
    query: Tensor,
    kv_cache: Tensor,
    lengths: Tensor,
    scale: float,
    kv_lora_rank: int,
    block_tables: Tensor | None = None,
    new_rows: Tensor | None = None,
) -> Tensor:
    """Attend with the newest token of each sequence to a latent cache, after writing its own row there.

    The up-projections of keys and values are absorbed into ``query`` and into what follows: a row of the cache is
    ``[latent | rotary key]`` for all heads, its score the product with the whole row, its value the latent.

    Args:
        query: ``[sequences, heads, width]``, width = kv_lora_rank + rotary size; float32, bfloat16 or float16.
        kv_cache: ``[num_blocks, block_size, width]`` with ``block_tables``, else ``[sequences, rows, width]``; dtype of
            ``query``; written if there are ``new_rows``.
        lengths: ``[sequences]`` int32 or int64, rows in use, the new one included; 0 gives zeros.
        scale: Factor on the scores; ``1 / sqrt(size of a head before absorption)`` as a rule.
        kv_lora_rank: How many first columns of a row are the value.
        block_tables: ``[sequences, max_blocks]`` int32 or int64, or None.
        new_rows: ``[sequences, width]``, written at position ``lengths - 1`` of each sequence first; or None.

    Returns:
        ``[sequences, heads, kv_lora_rank]`` in the dtype of ``query``.

    Source: DeepSeek-AI, "DeepSeek-V2", 2024, section 2.1.
    """
    used = read_once(lengths, Tensor.tolist)
    rows = kv_cache.shape[1]
    if block_tables is not None:
        check_block_tables(MLA_OP, "lengths", used, block_tables, rows, kv_cache.shape[0])
    else:
        check_lengths(MLA_OP, used, rows)
    if new_rows is not None:
        for length in used:
            check(length > 0, MLA_OP, "lengths", "be positive where new_rows are written", length)
        for s, length in enumerate(used):
            place = divmod(length - 1, rows)
            block = s if block_tables is None else block_tables[s, place[0]]
            kv_cache[block, place[1]] = new_rows[s]
    out = query.new_zeros(*query.shape[:2], kv_lora_rank)
    for s, length in enumerate(used):
        if length == 0:
            continue
        if block_tables is None:
            past = acc(kv_cache[s, :length])
        else:
            blocks = block_tables[s, : -(-length // rows)].long()
            past = acc(kv_cache[blocks]).flatten(0, 1)[:length]
        weights = torch.softmax(acc(query[s]) @ past.T * scale, -1)
        out[s] = weights @ past[:, :kv_lora_rank]
    return out


def _mla_check(a: Arguments) -> None:
    check_tensor(MLA_OP, "query", a.query)
    text = "be 3-D [sequences, heads, width]"
    a.require(a.query.dim() == 3, "query", text, f"{a.query.dim()}-D")
    sequences, _, width = a.query.shape
    a.require(0 < width <= 4096, "query", "have a width between 1 and 4096", width)
    text = f"be between 1 and the width of query = {width}"
    a.require(0 < a.kv_lora_rank <= width, "kv_lora_rank", text)
    check_score_scale(MLA_OP, "scale", a.scale)
    check_kind(MLA_OP, "kv_cache", a.kv_cache, a.query, "query")
    shape = list(a.kv_cache.shape)
    fits = a.kv_cache.dim() == 3 and shape[2] == width
    a.require(fits, "kv_cache", f"have shape [blocks, rows, {width}]", shape)
    stride = a.kv_cache.stride(2)
    fine = stride == 1 or width == 1
    a.require(fine, "kv_cache", "have a contiguous last dimension", f"stride {stride}")
    check_not_expanded(MLA_OP, "kv_cache", a.kv_cache)
    check_index_tensor(MLA_OP, "lengths", a.lengths, 1, a.query)
    have = a.lengths.shape[0]
    a.require(have == sequences, "lengths", f"have size sequences = {sequences}", have)
    if a.block_tables is not None:
        check_index_tensor(MLA_OP, "block_tables", a.block_tables, 2, a.query)
        have = a.block_tables.shape[0]
        a.require(have == sequences, "block_tables", f"have {sequences} rows", have)
        a.require(shape[1] > 0, "kv_cache", "have rows in its blocks", shape)
    else:
        text = f"have {sequences} blocks where there are no block_tables"
        a.require(shape[0] == sequences, "kv_cache", text, shape[0])
    if a.new_rows is not None:
        check_kind(MLA_OP, "new_rows", a.new_rows, a.query, "query")
        got = list(a.new_rows.shape)
        a.require(got == [sequences, width], "new_rows", f"have shape [{sequences}, {width}]", got)


def _arguments(
    dtype: torch.dtype,
    lengths: list[int],
    heads: int,
    rank: int,
    rotary: int,
    block_size: int = 0,
    write: bool = False,
) -> tuple[Any, ...]:
    width, n = rank + rotary, len(lengths)
    query = randn(n, heads, width, dtype=dtype, seed=1)
    used = torch.tensor(lengths)
    new = randn(n, width, dtype=dtype, seed=3) if write else None
    if not block_size:
        cache = randn(n, max([*lengths, 1]), width, dtype=dtype, seed=2)
        return query, cache, used, width**-0.5, rank, None, new
    counts = [-(-length // block_size) for length in lengths]
    order = torch.randperm(sum(counts) + 1, generator=torch.Generator().manual_seed(n)).tolist()
    tables = torch.full((n, max([*counts, 1])), -1, dtype=torch.int32)
    for row, count in zip(tables, counts, strict=True):
        row[:count] = torch.tensor([order.pop() for _ in range(count)], dtype=torch.int32)
    cache = randn(sum(counts) + 1, block_size, width, dtype=dtype, seed=2)
    return query, cache, used, width**-0.5, rank, tables, new


def _mla_samples(dtype: torch.dtype) -> Iterator[Sample]:
    yield Sample(_arguments(dtype, [1], 1, 8, 8), id="one")
    yield Sample(_arguments(dtype, [5, 130, 0], 3, 64, 32), id="lengths")
    yield Sample(_arguments(dtype, [65], 16, 512, 64), id="16_heads")
    yield Sample(_arguments(dtype, [40], 130, 128, 64), id="130_heads")
    yield Sample(_arguments(dtype, [1100, 513], 5, 96, 16), id="parts")
    yield Sample(_arguments(dtype, [33, 70], 7, 40, 9), id="odd_sizes")
    yield Sample(_arguments(dtype, [200, 64, 1], 16, 128, 64, 64, True), id="paged")
    yield Sample(_arguments(dtype, [200, 33], 40, 64, 32, 7, True), id="small_blocks")
    yield Sample(_arguments(dtype, [300, 257], 4, 64, 32, 256, True), id="large_blocks")
    yield Sample(_arguments(dtype, [20, 31], 4, 64, 32, 0, True), id="new_rows")
    query, cache, *rest = _arguments(dtype, [20, 31], 4, 64, 32)
    wide = randn(2, 4, 192, dtype=dtype, seed=5)[..., ::2]
    stored = randn(31, 2, 100, dtype=dtype, seed=6)[..., :96].transpose(0, 1)
    yield Sample((wide, stored, *rest), id="noncontiguous")
    cache = cache.clone()
    cache[0, 3, 5] = float("nan")
    yield Sample((query, cache, *rest), id="nan")
    yield Sample((query[:0], cache[:0], rest[0][:0], *rest[1:]), id="no_sequences")


def _mla_stock(
    query: Tensor, kv_cache: Tensor, lengths: Tensor, scale: float, kv_lora_rank: int, *rest: Any
) -> Tensor:
    past = kv_cache[:, : int(lengths.max())]
    scores = torch.matmul(query, past.transpose(1, 2)) * scale
    weights = torch.softmax(scores, -1, dtype=torch.float32).to(query.dtype)
    return torch.matmul(weights, past[..., :kv_lora_rank])


def _mla_bench() -> Iterator[BenchCase]:
    for sequences, heads, length in ((1, 16, 2048), (1, 128, 2048), (4, 128, 1024)):
        yield BenchCase(
            f"{sequences}x{heads}x{length}x(512+64)",
            functools.partial(
                _arguments, lengths=[length] * sequences, heads=heads, rank=512, rotary=64
            ),
            lambda dtype, n=sequences * length * 576: n * dtype.itemsize,
            flops=2 * sequences * heads * length * (576 + 512),
        )


register_op(
    name=MLA_OP,
    mutates=("kv_cache",),
    reference=_mla,
    check=_mla_check,
    fake=lambda a: a.query.new_empty(*a.query.shape[:2], a.kv_lora_rank),
    samples=_mla_samples,
    stock=_mla_stock,
    backward=None,
    tolerance=PRODUCT_TOLERANCE,
    bench=_mla_bench,
    summary="Decode attention over a latent cache that all heads share",
)

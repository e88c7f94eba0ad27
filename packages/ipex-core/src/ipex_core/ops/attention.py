# SPDX-License-Identifier: Apache-2.0
"""Scaled dot-product attention over whole sequences, and the checks that all ops for attention share."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional

from ipex_core.library.checks import (
    PRODUCT_TOLERANCE,
    acc,
    check_broadcastable,
    check_device,
    check_dtype_in,
    check_kind,
    check_like,
    check_not_expanded,
    check_score_scale,
    check_shape,
    check_tensor,
    dtype_name,
    randn,
    read_once,
)
from ipex_core.library.kernels import register_op
from ipex_core.library.spec import Arguments, BenchCase, Sample, check
from ipex_core.ops.kv_cache import check_index_tensor


def near_shape(query: Tensor, slopes: Tensor | None) -> bool:
    """Return whether slopes are numbers for the last keys of each query."""
    if slopes is None or slopes.dim() != 3 or slopes.shape[2] == 0:
        return False
    return slopes.shape[:2] == query.shape[:2]


def check_options(a: Arguments, sequences: int, heads: int) -> None:
    """Check the optional arguments that every attention op has."""
    if near_shape(a.query, a.alibi_slopes) and a.op.startswith("flash"):
        check_kind(a.op, "alibi_slopes", a.alibi_slopes, a.query, "query")
    elif a.alibi_slopes is not None:
        check_kind(a.op, "alibi_slopes", a.alibi_slopes, a.query, "query", or_float32=True)
        shapes, got = ([heads], [sequences, heads]), list(a.alibi_slopes.shape)
        a.require(got in shapes, "alibi_slopes", f"have shape {shapes[0]} or {shapes[1]}", got)
    if a.sinks is not None:
        check_kind(a.op, "sinks", a.sinks, a.query, "query", or_float32=True)
        check_shape(a.op, "sinks", a.sinks, [heads])
    a.require(math.isfinite(a.softcap), "softcap", "be a finite number", f"{a.softcap:g}")


def check_rows(a: Arguments) -> None:
    """Check the packed queries ``[tokens, heads, head_size]`` and the output like them."""
    check_tensor(a.op, "query", a.query)
    text = "be 3-D [tokens, heads, head_size]"
    a.require(a.query.dim() == 3, "query", text, f"{a.query.dim()}-D")
    check_like(a.op, "out", a.out, a.query, "query")
    check_not_expanded(a.op, "out", a.out)
    stride = a.out.stride(2)
    dense = stride == 1 or a.out.shape[2] <= 1
    a.require(dense, "out", "have a contiguous last dimension", f"stride {stride}")


def check_offset_tensor(
    op: str, name: str, offsets: Tensor, query: Tensor, size: int | None = None
) -> None:
    """Check the type and size of offsets of sequences, ``[sequences + 1]``."""
    check_index_tensor(op, name, offsets, 1, query)
    have = offsets.shape[0]
    check(have >= 1, op, name, "have size sequences + 1", have)
    if size is not None:
        check(have == size, op, name, f"have size sequences + 1 = {size}", have)


def check_offsets(op: str, name: str, offsets: Tensor, limit: int) -> list[tuple[int, int]]:
    """Return begin and end of the sequences; check that they are in order and end within ``limit``.

    Reads data, so references call it and fakes do not.
    """
    values = read_once(offsets, Tensor.tolist)
    least = 0
    for value in values:
        if not least <= value <= limit:
            check(False, op, name, f"hold non-decreasing numbers in [0, {limit}]", value)
        least = value
    return list(itertools.pairwise(values))


# --- decode ---------------------------------------------------------------------------------------------------------


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    scale: float,
    mask: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    window_size: int = -1,
    softcap: float = -1.0,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attend with the queries of one sequence to all its keys, the queries being the last positions.

    Args:
        query: ``[heads, queries, D]``.
        key: ``[kv_heads, keys, D]`` in the type references compute in.
        value: Like ``key``.
        scale: Factor on the scores; 0 means ``1 / sqrt(D)``.
        mask: ``[heads, queries, keys]``, boolean or additive.
        alibi_slopes: ``[heads]``: ``slope * (key position - query position)`` is added to the scores.
        window_size: Keys that a query sees, itself included; -1: all.
        softcap: Scores become ``softcap * tanh(scores / softcap)`` if positive.
        sinks: ``[heads]``: a logit that takes part in the softmax and has no value.

    Returns:
        ``[heads, queries, D]`` in the type of ``key``.
    """
    heads, queries, size = query.shape
    group, keys = heads // key.shape[0], key.shape[1]
    key, value = key.repeat_interleave(group, 0), value.repeat_interleave(group, 0)
    scores = acc(query).to(key.dtype) @ key.transpose(-1, -2) * (scale or size**-0.5)
    if softcap > 0:
        scores = softcap * torch.tanh(scores / softcap)
    query_position = torch.arange(keys - queries, keys, device=query.device)[:, None]
    behind = query_position - torch.arange(keys, device=query.device)
    if alibi_slopes is not None and alibi_slopes.dim() == 3:  # [1, heads, n], of the last keys
        skipped = alibi_slopes.shape[2] - keys
        near = acc(alibi_slopes)[0, :, None, max(skipped, 0) :]
        scores = scores + functional.pad(near, (max(-skipped, 0), 0))
    elif alibi_slopes is not None:
        scores = scores - alibi_slopes.to(scores.dtype)[:, None, None] * behind
    seen = behind >= 0
    if window_size > 0:
        seen &= behind < window_size
    scores = scores.masked_fill(~seen, -float("inf"))
    if mask is not None:
        hidden = mask.dtype == torch.bool
        scores = scores.masked_fill(~mask, -float("inf")) if hidden else scores + acc(mask)
    blocked = (scores == -float("inf")).all(-1, keepdim=True)
    scores = scores.masked_fill(blocked, 0.0)
    if sinks is not None:
        sink = sinks.to(scores.dtype)[:, None, None].expand(-1, queries, 1)
        weights = torch.softmax(torch.cat([scores, sink], -1), -1)[..., :-1]
    else:
        weights = torch.softmax(scores, -1)
    return weights.masked_fill(blocked, 0.0) @ value


def check_head_size(op: str, size: int) -> None:
    """Check the number of elements of a head."""
    check(0 < size <= 1024, op, "query", "have a head size between 1 and 1024", size)


def check_head_groups(op: str, heads: int, kv_heads: int) -> None:
    """Check that query heads share the heads of the cache in groups of one size."""
    text = f"have a number of heads that divides the {heads} heads of query"
    check(kv_heads > 0 and heads % kv_heads == 0, op, "key_cache", text, kv_heads)


def check_head_vector(op: str, name: str, value: Tensor | None, heads: int, query: Tensor) -> None:
    """Check an optional float32 number per query head."""
    if value is None:
        return
    check_device(op, name, value, query, "query")
    check_dtype_in(op, name, value, torch.float32)
    fits = value.dim() == 1 and value.shape[0] == heads
    check(fits, op, name, f"be 1-D of size heads = {heads}", list(value.shape))


def check_window(op: str, window_size: int) -> None:
    """Check the number of keys that a query sees."""
    check(window_size == -1 or window_size > 0, op, "window_size", "be -1 or positive", window_size)


def check_mask(
    op: str, mask: Tensor | None, query: Tensor, scores: tuple[int, int, int, int]
) -> None:
    """Check an optional mask over scores of this shape."""
    if mask is None:
        return
    check_device(op, "mask", mask, query, "query")
    fits = mask.dtype in (torch.bool, torch.float32, query.dtype)
    text = f"have dtype bool, float32 or the dtype of query = {dtype_name(query.dtype)}"
    check(fits, op, "mask", text, dtype_name(mask.dtype))
    check_broadcastable(op, "mask", mask, scores, "the scores")


# --- the op -----------------------------------------------------------------------------------------------------------


def attention_reference(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None = None,
    scale: float = 0.0,
    is_causal: bool = False,
    alibi_slopes: Tensor | None = None,
    window_left: int = -1,
    window_right: int = -1,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    bottom_right: bool = False,
) -> Tensor:
    """Compute ``softmax(query @ key.T * scale + mask) @ value`` per head.

    Heads of ``query`` share the heads of ``key`` and ``value`` in groups when there are more of them (grouped-query
    attention). A query that may see no key at all gives zeros. Keys and values that ``is_causal`` or a window hides
    from a whole block of queries are not read: a NaN there does not reach the result.

    The query i stands at the key ``p = i``, or ``p = i + Sk - Sq`` with ``bottom_right``. That place is what
    ``is_causal``, the window and the slopes refer to.

    Args:
        query: ``[B, Hq, Sq, D]``, float32, bfloat16 or float16.
        key: ``[B, Hkv, Sk, D]``; Hq is a multiple of Hkv.
        value: ``[B, Hkv, Sk, D]``.
        mask: Broadcastable to ``[B, Hq, Sq, Sk]``: boolean (True takes part) or additive in the dtype of ``query`` or
            float32; or None.
        scale: Factor on the scores; 0 means ``1 / sqrt(D)``.
        is_causal: Let a query see the keys up to its place p only, as
            `torch.nn.functional.scaled_dot_product_attention` does.
        alibi_slopes: ``[Hq]`` or ``[B, Hq]`` in the dtype of ``query`` or float32: ``-slope * |p - j|`` is added to
            the score of the key j.
        window_left: How many keys before p a query sees; negative: all.
        window_right: How many keys behind p a query sees; negative: all. Nothing with ``is_causal``.
        softcap: If positive, scores become ``softcap * tanh(scores / softcap)`` after the scale and before anything
            is added.
        sinks: ``[Hq]`` in the dtype of ``query`` or float32: a score per head that takes part in the sum of the
            softmax, but has no value.
        bottom_right: Align the last query with the last key instead of the first with the first: the queries are the
            last Sq of Sk positions, as in chunked prefill.

    Returns:
        ``[B, Hq, Sq, D]`` in the dtype of ``query``, stored as ``[B, Sq, Hq, D]`` so that merging the heads is a view.

    Source: Vaswani et al., "Attention Is All You Need", 2017; Dao et al., "FlashAttention", 2022; Press et al.,
    "Train Short, Test Long" (alibi), 2021; Beltagy et al., "Longformer" (windows), 2020; Gemma 2 (softcap), 2024;
    Xiao et al., "Efficient Streaming Language Models with Attention Sinks", 2023.
    """
    batch, heads, q_length, size = query.shape
    kv_heads, k_length = key.shape[1], key.shape[2]
    factor = scale if scale != 0.0 else size**-0.5
    shared = heads // kv_heads * q_length  # queries for a head of keys
    scores = acc(query).reshape(batch, kv_heads, shared, size) @ acc(key).mT * factor
    scores = scores.reshape(batch, heads, q_length, k_length)
    if softcap > 0:
        scores = softcap * torch.tanh(scores / softcap)
    place = torch.arange(q_length, device=query.device)[:, None]
    place = place + (k_length - q_length if bottom_right else 0)
    ahead = (
        torch.arange(k_length, device=query.device) - place
    )  # keys relative to the place of a query
    if alibi_slopes is not None and alibi_slopes.dim() == 3:
        near = acc(alibi_slopes).transpose(0, 1)
        place = ahead + near.shape[-1] - 1
        known = (place >= 0) & (ahead <= 0)
        found = near.gather(-1, place.clamp(0, near.shape[-1] - 1).expand(heads, -1, -1))
        scores = scores + found.masked_fill(~known, 0.0)
    elif alibi_slopes is not None:
        scores = scores - acc(alibi_slopes)[..., None, None] * ahead.abs()
    if mask is not None:
        if mask.dtype == torch.bool:
            scores = scores.masked_fill(~mask, -float("inf"))
        else:
            scores = scores + acc(mask)
    if is_causal:
        scores = scores.masked_fill(ahead > 0, -float("inf"))
    if window_left >= 0:
        scores = scores.masked_fill(ahead < -window_left, -float("inf"))
    if window_right >= 0:
        scores = scores.masked_fill(ahead > window_right, -float("inf"))
    blocked = (scores == -float("inf")).all(-1, keepdim=True)
    scores = scores.masked_fill(blocked, 0.0)
    if sinks is not None:
        extra = acc(sinks)[:, None, None].expand(batch, heads, q_length, 1)
        scores = torch.cat([scores, extra.to(scores.dtype)], -1)
    weights = torch.softmax(scores, -1)[..., :k_length].masked_fill(blocked, 0.0)
    out = weights.reshape(batch, kv_heads, shared, k_length) @ acc(value)
    out = out.reshape(batch, heads, q_length, size)
    return out.to(query.dtype).transpose(1, 2).contiguous().transpose(1, 2)


def _check(a: Arguments) -> None:
    check_tensor(a.op, "query", a.query)
    a.require(a.query.dim() == 4, "query", "be 4-D [B, H, S, D]", f"{a.query.dim()}-D")
    check_score_scale(a.op, "scale", a.scale)
    for name, tensor in (("key", a.key), ("value", a.value)):
        check_kind(a.op, name, tensor, a.query, "query")
    batch, heads, q_length, size = a.query.shape
    fits = a.key.dim() == 4 and a.key.shape[0] == batch and a.key.shape[3] == size
    a.require(fits, "key", f"have shape [{batch}, H, S, {size}]", list(a.key.shape))
    fits = list(a.value.shape) == list(a.key.shape)
    a.require(fits, "value", f"have the shape of key = {list(a.key.shape)}", list(a.value.shape))
    text = f"have a number of heads that divides the {heads} heads of query"
    a.require(a.key.shape[1] > 0 and heads % a.key.shape[1] == 0, "key", text, a.key.shape[1])
    if a.mask is not None:
        check_device(a.op, "mask", a.mask, a.query, "query")
        fits = a.mask.dtype in (torch.bool, torch.float32, a.query.dtype)
        text = f"have dtype bool, float32 or the dtype of query = {dtype_name(a.query.dtype)}"
        a.require(fits, "mask", text, dtype_name(a.mask.dtype))
        scores = (batch, heads, q_length, a.key.shape[2])
        check_broadcastable(a.op, "mask", a.mask, scores, "the scores")
    check_options(a, batch, heads)


def _fake(a: Arguments) -> Tensor:
    batch, heads, length, size = a.query.shape
    return a.query.new_empty(batch, length, heads, size).transpose(1, 2)


def random_qkv(
    dtype: torch.dtype, b: int, h: int, kv: int, sq: int, sk: int, d: int, seed: int = 71
) -> tuple[Tensor, Tensor, Tensor]:
    """Return query, keys and values of a sample."""
    return (
        randn(b, h, sq, d, dtype=dtype, seed=seed),
        randn(b, kv, sk, d, dtype=dtype, seed=seed + 1),
        randn(b, kv, sk, d, dtype=dtype, seed=seed + 2),
    )


def _samples(dtype: torch.dtype) -> Iterator[Sample]:
    for b, h, kv, sq, sk, d in (
        (1, 1, 1, 1, 1, 1),
        (2, 3, 3, 5, 7, 16),
        (1, 2, 2, 128, 128, 32),
        (2, 4, 2, 33, 65, 64),
        (1, 8, 1, 17, 40, 80),
        (1, 2, 2, 1, 300, 128),
        (1, 1, 1, 70, 600, 32),
        (1, 2, 1, 31, 31, 33),
        (1, 1, 1, 12, 20, 256),
    ):
        yield Sample(random_qkv(dtype, b, h, kv, sq, sk, d), id=f"{b}x{h}x{kv}x{sq}x{sk}x{d}")
        yield Sample(
            (*random_qkv(dtype, b, h, kv, sq, sk, d), None, 0.3, True),
            id=f"causal-{b}x{h}x{kv}x{sq}x{sk}x{d}",
        )
    q, k, v = random_qkv(dtype, 2, 4, 2, 9, 21, 24)
    keep = randn(2, 4, 9, 21, seed=74) > -0.5
    additive = torch.where(keep, 0.0, torch.finfo(dtype).min).to(dtype)
    yield Sample((q, k, v, keep), id="bool_mask")
    yield Sample((q, k, v, keep[:, :1, :1]), id="bool_mask_per_batch")
    yield Sample((q, k, v, additive), id="additive_mask")
    yield Sample((q, k, v, additive[:1, :1].float(), 0.5), id="additive_mask_float32")
    yield Sample((q, k, v, additive[0, 0]), id="additive_mask_2d")
    yield Sample((q, k, v, additive[:, :, :, :1].contiguous()), id="mask_per_query")
    yield Sample((q, k, v, keep[:, :1].expand(2, 4, 9, 21), 0.0, True), id="mask_and_causal")
    blocked = keep.clone()
    blocked[0, 1, 3] = False
    yield Sample((q, k, v, blocked), id="blocked_query")
    # The layout of transformers: heads taken from a [B, S, H * D] projection.
    split = [
        randn(2, 11, 4 * 24, dtype=dtype, seed=75 + i).view(2, 11, 4, 24).transpose(1, 2)
        for i in range(3)
    ]
    yield Sample(tuple(split), id="heads_from_projection")
    yield Sample((q.transpose(2, 3).contiguous().transpose(2, 3), k, v), id="noncontiguous")
    yield from _option_samples(dtype)
    yield Sample((q[:, :, :0], k, v), id="no_queries")
    yield Sample((q, k[:, :, :0], v[:, :, :0]), id="no_keys")


def _option_samples(dtype: torch.dtype) -> Iterator[Sample]:
    slopes, sinks = 2.0 ** -torch.arange(1, 5), randn(4, seed=78)
    short, long = random_qkv(dtype, 2, 4, 2, 37, 70, 40), random_qkv(dtype, 1, 4, 2, 70, 530, 32)
    for name, qkv in (("short", short), ("long", long)):
        for option, kwargs in (
            ("bottom_right", {"is_causal": True}),
            ("window", {"window_left": 13, "window_right": 3}),
            ("sliding", {"is_causal": True, "window_left": 20}),
            ("alibi_softcap", {"alibi_slopes": slopes, "softcap": 1.5}),
            ("sinks", {"sinks": sinks, "is_causal": True}),
        ):
            yield Sample(qkv, {"bottom_right": True} | kwargs, id=f"{option}-{name}")
    yield Sample(
        (*short, None, 0.2, True, torch.stack([slopes, -slopes]).to(dtype), -1, -1, 3.0, sinks),
        id="alibi_per_sequence",
    )
    yield Sample((*short,), {"window_left": 4, "window_right": 0}, id="window_top_left")
    # More queries than keys: the first ones stand before all keys.
    yield Sample(
        random_qkv(dtype, 1, 4, 2, 60, 20, 32),
        {"is_causal": True, "bottom_right": True, "sinks": sinks.to(dtype)},
        id="queries_before_all_keys",
    )


def _stock(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None = None,
    scale: float = 0.0,
    is_causal: bool = False,
    alibi_slopes: Tensor | None = None,
    window_left: int = -1,
    window_right: int = -1,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    bottom_right: bool = False,
) -> Tensor:
    if window_left >= 0:  # the stock op has no window: a mask is what its users give it
        ahead = torch.arange(key.shape[2]) - torch.arange(query.shape[2])[:, None]
        mask, is_causal = (ahead <= 0) & (ahead >= -window_left), False
    return functional.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=mask,
        scale=scale or None,
        is_causal=is_causal,
        enable_gqa=query.shape[1] != key.shape[1],
    )


def _bench() -> Iterator[BenchCase]:
    cases = (
        ("encoder-1x12x128x32", 1, 12, 12, 128, 32, False),
        ("encoder-32x12x128x32", 32, 12, 12, 128, 32, False),
        ("encoder-1x12x512x64", 1, 12, 12, 512, 64, False),
        ("causal-1x32(8)x1024x128", 1, 32, 8, 1024, 128, True),
        ("causal-1x10(2)x4096x128", 1, 10, 2, 4096, 128, True),
    )
    for name, b, h, kv, s, d, causal in cases:
        yield BenchCase(
            name,
            lambda dtype, b=b, h=h, kv=kv, s=s, d=d, causal=causal: (
                *random_qkv(dtype, b, h, kv, s, s, d),
                None,
                0.0,
                causal,
            ),
            lambda dtype, n=2 * b * s * d * (h + kv): n * dtype.itemsize,
            flops=4 * b * h * s * s * d // (2 if causal else 1),
        )
    yield BenchCase(
        "window-512-1x10(2)x4096x128",
        lambda dtype: (*random_qkv(dtype, 1, 10, 2, 4096, 4096, 128), None, 0.0, True, None, 511),
        lambda dtype: 2 * 4096 * 128 * (10 + 2) * dtype.itemsize,
        flops=4 * 10 * 4096 * 512 * 128,
    )


register_op(
    name="attention",
    reference=attention_reference,
    check=_check,
    fake=_fake,
    samples=_samples,
    stock=_stock,
    autocast="lower_precision",
    tolerance=PRODUCT_TOLERANCE,
    bench=_bench,
    summary="Scaled dot-product attention with masks, windows, biases and grouped heads",
)

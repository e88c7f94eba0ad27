# SPDX-License-Identifier: Apache-2.0
"""Attention: the checks that the ops share, and what attention of a few queries over a cache is."""

from __future__ import annotations

import itertools
import math

import torch

from ipex_core.library.checks import (
    acc,
    check_broadcastable,
    check_device,
    check_dtype,
    check_dtype_in,
    check_like,
    check_not_expanded,
    check_shape,
    check_tensor,
    dtype_name,
)
from ipex_core.library.spec import check
from ipex_core.ops.kv_cache.checks import check_index_tensor

__all__ = [
    "TOLERANCE",
    "attend",
    "check_head_groups",
    "check_head_size",
    "check_head_vector",
    "check_mask",
    "check_offset_tensor",
    "check_offsets",
    "check_options",
    "check_rows",
    "check_window",
]

Tensor = torch.Tensor


def check_options(
    op: str,
    query: Tensor,
    sequences: int,
    heads: int,
    alibi_slopes: Tensor | None,
    sinks: Tensor | None,
    softcap: float,
) -> None:
    """Check the optional arguments that every attention op has."""
    if alibi_slopes is not None:
        check_device(op, "alibi_slopes", alibi_slopes, query, "query")
        check_dtype(op, "alibi_slopes", alibi_slopes, query, "query", or_float32=True)
        shapes = ([heads], [sequences, heads])
        check(
            list(alibi_slopes.shape) in shapes,
            op,
            "alibi_slopes",
            f"have shape {shapes[0]} or {shapes[1]}",
            list(alibi_slopes.shape),
        )
    if sinks is not None:
        check_device(op, "sinks", sinks, query, "query")
        check_dtype(op, "sinks", sinks, query, "query", or_float32=True)
        check_shape(op, "sinks", sinks, [heads])
    check(math.isfinite(softcap), op, "softcap", "be a finite number", f"{softcap:g}")


def check_rows(op: str, query: Tensor, out: Tensor) -> None:
    """Check the packed queries ``[tokens, heads, head_size]`` and the output like them."""
    check_tensor(op, "query", query)
    text = "be 3-D [tokens, heads, head_size]"
    check(query.dim() == 3, op, "query", text, f"{query.dim()}-D")
    check_like(op, "out", out, query, "query")
    check_not_expanded(op, "out", out)
    stride = out.stride(2)
    check(
        stride == 1 or out.shape[2] <= 1,
        op,
        "out",
        "have a contiguous last dimension",
        f"stride {stride}",
    )


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
    values = offsets.tolist()
    least = 0
    for value in values:
        text = f"hold non-decreasing numbers in [0, {limit}]"
        check(least <= value <= limit, op, name, text, value)
        least = value
    return list(itertools.pairwise(values))


# --- decode ---------------------------------------------------------------------------------------------------------

TOLERANCE = {
    torch.float32: (1e-4, 1e-4),
    torch.bfloat16: (1.6e-2, 2e-2),
    torch.float16: (4e-3, 4e-3),
}


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
    if alibi_slopes is not None:
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
    check(
        kv_heads > 0 and heads % kv_heads == 0,
        op,
        "key_cache",
        f"have a number of heads that divides the {heads} heads of query",
        kv_heads,
    )


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
    check(
        mask.dtype in (torch.bool, torch.float32, query.dtype),
        op,
        "mask",
        f"have dtype bool, float32 or the dtype of query = {dtype_name(query.dtype)}",
        dtype_name(mask.dtype),
    )
    check_broadcastable(op, "mask", mask, scores, "the scores")

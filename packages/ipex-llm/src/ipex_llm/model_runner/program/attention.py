# SPDX-License-Identifier: Apache-2.0
"""Attention in programs: queries, keys and values of new tokens, their rotation, the cache."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from ipex_core.program import Register
from ipex_llm.arch.types import AttentionPlan, NormPlan

if TYPE_CHECKING:
    from ipex_llm.model_runner.program.writer import Writer

__all__ = ["attend", "write_attention"]


def write_attention(writer: Writer, index: int, a: AttentionPlan, qkv: Register) -> Register:
    """Write an attention.

    Args:
        writer: Writes the program.
        index: Of the layer.
        a: Its plan.
        qkv: Queries, keys and values side by side.

    Returns:
        What the output projection reads.
    """
    b = writer.b
    heads, kv, d = a.heads, a.kv_heads, a.head_dim
    rows = b.call("reshape", qkv, [0, heads + 2 * kv, d])
    q = b.call("narrow", rows, 1, 0, heads)
    k = b.call("narrow", rows, 1, heads, kv)
    v = b.call("narrow", rows, 1, heads + kv, kv)
    if not a.norm_after_rope:
        q = _head_norm(writer, a, a.query_norm, q, heads)
        k = _head_norm(writer, a, a.key_norm, k, kv)
    cache = writer.caches[index]
    rope = a.rope
    fused = rope is not None and not writer.scaled and not a.norm_after_rope
    if rope is not None:
        cos, sin = writer.ropes[repr(rope)]
        if fused:
            b.call(
                "rotary_embedding_and_cache",
                *(q, k, v, cache[0], cache[1], sin, cos, writer.slots),
                *(rope.dim, rope.half, writer.positions),
                **writer.scales_of(index),
            )
        else:
            b.call("rotary_embedding", q, k, sin, cos, rope.dim, rope.half, writer.positions)
    if a.norm_after_rope:
        q = _head_norm(writer, a, a.query_norm, q, heads)
        k = _head_norm(writer, a, a.key_norm, k, kv)
    if not fused:
        scales = writer.scales_of(index)
        b.call("reshape_and_cache", k, v, cache[0], cache[1], writer.slots, **scales)
    if a.temperature is not None:
        wide = b.call("mul", b.call("cast", q, torch.float32), writer.factors[a.temperature])
        q = b.call("cast", wide, writer.e.store.dtype)
    out = b.call("empty_like", q)
    attend(writer, index, a, out, q)
    result: Register = b.call("reshape", out, [0, heads * d])
    return result


def _head_norm(
    writer: Writer, a: AttentionPlan, norm: NormPlan | None, x: Register, heads: int
) -> Register:
    if norm is None:
        return x
    if a.norm_over == "head":
        return writer.norm(norm, x)
    flat = writer.b.call("reshape", x, [0, heads * a.head_dim])
    result: Register = writer.b.call("reshape", writer.norm(norm, flat), [0, heads, a.head_dim])
    return result


def attend(writer: Writer, index: int, a: AttentionPlan, out: Register, q: Register) -> None:
    """Write the attention of queries ``[T, heads, width]`` to the cache of a layer, into ``out``."""
    b, cache = writer.b, writer.caches[index]
    slopes = None if a.alibi_slopes is None else b.constant(a.alibi_slopes.detach().float())
    more: dict[str, Any] = {"softcap": a.softcap, **writer.scales_of(index)}
    if a.sinks is not None:
        more["sinks"] = b.constant(a.sinks.detach().float())
    if writer.mode == "decode":
        b.call(
            "single_query_cached_kv_attention",
            *(out, q, cache[0], cache[1], None, a.scale, writer.tables, writer.lengths),
            *(writer.block_size, writer.max_context, slopes),
            window_size=-1 if a.window < 0 else a.window + 1,
            **more,
        )
        return
    b.call(
        "flash_attn_varlen_func",
        *(out, q, cache[0], cache[1], writer.starts, writer.key_starts),
        *(writer.max_query, writer.max_context, a.scale, True, writer.tables, slopes),
        window_left=a.window,
        **more,
    )

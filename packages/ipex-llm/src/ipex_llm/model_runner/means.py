# SPDX-License-Identifier: Apache-2.0
"""Layers whose blocks read means of what the stream was before, and attention with keys and values apart (Inkling 2).

The streams are the stream itself and, behind it, the norms of those that groups of layers ended with.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from ipex_core.program import Register
from ipex_llm.arch import AttentionPlan, LayerMeansPlan, LayerPlan, MeansPlan
from ipex_llm.arch.formulas import MOVING, taps_of
from ipex_llm.model_runner.attention import (
    attend,
    gated,
    near_numbers,
    short_convolution,
    tempered,
    widened,
)
from ipex_llm.model_runner.dense import Linear, WeightStore
from ipex_llm.model_runner.feed_forward import pointwise


def pack_means(store: WeightStore, plan: LayerMeansPlan) -> tuple[Any, ...]:
    """Pack the queries of a layer, and the gates of messages to it."""
    pair = tuple(
        None if one is None else pack_mean(store, one) for one in (plan.attention, plan.mlp)
    )
    if plan.messages is None:
        return pair
    gates = ((store.linear(g.low), store.linear(g.gates)) for g in plan.messages.gates)
    return *pair, pack_mean(store, plan.messages.means), *gates


def pack_mean(store: WeightStore, plan: MeansPlan) -> Linear:
    """Pack the queries of means."""
    store.watch(plan.module, plan.query)
    return store.plain(plan.queries.to(store.dtype).contiguous(), None)


def write_mean(
    writer: Any, plan: MeansPlan, weight: Linear, h: Register, known: list[Register]
) -> list[Register]:
    """Write the means of the norm of a stream and of earlier ones, a row for each query."""
    b, rows = writer.b, [*known, writer.norm(plan.norm, h)]
    count = len(rows)
    scores = b.call("cat", [writer.linear(weight, row) for row in rows], 1)
    scores = b.call("reshape", scores, [0, count, weight.features])
    most = b.call("amax", scores, [1], True)
    shares = pointwise(b, [scores, most], [], [("sub", 0, 1), ("exp", 2)], torch.float32)
    total = b.call("sum", shares, [1], True)
    shares = pointwise(b, [shares, total], [], [("div", 0, 1)], torch.float32)
    steps: list[tuple[Any, ...]] = [("mul", 0, count)]
    for i in range(1, count):
        value = 2 * count + len(steps)
        steps += [("mul", i, count + i), ("add", value - 1, value)]
    found = []
    for query in range(weight.features):
        own = b.call("select", shares, 2, query)
        parts = [*rows, *(b.call("narrow", own, 1, i, 1) for i in range(count))]
        found.append(pointwise(b, parts, [], steps, writer.e.store.dtype))
    return found


def write_means(
    writer: Any, index: int, layer: LayerPlan, w: Any, streams: list[Register]
) -> list[Register]:
    """Write a layer; return the streams behind it."""
    b, plan, a = writer.b, layer.streams, layer.attention
    assert isinstance(plan, LayerMeansPlan) and isinstance(a, AttentionPlan) and a.apart is not None
    if plan.loop == "again":
        writer.before = [streams[0], *streams[len(writer.loop) + 1 :]]
        streams = writer.loop
    elif plan.loop:
        writer.loop = streams
    h, *known = streams
    rows = [h]
    if plan.attention is not None:
        rows = write_mean(writer, plan.attention, w.streams[0], h, known)
    norms = layer.input_norm, *(a.apart.norms or ())
    sent: list[Register] = []
    if plan.messages is not None:
        sent = write_mean(
            writer, plan.messages.means, w.streams[2], writer.before[0], writer.before[1:]
        )
        rows = [_with_message(writer, layer, w, i, rows[i % len(rows)], sent) for i in range(3)]
        norms = norms if a.apart.norms else norms * 3
    x = [writer.norm(n, rows[at % len(rows)]) for at, n in enumerate(norms)]
    y = write_apart(writer, index, a, w, x if len(x) > 1 else x * 3)
    y = short_convolution(writer, index, 1, layer.convs[:1], y, layer.conv_scale)
    if plan.begins:
        known.append(writer.norm(plan.mlp.norm, h))
    h = y if plan.begins else b.call("add", h, y)
    row = write_mean(writer, plan.mlp, w.streams[1], h, known)[0]
    if plan.messages is not None:
        row = _with_message(writer, layer, w, 3, row, sent)
    y = writer.mlp_alone(layer.mlp, w, writer.norm(layer.mlp_norm, row), row)
    y = short_convolution(writer, index, 2, layer.convs[1:], y, layer.conv_scale)
    return [b.call("add", h, y), *known]


def _with_message(
    writer: Any, layer: LayerPlan, w: Any, place: int, x: Register, sent: list[Register]
) -> Register:
    """Write a row with its message."""
    b, size = writer.b, writer.plan.hidden_size
    assert isinstance(layer.streams, LayerMeansPlan) and layer.streams.messages is not None
    norm, (low, gates) = layer.streams.messages.gates[place].norm, w.streams[3 + place]
    both = b.call("cat", [writer.norm(norm, one) for one in (x, sent[place])], 1)
    opened = writer.linear(gates, writer.linear(low, both))
    parts = [x, sent[place], *(b.call("narrow", opened, 1, at, size) for at in (0, size))]
    steps = [("tanh", 2), ("sub", 4, 5), ("mul", 6, 0), ("tanh", 3), ("mul", 8, 1), ("add", 7, 9)]
    return pointwise(b, parts, [1.0], steps, writer.e.store.dtype)


def write_apart(writer: Any, index: int, a: AttentionPlan, w: Any, x: list[Register]) -> Register:
    """Write an attention whose queries, keys and values read rows of their own, with its output projection."""
    b, heads, d = writer.b, a.heads, a.head_dim
    assert a.near is not None and a.apart is not None
    width, rank = heads * d, heads * a.near.rows.shape[1]
    first = writer.linear(w.qkv, x[0])
    starts = (0, width), (width, width), (2 * width, rank), (2 * width + rank, heads)
    q, gates, rows, sinks = (b.call("narrow", first, 1, at, size) for at, size in starts)
    q = writer.norm(a.query_norm, b.call("reshape", q, [0, heads, d]))
    numbers = near_numbers(writer, a, w.near, rows)
    parts = [writer.linear(one, row) for one, row in zip(w.apart, x[1:], strict=True)]
    k, v = _convolved(writer, index, a, parts)
    k, v = writer.norm(a.key_norm, k), writer.norm(a.value_norm, v)
    # Scores less the sink of their query meet a sink of zero: keys have a one behind them.
    sinks = b.call("reshape", sinks, [0, heads, 1])
    q = widened(writer, tempered(writer, a, q), sinks, -1.0 / a.scale)
    k, v = widened(writer, k, None), widened(writer, v, None)
    cache, scales = writer.caches[index], writer.scales_of(index)
    b.call("reshape_and_cache", k, v, cache[0], cache[1], writer.slots, **scales)
    out = b.call("empty_like", q)
    attend(writer, index, dataclasses.replace(a, sinks=torch.zeros(heads)), out, q, numbers)
    result: Register = writer.linear(
        w.output, gated(writer, a, b.call("narrow", out, 2, 0, d), gates)
    )
    return result


def _convolved(
    writer: Any, index: int, a: AttentionPlan, parts: list[Register]
) -> tuple[Register, Register]:
    """Write keys and values behind their convolutions, each ``[T, kv_heads, head_dim]``."""
    b, heads, d, store = writer.b, 2 * a.kv_heads, a.head_dim, writer.e.store
    size = a.kv_heads * d
    rows = b.call("cat", [b.call("narrow", one, 1, 0, size) for one in parts], 1)
    mixed = short_convolution(writer, index, 0, a.convs, rows, a.conv_scale)
    mixed = b.call("reshape", mixed, [0, heads, d])
    assert a.apart is not None
    if a.apart.moving:
        for conv in a.convs:
            store.watch(conv, MOVING)
        count, wide = taps_of(a.convs).shape
        # The rows of the tokens before, side by side: each is a convolution with one tap.
        taps = torch.zeros(count, count - 1, wide)
        for lag in range(1, count):
            taps[count - 1 - lag, lag - 1] = 1.0
        every = b.call("cat", [rows] * (count - 1), 1)
        history, taps = writer.state_caches[index][3], b.constant(taps.flatten(1))
        every = b.call("causal_conv1d_varlen", every, history, taps, None, "none", *writer.texts)
        every = b.call("reshape", b.call("cat", [rows, every], 1), [0, count * heads, d])
        more = [b.call("narrow", one, 1, size, a.kv_heads * count) for one in parts]
        factors = b.call("reshape", b.call("cat", more, 1), [0, heads, count])
        inputs = [b.call("narrow", every, 1, i * heads, heads) for i in range(count)]
        inputs += [b.call("narrow", factors, 2, i, 1) for i in range(count)]
        steps: list[tuple[Any, ...]] = [("mul", 0, count)]
        for i in range(1, count):
            value = 2 * count + 2 + len(steps)
            steps += [("mul", i, count + i), ("add", value - 1, value)]
        value = 2 * count + 1 + len(steps)
        steps += [("mul", value, 2 * count + 1), ("add", 2 * count, value + 1)]
        mixed = pointwise(b, [*inputs, mixed], [a.conv_scale], steps, store.dtype)
    first, last = (b.call("narrow", mixed, 1, at, a.kv_heads) for at in (0, a.kv_heads))
    return first, last

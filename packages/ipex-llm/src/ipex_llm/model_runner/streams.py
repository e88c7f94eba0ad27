# SPDX-License-Identifier: Apache-2.0
"""Several streams beside each other, and layers of low rank beside attention, as parts of a program.

They are of Gemma 3n, HY 4 and Qwen 4. Streams are a register each, or one ``[T, count, H]`` where all are read at once.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch

from ipex_core.program import Register
from ipex_llm.arch import (
    GatedConnectionPlan,
    LayerMeansPlan,
    LayerPlan,
    LayerStreams,
    LowRankPlan,
    MeansPlan,
    NgramsPlan,
    StreamEndsPlan,
    StreamsPlan,
)
from ipex_llm.arch.parts import Connection
from ipex_llm.model_runner.dense import Linear, WeightStore
from ipex_llm.model_runner.feed_forward import pointwise
from ipex_llm.model_runner.means import pack_mean, pack_means, write_mean, write_means

Streams = list[Register]


def pack_streams(store: WeightStore, plan: LayerStreams) -> tuple[Any, ...]:
    """Pack the router of streams, and what it gives to predict and to correct them, two connections, or two means."""
    if isinstance(plan, LayerMeansPlan):
        return pack_means(store, plan)
    if isinstance(plan, tuple):
        return tuple(pack_connection(store, one) for one in plan)
    return store.linear(plan.router), store.linear(plan.predict), store.linear(plan.correct)


def pack_connection(store: WeightStore, plan: Connection | MeansPlan) -> tuple[Linear, ...]:
    """Pack the weights of a connection, or the queries of a mean."""
    if isinstance(plan, MeansPlan):
        return (pack_mean(store, plan),)
    if isinstance(plan, GatedConnectionPlan):
        return tuple(map(store.linear, plan.linears))
    for name in (plan.weight, plan.base, plan.scale):
        store.watch(plan.module, name)
    weight: torch.Tensor = getattr(plan.module, plan.weight)
    return (store.plain(weight.detach().to(store.dtype).contiguous(), None),)


def _gate(
    writer: Any, plan: GatedConnectionPlan, weights: tuple[Linear, ...], streams: Register
) -> tuple[Register, Register | None]:
    b, count, size, dtype = writer.b, plan.count, writer.plan.hidden_size, writer.e.store.dtype
    flat = b.call("reshape", writer.norm(plan.norm, streams), [0, count * size])
    inner = pointwise(
        b, [writer.linear(weights[0], flat)], [plan.factor], [("mul", 0, 1), ("silu", 2)], dtype
    )
    gates = writer.linear(weights[1], inner)
    parts = [b.call("narrow", x, 1, i * size, size) for x in (gates, flat) for i in range(count)]
    steps: list[tuple[Any, ...]] = []
    for i in range(count):
        value = 2 * count + 1 + len(steps)
        steps += [("sigmoid", i), ("mul", value, count + i)]
        steps += [("add", value - 1, value + 1)] if i else []
    steps.append(("mul", 2 * count + len(steps), 2 * count))
    row = pointwise(b, parts, [1.0 / count], steps, dtype)
    if plan.last is None:
        return row, None
    given = [writer.linear(weights[2], flat)]
    steps = [("mul", 0, 1), ("sigmoid", 3), ("mul", 4, 2)]
    factors = pointwise(b, given, [plan.factor, 2.0], steps, torch.float32)
    return row, b.call("reshape", factors, [0, count, 1])


def write_ngrams(
    writer: Any, index: int, plan: NgramsPlan, weights: tuple[Linear, Linear], streams: Register
) -> Register:
    """Write streams ``[T, count, H]`` with what n-grams bring into them before a layer."""
    b, size, dtype = writer.b, writer.plan.hidden_size, writer.e.store.dtype
    widths = [one.width for at, one in writer.plan.ngrams.items() if at < index]
    rows = b.call("narrow", writer.tokens, 1, sum(widths), plan.width)
    keys = b.call("reshape", writer.linear(weights[0], rows), [0, -1, size])
    value = b.call("reshape", writer.linear(weights[1], rows), [0, 1, size])
    inputs = [writer.norm(plan.key_norm, keys), writer.norm(plan.query_norm, streams)]
    gate = b.call("mean", pointwise(b, inputs, [], [("mul", 0, 1)], torch.float32), [2], True)
    steps = [
        *(("mul", 0, 2), ("abs", 5), ("maximum", 6, 4), ("div", 5, 7)),
        *(("maximum", 6, 3), ("sqrt", 9), ("mul", 8, 10), ("sigmoid", 11), ("mul", 12, 1)),
    ]
    added = pointwise(b, [gate, value], [size**0.5, 1e-6, 1e-30], steps, dtype)
    flat = b.call("reshape", writer.norm(plan.conv_norm, added), [0, len(plan.conv.weight)])
    history, taps = writer.state_caches[index][-2], b.constant(plan.taps)
    mixed = b.call("causal_conv1d_varlen", flat, history, taps, None, "silu", *writer.texts)
    mixed = b.call("reshape", mixed, [0, -1, size])
    return pointwise(b, [streams, added, mixed], [], [("add", 0, 1), ("add", 3, 2)], dtype)


def connect(
    writer: Any, plan: Connection, weights: tuple[Linear, ...], streams: Register
) -> tuple[Register, Register | None, Register | None]:
    """Write what a block reads of streams ``[T, count, H]``, and factors ``[T, count or 0, 1]`` on what it gives.

    Behind them a matrix that mixes streams, or None.
    """
    if isinstance(plan, GatedConnectionPlan):
        return *_gate(writer, plan, weights, streams), None
    b, count, numbers = writer.b, plan.count, [*map(writer.b.constant, plan.numbers)]
    size, wide = writer.plan.hidden_size, len(plan.numbers[1])
    flat = b.call("reshape", streams, [0, count * size])
    flat = b.call("rms_norm", flat, None, plan.norm_eps, 0.0)
    inputs = [writer.linear(weights[0], flat), *numbers[:2]]
    rows = pointwise(b, inputs, [], [("mul", 0, 1), ("add", 3, 2)], torch.float32)
    steps = [("sigmoid", 0), ("mul", 3, 1), ("add", 4, 2)]
    factors = pointwise(b, [rows, *numbers[2:]], [], steps, torch.float32)
    factors = b.call("reshape", factors, [0, wide, 1])
    parts = [b.call("narrow", x, 1, i, 1) for x in (factors, streams) for i in range(count)]
    steps = [("mul", 0, count)]
    for i in range(1, count):
        value = 2 * count + len(steps)
        steps += [("mul", i, count + i), ("add", value - 1, value)]
    row = pointwise(b, parts, [], steps, writer.e.store.dtype)
    behind = b.call("narrow", factors, 1, count, min(count, wide - count))
    matrix = None
    if plan.rounds:
        matrix = b.call("narrow", rows, 1, 2 * count, count * count)
        matrix = b.call("softmax", b.call("reshape", matrix, [0, count, count]))
        matrix = b.call("add", matrix, plan.eps)
        for dim in (1, *(2, 1) * (plan.rounds - 1)):
            inputs = [matrix, b.call("sum", matrix, [dim], True)]
            steps = [("add", 1, 2), ("div", 0, 3)]
            matrix = pointwise(b, inputs, [plan.eps], steps, torch.float32)
    return b.call("reshape", row, [0, size]), behind, matrix


def _added(writer: Any, streams: Register, matrix: Register | None, *given: Register) -> Register:
    """Write streams, mixed by a matrix, with factors on what a block gives, and that ``[T, 1, H]``."""
    b, dtype, count = writer.b, writer.e.store.dtype, writer.plan.streams.count
    if matrix is None:
        return pointwise(b, [streams, *given], [], [("mul", 1, 2), ("add", 0, 3)], dtype)
    parts = [b.call("narrow", x, 1, i, 1) for x in (streams, matrix) for i in range(count)]
    parts[count:] = (b.call("transpose", one, 1, 2) for one in parts[count:])
    value = 2 * count + 2
    steps = [("mul", value - 2, value - 1)]
    for i in range(count):
        steps += [("mul", i, count + i), ("add", value + 2 * i, value + 2 * i + 1)]
    return pointwise(b, [*parts, *given], [], steps, dtype)


def _write_connected(
    writer: Any, index: int, layer: LayerPlan, w: Any, streams: Register
) -> Register:
    b, attention, size = writer.b, layer.attention, writer.plan.hidden_size
    assert isinstance(layer.streams, tuple) and attention is not None
    if layer.ngrams is not None:
        streams = write_ngrams(writer, index, layer.ngrams, w.ngrams, streams)
    parts = zip(layer.streams, w.streams, (layer.input_norm, layer.mlp_norm), strict=True)
    for place, (plan, weights, norm) in enumerate(parts):
        h, factors, matrix = connect(writer, plan, weights, streams)
        assert factors is not None
        x = h if norm is None else writer.norm(norm, h)
        after = layer.post_mlp_norm if place else layer.post_attention_norm
        if place:
            y = writer.mlp_alone(layer.mlp, w, x, h)
        else:
            y = writer.attention(index, attention, w, x)
            y = y if w.output is None else writer.linear(w.output, y)
        y = b.call("reshape", y if after is None else writer.norm(after, y), [0, 1, size])
        streams = _added(writer, streams, matrix, factors, y)
    return streams


def _factors(writer: Any, plan: StreamsPlan, router: Linear, last: Linear, x: Register) -> Register:
    """Write the factors on streams that follow from ``x``."""
    routed = writer.b.call("tanh", writer.linear(router, writer.norm(plan.norm, x)))
    result: Register = writer.linear(last, routed)
    return result


def _predict(writer: Any, plan: StreamsPlan, weights: Any, streams: Streams) -> Streams:
    b, count, dtype = writer.b, plan.count, writer.e.store.dtype
    factors = _factors(writer, plan, weights[0], weights[1], streams[0])
    found = []
    for i in range(count):
        own = [b.call("narrow", factors, 1, i * count + j, 1) for j in range(count)]
        steps: list[tuple[Any, ...]] = []
        total, value = 2 * count, 2 * count + 1
        for j in range(count):
            steps += [("mul", j, count + j), ("add", total if j else i, value - 1)]
            total, value = value, value + 2
        found.append(pointwise(b, [*streams, *own], [], steps, dtype))
    return found


def _correct(
    writer: Any, plan: StreamsPlan, weights: Any, predicted: Streams, y: Register
) -> Streams:
    b, dtype = writer.b, writer.e.store.dtype
    factors = _factors(writer, plan, weights[0], weights[2], y)
    steps = [("sub", 2, 1), ("add", 3, 4), ("mul", 5, 6), ("add", 0, 7)]
    return [
        pointwise(
            b, [one, predicted[0], y, b.call("narrow", factors, 1, i, 1)], [1.0], steps, dtype
        )
        for i, one in enumerate(predicted)
    ]


def write_streams(writer: Any, index: int, layer: LayerPlan, w: Any, streams: Streams) -> Streams:
    """Write a layer of several streams.

    Args:
        writer: Writes the program.
        index: Of the layer.
        layer: Its plan.
        w: Its packed weights.
        streams: What it reads, each ``[T, H]``.

    Returns:
        What it gives.
    """
    b, plan, block = writer.b, layer.streams, layer.token_block
    assert plan is not None
    if isinstance(plan, LayerMeansPlan):
        return write_means(writer, index, layer, w, streams)
    if isinstance(plan, tuple):
        return [_write_connected(writer, index, layer, w, streams[0])]
    predicted = _predict(writer, plan, w.streams, streams)
    bare = dataclasses.replace(layer, streams=None, token_block=None)
    h, rest = writer.layer(index, bare, w, predicted[0], None)
    y = h if rest is None else b.call("add", h, rest)
    found = _correct(writer, plan, w.streams, predicted, y)
    if block is None:
        return found
    first = found[0]
    if plan.scale is not None:
        first = b.call("mul", first, b.constant(plan.scale.detach().to(writer.e.store.dtype)))
    more = writer.token_block(index, block, w, first)
    return [found[0], *(b.call("add", one, more) for one in found[1:])]


def write_low_rank(
    writer: Any, plan: LowRankPlan, weights: Any, x: Register, h: Register, rest: Register | None
) -> Register:
    """Write layers of low rank beside attention.

    Args:
        writer: Writes the program.
        plan: Of the layers.
        weights: Packed, of both.
        x: What attention reads.
        h: The stream.
        rest: What attention gives if that is not in `h` yet.

    Returns:
        The stream behind both.
    """
    low = writer.linear(weights[1], writer.linear(weights[0], x))
    terms = [h, x, writer.norm(plan.norm, low), *(() if rest is None else (rest,))]
    count = len(terms)
    steps: list[tuple[Any, ...]] = [("add", 0, 1)]
    steps += [("add", count + 1 + i, 2 + i) for i in range(count - 2)]
    steps.append(("mul", count + len(steps), count))
    return pointwise(writer.b, terms, [plan.factor], steps, writer.e.store.dtype)


def _size(writer: Any, x: Register) -> Register:
    """Write the means of the squares of rows, float32 ``[T, 1]``."""
    squares = pointwise(writer.b, [x], [], [("mul", 0, 0)], torch.float32)
    result: Register = writer.b.call("mean", squares, [1], True)
    return result


def _as_long(writer: Any, size: Register, x: Register) -> Register:
    """Write rows that are as long as others whose means of squares are ``size``."""
    steps = [("sqrt", 1), ("maximum", 2, 3), ("rsqrt", 5), ("mul", 4, 6), ("mul", 0, 7)]
    inputs = [x, size, _size(writer, x)]
    return pointwise(writer.b, inputs, [1e-5], steps, writer.e.store.dtype)


def open_streams(writer: Any, h: Register, weights: Sequence[Linear]) -> Streams:
    """Write the streams that the first layer reads."""
    plan = writer.plan.streams
    if isinstance(plan, MeansPlan):
        return [h]
    if not isinstance(plan, StreamEndsPlan):
        whole = writer.b.call("cat", [h] * plan.count, 1)
        return [writer.b.call("reshape", whole, [0, plan.count, writer.plan.hidden_size])]
    size = _size(writer, h)
    return [h, *(_as_long(writer, size, writer.linear(one, h)) for one in weights)]


def close_streams(writer: Any, streams: Streams, weights: Sequence[Any]) -> Register:
    """Write the mean of streams behind the last layer, or what a connection makes of them."""
    plan = writer.plan.streams
    if isinstance(plan, MeansPlan):
        return write_mean(writer, plan, weights[0][0], streams[0], streams[1:])[0]
    if not isinstance(plan, StreamEndsPlan):
        return connect(writer, plan, weights[0], streams[0])[0]
    size, count = _size(writer, streams[0]), len(streams)
    ends = zip(weights, streams[1:], strict=True)
    rows = [streams[0], *(_as_long(writer, size, writer.linear(one, s)) for one, s in ends)]
    steps: list[tuple[Any, ...]] = [("add", 0, 1)]
    steps += [("add", count + 1 + i, 2 + i) for i in range(count - 2)]
    steps.append(("mul", count + len(steps), count))
    return pointwise(writer.b, rows, [1.0 / count], steps, writer.e.store.dtype)

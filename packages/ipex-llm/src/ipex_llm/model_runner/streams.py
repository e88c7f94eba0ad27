# SPDX-License-Identifier: Apache-2.0
"""Several streams beside each other, and layers of low rank beside attention, as parts of a program (Gemma 3n)."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch

from ipex_core.program import Register
from ipex_llm.arch import LayerPlan, LowRankPlan, StreamsPlan
from ipex_llm.model_runner.dense import Linear, WeightStore
from ipex_llm.model_runner.feed_forward import pointwise

Streams = list[Register]


def pack_streams(store: WeightStore, plan: StreamsPlan) -> tuple[Linear, Linear, Linear]:
    """Pack the router of streams, and what it gives to predict and to correct them."""
    return store.linear(plan.router), store.linear(plan.predict), store.linear(plan.correct)


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
    size = _size(writer, h)
    return [h, *(_as_long(writer, size, writer.linear(one, h)) for one in weights)]


def close_streams(writer: Any, streams: Streams, weights: Sequence[Linear]) -> Register:
    """Write the mean of streams behind the last layer."""
    size, count = _size(writer, streams[0]), len(streams)
    ends = zip(weights, streams[1:], strict=True)
    rows = [streams[0], *(_as_long(writer, size, writer.linear(one, s)) for one, s in ends)]
    steps: list[tuple[Any, ...]] = [("add", 0, 1)]
    steps += [("add", count + 1 + i, 2 + i) for i in range(count - 2)]
    steps.append(("mul", count + len(steps), count))
    return pointwise(writer.b, rows, [1.0 / count], steps, writer.e.store.dtype)

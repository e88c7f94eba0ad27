# SPDX-License-Identifier: Apache-2.0
"""Recurrent layers over texts of unlike length, back to back, with the state of each text in a cache.

The gated delta rule, the scans of Mamba and Mamba-2, and the short convolution in front of all three. Prompts, pieces
of prompts and single steps are the same call: what a text has had before is in its row of the state.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ipex_core.library.checks import (
    SUM_TOLERANCE,
    acc,
    check_contiguous,
    check_device,
    check_dtype_in,
    check_kind,
    check_once,
    check_shape,
    check_tensor,
    randn,
)
from ipex_core.library.kernels import register_op
from ipex_core.library.spec import Arguments, BenchCase, Sample
from ipex_core.ops.state_space import (
    check_activation,
    check_float32,
    check_shaped,
    check_writable,
)

#: Most taps of a filter.
MAX_TAPS = 64


def _spans(
    state: Tensor, starts: Tensor, lengths: Tensor, slots: Tensor
) -> Iterator[tuple[int, int, int, Tensor]]:
    """Yield the first and the last row of each text, its row of the state, and what it has had: zeros at its start."""
    places = starts.tolist()
    for b, (length, slot) in enumerate(zip(lengths.tolist(), slots.tolist(), strict=True)):
        count = places[b + 1] - places[b]
        if count:
            past = torch.zeros_like(state[slot]) if length == count else state[slot]
            yield places[b], places[b + 1], slot, past


def _check_spans(a: Arguments, rows: int, states: int) -> None:
    """Check ``query_starts``, ``lengths`` and ``slots``: their dtypes, shapes and numbers."""
    x = a.v if hasattr(a, "v") else a.x
    batch = a.lengths.shape[0] if a.lengths.dim() == 1 else 0
    for name, size in (("query_starts", batch + 1), ("lengths", batch), ("slots", batch)):
        value = getattr(a, name)
        check_device(a.op, name, value, x, "the rows")
        check_dtype_in(a.op, name, value, torch.int32)
        check_shape(a.op, name, value, [size])
    numbers = a.query_starts, a.lengths, a.slots
    if any(type(t) is not Tensor or t.is_meta for t in numbers):
        return  # fake tensors have no numbers

    def check_values() -> None:
        starts, lengths, slots = (t.cpu() for t in numbers)
        counts = starts[1:] - starts[:-1]
        whole = int(starts[0]) == 0 and int(starts[-1]) == rows and bool((counts >= 0).all())
        a.require(whole, "query_starts", f"rise from 0 to {rows}", starts.tolist())
        a.require(
            bool((lengths >= counts).all()), "lengths", "count the new rows", lengths.tolist()
        )
        inside = bool(((slots >= 0) & (slots < states)).all())
        a.require(inside, "slots", f"be in [0, {states})", slots.tolist())

    check_once(numbers, (a.op, rows, states), check_values)


# --- the short convolution --------------------------------------------------------------------------------------------


def _conv(
    x: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str,
    query_starts: Tensor,
    lengths: Tensor,
    slots: Tensor,
) -> Tensor:
    """Convolve each channel with its own short filter, looking back only, for texts back to back.

    ``y[t] = activation(bias + sum(weight[w] * x[t - (W - 1) + w] for w in range(W)))`` within each text. What came
    before the first row of a text is in ``conv_state``, or zero where the text begins; its last W - 1 rows are put
    there.

    Args:
        x: ``[T, D]``, float32, bfloat16 or float16; rows may lie apart.
        conv_state: ``[S, W - 1, D]`` in the dtype of ``x``, contiguous. Overwritten in the rows ``slots``.
        weight: ``[W, D]``, 1 to 64 taps, in the dtype of ``x`` or float32.
        bias: ``[D]``, likewise, or None.
        activation: ``"silu"`` or ``"none"``.
        query_starts: int32 ``[B + 1]``, where each text begins in ``x``, and T.
        lengths: int32 ``[B]``, rows that each text has had, with the new ones. A text begins here if these are all.
        slots: int32 ``[B]``, the row of ``conv_state`` that belongs to each text; no two are equal.

    Returns:
        ``[T, D]``, contiguous; computed in float32.

    Raises:
        RuntimeError: For wrong dtypes, shapes, devices, activation or numbers.

    Source: Gu and Dao, "Mamba: Linear-Time Sequence Modeling with Selective State Spaces", 2023.
    """
    before = weight.shape[0] - 1
    taps = acc(weight).t().unsqueeze(1)
    wide = None if bias is None else acc(bias)
    parts = []
    for first, last, slot, past in _spans(conv_state, query_starts, lengths, slots):
        rows = torch.cat([past.to(x.dtype), x[first:last]])
        y = F.conv1d(acc(rows).t().unsqueeze(0), taps, wide, groups=x.shape[1])[0].t()
        parts.append(F.silu(y) if activation == "silu" else y)
        conv_state[slot] = rows[rows.shape[0] - before :].to(conv_state.dtype)
    return torch.cat(parts).to(x.dtype) if parts else torch.empty_like(x)


def _conv_check(a: Arguments) -> None:
    check_tensor(a.op, "x", a.x)
    a.require(a.x.dim() == 2, "x", "be 2-D [T, D]", f"{a.x.dim()}-D")
    check_kind(a.op, "weight", a.weight, a.x, or_float32=True)
    channels, shape = a.x.shape[1], list(a.weight.shape)
    fits = len(shape) == 2 and shape[1] == channels and 1 <= shape[0] <= MAX_TAPS
    a.require(fits, "weight", f"have shape [W, {channels}] with W from 1 to {MAX_TAPS}", shape)
    check_shaped(a.op, "bias", a.bias, [channels], a.x, "x", or_float32=True)
    check_kind(a.op, "conv_state", a.conv_state, a.x)
    states = a.conv_state.shape[0] if a.conv_state.dim() == 3 else 0
    check_shape(a.op, "conv_state", a.conv_state, [states, shape[0] - 1, channels])
    check_contiguous(a.op, "conv_state", a.conv_state)
    check_activation(a.op, a.activation)
    _check_spans(a, a.x.shape[0], states)


#: Rows of each text of a sample.
_TEXTS = ((1,), (7,), (1, 1, 1), (5, 0, 1, 19), (70, 3))


def _int32(values: Sequence[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def _texts(counts: Sequence[int], begin: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """Return query_starts, lengths and slots; every other text has a past."""
    starts = [0]
    for count in counts:
        starts.append(starts[-1] + count)
    past = [0 if begin or b % 2 else 3 * b + 2 for b in range(len(counts))]
    lengths = [n + p for n, p in zip(counts, past, strict=True)]
    slots = [(2 * b + 1) % (len(counts) + 2) for b in range(len(counts))]
    slots = slots if len(set(slots)) == len(slots) else list(range(len(counts)))
    return _int32(starts), _int32(lengths), _int32(slots)


def _conv_samples(dtype: torch.dtype) -> Iterator[Sample]:
    for number, counts in enumerate(_TEXTS):
        for channels, width in ((5, 4), (70, 3), (64, 4), (16, 1), (33, 21)):
            rows, states = sum(counts), len(counts) + 2
            x = randn(rows, channels + 6, dtype=dtype, seed=90)[:, 3 : channels + 3]
            state = randn(states, width - 1, channels, dtype=dtype, seed=91)
            weight = randn(width, channels, dtype=dtype, seed=92, scale=0.5)
            bias = randn(channels, dtype=torch.float32, seed=93) if number % 2 else None
            activation = "none" if width == 3 else "silu"
            name = f"{'+'.join(map(str, counts))}x{channels}-{width}"
            yield Sample((x, state, weight, bias, activation, *_texts(counts)), id=name)
    x, state = randn(4, 24, dtype=dtype, seed=94), randn(4, 3, 24, dtype=dtype, seed=95)
    x[1, 3], x[2, 5], x[3, 7] = float("nan"), float("inf"), -float("inf")
    weight = randn(4, 24, seed=96)
    yield Sample((x, state, weight, None, "silu", *_texts((3, 1))), id="special_values")
    yield Sample((x[:0], state, weight, None, "silu", *_texts((0,))), id="no_rows")


def _conv_bench() -> Iterator[BenchCase]:
    for counts, channels in (((1,), 8192), ((1,) * 16, 8192), ((512,), 8192)):
        yield BenchCase(
            f"{len(counts)}x{counts[0]}x{channels}",
            lambda dtype, n=counts, d=channels: (
                randn(sum(n), d, dtype=dtype),
                randn(len(n) + 2, 3, d, dtype=dtype),
                randn(4, d, dtype=dtype),
                None,
                "silu",
                *_texts(n),
            ),
            lambda dtype, n=counts, d=channels: (2 * sum(n) + 6 * len(n) + 4) * d * dtype.itemsize,
        )


register_op(
    name="causal_conv1d_varlen",
    mutates=("conv_state",),
    reference=_conv,
    check=_conv_check,
    fake=lambda a: a.x.new_empty(a.x.shape),
    samples=_conv_samples,
    backward=None,
    bench=_conv_bench,
    summary="Short causal convolution of texts back to back, with their histories in a cache",
)


# --- the gated delta rule ---------------------------------------------------------------------------------------------


def _grouped(x: Tensor, heads: int) -> Tensor:
    """Return ``x [T, G, K]`` for each head."""
    return acc(x).repeat_interleave(heads // x.shape[1], 1)


def _unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


def _delta(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    A: Tensor,
    dt_bias: Tensor,
    state: Tensor,
    query_starts: Tensor,
    lengths: Tensor,
    slots: Tensor,
    scale: float,
    normalize: bool = True,
    lowest: float = 0.0,
) -> Tensor:
    """Run the gated delta rule (gated delta net, Kimi delta attention) for texts back to back.

    For each text and head, with a state ``S`` of K keys and V values, row by row::

        S = exp(A * softplus(a + dt_bias)) * S
        S = S + outer(k, sigmoid(b) * (v - k @ S))
        y = scale * (q @ S)

    With a step for each key, ``a`` of shape ``[T, H, K]``, the rows of ``S`` decay at rates of their own.

    Args:
        q: ``[T, G, K]``, float32, bfloat16 or float16; rows may lie apart.
        k: Like ``q``. G groups of heads share a query and a key.
        v: ``[T, H, V]`` in the dtype of ``q``; G divides H.
        a: ``[T, H]`` or ``[T, H, K]`` in the dtype of ``q`` or float32.
        b: ``[T, H]``, likewise.
        A: float32 ``[H]``, negative.
        dt_bias: float32 ``[H]``, or ``[H, K]`` with a step for each key.
        state: float32 ``[S, H, K, V]``, contiguous. Overwritten in the rows ``slots``.
        query_starts: int32 ``[B + 1]``, where each text begins in the rows, and T.
        lengths: int32 ``[B]``, rows that each text has had, with the new ones. A text begins, with a state of zeros,
            if these are all.
        slots: int32 ``[B]``, the row of ``state`` that belongs to each text; no two are equal.
        scale: Factor on queries.
        normalize: Divide queries and keys by their lengths first: ``x / sqrt(sum(x * x) + 1e-6)``.
        lowest: Below zero, the factors on ``S`` are ``exp(lowest * sigmoid(-A * (a + dt_bias)))`` instead, which are at
            least ``exp(lowest)``.

    Returns:
        ``[T, H, V]``, contiguous, in the dtype of ``q``; computed in float32.

    Raises:
        RuntimeError: For wrong dtypes, shapes, devices or numbers.

    Source: Yang, Kautz and Hatamizadeh, "Gated Delta Networks: Improving Mamba2 with Delta Rule", 2024; Kimi team,
    "Kimi Linear: An Expressive, Efficient Attention Architecture", 2025.
    """
    heads = v.shape[1]
    queries, keys, values = _grouped(q, heads), _grouped(k, heads), acc(v)
    if normalize:
        queries, keys = _unit(queries), _unit(keys)
    steps, rates = acc(a) + acc(dt_bias), acc(A).view(-1, *[1] * (a.dim() - 2))
    if lowest < 0:
        decay = torch.exp(lowest * torch.sigmoid(-rates * steps))
    else:
        decay = torch.exp(rates * F.softplus(steps))
    decay = decay.unsqueeze(-1) if a.dim() == 3 else decay[..., None, None]
    strength = torch.sigmoid(acc(b))
    y = torch.empty_like(values)
    for first, last, slot, past in _spans(state, query_starts, lengths, slots):
        s = acc(past)
        for t in range(first, last):
            s = s * decay[t]
            known = (s * keys[t].unsqueeze(-1)).sum(1)
            new = (values[t] - known) * strength[t].unsqueeze(-1)
            s = s + keys[t].unsqueeze(-1) * new.unsqueeze(1)
            y[t] = (s * queries[t].unsqueeze(-1)).sum(1) * scale
        state[slot] = s.to(state.dtype)
    return y.to(v.dtype)


def _check_heads(a: Arguments, x: Any, name: str, keys: tuple[str, str]) -> tuple[int, int, int]:
    """Check rows of heads and of their groups; return rows, heads and width of the keys."""
    first, second = keys
    check_tensor(a.op, name, x)
    a.require(x.dim() == 3, name, "be 3-D [T, H, width]", f"{x.dim()}-D")
    rows, heads = x.shape[:2]
    for key in keys:
        value = getattr(a, key)
        check_kind(a.op, key, value, x, name)
        shape = list(value.shape)
        divides = len(shape) == 3 and shape[1] > 0 and heads % shape[1] == 0
        fits = divides and shape[0] == rows and shape[2] > 0
        a.require(fits, key, f"have shape [{rows}, G, width] where G divides {heads}", shape)
    width = getattr(a, first).shape[2]
    check_shape(a.op, second, getattr(a, second), list(getattr(a, first).shape))
    return rows, heads, width


def _check_state(a: Arguments, x: Tensor, shape: list[int], of: str) -> int:
    """Check a state and return its number of rows."""
    states = a.state.shape[0] if a.state.dim() == len(shape) + 1 else 0
    check_float32(a.op, "state", a.state, [states, *shape], x, of)
    check_writable(a.op, "state", a.state)
    check_contiguous(a.op, "state", a.state)
    return states


def _delta_check(a: Arguments) -> None:
    rows, heads, width = _check_heads(a, a.v, "v", ("q", "k"))
    each = [width] if a.a.dim() == 3 else []
    check_shaped(a.op, "a", a.a, [rows, heads, *each], a.v, "v", or_float32=True)
    check_shaped(a.op, "b", a.b, [rows, heads], a.v, "v", or_float32=True)
    check_float32(a.op, "A", a.A, [heads], a.v, "v")
    check_float32(a.op, "dt_bias", a.dt_bias, [heads, *each], a.v, "v")
    a.require(a.lowest <= 0, "lowest", "be at most 0", a.lowest)
    states = _check_state(a, a.v, [heads, width, a.v.shape[2]], "v")
    _check_spans(a, rows, states)


def _delta_inputs(
    dtype: torch.dtype,
    counts: Sequence[int],
    groups: int,
    heads: int,
    width: int,
    size: int,
    each: bool = False,
) -> tuple[Any, ...]:
    rows, states, own = sum(counts), len(counts) + 2, (width,) * each
    qkv = randn(rows, groups * 2 * width + heads * size, dtype=dtype, seed=100)
    q, k = qkv[:, : groups * width], qkv[:, groups * width : 2 * groups * width]
    return (
        q.view(rows, groups, width) if rows == 0 else q.unflatten(1, (groups, width)),
        k.unflatten(1, (groups, width)),
        qkv[:, 2 * groups * width :].unflatten(1, (heads, size)),
        randn(rows, heads, *own, dtype=dtype, seed=101),
        randn(rows, heads, dtype=dtype, seed=102),
        -torch.exp(randn(heads, seed=103, scale=0.5)),
        randn(heads, *own, seed=104),
        randn(states, heads, width, size, seed=105),
        *_texts(counts),
        width**-0.5,
    )


#: Groups, heads, keys and values.
_DELTA_SHAPES: tuple[tuple[int, int, int, int], ...] = (
    *((1, 1, 1, 1), (2, 4, 16, 16), (2, 2, 24, 70)),
    *((1, 3, 9, 5), (1, 2, 64, 128)),
)


def _delta_samples(dtype: torch.dtype) -> Iterator[Sample]:
    for counts in _TEXTS:
        for shape in _DELTA_SHAPES:
            if max(counts) > 20 and shape[3] > 70:
                continue
            name = f"{'+'.join(map(str, counts))}x{'x'.join(map(str, shape))}"
            yield Sample(_delta_inputs(dtype, counts, *shape), id=name)
            if shape[2] != 16:
                yield Sample(_delta_inputs(dtype, counts, *shape, True), id=f"{name}_each")
    each = _delta_inputs(dtype, (6, 2), 2, 4, 24, 40, True)
    yield Sample((*each, True, -5.0), id="lowest_each")
    apart = each[3].float().transpose(1, 2).contiguous().transpose(1, 2)
    yield Sample((*each[:3], apart, *each[4:]), id="apart_each")
    plain = _delta_inputs(dtype, (6, 2), 2, 4, 16, 24)
    small = (plain[0] * 0.2, plain[1] * 0.2, *plain[2:])
    yield Sample((*small, False), id="not_normalized")
    yield Sample((*plain, True, -2.0), id="lowest")
    yield Sample((*plain[:3], plain[3].float(), plain[4].float(), *plain[5:]), id="float32_gates")
    v = plain[2].clone()
    v[1, 0, 3], v[3, 1, 2], v[4, 2, 1] = float("nan"), float("inf"), -float("inf")
    yield Sample((*plain[:2], v, *plain[3:]), id="special_values")
    yield Sample(_delta_inputs(dtype, (0,), 1, 2, 8, 8), id="no_rows")


def _delta_bench() -> Iterator[BenchCase]:
    for counts in ((1,), (1,) * 16, (512,)):
        yield BenchCase(
            f"{len(counts)}x{counts[0]}-16-32-128x128",
            lambda dtype, n=counts: _delta_inputs(dtype, n, 16, 32, 128, 128),
            lambda dtype, n=counts: len(n) * 32 * 128 * 128 * 8 + sum(n) * 12288 * dtype.itemsize,
            flops=7 * sum(counts) * 32 * 128 * 128,
            rotate=True,
        )
        yield BenchCase(
            f"{len(counts)}x{counts[0]}-32-32-128x128-each",
            lambda dtype, n=counts: _delta_inputs(dtype, n, 32, 32, 128, 128, True),
            lambda dtype, n=counts: len(n) * 32 * 128 * 128 * 8 + sum(n) * 20480 * dtype.itemsize,
            flops=7 * sum(counts) * 32 * 128 * 128,
            rotate=True,
        )


register_op(
    name="gated_delta_rule",
    schema=(
        "(Tensor q, Tensor k, Tensor v, Tensor a, Tensor b, Tensor A, Tensor dt_bias,"
        " Tensor(s!) state, Tensor query_starts, Tensor lengths, Tensor slots, float scale,"
        " bool normalize=True, float lowest=0.0) -> Tensor"
    ),
    reference=_delta,
    check=_delta_check,
    fake=lambda a: a.v.new_empty(a.v.shape),
    samples=_delta_samples,
    backward=None,
    tolerance=SUM_TOLERANCE,
    bench=_delta_bench,
    summary="Gated delta rule of texts back to back, with their states in a cache",
)


# --- Mamba-2 ----------------------------------------------------------------------------------------------------------


def _ssd(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor,
    dt_bias: Tensor,
    state: Tensor,
    query_starts: Tensor,
    lengths: Tensor,
    slots: Tensor,
    dt_min: float = 0.0,
    dt_max: float = 1e30,
) -> Tensor:
    """Run the scan of Mamba-2 (state space duality) for texts back to back.

    For each text and head, with a state ``S`` of N numbers for each of P channels, row by row::

        d = clamp(softplus(dt + dt_bias), dt_min, dt_max)
        S = exp(A * d) * S + outer(B, d * x)
        y = C @ S + D * x

    Args:
        x: ``[T, H, P]``, float32, bfloat16 or float16; rows may lie apart.
        dt: ``[T, H]`` in the dtype of ``x`` or float32.
        A: float32 ``[H]``, negative.
        B: ``[T, G, N]`` in the dtype of ``x``. G groups of heads share a row.
        C: Like ``B``.
        D: float32 ``[H]``.
        dt_bias: float32 ``[H]``.
        state: float32 ``[S, H, N, P]``, contiguous. Overwritten in the rows ``slots``.
        query_starts: int32 ``[B + 1]``, where each text begins in the rows, and T.
        lengths: int32 ``[B]``, rows that each text has had, with the new ones. A text begins, with a state of zeros,
            if these are all.
        slots: int32 ``[B]``, the row of ``state`` that belongs to each text; no two are equal.
        dt_min: Least step.
        dt_max: Largest step.

    Returns:
        ``[T, H, P]``, contiguous, in the dtype of ``x``; computed in float32.

    Raises:
        RuntimeError: For wrong dtypes, shapes, devices or numbers.

    Source: Dao and Gu, "Transformers are SSMs", 2024.
    """
    heads = x.shape[1]
    b, c, rows = _grouped(B, heads), _grouped(C, heads), acc(x)
    most = torch.finfo(torch.float32).max
    steps = F.softplus(acc(dt) + acc(dt_bias)).clamp(min(dt_min, most), min(dt_max, most))
    decay = torch.exp(acc(A) * steps)
    y = torch.empty_like(rows)
    for first, last, slot, past in _spans(state, query_starts, lengths, slots):
        s = acc(past)
        for t in range(first, last):
            new = rows[t] * steps[t].unsqueeze(-1)
            s = s * decay[t].view(-1, 1, 1) + b[t].unsqueeze(-1) * new.unsqueeze(1)
            y[t] = (s * c[t].unsqueeze(-1)).sum(1) + rows[t] * acc(D).unsqueeze(-1)
        state[slot] = s.to(state.dtype)
    return y.to(x.dtype)


def _ssd_check(a: Arguments) -> None:
    rows, heads, width = _check_heads(a, a.x, "x", ("B", "C"))
    check_shaped(a.op, "dt", a.dt, [rows, heads], a.x, "x", or_float32=True)
    for name in ("A", "D", "dt_bias"):
        check_float32(a.op, name, getattr(a, name), [heads], a.x, "x")
    states = _check_state(a, a.x, [heads, width, a.x.shape[2]], "x")
    a.require(0 <= a.dt_min <= a.dt_max, "dt_min", f"be from 0 to dt_max = {a.dt_max}", a.dt_min)
    _check_spans(a, rows, states)


def _ssd_inputs(
    dtype: torch.dtype, counts: Sequence[int], groups: int, heads: int, width: int, size: int
) -> tuple[Any, ...]:
    rows, states = sum(counts), len(counts) + 2
    xbc = randn(rows, heads * size + groups * 2 * width, dtype=dtype, seed=110)
    middle = heads * size + groups * width
    return (
        xbc[:, : heads * size].unflatten(1, (heads, size)),
        randn(rows, heads, dtype=dtype, seed=111),
        -torch.exp(randn(heads, seed=112, scale=0.5)),
        xbc[:, heads * size : middle].unflatten(1, (groups, width)),
        xbc[:, middle:].unflatten(1, (groups, width)),
        randn(heads, seed=113),
        randn(heads, seed=114),
        randn(states, heads, width, size, seed=115),
        *_texts(counts),
    )


def _ssd_samples(dtype: torch.dtype) -> Iterator[Sample]:
    for counts in _TEXTS:
        for shape in ((1, 1, 1, 1), (2, 4, 16, 16), (1, 2, 24, 70), (1, 3, 9, 5), (1, 2, 128, 64)):
            name = f"{'+'.join(map(str, counts))}x{'x'.join(map(str, shape))}"
            yield Sample(_ssd_inputs(dtype, counts, *shape), id=name)
    plain = _ssd_inputs(dtype, (6, 2), 2, 4, 16, 24)
    yield Sample((*plain, 0.1, 1.5), id="limits")
    yield Sample((plain[0], plain[1].float(), *plain[2:]), id="float32_steps")
    x = plain[0].clone()
    x[1, 0, 3], x[3, 1, 2], x[4, 2, 1] = float("nan"), float("inf"), -float("inf")
    yield Sample((x, *plain[1:]), id="special_values")
    yield Sample(_ssd_inputs(dtype, (0,), 1, 2, 8, 8), id="no_rows")


def _ssd_bench() -> Iterator[BenchCase]:
    for counts in ((1,), (1,) * 16, (512,)):
        yield BenchCase(
            f"{len(counts)}x{counts[0]}-1-128-128x64",
            lambda dtype, n=counts: _ssd_inputs(dtype, n, 1, 128, 128, 64),
            lambda dtype, n=counts: len(n) * 128 * 128 * 64 * 8 + sum(n) * 16640 * dtype.itemsize,
            flops=5 * sum(counts) * 128 * 128 * 64,
            rotate=True,
        )


register_op(
    name="ssd_scan",
    schema=(
        "(Tensor x, Tensor dt, Tensor A, Tensor B, Tensor C, Tensor D, Tensor dt_bias,"
        " Tensor(s!) state, Tensor query_starts, Tensor lengths, Tensor slots,"
        " float dt_min=0.0, float dt_max=1e30) -> Tensor"
    ),
    reference=_ssd,
    check=_ssd_check,
    fake=lambda a: a.x.new_empty(a.x.shape),
    samples=_ssd_samples,
    backward=None,
    tolerance=SUM_TOLERANCE,
    bench=_ssd_bench,
    summary="Scan of Mamba-2 of texts back to back, with their states in a cache",
)


# --- Mamba-1 ----------------------------------------------------------------------------------------------------------


def _selective(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor,
    dt_bias: Tensor,
    state: Tensor,
    query_starts: Tensor,
    lengths: Tensor,
    slots: Tensor,
) -> Tensor:
    """Run the selective scan of Mamba for texts back to back.

    For each text and channel, with a state ``S`` of N numbers for each of E channels, row by row::

        d = softplus(dt + dt_bias)
        S = exp(A * d) * S + outer(B, d * x)
        y = C @ S + D * x

    Unlike in Mamba-2 each number of a state decays at its own rate. `selective_scan_fn` is the same for texts of one
    length, with the states as a result.

    Args:
        x: ``[T, E]``, float32, bfloat16 or float16; rows may lie apart.
        dt: ``[T, E]`` in the dtype of ``x`` or float32.
        A: float32 ``[N, E]``, negative: the transpose of what models store.
        B: ``[T, N]`` in the dtype of ``x``.
        C: Like ``B``.
        D: float32 ``[E]``.
        dt_bias: float32 ``[E]``.
        state: float32 ``[S, N, E]``, contiguous. Overwritten in the rows ``slots``.
        query_starts: int32 ``[B + 1]``, where each text begins in the rows, and T.
        lengths: int32 ``[B]``, rows that each text has had, with the new ones. A text begins, with a state of zeros,
            if these are all.
        slots: int32 ``[B]``, the row of ``state`` that belongs to each text; no two are equal.

    Returns:
        ``[T, E]``, contiguous, in the dtype of ``x``; computed in float32.

    Raises:
        RuntimeError: For wrong dtypes, shapes, devices or numbers.

    Source: Gu and Dao, "Mamba: Linear-Time Sequence Modeling with Selective State Spaces", 2023.
    """
    rows, b, c = acc(x), acc(B), acc(C)
    steps = F.softplus(acc(dt) + acc(dt_bias))
    y = torch.empty_like(rows)
    for first, last, slot, past in _spans(state, query_starts, lengths, slots):
        s = acc(past)
        for t in range(first, last):
            s = s * torch.exp(acc(A) * steps[t]) + b[t].unsqueeze(-1) * (rows[t] * steps[t])
            y[t] = (s * c[t].unsqueeze(-1)).sum(0) + rows[t] * acc(D)
        state[slot] = s.to(state.dtype)
    return y.to(x.dtype)


def _check_channels(a: Arguments, other: str) -> tuple[int, int]:
    """Check ``x`` and another argument ``[T, E]``, and return T and E."""
    check_tensor(a.op, "x", a.x)
    a.require(a.x.dim() == 2, "x", "be 2-D [T, E]", f"{a.x.dim()}-D")
    rows, channels = a.x.shape
    check_shaped(a.op, other, getattr(a, other), [rows, channels], a.x, "x", or_float32=True)
    return rows, channels


def _selective_check(a: Arguments) -> None:
    rows, channels = _check_channels(a, "dt")
    check_kind(a.op, "B", a.B, a.x)
    shape = list(a.B.shape)
    fits = len(shape) == 2 and shape[0] == rows and shape[1] > 0
    a.require(fits, "B", f"have shape [{rows}, N]", shape)
    check_kind(a.op, "C", a.C, a.x)
    check_shape(a.op, "C", a.C, shape)
    check_float32(a.op, "A", a.A, [shape[1], channels], a.x, "x")
    for name in ("D", "dt_bias"):
        check_float32(a.op, name, getattr(a, name), [channels], a.x, "x")
    _check_spans(a, rows, _check_state(a, a.x, [shape[1], channels], "x"))


def _selective_inputs(
    dtype: torch.dtype, counts: Sequence[int], width: int, size: int
) -> tuple[Any, ...]:
    rows, states = sum(counts), len(counts) + 2
    wide = randn(rows, size + 2 * width, dtype=dtype, seed=120)
    return (
        wide[:, :size],
        randn(rows, size, dtype=dtype, seed=121),
        -torch.exp(randn(width, size, seed=122, scale=0.5)),
        wide[:, size : size + width],
        wide[:, size + width :],
        randn(size, seed=123),
        randn(size, seed=124),
        randn(states, width, size, seed=125),
        *_texts(counts),
    )


def _selective_samples(dtype: torch.dtype) -> Iterator[Sample]:
    for counts in _TEXTS:
        for shape in ((1, 1), (16, 64), (16, 70), (5, 9), (24, 33)):
            name = f"{'+'.join(map(str, counts))}x{'x'.join(map(str, shape))}"
            yield Sample(_selective_inputs(dtype, counts, *shape), id=name)
    plain = _selective_inputs(dtype, (6, 2), 16, 96)
    yield Sample((plain[0], plain[1].float(), *plain[2:]), id="float32_steps")
    x = plain[0].clone()
    x[1, 3], x[3, 5], x[4, 90] = float("nan"), float("inf"), -float("inf")
    yield Sample((x, *plain[1:]), id="special_values")
    yield Sample(_selective_inputs(dtype, (0,), 4, 8), id="no_rows")


def _selective_bench() -> Iterator[BenchCase]:
    for counts in ((1,), (1,) * 16, (512,)):
        yield BenchCase(
            f"{len(counts)}x{counts[0]}-16x8192",
            lambda dtype, n=counts: _selective_inputs(dtype, n, 16, 8192),
            lambda dtype, n=counts: (
                (len(n) * 8 + 4) * 16 * 8192 + sum(n) * 3 * 8192 * dtype.itemsize
            ),
            # Per row and number of the state: exponential (counted as one), two products with an addition each, and
            # the factor of the exponential.
            flops=6 * sum(counts) * 16 * 8192,
            rotate=True,
        )


register_op(
    name="selective_scan_varlen",
    schema=(
        "(Tensor x, Tensor dt, Tensor A, Tensor B, Tensor C, Tensor D, Tensor dt_bias,"
        " Tensor(s!) state, Tensor query_starts, Tensor lengths, Tensor slots) -> Tensor"
    ),
    reference=_selective,
    check=_selective_check,
    fake=lambda a: a.x.new_empty(a.x.shape),
    samples=_selective_samples,
    backward=None,
    tolerance=SUM_TOLERANCE,
    bench=_selective_bench,
    summary="Selective scan of Mamba of texts back to back, with their states in a cache",
)


# --- RWKV -------------------------------------------------------------------------------------------------------------


def _wkv(
    x: Tensor,
    k: Tensor,
    decay: Tensor,
    first: Tensor,
    state: Tensor,
    query_starts: Tensor,
    lengths: Tensor,
    slots: Tensor,
) -> Tensor:
    """Run the recurrence of RWKV for texts back to back: means of the values so far, channel by channel.

    Row t counts with the weight ``exp(k[t])``, which is multiplied with ``exp(decay)`` in each row behind the next one;
    in row t itself it counts with ``exp(k[t] + first)``::

        y = (P + exp(k + first) * x) / (W + exp(k + first))
        P = exp(decay) * P + exp(k) * x
        W = exp(decay) * W + exp(k)

    The sums P and W are kept as ``exp(-M) * P``, ``exp(-M) * W`` and ``M``, the largest exponent so far, so that
    weights may be of any size.

    Args:
        x: ``[T, E]``, the values, float32, bfloat16 or float16; rows may lie apart.
        k: ``[T, E]`` in the dtype of ``x`` or float32.
        decay: float32 ``[E]``, negative.
        first: float32 ``[E]``.
        state: float32 ``[S, 3, E]``, contiguous: the sums and M. Overwritten in the rows ``slots``.
        query_starts: int32 ``[B + 1]``, where each text begins in the rows, and T.
        lengths: int32 ``[B]``, rows that each text has had, with the new ones. A text begins, with sums of zero, if
            these are all.
        slots: int32 ``[B]``, the row of ``state`` that belongs to each text; no two are equal.

    Returns:
        ``[T, E]``, contiguous, in the dtype of ``x``; computed in float32.

    Raises:
        RuntimeError: For wrong dtypes, shapes, devices or numbers.

    Source: Peng et al., "RWKV: Reinventing RNNs for the Transformer Era", 2023.
    """
    rows, keys, fades, extra = acc(x), acc(k), acc(decay), acc(first)
    y = torch.empty_like(rows)
    counts = (query_starts[1:] - query_starts[:-1]).tolist()
    every = zip(slots.tolist(), lengths.tolist(), counts, strict=True)
    begins = {slot for slot, length, count in every if length == count}
    for begin, end, slot, past in _spans(state, query_starts, lengths, slots):
        values, weights, most = acc(past).unbind(0)
        if slot in begins:
            most = torch.full_like(most, -1e38)
        for t in range(begin, end):
            now = keys[t] + extra
            top = torch.maximum(most, now)
            before, own = torch.exp(most - top), torch.exp(now - top)
            y[t] = (before * values + own * rows[t]) / (before * weights + own)
            faded = most + fades
            most = torch.maximum(faded, keys[t])
            before, own = torch.exp(faded - most), torch.exp(keys[t] - most)
            values, weights = before * values + own * rows[t], before * weights + own
        state[slot] = torch.stack([values, weights, most]).to(state.dtype)
    return y.to(x.dtype)


def _wkv_check(a: Arguments) -> None:
    rows, channels = _check_channels(a, "k")
    for name in ("decay", "first"):
        check_float32(a.op, name, getattr(a, name), [channels], a.x, "x")
    _check_spans(a, rows, _check_state(a, a.x, [3, channels], "x"))


def _wkv_inputs(
    dtype: torch.dtype, counts: Sequence[int], channels: int, scale: float = 1.0
) -> tuple[Any, ...]:
    rows, states = sum(counts), len(counts) + 2
    wide = randn(rows, 2 * channels, dtype=dtype, seed=130)
    state = randn(states, 3, channels, seed=131)
    state[:, 1].abs_().add_(0.1)
    return (
        wide[:, :channels],
        wide[:, channels:] * scale,
        -torch.exp(randn(channels, seed=132)),
        randn(channels, seed=133),
        state,
        *_texts(counts),
    )


def _wkv_samples(dtype: torch.dtype) -> Iterator[Sample]:
    for counts in _TEXTS:
        for channels in (1, 64, 70, 9, 33):
            name = f"{'+'.join(map(str, counts))}x{channels}"
            yield Sample(_wkv_inputs(dtype, counts, channels), id=name)
    yield Sample(_wkv_inputs(dtype, (9, 2), 40, 100.0), id="large_exponents")
    plain = _wkv_inputs(dtype, (6, 2), 96)
    yield Sample((plain[0], plain[1].float(), *plain[2:]), id="float32_keys")
    x = plain[0].clone()
    x[1, 3], x[3, 5], x[4, 90] = float("nan"), float("inf"), -float("inf")
    yield Sample((x, *plain[1:]), id="special_values")
    yield Sample(_wkv_inputs(dtype, (0,), 8), id="no_rows")


def _wkv_bench() -> Iterator[BenchCase]:
    for counts in ((1,), (1,) * 16, (512,)):
        yield BenchCase(
            f"{len(counts)}x{counts[0]}x4096",
            lambda dtype, n=counts: _wkv_inputs(dtype, n, 4096),
            lambda dtype, n=counts: (len(n) * 24 + 8) * 4096 + sum(n) * 3 * 4096 * dtype.itemsize,
            # Per row: four exponentials (counted as one each), a quotient and the sums.
            flops=20 * sum(counts) * 4096,
            rotate=True,
        )


register_op(
    name="wkv_scan",
    schema=(
        "(Tensor x, Tensor k, Tensor decay, Tensor first, Tensor(s!) state,"
        " Tensor query_starts, Tensor lengths, Tensor slots) -> Tensor"
    ),
    reference=_wkv,
    check=_wkv_check,
    fake=lambda a: a.x.new_empty(a.x.shape),
    samples=_wkv_samples,
    backward=None,
    tolerance=SUM_TOLERANCE,
    bench=_wkv_bench,
    summary="Recurrence of RWKV of texts back to back, with their states in a cache",
)

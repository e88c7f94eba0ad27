# SPDX-License-Identifier: Apache-2.0
"""Blocks that keep a state instead of keys and values, as parts of a program.

A sequence has one row of the state, whatever its length. The ops take the rows of all sequences back to back, begin
with zeros where all tokens of a sequence are new, and leave the state behind the last token.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from ipex_core.program import Register
from ipex_llm.arch import (
    CellPlan,
    ConvPlan,
    DecayPlan,
    DeltaPlan,
    LruPlan,
    MixerPlan,
    ScanPlan,
    SelectivePlan,
    ShiftPlan,
    WkvPlan,
)
from ipex_llm.arch.formulas import bias_of, inner_linears, per_head
from ipex_llm.arch.reference import (
    fading,
    filter_of,
    rates_of,
    rates_of_lru,
    step_bias,
    step_limits,
)
from ipex_llm.kv_cache import StateShape
from ipex_llm.model_runner.attention import pack_blocks
from ipex_llm.model_runner.dense import Linear, WeightStore
from ipex_llm.model_runner.feed_forward import opened, pointwise


@dataclasses.dataclass(frozen=True, slots=True)
class Mixer:
    """What ops read besides the linear layers at both ends, float32.

    Attributes:
        taps: Filter ``[W, D]``, or None.
        bias: ``[D]``, or None.
        vectors: ``[H]``: A and dt_bias, and D of Mamba-2; of Mamba A ``[N, D]``, D and dt_bias. A gated delta net
            with a step for each key has dt_bias ``[H, K]``. Of fixed rates: A, and zeros. Of an RG-LRU: rates and the
            biases of both gates ``[blocks, width]``, and A and zeros of its scan. Of an mLSTM: A and zeros of its scan,
            and a one with the zeros behind it ``[1, 1, n]`` that make a value a multiple of 16 wide.
        up: From rows of low rank to the gates and steps of a gated delta net.
        middle: Linear layer behind the convolution of Mamba.
        step: From what steps are made of to the steps of Mamba, without its bias.
        blocks: Packed products for the gates of an RG-LRU, see ``bmm``.
        parts: Linear layers that `inner_linears` names.
        mixes: What they read of a token instead of the one before, ``[1, hidden]``.
    """

    taps: Tensor | None
    bias: Tensor | None
    vectors: tuple[Tensor, ...] = ()
    up: tuple[Linear, Linear] | None = None
    middle: Linear | None = None
    step: Linear | None = None
    blocks: tuple[Tensor, ...] = ()
    parts: tuple[Linear, ...] = ()
    mixes: tuple[Tensor, ...] = ()


def pack_mixer(store: WeightStore, plan: MixerPlan) -> Mixer:
    """Return the constants of a block."""
    if isinstance(plan, DecayPlan):
        rates = plan.rates.detach().float()
        return Mixer(None, None, (-rates, torch.zeros_like(rates)))
    if isinstance(plan, CellPlan):
        none = torch.zeros(plan.heads)
        one = torch.eye(1, _columns(plan) - plan.value_dim).unsqueeze(0)
        return Mixer(None, None, (none - 1.0, none, one))
    if isinstance(plan, (ShiftPlan, WkvPlan)):
        return _pack_shifted(store, plan)
    for name in ("weight", "bias"):
        store.watch(plan.conv, name)
    vectors: tuple[Tensor, ...] = ()
    if isinstance(plan, (DeltaPlan, ScanPlan)):
        names = ("A", "dt_bias", "D") if isinstance(plan, ScanPlan) else ("A", "dt_bias")
        for name in names:
            store.watch(plan.module, "A_log" if name == "A" else name)
        vectors = tuple(per_head(plan.module, name) for name in names)
    if isinstance(plan, DeltaPlan):
        up = None if plan.up is None else (store.linear(plan.up[0]), store.linear(plan.up[1]))
        return Mixer(*filter_of(plan), (vectors[0], step_bias(plan)), up)
    if isinstance(plan, SelectivePlan):
        return _pack_selective(store, plan)
    if isinstance(plan, LruPlan):
        return _pack_lru(store, plan)
    return Mixer(*filter_of(plan), vectors)


def _pack_shifted(store: WeightStore, plan: ShiftPlan | WkvPlan) -> Mixer:
    names = (plan.decay, plan.first) if isinstance(plan, WkvPlan) else ()
    for name in (*plan.mixes, *names):
        store.watch(plan.module, name)
    mixes = tuple(per_head(plan.module, name).unsqueeze(0) for name in plan.mixes)
    # The filter gives the row before.
    taps = torch.cat([torch.ones_like(mixes[0]), torch.zeros_like(mixes[0])])
    vectors = fading(plan) if isinstance(plan, WkvPlan) else ()
    parts = tuple(map(store.linear, inner_linears(plan)))
    return Mixer(taps, None, vectors, parts=parts, mixes=mixes)


def _pack_selective(store: WeightStore, plan: SelectivePlan) -> Mixer:
    module = plan.step.modules[0]
    for owner, name in ((plan.module, "A_log"), (plan.module, "D"), (module, "bias")):
        store.watch(owner, name)
    vectors = rates_of(plan.module), per_head(plan.module, "D"), bias_of(module)
    step = dataclasses.replace(store.linear(plan.step), bias=None)
    return Mixer(*filter_of(plan), vectors, None, store.linear(plan.middle), step)


def _pack_lru(store: WeightStore, plan: LruPlan) -> Mixer:
    for name in (plan.rate, *plan.decay, *plan.entry):
        store.watch(plan.module, name)
    weights, biases = (
        [getattr(plan.module, names[part]).detach() for names in (plan.decay, plan.entry)]
        for part in (0, 1)
    )
    blocks = (pack_blocks(one.to(store.dtype).transpose(1, 2)) for one in weights)
    rates = rates_of_lru(plan)
    numbers = (*(one.float() for one in biases), -torch.ones(1, plan.channels), 0.0 * rates)
    return Mixer(*filter_of(plan), (rates.view_as(biases[0]), *numbers), blocks=tuple(blocks))


def _columns(plan: CellPlan) -> int:
    """Return how wide a row of the state of an mLSTM is: a value, the sum of keys, and zeros up to whole vectors."""
    return (plan.value_dim // 16 + 1) * 16


def state_shape(plan: MixerPlan, dtype: torch.dtype) -> StateShape:
    """Return what a block stores for a sequence."""
    if isinstance(plan, DecayPlan):
        return StateShape(None, (plan.heads, plan.head_dim, plan.head_dim), dtype, portable=False)
    if isinstance(plan, CellPlan):
        return StateShape(None, (plan.heads, plan.key_dim, _columns(plan)), dtype, portable=False)
    if isinstance(plan, (ShiftPlan, WkvPlan)):
        width = per_head(plan.module, plan.mixes[0]).numel()
        sums = (3, plan.channels) if isinstance(plan, WkvPlan) else None
        return StateShape((1, width), sums, dtype, portable=False)
    history = plan.taps - 1, plan.channels
    if isinstance(plan, DeltaPlan):
        return StateShape(history, (plan.heads, plan.key_dim, plan.value_dim), dtype)
    if isinstance(plan, ScanPlan):
        return StateShape(history, (plan.heads, plan.state_dim, plan.head_dim), dtype, True)
    if isinstance(plan, SelectivePlan):
        return StateShape(history, (plan.state_dim, plan.channels), dtype, True)
    if isinstance(plan, LruPlan):
        return StateShape(history, (1, plan.channels), dtype, portable=False)
    return StateShape(history, None, dtype)


def state_parts(plan: MixerPlan) -> tuple[str, ...]:
    """Return the names of the tensors in which a block stores its state."""
    if isinstance(plan, (DecayPlan, CellPlan)):
        return ("state",)
    recurrent = isinstance(plan, (DeltaPlan, ScanPlan, SelectivePlan, LruPlan, WkvPlan))
    return ("history", "state") if recurrent else ("history",)


def write_mixer(
    writer: Any, index: int, plan: MixerPlan, weights: Mixer, rows: Register
) -> Register:
    """Write a block with a state.

    Args:
        writer: Writes the program.
        index: Of the layer.
        plan: Its plan.
        weights: Of `pack_mixer`.
        rows: What `plan.input` gives.

    Returns:
        What the output projection reads.
    """
    if isinstance(plan, (ShiftPlan, WkvPlan)):
        return _shifted(writer, index, plan, weights, rows)
    if isinstance(plan, DecayPlan):
        return _decay(writer, index, plan, weights, rows)
    if isinstance(plan, CellPlan):
        return _cells(writer, index, plan, weights, rows)
    if isinstance(plan, DeltaPlan):
        return _delta(writer, index, plan, weights, rows)
    if isinstance(plan, ScanPlan):
        return _scan(writer, index, plan, weights, rows)
    if isinstance(plan, SelectivePlan):
        return _select(writer, index, plan, weights, rows)
    if isinstance(plan, LruPlan):
        return _lru(writer, index, plan, weights, rows)
    b, width = writer.b, plan.channels
    first, gate, x = (b.call("narrow", rows, 1, i * width, width) for i in range(3))
    y = _convolve(writer, index, plan, weights, b.call("mul", first, x), "none")
    result: Register = b.call("mul", gate, y)
    return result


def _convolve(
    writer: Any,
    index: int,
    plan: ConvPlan | ShiftPlan | WkvPlan,
    weights: Mixer,
    x: Register,
    activation: str,
) -> Register:
    constant = writer.b.constant
    assert weights.taps is not None
    bias = None if weights.bias is None else constant(weights.bias)
    result: Register = writer.b.call(
        "causal_conv1d_varlen",
        *(x, writer.state_caches[index][0], constant(weights.taps), bias, activation),
        *writer.texts,
    )
    return result


def _shifted(
    writer: Any, index: int, plan: ShiftPlan | WkvPlan, weights: Mixer, x: Register
) -> Register:
    b, dtype = writer.b, writer.e.store.dtype
    before = _convolve(writer, index, plan, weights, x, "none")
    steps = [("sub", 0, 1), ("mul", 3, 2), ("add", 4, 1)]
    mixed = [pointwise(b, [x, before, b.constant(one)], [], steps, dtype) for one in weights.mixes]
    result: Register
    if isinstance(plan, ShiftPlan):
        first, gate, last = weights.parts
        inner = writer.linear(first, mixed[0], activation="relu")
        opening = pointwise(b, [writer.linear(gate, mixed[1])], [], [("sigmoid", 0)], dtype)
        result = writer.linear(last, b.call("mul", inner, inner), mul=opening)
        return result
    key, value, gates = (writer.linear(w, y) for w, y in zip(weights.parts, mixed, strict=True))
    numbers = map(b.constant, weights.vectors)
    state = writer.state_caches[index][1]
    y = b.call("wkv_scan", value, key, *numbers, state, *writer.texts)
    return opened(b, "sigmoid", gates, y, dtype)


def _parts(writer: Any, rows: Register, *widths: int) -> list[Register]:
    """Return views of neighboring columns."""
    starts = [sum(widths[:i]) for i in range(len(widths))]
    narrow: Any = writer.b.call
    return [narrow("narrow", rows, 1, at, n) for at, n in zip(starts, widths, strict=True)]


def _heads(writer: Any, x: Register, heads: int, width: int) -> Register:
    result: Register = writer.b.call("reshape", x, [0, heads, width])
    return result


def _decay(writer: Any, index: int, plan: DecayPlan, weights: Mixer, rows: Register) -> Register:
    b, dtype = writer.b, writer.e.store.dtype
    qkv, gate = _parts(writer, rows, 3 * plan.width, plan.width)
    qkv = pointwise(b, [qkv], [], [(plan.activation, 0)], dtype)
    parts = _parts(writer, qkv, *[plan.width] * 3)
    query, key, value = (_heads(writer, one, plan.heads, plan.head_dim) for one in parts)
    factor, none = map(b.constant, weights.vectors)
    # Between one and one, each step is one, whatever the numbers in its place are.
    steps = b.call("narrow", gate, 1, 0, plan.heads)
    y = b.call(
        "ssd_scan",
        *(value, steps, factor, key, query, none, none),
        *(writer.state_caches[index][0], *writer.texts, 1.0, 1.0),
    )
    normed = writer.norm(plan.norm, b.call("reshape", y, [0, plan.width]))
    return opened(b, "sigmoid", gate, normed, dtype)


def _cells(writer: Any, index: int, plan: CellPlan, weights: Mixer, rows: Register) -> Register:
    """Write an mLSTM: a scan of Mamba-2.

    The scan's step ``log(1 + exp(-f))`` fades by ``sigmoid(f)``; what it multiplies with the step is divided by it. A
    value of one sums the keys.
    """
    b, wide, cap = writer.b, torch.float32, plan.cap
    query, key, value, opening, entry, kept = _parts(writer, rows, *plan.widths)
    query, key = (_heads(writer, b.call("cast", x, wide), plan.heads, -1) for x in (query, key))
    factor, none, one = map(b.constant, weights.vectors)
    steps = [("mul", 0, 1), ("tanh", 3), ("mul", 4, 2)]
    step = pointwise(b, [kept], [1.0 / cap, -cap], steps, wide)
    entry, fading = (_heads(writer, x, plan.heads, 1) for x in (entry, step))
    steps = [
        *(("mul", 0, 3), ("tanh", 5), ("mul", 6, 4), ("exp", 7)),
        *(("exp", 1), ("log1p", 9), ("div", 8, 10), ("mul", 11, 2)),
    ]
    sums = pointwise(b, [entry, fading, one], [1.0 / cap, cap], steps, wide)
    inputs = [_heads(writer, value, plan.heads, plan.value_dim), b.call("narrow", sums, 2, 0, 1)]
    values = b.call("cat", [pointwise(b, inputs, [], [("mul", 0, 1)], wide), sums], 2)
    state = writer.state_caches[index][0]
    y = b.call("ssd_scan", values, step, factor, key, query, none, none, state, *writer.texts)
    parts = [b.call("narrow", y, 2, at, n) for at, n in ((0, plan.value_dim), (plan.value_dim, 1))]
    steps = [("mul", 1, 2), ("abs", 4), ("maximum", 5, 3), ("mul", 0, 2), ("div", 7, 6)]
    dtype = writer.e.store.dtype
    y = writer.norm(plan.norm, pointwise(b, parts, [plan.key_dim**-0.5, 1.0], steps, dtype))
    return opened(b, "sigmoid", opening, b.call("reshape", y, [0, plan.widths[2]]), dtype)


def _delta(writer: Any, index: int, plan: DeltaPlan, weights: Mixer, rows: Register) -> Register:
    b, heads, size = writer.b, plan.heads, plan.value_dim
    keys, values = plan.groups * plan.key_dim, heads * size
    qkv, z, beta, step = _parts(writer, rows, *plan.widths)
    if weights.up is not None:
        z, step = (writer.linear(one, x) for one, x in zip(weights.up, (z, step), strict=True))
    if plan.each:
        step = _heads(writer, step, heads, plan.key_dim)
    mixed = _convolve(writer, index, plan, weights, qkv, "silu")
    q, k, v = _parts(writer, mixed, keys, keys, values)
    q, k = (_heads(writer, one, plan.groups, plan.key_dim) for one in (q, k))
    scale, plain = plan.key_dim**-0.5, plan.strength == 1.0
    if not plain:
        # The strength as factors on keys and values, which the state does not see. A norm is the length but for a
        # factor, which is in `scale` for queries.
        q, k = (b.call("rms_norm", one, None, 1e-6 / plan.key_dim) for one in (q, k))
        k = b.call("mul", k, (plan.strength / plan.key_dim) ** 0.5)
        v, scale = b.call("mul", v, plan.strength**0.5), scale * plan.key_dim**-0.5
    factor, bias = map(b.constant, weights.vectors)
    y = b.call(
        "gated_delta_rule",
        *(q, k, _heads(writer, v, heads, size)),
        *(step, beta, factor, bias, writer.state_caches[index][1], *writer.texts),
        *(scale, plain, plan.lowest),
    )
    normed = b.call("reshape", writer.norm(plan.norm, y), [0, values])
    result: Register
    if plan.opening == "silu":
        result = b.call("silu_mul", z, normed)
    else:
        result = opened(b, plan.opening, z, normed, writer.e.store.dtype)
    return result


def _scan(writer: Any, index: int, plan: ScanPlan, weights: Mixer, rows: Register) -> Register:
    b, heads, size = writer.b, plan.heads, plan.head_dim
    inner, states = heads * size, plan.groups * plan.state_dim
    gate, xbc, step = _parts(writer, rows, inner, inner + 2 * states, heads)
    mixed = _convolve(writer, index, plan, weights, xbc, "silu")
    x, keys, queries = _parts(writer, mixed, inner, states, states)
    factor, bias, skip = map(b.constant, weights.vectors)
    y = b.call(
        "ssd_scan",
        *(_heads(writer, x, heads, size), step, factor),
        _heads(writer, keys, plan.groups, plan.state_dim),
        _heads(writer, queries, plan.groups, plan.state_dim),
        *(skip, bias, writer.state_caches[index][1], *writer.texts),
        *(() if writer.mode == "decode" else step_limits(plan)),
    )
    result: Register = b.call("silu_mul", gate, b.call("reshape", y, [0, inner]))
    norm = plan.norm
    if norm is None:
        return result
    if plan.norm_groups == 1:
        return writer.norm(norm, result)
    parts = _heads(writer, result, plan.norm_groups, inner // plan.norm_groups)
    result = b.call("reshape", b.call("rms_norm", parts, None, norm.eps), [0, inner])
    weight = writer.e.norm(norm)[0]
    if weight is None:
        return result
    wide: Register = b.call("mul", result, b.constant(weight.to(writer.e.store.dtype)))
    return wide


def _select(
    writer: Any, index: int, plan: SelectivePlan, weights: Mixer, rows: Register
) -> Register:
    b, size = writer.b, plan.state_dim
    assert weights.middle is not None and weights.step is not None
    x, gate = _parts(writer, rows, plan.channels, plan.channels)
    x = _convolve(writer, index, plan, weights, x, "silu")
    low = _parts(writer, writer.linear(weights.middle, x), plan.rank, size, size)
    norms = plan.step_norm, plan.key_norm, plan.query_norm
    step, keys, queries = (
        part if norm is None else writer.norm(norm, part)
        for norm, part in zip(norms, low, strict=True)
    )
    factor, skip, bias = map(b.constant, weights.vectors)
    y = b.call(
        "selective_scan_varlen",
        *(x, writer.linear(weights.step, step), factor, keys, queries, skip, bias),
        *(writer.state_caches[index][1], *writer.texts),
    )
    result: Register = b.call("silu_mul", gate, y)
    return result


def _lru(writer: Any, index: int, plan: LruPlan, weights: Mixer, rows: Register) -> Register:
    """Write an RG-LRU: a scan of Mamba with one number for each channel.

    The scan's step ``log(1 + exp(d))`` is to be ``s``, so ``d = s + log(1 - exp(-s))``; what it multiplies with the
    step is divided by it.
    """
    b, wide = writer.b, torch.float32
    count, width = weights.vectors[0].shape
    x, gate = _parts(writer, rows, plan.channels, plan.channels)
    x = _heads(writer, _convolve(writer, index, plan, weights, x, "none"), count, width)
    swapped = b.call("transpose", x, 0, 1)
    gates = (b.call("bmm", swapped, b.constant(w), None, 1.0, width) for w in weights.blocks)
    decay, entry = (b.call("transpose", one, 0, 1) for one in gates)
    rates, first, second, factor, none = map(b.constant, weights.vectors)
    steps = [("add", 0, 1), ("sigmoid", 4), ("mul", 5, 2), ("maximum", 6, 3)]
    s = pointwise(b, [decay, first, rates], [1e-30], steps, wide)
    steps = [("neg", 0), ("expm1", 1), ("neg", 2), ("log", 3), ("add", 0, 4)]
    d = pointwise(b, [s], [], steps, wide)
    places = b.call("cast", writer.positions, wide)
    steps = [
        *(("mul", 0, 5), ("expm1", 8), ("neg", 9), ("sqrt", 10)),
        *(("eq", 4, 6), ("where", 12, 7, 11)),  # no root at position 0
        *(("add", 1, 3), ("sigmoid", 14), ("mul", 13, 15), ("mul", 16, 2), ("div", 17, 0)),
    ]
    inputs = [s, entry, x, second, b.call("reshape", places, [0, 1, 1])]
    added = pointwise(b, inputs, [-2.0, 0.0, 1.0], steps, wide)
    ones = pointwise(b, [b.call("reshape", places, [0, 1])], [], [("eq", 0, 0)], wide)
    added, d = (b.call("reshape", one, [0, plan.channels]) for one in (added, d))
    state = writer.state_caches[index][1]
    numbers = added, d, factor, ones, ones, none, none
    y = b.call("selective_scan_varlen", *numbers, state, *writer.texts)
    steps = [(plan.activation, 0), ("mul", 2, 1)]
    return pointwise(b, [gate, y], [], steps, writer.e.store.dtype)

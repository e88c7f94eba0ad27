# SPDX-License-Identifier: Apache-2.0
"""Decoders with several streams beside each other, and layers of low rank beside attention (Gemma 3n).

Also blocks that read all streams and are added to all (HY 4, Qwen 4), what n-grams bring into them (Qwen 4), and
modules that run two layers (LongCat-Flash).
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from ipex_llm.arch import (
    ConnectionPlan,
    GatedConnectionPlan,
    LayerPlan,
    LayerStreams,
    LowRankPlan,
    NgramsPlan,
    NormPlan,
    StreamEndsPlan,
    StreamsPlan,
    TokenBlockPlan,
)
from ipex_llm.arch.detect.parts import eps_of, is_mixture, linear_plan, match_norm, with_factor
from ipex_llm.arch.detect.trace import (
    Config,
    Trace,
    distance,
    is_linear,
    is_norm,
    linears,
    same,
    settled,
    tolerance,
)
from ipex_llm.arch.formulas import (
    add_ngrams,
    add_to_streams,
    as_long_as,
    close_streams,
    connect,
    correct_streams,
    ngram_rows,
    predict_streams,
)
from ipex_llm.arch.parts import Connection

_PARTS = ("router_norm", "modality_router", "prediction_coefs", "correction_coefs")


@dataclasses.dataclass(frozen=True, slots=True)
class Streams:
    """The streams of a layer: their plan and what they are before it reads the first, ``[count, T, hidden]``."""

    plan: StreamsPlan
    predicted: Tensor


def match_streams(trace: Trace, config: Config, layer: nn.Module) -> Streams | None:
    """Return the streams of a layer, or None if it has one stream.

    Raises:
        MatchError: The layer does not read the first of its streams.
    """
    owner: Any = next((m for m in layer.children() if all(hasattr(m, n) for n in _PARTS)), None)
    if owner is None:
        return None
    norm, router, predict, correct = (getattr(owner, name) for name in _PARTS)
    count = int(getattr(correct, "out_features", 0))
    if config.get("altup_active_idx", default=0) != 0 or not trace.ran(norm):
        raise trace.error(owner, "has a layer that reads another stream than the first")
    factor = float(getattr(owner, "router_input_scale", 1.0))
    used = config.get("altup_correct_scale", default=False)
    plan = StreamsPlan(
        count,
        match_norm(trace, norm),
        with_factor(linear_plan(router), factor),
        linear_plan(predict),
        linear_plan(correct),
        owner.correct_output_scale.detach() if used else None,
    )
    whole = trace.inputs[layer]
    if whole.shape[0] != count or not same(trace.input(norm), whole[0]):
        raise trace.error(owner, f"does not read the first of {count} streams")
    return Streams(plan, predict_streams(plan, whole.reshape(count, -1, whole.shape[-1]).float()))


def match_low_rank(
    trace: Trace, layer: nn.Module, x: Tensor, total: Tensor, middle: Tensor
) -> LowRankPlan | None:
    """Return the layers of low rank beside attention, or None.

    Args:
        trace: The observed forward.
        layer: The layer.
        x: What attention reads.
        total: What the layer reads and what attention gives, added.
        middle: What the norm before the mlp reads.
    """
    for child in layer.children():
        parts = [m for _, m in linears(child, trace)]
        norms = [m for m in child.children() if is_norm(m) and trace.ran(m)]
        chained = len(parts) == 2 and len(norms) == 1
        if not chained or not same(trace.input(parts[0]), x):
            continue
        if not same(trace.input(parts[1]), trace.output(parts[0])):
            continue
        if not same(trace.input(norms[0]), trace.output(parts[1])):
            continue
        whole = total.float() + x.float() + trace.output(norms[0]).float()
        for factor in (2.0**-0.5, 1.0):
            if distance(whole * factor, middle) <= tolerance(middle):
                first, second = map(linear_plan, parts)
                return LowRankPlan(first, second, match_norm(trace, norms[0]), factor)
    return None


def layer_with_streams(
    trace: Trace,
    plan: LayerPlan,
    streams: Streams,
    norms: tuple[nn.Module | None, ...],
    attended: tuple[Tensor, Tensor],
    given: Tensor,
    block: TokenBlockPlan | None,
) -> LayerPlan:
    """Return the plan of a layer with streams, which is sequential between them.

    Args:
        trace: The observed forward.
        plan: Of the layer, with its blocks and the norms around attention and behind the mlp.
        streams: Of `match_streams`.
        norms: Before attention and before the mlp.
        attended: What attention reads, and what is behind the norm of what it gives.
        given: What is behind the norm of what the mlp gives.
        block: The block that brings in what the tokens bring.

    Raises:
        MatchError: The layer adds its blocks in another way.
    """
    layer, predicted, own = plan.module, streams.predicted, streams.plan
    first, second = norms
    error = trace.error(layer, "adds its blocks to its streams in a way that is not understood")
    if first is None or second is None or block is None:
        raise error
    middle, limit = trace.input(second), tolerance(given)
    x, attention = attended
    read = trace.input(first)
    low = match_low_rank(trace, layer, x, read.float() + attention.float(), middle)
    if low is None or distance(predicted[0], read) > limit:
        raise error
    after = correct_streams(own, predicted, middle.float() + given.float())
    entry = after[0] if own.scale is None else after[0] * own.scale.float()
    after[1:] += trace.output(block.norm.module).float()
    off = distance(after, trace.output(layer))
    if off > limit or distance(entry, trace.input(block.gate.modules[0])) > limit:
        raise error
    return dataclasses.replace(
        plan, mlp_norm=match_norm(trace, second), token_block=block, low=low, streams=own
    )


def connections_of(trace: Trace, layer: nn.Module) -> list[nn.Module]:
    """Return the parts of a layer that make one row of several streams, for its two blocks; nothing if it has none."""
    found = [m for m in layer.children() if _is_connection(trace, m)]
    return found if len(found) == 2 else []


def _is_connection(trace: Trace, module: nn.Module) -> bool:
    if not trace.ran(module):
        return False
    return _numbers_of(trace, module) is not None or _gates_of(trace, module) is not None


def _numbers_of(trace: Trace, module: nn.Module) -> tuple[str, str, str, int] | None:
    """Return the names of weight, base and scale of a connection, and how many streams it reads; None for others."""
    read = trace.inputs[module]
    if read.ndim != 4 or read.shape[2] < 2:
        return None
    count, width = read.shape[2], read.shape[2] * read.shape[3]
    own = [(name, list(p.shape)) for name, p in module.named_parameters(recurse=False)]
    for rows, halves in ((count, 1), (2 * count, 2), ((2 + count) * count, 3)):
        shapes = [rows, width], [rows], [halves]
        names = [[name for name, found in own if found == shape] for shape in shapes]
        if [*map(len, names)] == [1, 1, 1]:
            (weight,), (base,), (scale,) = names
            return weight, base, scale, count
    return None


def _gates_of(
    trace: Trace, module: nn.Module
) -> tuple[int, nn.Module, nn.Module, nn.Module, nn.Module | None] | None:
    """Return how many streams a connection with gates reads, its norm and its linear layers; None for others."""
    norms = [m for m in module.children() if is_norm(m) and trace.ran(m)]
    if len(norms) != 1 or not same(trace.inputs[norms[0]], trace.inputs[module]):
        return None
    x, parts = trace.output(norms[0]), [m for _, m in linears(module, trace)]
    count = x.shape[-1] // trace.output(module).shape[-1]
    inner = [m for m in parts if same(trace.input(m), x)]
    last = [m for m in inner if trace.output(m).shape[-1] == count]
    first = [m for m in inner if m not in last]
    second = [m for m in parts if m not in inner]
    if count < 2 or [len(first), len(second)] != [1, 1] or len(last) > 1:
        return None
    return count, norms[0], first[0], second[0], last[0] if last else None


def _side_by_side(x: Tensor, count: int) -> Tensor:
    """Return streams ``[1, T, count, hidden]``, or with the last two in one, as ``[count, T, hidden]``, float32."""
    return x.reshape(x.shape[1], count, -1).transpose(0, 1).float()


def _stream_norms(module: nn.Module, count: int) -> list[NormPlan]:
    """Return what a norm with a weight for each stream may be."""
    weight: Any = module.weight
    order = torch.arange(len(weight)).view(count, -1)
    pairs = itertools.product(eps_of(module), (0.0, 1.0))
    return [NormPlan("rms", module, eps, offset, order=order) for eps, offset in pairs]


def match_connection(trace: Trace, module: nn.Module, row: Tensor) -> Connection:
    """Return the plan of a part that makes `row` of several streams.

    Raises:
        MatchError: It makes something else of them.
    """
    plans: Iterable[Connection]
    gates, factors = _gates_of(trace, module), torch.zeros(())
    if gates is not None:
        count, norm, first, second, last = gates
        plans = (
            GatedConnectionPlan(
                *(own, linear_plan(first), linear_plan(second)),
                *(None if last is None else linear_plan(last), count, factor),
            )
            for own in _stream_norms(norm, count)
            for factor in (1.0 / count, 1.0)
        )
    else:
        names = _numbers_of(trace, module)
        assert names is not None
        count = names[-1]
        wide = len(getattr(module, names[0]))
        if wide > count:
            factors = trace.output(module)
        values = [float(v) for v in vars(module).values() if isinstance(v, (int, float)) and v]
        rounds = int(getattr(module, "hc_sinkhorn_iters", 0)) if wide > 2 * count else 0
        plans = (
            ConnectionPlan(module, *names, norm_eps, eps, magnitude, rounds)
            for norm_eps in eps_of(module)
            for eps in [v for v in values if v < 1e-2] or [0.0]
            for magnitude in ([*values, 2.0] if factors.ndim else (0.0,))
        )
    streams = _side_by_side(trace.inputs[module], count)

    def error(plan: Connection) -> float:
        found, given = connect(plan, streams)
        off = distance(given[:, :count], factors) if factors.ndim else 0.0
        return max(distance(found, row), off)

    return settled(trace, module, plans, error, row)


def match_ngrams(trace: Trace, layer: nn.Module, count: int) -> NgramsPlan | None:
    """Return what brings the last tokens into `count` streams before the blocks of a layer, None without it.

    Raises:
        MatchError: It brings something else.
    """
    read = trace.inputs[layer]
    parts = (m for m in layer.children() if trace.ran(m) and same(trace.inputs[m], read))
    module = next((m for m in parts if not _is_connection(trace, m)), None)
    if module is None:
        return None
    children = [m for m in module.children() if trace.ran(m)]
    tables: list[Any] = [m for m in children if same(trace.inputs[m], trace.ids)]
    convs = [m for m in children if isinstance(m, nn.Conv1d)]
    norms = [m for m in children if is_norm(m)]
    wide = {trace.output(m).shape[-1]: m for m in children if is_linear(m)}
    key, value = wide.get(read.shape[-1]), wide.get(read.shape[-1] // count)
    if [len(tables), len(convs), len(norms)] != [1, 1, 3] or key is None or value is None:
        raise trace.error(module, "brings something into streams that is not understood")
    rows, given = trace.output(tables[0]), trace.output(key)
    first, second, third = sorted(
        norms,
        key=lambda m: (
            0 if same(trace.inputs[m], given) else 1 if same(trace.inputs[m], read) else 2
        ),
    )
    streams = _side_by_side(read, count)
    choices = zip(*(_stream_norms(m, count) for m in (first, second, third)), strict=True)
    context, empty = (int(getattr(tables[0], n, 0)) for n in ("context_len", "eos_token_id"))
    plans = (
        NgramsPlan(
            *(tables[0], context, empty, rows.shape[-1], linear_plan(key), linear_plan(value)),
            *(*own, convs[0]),
        )
        for own in choices
    )
    expected = trace.output(module)

    def error(plan: NgramsPlan) -> float:
        total = add_ngrams(plan, streams, rows) - streams
        return distance(total.transpose(0, 1), expected)

    plan = settled(trace, module, plans, error, expected)
    if not same(ngram_rows(plan, trace.ids), rows):
        raise trace.error(tables[0], f"gives rows that more than {context} tokens before show in")
    return plan


def layer_with_connections(
    trace: Trace,
    plan: LayerPlan,
    parts: list[nn.Module],
    norm: nn.Module | None,
    rows: tuple[Tensor, Tensor],
    given: tuple[Tensor, Tensor],
) -> LayerPlan:
    """Return the plan of a layer whose blocks read all streams and are added to all.

    Args:
        trace: The observed forward.
        plan: Of the layer, with its blocks and the norms around attention and behind the mlp.
        parts: Of `connections_of`.
        norm: Before the mlp.
        rows: What both blocks read, or the norms before them.
        given: What is behind the norms of what both blocks give.

    Raises:
        MatchError: The layer adds its blocks in another way.
    """
    layer = plan.module
    one, other = (match_connection(trace, m, row) for m, row in zip(parts, rows, strict=True))
    unknown = trace.error(layer, "adds its blocks to its streams in an unknown way")
    begin, (first, second) = trace.inputs[layer], (trace.inputs[m] for m in parts)
    ngrams = match_ngrams(trace, layer, one.count)
    if ngrams is not None:
        h = _side_by_side(begin, one.count)
        h = add_ngrams(ngrams, h, trace.output(ngrams.table))
        if distance(h, _side_by_side(first, one.count)) > tolerance(first):
            raise unknown
    elif not same(begin, first):
        raise unknown
    ends = (one, first, second), (other, second, trace.outputs[layer])
    for (own, before, after), y in zip(ends, given, strict=True):
        streams = _side_by_side(before, own.count)
        total = add_to_streams(streams, connect(own, streams)[1], y.float())
        if distance(total, _side_by_side(after, own.count)) > tolerance(y):
            raise unknown
    last = None if norm is None else match_norm(trace, norm)
    return dataclasses.replace(plan, mlp_norm=last, streams=(one, other), ngrams=ngrams)


def first_stream(x: Tensor, streams: LayerStreams | None) -> Tensor:
    """Return the first stream ``[T, hidden]`` of what a layer reads or gives; `streams` are of its plan."""
    if isinstance(streams, tuple):
        return x.reshape(x.shape[1], streams[0].count, -1)[:, 0]
    return (x if streams is None else x[0]).reshape(-1, x.shape[-1])


def match_ends(
    trace: Trace,
    others: list[nn.Module],
    layers: nn.ModuleList,
    plan: StreamsPlan | tuple[Connection, Connection],
) -> tuple[StreamEndsPlan | Connection, Tensor]:
    """Return how streams begin and end, and what the last norm reads; `plan` are the streams of a layer.

    Raises:
        MatchError: They begin or end in another way.
    """
    start, end = trace.inputs[layers[0]], trace.outputs[layers[-1]]
    h = first_stream(start, plan)
    if isinstance(plan, tuple):
        known = (m for m in others if same(trace.inputs[m], end) and _is_connection(trace, m))
        last_one = next(known, None)
        if last_one is None or not same(start, torch.stack([h] * plan[0].count, dim=1)):
            raise trace.error(layers[0], "has streams that begin or end in an unknown way")
        x = trace.output(last_one)
        return match_connection(trace, last_one, x), x
    parts = [m for m in others if is_linear(m)]
    first, last = [], []
    for index in range(1, plan.count):
        into = [
            m
            for m in parts
            if same(trace.inputs[m], h)
            and distance(as_long_as(h.float(), trace.output(m).float()), start[index])
            <= tolerance(h)
        ]
        out = [m for m in parts if same(trace.inputs[m], end[index])]
        if len(into) != 1 or len(out) != 1:
            raise trace.error(layers[0], f"has no projections of stream {index}")
        first.append(linear_plan(into[0]))
        last.append(linear_plan(out[0]))
    ends = StreamEndsPlan(tuple(first), tuple(last))
    total = close_streams(ends, end.reshape(plan.count, -1, end.shape[-1]))
    for module in others:
        if is_norm(module) and distance(total, trace.inputs[module]) <= tolerance(h):
            return ends, trace.input(module)
    raise trace.error(layers[-1], "is followed by something else than the mean of its streams")


# --- two layers in one module, with experts beside them (LongCat-Flash) -----------------------------------------------


def halves_of(trace: Trace, layer: nn.Module) -> tuple[list[nn.Module], nn.Module | None]:
    """Return the two layers that a module runs behind each other, and the experts that read between them.

    Each is a module with what it reads and gives in the trace; what the experts give, which is added at the very end,
    is left out. The layer itself and None: it is one layer.
    """
    parts = dict(layer.named_children())
    pairs = {n: m for n, m in parts.items() if isinstance(m, nn.ModuleList) and len(m) == 2}
    experts = [m for m in parts.values() if is_mixture(m) and trace.ran(m)]
    if "self_attn" not in pairs or len(experts) != 1 or len(pairs) + 1 != len(parts):
        return [layer], None
    halves = [nn.Module(), nn.Module()]
    for name, pair in pairs.items():
        for half, module in zip(halves, pair, strict=True):
            setattr(half, name.replace("mlps", "mlp"), module)
    read = trace.inputs[pairs["self_attn"][1]]
    norms = [m for m in halves[1].children() if is_norm(m)]
    middle = [trace.inputs[m] for m in norms if same(trace.outputs[m], read)]
    if len(middle) != 1:
        return [layer], None
    last = trace.outputs[layer] - trace.outputs[experts[0]]
    ends = ((trace.inputs[layer], middle[0]), (middle[0], last))
    for half, (first, given) in zip(halves, ends, strict=True):
        trace.inputs[half], trace.outputs[half] = first, given
        trace.names[half] = trace.names[layer]
    return halves, experts[0]

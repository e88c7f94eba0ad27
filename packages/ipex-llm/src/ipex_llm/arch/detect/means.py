# SPDX-License-Identifier: Apache-2.0
"""Decoders whose blocks read means of what the stream was before, and whose keys and values are apart (Inkling 2)."""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ipex_llm.arch import (
    ApartPlan,
    AttentionPlan,
    LayerMeansPlan,
    LayerPlan,
    MeansPlan,
    MessageGatePlan,
    MessagesPlan,
    NearPlan,
    NormPlan,
)
from ipex_llm.arch.detect.attention import (
    PARTS,
    find_attention,
    head_dim_of,
    scales_of,
    temperature_of,
    window_of,
)
from ipex_llm.arch.detect.parts import linear_plan, match_feed_forward, match_norm, norms_of
from ipex_llm.arch.detect.trace import (
    Config,
    Trace,
    convolution,
    distance,
    is_linear,
    is_norm,
    linears,
    same,
    settled,
    tolerance,
)
from ipex_llm.arch.formulas import (
    MOVING,
    add_convolved,
    add_message,
    convolve_apart,
    mean_rows,
    run_norm,
    taps_of,
)
from ipex_llm.arch.reference import attend_apart


def _query(module: nn.Module) -> Tensor:
    """Return the only parameter of a module that has a norm without one, or an empty tensor."""
    own = [*module.parameters()]
    found = len(own) == 1 and len(module._parameters) == 1 and any(map(is_norm, module.children()))
    return own[0] if found else torch.zeros(())


def mean_of(trace: Trace, module: nn.Module) -> MeansPlan | None:
    """Return the plan of a module that gives means of rows of several streams, or None for others."""
    query = _query(module)
    if query.ndim not in (1, 2) or not trace.ran(module):
        return None
    read, width = trace.inputs[module], query.shape[-1]
    if read.ndim != 4 or not width == read.shape[-1] == trace.output(module).shape[-1]:
        return None
    norm = match_norm(trace, next(filter(is_norm, module.children())))
    return MeansPlan(module, next(iter(module._parameters)), norm)


def means_of(trace: Trace, layer: nn.Module) -> list[MeansPlan]:
    """Return the parts of a layer that give means."""
    return [one for m in layer.children() if (one := mean_of(trace, m)) is not None]


def _means(trace: Trace, plan: MeansPlan, h: Tensor) -> Tensor:
    """Return the means of the stream `h` and of the earlier ones that a module read, ``[rows, T, hidden]``."""
    before = run_norm(plan.norm, trace.inputs[plan.module][0].transpose(0, 1))
    return mean_rows(plan, torch.cat([h.unsqueeze(0).float(), before]))


def unroll_means(
    trace: Trace, decoder: nn.Module, modules: nn.ModuleList, layers: Sequence[LayerPlan]
) -> list[LayerPlan]:
    """Return a layer for each time that one ran, with the messages of the time before (Inkling 2's loops).

    Raises:
        MatchError: Layers run again in another way.
    """
    runs, unknown = (
        trace.runs(modules),
        trace.error(decoder, "runs layers several times, in an unknown way"),
    )
    order = [module for module, _, _ in runs]
    again = next(i for i, m in enumerate(order) if m in order[:i])
    start, size = order.index(order[again]), again - order.index(order[again])
    count = order.count(order[again])
    found = [m for m in decoder.children() if _query(m).shape[:-1] == (size, 4) and trace.ran(m)]
    known = [*modules[:start], *order[start:again] * count, *modules[again:]]
    if order != known or len(found) != 1 or not isinstance(layers[start].streams, LayerMeansPlan):
        raise unknown
    norm = match_norm(trace, next(m for m in found[0].children() if is_norm(m)))
    means = MeansPlan(found[0], next(iter(found[0]._parameters)), norm)
    begun = [r for layer, (_, r, _) in zip(layers, runs[:again], strict=False) if _begins(layer)]
    begun = begun[sum(map(_begins, layers[: start + 1])) :]
    sent = torch.stack([runs[again - 1][2], *(run_norm(norm, one) for one in begun)])
    plans = {layer.module: layer for layer in layers}
    result = []
    for index, (module, read, _) in enumerate(runs):
        turn, at = divmod(index - start, size)
        turn = turn if 0 < turn < count else 0
        before = runs[start][1] if turn and at == 0 else runs[max(index - 1, 0)][2]
        if index and not same(read, before):
            raise trace.error(module, "does not read what the layer before gave")
        plan = plans[module]
        assert isinstance(plan.streams, LayerMeansPlan)
        streams = dataclasses.replace(plan.streams, loop="start" if index == start else "")
        if turn:
            own = dataclasses.replace(means, index=at)
            messages = MessagesPlan(own, _gates(trace, module, mean_rows(own, sent)))
            streams = dataclasses.replace(streams, loop="" if at else "again", messages=messages)
        result.append(dataclasses.replace(plan, streams=streams))
    return result


def _begins(layer: LayerPlan) -> bool:
    return isinstance(layer.streams, LayerMeansPlan) and layer.streams.begins


def _gates(trace: Trace, layer: nn.Module, sent: Tensor) -> tuple[MessageGatePlan, ...]:
    """Return how the messages to a layer when it ran again are added to what its parts read.

    Raises:
        MatchError: They are added in another way.
    """
    gates: Any = {n: m for n, m in layer.named_children() if len([*linears(m, trace)]) == 3}
    gates = {n: m for n, m in gates.items() if any(map(is_norm, m.children()))}
    names = [next((n for n in gates if re.search(p, n)), "") for p in PARTS.values()]
    names += [n for n in gates if n not in names]
    if len(names) != 4 or "" in names:
        raise trace.error(layer, "reads messages in a way that is not understood")
    result = []
    for module, message in zip([gates[n] for n in names], sent, strict=True):
        norm = match_norm(trace, next(filter(is_norm, module.children())))
        parts = [m for _, m in linears(module, trace)]
        low = [m for m in parts if trace.output(m).shape[-1] < sent.shape[-1]]
        x, y = trace.input(module).float(), trace.output(module)
        for pair in itertools.permutations([m for m in parts if m not in low]):
            plan = MessageGatePlan(norm, linear_plan(*low), linear_plan(*pair))
            if len(low) == 1 and distance(add_message(plan, x, message), y) <= tolerance(y):
                result.append(plan)
                break
        else:
            raise trace.error(module, "adds messages in a way that is not understood")
    return tuple(result)


def match_last_mean(
    trace: Trace, others: list[nn.Module], modules: nn.ModuleList, layers: Sequence[LayerPlan]
) -> tuple[MeansPlan, Tensor]:
    """Return what is read behind the last layer, and that.

    Raises:
        MatchError: A mean is made of other streams than those that the layers before began groups with.
    """
    last = next((one for m in others if (one := mean_of(trace, m)) is not None), None)
    known: list[Tensor] = []
    start: list[Tensor] = []
    made: dict[nn.Module, list[Tensor]] = {}
    for layer, (module, read, _) in zip(layers, trace.runs(modules), strict=True):
        plan = layer.streams
        if not isinstance(plan, LayerMeansPlan):
            raise trace.error(module, "reads the stream, and other layers read means")
        known = start if plan.loop == "again" else known
        start = known if plan.loop else start
        if plan.attention is not None:
            made.setdefault(plan.attention.module, known)
        known = [*known, read] if plan.begins else known
        made.setdefault(plan.mlp.module, known)
    if last is None:
        raise trace.error(layers[-1].module, "is not followed by a mean of streams")
    for module, streams in (*made.items(), (last.module, known)):
        seen = trace.inputs[module][0].transpose(0, 1)
        if not same(seen, torch.stack(streams) if streams else seen[:0]):
            raise trace.error(module, "reads other streams than those that groups began with")
    x = trace.output(last.module)
    if distance(_means(trace, last, trace.runs(modules)[-1][2])[0], x) > tolerance(x):
        raise trace.error(last.module, "gives something else than a mean of streams")
    return last, x


def _summed(trace: Trace, owner: nn.Module, x: Tensor) -> tuple[nn.Module | None, float, Tensor]:
    """Return a convolution among the parts of a module that is added to `x`, the factor on the sum, and that."""
    for child in owner.children():
        conv = convolution(child)
        if conv is None or conv.bias is not None or not trace.ran(child):
            continue
        if not same(trace.inputs[child], x):
            continue
        given, scales = trace.output(child), (1.0, (conv.kernel_size[0] + 1) ** -0.5)
        for scale in scales:
            if distance(add_convolved((conv,), x, scale), given) <= tolerance(given):
                return conv, scale, given
    return None, 1.0, x


def layer_with_means(
    trace: Trace, config: Config, layer: nn.Module, index: int, parts: list[MeansPlan]
) -> LayerPlan:
    """Return the plan of a layer whose blocks read means.

    Raises:
        MatchError: A part is not understood.
    """
    module, unknown = (
        find_attention(layer),
        trace.error(layer, "has blocks that read unknown means"),
    )
    mlp, mlp_in, mlp_out = match_feed_forward(trace, config, layer)
    norms = norms_of(trace, layer)
    last = next((m for m in norms if same(trace.outputs[m], mlp_in)), None)
    behind = [p for p in parts if last and same(trace.output(p.module), trace.input(last))]
    first = [p for p in parts if p not in behind]
    if module is None or last is None or len(behind) != 1 or len(first) > 1:
        raise unknown
    a, reads = match_apart(trace, config, module, index)
    assert a.apart is not None
    before = [next((m for m in norms if same(trace.outputs[m], x)), None) for x in reads]
    conv, scale, attended = _summed(trace, layer, trace.output(a.output.modules[0]))
    other, again, mlp_out = _summed(trace, layer, mlp_out)
    h, y = trace.input(layer).float(), trace.output(layer)
    own = first[0] if first else None
    x = (h.unsqueeze(0) if own is None else _means(trace, own, h)).expand(3, -1, -1)
    if None in before or conv is None or other is None or scale != again:
        raise unknown
    query, key, value = (match_norm(trace, m) for m in before if m is not None)
    for norm, row in zip((query, key, value), x, strict=True):
        if distance(row, trace.inputs[norm.module]) > tolerance(y):
            raise unknown
    if len(set(before)) > 1:
        a = dataclasses.replace(a, apart=dataclasses.replace(a.apart, norms=(key, value)))
    for begins in (False, True):
        middle = attended.float() if begins else h + attended.float()
        row, given = _means(trace, behind[0], middle)[0], trace.output(behind[0].module)
        if max(distance(row, given), distance(middle + mlp_out.float(), y)) <= tolerance(y):
            means = LayerMeansPlan(own, behind[0], begins)
            plan = LayerPlan(layer, a, mlp, query, match_norm(trace, last), streams=means)
            return dataclasses.replace(plan, convs=(conv, other), conv_scale=scale)
    raise unknown


def _bound(trace: Trace, owner: nn.Module) -> NormPlan:
    """Return the norm, or the bound on the length of rows, behind the projection of a part of an attention.

    Raises:
        MatchError: There is something else.
    """
    for module in owner.children():
        if is_norm(module):
            return match_norm(trace, module)
        limits = [getattr(m, "threshold", None) for m in module.modules()]
        limit = next((one for one in limits if isinstance(one, float)), None)
        if limit is not None:
            return NormPlan("clip", module, limit)
    raise trace.error(owner, "has neither a norm nor a bound behind its projection")


def _filter(trace: Trace, owner: nn.Module) -> tuple[nn.Module, nn.Module] | None:
    """Return the part of a module with a short convolution and that, or twice the one whose taps tokens add to."""
    for child in filter(trace.ran, owner.children()):
        conv = convolution(child)
        known = conv is not None and conv.bias is None
        if known or MOVING in child._parameters:
            found = child if conv is None else conv
            return (child, found) if len(taps_of((found,))) > 1 else None
    return None


def match_apart(
    trace: Trace, config: Config, attention: nn.Module, index: int
) -> tuple[AttentionPlan, list[Tensor]]:
    """Return the plan of an attention whose projections are in parts of their own, and what these read.

    Raises:
        MatchError: It is not understood.
    """
    parts: Any = {n: m for n, m in attention.named_children() if not is_linear(m)}
    owners = [[m for n, m in parts.items() if re.search(p, n)] for p in PARTS.values()]
    if any(len(one) != 1 for one in owners):
        raise trace.error(attention, "has no parts for queries, keys and values")
    (query,), (key,), (value,) = owners
    rest = [m for m in parts.values() if m not in (query, key, value)]
    near = next((m for m in rest if any(p.ndim == 2 for p in m._parameters.values())), None)
    both = [m for one in rest if one is not near for _, m in linears(one, trace)]
    found = [[m for _, m in linears(one, trace)] for one in (query, key, value, near or query)]
    if not all(found):
        raise trace.error(attention, "has parts without a projection")
    reads = [trace.input(one[0]) for one in found[:3]]
    sinks = [m for m in attention.children() if is_linear(m) and same(trace.input(m), reads[0])]
    gates = [m for m in both if same(trace.input(m), reads[0])]
    output = [m for m in both if m not in gates]
    counts = [*map(len, (found[0], found[3], sinks, gates, output))]
    convs = [pair for one in (key, value) if (pair := _filter(trace, one)) is not None]
    moving = all(MOVING in conv._parameters for _, conv in convs)
    known = len(convs) == 2 and counts == [1] * 5
    if near is None or not known or {len(found[1]), len(found[2])} != {1 + moving}:
        raise trace.error(attention, "has projections whose part is not clear")
    width, heads = trace.output(gates[0]).shape[-1], trace.output(sinks[0]).shape[-1]
    head_dim = head_dim_of(config, attention, width)
    expected, weight = trace.input(output[0]), next(iter(near._parameters))
    base = AttentionPlan(
        linear_plan(found[0][0], gates[0], found[3][0], sinks[0]),
        linear_plan(output[0]),
        heads,
        trace.output(found[1][0]).shape[-1] // head_dim,
        head_dim,
        head_dim**-0.5,
        query_norm=_bound(trace, query),
        key_norm=_bound(trace, key),
        value_norm=_bound(trace, value),
        window=window_of(config, attention, index),
        gated="features",
        temperature=temperature_of(trace, config, attention, False),
        near=NearPlan(near, weight, _bound(trace, near)),
        convs=tuple(conv for _, conv in convs),
        apart=ApartPlan(linear_plan(*found[1]), linear_plan(*found[2]), None, moving),
    )
    assert base.apart is not None
    rows = [
        torch.cat([trace.output(m) for m in p.modules], dim=-1)
        for p in (base.qkv, base.apart.key, base.apart.value)
    ]
    count = len(taps_of(base.convs)) * (1 + moving) + 1
    factors, scales = (1.0, count**-0.5), scales_of(config, attention, head_dim, index)
    plans = (
        dataclasses.replace(base, scale=scale, conv_scale=factor)
        for scale, factor in itertools.product(scales, factors)
    )

    behind = torch.cat([trace.output(m) for m, _ in convs], dim=-1)

    def error(plan: AttentionPlan) -> float:
        off = distance(convolve_apart(plan, *rows[1:]), behind)
        return max(off, distance(attend_apart(plan, *rows), expected))

    return settled(trace, attention, plans, error, expected), reads

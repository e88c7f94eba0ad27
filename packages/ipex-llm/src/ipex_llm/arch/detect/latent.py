# SPDX-License-Identifier: Apache-2.0
"""Latent attention of a layer: keys and values of all heads are made of one row of a token, or are this row."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ipex_llm.arch import (
    AttentionPlan,
    LatentPlan,
    LinearPlan,
    NormPlan,
    RopePlan,
)
from ipex_llm.arch.detect.attention import (
    GATE,
    kind_of,
    kind_of_gates,
    number_of,
    own_linears,
    scales_of,
    sinks_of,
    window_of,
)
from ipex_llm.arch.detect.parts import (
    eps_of,
    linear_plan,
    match_norm,
    match_ropes,
    with_factor,
)
from ipex_llm.arch.detect.trace import (
    Config,
    Trace,
    distance,
    is_norm,
    linears,
    same,
    settled,
)
from ipex_llm.arch.formulas import rotate, run_norm
from ipex_llm.arch.parts import SharedRowPlan, WindowsPlan
from ipex_llm.arch.reference import attend

_DOWN = re.compile(r"^kv_a_proj(_with_mqa)?$")
_UP = re.compile(r"^kv_b_proj$")


def _named(attention: nn.Module, pattern: re.Pattern[str]) -> nn.Module | None:
    return next((m for n, m in attention.named_children() if pattern.match(n)), None)


def is_latent(attention: nn.Module) -> bool:
    """Return whether an attention makes keys and values from a latent."""
    return _named(attention, _DOWN) is not None and _named(attention, _UP) is not None


def match_latent(
    trace: Trace, config: Config, decoder: nn.Module, attention: nn.Module, index: int
) -> AttentionPlan:
    """Return the plan of a latent attention.

    Raises:
        MatchError: A part is not understood, or no candidate gives what the module gave.
    """
    down: Any = _named(attention, _DOWN)
    up: Any = _named(attention, _UP)
    parts = [module for _, module in own_linears(trace, attention)]
    source = trace.input(down)
    gates = [m for n, m in attention.named_children() if GATE.match(n) and m in parts]
    gates = [m for m in gates if same(trace.input(m), source)]
    first = [m for m in parts if m not in (down, *gates) and same(trace.input(m), source)]
    others = [m for m in parts if m not in (up, down, *first, *gates)]
    if len(first) != 1 or not 1 <= len(others) <= 2 or len(gates) > 1:
        names = ", ".join(name for name, _ in linears(attention, trace))
        raise trace.error(attention, f"has linear layers ({names}) that are not known of a latent")
    norms = [m for _, m in attention.named_children() if is_norm(m) and trace.ran(m)]

    query_factor, factor = (  # of LongCat-Flash, of dots3
        number_of(config, attention, f"mla_scale_{part}_lora", f"{part}_lora_scale") or 1.0
        for part in ("q", "kv")
    )

    def norm_before(given: Tensor, *factors: float) -> NormPlan | None:
        fits = (n for n in norms for f in factors if same(trace.outputs[n] * f, given))
        found = next(fits, None)
        return None if found is None else match_norm(trace, found)

    output = others[-1]
    query = others[0] if len(others) == 2 else None
    rank = trace.input(up).shape[-1]
    rotary = trace.output(down).shape[-1] - rank
    parts_of_head = "qk_nope_head_dim", "qk_rope_head_dim"  # which may differ among layers (dots3)
    own_parts: list[Any] = [getattr(attention, n, None) for n in parts_of_head]
    if None in own_parts:
        own_parts = [config.get(n, default=0) for n in parts_of_head]
    head_dim = sum(map(int, own_parts))
    queries = trace.output(first[0] if query is None else query).shape[-1]
    expected = trace.input(output)
    low = trace.output(first[0])
    given, size = low if query is None else trace.input(query), low.shape[-1]
    doubled = given.shape[-1] == 2 * size
    heads, odd = divmod(queries - doubled * expected.shape[-1], max(head_dim, 1))
    value_dim, rest = divmod(expected.shape[-1], max(heads, 1))
    plain = head_dim - rotary
    whole = not (odd or rest) and heads > 0 and plain > 0 and rotary > 1
    if not whole or trace.output(up).shape[-1] != heads * (plain + value_dim):
        raise trace.error(attention, f"{queries} features do not make heads of {head_dim}")
    query_norm = None if query is None else norm_before(given[:, :size], 1.0, query_factor)
    last = None if query is None else with_factor(linear_plan(query), query_factor)
    if doubled and last is not None:
        if gates or not same(given[:, size:], low):
            raise trace.error(attention, "has queries that are made of something else than a norm")
        parts_of = torch.arange(queries).view(heads, -1).split([head_dim, value_dim], dim=1)
        last = dataclasses.replace(last, order=torch.cat([one.flatten() for one in parts_of]))
    common = trace.output(down)[:, rank:]
    common_norm = next((n for n in norms if same(trace.inputs[n], common)), None)
    latent = LatentPlan(
        up,
        norm_before(trace.input(up), factor),
        rank,
        value_dim,
        rotary,
        last,
        query_norm,
        factor,
        None if common_norm is None else match_norm(trace, common_norm),
        doubled,
    )
    inner = [first[0], down, *gates]
    rows = torch.cat([trace.output(m) for m in inner], dim=-1)
    own = trace.output(gates[0]).shape[-1] if gates else doubled * heads * value_dim
    base = AttentionPlan(
        LinearPlan(tuple(inner)),
        linear_plan(output),
        heads,
        1,
        head_dim,
        head_dim**-0.5,
        window=window_of(config, attention, index) if hasattr(attention, "sliding_window") else -1,
        sinks=sinks_of(attention),
        latent=latent,
        gated=kind_of_gates(trace, attention, own, heads, heads * value_dim),
    )
    ropes = match_ropes(trace, config, decoder, attention, kind_of(config, index), rotary)
    scales = scales_of(config, attention, head_dim, index)

    def error(plan: AttentionPlan) -> float:
        order: Any = plan.qkv.order
        return distance(attend(plan, rows if order is None else rows[..., order]), expected)

    plan = settled(trace, attention, _candidates(config, base, ropes, scales), error, expected)
    return _as_cached(trace, config, plan, index)


def _as_cached(trace: Trace, config: Config, plan: AttentionPlan, index: int) -> AttentionPlan:
    """Return the plan with rows in the order in which the model caches them.

    Rotated pairs may come out as pairs (DeepSeek V2) or as halves (Ling 3); scores are the same.
    """
    rope, latent = plan.rope, plan.latent
    if rope is None or rope.half or config.get("rope_interleave") is not None:
        return plan
    assert latent is not None
    kept = trace.cached(index)
    whole = run_norm(
        latent.common_norm, trace.output(plan.qkv.modules[1])[:, latent.rank :].float()
    )
    turned = rotate(rope, whole.unsqueeze(1)).flatten(1)
    if kept is None or kept.numel() != turned.numel():
        return plan
    halves = turned.unflatten(1, (-1, 2)).transpose(1, 2)
    if distance(turned, kept) <= distance(halves, kept):
        return plan
    return _in_halves(
        dataclasses.replace(plan, rope=dataclasses.replace(rope, half=True)), rope.dim
    )


def _candidates(
    config: Config, base: AttentionPlan, ropes: list[RopePlan], scales: list[float]
) -> Iterator[AttentionPlan]:
    """Yield plans with each rotation and scale.

    Where pairs are rotated and come out as halves (``rope_interleave``), rows are put in the order of halves before:
    cached keys are then equal to the keys of the model's own forward. Pairs that stay pairs give the same scores, and
    in 16 bits might be nearer by chance.
    """
    split = bool(config.get("rope_interleave", default=False))
    for rope in (
        [one for one in ropes if one.half] if split else sorted(ropes, key=lambda one: one.half)
    ):
        for scale in scales:
            plan = dataclasses.replace(base, rope=rope, scale=scale)
            if split and rope.half:
                yield _in_halves(plan, rope.dim)
            yield plan
    for scale in scales:  # keys with a common part that is not rotated (Kimi Linear)
        yield dataclasses.replace(base, scale=scale)


def _in_halves(plan: AttentionPlan, rotary: int) -> AttentionPlan:
    """Return the plan with rows of rotated pairs as halves."""
    latent = plan.latent
    assert latent is not None
    tail = torch.arange(rotary).view(-1, 2).t().flatten()
    size = plan.head_dim
    head = torch.cat([torch.arange(size - rotary), size - rotary + tail])
    queries = (torch.arange(plan.heads).unsqueeze(1) * size + head).flatten()
    if latent.query is None:
        first = queries
    else:
        features: Any = plan.qkv.modules[0]
        first = torch.arange(int(features.out_features))
        old, more = latent.query.order, plan.heads * (size + latent.doubled * latent.value_dim)
        queries = torch.cat([queries, torch.arange(plan.heads * size, more)])
        queries = queries if old is None else old[queries]
        latent = dataclasses.replace(latent, query=dataclasses.replace(latent.query, order=queries))
    if latent.common_norm is not None:
        norm = dataclasses.replace(latent.common_norm, order=tail)
        latent = dataclasses.replace(latent, common_norm=norm)
    start = len(first)
    end = start + latent.rank + rotary
    order = torch.cat([first, start + torch.arange(latent.rank), start + latent.rank + tail])
    order = torch.cat([order, end + torch.arange(plan.gates)])
    return dataclasses.replace(plan, qkv=dataclasses.replace(plan.qkv, order=order), latent=latent)


# --- one row of a token that is key and value of all heads, beside rows of windows (DeepSeek V4) ----------------------


_SHARED = ("q_a_proj", "q_b_proj", "kv_proj", "o_a_proj", "o_b_proj")


def is_shared(attention: nn.Module) -> bool:
    """Return whether tokens have one row that is key and value of all heads."""
    return all(hasattr(attention, name) for name in _SHARED)


def _windows(trace: Trace, module: Any, like: NormPlan) -> WindowsPlan | None:
    """Return what makes rows of windows, None without; it may give nothing of the observed tokens."""
    if module is None:
        return None
    own = module.named_parameters(recurse=False)
    names = [name for name, p in own if p.ndim == 2 and len(p) == module.compress_rate]
    norms = [m for m in module.children() if is_norm(m)]
    if len(names) != 1 or len(norms) != 1 or type(norms[0]) is not type(like.module):
        raise trace.error(module, "makes rows of windows in a way that is not understood")
    norm = dataclasses.replace(like, module=norms[0], eps=eps_of(norms[0])[0])
    return WindowsPlan(module, names[0], norm, module.compress_rate)


def match_shared(
    trace: Trace, config: Config, decoder: nn.Module, attention: Any, index: int
) -> AttentionPlan:
    """Return the plan of the attention of layer `index`.

    Raises:
        MatchError: A part is not understood, or no candidate gives what the module gave.
    """
    first, second, row, blocks, last = (getattr(attention, name) for name in _SHARED)
    compressor, width = getattr(attention, "compressor", None), trace.output(row).shape[-1]
    own = [first, row]
    if compressor is not None:
        own += [compressor.kv_proj, compressor.gate_proj]
    norms = [m for m in attention.children() if is_norm(m) and trace.ran(m)]
    read = [trace.outputs[first], trace.outputs[row]]
    found = [m for x in read for m in norms if same(trace.inputs[m], x)]
    found += [m for m in norms if m not in found]
    inside = () if compressor is None else set(compressor.modules())
    count = sum(m not in inside for _, m in linears(attention, trace))
    alike = all(same(trace.input(m), trace.input(first)) for m in own)
    if not alike or [len(found), count] != [3, 5] or blocks.bias is not None:
        raise trace.error(attention, "makes its rows in a way that is not understood")
    low_norm, key_norm, query_norm = (match_norm(trace, m) for m in found)
    windows, groups = _windows(trace, compressor, key_norm), trace.inputs[blocks].shape[-2]
    base = AttentionPlan(
        *(LinearPlan(tuple(own)), linear_plan(last)),
        *(trace.output(second).shape[-1] // width, 1, width, width**-0.5),
        query_norm=query_norm,
        key_norm=key_norm,
        window=int(attention.sliding_window) - 1,
        sinks=sinks_of(attention),
        shared=SharedRowPlan(linear_plan(second), low_norm, blocks, groups, windows),
    )
    rows, expected = torch.cat([trace.output(m) for m in own], dim=-1), trace.input(last)
    kinds = getattr(attention, "rope_layer_type", None), *config.get("rope_parameters", default=())
    scales = scales_of(config, attention, width, index)
    plans = (
        dataclasses.replace(base, rope=rope, scale=scale)
        for kind in dict.fromkeys(kinds)
        for rope in match_ropes(trace, config, decoder, attention, kind, width)
        for scale in scales
    )

    def error(plan: AttentionPlan) -> float:
        return distance(attend(plan, rows), expected)

    return settled(trace, attention, plans, error, expected)

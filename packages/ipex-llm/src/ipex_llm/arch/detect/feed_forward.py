# SPDX-License-Identifier: Apache-2.0
"""Which block of a layer stands behind its attention: a dense one, experts, or both beside each other."""

from __future__ import annotations

import dataclasses
from typing import Any, cast

import torch
from torch import nn

from ipex_llm.arch import ExpertNormsPlan, ExpertsPlan, MlpPlan
from ipex_llm.arch.detect.parts import (
    given_by,
    is_mixture,
    match_experts,
    match_mlp,
    match_norm,
    norm_behind,
)
from ipex_llm.arch.detect.trace import (
    Config,
    Trace,
    distance,
    is_linear,
    is_norm,
    same,
    tolerance,
)
from ipex_llm.arch.reference import in_order

Tensor = torch.Tensor

MLP_NAMES = (
    *("mlp", "feed_forward", "block_sparse_moe", "ffn", "moe", "feedforward"),
    "mlp_block",
    "shared_mlp",  # alone, or beside experts (Granite 4)
)


def norms_of(trace: Trace, layer: nn.Module) -> list[nn.Module]:
    """Return the norms among the parts of a layer that ran, and those at the ends of its blocks (A.X K1)."""
    inner = [
        m for m in layer.children() if hasattr(m, "attn")
    ]  # with norms around attention (DBRX)
    parts = [m for one in (layer, *inner) for m in one.children() if trace.ran(m)]
    ends = (norm_behind(trace, m) for m in parts if not is_norm(m))
    return [*filter(is_norm, parts), *(m for m in ends if m is not None)]


def match_feed_forward(
    trace: Trace, config: Config, layer: nn.Module
) -> tuple[MlpPlan | ExpertsPlan, Tensor, Tensor]:
    """Return the plan of the second block, what it read and what it gave (before anything is added)."""
    for name in MLP_NAMES:
        block = getattr(layer, name, None)
        if not isinstance(block, nn.Module):
            continue
        if is_mixture(block):
            return _with_shared(trace, layer, block, match_experts(trace, config, block))
        plan = match_mlp(trace, block)
        out = in_order(plan.down, trace.output(plan.down.modules[0]))
        if is_mixture(layer):
            return _with_dense(trace, layer, match_experts(trace, config, layer), plan, out)
        return plan, trace.input(plan.up.modules[0]), out
    parts = [(n, m) for n, m in layer.named_children() if is_linear(m) and trace.ran(m)]
    if not parts:
        children = ", ".join(name for name, _ in layer.named_children())
        raise trace.error(layer, f"has no mlp among its parts ({children})")
    plan = match_mlp(trace, layer, parts)
    return plan, trace.input(plan.up.modules[0]), trace.output(plan.down.modules[0])


def _with_shared(
    trace: Trace, layer: nn.Module, block: nn.Module, plan: ExpertsPlan
) -> tuple[ExpertsPlan, Tensor, Tensor]:
    """Return experts with the dense block beside them, what both read and the sum of what they gave."""
    given, out = trace.input(block), given_by(trace, block)
    beside = getattr(layer, "shared_mlp", None)
    if plan.shared is not None or not isinstance(beside, nn.Module) or not trace.ran(beside):
        return plan, given, out
    if same(trace.input(beside), given):
        plan = dataclasses.replace(plan, shared=match_mlp(trace, beside))
        out = out.float() + trace.output(beside).float()
    return plan, given, out


def _with_dense(
    trace: Trace, layer: nn.Module, experts: ExpertsPlan, mlp: MlpPlan, out: Tensor
) -> tuple[ExpertsPlan, Tensor, Tensor]:
    """Return experts among the parts of a layer with the dense block beside them, its input and the sum of both.

    Raises:
        MatchError: They have not a norm in front and one behind each.
    """
    outer: Any = layer.router
    read = trace.input(mlp.up.modules[0])
    before = [_giving(trace, layer, x) for x in (trace.input(experts.module), read)]
    behind = [_reading(trace, layer, x) for x in (trace.output(experts.module), out)]
    inner = [m for m in outer.children() if is_norm(m) and trace.ran(m)]
    if None in (*before, *behind) or len(inner) != 1:
        raise trace.error(layer, "has experts beside its mlp without norms around them")
    first, last = (cast("list[nn.Module]", one) for one in (before, behind))
    factors = getattr(outer, "scale", torch.ones(()))
    factors = factors.detach().float() * float(getattr(outer, "scalar_root_size", 1.0))
    given = trace.output(inner[0]).float() * factors
    stream = trace.input(first[1])
    fits = (
        same(trace.input(first[0]), stream)
        and same(trace.input(inner[0]), stream)
        and distance(given, trace.input(experts.router)) <= tolerance(stream)
    )
    if not fits:
        raise trace.error(outer, "reads something else than a norm of the stream with factors")
    router, own, other, shared = (
        match_norm(trace, norm) for norm in (inner[0], first[0], last[0], last[1])
    )
    norms = ExpertNormsPlan(
        router, factors.expand(stream.shape[-1]).contiguous(), own, other, shared
    )
    total = trace.output(last[0]).float() + trace.output(last[1]).float()
    return dataclasses.replace(experts, shared=mlp, norms=norms), read, total


def _giving(trace: Trace, layer: nn.Module, x: Tensor) -> nn.Module | None:
    return next((n for n in norms_of(trace, layer) if same(trace.outputs[n], x)), None)


def _reading(trace: Trace, layer: nn.Module, x: Tensor) -> nn.Module | None:
    return next((n for n in norms_of(trace, layer) if same(trace.inputs[n], x)), None)

# SPDX-License-Identifier: Apache-2.0
"""Dense blocks: the projections by what they read, gate and activation by numbers."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator

import torch
from torch import nn

from ipex_llm.arch.detect.attention import linear_plan
from ipex_llm.arch.detect.trace import Trace, distance, linears, same, settle
from ipex_llm.arch.reference import ACTIVATIONS, activate, combine_gate
from ipex_llm.arch.types import MlpPlan

__all__ = ["activations_of", "match_mlp"]

Tensor = torch.Tensor


@torch.no_grad()
def activations_of(module: nn.Module) -> list[str]:
    """Return the activation that a block has as a part of its own; all of them if none is found."""
    parts = {**vars(module), **dict(module.named_children())}
    x = torch.linspace(-6.0, 6.0, 97)
    for name, part in parts.items():
        if not re.search(r"act|gelu|silu", name) or not callable(part):
            continue
        try:
            y = part(x)
        except Exception:  # not a function of one tensor
            continue
        if not isinstance(y, Tensor) or y.shape != x.shape:
            continue
        for known in ACTIVATIONS:
            if torch.allclose(activate(known, x), y, atol=2e-6, rtol=0):
                return [known]
    return list(ACTIVATIONS)


def _candidates(
    ups: list[nn.Module], down: nn.Module, names: list[str], fused: bool, width: int
) -> Iterator[MlpPlan]:
    for name in names:
        if len(ups) == 2:
            for gate, up in ((ups[0], ups[1]), (ups[1], ups[0])):
                yield MlpPlan(linear_plan(gate), linear_plan(up), linear_plan(down), name)
        elif fused:
            plan = MlpPlan(None, linear_plan(ups[0]), linear_plan(down), name, fused=True)
            yield plan
            order = torch.arange(2 * width).roll(width)
            yield dataclasses.replace(plan, up=linear_plan(ups[0], order=order))
        else:
            yield MlpPlan(None, linear_plan(ups[0]), linear_plan(down), name)


def match_mlp(
    trace: Trace, module: nn.Module, parts: list[tuple[str, nn.Module]] | None = None
) -> MlpPlan:
    """Return the plan of a dense block.

    Args:
        trace: The observed forward.
        module: The block.
        parts: Its linear layers, if they are not all that are in `module`.

    Raises:
        MatchError: The linear layers do not form an mlp, or the activation is unknown.
    """
    parts = list(linears(module, trace)) if parts is None else parts
    names = ", ".join(name for name, _ in parts) or "none"
    if not 2 <= len(parts) <= 3:
        raise trace.error(module, f"has linear layers ({names}) that do not form an mlp")
    source = trace.inputs.get(module)
    if source is None or not any(same(trace.input(m), source) for _, m in parts):
        source = trace.input(parts[0][1])
    ups = [m for _, m in parts if same(trace.input(m), source)]
    downs = [m for _, m in parts if not same(trace.input(m), source)]
    if len(downs) != 1 or not ups:
        raise trace.error(module, f"has linear layers ({names}) that do not form an mlp")
    down = downs[0]
    expected = trace.input(down)
    width = expected.shape[-1]
    values = [trace.output(m).float() for m in ups]
    fused = len(ups) == 1 and values[0].shape[-1] == 2 * width

    def error(plan: MlpPlan) -> float:
        if plan.fused:
            both = values[0] if plan.up.order is None else values[0][..., plan.up.order]
            gate, up = both.chunk(2, dim=-1)
            return distance(combine_gate(plan.activation, gate, up), expected)
        up = values[ups.index(plan.up.modules[0])]
        if plan.gate is None:
            return distance(activate(plan.activation, up), expected)
        gate = values[ups.index(plan.gate.modules[0])]
        return distance(combine_gate(plan.activation, gate, up), expected)

    candidates = _candidates(ups, down, activations_of(module), fused, width)
    settled = settle(candidates, error, expected)
    plan, off = settled
    if plan is None:
        raise trace.error(module, f"has an unknown activation or gate (off by {off:.1e})")
    return plan

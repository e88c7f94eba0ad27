# SPDX-License-Identifier: Apache-2.0
"""Blocks after attention: dense ones and mixtures of experts.

Dense blocks: the projections by what they read, gate and activation by numbers. Mixtures of experts: stacked weights or
one module for each, and a router whose rule is found by numbers.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from ipex_llm.arch import ExpertsPlan, MlpPlan
from ipex_llm.arch.detect.attention import linear_plan
from ipex_llm.arch.detect.trace import Config, Trace, distance, is_linear, linears, same, settle
from ipex_llm.arch.reference import ACTIVATIONS, activate, combine_gate, run_experts

__all__ = ["activations_of", "is_mixture", "match_experts", "match_mlp"]

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


# --- mixtures of experts --------------------------------------------------------------------------------------------

_SHARED = re.compile(r"^shared_(expert|experts|mlp)$")
_GATE = re.compile(r"^(gate_proj|w1|linear_1)$")
_UP = re.compile(r"^(up_proj|w3|linear_v)$")
_DOWN = re.compile(r"^(down_proj|w2)$")


def is_mixture(module: nn.Module) -> bool:
    """Return whether a block has experts."""
    return isinstance(getattr(module, "experts", None), nn.Module) or all(
        hasattr(module, name) for name in ("input_linear", "output_linear", "router")
    )


@dataclasses.dataclass
class _Weights:
    module: nn.Module
    gate_up: Any
    down: Any
    experts: int
    gate_up_bias: Tensor | None = None
    down_bias: Tensor | None = None
    both: tuple[tuple[bool, bool], ...] = ((False, False),)  # (transposed, interleaved)
    sizes: tuple[int, ...] = ()  # of the inner dimension, for each of `both`


def _stacked(block: nn.Module, hidden: int) -> _Weights | None:
    experts = getattr(block, "experts", block)
    up = getattr(experts, "gate_up_proj", None)
    down = getattr(experts, "down_proj", None)
    if not isinstance(up, Tensor):
        up = getattr(getattr(experts, "input_linear", None), "weight", None)
        down = getattr(getattr(experts, "output_linear", None), "weight", None)
    if not isinstance(up, Tensor) or not isinstance(down, Tensor) or up.ndim != 3:
        return None
    both, sizes = [], []
    for transposed in (False, True):
        inside = 2 if transposed else 1
        if up.shape[3 - inside] == hidden and down.shape[inside] == hidden:
            for interleaved in (False, True):
                both.append((transposed, interleaved))
                sizes.append(up.shape[inside] // 2)
    return _Weights(
        experts,
        up,
        down,
        up.shape[0],
        getattr(experts, "gate_up_proj_bias", None),
        getattr(experts, "down_proj_bias", None),
        tuple(both),
        tuple(sizes),
    )


def _listed(trace: Trace, block: nn.Module) -> _Weights:
    experts: Any = block.experts
    found: list[list[nn.Module]] = [[], [], []]
    for expert in experts.children():
        for pattern, place in zip((_GATE, _UP, _DOWN), found, strict=True):
            parts = [m for n, m in expert.named_children() if pattern.match(n) and is_linear(m)]
            if len(parts) != 1:
                raise trace.error(expert, "is an expert without gate, up and down projections")
            place.append(parts[0])
    gates, ups, downs = found
    if not gates:
        raise trace.error(block, "has no experts")
    size = int(getattr(gates[0], "out_features", 0))
    return _Weights(experts, (*gates, *ups), tuple(downs), len(gates), sizes=(size,))


def _router(trace: Trace, block: nn.Module, experts: int, hidden: int) -> nn.Module:
    for name in ("router", "gate", "gating"):
        owner = getattr(block, name, None)
        if not isinstance(owner, nn.Module):
            continue
        for module in owner.modules():
            weight = getattr(module, "weight", None)
            if isinstance(weight, Tensor) and list(weight.shape) == [experts, hidden]:
                return module
    raise trace.error(block, f"has no router with weights [{experts}, {hidden}]")


def _find(owners: list[Any], *names: str) -> Any:
    for owner, name in itertools.product(owners, names):
        value = getattr(owner, name, None)
        if value is not None:
            return value
    return None


def match_experts(trace: Trace, config: Config, block: nn.Module) -> ExpertsPlan:
    """Return the plan of a mixture of experts.

    Raises:
        MatchError: The weights, the router or its rule are not understood.
    """
    x, expected = trace.input(block), trace.output(block)
    hidden = x.shape[-1]
    weights = _stacked(block, hidden) or _listed(trace, block)
    for part in (weights.gate_up, weights.down):
        if (
            isinstance(part, Tensor) and part.shape[0] != weights.experts
        ):  # LongCat-Flash's zero experts
            raise trace.error(
                block,
                f"has {weights.experts} experts, but {part.shape[0]} with weights of their own",
            )
    router = _router(trace, block, weights.experts, hidden)
    outer = getattr(block, "router", None) or getattr(block, "gate", None)
    owners = [router, outer, block, config.raw]
    top_k = _find(owners, "top_k", "num_experts_per_tok", "num_experts_per_token", "moe_k")
    if not top_k:
        raise trace.error(block, "does not tell how many experts a token goes to")
    groups = _find(owners, "num_group", "n_group") or 0
    shared, shared_gate = _shared(trace, block)
    bias = _find(owners[:3], "e_score_correction_bias")
    alpha = _find([weights.module, config.raw], "alpha", "swiglu_alpha")
    limit = _find([weights.module, config.raw], "limit", "swiglu_limit")
    first = next(iter(weights.module.children()), weights.module)
    names = activations_of(weights.module)
    if len(names) > 1:
        names = activations_of(block)
    if len(names) > 1:
        names = activations_of(first)
    if isinstance(alpha, float) and isinstance(limit, float):
        names = ["swigluoai", *names]
    plan = ExpertsPlan(
        router=router,
        router_weight=router.weight,  # type: ignore[arg-type]
        router_bias=getattr(router, "bias", None),
        module=weights.module,
        gate_up=weights.gate_up,
        down=weights.down,
        transposed=False,
        interleaved=False,
        gate_up_bias=weights.gate_up_bias,
        down_bias=weights.down_bias,
        experts=weights.experts,
        top_k=int(top_k),
        intermediate_size=0,
        activation="silu",
        scoring="softmax",
        renormalize=True,
        groups=int(groups) if groups and groups > 1 else 0,
        top_groups=int(_find(owners, "topk_group") or 0),
        correction_bias=bias if isinstance(bias, Tensor) else None,
        shared=shared,
        shared_gate=shared_gate,
        swiglu_alpha=alpha if isinstance(alpha, float) else 1.702,
        swiglu_limit=limit if isinstance(limit, float) else 7.0,
    )
    scale = float(_find(owners, "routed_scaling_factor") or 1.0)
    candidates = _expert_candidates(plan, weights, names, scale)

    def error(candidate: ExpertsPlan) -> float:
        return distance(run_experts(candidate, x), expected)

    result = settle(candidates, error, expected)
    settled, off = result
    if settled is None:
        raise trace.error(
            block, f"{type(block).__name__} routes or computes otherwise (off by {off:.1e})"
        )
    return settled


def _expert_candidates(
    plan: ExpertsPlan, weights: _Weights, names: list[str], scale: float
) -> Iterator[ExpertsPlan]:
    grouped = [True, False] if plan.groups else [False]
    for (form, size), name, scoring, again, factor, cut, early in itertools.product(
        zip(weights.both, weights.sizes, strict=True),
        names,
        ("softmax", "sigmoid"),
        (True, False),
        dict.fromkeys((scale, 1.0)),
        grouped,
        (False, True),
    ):
        yield dataclasses.replace(
            plan,
            transposed=form[0],
            interleaved=form[1],
            intermediate_size=size,
            activation=name,
            scoring=scoring,
            renormalize=again,
            routed_scale=factor,
            groups=plan.groups if cut else 0,
            top_groups=plan.top_groups if cut else 0,
            scale_input=early,
        )


def _shared(trace: Trace, block: nn.Module) -> tuple[MlpPlan | None, nn.Module | None]:
    shared, gate = None, None
    for name, child in block.named_children():
        if _SHARED.match(name):
            shared = match_mlp(trace, child)
        elif name.startswith("shared") and is_linear(child):
            gate = child
    return shared, gate

# SPDX-License-Identifier: Apache-2.0
"""Attention whose queries come from experts, which also read what these attend to (JetMoE's mixture of heads)."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator

from torch import nn

from ipex_llm.arch import AttentionPlan, ExpertsPlan, LinearPlan
from ipex_llm.arch.detect.attention import head_dim_of, scales_of, window_of
from ipex_llm.arch.detect.parts import (
    added_by,
    is_mixture,
    linear_plan,
    match_ropes,
    router_of,
    stacked_weights,
    top_k_of,
)
from ipex_llm.arch.detect.trace import Config, Trace, distance, linears, same, settle
from ipex_llm.arch.reference import run_attention


def has_head_experts(attention: nn.Module) -> bool:
    """Return whether the projections of an attention are experts."""
    block = getattr(attention, "experts", None)
    return isinstance(block, nn.Module) and is_mixture(block)


def match_head_experts(
    trace: Trace, config: Config, decoder: nn.Module, attention: nn.Module, index: int
) -> AttentionPlan:
    """Return the plan of the attention of layer `index`.

    Raises:
        MatchError: A part is not understood, or no candidate gives what the module gave.
    """
    block = attention.get_submodule("experts")
    x, expected = trace.input(attention), trace.output(attention)
    inside = set(block.modules())
    others = [m for _, m in linears(attention, trace) if m not in inside]
    if len(others) != 1 or not same(trace.input(others[0]), x):
        raise trace.error(attention, "has experts, and not one projection to keys and values")
    first, last = stacked_weights(block)
    hidden = x.shape[-1]
    if first is None or last is None or list(first.shape) != [*last.shape[:1], *last.shape[:0:-1]]:
        raise trace.error(block, "has no weights to queries, and from what these attend to")
    experts, width = first.shape[:2]
    head_dim = head_dim_of(config, attention, width)
    kv_heads, odd = divmod(width, head_dim)
    if odd or trace.output(others[0]).shape[-1] != 2 * width:
        raise trace.error(attention, f"has no key and value for each of {kv_heads} heads")
    router = router_of(trace, block, experts, hidden)
    outer = getattr(block, "router", router)
    top_k = top_k_of(trace, block, [router, outer, block, config.raw])
    mixture = ExpertsPlan(
        router=router,
        router_weight=router.weight,  # type: ignore[arg-type]
        router_bias=getattr(router, "bias", None),
        module=block,
        gate_up=first,
        down=last,
        transposed=False,
        interleaved=False,
        gate_up_bias=None,
        down_bias=None,
        experts=experts,
        top_k=top_k,
        intermediate_size=width,
        activation="none",
        scoring="softmax",
        renormalize=True,
        gated=False,
        added=added_by(block, hidden),
    )
    kinds = config.get("layer_types")
    kind = kinds[index] if kinds is not None and index < len(kinds) else None
    base = AttentionPlan(
        linear_plan(others[0]),
        LinearPlan(()),
        top_k * kv_heads,
        kv_heads,
        head_dim,
        head_dim**-0.5,
        window=window_of(config, attention, index),
        experts=mixture,
    )
    ropes = [*match_ropes(trace, config, decoder, attention, kind, head_dim), None]

    def candidates() -> Iterator[AttentionPlan]:
        scales = scales_of(config, attention, head_dim, index)
        for rope, scale, again in itertools.product(ropes, scales, (True, False)):
            own = dataclasses.replace(mixture, renormalize=again)
            yield dataclasses.replace(base, rope=rope, scale=scale, experts=own)

    found = settle(candidates(), lambda plan: distance(run_attention(plan, x), expected), expected)
    settled, off = found
    if settled is None:
        name = type(attention).__name__
        raise trace.error(attention, f"{name} computes something else (off by {off:.1e})")
    return settled

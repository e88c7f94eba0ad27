# SPDX-License-Identifier: Apache-2.0
"""Latent attention: queries, keys and values from rows of low rank (DeepSeek)."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from ipex_llm.arch.detect.attention import linear_plan, scales_of
from ipex_llm.arch.detect.norm import match_norm
from ipex_llm.arch.detect.rope import match_ropes
from ipex_llm.arch.detect.trace import Config, Trace, distance, is_norm, linears, same, settle
from ipex_llm.arch.reference import attend
from ipex_llm.arch.types import AttentionPlan, LatentPlan, LinearPlan, NormPlan, RopePlan

__all__ = ["is_latent", "match_latent"]

Tensor = torch.Tensor

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
    parts = [module for _, module in linears(attention, trace)]
    source = trace.input(down)
    first = [m for m in parts if m is not down and same(trace.input(m), source)]
    others = [m for m in parts if m not in (up, down, *first)]
    if len(first) != 1 or not 1 <= len(others) <= 2:
        names = ", ".join(name for name, _ in linears(attention, trace))
        raise trace.error(attention, f"has linear layers ({names}) that are not known of a latent")
    norms = [m for _, m in attention.named_children() if is_norm(m) and trace.ran(m)]

    def norm_before(module: nn.Module) -> NormPlan | None:
        given = trace.input(module)
        found = next((n for n in norms if same(trace.outputs[n], given)), None)
        return None if found is None else match_norm(trace, found)

    output = others[-1]
    query = others[0] if len(others) == 2 else None
    rank = trace.input(up).shape[-1]
    rotary = trace.output(down).shape[-1] - rank
    head_dim = sum(int(config.get(n, default=0)) for n in ("qk_nope_head_dim", "qk_rope_head_dim"))
    queries = trace.output(first[0] if query is None else query).shape[-1]
    expected = trace.input(output)
    heads, odd = divmod(queries, max(head_dim, 1))
    value_dim, rest = divmod(expected.shape[-1], max(heads, 1))
    plain = head_dim - rotary
    whole = not (odd or rest) and heads > 0 and plain > 0 and rotary > 1
    if not whole or trace.output(up).shape[-1] != heads * (plain + value_dim):
        raise trace.error(attention, f"{queries} features do not make heads of {head_dim}")
    latent = LatentPlan(
        up,
        norm_before(up),
        rank,
        value_dim,
        None if query is None else linear_plan(query),
        None if query is None else norm_before(query),
    )
    rows = torch.cat([trace.output(first[0]), trace.output(down)], dim=-1)
    base = AttentionPlan(
        LinearPlan((first[0], down)),
        linear_plan(output),
        heads,
        1,
        head_dim,
        head_dim**-0.5,
        latent=latent,
    )
    ropes = match_ropes(trace, config, decoder, attention, None, rotary)
    scales = scales_of(config, attention, head_dim, index)

    def error(plan: AttentionPlan) -> float:
        order: Any = plan.qkv.order
        return distance(attend(plan, rows if order is None else rows[..., order]), expected)

    settled = settle(_candidates(config, base, ropes, scales), error, expected)
    plan, off = settled
    if plan is None:
        name = type(attention).__name__
        raise trace.error(attention, f"{name} computes something else (off by {off:.1e})")
    return plan


def _candidates(
    config: Config, base: AttentionPlan, ropes: list[RopePlan], scales: list[float]
) -> Iterator[AttentionPlan]:
    """Yield plans with each rotation and scale.

    Where pairs are rotated and come out as halves (``rope_interleave``), rows are put in the order of halves before:
    cached keys then equal the keys of the model's own forward.
    """
    split = bool(config.get("rope_interleave", default=False))
    for rope in sorted(ropes, key=lambda one: one.half != split):
        for scale in scales:
            plan = dataclasses.replace(base, rope=rope, scale=scale)
            if split and rope.half:
                yield _in_halves(plan, rope.dim)
            yield plan


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
        latent = dataclasses.replace(latent, query=dataclasses.replace(latent.query, order=queries))
    start = len(first)
    order = torch.cat([first, start + torch.arange(latent.rank), start + latent.rank + tail])
    return dataclasses.replace(plan, qkv=dataclasses.replace(plan.qkv, order=order), latent=latent)

# SPDX-License-Identifier: Apache-2.0
"""Layers with two blocks that also read the row of the token before (RWKV); each is a layer of a plan."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import torch
from torch import nn

from ipex_llm.arch import LayerPlan, LinearPlan, MixerPlan, NormPlan, ShiftPlan, WkvPlan
from ipex_llm.arch.detect.feed_forward import norms_of
from ipex_llm.arch.detect.parts import linear_plan, match_norm
from ipex_llm.arch.detect.trace import Trace, distance, linears, same, settle, tolerance
from ipex_llm.arch.reference import run_attention

Tensor = torch.Tensor
_FIRST = {"key", "value", "receptance", "output"}
_SECOND = {"key", "value", "receptance"}


def shifted_blocks(layer: nn.Module) -> tuple[nn.Module, nn.Module] | None:
    """Return the two blocks of a layer that are made of a token and the one before, or None."""
    blocks = []
    for wanted in (_FIRST, _SECOND):
        named = [
            one
            for one in layer.children()
            if {n for n, m in one.named_children() if isinstance(m, nn.Linear)} == wanted
        ]
        blocks += named
    return (blocks[0], blocks[1]) if len(blocks) == 2 else None


@dataclasses.dataclass(frozen=True, slots=True)
class Shifted:
    """The plans of both blocks, and the norm that gives what the first one reads and adds to, or None."""

    first: LayerPlan
    second: LayerPlan
    entry: NormPlan | None


def match_shifted(trace: Trace, layer: nn.Module, blocks: tuple[nn.Module, nn.Module]) -> Shifted:
    """Return the plans of the blocks of a layer.

    Raises:
        MatchError: A part is not understood, or no candidate gives what a block gave.
    """
    norms = norms_of(trace, layer)
    before = [
        next((n for n in norms if same(trace.outputs[n], trace.inputs[b])), None) for b in blocks
    ]
    first, second = before
    if first is None or second is None:
        raise trace.error(layer, "has blocks that read something else than norms")
    h = trace.input(first)
    entry = next((n for n in norms if n is not first and same(trace.outputs[n], h)), None)
    start = h if entry is None else trace.input(entry)
    middle, (one, other) = trace.input(second).float(), (trace.output(b).float() for b in blocks)
    sums = ((h.float() + one, middle), (middle + other, trace.output(layer).float()))
    fits = same(start, trace.input(layer)) and len(norms) == 2 + (entry is not None)
    if not fits or any(distance(a, b) > tolerance(h) for a, b in sums):
        raise trace.error(layer, "adds its blocks in a way that is not understood")
    first_plan = _settled(trace, blocks[0], _means(trace, blocks[0]))
    second_plan = _settled(trace, blocks[1], _dense(blocks[1]))
    layers = (
        LayerPlan(layer, plan, None, match_norm(trace, norm), None)
        for plan, norm in ((first_plan, first), (second_plan, second))
    )
    return Shifted(*layers, None if entry is None else match_norm(trace, entry))


def _settled(trace: Trace, block: nn.Module, candidates: Iterator[MixerPlan]) -> MixerPlan:
    """Return the candidate that gives what a block gave."""
    x, expected = trace.input(block), trace.output(block)
    found = settle(candidates, lambda plan: distance(run_attention(plan, x), expected), expected)
    plan, off = found
    if plan is None:
        name = type(block).__name__
        raise trace.error(block, f"{name} computes something else (off by {off:.1e})")
    return plan


def _mixes(block: nn.Module, *names: str) -> tuple[str, ...]:
    """Return the names of the parameters that mix rows for linear layers, by the names of these."""
    own = [n for n, p in block.named_parameters(recurse=False) if p.ndim == 3]
    found = [[n for n in own if n.endswith(f"_{name}")] for name in names]
    return tuple(one[0] for one in found) if all(len(one) == 1 for one in found) else ()


def _means(trace: Trace, block: nn.Module) -> Iterator[WkvPlan]:
    mixes = _mixes(block, "key", "value", "receptance")
    vectors = [n for n, p in block.named_parameters(recurse=False) if p.ndim == 1]
    parts = dict(linears(block, trace))
    if not mixes or len(vectors) != 2:
        return
    key, value, gate, output = (
        linear_plan(parts[n]) for n in ("key", "value", "receptance", "output")
    )
    channels = trace.output(parts["key"]).shape[-1]
    for decay, first in (vectors, vectors[::-1]):
        yield WkvPlan(
            *(LinearPlan(()), output, block, mixes, key, value, gate),
            *(channels, decay, first),
        )


def _dense(block: nn.Module) -> Iterator[ShiftPlan]:
    mixes = _mixes(block, "key", "receptance")
    if mixes:
        names = "key", "receptance", "value"
        parts = (linear_plan(block.get_submodule(name)) for name in names)
        yield ShiftPlan(LinearPlan(()), LinearPlan(()), block, mixes, *parts)

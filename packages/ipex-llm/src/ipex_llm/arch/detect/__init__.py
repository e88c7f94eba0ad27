# SPDX-License-Identifier: Apache-2.0
"""From a model to a plan.

A few tokens are run through the model once, and what each module reads and gives is kept. Names and configuration say
what a part could be; the observed numbers say what it is. A plan is thereby true for those tokens in each of its
parts; `ipex_llm.arch.reference.verify` compares the whole.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from ipex_core.module_swap.forward import FusedForward
from ipex_core.optimization.passes.cast import cast_input
from ipex_llm.arch import AttentionPlan, DecoderPlan, ExpertsPlan, LayerPlan
from ipex_llm.arch.detect.attention import find_attention
from ipex_llm.arch.detect.decoder import MatchedLayer, match_decoder, match_layers
from ipex_llm.arch.detect.decoder import match_each as _match_each
from ipex_llm.arch.detect.parts import is_mixture, match_experts
from ipex_llm.arch.detect.trace import Config, MatchError, Trace
from ipex_llm.records import hooks_of
from ipex_quant.weight_only.linear import stand_ins

__all__ = [
    "Facts",
    "Found",
    "MatchError",
    "MatchedLayer",
    "check_hooks",
    "find_mixtures",
    "layer_plans",
    "match",
    "match_each",
    "parameter_names",
    "why_not",
]


@torch.no_grad()
def match(model: nn.Module) -> DecoderPlan:
    """Return the plan of the decoder in a model.

    Args:
        model: A causal language model of transformers, or a module that wraps one or is its decoder, in eval mode.
            It is run once, on seven tokens.

    Returns:
        The plan. It names modules of `model`, and holds as long as they stay.

    Raises:
        MatchError: A part is not understood; the error names it.
    """
    with stand_ins(model):
        return match_decoder(Trace(model))


@torch.no_grad()
def match_each(model: nn.Module) -> list[MatchedLayer]:
    """Return the decoder layers of a model, each with its plan or the reason why it has none.

    Args:
        model: As for `match`; what is around the layers need not be understood.

    Raises:
        MatchError: The model does not run on tokens alone, or has no layers with attention.
    """
    with stand_ins(model):
        return list(_match_each(Trace(model)))


@torch.no_grad()
def why_not(model: nn.Module) -> tuple[MatchError, ...]:
    """Return all reasons why a model has no plan: one for each layer that is not understood, or for the model.

    Args:
        model: As for `match`.

    Returns:
        Nothing if `match` works.
    """
    try:
        trace = Trace(model)
        found = [result for _, result in match_layers(trace)]
        errors = tuple(result for result in found if isinstance(result, MatchError))
        if not errors:
            match_decoder(trace)
    except MatchError as error:
        return (error,)
    return errors


@torch.no_grad()
def find_mixtures(model: nn.Module) -> Iterator[tuple[str, nn.Module, ExpertsPlan | MatchError]]:
    """Yield the mixtures of experts of any model: name, block, and plan or the reason why there is no plan.

    Args:
        model: As for `match`; the rest of it need not be understood.
    """
    blocks = {name: module for name, module in model.named_modules() if is_mixture(module)}
    if not blocks:
        return
    try:
        trace = Trace(model)
    except MatchError as error:
        yield from ((name, block, error) for name, block in blocks.items())
        return
    for name, block in blocks.items():
        if not trace.ran(block):
            yield name, block, trace.error(block, "does not run on text alone")
            continue
        try:
            with trace.reading(block):
                plan = match_experts(trace, Config(_config(model, block)), block)
            yield name, block, plan
        except MatchError as error:
            yield name, block, error


def _config(model: nn.Module, block: nn.Module) -> object:
    """Return the configuration of a block: its own, or the one of the innermost module around it that has one."""
    found: object = getattr(model, "config", None)
    for module in model.modules():
        if any(part is block for part in module.modules()):
            found = getattr(module, "config", found)
    return found


# -- Layers that can run on their own, whatever is around them --------------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True)
class Facts:
    """What a layer's forward must know of its model."""

    index: int  # of the layer in the cache
    names: tuple[str, ...]  # of the arguments of its forward
    in_tuple: bool  # it returns ``(rows,)``
    config: Any


@dataclasses.dataclass(frozen=True, slots=True)
class Found:
    """A decoder layer of a model, with its plan or why it has none."""

    name: str
    module: nn.Module
    plan: LayerPlan | None
    facts: Facts | None
    reason: str = ""

    def without(self, reason: str | None) -> Found:
        """Return this layer with a reason instead of a plan, or as it is (None)."""
        return self if reason is None else Found(self.name, self.module, None, None, reason)


_names: dict[type[nn.Module], tuple[str, ...]] = {}


def parameter_names(kind: type[nn.Module]) -> tuple[str, ...]:
    """Return the names of the arguments of a class's forward."""
    if kind not in _names:
        _names[kind] = tuple(inspect.signature(kind.forward).parameters)[1:]
    return _names[kind]


def layer_plans(model: nn.Module) -> list[Found]:
    """Return the decoder layers of a model.

    Args:
        model: A language model of transformers, in eval mode; it is run once, on a few tokens.
    """
    try:
        return [_found(layer) for layer in match_each(model)]
    except MatchError:
        return []


def _found(layer: MatchedLayer) -> Found:
    plan, module = layer.plan, layer.module
    if isinstance(plan, MatchError):
        return Found(layer.name, module, None, None, plan.reason)
    names = parameter_names(type(module))
    index = getattr(find_attention(module), "layer_idx", None)
    attention = plan.attention
    if not isinstance(attention, AttentionPlan) or plan.beside or plan.convs:
        return Found(layer.name, module, None, None, "it keeps a state, not keys and values")
    rope = attention.rope
    reason = ""
    if attention.gated:
        reason = "what it attends to is gated"
    elif attention.experts is not None:
        reason = "its projections are experts"
    elif not {"past_key_values", "past_key_value", "cache"}.intersection(names):
        reason = "its forward takes no past_key_values"
    elif not isinstance(index, int):
        reason = "its attention has no layer_idx"
    elif layer.results > 1:
        reason = "it returns more than its rows"
    elif attention.value_dim is not None or attention.key_bias is not None:
        reason = "its values are narrower than its keys"
    elif attention.difference is not None:
        reason = "it caches keys and values twice"
    elif plan.residual_after_norm or attention.latent is not None:
        reason = "it ends in a norm, or caches latents"
    elif rope is not None and rope.kind in ("dynamic", "longrope"):
        reason = "its rotation depends on the length"
    elif any(map(_hooked, module.modules())):
        reason = "it, or a module in it, has hooks"
    if reason:
        return Found(layer.name, module, None, None, reason)
    assert isinstance(index, int)
    return Found(layer.name, module, plan, Facts(index, names, layer.results == 1, layer.config))


def check_hooks(decoder: nn.Module) -> None:
    """Raise `MatchError` for hooks of the modules in a decoder, which programs do not call."""
    for name, module in decoder.named_modules():
        if name and _hooked(module):
            raise MatchError(name, "has hooks")


def _hooked(module: nn.Module) -> bool:
    """Return whether calling a module does more than its class says, and than `ipex_core.optimize` has made of it."""
    own = module.__dict__.get("forward")
    changes = own is not None and not isinstance(own, FusedForward)
    return changes or any(hook is not cast_input for hook in hooks_of(module))

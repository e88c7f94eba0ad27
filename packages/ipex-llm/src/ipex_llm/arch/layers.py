# SPDX-License-Identifier: Apache-2.0
"""Finds the decoder layers of a model that can run on their own, whatever is around them."""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any

from torch import nn

from ipex_core.module_swap.forward import FusedForward
from ipex_core.optimization.passes.cast import cast_input
from ipex_llm.arch import LayerPlan
from ipex_llm.arch.detect import MatchedLayer, MatchError, match_each
from ipex_llm.arch.detect.attention import find_attention

__all__ = ["Facts", "Found", "layer_plans", "parameter_names"]


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
    rope = plan.attention.rope
    reason = ""
    if not {"past_key_values", "past_key_value", "cache"}.intersection(names):
        reason = "its forward takes no past_key_values"
    elif not isinstance(index, int):
        reason = "its attention has no layer_idx"
    elif layer.results > 1:
        reason = "it returns more than its rows"
    elif plan.residual_after_norm or plan.attention.latent is not None:
        reason = "it ends in a norm, or caches latents"
    elif rope is not None and rope.kind in ("dynamic", "longrope"):
        reason = "its rotation depends on the length"
    elif any(map(_hooked, module.modules())):
        reason = "it, or a module in it, has hooks"
    if reason:
        return Found(layer.name, module, None, None, reason)
    assert isinstance(index, int)
    return Found(layer.name, module, plan, Facts(index, names, layer.results == 1, layer.config))


def _hooked(module: nn.Module) -> bool:
    """Return whether calling a module does more than its class says, and than `ipex_core.optimize` has made of it."""
    own = module.__dict__.get("forward")
    return bool(
        module._forward_hooks
        or any(hook is not cast_input for hook in module._forward_pre_hooks.values())
        or (own is not None and not isinstance(own, FusedForward))
    )

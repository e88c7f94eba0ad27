# SPDX-License-Identifier: Apache-2.0
"""`ipex.llm.plan`: what is decided of a model, found on a copy that shares its weights."""

from __future__ import annotations

import copy
import dataclasses
import hashlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from ipex_core.optimization.records import Record, class_name
from ipex_llm.distributed import adopt
from ipex_llm.optimization.decide import Form, decide
from ipex_llm.optimization.plan import OptimizePlan
from ipex_llm.optimization.proof import small_copy
from ipex_llm.optimization.request import Request

__all__ = ["planned"]

#: Buffers of more elements are shared with the copy; smaller ones are what a forward may change.
_SMALL = 4096


def planned(model: nn.Module, request: Request) -> OptimizePlan:
    """Return what `ipex.llm.optimize` would do with a model; the model stays as it is.

    Raises:
        TypeError: The model cannot be copied.
    """
    outline = _outline(model)
    adopt(outline)
    if request.checkpoint is None:
        return decide(outline, request).plan
    form = _checkpoint_form(outline, *request.checkpoint)
    found = decide(outline, request, form)
    if found.stack is None and any(p.is_meta for p in model.parameters()):
        return _by_small_copy(outline, request, found.plan)
    return found.plan


def _outline(model: nn.Module) -> nn.Module:
    """Return a copy of a model that shares its weights: what calling it changes is the copy."""
    tensors = [*model.parameters(), *model.buffers()]
    for module in model.modules():
        tensors += [value for value in vars(module).values() if isinstance(value, torch.Tensor)]
    shared: dict[int, Any] = {
        id(t): t for t in tensors if isinstance(t, nn.Parameter) or t.numel() > _SMALL
    }
    try:
        return copy.deepcopy(model, shared)
    except Exception as error:
        raise TypeError(
            f"plan: model must be one that copy.deepcopy can copy, got {type(model).__name__}: its weights would not"
            " be copied, but what a call may change is"
        ) from error


def _checkpoint_form(model: nn.Module, tensors: Mapping[str, torch.Tensor], scheme: Any) -> Form:
    """Return what gives the form that the weight of a linear layer has in a checkpoint, None for floats."""
    from ipex_quant.formats.schemes import scheme_of
    from ipex_quant.weight_only.replace import places_of

    forms: dict[int, object] = {}
    for name, place in places_of(model, tensors, scheme).items():
        start = f"{name}."
        parts = {k.removeprefix(start): v for k, v in tensors.items() if k.startswith(start)}
        order = parts.get("g_idx")
        exact = b"" if order is None else order.numpy().tobytes()
        kinds = sorted((k, str(v.dtype)) for k, v in parts.items() if k != "bias")
        layout = () if "woq" in parts else scheme_of("optimize", scheme, name)
        kind = parts["gguf_type"].item() if "gguf_type" in parts else None
        digest = hashlib.sha256(exact).hexdigest()
        forms[id(model.get_submodule(place))] = (layout, tuple(kinds), kind, digest)
    return lambda module: forms.get(id(module))


def _by_small_copy(model: nn.Module, request: Request, plan: OptimizePlan) -> OptimizePlan:
    """Return the plan of a model without weights, whose layers are judged by a small copy."""
    small = small_copy(model)
    if small is None:
        return plan
    bare = dataclasses.replace(
        request, checkpoint=None, quantization_config=None, kv_scales=None, parallel=None
    )
    found = decide(small, bare).plan
    layers = tuple(_real(model, found.layers))
    note = "the model has no weights yet: what is said of its layers is found on a small copy"
    if request.kv_scales is not None:
        note += "; kv_cache_scales are not looked at"
    return dataclasses.replace(
        plan,
        depth=found.depth,
        reason=found.reason,
        layers=layers,
        rest=found.rest,
        kv_cache=found.kv_cache,
        notes=(*plan.notes, note),
    )


def _real(model: nn.Module, small: tuple[Record, ...]) -> list[Record]:
    """Return what is said of the layers of a small copy for all layers of the model, the last ones as the last."""
    if not small:
        return []
    owner = small[0].module.rpartition(".")[0]
    children = list(model.get_submodule(owner).named_children())
    return [
        dataclasses.replace(
            small[min(index, len(small) - 1)], module=f"{owner}.{name}", kind=class_name(layer)
        )
        for index, (name, layer) in enumerate(children)
    ]

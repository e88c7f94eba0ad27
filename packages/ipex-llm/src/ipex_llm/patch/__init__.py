# SPDX-License-Identifier: Apache-2.0
"""Gives a model, or its layers, the programs of its plan, and takes them back."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import nn

import ipex_core
from ipex_core.module_swap.base import as_original, original_class, restore_class, swap
from ipex_core.module_swap.forward import FusedForward
from ipex_core.module_swap.state_dict import update as update_core
from ipex_core.packing.parameter import PackedWeight
from ipex_llm.arch import AttentionPlan, DecoderPlan, ExpertsPlan, MlpPlan, linear_modules
from ipex_llm.arch.detect import Found, layer_plans, parameter_names
from ipex_llm.arch.encoder_decoder import PairPlan
from ipex_llm.arch.formulas import projections
from ipex_llm.distributed import parallel_plan
from ipex_llm.model_runner import Rope, Runner
from ipex_llm.model_runner.dense import Owners, UnsupportedPlan
from ipex_llm.patch.decoder import DecoderMixin, Patch, patch_of
from ipex_llm.patch.layer import LayerMixin
from ipex_llm.records import is_sharded, record_of, update
from ipex_quant.kv_cache import KVCacheScales


def find_plan(model: nn.Module) -> tuple[DecoderPlan | None, str | None]:
    """Return the plan of a model, or the reason why there is no plan."""
    from ipex_llm.arch.detect import MatchError, check_hooks, match

    try:
        plan = match(model)
        if not is_sharded(model):
            check_hooks(plan.decoder)
        return (parallel_plan(model, plan) if is_sharded(model) else plan), None
    except MatchError as error:
        return None, str(error)


def optimize_rest(
    model: nn.Module,
    dtype: torch.dtype | None,
    layers: Sequence[Found],
    plan: DecoderPlan | PairPlan | None = None,
    fuse: bool = True,
) -> None:
    """Let `ipex_core.optimize` work on a model, but for packing the linear layers that plans pack side by side.

    Args:
        model: The model.
        dtype: That it gets.
        layers: Its layers, for plans of single ones.
        plan: The plan of the whole.
        fuse: Whether the forwards of its modules are fused, too, which a call of the plan does not run.
    """
    modules = [*linear_modules((plan, *(layer.plan for layer in layers)))]
    for module in modules:
        update_core(module, packed_later=True)
    try:
        level = "O1" if fuse else "O0"
        ipex_core.optimize(model, dtype=dtype, inplace=True, level=level, weights_prepack=True)
    finally:
        for module in modules:
            update_core(module, packed_later=None)


def can_generate(model: nn.Module) -> bool:
    """Return whether a model has the loops of transformers."""
    return hasattr(type(model), "_sample") and hasattr(type(model), "generate")


def share_random(model: nn.Module) -> None:
    """Let ``generate`` of a sharded model that has no program draw the same random numbers on each rank."""
    if can_generate(model):
        from ipex_llm.patch.generate import SameRandomMixin

        swap(model, SameRandomMixin)


def attach_decoder(
    model: nn.Module,
    plan: DecoderPlan,
    kv: torch.dtype | None,
    scales: KVCacheScales | None = None,
) -> str | None:
    """Make a model run its plan; return why it cannot."""
    decoder = plan.decoder
    try:
        runner = Runner(plan, row_dtype(plan), _shared(model), kv_scales=scales)
    except UnsupportedPlan as reason:
        return str(reason)
    from ipex_llm.patch.generate import GenerationMixin, ParallelGenerationMixin

    names = parameter_names(original_class(decoder))
    patch = Patch(*(model, attach_runner, kv, scales), stock_calls=plan.stock_calls, names=names)
    for module in {id(m): m for m in (decoder, model)}.values():
        update_core(module, undo=_undo)
        update(module, runner=runner, patch=patch)
    swap(decoder, DecoderMixin)
    if model is not decoder and can_generate(model) and plan.head is not None:
        mixin = GenerationMixin if plan.parallel is None else ParallelGenerationMixin
        swap(model, mixin)
    return None


def row_dtype(
    plan: DecoderPlan, form: Callable[[nn.Module], object] = lambda module: None
) -> torch.dtype:
    """Return the dtype of the rows of a plan.

    Args:
        plan: The plan.
        form: Returns how the weight of a linear layer will be quantized, None for floats.
    """
    first = plan.layers[0]
    block = first.mlp if first.attention is None else first.attention
    if isinstance(block, ExpertsPlan):
        output: nn.Module = block.router
    else:
        assert block is not None
        last = block.down if isinstance(block, MlpPlan) else projections(block)[1]
        if isinstance(block, AttentionPlan) and block.experts is not None:
            last = block.qkv
        output = last.modules[0]
    weight = output._parameters.get("weight") if form(output) is None else None
    if weight is None or not weight.is_floating_point():
        weight = plan.embedding._parameters["weight"]
        assert weight is not None
    return weight.dtype


def attach_layers(model: nn.Module, layers: Sequence[Found]) -> dict[str, str]:
    """Make the layers of a model that have a plan run it.

    Returns:
        Names of those that cannot, with the reason.
    """
    ropes: dict[str, Rope] = {}
    shared, dtype = _shared(model), _layer_dtype(model)
    refused = {}
    for layer in layers:
        if layer.plan is not None:
            reason = _attach_layer(model, layer, dtype, shared, ropes)
            if reason is not None:
                refused[layer.name] = reason
    return refused


def layer_alone(layer: Found) -> DecoderPlan:
    """Return the plan of a decoder that consists of one layer, which has a plan."""
    module, plan, facts = layer.module, layer.plan, layer.facts
    assert plan is not None and facts is not None
    positions = getattr(facts.config, "max_position_embeddings", None)
    return DecoderPlan(
        decoder=module,
        embedding=module,
        layers=(plan,),
        final_norm=None,
        head=None,
        hidden_size=0,
        vocab_size=0,
        max_positions=positions if isinstance(positions, int) else 2048,
    )


def _attach_layer(
    top: nn.Module,
    layer: Found,
    dtype: torch.dtype,
    shared: Mapping[int, Owners],
    ropes: dict[str, Rope],
) -> str | None:
    """Make a layer run its plan; return why it cannot."""
    module, facts = layer.module, layer.facts
    try:
        runner = Runner(layer_alone(layer), dtype, shared, ropes)
    except UnsupportedPlan as reason:
        return str(reason)
    patch = Patch(top, reattach_layer, layer=facts)
    update_core(module, undo=_undo)
    update(module, runner=runner, patch=patch)
    if isinstance(module.__dict__.get("forward"), FusedForward):
        del module.__dict__["forward"]  # it would hide the forward of the class
    if not isinstance(module, LayerMixin):
        swap(module, LayerMixin)
    return None


def _layer_dtype(model: nn.Module) -> torch.dtype:
    """Return the dtype of the rows of a model: the dtype of its token embedding."""
    return next(p.dtype for p in model.parameters() if p.is_floating_point())


def reattach_layer(layer: nn.Module) -> Runner | None:
    """Pack a layer again, and the others of its model; return None if that is not possible."""
    patch = patch_of(layer)
    if patch is not None:
        reattach_layers(patch.top)
    runner = record_of(layer).runner
    return runner if isinstance(runner, Runner) else None


def reattach_layers(top: nn.Module) -> None:
    """Pack the layers of a model again whose parameters have changed, or of a copy."""
    modules = [m for m in top.modules() if isinstance(m, LayerMixin)]
    for module in modules:
        former = record_of(module).runner
        update(module, runner=None)
        if isinstance(former, Runner):
            former.store.undo()
    with as_original(*modules):
        found = {id(layer.module): layer for layer in layer_plans(top)}
    ropes: dict[str, Rope] = {}
    shared, dtype = _shared(top), _layer_dtype(top)
    for module in modules:
        layer = found.get(id(module))
        if layer is not None and layer.plan is not None:
            _attach_layer(top, layer, dtype, shared, ropes)


def _shared(model: nn.Module) -> dict[int, Owners]:
    """Return, by id, the owners of parameters that several modules have."""
    owners: dict[int, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and not isinstance(parameter, PackedWeight):
                owners.setdefault(id(parameter), []).append((module, name))
    return {key: found for key, found in owners.items() if len(found) > 1}


def _undo(module: nn.Module) -> None:
    """Take back what `attach_decoder` did to a module; called by `ipex.restore`."""
    runner = record_of(module).runner
    if runner is not None:
        runner.store.undo()
    update_core(module, undo=None)
    update(module, runner=None, patch=None)
    restore_class(module)
    if is_sharded(module):  # still
        share_random(module)


def attach_runner(decoder: nn.Module) -> Runner | None:
    """Pack a decoder again whose parameters have changed, or a copy; return None if that is not possible."""
    patch = patch_of(decoder)
    if patch is None:
        return None
    top = patch.top
    former = record_of(decoder).runner
    update(decoder, runner=None)
    update(top, runner=None)
    if isinstance(former, Runner):
        former.store.undo()
    with as_original(decoder, top):
        plan, _ = find_plan(top)
        if plan is None or plan.decoder is not decoder:
            return None
        plan = dataclasses.replace(plan, stock_calls=patch.stock_calls)
        try:
            runner = Runner(plan, row_dtype(plan), _shared(top), kv_scales=patch.kv_scales)
        except UnsupportedPlan:
            return None
    update(decoder, runner=runner)
    update(top, runner=runner)
    return runner

# SPDX-License-Identifier: Apache-2.0
"""What programs can run of a plan: the ops of its parts and the forms of its weights, before any weight is packed."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import nn

from ipex_core.library.spec import FLOATS
from ipex_llm.arch import (
    AttentionPlan,
    DecoderPlan,
    DeltaPlan,
    ExpertsPlan,
    GatedConnectionPlan,
    LayerMeansPlan,
    LayerPlan,
    LinearPlan,
    MlpPlan,
    SelectivePlan,
    StreamEndsPlan,
    StreamsPlan,
    gated_norms,
)
from ipex_llm.arch.formulas import inner_linears, projections
from ipex_llm.model_runner.attention import check_latent, latent_of, linears_of
from ipex_llm.model_runner.dense import DIFFERENT, MIXED, UnsupportedPlan, check_packable
from ipex_llm.model_runner.experts import check_experts
from ipex_llm.model_runner.feed_forward import GATES, check_activation, check_mlp, together

Tensor = torch.Tensor

#: Activations that ``fused_experts`` computes.
_EXPERT_ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "swigluoai", "softcaps")
_UNGATED_ACTIVATIONS = ("relu2",)


def check_layer(layer: LayerPlan) -> None:
    """Raise if no op computes a part of a layer."""
    mlp = layer.mlp
    for one in (layer.side, layer.picture):
        if one is not None:
            check_mlp(one.mlp)
    if layer.token_block is not None:
        check_activation(layer.token_block.activation)
    for experts in (mlp, layer.shortcut):
        if not isinstance(experts, ExpertsPlan):
            continue
        if experts.scale_input and experts.top_k != 1:
            raise UnsupportedPlan("the weights of several experts multiply their input")
        others = experts.gate_up_bias, experts.down_bias, experts.up, experts.entry
        plain = isinstance(experts.gate_up, Tensor) and all(one is None for one in others)
        if experts.apart and (experts.zeros or not plain):
            raise UnsupportedPlan("a bound on silu of experts that are not stacked, or have biases")
        known = _EXPERT_ACTIVATIONS if experts.gated else _UNGATED_ACTIVATIONS
        if experts.activation not in known:
            raise UnsupportedPlan(f"activation {experts.activation!r} of experts")
    if isinstance(mlp, ExpertsPlan):
        mlp = mlp.shared
    if mlp is not None:
        check_mlp(mlp)


def unsupported_reason(
    plan: DecoderPlan, dtype: torch.dtype, form: Callable[[nn.Module], object]
) -> str | None:
    """Return why no program can be written for a plan, before any weight is packed; None if nothing is known.

    Args:
        plan: The plan.
        dtype: dtype that rows and weights will have.
        form: Returns how the weight of a linear layer will be quantized, None for floats; layers with one input need
            equal forms.
    """
    if dtype not in FLOATS:
        return f"weights of {dtype}"
    try:
        if plan.head_block is not None:
            check_activation(plan.head_block.activation)
        for layer in plan.layers:
            check_layer(layer)
            check_latent(layer.attention)
        for modules, gated in _groups(plan):
            check_forms(modules, gated, form)
        for experts in plan.mixtures:
            check_experts(experts, form)
    except UnsupportedPlan as error:
        return str(error)
    return None


def _groups(plan: DecoderPlan) -> Iterator[tuple[tuple[LinearPlan, ...], bool]]:
    """Yield the linear layers that are packed as one weight each, and whether they are a gate and its factor."""
    rows = None if plan.token_rows is None else plan.token_rows.projection
    ends: tuple[LinearPlan, ...] = ()
    if isinstance(plan.streams, StreamEndsPlan):
        ends = *plan.streams.first, *plan.streams.last
    elif isinstance(plan.streams, GatedConnectionPlan):
        ends = plan.streams.linears
    last = None if plan.head_block is None else plan.head_block.linear
    around = plan.embedding_projection, rows, *ends, plan.output_projection, last, plan.head
    gates = (one for norm in gated_norms(plan) for one in norm.gate or ())
    for linear in (*around, *gates):
        if linear is not None:
            yield (linear,), False
    for layer in plan.layers:
        latent, mlp = latent_of(layer.attention), layer.mlp
        for linear in () if layer.attention is None else projections(layer.attention):
            if linear.modules:
                yield (linear,), False
        yield from (((one,), False) for one in inner_linears(layer.attention))
        if isinstance(layer.attention, AttentionPlan) and layer.attention.key_bias is not None:
            yield (layer.attention.key_bias.linear,), False
        if isinstance(layer.attention, AttentionPlan) and layer.attention.apart is not None:
            apart = layer.attention.apart
            yield from (((one,), False) for one in (apart.key, apart.value))
        if isinstance(layer.attention, DeltaPlan):
            yield from (((one,), False) for one in layer.attention.up or ())
        if isinstance(layer.attention, SelectivePlan):
            yield (layer.attention.middle,), False
            yield (layer.attention.step,), False
        for linear in () if layer.beside is None else projections(layer.beside):
            yield (linear,), False
        if layer.token_block is not None:
            yield (layer.token_block.gate,), False
            yield (layer.token_block.output,), False
        if layer.low is not None:
            yield (layer.low.first,), False
            yield (layer.low.second,), False
        if isinstance(layer.streams, StreamsPlan):
            few = layer.streams
            yield from (((one,), False) for one in (few.router, few.predict, few.correct))
        for own in layer.streams if isinstance(layer.streams, tuple) else ():
            if isinstance(own, GatedConnectionPlan):
                yield from (((one,), False) for one in own.linears)
        if isinstance(layer.streams, LayerMeansPlan) and layer.streams.messages is not None:
            for gate in layer.streams.messages.gates:
                yield from (((one,), False) for one in (gate.low, gate.gates))
        if layer.ngrams is not None:
            yield from (((one,), False) for one in (layer.ngrams.key, layer.ngrams.value))
        if layer.side is not None:
            block = layer.side.mlp
            others = *projections(layer.side.attention), layer.side.output
            for linear in (*others, block.up, block.down, *(block.low or ())):
                yield (linear,), False
        if layer.picture is not None:
            yield from (((one,), False) for one in linears_of(layer.picture))
            yield from _groups_of(layer.picture.mlp)
        if latent is not None:
            yield (LinearPlan((latent.up,)),), False
            if latent.query is not None:
                yield (latent.query,), False
        dense = mlp.shared if isinstance(mlp, ExpertsPlan) else mlp
        if isinstance(mlp, ExpertsPlan) and mlp.shared_gate is not None:
            yield (LinearPlan((mlp.shared_gate,)),), False
        if isinstance(mlp, ExpertsPlan):
            yield from (((one,), False) for one in (mlp.entry, mlp.exit) if one is not None)
        if dense is not None:
            yield from _groups_of(dense)


def _groups_of(dense: MlpPlan) -> Iterator[tuple[tuple[LinearPlan, ...], bool]]:
    yield (dense.down,), False
    gated = dense.activation in GATES
    if dense.gate is not None and together(dense):
        yield (dense.gate, dense.up), True
    else:
        yield (dense.up,), dense.fused and gated
        if dense.gate is not None:
            yield (dense.gate,), False


def check_forms(
    plans: tuple[LinearPlan, ...], gated: bool, form: Callable[[nn.Module], object]
) -> None:
    """Raise if linear layers have no common packed weight."""
    modules = [module for plan in plans for module in plan.modules]
    forms = [form(module) for module in modules]
    if all(one is None for one in forms):
        check_packable(modules, multiplied=plans[0].multiplied)
    elif None in forms:
        raise UnsupportedPlan(MIXED)
    elif len(set(forms)) > 1 or (gated and any(plan.order is not None for plan in plans)):
        raise UnsupportedPlan(DIFFERENT)

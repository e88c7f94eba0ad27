# SPDX-License-Identifier: Apache-2.0
"""What programs can run of a plan: the ops of its parts and the forms of its weights, before any weight is packed."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

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
        own, block, streams = layer.attention, layer.token_block, layer.streams
        singles = [*inner_linears(own)]
        for part in (own, layer.beside):
            singles += () if part is None else projections(part)
        if isinstance(own, AttentionPlan) and own.key_bias is not None:
            singles.append(own.key_bias.linear)
        if isinstance(own, AttentionPlan) and own.apart is not None:
            singles += own.apart.key, own.apart.value
        if isinstance(own, DeltaPlan):
            singles += own.up or ()
        if isinstance(own, SelectivePlan):
            singles += own.middle, own.step
        singles += () if block is None else (block.gate, block.output)
        singles += () if layer.low is None else (layer.low.first, layer.low.second)
        if isinstance(streams, StreamsPlan):
            singles += streams.router, streams.predict, streams.correct
        for one in streams if isinstance(streams, tuple) else ():
            singles += one.linears if isinstance(one, GatedConnectionPlan) else ()
        if isinstance(streams, LayerMeansPlan) and streams.messages is not None:
            singles += (one for gate in streams.messages.gates for one in (gate.low, gate.gates))
        singles += () if layer.ngrams is None else (layer.ngrams.key, layer.ngrams.value)
        if layer.side is not None:
            inner = layer.side.mlp
            singles += *projections(layer.side.attention), layer.side.output
            singles += inner.up, inner.down, *(inner.low or ())
        if layer.picture is not None:
            singles += linears_of(layer.picture)
            yield from _groups_of(layer.picture.mlp)
        if latent is not None:
            singles += LinearPlan((latent.up,)), *(one for one in (latent.query,) if one)
        if isinstance(mlp, ExpertsPlan):
            gate = None if mlp.shared_gate is None else LinearPlan((mlp.shared_gate,))
            singles += (one for one in (gate, mlp.entry, mlp.exit) if one)
        yield from (((one,), False) for one in singles if one.modules)
        dense = mlp.shared if isinstance(mlp, ExpertsPlan) else mlp
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

# SPDX-License-Identifier: Apache-2.0
"""Packs the weights of a plan, in the forms in which programs call them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from ipex_core.library.spec import FLOATS
from ipex_core.packing.parameter import PackedWeight
from ipex_core.program import Program
from ipex_core.util.files import return_free_memory
from ipex_llm.arch.types import (
    AttentionPlan,
    DecoderPlan,
    ExpertsPlan,
    LayerPlan,
    LinearPlan,
    MlpPlan,
    NormPlan,
)
from ipex_llm.model_runner.program.latent import Latent, check_latent, pack_latent
from ipex_llm.model_runner.program.mlp import GATES, check_mlp
from ipex_llm.model_runner.program.writer import Mode, Writer
from ipex_llm.model_runner.weights.dense import (
    DIFFERENT,
    MIXED,
    Linear,
    UnsupportedPlan,
    WeightStore,
    check_packable,
)
from ipex_llm.model_runner.weights.experts import Experts, check_experts, pack_experts

__all__ = ["Emitter", "LayerWeights", "rope_key", "unsupported_reason"]

Tensor = torch.Tensor

#: Activations that ``fused_experts`` computes.
_EXPERT_ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "swigluoai")


def rope_key(attention: AttentionPlan) -> str | None:
    """Return a name that attentions with the same rotation share, or None without rotation."""
    return None if attention.rope is None else repr(attention.rope)


@dataclasses.dataclass
class LayerWeights:
    """Packed weights of one layer."""

    qkv: Linear
    output: Linear
    mlp: tuple[Linear, ...] = ()
    experts: Experts | None = None
    router: Linear | None = None
    shared_gate: Linear | None = None
    latent: Latent | None = None


class Emitter:
    """Packs the weights of a plan and writes its programs.

    Args:
        plan: The structure.
        store: Where packed weights are kept.

    Raises:
        UnsupportedPlan: The plan has a part that no op computes.
    """

    def __init__(self, plan: DecoderPlan, store: WeightStore) -> None:
        self.plan = plan
        self.store = store
        self.ropes = list(dict.fromkeys(k for p in plan.layers if (k := rope_key(p.attention))))
        temperatures = (p.attention.temperature for p in plan.layers)
        self.temperatures = list(dict.fromkeys(t for t in temperatures if t is not None))
        for layer in plan.layers:  # before anything is packed
            _check(layer)
        self.before = self._linear(plan.embedding_projection)
        self.layers = [self._pack(layer) for layer in plan.layers]
        self.after = self._linear(plan.output_projection)
        self.head = self._linear(plan.head)
        self._norms: dict[int, tuple[Tensor | None, Tensor | None]] = {}

    def _linear(self, plan: LinearPlan | None) -> Linear | None:
        return None if plan is None else self.store.linear(plan)

    def _pack(self, layer: LayerPlan) -> LayerWeights:
        store, mlp = self.store, layer.mlp
        packed = LayerWeights(
            store.linear(layer.attention.qkv), store.linear(layer.attention.output)
        )
        if layer.attention.latent is not None:
            packed.latent = pack_latent(store, layer.attention)
        if isinstance(mlp, ExpertsPlan):
            packed.router = _router(mlp, store.dtype)
            packed.experts = pack_experts(store, mlp)
            if mlp.shared is not None:
                packed.mlp = self._mlp(mlp.shared)
            if mlp.shared_gate is not None:
                packed.shared_gate = store.linear(LinearPlan((mlp.shared_gate,)))
        else:
            packed.mlp = self._mlp(mlp)
        return_free_memory()
        return packed

    def _mlp(self, mlp: MlpPlan) -> tuple[Linear, ...]:
        store = self.store
        down = store.linear(mlp.down)
        if mlp.fused:
            if mlp.activation in GATES:
                return store.fused_gate(mlp.up), down
            return store.linear(mlp.up), down
        if mlp.gate is None:
            return store.linear(mlp.up), down
        if mlp.activation in GATES:
            return store.linear(mlp.gate, mlp.up), down
        return store.linear(mlp.gate), store.linear(mlp.up), down

    # -------------------------------------------------------------------------------------------------------- programs

    def program(
        self,
        mode: Mode,
        logits: bool,
        cache_dtype: torch.dtype | None = None,
        states: bool = False,
        cache_scales: Sequence[tuple[float, float]] | None = None,
    ) -> Program:
        """Write a program.

        Its inputs are ``hidden`` [T, H] (embeddings of the tokens), ``positions`` [T], ``slots`` [T], ``tables``
        [B, M]; then ``lengths`` [B] (decode) or ``query_starts`` and ``key_starts`` [B + 1] (prefill); ``rows`` [R]
        with ``logits``; cosines and sines of each rotation; the factors on queries [T, 1, 1] of each temperature; the
        tensors of the cache layer by layer; and the integers
        ``block_size``, ``max_context`` and (prefill) ``max_query``.

        Args:
            mode: See `ipex_llm.model_runner.program`.
            logits: Return logits of ``rows`` instead of all rows after the last norm.
            cache_dtype: dtype of the cache if it is not the dtype of the rows.
            states: Return what each layer read as well (not with ``logits``).
            cache_scales: Scales of keys and values of each layer of a cache of 8-bit numbers. Without them an int8
                cache has tensors with a scale for each row.
        """
        return Writer(self, mode, logits, cache_dtype, states, cache_scales).write()

    def norm(self, plan: NormPlan) -> tuple[Tensor | None, Tensor | None]:
        """Return weight and bias of a norm."""
        key = id(plan.module)
        if key not in self._norms:
            self._norms[key] = (
                self.store.constant(plan.module, "weight", plan.weight),
                self.store.constant(plan.module, "bias", plan.bias),
            )
        return self._norms[key]


def _router(mlp: ExpertsPlan, dtype: torch.dtype) -> Linear:
    weight: Any = mlp.router._parameters.get("weight")
    if isinstance(weight, PackedWeight):  # a linear layer, which ipex_core.optimize has packed
        weight = weight.plain()
    elif weight is None:
        weight = mlp.router_weight
    weight = weight.detach().to(dtype).contiguous()
    bias = None if mlp.router_bias is None else mlp.router_bias.detach()
    packed = torch.ops.ipex.pack_linear_weight(weight)
    return Linear("linear", packed, weight.shape[0], bias)


def _check(layer: LayerPlan) -> None:
    """Raise if no op computes a part of a layer."""
    mlp: MlpPlan | ExpertsPlan | None = layer.mlp
    if isinstance(mlp, ExpertsPlan):
        if mlp.scale_input and mlp.top_k != 1:
            raise UnsupportedPlan("the weights of several experts multiply their input")
        if mlp.activation not in _EXPERT_ACTIVATIONS:
            raise UnsupportedPlan(f"activation {mlp.activation!r} of experts")
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
        for layer in plan.layers:
            _check(layer)
            if layer.attention.latent is not None:
                check_latent(layer.attention)
        for modules, gated in _groups(plan):
            _check_forms(modules, gated, form)
        for layer in plan.layers:
            if isinstance(layer.mlp, ExpertsPlan):
                check_experts(layer.mlp, form)
    except UnsupportedPlan as error:
        return str(error)
    return None


def _groups(plan: DecoderPlan) -> Iterator[tuple[tuple[LinearPlan, ...], bool]]:
    """Yield the linear layers that are packed as one weight each, and whether they are a gate and its factor."""
    for linear in (plan.embedding_projection, plan.output_projection, plan.head):
        if linear is not None:
            yield (linear,), False
    for layer in plan.layers:
        attention, mlp = layer.attention, layer.mlp
        yield (attention.qkv,), False
        yield (attention.output,), False
        if attention.latent is not None:
            yield (LinearPlan((attention.latent.up,)),), False
            if attention.latent.query is not None:
                yield (attention.latent.query,), False
        block = mlp.shared if isinstance(mlp, ExpertsPlan) else mlp
        if isinstance(mlp, ExpertsPlan) and mlp.shared_gate is not None:
            yield (LinearPlan((mlp.shared_gate,)),), False
        if block is None:
            continue
        yield (block.down,), False
        gated = block.activation in GATES
        if block.gate is not None and gated:
            yield (block.gate, block.up), True
        else:
            yield (block.up,), block.fused and gated
            if block.gate is not None:
                yield (block.gate,), False


def _check_forms(
    plans: tuple[LinearPlan, ...], gated: bool, form: Callable[[nn.Module], object]
) -> None:
    """Raise if linear layers have no common packed weight."""
    modules = [module for plan in plans for module in plan.modules]
    forms = [form(module) for module in modules]
    if all(one is None for one in forms):
        check_packable(modules)
    elif None in forms:
        raise UnsupportedPlan(MIXED)
    elif len(set(forms)) > 1 or (gated and any(plan.order is not None for plan in plans)):
        raise UnsupportedPlan(DIFFERENT)

# SPDX-License-Identifier: Apache-2.0
"""A decoder layer: which norm stands where, and how the blocks are added, by what flowed between them."""

from __future__ import annotations

import dataclasses

import torch
from torch import nn

from ipex_llm.arch.detect.attention import find_attention, match_attention
from ipex_llm.arch.detect.experts import is_mixture, match_experts
from ipex_llm.arch.detect.latent import is_latent, match_latent
from ipex_llm.arch.detect.mlp import match_mlp
from ipex_llm.arch.detect.norm import match_norm
from ipex_llm.arch.detect.trace import Config, Trace, distance, is_linear, is_norm, same
from ipex_llm.arch.types import AttentionPlan, ExpertsPlan, LayerPlan, MlpPlan, NormPlan

__all__ = ["Layer", "match_layer"]

Tensor = torch.Tensor

MLP_NAMES = ("mlp", "feed_forward", "block_sparse_moe", "ffn", "moe", "feedforward")


@dataclasses.dataclass
class Layer:
    """The plan of a layer, and the norm of the sum at its end if it has one (post-norm decoders)."""

    plan: LayerPlan
    last_norm: NormPlan | None = None


@dataclasses.dataclass
class _Flow:
    """Norms of a layer and the tensors between its parts."""

    trace: Trace
    norms: list[nn.Module]
    h: Tensor  # what the layer reads
    y: Tensor  # what it gives
    attention: Tensor  # what its attention gives, after a norm of that
    mlp: Tensor  # what its mlp gives, after a norm of that
    mlp_in: Tensor
    input_norm: nn.Module | None = None
    mlp_norm: nn.Module | None = None

    def giving(self, x: Tensor) -> nn.Module | None:
        """Return the norm that gave `x`."""
        return next((n for n in self.norms if same(self.trace.outputs[n], x)), None)

    def reading(self, x: Tensor) -> nn.Module | None:
        """Return the norm that read `x`."""
        return next((n for n in self.norms if same(self.trace.inputs[n], x)), None)

    def plan(self, norm: nn.Module | None) -> NormPlan | None:
        return None if norm is None else match_norm(self.trace, norm)


def _feed_forward(
    trace: Trace, config: Config, layer: nn.Module
) -> tuple[MlpPlan | ExpertsPlan, Tensor, Tensor]:
    """Return the plan of the second block, what it read and what it gave (before anything is added)."""
    for name in MLP_NAMES:
        block = getattr(layer, name, None)
        if not isinstance(block, nn.Module):
            continue
        if is_mixture(block):
            return match_experts(trace, config, block), trace.input(block), trace.output(block)
        plan = match_mlp(trace, block)
        return plan, trace.input(plan.up.modules[0]), trace.output(plan.down.modules[0])
    parts = [(n, m) for n, m in layer.named_children() if is_linear(m) and trace.ran(m)]
    if not parts:
        children = ", ".join(name for name, _ in layer.named_children())
        raise trace.error(layer, f"has no mlp among its parts ({children})")
    plan = match_mlp(trace, layer, parts)
    return plan, trace.input(plan.up.modules[0]), trace.output(plan.down.modules[0])


def _factor(total: Tensor, residual: Tensor, added: Tensor) -> float | None:
    """Return s of ``total = residual + s * added``, or None if the sum has another form."""
    rest = (total.float() - residual.float()).double()
    part = added.double()
    scale = float((rest * part).sum() / part.square().sum().clamp_min(1e-30))
    limit = 1e-4 if total.dtype == torch.float32 else 2e-2
    if abs(scale) < 1e-3 or distance(residual.double() + scale * part, total.double()) > limit:
        return None
    close = 1e-4 if total.dtype == torch.float32 else 2e-2
    return 1.0 if abs(scale - 1.0) < close else scale


def match_layer(
    trace: Trace,
    config: Config,
    decoder: nn.Module,
    layer: nn.Module,
    index: int,
    hint: list[AttentionPlan],
) -> Layer:
    """Return the plan of one layer.

    Raises:
        MatchError: A part is not understood.
    """
    if not trace.ran(layer):
        children = ", ".join(name for name, _ in layer.named_children())
        raise trace.error(layer, f"does not run on text alone (its parts: {children})")
    module = find_attention(layer)
    if module is None:
        children = ", ".join(name for name, _ in layer.named_children())
        raise trace.error(layer, f"has no self attention among its parts ({children})")
    if is_latent(module):
        attention = match_latent(trace, config, decoder, module, index)
    else:
        attention = match_attention(trace, config, decoder, module, index, hint)
    mlp, mlp_in, mlp_out = _feed_forward(trace, config, layer)
    norms = [m for m in layer.children() if is_norm(m) and trace.ran(m)]
    attention_in = trace.input(attention.qkv.modules[0])
    attention_out = trace.output(attention.output.modules[0])
    flow = _Flow(
        trace, norms, trace.input(layer), trace.output(layer), attention_out, mlp_out, mlp_in
    )
    flow.mlp_norm = flow.giving(mlp_in)
    if not same(attention_in, flow.h):
        flow.input_norm = flow.giving(attention_in)
        if flow.input_norm is None or not same(trace.inputs[flow.input_norm], flow.h):
            raise trace.error(module, "reads neither the layer's input nor a norm of it")
    after_attention, after_mlp = flow.reading(attention_out), flow.reading(mlp_out)
    if after_attention is not None:
        flow.attention = trace.output(after_attention)
    if after_mlp is not None:
        flow.mlp = trace.output(after_mlp)
    plan = LayerPlan(
        layer,
        attention,
        mlp,
        flow.plan(flow.input_norm),
        None,
        post_attention_norm=flow.plan(after_attention),
        post_mlp_norm=flow.plan(after_mlp),
    )
    found = _parallel(flow, plan) or _sequential(flow, plan)
    if found is None:
        raise trace.error(layer, "adds its blocks in a way that is not understood")
    used = [flow.input_norm, flow.mlp_norm, after_attention, after_mlp]
    spare = [n for n in norms if not any(n is u for u in used)]
    if spare and found.last_norm is None:
        raise trace.error(spare[0], "is a norm at a place that is not understood")
    return found


def _parallel(flow: _Flow, plan: LayerPlan) -> Layer | None:
    if flow.mlp_norm is None:
        if not same(flow.mlp_in, flow.h) or flow.input_norm is not None:
            return None
    elif not same(flow.trace.inputs[flow.mlp_norm], flow.h):
        return None
    scale = _factor(flow.y, flow.h, flow.attention.float() + flow.mlp.float())
    if scale is None:
        return None
    own = None if flow.mlp_norm is flow.input_norm else flow.plan(flow.mlp_norm)
    return Layer(dataclasses.replace(plan, mlp_norm=own, parallel=True, residual_scale=scale))


def _sequential(flow: _Flow, plan: LayerPlan) -> Layer | None:
    norm = flow.mlp_norm
    middle = flow.mlp_in if norm is None else flow.trace.input(norm)
    plan = dataclasses.replace(plan, mlp_norm=flow.plan(norm))
    scale = _factor(middle, flow.h, flow.attention)
    if scale is not None:
        last = _factor(flow.y, middle, flow.mlp)
        if last is not None and abs(last - scale) < 1e-2:
            return Layer(dataclasses.replace(plan, residual_scale=scale))
    # The residual is what the norm gave.
    start = flow.h if flow.input_norm is None else flow.trace.output(flow.input_norm)
    scale = _factor(middle, start, flow.attention)
    last_norm = flow.giving(flow.y)
    total = flow.y if last_norm is None else flow.trace.input(last_norm)
    last = _factor(total, flow.mlp_in, flow.mlp)
    if scale is None or last is None or norm is None or abs(last - scale) > 1e-2:
        return None
    if (flow.input_norm is None) != (last_norm is not None):
        return None  # a chain that has both, or neither
    plan = dataclasses.replace(plan, residual_scale=scale, residual_after_norm=True)
    return Layer(plan, flow.plan(last_norm))

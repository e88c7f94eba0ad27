# SPDX-License-Identifier: Apache-2.0
"""`optimize` for the device xpu.

A decoder runs as programs, whose instructions are ops of the device. Other models run layer by layer, with fused ops in
the place of their norms and gated MLPs.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import ipex_core
from ipex_core.errors import OpArgumentError
from ipex_core.module_swap.state_dict import update as update_core
from ipex_core.optimization.records import Log, Options, log_of
from ipex_llm.arch import AttentionPlan, DecoderPlan, MlpPlan, NormPlan
from ipex_llm.distributed.divide import adopt, divide
from ipex_llm.distributed.group import ShardedModule, uncovered
from ipex_llm.kv_cache.device import quantize_cache, shapes_of
from ipex_llm.model_runner.woq_model import choose, quantize
from ipex_llm.optimization.decide import decide, grains_of
from ipex_llm.optimization.request import Request
from ipex_llm.patch import attach_decoder, find_plan, share_random
from ipex_llm.records import is_sharded

logger = logging.getLogger("ipex.llm")


def optimize_on_xpu(
    model: nn.Module,
    request: Request,
    load: Callable[[nn.Module, Request], None],
    quantize_static: Callable[[nn.Module, Request, list[Any]], tuple[nn.Module, list[Any]]],
) -> nn.Module:
    """Return the model on the device, changed in place.

    Args:
        model: The model.
        request: What was asked for.
        load: Puts the checkpoint of the request into the model.
        quantize_static: Makes the model INT8.
    """
    dtype, device = request.dtype, request.device
    config = request.weight_config
    if log_of(model) is not None:
        ipex_core.restore(model)  # the arguments may be others now
    # What is decided, divided and quantized is on the host.
    model.to("cpu")
    adopt(model)
    early = request.checkpoint is None and request.parallel is None and not request.static
    decision = decide(model, request) if early and request.depth == 3 else None
    if request.kv is not None and (decision is None or decision.stack is None):
        # Raises before anything is changed.
        _scales(request, len(shapes_of(*_plan(model, request))))
    if request.static:
        if request.summary is None:
            return model  # to be calibrated
        model = quantize_static(model, request, [])[0]
    elif request.checkpoint is not None:
        load(model, request)
    elif request.parallel is not None:
        divide(model, request.parallel, grains=grains_of(config))
    if decision is None and request.depth == 3:
        decision = decide(model, request)
    stack = None if decision is None else decision.stack
    plan, reason = (stack, None) if stack is not None else _plan(model, request)
    if config is not None:
        with uncovered(model):
            plan, _ = quantize(model, plan, choose(model, plan, config))
    if dtype is not None and dtype != torch.float32:
        model.to(dtype)
    model.to(device)
    if decision is not None:
        problem = decision.plan.reason
        if stack is not None and plan is not None:
            problem = attach_decoder(model, plan, request.kv, decision.kv_scales)
        if problem is None:
            log = Log(Options(dtype=dtype, level="O1", channels_last=False))
            log.add("", model, "llm", True, decision.plan.summary, "torch.ops.ipex of the device")
            update_core(model, log=log)
            return model
        logger.info("optimize: %s on %s: layer by layer: %s", type(model).__name__, device, problem)
    if request.kv is not None:
        shapes = shapes_of(plan, reason)
        quantize_cache(model, shapes, request.kv, _scales(request, len(shapes)))
    if plan is None:
        logger.info("optimize: %s runs as it is on %s: %s", type(model).__name__, device, reason)
        return model
    if is_sharded(model):
        share_random(model)
    parents = {id(child): parent for parent in model.modules() for child in parent.children()}
    norms = [plan.final_norm, plan.embedding_norm]
    for layer in plan.layers:
        norms += [
            layer.input_norm,
            layer.mlp_norm,
            layer.post_attention_norm,
            layer.post_mlp_norm,
        ]
        if isinstance(layer.attention, AttentionPlan):
            norms += [layer.attention.query_norm, layer.attention.key_norm]
            norms.append(layer.attention.value_norm)
        if isinstance(layer.mlp, MlpPlan):
            _fuse_mlp(layer.mlp, parents)
    for norm in norms:
        if norm is not None and norm.kind == "rms" and norm.weight is not None:
            _fuse_norm(norm)
    return model


def _plan(model: nn.Module, request: Request) -> tuple[DecoderPlan | None, str | None]:
    """Return the plan of a model, or why it runs as it is."""
    return (None, "it is static INT8") if request.static else find_plan(model)


def _scales(request: Request, layers: int) -> tuple[tuple[float, float], ...] | None:
    """Return the scales of a quantized cache, which are for each layer."""
    scales = request.kv_scales
    if scales is None or request.kv is None:
        return None
    if len(scales.keys) != layers:
        raise OpArgumentError(
            f"optimize: kv_cache_scales must have scales of {layers} layers, got {len(scales.keys)}"
        )
    return scales.of(request.kv)


def _fuse_norm(plan: NormPlan) -> None:
    module, offset, eps = plan.module, plan.offset, plan.eps
    weight = plan.weight
    if weight is None or weight.dim() != 1 or plan.bias is not None:
        return

    def forward(hidden_states: torch.Tensor) -> torch.Tensor:
        current: Any = module._parameters["weight"]
        scaled = current + offset if offset else current
        normed: torch.Tensor = torch.ops.ipex.rms_norm(
            hidden_states, scaled.to(hidden_states.dtype), eps
        )
        return normed

    # Of this module, not of its class: the user's other models stay as they are.
    module.forward = forward


def _with_sum(parent: nn.Module | None, module: nn.Module) -> nn.Module:
    return parent if isinstance(parent, ShardedModule) else module


def _fuse_mlp(plan: MlpPlan, parents: dict[int, nn.Module]) -> None:
    if plan.gate is None or plan.fused or plan.activation != "silu":
        return
    parts = [*plan.gate.modules, *plan.up.modules, *plan.down.modules]
    # Of a model that is divided, the sum over the ranks.
    parts = [_with_sum(parents.get(id(part)), part) for part in parts]
    if len(parts) != 3 or plan.gate.transposed or len({id(parents.get(id(p))) for p in parts}) != 1:
        return
    gate, up, down = parts
    parent = parents[id(gate)]

    def forward(hidden_states: torch.Tensor) -> Any:
        return down(torch.ops.ipex.silu_mul(gate(hidden_states), up(hidden_states)))

    parent.forward = forward

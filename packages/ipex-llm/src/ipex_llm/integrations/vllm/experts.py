# SPDX-License-Identifier: Apache-2.0
"""Float experts of vLLM's mixtures of experts on ``ipex::fused_experts``, and their choice by ``ipex::moe_routing``."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ipex_core.util import return_free_memory

_ORACLE = "vllm.model_executor.layers.fused_moe.oracle.unquantized"
_CPU_EXPERTS = "vllm.model_executor.layers.fused_moe.experts.cpu_moe"
_ROUTER = "vllm.model_executor.layers.fused_moe.router.cpu_router"


def register_experts() -> tuple[str, ...]:
    """Put our experts before vLLM's in its choice for the CPU, which has no registry; calling it again does nothing.

    Returns:
        The name of the function that chooses.
    """
    oracle: Any = importlib.import_module(_ORACLE)
    stock = oracle.backend_to_kernel_cls
    cpu = oracle.UnquantizedMoeBackend.CPU
    if not getattr(stock, "_ipex", False):
        kernel = expert_class(importlib.import_module(_CPU_EXPERTS).CPUUnquantizedExperts)

        @functools.wraps(stock)
        def choose(backend: Any) -> list[Any]:
            return [kernel] if backend == cpu else list(stock(backend))

        choose._ipex = True  # type: ignore[attr-defined]
        oracle.backend_to_kernel_cls = choose
    return ("experts",)


def register_routing() -> tuple[str, ...]:
    """Let vLLM's router for CPUs choose experts by one op, in float32; rules of models' own and DeepSeek V4's stay.

    Returns:
        The names of the functions that are replaced.
    """
    router: Any = importlib.import_module(_ROUTER)
    ours = {"_softmax_topk": _softmax_topk, "_grouped_topk": _grouped_topk}
    for name in ours:
        getattr(router, name)  # both, or none
    vars(router).update(ours)
    return tuple(ours)


def _softmax_topk(router_logits: Tensor, top_k: int, renormalize: bool) -> tuple[Tensor, Tensor]:
    """Return weights, float32, and experts, int32, ``[T, top_k]``, as vLLM's function of this name."""
    weights, ids = torch.ops.ipex.moe_routing(router_logits, top_k, renormalize)
    return weights, ids


def _grouped_topk(
    gating_output: Tensor,
    topk: int,
    renormalize: bool,
    num_expert_group: int,
    topk_group: int,
    scoring_func: str,
    routed_scaling_factor: float,
    e_score_correction_bias: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Return the same of the best groups of experts, as vLLM's function of this name."""
    bias = e_score_correction_bias
    weights, ids = torch.ops.ipex.moe_routing(
        *(gating_output, topk, renormalize, scoring_func, num_expert_group, topk_group),
        *(None if bias is None else bias.float(), routed_scaling_factor),
    )
    return weights, ids


def expert_class(base: type) -> type:
    """Return vLLM's class of experts on the CPU with the weights and the product of ipex."""
    members: dict[str, Callable[..., Any]] = {
        "_supports_grouped_gemm": classmethod(_supports),  # type: ignore[dict-item]
        "process_weights_after_loading": _pack,
        "apply": apply_method(_parts),
    }
    return type("IpexExperts", (base,), members)


def _supports(cls: type, moe_config: Any) -> tuple[bool, str | None]:
    """Return that experts of any size fit."""
    del cls, moe_config
    return True, None


def interleaved(activation: Any) -> bool:
    """Return whether rows of gates and of the up projection take turns in ``w13``, as in checkpoints of gpt-oss."""
    return getattr(activation, "value", activation) == "swigluoai"


def halves(rows: Tensor, interleaved: bool) -> Tensor:
    """Return ``[E, 2 I, ...]`` with all gates before all up projections."""
    if not interleaved:
        return rows
    return torch.cat([rows[:, 0::2], rows[:, 1::2]], dim=1)


def _swiglu_options(config: Any) -> dict[str, float]:
    """Return the arguments of the op for the clamped SwiGLU, from vLLM's description of a layer's numbers."""
    found = {
        "swiglu_alpha": getattr(config, "gemm1_alpha", None),
        "swiglu_limit": getattr(config, "gemm1_clamp_limit", None),
    }
    return {name: value for name, value in found.items() if isinstance(value, float)}


def _pack(self: Any, layer: Any) -> None:
    """Pack the weights of all experts and free the plain ones; vLLM reads the shapes of what is left in their place."""
    turns = interleaved(self.moe_config.activation)
    self.intermediate = layer.w2_weight.shape[2]
    first = halves(layer.w13_weight.data, turns)
    self.packed = (
        torch.ops.ipex.pack_moe_weight(first, True),
        torch.ops.ipex.pack_moe_weight(layer.w2_weight.data),
    )
    bias = self.w1_bias
    self.bias = None if bias is None else halves(bias.data, turns).contiguous(), self.w2_bias
    for name in ("w13_weight", "w2_weight"):
        weight = getattr(layer, name)
        empty = weight.new_empty(*weight.shape[:2], 0)
        setattr(layer, name, torch.nn.Parameter(empty, requires_grad=False))
    return_free_memory()  # of the layers before


def apply_method(parts: Callable[[Any, Tensor, Tensor], tuple[Any, ...]]) -> Callable[..., None]:
    """Return the method ``apply`` of vLLM's experts: it writes the sum over the chosen experts of each token.

    Args:
        parts: Called with the experts and vLLM's two weights; returns the packed weights, the intermediate size and
            the two biases as ``ipex::fused_experts`` takes them.
    """

    def apply(
        self: Any,
        output: Tensor,
        hidden_states: Tensor,
        w1: Tensor,
        w2: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        activation: Any,
        global_num_experts: int,
        expert_map: Tensor | None,
        a1q_scale: Tensor | None,
        a2_scale: Tensor | None,
        workspace13: Tensor,
        workspace2: Tensor,
        expert_tokens_meta: Any,
        apply_router_weight_on_input: bool,
    ) -> None:
        del global_num_experts, a1q_scale, a2_scale, workspace13, workspace2, expert_tokens_meta
        if expert_map is not None:
            # Experts of other ranks are -1, which the op skips.
            topk_ids = expert_map[topk_ids.long()]
        if apply_router_weight_on_input:
            topk_weights = torch.ones_like(topk_weights)
        w13, w2, intermediate, *biases = parts(self, w1, w2)
        result = torch.ops.ipex.fused_experts(
            hidden_states,
            w13,
            w2,
            topk_weights,
            topk_ids,
            intermediate,
            activation.value,
            *biases,
            **_swiglu_options(self.quant_config),
        )
        output.copy_(result)

    return apply


def _parts(self: Any, w1: Tensor, w2: Tensor) -> tuple[Any, ...]:
    del w1, w2  # what is left in their place
    return (*self.packed, self.intermediate, *self.bias)

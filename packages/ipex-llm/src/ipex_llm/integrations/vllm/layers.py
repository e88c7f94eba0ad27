# SPDX-License-Identifier: Apache-2.0
"""Norms and activations of vLLM's models: our ops in its two registries.

The registry of classes takes subclasses of its layers, which run where vLLM switches its custom ops on. The registry of
implementations (``vllm.ir``) takes functions, which its priorities choose.
"""

from __future__ import annotations

import importlib
import logging
from typing import Any

import torch
from torch import Tensor

_log = logging.getLogger("ipex")

#: Class in vLLM -> module that has it.
OPS = {
    "RMSNorm": "vllm.model_executor.layers.layernorm",
    "GemmaRMSNorm": "vllm.model_executor.layers.layernorm",
    "SiluAndMul": "vllm.model_executor.layers.activation",
    "GeluAndMul": "vllm.model_executor.layers.activation",
    "QuickGELU": "vllm.model_executor.layers.activation",
}

#: Name of the ipex implementations in ``vllm.ir.ops``.
PROVIDER = "ipex"


def register_custom_ops() -> tuple[str, ...]:
    """Put our ops into vLLM's registry of layers from outside its tree; calling it again does nothing.

    Returns:
        The names of the layers that vLLM runs with ipex now. Layers that this version of vLLM does not have, or that
        another plug-in has taken, are left alone, and the log says so.
    """
    registry = importlib.import_module("vllm.model_executor.custom_op")
    base = registry.CustomOp
    # A table of the class in some versions, of the module in others.
    taken = getattr(registry, "op_registry_oot", None)
    taken = getattr(base, "op_registry_oot", taken)
    if not hasattr(base, "register_oot") or taken is None:
        raise AttributeError(
            "vllm.model_executor.custom_op must have register_oot, got a CustomOp without it: use a supported vLLM"
        )
    done = []
    for name, module in OPS.items():
        stock = getattr(importlib.import_module(module), name, None)
        present = taken.get(name)
        if present is not None and getattr(present, "_ipex", False):
            done.append(name)
        elif stock is None or present is not None:
            _log.info("vLLM plug-in: %s stays as it is", name)
        else:
            replacement = _replacement(name, stock)
            base.register_oot(replacement, name=name)
            # Not the name of the class, which it has now: `custom_ops` of vLLM's configuration names ops otherwise.
            replacement.name = getattr(stock, "name", name)
            done.append(name)
    return tuple(done)


def register_implementations() -> tuple[str, ...]:
    """Offer norms as implementations of ``vllm.ir.ops``, which ``--ir-op-priority`` chooses from.

    Returns:
        The names of the ops that have an implementation of ipex now.
    """
    try:
        ops = importlib.import_module("vllm.ir").ops
    except (ImportError, AttributeError):  # of a version without
        return ()
    done = []
    for name, implementation, supports in (
        ("rms_norm", _ir_rms_norm, _takes_rms_norm),
        ("fused_add_rms_norm", _ir_fused_add_rms_norm, _takes_fused_add_rms_norm),
    ):
        op = getattr(ops, name, None)
        if op is None:
            continue
        try:
            if PROVIDER not in op.impls:
                op.register_impl(PROVIDER, supports_args=supports)(implementation)
            done.append(f"ir.{name}")
        except ValueError as error:  # of another signature in this version
            _log.info("vLLM plug-in: vllm.ir.ops.%s stays as it is: %s", name, error)
    return tuple(done)


def _ir_rms_norm(
    x: torch.Tensor, weight: torch.Tensor | None, epsilon: float, variance_size: int | None = None
) -> torch.Tensor:
    result: Tensor = torch.ops.ipex.rms_norm(x, weight, epsilon)
    return result


def _takes_rms_norm(
    x: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None
) -> bool:
    same = weight is None or weight.dtype == x.dtype
    return variance_size is None and same and x.device.type == "cpu"


def _ir_fused_add_rms_norm(
    x: torch.Tensor,
    x_residual: torch.Tensor,
    weight: torch.Tensor | None,
    epsilon: float,
    variance_size: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    normed, total = torch.ops.ipex.add_rms_norm(x, x_residual, weight, epsilon)
    return normed, total


def _takes_fused_add_rms_norm(
    x: Tensor,
    x_residual: Tensor,
    weight: Tensor | None,
    epsilon: float,
    variance_size: int | None = None,
) -> bool:
    return x_residual.dtype == x.dtype and _takes_rms_norm(x, weight, epsilon, variance_size)


def _replacement(name: str, stock: Any) -> Any:
    """Return a subclass of vLLM's class whose forward on the CPU is our op."""
    forward = {
        "RMSNorm": _rms_norm,
        "GemmaRMSNorm": _gemma_rms_norm,
        "SiluAndMul": _silu_and_mul,
        "GeluAndMul": _gelu_and_mul,
        "QuickGELU": _quick_gelu,
    }[name]
    return type(f"Ipex{name}", (stock,), {"forward_cpu": forward, "_ipex": True})


def _norm(
    self: Any, x: Tensor, residual: Tensor | None, weight: Tensor | None, offset: float
) -> Any:
    if residual is None:
        return torch.ops.ipex.rms_norm(x, weight, self.variance_epsilon, offset)
    return torch.ops.ipex.add_rms_norm(x, residual, weight, self.variance_epsilon, offset)


def _rms_norm(
    self: Any, x: Tensor, residual: Tensor | None = None, *args: Any, **kwargs: Any
) -> Any:
    # A norm over a part of the row, or in another dtype than its weight, is not what our op computes.
    weight = self.weight if getattr(self, "has_weight", True) else None
    partial = getattr(self, "variance_size_override", None) is not None
    mixed = weight is not None and weight.dtype != x.dtype
    if partial or mixed or args or kwargs:
        return self.forward_native(x, residual, *args, **kwargs)
    return _norm(self, x, residual, weight, 0.0)


def _gemma_rms_norm(self: Any, x: Tensor, residual: Tensor | None = None) -> Any:
    weight = self.weight
    if weight.dtype != x.dtype:
        return self.forward_native(x, residual)
    return _norm(self, x, residual, weight, 1.0)


def _silu_and_mul(self: Any, x: Tensor) -> Tensor:
    del self
    result: Tensor = torch.ops.ipex.silu_and_mul(x)
    return result


def _gelu_and_mul(self: Any, x: Tensor) -> Tensor:
    result: Tensor = torch.ops.ipex.gelu_and_mul(x, getattr(self, "approximate", "none"))
    return result


def _quick_gelu(self: Any, x: Tensor) -> Tensor:
    del self
    result: Tensor = torch.ops.ipex.gelu_quick(x)
    return result

# SPDX-License-Identifier: Apache-2.0
"""Turning a single stock linear layer into an optimized one, outside of `ipex.optimize`."""

from __future__ import annotations

import threading

import torch
from torch import nn

from ipex_core.kernels.policy import has_kernel
from ipex_core.module_swap.base import has_hooks
from ipex_core.module_swap.state_dict import attach, realize, state_of, swap_class
from ipex_core.nn.linear import OptimizedLinear
from ipex_core.packing import onednn
from ipex_core.packing.dense import FORMATS

__all__ = ["lower_linear"]

_lock = threading.Lock()


def lower_linear(module: nn.Module) -> bool:
    """Pack the weight of a linear layer for this CPU, in place, and return whether it is packed now.

    The layer stays the same object, an ``nn.Linear``, with the same state dict; its class becomes `OptimizedLinear`, as
    `ipex.optimize` does it. Layers that compute something of their own (subclasses, parametrizations, hooks), layers on
    other devices and those in training mode stay as they are.

    Args:
        module: Any module.
    """
    if not _may_lower(module):
        return isinstance(module, OptimizedLinear) and module._packed is not None
    with _lock:
        if _may_lower(module):
            assert isinstance(module, nn.Linear)
            own = has_kernel("linear")
            swap_class(module, OptimizedLinear)
            state = attach(module)
            state.packing = "ipex" if own else "mkldnn"
            state.kernel_op = "linear" if own else None
            realize(module)
    return isinstance(module, OptimizedLinear) and module._packed is not None


def _may_lower(module: nn.Module) -> bool:
    if type(module) is not nn.Linear or module.training or has_hooks(module):
        return False
    if state_of(module) is not None or "weight" not in module._parameters:
        return False
    weight = module._parameters["weight"]
    if type(weight) is not nn.Parameter or weight.device.type != "cpu" or weight.numel() == 0:
        return False
    bias = module._parameters.get("bias", module)
    if bias is not None and type(bias) is not nn.Parameter:
        return False
    dtype: torch.dtype = weight.dtype
    if bias is not None and bias.dtype not in (dtype, torch.float32):
        return False
    return dtype in FORMATS and (has_kernel("linear") or onednn.supports(dtype))

# SPDX-License-Identifier: Apache-2.0
"""Calls of our ops from optimized layers."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["below_autograd", "call", "stock_only"]

below_autograd: Any = torch._C._AutoDispatchBelowAutograd


def call(op: Any, *args: Any) -> Any:
    """Call an op; where gradients are off, below autograd.

    The autograd kernel of an op is Python and costs some 3 us even when it has nothing to do, as much as a small kernel
    itself. Under ``torch.inference_mode`` torch leaves it out; this does the same under ``torch.no_grad``.
    """
    if torch.compiler.is_compiling() or (
        torch.is_grad_enabled() and torch._C._get_tracing_state() is None
    ):
        return op(*args)
    with below_autograd():
        return op(*args)


def stock_only(x: torch.Tensor) -> bool:
    """Return whether only the stock ops can take a tensor: nested tensors, and all under ``torch.func`` transforms."""
    if x.is_nested:
        return True
    return not torch.compiler.is_compiling() and _transforms()


_transforms: Any = torch._C._are_functorch_transforms_active

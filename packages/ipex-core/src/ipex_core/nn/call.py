# SPDX-License-Identifier: Apache-2.0
"""Calls of our ops from optimized layers."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd import forward_ad

__all__ = ["below_autograd", "call", "check_recorded", "stock_only", "transformed"]

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
    """Return whether only the stock ops can take a tensor: nested tensors, and all under `transformed`.

    True for a stand-in of torch.fx, too.
    """
    return x.is_nested is not False or transformed()


def transformed() -> bool:
    """Return whether ``torch.func`` transforms or forward differentiation follow each operation."""
    if torch.compiler.is_compiling():
        return False
    return _transforms() or forward_ad._current_level >= 0


_transforms: Any = torch._C._are_functorch_transforms_active


def check_recorded(name: str) -> None:
    """Raise for a transform of ``torch.func`` around what only an ordinary backward pass can differentiate."""
    if not torch.compiler.is_compiling() and _transforms():
        raise NotImplementedError(
            f"{name}: torch.func cannot differentiate it: use backward(), or torch.nn.EmbeddingBag"
        )

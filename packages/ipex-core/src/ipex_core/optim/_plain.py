# SPDX-License-Identifier: Apache-2.0
"""What the optimizers of this package share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ipex_core.optim._steps import step_of

__all__ = ["check_numbers", "plain_step"]


def check_numbers(name: str, **values: float) -> None:
    """Raise ValueError for a negative hyperparameter."""
    for key, value in values.items():
        if not value >= 0.0:
            raise ValueError(f"{name}: {key} must not be negative, got {value}")


def plain_step(optimizer: torch.optim.Optimizer, closure: Callable[[], float] | None) -> Any:
    """Run the fused op of an optimizer for each of its float32 parameters.

    Other dtypes are updated through a float32 copy, float64 through the same arithmetic in float32.
    """
    loss = None
    if closure is not None:
        with torch.enable_grad():
            loss = closure()
    step = step_of(optimizer)
    assert step is not None
    for group in optimizer.param_groups:
        for param in group["params"]:
            grad = param.grad
            if grad is None:
                continue
            if grad.is_sparse:
                raise RuntimeError(
                    f"{type(optimizer).__name__}: gradients must be dense, got a sparse one"
                )
            if param.dtype == torch.float32:
                step(group, optimizer.state[param], param, grad, None)
            else:
                wide = param.float()
                step(group, optimizer.state[param], wide, grad.float(), None)
                param.copy_(wide)
    return loss

# SPDX-License-Identifier: Apache-2.0
"""Steps in stock operations: of float64 parameters, and of those that are spread over processes (FSDP2).

Norms are computed over the whole tensor.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from ipex_core.ops.optim import with_momentum


def is_spread(value: Tensor) -> bool:
    """Return whether a tensor is a part of one that several processes have."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(value, module.DTensor)


def is_wrapped(module: torch.nn.Module) -> bool:
    """Return whether a module is a `torch.distributed.fsdp.FullyShardedDataParallel`."""
    known = sys.modules.get("torch.distributed.fsdp")
    return known is not None and isinstance(module, known.FullyShardedDataParallel)


def any_spread(values: Iterable[Tensor]) -> bool:
    """Return whether one of several tensors is such a part."""
    return "torch.distributed.tensor" in sys.modules and any(map(is_spread, values))


def in_stock_operations(param: Tensor) -> bool:
    """Return whether the steps of this module are for a parameter."""
    return param.dtype == torch.float64 or is_spread(param)


def _norm_of(value: Tensor) -> float:
    norm: Any = torch.linalg.vector_norm(value)
    return float(norm.full_tensor() if is_spread(norm) else norm)  # all processes call it


def _moments(
    grad: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, step: float, group: dict[str, Any]
) -> tuple[float, Tensor]:
    """Update both averages; return the correction of the first and the corrected root of the second."""
    beta1, beta2 = group["betas"]
    exp_avg.mul_(beta1).add_(grad, alpha=1.0 - beta1)
    exp_avg_sq.mul_(beta2).addcmul_(grad, grad, value=1.0 - beta2)
    root = (exp_avg_sq / (1.0 - beta2**step)).sqrt() + group["eps"]
    return 1.0 - beta1**step, root


def adamw_step(
    param: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    step: float,
    group: dict[str, Any],
) -> None:
    """Do what ``adam_fused_step`` does with decoupled decay."""
    lr = float(group["lr"])
    param.mul_(1.0 - lr * group["weight_decay"])
    correction, root = _moments(grad, exp_avg, exp_avg_sq, step, group)
    param.addcdiv_(exp_avg, root, value=-lr / correction)


def lamb_step(
    param: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    step: float,
    group: dict[str, Any],
) -> None:
    """Do what ``lamb_fused_step`` does."""
    correction, root = _moments(grad, exp_avg, exp_avg_sq, step, group)
    u = exp_avg / correction / root + param * group["weight_decay"]
    of_w, of_u = _norm_of(param), _norm_of(u)
    ratio = of_w / of_u if of_w > 0 and of_u > 0 else 1.0
    param.sub_(u, alpha=float(group["lr"]) * ratio)


def lars_step(
    param: Tensor, grad: Tensor, buffer: Tensor | None, first: bool, group: dict[str, Any]
) -> None:
    """Do what ``lars_fused_step`` does: a step of SGD, with the rate that the norms give."""
    decay, ratio = group["weight_decay"], 1.0
    if not group.get("lars_exclude", False):
        of_w, of_g = _norm_of(param), _norm_of(grad)
        if of_w > 0 and of_g > 0:
            ratio = group["eeta"] * of_w / (of_g + decay * of_w + group["epsilon"])
    whole: list[Any] = [param, grad, buffer]
    w, g, b = [v.to_local() if is_spread(v) else v for v in whole]
    g = g * ratio + w * (decay * ratio)
    if b is not None:
        g = with_momentum(g, b, group["momentum"], 0.0, False, first)
    w.sub_(g, alpha=float(group["lr"]))

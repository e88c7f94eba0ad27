# SPDX-License-Identifier: Apache-2.0
"""Steps of Lamb and Lars for parameters that are spread over processes (FSDP2): their norms are those of the whole."""

from __future__ import annotations

import sys
from typing import Any

import torch

__all__ = ["is_spread", "lamb_step", "lars_step"]

Tensor = torch.Tensor


def is_spread(value: Tensor) -> bool:
    """Return whether a tensor is a part of one that several processes have."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(value, module.DTensor)


def _norm_of(value: Tensor) -> float:
    # Of the whole: all processes call it.
    spread: Any = torch.linalg.vector_norm(value)
    return float(spread.full_tensor())


def lamb_step(
    param: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    step: float,
    group: dict[str, Any],
) -> None:
    """Do what ``lamb_fused_step`` does, in stock operations."""
    beta1, beta2 = group["betas"]
    exp_avg.mul_(beta1).add_(grad, alpha=1.0 - beta1)
    exp_avg_sq.mul_(beta2).addcmul_(grad, grad, value=1.0 - beta2)
    root = (exp_avg_sq / (1.0 - beta2**step)).sqrt() + group["eps"]
    u = exp_avg / (1.0 - beta1**step) / root + param * group["weight_decay"]
    of_w, of_u = _norm_of(param), _norm_of(u)
    ratio = of_w / of_u if of_w > 0 and of_u > 0 else 1.0
    param.sub_(u, alpha=float(group["lr"]) * ratio)


def lars_step(
    param: Tensor, grad: Tensor, buffer: Tensor | None, first: bool, group: dict[str, Any]
) -> None:
    """Do what ``lars_fused_step`` does: a step of SGD on own numbers, with the rate that the norms give."""
    decay, ratio = group["weight_decay"], 1.0
    if not group.get("lars_exclude", False):
        of_w, of_g = _norm_of(param), _norm_of(grad)
        if of_w > 0 and of_g > 0:
            ratio = group["eeta"] * of_w / (of_g + decay * of_w + group["epsilon"])
    whole: list[Any] = [param, grad, buffer]
    own: list[Any] = [None if value is None else value.to_local() for value in whole]
    torch.ops.ipex.sgd_fused_step(
        own[0],
        own[1] * ratio,
        own[2],
        None,
        group["momentum"],
        float(group["lr"]),
        decay * ratio,
        0.0,
        False,
        first,
    )

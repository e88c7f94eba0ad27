# SPDX-License-Identifier: Apache-2.0
"""Steps of optimizers on the kernels of the device: float32, with a copy in 16 bits, and split parameters."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from ipex_core.ops import optim_steps
from ipex_xpu_kernels._launch import kernel, launch

Tensor = torch.Tensor


def _dense_alike(param: Tensor, *others: Tensor | None) -> bool:
    """Return whether the numbers of all tensors lie in one order, without gaps."""
    reach = 1
    for stride, size in sorted(zip(param.stride(), param.shape, strict=True)):
        if size == 1:
            continue
        if stride != reach:
            return False
        reach *= size
    return all(x is None or x.stride() == param.stride() for x in others)


def _in_order_of(param: Tensor, grad: Tensor) -> Tensor:
    """Return the gradient with the strides of the parameter."""
    if grad.stride() == param.stride():
        return grad
    return torch.empty_like(param, dtype=grad.dtype).copy_(grad)


def _step(name: str, param: Tensor, grad: Tensor, *arguments: object) -> None:
    launch(kernel(name, param.dtype, grad.dtype), param, (param.numel(),), (256,), *arguments)


def _norm(x: Tensor) -> Tensor:
    return torch.linalg.vector_norm(x if x.dim() else x.view(1))


def _weights(param: Tensor, param2: Tensor | None, grad: Tensor) -> Tensor:
    """Return the float32 numbers of a parameter."""
    if param.dtype == torch.float32:
        return param
    out = torch.empty_like(param, dtype=torch.float32)
    _step("read_weights", param, grad, param, param2, out, param.numel())
    return out


def _adam(
    param: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    max_exp_avg_sq: Tensor | None,
    grad: Tensor,
    param2: Tensor | None,
    amsgrad: bool,
    step: float,
    beta1: float,
    beta2: float,
    lr: float,
    weight_decay: float,
    eps: float,
    decoupled: bool = False,
    maximize: bool = False,
) -> bool:
    top = max_exp_avg_sq if amsgrad else None
    if not _dense_alike(param, param2, exp_avg, exp_avg_sq, top):
        return False
    grad = _in_order_of(param, grad)
    _step(
        *("adam_step", param, grad, param, param2, grad, exp_avg, exp_avg_sq, top),
        *(param.numel(), beta1, beta2, 1.0 - beta1, 1.0 - beta2, math.sqrt(1.0 - beta2**step)),
        *(lr / (1.0 - beta1**step), weight_decay, 1.0 - lr * weight_decay, eps),
        *(decoupled, maximize),
    )
    return True


def _sgd(
    param: Tensor,
    grad: Tensor,
    momentum_buffer: Tensor | None,
    param2: Tensor | None,
    momentum: float,
    lr: float,
    weight_decay: float,
    dampening: float,
    nesterov: bool,
    first: bool = False,
    maximize: bool = False,
) -> bool:
    if not _dense_alike(param, param2, momentum_buffer):
        return False
    grad = _in_order_of(param, grad)
    _step(
        *("sgd_step", param, grad, param, param2, grad, momentum_buffer, param.numel()),
        *(None, None, lr, weight_decay, momentum, 1.0 - dampening, 0.0, 0.0),
        *(nesterov, first, maximize),
    )
    return True


def _lars(
    param: Tensor,
    grad: Tensor,
    momentum_buffer: Tensor | None,
    param2: Tensor | None,
    momentum: float,
    lr: float,
    eeta: float,
    eps: float,
    weight_decay: float,
    dampening: float,
    nesterov: bool,
    first: bool = False,
) -> bool:
    if not _dense_alike(param, param2, momentum_buffer):
        return False
    grad = _in_order_of(param, grad)
    if param.numel() == 0:
        return True
    norms = (
        _norm(_weights(param, param2, grad)),
        _norm(grad.float()),
    )
    _step(
        *("sgd_step", param, grad, param, param2, grad, momentum_buffer, param.numel()),
        *(*norms, lr, weight_decay, momentum, 1.0 - dampening, eeta, eps, nesterov, first, False),
    )
    return True


def _adagrad(
    param: Tensor,
    grad: Tensor,
    state_sum: Tensor,
    param2: Tensor | None,
    step: float,
    lr: float,
    weight_decay: float,
    lr_decay: float,
    eps: float,
    maximize: bool = False,
) -> bool:
    if not _dense_alike(param, param2, state_sum):
        return False
    grad = _in_order_of(param, grad)
    rate = lr / (1.0 + (step - 1.0) * lr_decay)
    _step(
        *("adagrad_step", param, grad, param, param2, grad, state_sum, param.numel()),
        *(rate, weight_decay, eps, maximize),
    )
    return True


def _lamb(
    param: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    grad: Tensor,
    param2: Tensor | None,
    step: int,
    beta1: float,
    beta2: float,
    lr: float,
    weight_decay: float,
    eps: float,
) -> bool:
    if not _dense_alike(param, param2, exp_avg, exp_avg_sq):
        return False
    grad = _in_order_of(param, grad)
    count = param.numel()
    if count == 0:
        return True
    direction = torch.empty_like(param, dtype=torch.float32)
    _step(
        *("lamb_direction", param, grad, param, param2, grad, exp_avg, exp_avg_sq),
        *(direction, count, beta1, beta2, 1.0 - beta1, 1.0 - beta2),
        *(1.0 - beta1**step, 1.0 - beta2**step, weight_decay, eps),
    )
    norms = (
        _norm(_weights(param, param2, grad)),
        _norm(direction),
    )
    _step("lamb_apply", param, grad, param, param2, direction, count, *norms, lr)
    return True


def _listed(single: str) -> Callable[..., bool]:
    """Return the op for lists of parameters: the op for one, for each."""
    rows = optim_steps.LISTED[single].rows
    op = getattr(torch.ops.ipex, single)

    def steps(*args: Any) -> bool:
        for row in rows(args):
            op(*row)
        return True

    return steps


_SINGLE: dict[str, Callable[..., bool]] = {
    "adagrad_fused_step": _adagrad,
    "adam_fused_step": _adam,
    "lamb_fused_step": _lamb,
    "lars_fused_step": _lars,
    "sgd_fused_step": _sgd,
}
#: Name of an op -> what runs for tensors of the device; False: as it is defined.
FUNCTIONS: dict[str, Callable[..., Any]] = {
    **_SINGLE,
    **{f"{name}s": _listed(name) for name in _SINGLE},
}

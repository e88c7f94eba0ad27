# SPDX-License-Identifier: Apache-2.0
"""Steps of optimizers on the kernels of the device: float32, with a copy in 16 bits, and split parameters."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ipex_core.library.spec import Arguments
from ipex_core.ops import optim_steps
from ipex_xpu_kernels._launch import kernel, launch


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


def _adam(a: Arguments) -> bool:
    top = a.max_exp_avg_sq if a.amsgrad else None
    if not _dense_alike(a.param, a.param2, a.exp_avg, a.exp_avg_sq, top):
        return False
    grad = _in_order_of(a.param, a.grad)
    _step(
        *("adam_step", a.param, grad, a.param, a.param2, grad, a.exp_avg, a.exp_avg_sq, top),
        *(a.param.numel(), a.beta1, a.beta2, 1.0 - a.beta1, 1.0 - a.beta2),
        math.sqrt(1.0 - a.beta2**a.step),
        *(a.lr / (1.0 - a.beta1**a.step), a.weight_decay, 1.0 - a.lr * a.weight_decay, a.eps),
        *(a.decoupled, a.maximize),
    )
    return True


def _sgd(a: Arguments) -> bool:
    if not _dense_alike(a.param, a.param2, a.momentum_buffer):
        return False
    grad = _in_order_of(a.param, a.grad)
    _step(
        *("sgd_step", a.param, grad, a.param, a.param2, grad, a.momentum_buffer, a.param.numel()),
        *(None, None, a.lr, a.weight_decay, a.momentum, 1.0 - a.dampening, 0.0, 0.0),
        *(a.nesterov, a.first, a.maximize),
    )
    return True


def _lars(a: Arguments) -> bool:
    if not _dense_alike(a.param, a.param2, a.momentum_buffer):
        return False
    grad = _in_order_of(a.param, a.grad)
    if a.param.numel() == 0:
        return True
    norms = _norm(_weights(a.param, a.param2, grad)), _norm(grad.float())
    _step(
        *("sgd_step", a.param, grad, a.param, a.param2, grad, a.momentum_buffer, a.param.numel()),
        *(*norms, a.lr, a.weight_decay, a.momentum, 1.0 - a.dampening),
        *(a.eeta, a.eps, a.nesterov, a.first, False),
    )
    return True


def _adagrad(a: Arguments) -> bool:
    if not _dense_alike(a.param, a.param2, a.state_sum):
        return False
    grad = _in_order_of(a.param, a.grad)
    rate = a.lr / (1.0 + (a.step - 1.0) * a.lr_decay)
    _step(
        *("adagrad_step", a.param, grad, a.param, a.param2, grad, a.state_sum, a.param.numel()),
        *(rate, a.weight_decay, a.eps, a.maximize),
    )
    return True


def _lamb(a: Arguments) -> bool:
    if not _dense_alike(a.param, a.param2, a.exp_avg, a.exp_avg_sq):
        return False
    grad = _in_order_of(a.param, a.grad)
    count = a.param.numel()
    if count == 0:
        return True
    direction = torch.empty_like(a.param, dtype=torch.float32)
    _step(
        *("lamb_direction", a.param, grad, a.param, a.param2, grad, a.exp_avg, a.exp_avg_sq),
        *(direction, count, a.beta1, a.beta2, 1.0 - a.beta1, 1.0 - a.beta2),
        *(1.0 - a.beta1**a.step, 1.0 - a.beta2**a.step, a.weight_decay, a.eps),
    )
    norms = _norm(_weights(a.param, a.param2, grad)), _norm(direction)
    _step("lamb_apply", a.param, grad, a.param, a.param2, direction, count, *norms, a.lr)
    return True


def _listed(single: str) -> Callable[..., bool]:
    """Return the op for lists of parameters: the op for one, for each."""
    listed = optim_steps.LISTED[single]
    op = getattr(torch.ops.ipex, single)

    def steps(a: Arguments) -> bool:
        for row in listed.rows(listed.values(a)):
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

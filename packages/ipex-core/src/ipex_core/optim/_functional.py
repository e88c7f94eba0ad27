# SPDX-License-Identifier: Apache-2.0
"""The functions of IPEX's ``optim._functional``: steps of whole optimizers, and of lists of tensors.

``params2`` has, for each parameter, the lower halves of a bfloat16 one, the 16-bit copy of a float32 one, or an empty
tensor (or None); see `ipex_core.ops.optim`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ipex_core.optim.plain import loss_of, plain_step, second

__all__ = [
    "adagrad",
    "adagrad_step",
    "adam",
    "adam_step",
    "adamw",
    "adamw_step",
    "lamb_step",
    "lars",
    "lars_step",
    "sgd",
    "sgd_step",
]

_Optional = Sequence["Tensor | None"]


@torch.no_grad()
def _step(self: Any, closure: Callable[[], float] | None = None) -> Any:
    """Do one step of an optimizer that has a fused op; with ``closure``, after calling it."""
    loss = loss_of(closure)
    plain_step(self)
    return loss


sgd_step = adagrad_step = adam_step = adamw_step = lamb_step = lars_step = _step


def _count(step: Any) -> float:
    if isinstance(step, Tensor):
        step += 1
        return float(step)
    return float(step) + 1


@torch.no_grad()
def sgd(
    params: Sequence[Tensor],
    params2: _Optional,
    d_p_list: Sequence[Tensor],
    momentum_buffer_list: list[Tensor | None],
    has_sparse_grad: bool | None = None,
    foreach: bool | None = None,
    *,
    weight_decay: float,
    momentum: float,
    lr: float,
    dampening: float,
    nesterov: bool,
    maximize: bool = False,
    fused: bool = True,
) -> None:
    """SGD on lists of tensors, in place; new momentum buffers are put into their list."""
    rest = (weight_decay, dampening, nesterov)
    for i, (param, grad) in enumerate(zip(params, d_p_list, strict=True)):
        buffer, first = _buffer(momentum_buffer_list, i, param, momentum)
        param2 = second(param, params2[i])
        torch.ops.ipex.sgd_fused_step(
            param, grad, buffer, param2, momentum, lr, *rest, first, maximize
        )


def _buffer(
    buffers: list[Tensor | None], i: int, param: Tensor, momentum: float
) -> tuple[Tensor | None, bool]:
    if not momentum:
        return None, False
    first = buffers[i] is None
    if first:
        buffers[i] = torch.zeros_like(param, dtype=torch.float32)
    return buffers[i], first


@torch.no_grad()
def lars(
    params: Sequence[Tensor],
    params2: _Optional,
    d_p_list: Sequence[Tensor],
    momentum_buffer_list: list[Tensor | None],
    has_sparse_grad: bool | None = None,
    foreach: bool | None = None,
    *,
    eeta: float,
    eps: float,
    weight_decay: float,
    momentum: float,
    lr: float,
    dampening: float,
    nesterov: bool,
    maximize: bool = False,
    fused: bool = True,
) -> None:
    """LARS on lists of tensors, in place; new momentum buffers are put into their list."""
    if maximize:
        raise ValueError("lars: maximize must be False, got True")
    for i, (param, grad) in enumerate(zip(params, d_p_list, strict=True)):
        buffer, first = _buffer(momentum_buffer_list, i, param, momentum)
        torch.ops.ipex.lars_fused_step(
            param,
            grad,
            buffer,
            second(param, params2[i]),
            momentum,
            lr,
            eeta,
            eps,
            weight_decay,
            dampening,
            nesterov,
            first,
        )


@torch.no_grad()
def adagrad(
    params: Sequence[Tensor],
    params2: _Optional,
    grads: Sequence[Tensor],
    state_sums: Sequence[Tensor],
    state_steps: Sequence[Tensor],
    has_sparse_grad: bool | None = None,
    foreach: bool | None = None,
    *,
    lr: float,
    weight_decay: float,
    lr_decay: float,
    eps: float,
    maximize: bool = False,
    fused: bool = True,
) -> None:
    """Adagrad on lists of tensors, in place."""
    rest = (lr, weight_decay, lr_decay, eps, maximize)
    for i, (param, grad) in enumerate(zip(params, grads, strict=True)):
        param2 = second(param, params2[i])
        torch.ops.ipex.adagrad_fused_step(
            param, grad, state_sums[i], param2, _count(state_steps[i]), *rest
        )


def _adam(decoupled: bool) -> Callable[..., None]:
    @torch.no_grad()
    def function(
        params: Sequence[Tensor],
        params2: _Optional,
        grads: Sequence[Tensor],
        exp_avgs: Sequence[Tensor],
        exp_avg_sqs: Sequence[Tensor],
        max_exp_avg_sqs: Sequence[Tensor],
        state_steps: Sequence[Tensor],
        foreach: bool | None = None,
        *,
        amsgrad: bool,
        beta1: float,
        beta2: float,
        lr: float,
        weight_decay: float,
        eps: float,
        maximize: bool = False,
    ) -> None:
        rest = (beta1, beta2, lr, weight_decay, eps, decoupled, maximize)
        for i, (param, grad) in enumerate(zip(params, grads, strict=True)):
            largest = max_exp_avg_sqs[i] if amsgrad else None
            torch.ops.ipex.adam_fused_step(
                param,
                exp_avgs[i],
                exp_avg_sqs[i],
                largest,
                grad,
                second(param, params2[i]),
                amsgrad,
                _count(state_steps[i]),
                *rest,
            )

    return function


adam = _adam(decoupled=False)
adam.__doc__ = "Adam on lists of tensors, in place."
adamw = _adam(decoupled=True)
adamw.__doc__ = "AdamW on lists of tensors, in place."

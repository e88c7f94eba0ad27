# SPDX-License-Identifier: Apache-2.0
"""Second names of the steps of optimizers. An empty ``param2`` stands for none. float64 runs without a kernel."""

from __future__ import annotations

import torch

from ipex.compat.torch_ops._alias_op import alias_op
from ipex_core.library.kernels import specs
from ipex_core.optim.plain import second

Tensor = torch.Tensor

_ops = torch.ops.ipex


def _step(name: str, param: Tensor, *args: object) -> None:
    """Take a step with a kernel, or in float64 with torch's own operations."""
    step = specs()[name].reference if param.dtype == torch.float64 else getattr(_ops, name)
    with torch.no_grad():
        step(param, *args)


def _strided(made: Tensor, like: Tensor) -> Tensor:
    """Return a contiguous result with the strides of an argument, unless elements of that share memory."""
    if made.stride() == like.stride():
        return made
    if like.is_contiguous():  # strides of dimensions of size 1 mean nothing
        return made.as_strided(like.shape, like.stride())
    if any(step == 0 for step, size in zip(like.stride(), like.shape, strict=True) if size > 1):
        return made
    to = torch.empty_strided(like.shape, like.stride(), dtype=made.dtype, device=made.device)
    bits = {2: torch.int16, 4: torch.int32}[made.element_size()]
    to.view(bits).copy_(made.view(bits))  # no conversion
    return to


@alias_op("split_float_bfloat16(Tensor tensor) -> (Tensor, Tensor)")
def _split(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """Return both halves, with the strides of the numbers: a step takes them together."""
    top, low = _ops.split_float_bfloat16(tensor)
    return _strided(top, tensor), _strided(low, tensor)


@alias_op("cat_bfloat16_float(Tensor top_half, Tensor bottom_half) -> Tensor")
def _cat(top: Tensor, bottom: Tensor) -> Tensor:
    """Return the numbers, with the strides of ``top``."""
    return _strided(_ops.cat_bfloat16_float(top, bottom), top)


@alias_op("packed_add(Tensor(a!) top, Tensor(b!) bottom, Tensor grad, float alpha) -> Tensor(a!)")
def _packed_add(top: Tensor, bottom: Tensor, grad: Tensor, alpha: float) -> Tensor:
    with torch.no_grad():
        value = _ops.cat_bfloat16_float(top, bottom)
        value.add_(grad.to(torch.float32), alpha=alpha)
        upper, lower = _ops.split_float_bfloat16(value)
        top.copy_(upper)
        bottom.view(torch.int16).copy_(lower.view(torch.int16))  # bits: no conversion
    return top


@alias_op("sync_master_weight_to_bf16(Tensor master_weight, Tensor(a!) bf16_weight) -> ()")
@alias_op("sync_master_weight_to_fp16(Tensor master_weight, Tensor(a!) fp16_weight) -> ()")
def _sync(master: Tensor, low: Tensor) -> None:
    with torch.no_grad():
        low.copy_(master)


@alias_op(
    "adagrad_fused_step(Tensor(a!) param, Tensor grad, Tensor(b!) state_sum, Tensor(c!) param2,"
    " float step, float lr, float weight_decay, float lr_decay, float eps)"
    " -> (Tensor(a!), Tensor(b!))"
)
def _adagrad(
    param: Tensor, grad: Tensor, state_sum: Tensor, param2: Tensor, *rest: float
) -> tuple[Tensor, Tensor]:
    _step("adagrad_fused_step", param, grad, state_sum, second(param, param2), *rest)
    return param, state_sum


@alias_op(
    "adam_fused_step(Tensor(a!) param, Tensor(b!) exp_avg, Tensor(c!) exp_avg_sq,"
    " Tensor(d!) max_exp_avg_sq, Tensor grad, Tensor(e!) param2, bool amsgrad, float step,"
    " float beta1, float beta2, float lr, float weight_decay, float eps) -> ()"
)
def _adam(
    param: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    largest: Tensor,
    grad: Tensor,
    param2: Tensor,
    amsgrad: bool,
    *rest: float,
) -> None:
    states = (exp_avg, exp_avg_sq, largest if amsgrad else None)
    _step("adam_fused_step", param, *states, grad, second(param, param2), amsgrad, *rest)


@alias_op(
    "lamb_fused_step(Tensor(a!) param, Tensor(b!) exp_avg, Tensor(c!) exp_avg_sq, Tensor grad,"
    " Tensor(d!) param2, int step, float beta1, float beta2, float lr, float weight_decay,"
    " float eps) -> (Tensor(a!), Tensor(b!), Tensor(c!))"
)
def _lamb(
    param: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    grad: Tensor,
    param2: Tensor,
    step: int,
    *rest: float,
) -> tuple[Tensor, Tensor, Tensor]:
    _step("lamb_fused_step", param, exp_avg, exp_avg_sq, grad, second(param, param2), step, *rest)
    return param, exp_avg, exp_avg_sq


def _buffer(param: Tensor, buffer: Tensor | None, momentum: float) -> tuple[Tensor | None, bool]:
    if not momentum:
        return None, False
    if buffer is None:
        wide = torch.float64 if param.dtype == torch.float64 else torch.float32
        return torch.zeros_like(param, dtype=wide), True
    return buffer, False


@alias_op(
    "sgd_fused_step(Tensor(a!) param, Tensor grad, Tensor? momentum_buf, Tensor(c!) param2,"
    " float momentum, float lr, float weight_decay, float dampening, bool nesterov) -> Tensor?"
)
def _sgd(
    param: Tensor,
    grad: Tensor,
    momentum_buf: Tensor | None,
    param2: Tensor,
    momentum: float,
    lr: float,
    weight_decay: float,
    dampening: float,
    nesterov: bool,
) -> Tensor | None:
    buffer, first = _buffer(param, momentum_buf, momentum)
    rest = (momentum, lr, weight_decay, dampening, nesterov, first)
    _step("sgd_fused_step", param, grad, buffer, second(param, param2), *rest)
    return buffer


@alias_op(
    "lars_fused_step(Tensor(a!) param, Tensor grad, Tensor? momentum_buf, Tensor(c!) param2,"
    " float momentum, float lr, float eeta, float eps, float weight_decay, float dampening,"
    " bool nesterov) -> Tensor?"
)
def _lars(
    param: Tensor,
    grad: Tensor,
    momentum_buf: Tensor | None,
    param2: Tensor,
    momentum: float,
    lr: float,
    eeta: float,
    eps: float,
    weight_decay: float,
    dampening: float,
    nesterov: bool,
) -> Tensor | None:
    buffer, first = _buffer(param, momentum_buf, momentum)
    rest = (momentum, lr, eeta, eps, weight_decay, dampening, nesterov, first)
    _step("lars_fused_step", param, grad, buffer, second(param, param2), *rest)
    return buffer

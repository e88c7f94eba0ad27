# SPDX-License-Identifier: Apache-2.0
"""One step of Adam or AdamW for one parameter."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch

from ipex_core.library.arguments import Arguments
from ipex_core.library.checks import acc, randn
from ipex_core.library.kernels import register
from ipex_core.library.spec import BenchCase, OpSpec, Sample
from ipex_core.ops.optim.common import (
    check_numbers,
    check_param,
    check_states,
    check_step,
    fake_step,
    param_samples,
    read_param,
    root,
    split,
    write_param,
)

Tensor = torch.Tensor


def _adam_fused_step(
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
) -> None:
    """Update a parameter and its means in place, as `torch.optim.Adam` and `torch.optim.AdamW` do.

    Args:
        param: float32, or bfloat16 with the upper halves of split numbers. Any shape; written to.
        exp_avg: Mean of gradients, float32, like ``param``; written to.
        exp_avg_sq: Mean of their squares, likewise.
        max_exp_avg_sq: The largest of these means, likewise; needed with ``amsgrad``.
        grad: Like ``param``; the dtype of ``param2`` if there is one.
        param2: The lower halves of a bfloat16 ``param``, or a bfloat16 or float16 copy of a float32 one; written to.
        amsgrad: Divide by the root of the largest mean so far.
        step: Number of this step, from 1 on.
        beta1: Share of the former mean of gradients, from 0 to below 1.
        beta2: Share of the former mean of squares, likewise.
        lr: Learning rate.
        weight_decay: Factor on the parameter that is added to the gradient, or with ``decoupled`` taken off it.
        eps: Added to the root.
        decoupled: AdamW: the parameter is multiplied by ``1 - lr * weight_decay``.
        maximize: Go up and not down.

    Raises:
        RuntimeError: A dtype or a shape does not fit, ``step`` is below 1, a share is out of its range, ``eps`` is
            negative, or ``max_exp_avg_sq`` is missing.

    Source: Kingma and Ba, "Adam: A Method for Stochastic Optimization", 2014; Loshchilov and Hutter, "Decoupled Weight
    Decay Regularization", 2017; Reddi et al., "On the Convergence of Adam and Beyond", 2018.
    """
    w = read_param(param, param2)
    g = -acc(grad) if maximize else acc(grad)
    if weight_decay and not decoupled:
        g = g + w * weight_decay
    if decoupled:
        w = w * (1.0 - lr * weight_decay)
    m = exp_avg * beta1 + g * (1.0 - beta1)
    v = exp_avg_sq * beta2 + g * g * (1.0 - beta2)
    exp_avg.copy_(m)
    exp_avg_sq.copy_(v)
    if amsgrad:
        assert max_exp_avg_sq is not None
        v = torch.maximum(max_exp_avg_sq, v)
        max_exp_avg_sq.copy_(v)
    d = root(v) / _divisor(math.sqrt(1.0 - beta2**step), w.dtype) + eps
    write_param(param, param2, w - m / d * (lr / (1.0 - beta1**step)))


def _divisor(value: float, dtype: torch.dtype) -> Tensor:
    """Return a scalar to divide by: torch multiplies by the inverse of Python numbers."""
    return torch.tensor(value, dtype=dtype)


def _check(a: Arguments) -> None:
    check_step(a.op, a.step)
    check_numbers(a.op, a.eps, beta1=a.beta1, beta2=a.beta2)
    given = not a.amsgrad or a.max_exp_avg_sq is not None
    a.require(given, "max_exp_avg_sq", "be given with amsgrad", None)
    check_param(a.op, a.param, a.grad, a.param2)
    check_states(a.op, a.param, exp_avg=a.exp_avg, exp_avg_sq=a.exp_avg_sq)
    if a.amsgrad:
        check_states(a.op, a.param, max_exp_avg_sq=a.max_exp_avg_sq)


def _samples(dtype: torch.dtype) -> Iterator[Sample]:
    def build(param: Tensor, grad: Tensor, param2: Tensor | None, seed: int) -> tuple[Any, ...]:
        like = torch.empty_like(param, dtype=torch.float32)
        states = [
            like.clone().copy_(randn(*param.shape, seed=seed, scale=0.1)),
            like.clone().copy_(randn(*param.shape, seed=seed + 1, scale=0.1).square()),
            like.clone().copy_(randn(*param.shape, seed=seed + 2, scale=0.1).square()),
        ]
        amsgrad = seed % 2 == 1
        numbers = (float(1 + seed % 7), 0.9, 0.999, 1e-2, 1e-2, 1e-8)
        if not amsgrad:
            states[2] = None  # type: ignore[call-overload]
        return (
            param,
            *states,
            grad,
            param2,
            amsgrad,
            *numbers,
            seed % 3 == 0,
            seed % 5 == 0,
        )

    return param_samples(dtype, build)


def _stock(
    param: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    _: None,
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
) -> None:
    """The loop of torch.optim.Adam; for reduced dtypes over a float32 master weight that is cast back."""
    g = grad.float()
    exp_avg.lerp_(g, 1 - beta1)
    exp_avg_sq.mul_(beta2).addcmul_(g, g, value=1 - beta2)
    denom = exp_avg_sq.sqrt().div_(math.sqrt(1 - beta2**step)).add_(eps)
    w = param.float()
    w.mul_(1 - lr * weight_decay).addcdiv_(exp_avg, denom, value=-lr / (1 - beta1**step))
    if param.dtype != torch.float32:
        param.copy_(w)
    elif param2 is not None:
        param2.copy_(w)


def _bench() -> Iterator[BenchCase]:
    def make(dtype: torch.dtype, n: int) -> tuple[Any, ...]:
        w, g = randn(n), randn(n, dtype=dtype, seed=1)
        param, param2 = (w, None) if dtype == torch.float32 else (w, w.to(dtype))
        if dtype == torch.bfloat16:
            param, param2 = split(w)
        rest = (False, 3.0, 0.9, 0.999, 1e-3, 1e-2, 1e-8, True)
        return param, torch.zeros(n), torch.zeros(n), None, g, param2, *rest

    for n in (1 << 16, 1 << 24):
        yield BenchCase(
            f"{n}",
            lambda dtype, n=n: make(dtype, n),
            lambda dtype, n=n: n * (26 if dtype == torch.bfloat16 else 28),
        )


SPEC = register(
    OpSpec(
        name="adam_fused_step",
        schema=(
            "(Tensor(a!) param, Tensor(b!) exp_avg, Tensor(c!) exp_avg_sq, Tensor(d!)? max_exp_avg_sq, Tensor grad,"
            " Tensor(e!)? param2, bool amsgrad, float step, float beta1, float beta2, float lr, float weight_decay,"
            " float eps, bool decoupled=False, bool maximize=False) -> ()"
        ),
        reference=_adam_fused_step,
        check=_check,
        fake=fake_step,
        samples=_samples,
        stock=_stock,
        backward=None,
        lift=False,
        bench=_bench,
        summary="Adam and AdamW: one step for a parameter, float32, split or with a copy",
    )
)

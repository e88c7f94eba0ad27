# SPDX-License-Identifier: Apache-2.0
"""One step of Adagrad for one parameter."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from ipex_core.library.arguments import Arguments
from ipex_core.library.checks import acc, randn
from ipex_core.library.kernels import register
from ipex_core.library.spec import OpSpec, Sample
from ipex_core.ops.optim.common import (
    check_numbers,
    check_param,
    check_states,
    check_step,
    fake_step,
    param_samples,
    read_param,
    root,
    write_param,
)

Tensor = torch.Tensor


def _adagrad_fused_step(
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
) -> None:
    """Update a parameter and its sum of squares in place, as `torch.optim.Adagrad` does.

    Args:
        param: float32, or bfloat16 with the upper halves of split numbers. Any shape; written to.
        grad: Like ``param``; the dtype of ``param2`` if there is one.
        state_sum: float32, like ``param``; written to.
        param2: The lower halves of a bfloat16 ``param``, or a bfloat16 or float16 copy of a float32 one; written to.
        step: Number of this step, from 1 on.
        lr: Learning rate, divided by ``1 + (step - 1) * lr_decay``.
        weight_decay: Factor on the parameter that is added to the gradient.
        lr_decay: See ``lr``.
        eps: Added to the root of the sum.
        maximize: Go up and not down.

    Raises:
        RuntimeError: A dtype or a shape does not fit, ``step`` is below 1, or ``eps`` is negative.

    Source: Duchi et al., "Adaptive Subgradient Methods for Online Learning and Stochastic Optimization", 2011.
    """
    w = read_param(param, param2)
    g = -acc(grad) if maximize else acc(grad)
    if weight_decay:
        g = g + w * weight_decay
    total = state_sum + g * g
    state_sum.copy_(total)
    rate = lr / (1.0 + (step - 1.0) * lr_decay)
    write_param(param, param2, w - g / (root(total) + eps) * rate)


def _check(a: Arguments) -> None:
    check_step(a.op, a.step)
    check_numbers(a.op, a.eps)
    check_param(a.op, a.param, a.grad, a.param2)
    check_states(a.op, a.param, state_sum=a.state_sum)


def _samples(dtype: torch.dtype) -> Iterator[Sample]:
    def build(param: Tensor, grad: Tensor, param2: Tensor | None, seed: int) -> tuple[Any, ...]:
        total = torch.empty_like(param, dtype=torch.float32).copy_(
            randn(*param.shape, seed=seed).square()
        )
        return (
            param,
            grad,
            total,
            param2,
            float(1 + seed % 5),
            0.1,
            1e-2,
            0.05,
            1e-10,
            seed % 4 == 0,
        )

    return param_samples(dtype, build)


SPEC = register(
    OpSpec(
        name="adagrad_fused_step",
        schema=(
            "(Tensor(a!) param, Tensor grad, Tensor(b!) state_sum, Tensor(c!)? param2, float step, float lr,"
            " float weight_decay, float lr_decay, float eps, bool maximize=False) -> ()"
        ),
        reference=_adagrad_fused_step,
        check=_check,
        fake=fake_step,
        samples=_samples,
        backward=None,
        lift=False,
        summary="Adagrad: one step for a parameter, float32, split or with a copy",
    )
)

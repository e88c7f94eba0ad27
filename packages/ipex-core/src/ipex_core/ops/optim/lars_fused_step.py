# SPDX-License-Identifier: Apache-2.0
"""One step of LARS for one parameter."""

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
    fake_step,
    param_samples,
    read_param,
    with_momentum,
    write_param,
)

Tensor = torch.Tensor


def _lars_fused_step(
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
) -> None:
    """Update a parameter and its momentum in place: SGD with a factor on the gradient for each parameter.

    The gradient with weight decay, ``g + weight_decay * w``, is multiplied by
    ``eeta * |w| / (|g| + weight_decay * |w| + eps)`` (1 if one of the norms is 0); then a step of SGD follows.

    Args:
        param: float32, or bfloat16 with the upper halves of split numbers. Any shape; written to.
        grad: Like ``param``; the dtype of ``param2`` if there is one.
        momentum_buffer: float32, like ``param``; written to. None: no momentum.
        param2: The lower halves of a bfloat16 ``param``, or a bfloat16 or float16 copy of a float32 one; written to.
        momentum: Factor on the buffer.
        lr: Learning rate.
        eeta: See above.
        eps: See above.
        weight_decay: See above.
        dampening: 1 minus the factor on the gradient that enters the buffer.
        nesterov: Add the momentum of this step to the gradient.
        first: The buffer has no history: it becomes the gradient.

    Raises:
        RuntimeError: A dtype or a shape does not fit, or ``eps`` is negative.

    Source: You et al., "Large Batch Training of Convolutional Networks", 2017.
    """
    w = read_param(param, param2)
    g = acc(grad)
    of_w, of_g = float(w.double().norm()), float(g.double().norm())
    if weight_decay:
        g = g + w * weight_decay
    if of_w > 0 and of_g > 0:
        g = g * (eeta * of_w / (of_g + weight_decay * of_w + eps))
    if momentum_buffer is not None:
        g = with_momentum(g, momentum_buffer, momentum, dampening, nesterov, first)
    write_param(param, param2, w - g * lr)


def _check(a: Arguments) -> None:
    check_numbers(a.op, a.eps)
    check_param(a.op, a.param, a.grad, a.param2)
    check_states(a.op, a.param, momentum_buffer=a.momentum_buffer)


def _samples(dtype: torch.dtype) -> Iterator[Sample]:
    def build(param: Tensor, grad: Tensor, param2: Tensor | None, seed: int) -> tuple[Any, ...]:
        buffer = torch.empty_like(param, dtype=torch.float32).copy_(
            randn(*param.shape, seed=seed, scale=0.1)
        )
        momentum = buffer if seed % 4 else None
        rest = (0.9, 0.5, 1e-2, 1e-8, 1e-2, 0.1, seed % 2 == 0, seed % 3 == 0)
        return param, grad, momentum, param2, *rest

    return param_samples(dtype, build)


SPEC = register(
    OpSpec(
        name="lars_fused_step",
        schema=(
            "(Tensor(a!) param, Tensor grad, Tensor(b!)? momentum_buffer, Tensor(c!)? param2, float momentum, float lr,"
            " float eeta, float eps, float weight_decay, float dampening, bool nesterov, bool first=False) -> ()"
        ),
        reference=_lars_fused_step,
        check=_check,
        fake=fake_step,
        samples=_samples,
        backward=None,
        lift=False,
        summary="LARS: one step for a parameter, float32, split or with a copy",
    )
)

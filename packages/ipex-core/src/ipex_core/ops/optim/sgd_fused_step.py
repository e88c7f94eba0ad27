# SPDX-License-Identifier: Apache-2.0
"""One step of SGD for one parameter."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from ipex_core.library.arguments import Arguments
from ipex_core.library.checks import acc, randn
from ipex_core.library.kernels import register
from ipex_core.library.spec import BenchCase, OpSpec, Sample
from ipex_core.ops.optim.common import (
    check_param,
    check_states,
    fake_step,
    param_samples,
    read_param,
    split,
    with_momentum,
    write_param,
)

Tensor = torch.Tensor


def _sgd_fused_step(
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
) -> None:
    """Update a parameter and its momentum in place, as `torch.optim.SGD` does.

    Args:
        param: float32, or bfloat16 with the upper halves of split numbers. Any shape; written to.
        grad: Like ``param``; the dtype of ``param2`` if there is one.
        momentum_buffer: float32, like ``param``; written to. None: no momentum.
        param2: The lower halves of a bfloat16 ``param``, or a bfloat16 or float16 copy of a float32 one; written to.
        momentum: Factor on the buffer.
        lr: Learning rate.
        weight_decay: Factor on the parameter that is added to the gradient.
        dampening: 1 minus the factor on the gradient that enters the buffer.
        nesterov: Add the momentum of this step to the gradient.
        first: The buffer has no history: it becomes the gradient.
        maximize: Go up and not down.

    Raises:
        RuntimeError: A dtype or a shape does not fit.

    Source: Sutskever et al., "On the importance of initialization and momentum in deep learning", 2013; split numbers
    as in Kalamkar et al., "A Study of BFLOAT16 for Deep Learning Training", 2019.
    """
    w = read_param(param, param2)
    g = -acc(grad) if maximize else acc(grad)
    if weight_decay:
        g = g + w * weight_decay
    if momentum_buffer is not None:
        g = with_momentum(g, momentum_buffer, momentum, dampening, nesterov, first)
    write_param(param, param2, w - g * lr)


def _check(a: Arguments) -> None:
    check_param(a.op, a.param, a.grad, a.param2)
    check_states(a.op, a.param, momentum_buffer=a.momentum_buffer)


def _samples(dtype: torch.dtype) -> Iterator[Sample]:
    def build(param: Tensor, grad: Tensor, param2: Tensor | None, seed: int) -> tuple[Any, ...]:
        buffer = torch.empty_like(param, dtype=torch.float32).copy_(
            randn(*param.shape, seed=seed, scale=0.1)
        )
        return param, grad, buffer, param2, 0.9, 0.05, 1e-2, 0.1, seed % 2 == 0, seed % 3 == 0

    yield from param_samples(dtype, build)
    param, grad, _, param2, *_ = next(
        s for s in param_samples(dtype, build) if s.id.endswith("300x129")
    ).args
    yield Sample((param, grad, None, param2, 0.0, 0.1, 0.0, 0.0, False), id="no_momentum")
    yield Sample(
        (param, grad, None, param2, 0.0, 0.1, 1e-3, 0.0, False, False, True), id="maximize"
    )


def _stock(
    param: Tensor,
    grad: Tensor,
    momentum_buffer: Tensor,
    param2: Tensor | None,
    momentum: float,
    lr: float,
    weight_decay: float,
    dampening: float,
    nesterov: bool,
) -> None:
    """The loop of torch.optim.SGD; for reduced dtypes over a float32 master weight that is cast back."""
    d = grad.float().add(param.float(), alpha=weight_decay)
    momentum_buffer.mul_(momentum).add_(d, alpha=1 - dampening)
    if param.dtype == torch.float32:
        param.add_(momentum_buffer, alpha=-lr)
        if param2 is not None:
            param2.copy_(param)
    else:
        param.copy_(param.float().add_(momentum_buffer, alpha=-lr))


def _bench() -> Iterator[BenchCase]:
    def make(dtype: torch.dtype, n: int) -> tuple[Any, ...]:
        w, g = randn(n), randn(n, dtype=dtype, seed=1)
        rest = (0.9, 0.01, 1e-4, 0.0, False)
        if dtype == torch.float32:
            return w, g, torch.zeros(n), None, *rest
        if dtype == torch.bfloat16:
            top, low = split(w)
            return top, g, torch.zeros(n), low, *rest
        return w, g, torch.zeros(n), w.to(dtype), *rest

    for n in (1 << 16, 1 << 24):
        yield BenchCase(
            f"{n}",
            lambda dtype, n=n: make(dtype, n),
            lambda dtype, n=n: n * (18 if dtype == torch.bfloat16 else 20),
        )


SPEC = register(
    OpSpec(
        name="sgd_fused_step",
        schema=(
            "(Tensor(a!) param, Tensor grad, Tensor(b!)? momentum_buffer, Tensor(c!)? param2, float momentum,"
            " float lr, float weight_decay, float dampening, bool nesterov, bool first=False,"
            " bool maximize=False) -> ()"
        ),
        reference=_sgd_fused_step,
        check=_check,
        fake=fake_step,
        samples=_samples,
        stock=_stock,
        backward=None,
        lift=False,
        bench=_bench,
        summary="SGD with momentum: one step for a parameter, float32, split or with a copy",
    )
)

# SPDX-License-Identifier: Apache-2.0
"""One step of LAMB for one parameter."""

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


def _lamb_fused_step(
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
) -> None:
    """Update a parameter and its means in place: Adam with a learning rate for each parameter.

    The direction is ``u = m' / (sqrt(v') + eps) + weight_decay * w`` with the corrected means of Adam, the rate
    ``lr * |w| / |u|`` (``lr`` if one of the norms is 0).

    Args:
        param: float32, or bfloat16 with the upper halves of split numbers. Any shape; written to.
        exp_avg: Mean of gradients, float32, like ``param``; written to.
        exp_avg_sq: Mean of their squares, likewise.
        grad: Like ``param``; the dtype of ``param2`` if there is one.
        param2: The lower halves of a bfloat16 ``param``, or a bfloat16 or float16 copy of a float32 one; written to.
        step: Number of this step, from 1 on.
        beta1: Share of the former mean of gradients.
        beta2: Share of the former mean of squares.
        lr: Learning rate.
        weight_decay: See above.
        eps: See above.

    Raises:
        RuntimeError: A dtype or a shape does not fit, ``step`` is below 1, a share is out of its range, or
            ``eps`` is negative.

    Source: You et al., "Large Batch Optimization for Deep Learning: Training BERT in 76 minutes", 2019.
    """
    w = read_param(param, param2)
    g = acc(grad)
    m = exp_avg * beta1 + g * (1.0 - beta1)
    v = exp_avg_sq * beta2 + g * g * (1.0 - beta2)
    exp_avg.copy_(m)
    exp_avg_sq.copy_(v)
    # Tensors: torch multiplies by the inverse of a Python number.
    corrections = torch.tensor([1.0 - beta1**step, 1.0 - beta2**step], dtype=w.dtype)
    correction1, correction2 = corrections.unbind()
    u = m / correction1 / (root(v / correction2) + eps) + w * weight_decay
    of_w, of_u = float(w.double().norm()), float(u.double().norm())
    ratio = of_w / of_u if of_w > 0 and of_u > 0 else 1.0
    write_param(param, param2, w - u * (lr * ratio))


def _check(a: Arguments) -> None:
    check_step(a.op, a.step)
    check_numbers(a.op, a.eps, beta1=a.beta1, beta2=a.beta2)
    check_param(a.op, a.param, a.grad, a.param2)
    check_states(a.op, a.param, exp_avg=a.exp_avg, exp_avg_sq=a.exp_avg_sq)


def _samples(dtype: torch.dtype) -> Iterator[Sample]:
    def build(param: Tensor, grad: Tensor, param2: Tensor | None, seed: int) -> tuple[Any, ...]:
        like = torch.empty_like(param, dtype=torch.float32)
        return (
            param,
            like.clone().copy_(randn(*param.shape, seed=seed, scale=0.1)),
            like.clone().copy_(randn(*param.shape, seed=seed + 1, scale=0.1).square()),
            grad,
            param2,
            1 + seed % 7,
            0.9,
            0.999,
            1e-2,
            1e-2,
            1e-6,
        )

    yield from param_samples(dtype, build)
    zeros = [torch.zeros(40) for _ in range(3)]
    if dtype == torch.float32:
        yield Sample((*zeros, torch.zeros(40), None, 1, 0.9, 0.999, 0.1, 0.0, 1e-6), id="zeros")


SPEC = register(
    OpSpec(
        name="lamb_fused_step",
        schema=(
            "(Tensor(a!) param, Tensor(b!) exp_avg, Tensor(c!) exp_avg_sq, Tensor grad, Tensor(d!)? param2, int step,"
            " float beta1, float beta2, float lr, float weight_decay, float eps) -> ()"
        ),
        reference=_lamb_fused_step,
        check=_check,
        fake=fake_step,
        samples=_samples,
        backward=None,
        lift=False,
        summary="LAMB: one step for a parameter, float32, split or with a copy",
    )
)

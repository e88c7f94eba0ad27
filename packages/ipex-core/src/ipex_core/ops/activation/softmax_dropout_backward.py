# SPDX-License-Identifier: Apache-2.0
"""Gradient of softmax followed by dropout, as attention has them in training."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from ipex_core.library.arguments import Arguments
from ipex_core.library.checks import (
    acc,
    check_like,
    check_tensor,
    fake_like,
    randn,
    row_bench,
    row_samples,
)
from ipex_core.library.keep_mask import check_drop, drop
from ipex_core.library.kernels import register
from ipex_core.library.spec import BenchCase, OpSpec, Sample

Tensor = torch.Tensor

OP = "softmax_dropout_backward"


def _backward(
    grad: Tensor, probs: Tensor, scale: float, p: float, seed: Tensor, stream: int = 0
) -> tuple[Tensor, Tensor]:
    """Gradient of ``dropout(probs, p, seed, stream)`` with ``probs = softmax(x, scale=scale)``, and that dropout again.

    Args:
        grad: ``[..., C]``, float32, bfloat16 or float16: gradient of the dropped probabilities.
        probs: Like ``grad``, the result of `softmax`.
        scale: Factor on ``x`` in the softmax.
        p: As in the forward call of `dropout`.
        seed: As in the forward call.
        stream: As in the forward call.

    Returns:
        The gradient of ``x`` and the dropped probabilities, both contiguous and like ``grad``.
    """
    dropped = drop(acc(probs), p, seed, stream)
    g = drop(acc(grad), p, seed, stream)
    total = (dropped * acc(grad)).sum(-1, keepdim=True)
    return (scale * acc(probs) * (g - total)).to(grad.dtype), dropped.to(grad.dtype)


def _check(a: Arguments) -> None:
    check_tensor(OP, "grad", a.grad)
    check_like(OP, "probs", a.probs, a.grad, of="grad")
    check_drop(OP, a.p, a.seed, a.stream, a.grad, "grad")


def _fake(a: Arguments) -> tuple[Tensor, Tensor]:
    return fake_like(a.grad), fake_like(a.grad)


def _samples(dtype: torch.dtype) -> Iterator[Sample]:
    for number, (name, x) in enumerate(row_samples(dtype)):
        probs = torch.softmax(randn(*x.shape, seed=44), -1).to(dtype)
        drop_args = (0.3 * (number % 3), torch.tensor(number), number)
        yield Sample((x, probs, 0.125, *drop_args), id=name)


def _stock(grad: Tensor, probs: Tensor, scale: float, p: float, *rest: Any) -> Any:
    keep = torch.empty_like(grad, dtype=torch.bool).bernoulli_(1 - p)
    factor = 1 / (1 - p)
    g = torch.ops.aten.native_dropout_backward(grad, keep, factor)
    d = torch.ops.aten._softmax_backward_data(g, probs, -1, grad.dtype)
    return d * scale, torch.ops.aten.native_dropout_backward(probs, keep, factor)


def _bench() -> Iterator[BenchCase]:
    return row_bench(
        lambda r, c, dtype: (
            randn(r, c, dtype=dtype),
            torch.softmax(randn(r, c), -1).to(dtype),
            0.125,
            0.1,
            torch.tensor(1),
        ),
        moves=4,
        shapes=((12288, 128), (6144, 512)),
    )


register(
    OpSpec(
        name=OP,
        schema=(
            "(Tensor grad, Tensor probs, float scale, float p, Tensor seed, int stream=0) -> (Tensor, Tensor)"
        ),
        reference=_backward,
        check=_check,
        fake=_fake,
        samples=_samples,
        stock=_stock,
        backward=None,
        tolerance={
            torch.float32: (1e-5, 1e-5),
            torch.bfloat16: (1.6e-2, 1e-2),
            torch.float16: (2e-3, 2e-3),
        },
        bench=_bench,
        summary="Gradient of softmax followed by dropout",
    )
)

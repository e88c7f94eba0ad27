# SPDX-License-Identifier: Apache-2.0
"""Gradient of GELU and of the bias before it."""

from __future__ import annotations

from collections.abc import Iterator

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
from ipex_core.library.kernels import register
from ipex_core.library.spec import BenchCase, OpSpec, Sample
from ipex_core.ops.activation.gelu import APPROXIMATE, check_approximate

Tensor = torch.Tensor

OP = "gelu_backward"


def _gelu_backward(grad: Tensor, x: Tensor, approximate: str = "none") -> tuple[Tensor, Tensor]:
    """Gradient of `gelu`, and its sum over all rows.

    Args:
        grad: ``[..., C]``, float32, bfloat16 or float16: gradient of ``gelu(x)``.
        x: Like ``grad``.
        approximate: ``"none"`` (erf) or ``"tanh"``.

    Returns:
        The gradient of ``x``, contiguous and like ``grad``, and float32 ``[C]``: its sum over the rows, which is the
        gradient of the bias of a linear layer before.
    """
    d = torch.ops.aten.gelu_backward(acc(grad), acc(x), approximate=approximate)
    columns = d.flatten(0, -2).sum(0) if d.dim() > 1 else d
    return d.to(grad.dtype), columns if grad.dtype == torch.float64 else columns.float()


def _check(a: Arguments) -> None:
    check_tensor(OP, "grad", a.grad)
    check_like(OP, "x", a.x, a.grad, of="grad")
    check_approximate(OP, a.approximate)


def _fake(a: Arguments) -> tuple[Tensor, Tensor]:
    columns = torch.empty(a.grad.shape[-1], dtype=torch.float32, device=a.grad.device)
    return fake_like(a.grad), columns


def _samples(dtype: torch.dtype) -> Iterator[Sample]:
    for approximate in APPROXIMATE:
        for name, x in row_samples(dtype):
            grad = randn(*x.shape, dtype=dtype, seed=33)
            yield Sample((grad, x, approximate), id=f"{approximate}-{name}")
        dense = torch.linspace(-12, 12, 4001).to(dtype)
        yield Sample((torch.ones_like(dense), dense, approximate), id=f"{approximate}-dense")


def _stock(grad: Tensor, x: Tensor, approximate: str = "none") -> tuple[Tensor, Tensor]:
    d = torch.ops.aten.gelu_backward(grad, x, approximate=approximate)
    return d, d.sum(0)


def _bench() -> Iterator[BenchCase]:
    return row_bench(
        lambda r, c, dtype: (randn(r, c, dtype=dtype), randn(r, c, dtype=dtype, seed=1)),
        moves=3,
        shapes=((256, 3072), (1024, 3072), (4096, 3072)),
    )


register(
    OpSpec(
        name=OP,
        schema='(Tensor grad, Tensor x, str approximate="none") -> (Tensor, Tensor)',
        reference=_gelu_backward,
        check=_check,
        fake=_fake,
        samples=_samples,
        stock=_stock,
        backward=None,
        tolerance={
            # Of sums over 300 rows of the short polynomials for 16-bit types, too.
            torch.float32: (2e-3, 4e-3),
            torch.bfloat16: (1.6e-2, 1e-2),
            torch.float16: (2e-3, 2e-3),
        },
        bench=_bench,
        summary="Gradient of GELU and its column sums",
    )
)

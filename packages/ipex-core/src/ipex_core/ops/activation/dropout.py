# SPDX-License-Identifier: Apache-2.0
"""Dropout whose elements follow from a seed."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ipex_core.library.arguments import Arguments
from ipex_core.library.checks import acc, check_tensor, fake_like, randn, row_bench, row_samples
from ipex_core.library.keep_mask import check_drop, drop
from ipex_core.library.kernels import register
from ipex_core.library.spec import BenchCase, OpSpec, Sample

Tensor = torch.Tensor


def _dropout(x: Tensor, p: float, seed: Tensor, stream: int = 0) -> Tensor:
    """Set each element to 0 with probability ``p`` and divide the others by ``1 - p``.

    Which elements follows from ``seed``, ``stream`` and their row and column: the same call gives the same result, and
    the gradient is this op on the gradient, without a stored mask.

    Args:
        x: ``[..., C]``, float32, bfloat16 or float16.
        p: Probability, in [0, 1).
        seed: One int64 number in a tensor.
        stream: Tells calls with one seed apart, 0 to 2^31 - 1.

    Returns:
        A contiguous tensor like ``x``.

    Source: Srivastava et al., "Dropout", 2014.
    """
    return drop(acc(x), p, seed, stream).to(x.dtype)


def _backward(
    grads: tuple[Tensor, ...], x: Tensor, p: float, seed: Tensor, stream: int = 0
) -> tuple[Tensor | None, ...]:
    return torch.ops.ipex.dropout(grads[0], p, seed, stream), None, None, None


def _check(a: Arguments) -> None:
    check_tensor(a.op, "x", a.x)
    check_drop(a.op, a.p, a.seed, a.stream, a.x)


def _fake(a: Arguments) -> Tensor:
    return fake_like(a.x)


def _samples(dtype: torch.dtype) -> Iterator[Sample]:
    for number, (name, x) in enumerate(row_samples(dtype)):
        # Every other one has the highest bit, which a signed shift would copy.
        seed = torch.tensor(-number if number % 2 else 1 << (3 * number))
        yield Sample((x, 0.1 * (number % 10), seed, number), id=name)


def _stock(x: Tensor, p: float, seed: Tensor, stream: int = 0) -> Tensor:
    return torch.nn.functional.dropout(x, p)


def _bench() -> Iterator[BenchCase]:
    return row_bench(
        lambda r, c, dtype: (randn(r, c, dtype=dtype), 0.1, torch.tensor(1)),
        moves=2,
        shapes=((1024, 768), (12288, 128)),
    )


register(
    OpSpec(
        name="dropout",
        schema="(Tensor x, float p, Tensor seed, int stream=0) -> Tensor",
        reference=_dropout,
        check=_check,
        fake=_fake,
        samples=_samples,
        stock=_stock,
        backward=_backward,
        bench=_bench,
        summary="Dropout whose elements follow from a seed",
    )
)

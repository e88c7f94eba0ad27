# SPDX-License-Identifier: Apache-2.0
"""The sigmoid approximation of GELU."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ipex_core.library.arguments import Arguments
from ipex_core.library.checks import acc, check_tensor, fake_like, randn, row_bench, row_samples
from ipex_core.library.kernels import register
from ipex_core.library.spec import BenchCase, OpSpec, Sample

Tensor = torch.Tensor


def _gelu_quick(x: Tensor) -> Tensor:
    """Approximate GELU by ``x * sigmoid(1.702 x)``, as CLIP and Qwen-VL do.

    Args:
        x: Any shape, float32, bfloat16 or float16.

    Returns:
        A contiguous tensor like ``x``; computed in float32 and rounded once.

    Source: Hendrycks and Gimpel, "Gaussian Error Linear Units", 2016, section 2.
    """
    y = acc(x)
    return (y * torch.sigmoid(1.702 * y)).to(x.dtype)


def _check(a: Arguments) -> None:
    check_tensor(a.op, "x", a.x, min_dim=0)


def _fake(a: Arguments) -> torch.Tensor:
    return fake_like(a.x)


def _samples(dtype: torch.dtype) -> Iterator[Sample]:
    for name, x in row_samples(dtype):
        yield Sample((x,), id=name)
    yield Sample((torch.linspace(-60, 60, 4001).to(dtype),), id="dense")


def _bench() -> Iterator[BenchCase]:
    return row_bench(
        lambda r, c, dtype: (randn(r, c, dtype=dtype),),
        moves=2,
        shapes=((1, 11008), (512, 4096), (4096, 1536)),
    )


register(
    OpSpec(
        name="gelu_quick",
        schema="(Tensor x) -> Tensor",
        reference=_gelu_quick,
        check=_check,
        fake=_fake,
        samples=_samples,
        stock=lambda x: x * torch.sigmoid(1.702 * x),
        bench=_bench,
        summary="GELU by a sigmoid",
    )
)

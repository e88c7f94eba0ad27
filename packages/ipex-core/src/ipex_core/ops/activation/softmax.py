# SPDX-License-Identifier: Apache-2.0
"""Softmax over the last dimension with scale and additive mask."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ipex_core.library.arguments import Arguments
from ipex_core.library.checks import (
    acc,
    check_broadcastable,
    check_device,
    check_dtype,
    check_tensor,
    fake_like,
    randn,
    row_bench,
    row_samples,
    strided,
)
from ipex_core.library.kernels import register
from ipex_core.library.spec import BenchCase, OpSpec, Sample

Tensor = torch.Tensor


def _softmax(x: Tensor, mask: Tensor | None = None, scale: float = 1.0) -> Tensor:
    """Softmax of ``x * scale + mask`` over the last dimension.

    A row whose values are all ``-inf`` gives NaN, as in PyTorch.

    Args:
        x: ``[..., C]``, float32, bfloat16 or float16.
        mask: Additive, in the dtype of ``x`` or float32, broadcastable to ``x``, or None.
        scale: Factor on ``x``.

    Returns:
        A contiguous tensor like ``x``; computed in float32 and rounded once.
    """
    scores = acc(x) * scale
    if mask is not None:
        scores = scores + acc(mask)
    return torch.softmax(scores, -1).to(x.dtype)


def _check(a: Arguments) -> None:
    check_tensor(a.op, "x", a.x)
    if a.mask is None:
        return
    check_device(a.op, "mask", a.mask, a.x)
    check_dtype(a.op, "mask", a.mask, a.x, or_float32=True)
    check_broadcastable(a.op, "mask", a.mask, a.x.shape, "x")


def _fake(a: Arguments) -> Tensor:
    return fake_like(a.x)


def _samples(dtype: torch.dtype) -> Iterator[Sample]:
    for name, x in row_samples(dtype):
        yield Sample((x,), id=name)
    x = randn(2, 3, 5, 33, dtype=dtype, seed=51, scale=3.0)
    minimum = torch.finfo(dtype).min
    full = torch.where(randn(2, 3, 5, 33, seed=52) > 0.5, minimum, 0.0).to(dtype)
    yield Sample((x, full, 0.125), id="mask_full")
    yield Sample((x, full[:, :1, :1], 0.125), id="mask_per_batch")
    yield Sample((x, full[:, :1].float(), 2.0), id="mask_float32")
    yield Sample((x, full[0, 0, 0]), id="mask_1d")
    yield Sample((x, full[..., :1].contiguous()), id="mask_per_row")
    yield Sample((x, strided(full[0, 0])), id="mask_noncontiguous")
    blocked = torch.zeros(2, 1, 5, 33, dtype=dtype)
    blocked[0, 0, 2] = -float("inf")
    blocked[1, 0, :, 20:] = -float("inf")
    yield Sample((x, blocked, 0.5), id="mask_minus_inf_row")


def _stock(x: Tensor, mask: Tensor | None = None, scale: float = 1.0) -> Tensor:
    if scale != 1.0:
        x = x * scale
    if mask is not None:
        x = x + mask
    return torch.softmax(x, -1)


def _bench() -> Iterator[BenchCase]:
    yield from row_bench(
        lambda r, c, dtype: (randn(r, c, dtype=dtype),),
        moves=2,
        shapes=((32, 128), (512, 4096), (49152, 128)),
    )
    yield BenchCase(
        "mask-8x12x128x128",
        lambda dtype: (
            randn(8, 12, 128, 128, dtype=dtype),
            torch.zeros(8, 1, 1, 128, dtype=dtype),
            0.125,
        ),
        lambda dtype: 2 * 8 * 12 * 128 * 128 * dtype.itemsize,
    )


register(
    OpSpec(
        name="softmax",
        schema="(Tensor x, Tensor? mask=None, float scale=1.0) -> Tensor",
        reference=_softmax,
        check=_check,
        fake=_fake,
        samples=_samples,
        stock=_stock,
        tolerance={
            torch.float32: (1e-5, 1e-6),
            torch.bfloat16: (1.6e-2, 1e-3),
            torch.float16: (2e-3, 1e-4),
        },
        bench=_bench,
        summary="Softmax over the last dimension with scale and additive mask",
    )
)

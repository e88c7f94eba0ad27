# SPDX-License-Identifier: Apache-2.0
"""Root-mean-square normalization, alone and fused with a residual addition."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ipex_core.library.arguments import Arguments
from ipex_core.library.checks import (
    acc,
    check_like,
    check_not_expanded,
    check_tensor,
    check_vector,
    fake_like,
    randn,
    row_bench,
    row_samples,
)
from ipex_core.library.kernels import register
from ipex_core.library.spec import BenchCase, OpSpec, Sample

Tensor = torch.Tensor


def _normalize(x: Tensor, weight: Tensor | None, eps: float, weight_offset: float) -> Tensor:
    y = acc(x)
    y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + eps)
    if weight is not None:
        y = y * (acc(weight) + weight_offset)
    return y.to(x.dtype)


def _rms_norm(
    x: Tensor, weight: Tensor | None, eps: float = 1e-6, weight_offset: float = 0.0
) -> Tensor:
    """Normalize each row of ``x`` by its root mean square: ``x * rsqrt(mean(x^2) + eps) * (weight + offset)``.

    Computed in float32 and rounded once. ``weight_offset=1`` is the form of models that store ``weight - 1``.

    Args:
        x: ``[..., C]``, float32, bfloat16 or float16.
        weight: ``[C]`` in the dtype of ``x`` or float32, or None.
        eps: Added to the mean square.
        weight_offset: Added to ``weight``; ignored without a weight.

    Returns:
        A contiguous tensor like ``x``.

    Source: Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019.
    """
    return _normalize(x, weight, eps, weight_offset)


def _add_rms_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None,
    eps: float = 1e-6,
    weight_offset: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Add ``residual`` to ``x`` and normalize the sum as `rms_norm` does.

    The sum is rounded to the dtype before it is normalized, as the two ops in a row would do.

    Args:
        x: ``[..., C]``, float32, bfloat16 or float16.
        residual: Like ``x``.
        weight: ``[C]`` in the dtype of ``x`` or float32, or None.
        eps: Added to the mean square.
        weight_offset: Added to ``weight``; ignored without a weight.

    Returns:
        The normalized sum and the sum itself, both contiguous and like ``x``.
    """
    total = x + residual
    return _normalize(total, weight, eps, weight_offset), total


def _add_rms_norm_in_place(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None,
    eps: float = 1e-6,
    weight_offset: float = 0.0,
) -> Tensor:
    """Add ``x`` to ``residual`` in place and return the sum normalized as `rms_norm` does.

    `add_rms_norm` without a new tensor for the sum.

    Args:
        x: ``[..., C]``, float32, bfloat16 or float16.
        residual: Like ``x``; becomes the sum.
        weight: ``[C]`` in the dtype of ``x`` or float32, or None.
        eps: Added to the mean square.
        weight_offset: Added to ``weight``; ignored without a weight.

    Returns:
        The normalized sum, contiguous and like ``x``.
    """
    residual.add_(x)
    return _normalize(residual, weight, eps, weight_offset)


def _check(a: Arguments) -> None:
    check_tensor(a.op, "x", a.x)
    check_vector(a.op, "weight", a.weight, a.x)


def _add_check(a: Arguments) -> None:
    check_tensor(a.op, "x", a.x)
    check_like(a.op, "residual", a.residual, a.x)
    check_vector(a.op, "weight", a.weight, a.x)
    if a.op == "add_rms_norm_":  # which writes it
        check_not_expanded(a.op, "residual", a.residual)


def _fake(a: Arguments) -> Tensor:
    return fake_like(a.x)


def _add_fake(a: Arguments) -> tuple[Tensor, Tensor]:
    return fake_like(a.x), fake_like(a.x)


def _samples(dtype: torch.dtype) -> Iterator[Sample]:
    for name, x in row_samples(dtype):
        weight = randn(x.shape[-1], dtype=dtype, seed=11)
        yield Sample((x, weight, 1e-6), id=name)
    x = randn(5, 96, dtype=dtype, seed=12)
    yield Sample((x, None, 1e-5), id="no_weight")
    heads = randn(3, 7, 320, dtype=dtype, seed=10).view(3, 7, 5, 64)[:, 1:6, 1:4]
    yield Sample((heads, randn(64, dtype=dtype, seed=11)), id="heads_of_fused")
    yield Sample((heads[:, 0], randn(64, dtype=dtype, seed=11)), id="heads_of_first_token")
    yield Sample((x, randn(96, seed=13), 1e-6), id="float32_weight")
    yield Sample((x, randn(96, dtype=dtype, seed=14, scale=0.1), 1e-6, 1.0), id="weight_offset")


def _add_samples(dtype: torch.dtype) -> Iterator[Sample]:
    for sample in _samples(dtype):
        x, *rest = sample.args
        residual = randn(*x.shape, dtype=dtype, seed=15)
        yield Sample((x, residual, *rest), id=sample.id)


def _in_place_samples(dtype: torch.dtype) -> Iterator[Sample]:
    yield from _add_samples(dtype)
    for x in (randn(5, 96, dtype=dtype, seed=16), randn(5, 7, 12, dtype=dtype, seed=17)):
        residual = randn(*x.transpose(0, 1).shape, dtype=dtype, seed=18).transpose(0, 1)
        weight = randn(x.shape[-1], dtype=dtype, seed=19)
        yield Sample((x, residual, weight), id=f"strided_residual_{x.dim()}d")


def _stock(x: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
    return torch.nn.functional.rms_norm(x, (x.shape[-1],), weight, eps)


def _add_stock(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float = 1e-6
) -> tuple[Tensor, Tensor]:
    total = x + residual
    return torch.nn.functional.rms_norm(total, (x.shape[-1],), weight, eps), total


def _in_place_stock(x: Tensor, residual: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
    residual.add_(x)
    return torch.nn.functional.rms_norm(residual, (x.shape[-1],), weight, eps)


def _bench() -> Iterator[BenchCase]:
    return row_bench(
        lambda r, c, dtype: (randn(r, c, dtype=dtype), randn(c, dtype=dtype), 1e-6), moves=2
    )


def _add_bench() -> Iterator[BenchCase]:
    return row_bench(
        lambda r, c, dtype: (
            randn(r, c, dtype=dtype),
            randn(r, c, dtype=dtype, seed=1),
            randn(c, dtype=dtype),
            1e-6,
        ),
        moves=4,
    )


register(
    OpSpec(
        name="rms_norm",
        schema="(Tensor x, Tensor? weight, float eps=1e-6, float weight_offset=0.0) -> Tensor",
        reference=_rms_norm,
        check=_check,
        fake=_fake,
        samples=_samples,
        stock=_stock,
        bench=_bench,
        summary="RMS normalization over the last dimension",
    )
)
register(
    OpSpec(
        name="add_rms_norm",
        schema=(
            "(Tensor x, Tensor residual, Tensor? weight, float eps=1e-6, float weight_offset=0.0)"
            " -> (Tensor, Tensor)"
        ),
        reference=_add_rms_norm,
        check=_add_check,
        fake=_add_fake,
        autocast="widest_type",
        samples=_add_samples,
        stock=_add_stock,
        bench=_add_bench,
        summary="Residual addition followed by RMS normalization",
    )
)
register(
    OpSpec(
        name="add_rms_norm_",
        schema=(
            "(Tensor x, Tensor(a!) residual, Tensor? weight, float eps=1e-6,"
            " float weight_offset=0.0) -> Tensor"
        ),
        reference=_add_rms_norm_in_place,
        check=_add_check,
        fake=_fake,
        samples=_in_place_samples,
        stock=_in_place_stock,
        bench=_add_bench,
        summary="Residual addition in place followed by RMS normalization",
    )
)

# SPDX-License-Identifier: Apache-2.0
"""Layer normalization over the last dimension, alone and fused with a residual addition."""

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


def _normalize(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    y = acc(x)
    y = y - y.mean(-1, keepdim=True)
    y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + eps)
    if weight is not None:
        y = y * acc(weight)
    if bias is not None:
        y = y + acc(bias)
    return y.to(x.dtype)


def _layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float = 1e-5) -> Tensor:
    """Normalize each row of ``x`` to mean 0 and variance 1, then scale and shift it.

    Computed in float32 and rounded once; the variance is the biased one, taken around the mean.

    Args:
        x: ``[..., C]``, float32, bfloat16 or float16.
        weight: ``[C]`` in the dtype of ``x`` or float32, or None.
        bias: ``[C]`` in the dtype of ``x`` or float32, or None.
        eps: Added to the variance.

    Returns:
        A contiguous tensor like ``x``.

    Source: Ba, Kiros and Hinton, "Layer Normalization", 2016.
    """
    return _normalize(x, weight, bias, eps)


def _add_layer_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float = 1e-5,
) -> tuple[Tensor, Tensor]:
    """Add ``residual`` to ``x`` and normalize the sum as `layer_norm` does.

    The sum is rounded to the dtype before it is normalized, as the two ops in a row would do.

    Args:
        x: ``[..., C]``, float32, bfloat16 or float16.
        residual: Like ``x``.
        weight: ``[C]`` in the dtype of ``x`` or float32, or None.
        bias: ``[C]`` in the dtype of ``x`` or float32, or None.
        eps: Added to the variance.

    Returns:
        The normalized sum and the sum itself, both contiguous and like ``x``.
    """
    total = x + residual
    return _normalize(total, weight, bias, eps), total


def _add_layer_norm_in_place(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float = 1e-5,
) -> Tensor:
    """Add ``x`` to ``residual`` in place and return the sum normalized as `layer_norm` does.

    `add_layer_norm` without a new tensor for the sum.

    Args:
        x: ``[..., C]``, float32, bfloat16 or float16.
        residual: Like ``x``; becomes the sum.
        weight: ``[C]`` in the dtype of ``x`` or float32, or None.
        bias: ``[C]`` in the dtype of ``x`` or float32, or None.
        eps: Added to the variance.

    Returns:
        The normalized sum, contiguous and like ``x``.
    """
    residual.add_(x)
    return _normalize(residual, weight, bias, eps)


def _check(a: Arguments) -> None:
    check_tensor(a.op, "x", a.x)
    check_vector(a.op, "weight", a.weight, a.x)
    check_vector(a.op, "bias", a.bias, a.x)


def _add_check(a: Arguments) -> None:
    check_tensor(a.op, "x", a.x)
    check_like(a.op, "residual", a.residual, a.x)
    check_vector(a.op, "weight", a.weight, a.x)
    check_vector(a.op, "bias", a.bias, a.x)
    if a.op == "add_layer_norm_":  # which writes it
        check_not_expanded(a.op, "residual", a.residual)


def _fake(a: Arguments) -> Tensor:
    return fake_like(a.x)


def _add_fake(a: Arguments) -> tuple[Tensor, Tensor]:
    return fake_like(a.x), fake_like(a.x)


def _samples(dtype: torch.dtype) -> Iterator[Sample]:
    for name, x in row_samples(dtype):
        columns = x.shape[-1]
        weight = randn(columns, dtype=dtype, seed=21)
        bias = randn(columns, dtype=dtype, seed=22)
        # A single column has variance 0: eps keeps the division from amplifying rounding.
        yield Sample((x, weight, bias, 1e-5), id=name)
    x = randn(5, 96, dtype=dtype, seed=23)
    yield Sample((x, None, None, 1e-5), id="no_weight_no_bias")
    heads = randn(3, 7, 320, dtype=dtype, seed=20).view(3, 7, 5, 64)[:, 1:6, 1:4]
    yield Sample((heads, randn(64, dtype=dtype, seed=21), None), id="heads_of_fused")
    yield Sample((x, randn(96, dtype=dtype, seed=24), None, 1e-12), id="no_bias")
    yield Sample((x, None, randn(96, dtype=dtype, seed=25)), id="no_weight")
    yield Sample((x, randn(96, seed=26), randn(96, seed=27), 1e-5), id="float32_weight")
    yield Sample((x + 30, randn(96, dtype=dtype, seed=28), None, 1e-5), id="large_mean")


def _add_samples(dtype: torch.dtype) -> Iterator[Sample]:
    for sample in _samples(dtype):
        x, *rest = sample.args
        residual = randn(*x.shape, dtype=dtype, seed=29)
        if sample.id == "large_mean":  # a sum that is exact: its rounding is part of the op
            residual = torch.zeros_like(residual)
        yield Sample((x, residual, *rest), id=sample.id)


def _stock(x: Tensor, weight: Tensor, bias: Tensor, eps: float = 1e-5) -> Tensor:
    return torch.nn.functional.layer_norm(x, (x.shape[-1],), weight, bias, eps)


def _add_stock(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, eps: float = 1e-5
) -> tuple[Tensor, Tensor]:
    total = x + residual
    return torch.nn.functional.layer_norm(total, (x.shape[-1],), weight, bias, eps), total


def _in_place_stock(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, eps: float = 1e-5
) -> Tensor:
    residual.add_(x)
    return torch.nn.functional.layer_norm(residual, (x.shape[-1],), weight, bias, eps)


def _bench() -> Iterator[BenchCase]:
    return row_bench(
        lambda r, c, dtype: (
            randn(r, c, dtype=dtype),
            randn(c, dtype=dtype),
            randn(c, dtype=dtype, seed=1),
            1e-5,
        ),
        moves=2,
    )


def _add_bench() -> Iterator[BenchCase]:
    return row_bench(
        lambda r, c, dtype: (
            randn(r, c, dtype=dtype),
            randn(r, c, dtype=dtype, seed=1),
            randn(c, dtype=dtype),
            randn(c, dtype=dtype, seed=2),
            1e-5,
        ),
        moves=4,
    )


_TOLERANCE = {
    torch.float32: (1e-4, 1e-4),
    torch.bfloat16: (1.6e-2, 1e-2),
    torch.float16: (2e-3, 2e-3),
}

register(
    OpSpec(
        name="layer_norm",
        schema="(Tensor x, Tensor? weight, Tensor? bias, float eps=1e-5) -> Tensor",
        reference=_layer_norm,
        check=_check,
        fake=_fake,
        samples=_samples,
        stock=_stock,
        tolerance=_TOLERANCE,
        bench=_bench,
        summary="Layer normalization over the last dimension",
    )
)
register(
    OpSpec(
        name="add_layer_norm",
        schema=(
            "(Tensor x, Tensor residual, Tensor? weight, Tensor? bias, float eps=1e-5)"
            " -> (Tensor, Tensor)"
        ),
        reference=_add_layer_norm,
        check=_add_check,
        fake=_add_fake,
        autocast="widest_type",
        samples=_add_samples,
        stock=_add_stock,
        tolerance=_TOLERANCE,
        bench=_add_bench,
        summary="Residual addition followed by layer normalization",
    )
)
register(
    OpSpec(
        name="add_layer_norm_",
        schema=(
            "(Tensor x, Tensor(a!) residual, Tensor? weight, Tensor? bias, float eps=1e-5)"
            " -> Tensor"
        ),
        reference=_add_layer_norm_in_place,
        check=_add_check,
        fake=_fake,
        samples=_add_samples,
        stock=_in_place_stock,
        tolerance=_TOLERANCE,
        bench=_add_bench,
        summary="Residual addition in place followed by layer normalization",
    )
)

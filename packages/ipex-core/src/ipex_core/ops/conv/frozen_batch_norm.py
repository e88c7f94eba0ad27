# SPDX-License-Identifier: Apache-2.0
"""Batch normalization with fixed statistics: a scale and a shift of each channel."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from ipex_core.library.arguments import Arguments
from ipex_core.library.checks import acc, check_tensor, fake_like, randn
from ipex_core.library.kernels import register
from ipex_core.library.spec import BenchCase, OpSpec, Sample
from ipex_core.ops.state_space._common import check_shaped

Tensor = torch.Tensor


def _frozen_batch_norm(
    x: Tensor, weight: Tensor, bias: Tensor, running_mean: Tensor, running_var: Tensor, eps: float
) -> Tensor:
    """Scale and shift each channel: ``(x - mean) / sqrt(var + eps) * weight + bias``.

    The statistics are constants, so the result equals batch normalization in evaluation mode. Computed in float32
    and rounded once.

    Args:
        x: ``[N, C, ...]``, float32, bfloat16 or float16.
        weight: ``[C]`` in the dtype of ``x`` or float32, like ``bias``, ``running_mean`` and ``running_var``.
        bias: Added to the normalized values.
        running_mean: Mean of each channel.
        running_var: Variance of each channel.
        eps: Added to the variance.

    Returns:
        A tensor like ``x``: channels-last if ``x`` is, else contiguous. Under autograd, gradients reach every tensor
        argument; with one for ``x`` only, they cost one more call of the op.

    Raises:
        RuntimeError: For wrong dtypes, shapes or devices.

    Source: Ioffe and Szegedy, "Batch Normalization", 2015.
    """
    shape = [1, -1, *[1] * (x.dim() - 2)]
    factor = acc(weight) * torch.rsqrt(acc(running_var) + eps)
    y = (acc(x) - acc(running_mean).view(shape)) * factor.view(shape) + acc(bias).view(shape)
    return y.to(x.dtype)


def _backward(grads: tuple[Tensor], *args: Any) -> tuple[Tensor | None, ...]:
    _, weight, bias, mean, var, eps = args
    (grad,) = grads
    if any(value.requires_grad for value in (weight, bias, mean, var)):
        inputs = [value for value in args[:5] if value.requires_grad]
        with torch.enable_grad():
            y = _frozen_batch_norm(*args)
        found = iter(torch.autograd.grad(y, inputs, grad))
        return (*(next(found) if value.requires_grad else None for value in args[:5]), None)
    zeros = torch.zeros_like(weight)
    return (
        torch.ops.ipex.frozen_batch_norm(grad, weight, zeros, zeros, var, eps),
        None,
        None,
        None,
        None,
        None,
    )


def _check(a: Arguments) -> None:
    check_tensor(a.op, "x", a.x, min_dim=2)
    for name, value in (
        ("weight", a.weight),
        ("bias", a.bias),
        ("running_mean", a.running_mean),
        ("running_var", a.running_var),
    ):
        check_shaped(a.op, name, value, [a.x.shape[1]], a.x, "x", or_float32=True)


def channels_last(x: Tensor) -> bool:
    """Return whether a 4-D tensor is stored with its channels side by side and not plainly."""
    return (
        x.dim() == 4
        and not x.is_contiguous()
        and x.is_contiguous(memory_format=torch.channels_last)
    )


def _fake(a: Arguments) -> Tensor:
    if channels_last(a.x):
        return torch.empty_like(a.x, memory_format=torch.channels_last)
    return fake_like(a.x)


def _parameters(channels: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, ...]:
    var = randn(channels, seed=34).square() + 0.2
    return (
        randn(channels, dtype=dtype, seed=31),
        randn(channels, dtype=dtype, seed=32),
        randn(channels, dtype=dtype, seed=33),
        var.to(dtype),
    )


def _samples(dtype: torch.dtype) -> Iterator[Sample]:
    for shape in ((1, 1, 1, 1), (2, 3, 5, 7), (1, 64, 9, 9), (3, 33, 4, 4), (2, 5, 40, 33)):
        x = randn(*shape, dtype=dtype, seed=30)
        name = "x".join(map(str, shape))
        yield Sample((x, *_parameters(shape[1]), 1e-5), id=name)
        last = x.contiguous(memory_format=torch.channels_last)
        yield Sample((last, *_parameters(shape[1]), 1e-5), id=f"{name}-channels_last")
    x = randn(2, 40, 6, 10, dtype=dtype, seed=35)
    yield Sample((x, *_parameters(40, dtype), 1e-3), id="parameters_in_dtype")
    yield Sample((x.transpose(2, 3), *_parameters(40), 1e-5), id="transposed")
    yield Sample((x[:, 3:20], *_parameters(17), 1e-5), id="slice")
    yield Sample((randn(7, 12, dtype=dtype), *_parameters(12), 1e-5), id="2d")
    yield Sample((randn(2, 3, 4, 5, 6, dtype=dtype), *_parameters(3), 1e-5), id="5d")
    yield Sample((x[:0], *_parameters(40), 1e-5), id="no_images")
    yield Sample((x[:, :0], *_parameters(0), 1e-5), id="no_channels")
    special = x.clone()
    special[0, 1, 2, 3] = float("nan")
    special[0, 2, 2, 3] = float("inf")
    special[1, 3, 0, 0] = -float("inf")
    yield Sample((special, *_parameters(40), 1e-5), id="special_values")


def _stock(
    x: Tensor, weight: Tensor, bias: Tensor, running_mean: Tensor, running_var: Tensor, eps: float
) -> Tensor:
    """Return what torchvision's layer of this name computes."""
    scale = weight.view(1, -1, 1, 1) * (running_var.view(1, -1, 1, 1) + eps).rsqrt()
    shift = bias.view(1, -1, 1, 1) - running_mean.view(1, -1, 1, 1) * scale
    return x * scale.to(x.dtype) + shift.to(x.dtype)


def _bench() -> Iterator[BenchCase]:
    for shape in ((1, 64, 200, 200), (1, 256, 100, 100), (4, 512, 28, 28)):
        for last in (False, True):
            fmt = torch.channels_last if last else torch.contiguous_format

            def make(dtype: torch.dtype, shape: Any = shape, fmt: Any = fmt) -> tuple[Any, ...]:
                x = randn(*shape, dtype=dtype).contiguous(memory_format=fmt)
                return (x, *_parameters(shape[1]), 1e-5)

            count = torch.Size(shape).numel()
            yield BenchCase(
                "x".join(map(str, shape)) + ("-channels_last" if last else ""),
                make,
                lambda dtype, n=count: 2 * n * dtype.itemsize,
            )


register(
    OpSpec(
        name="frozen_batch_norm",
        schema=(
            "(Tensor x, Tensor weight, Tensor bias, Tensor running_mean, Tensor running_var,"
            " float eps) -> Tensor"
        ),
        reference=_frozen_batch_norm,
        check=_check,
        fake=_fake,
        samples=_samples,
        stock=_stock,
        backward=_backward,
        tolerance={
            torch.float32: (1e-5, 1e-4),
            torch.bfloat16: (1.6e-2, 1e-2),
            torch.float16: (2e-3, 2e-3),
        },
        bench=_bench,
        summary="Batch normalization with fixed statistics",
    )
)

# SPDX-License-Identifier: Apache-2.0
"""Layer normalization over the last dimension, alone and after a residual addition, with dropout and gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from ipex_core.library.checks import (
    SUM_TOLERANCE,
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
from ipex_core.library.kernels import register_op
from ipex_core.library.spec import Arguments, BenchCase, Sample
from ipex_core.ops.softmax import check_drop, drop


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


def _add_layer_norm_(
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


def check_norm(a: Arguments) -> None:
    """Check the arguments of any norm, alone and after a residual addition."""
    given = vars(a)  # the ops differ in their arguments, not in what is wrong with one
    check_tensor(a.op, "x", a.x)
    if "residual" in given:
        check_like(a.op, "residual", a.residual, a.x)
    check_vector(a.op, "weight", a.weight, a.x)
    check_vector(a.op, "bias", given.get("bias"), a.x)
    if a.op.endswith("_"):  # which writes it
        check_not_expanded(a.op, "residual", a.residual)


def fake_norm(a: Arguments) -> Tensor:
    """Return the result of a norm without values."""
    return fake_like(a.x)


def fake_sum(a: Arguments) -> tuple[Tensor, Tensor]:
    """Return the results of a norm after an addition without values."""
    return fake_like(a.x), fake_like(a.x)


def stock_after_sum(norm: Callable[..., Tensor], in_place: bool = False) -> Callable[..., Any]:
    """Return what a user of stock PyTorch would write for an addition and a norm."""

    def stock(x: Tensor, residual: Tensor, *rest: Any) -> Any:
        total = residual.add_(x) if in_place else x + residual
        return norm(total, *rest) if in_place else (norm(total, *rest), total)

    return stock


def bench_of_norm(vectors: int, eps: float, added: int = 0) -> Callable[[], Iterator[BenchCase]]:
    """Return the benchmark of a norm with some vectors, after ``added`` additions."""
    return lambda: row_bench(
        lambda r, c, dtype: (
            *(randn(r, c, dtype=dtype, seed=i) for i in range(1 + added)),
            *(randn(c, dtype=dtype, seed=i) for i in range(vectors)),
            eps,
        ),
        moves=2 + 2 * added,
    )


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


register_op(
    reference=_layer_norm,
    check=check_norm,
    fake=fake_norm,
    samples=_samples,
    stock=_stock,
    tolerance=SUM_TOLERANCE,
    bench=bench_of_norm(2, 1e-5),
    summary="Layer normalization over the last dimension",
)
register_op(
    reference=_add_layer_norm,
    check=check_norm,
    fake=fake_sum,
    autocast="widest_type",
    samples=_add_samples,
    stock=stock_after_sum(_stock),
    tolerance=SUM_TOLERANCE,
    bench=bench_of_norm(2, 1e-5, added=1),
    summary="Residual addition followed by layer normalization",
)
register_op(
    mutates=("residual",),
    reference=_add_layer_norm_,
    check=check_norm,
    fake=fake_norm,
    samples=_add_samples,
    stock=stock_after_sum(_stock, in_place=True),
    tolerance=SUM_TOLERANCE,
    bench=bench_of_norm(2, 1e-5, added=1),
    summary="Residual addition in place followed by layer normalization",
)


# --- after dropout and a residual addition, in training ---------------------------------------------------------------


OP = "dropout_add_layer_norm"
BACKWARD = "dropout_add_layer_norm_backward"


def _standardize(x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return rows with mean 0 and variance 1, and the factors for that."""
    centered = x - x.mean(-1, keepdim=True)
    factor = torch.rsqrt(centered.square().mean(-1, keepdim=True) + eps)
    return centered * factor, factor


def _forward(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    bias: Tensor,
    p: float,
    seed: Tensor,
    stream: int = 0,
    eps: float = 1e-12,
) -> tuple[Tensor, Tensor]:
    """Drop elements of ``x``, add ``residual`` and normalize the sum: the end of a block of BERT.

    The sum is rounded to the dtype before it is normalized. Dropout is done as in `dropout`.

    Args:
        x: ``[..., C]``, float32, bfloat16 or float16.
        residual: Like ``x``.
        weight: ``[C]`` in the dtype of ``x`` or float32.
        bias: ``[C]`` in the dtype of ``x`` or float32.
        p: Probability of dropout, in [0, 1).
        seed: One int64 number in a tensor.
        stream: Tells calls with one seed apart, 0 to 2^31 - 1.
        eps: Added to the variance.

    Returns:
        The normalized sum and the sum, both contiguous and like ``x``.
    """
    total = (drop(acc(x), p, seed, stream) + acc(residual)).to(x.dtype)
    y, _ = _standardize(acc(total), eps)
    return (y * acc(weight) + acc(bias)).to(x.dtype), total


def _backward_of_op(
    grads: tuple[Tensor | None, ...],
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    bias: Tensor,
    p: float,
    seed: Tensor,
    stream: int = 0,
    eps: float = 1e-12,
) -> tuple[Tensor | None, ...]:
    ops = torch.ops.ipex
    total = ops.dropout(x, p, seed, stream) + residual
    grad = torch.zeros_like(total) if grads[0] is None else grads[0]
    dsum, dx, columns = ops.dropout_add_layer_norm_backward(
        grad, total, weight, p, seed, stream, eps
    )
    if grads[1] is not None:
        dsum = dsum + grads[1]
        dx = dx + ops.dropout(grads[1], p, seed, stream)
    dweight, dbias, _ = columns.unbind()
    return dx, dsum, dweight.to(weight.dtype), dbias.to(bias.dtype), None, None, None, None


def _backward(
    grad: Tensor,
    sum: Tensor,
    weight: Tensor,
    p: float,
    seed: Tensor,
    stream: int = 0,
    eps: float = 1e-12,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of `dropout_add_layer_norm` for a gradient of the normalized sum.

    Args:
        grad: ``[..., C]``, gradient of the first result.
        sum: Like ``grad``, the second result.
        weight: ``[C]`` in the dtype of ``grad`` or float32.
        p: As in the forward call.
        seed: As in the forward call.
        stream: As in the forward call.
        eps: As in the forward call.

    Returns:
        The gradients of ``residual`` and of ``x``, both contiguous and like ``grad``, and float32 ``[3, C]``: the
        gradients of ``weight`` and ``bias`` and the sum over all rows of the gradient of ``x``, which is the gradient
        of the bias of a linear layer before.
    """
    g = acc(grad)
    y, factor = _standardize(acc(sum), eps)
    d = g * acc(weight)
    d = factor * (d - d.mean(-1, keepdim=True) - y * (d * y).mean(-1, keepdim=True))
    dx = drop(d, p, seed, stream)
    rows = [part.flatten(0, -2).sum(0) if part.dim() > 1 else part for part in (g * y, g, dx)]
    columns = torch.stack(rows)
    if grad.dtype != torch.float64:
        columns = columns.float()
    return d.to(grad.dtype), dx.to(grad.dtype), columns


def _dropout_check(a: Arguments) -> None:
    check_tensor(OP, "x", a.x)
    check_like(OP, "residual", a.residual, a.x)
    check_vector(OP, "weight", a.weight, a.x)
    check_vector(OP, "bias", a.bias, a.x)
    check_drop(OP, a.p, a.seed, a.stream, a.x)


def _backward_check(a: Arguments) -> None:
    check_tensor(BACKWARD, "grad", a.grad)
    check_like(BACKWARD, "sum", a.sum, a.grad, of="grad")
    check_vector(BACKWARD, "weight", a.weight, a.grad)
    check_drop(BACKWARD, a.p, a.seed, a.stream, a.grad, "grad")


def _backward_fake(a: Arguments) -> tuple[Tensor, Tensor, Tensor]:
    columns = torch.empty(3, a.grad.shape[-1], dtype=torch.float32, device=a.grad.device)
    return fake_like(a.grad), fake_like(a.grad), columns


def _dropout_samples(dtype: torch.dtype) -> Iterator[Sample]:
    for number, (name, x) in enumerate(row_samples(dtype)):
        columns = x.shape[-1]
        wide = torch.float32 if number % 2 else dtype
        args = (
            x,
            randn(*x.shape, dtype=dtype, seed=41),
            randn(columns, dtype=wide, seed=42),
            randn(columns, dtype=wide, seed=43),
            0.2 * (number % 3),
            torch.tensor(number),
            number,
            1e-5,
        )
        yield Sample(args, id=name)


def _backward_samples(dtype: torch.dtype) -> Iterator[Sample]:
    for sample in _dropout_samples(dtype):
        x, total, weight, _, p, *rest = sample.args
        yield Sample((x, total, weight, p, *rest), id=sample.id)


def _dropout_stock(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, p: float, *rest: Any
) -> tuple[Tensor, Tensor]:
    total = torch.nn.functional.dropout(x, p) + residual
    return torch.nn.functional.layer_norm(total, weight.shape, weight, bias), total


_SHAPES = ((256, 768), (1024, 768), (4096, 768))


def _dropout_bench() -> Iterator[BenchCase]:
    return row_bench(
        lambda r, c, dtype: (
            randn(r, c, dtype=dtype),
            randn(r, c, dtype=dtype, seed=1),
            randn(c),
            randn(c, seed=2),
            0.1,
            torch.tensor(1),
        ),
        moves=4,
        shapes=_SHAPES,
    )


def _backward_bench() -> Iterator[BenchCase]:
    return row_bench(
        lambda r, c, dtype: (
            randn(r, c, dtype=dtype),
            randn(r, c, dtype=dtype, seed=1),
            randn(c),
            0.1,
            torch.tensor(1),
        ),
        moves=4,
        shapes=_SHAPES,
    )


def _backward_stock(grad: Tensor, sum: Tensor, weight: Tensor, p: float, *rest: Any) -> Any:
    mean, var = sum.float().mean(-1, keepdim=True), sum.float().var(-1, keepdim=True)
    dsum, dweight, dbias = torch.ops.aten.native_layer_norm_backward(
        grad, sum, weight.shape, mean, torch.rsqrt(var), weight, weight, [True, True, True]
    )
    keep = torch.empty_like(grad, dtype=torch.bool).bernoulli_(1 - p)
    dx = torch.ops.aten.native_dropout_backward(dsum, keep, 1 / (1 - p))
    return dsum, dx, dx.sum(0), dweight, dbias


register_op(
    name=OP,
    reference=_forward,
    check=_dropout_check,
    fake=fake_sum,
    samples=_dropout_samples,
    stock=_dropout_stock,
    backward=_backward_of_op,
    tolerance=SUM_TOLERANCE,
    bench=_dropout_bench,
    summary="Dropout, residual addition and layer normalization",
)
register_op(
    name=BACKWARD,
    reference=_backward,
    check=_backward_check,
    fake=_backward_fake,
    samples=_backward_samples,
    stock=_backward_stock,
    backward=None,
    tolerance=SUM_TOLERANCE,
    bench=_backward_bench,
    summary="Gradients of dropout_add_layer_norm",
)

# SPDX-License-Identifier: Apache-2.0
"""The dot products of all pairs of feature vectors of a recommendation model, and their derivative."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from ipex_core.library.arguments import Arguments
from ipex_core.library.checks import (
    acc,
    check_device,
    check_like,
    check_shape,
    check_tensor,
    randn,
    strided,
)
from ipex_core.library.kernels import register
from ipex_core.library.spec import BenchCase, OpSpec, Sample, check

Tensor = torch.Tensor

_FORWARD, _BACKWARD = "interaction", "interaction_backward"


def _width(count: int, dim: int) -> int:
    return dim + count * (count - 1) // 2


def _interaction(inputs: Sequence[Tensor]) -> Tensor:
    """The first feature vector of each sample, followed by the dot products of all pairs of feature vectors.

    Args:
        inputs: N tensors ``[B, D]``, all of one shape and dtype: float32, bfloat16 or float16.

    Returns:
        ``[B, D + N * (N - 1) / 2]`` in that dtype: ``inputs[0]``, then ``inputs[i] . inputs[j]`` for ``i > j``, row by
        row of the matrix of all products. Sums are float32 and rounded once.

    Raises:
        RuntimeError: There is no input, or the inputs differ in shape, dtype or device.

    Source:
        The interaction of DLRM, `arXiv:1906.00091 <https://arxiv.org/abs/1906.00091>`_.
    """
    x = torch.stack([acc(value) for value in inputs], 1)
    row, column = torch.tril_indices(len(inputs), len(inputs), -1)
    products = (x @ x.mT)[:, row, column]
    return torch.cat([x[:, 0], products], 1).to(inputs[0].dtype)


def _backward(grad: Tensor, inputs: Sequence[Tensor]) -> Tensor:
    """The derivative of `interaction`: the gradient of each input.

    Args:
        grad: Gradient of the result of `interaction`, in the dtype of the inputs.
        inputs: The inputs of `interaction`.

    Returns:
        ``[N, B, D]``: one gradient per input.

    Raises:
        RuntimeError: The arguments do not fit together.
    """
    count, dim = len(inputs), inputs[0].shape[1]
    x = torch.stack([acc(value) for value in inputs], 1)
    row, column = torch.tril_indices(count, count, -1)
    weights = x.new_zeros(x.shape[0], count, count)
    weights[:, row, column] = acc(grad)[:, dim:]
    result = (weights + weights.mT) @ x
    result[:, 0] += acc(grad)[:, :dim]
    return result.transpose(0, 1).to(grad.dtype).contiguous()


def _check_inputs(op: str, inputs: Sequence[Tensor]) -> None:
    check(len(inputs) > 0, op, "inputs", "hold at least 1 tensor", len(inputs))
    first = inputs[0]
    check_tensor(op, "inputs[0]", first)
    check(first.dim() == 2, op, "inputs[0]", "be 2-D [B, D]", f"{first.dim()}-D")
    for i, value in enumerate(inputs):
        check_like(op, f"inputs[{i}]", value, first, "inputs[0]")


def _check(a: Arguments) -> None:
    _check_inputs(_FORWARD, a.inputs)


def _check_backward(a: Arguments) -> None:
    _check_inputs(_BACKWARD, a.inputs)
    first = a.inputs[0]
    check_device(_BACKWARD, "grad", a.grad, first, "inputs[0]")
    check_tensor(_BACKWARD, "grad", a.grad, (first.dtype,))
    shape = [first.shape[0], _width(len(a.inputs), first.shape[1])]
    check_shape(_BACKWARD, "grad", a.grad, shape)


def _fake(a: Arguments) -> Tensor:
    batch, dim = a.inputs[0].shape
    return a.inputs[0].new_empty(batch, _width(len(a.inputs), dim))


def _fake_backward(a: Arguments) -> Tensor:
    return a.grad.new_empty(len(a.inputs), *a.inputs[0].shape)


def _inputs(count: int, batch: int, dim: int, dtype: torch.dtype) -> list[Tensor]:
    return [
        randn(batch, dim, dtype=dtype, seed=i, scale=max(dim, 1) ** -0.25) for i in range(count)
    ]


def _cases(dtype: torch.dtype) -> Iterator[tuple[str, list[Tensor]]]:
    for count, batch, dim in (
        (1, 2, 5),
        (2, 1, 1),
        (3, 4, 16),
        (4, 3, 7),
        (5, 2, 33),
        (9, 5, 64),
        (13, 2, 100),
        (16, 3, 32),
        (17, 2, 48),
        (27, 3, 128),
        (27, 70, 16),
        (32, 3, 500),
        (33, 2, 64),
    ):
        yield f"{count}x{batch}x{dim}", _inputs(count, batch, dim, dtype)
    base = randn(6, 8, 40, dtype=dtype, seed=31)
    yield "slices", [base[:, i, 4:36] for i in range(8)]
    yield "noncontiguous", [strided(x) for x in _inputs(3, 4, 9, dtype)]
    same = randn(3, 20, dtype=dtype, seed=32)
    yield "one_tensor_often", [same, same, same, same[:1].expand(3, 20), same.contiguous()]
    yield "no_rows", _inputs(4, 0, 8, dtype)
    yield "no_columns", _inputs(4, 3, 0, dtype)
    special = _inputs(5, 4, 39, dtype)
    special[1][0, 3], special[2][1, 5], special[0][2, 38] = float("nan"), float("inf"), 0.0
    yield "special_values", special


def _samples(dtype: torch.dtype) -> Iterator[Sample]:
    for name, inputs in _cases(dtype):
        yield Sample((inputs,), id=name)


def _samples_backward(dtype: torch.dtype) -> Iterator[Sample]:
    for i, (name, inputs) in enumerate(_cases(dtype)):
        batch, dim = inputs[0].shape
        grad = randn(batch, _width(len(inputs), dim), dtype=dtype, seed=40 + i)
        yield Sample((grad, inputs), id=name)
    yield Sample((strided(grad), inputs), id="grad_noncontiguous")
    yield Sample((grad[:1].expand(grad.shape), inputs), id="grad_expanded")


def _stock(inputs: Sequence[Tensor]) -> Tensor:
    count = len(inputs)
    x = torch.cat(list(inputs), 1).view(inputs[0].shape[0], count, -1)
    products = torch.bmm(x, x.transpose(1, 2))
    row, column = torch.tril_indices(count, count, -1)
    return torch.cat([inputs[0], products[:, row, column]], 1)


def _stock_backward(grad: Tensor, inputs: Sequence[Tensor]) -> Tensor:
    with torch.inference_mode(False), torch.enable_grad():
        leaves = [value.detach().clone().requires_grad_() for value in inputs]
        return torch.stack(torch.autograd.grad(_stock(leaves), leaves, grad.clone()))


def _bench() -> Iterator[BenchCase]:
    for count, batch, dim in ((27, 2048, 128), (27, 128, 128), (27, 2048, 64)):
        yield BenchCase(
            f"{count}x{batch}x{dim}",
            lambda dtype, n=count, b=batch, d=dim: (_inputs(n, b, d, dtype),),
            lambda dtype, n=count, b=batch, d=dim: b * (n * d + _width(n, d)) * dtype.itemsize,
            flops=batch * count * (count - 1) * dim,
        )


def _bench_backward() -> Iterator[BenchCase]:
    for count, batch, dim in ((27, 2048, 128), (27, 128, 128)):
        yield BenchCase(
            f"{count}x{batch}x{dim}",
            lambda dtype, n=count, b=batch, d=dim: (
                randn(b, _width(n, d), dtype=dtype),
                _inputs(n, b, d, dtype),
            ),
            lambda dtype, n=count, b=batch, d=dim: b * (2 * n * d + _width(n, d)) * dtype.itemsize,
            flops=2 * batch * count * (count - 1) * dim,
        )


_TOLERANCE = {
    torch.float32: (1e-5, 1e-4),
    torch.bfloat16: (1.6e-2, 1e-2),
    torch.float16: (2e-3, 1e-3),
}

register(
    OpSpec(
        name=_FORWARD,
        schema="(Tensor[] inputs) -> Tensor",
        reference=_interaction,
        check=_check,
        fake=_fake,
        samples=_samples,
        stock=_stock,
        autocast="lower_precision",
        tolerance=_TOLERANCE,
        bench=_bench,
        summary="Dot products of all pairs of feature vectors",
    )
)

register(
    OpSpec(
        name=_BACKWARD,
        schema="(Tensor grad, Tensor[] inputs) -> Tensor",
        reference=_backward,
        check=_check_backward,
        fake=_fake_backward,
        samples=_samples_backward,
        stock=_stock_backward,
        backward=None,
        tolerance=_TOLERANCE,
        bench=_bench_backward,
        summary="The derivative of `interaction`",
    )
)

# SPDX-License-Identifier: Apache-2.0
"""The dot products of all pairs of feature vectors of a recommendation model, in floats and on 8-bit integers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from ipex_core.library.checks import (
    acc,
    check_device,
    check_like,
    check_shape,
    check_tensor,
    dtype_name,
    randn,
    strided,
)
from ipex_core.library.kernels import register_op
from ipex_core.library.spec import FLOATS, Arguments, BenchCase, Sample, check
from ipex_core.ops.int8_linear import int8_randn
from ipex_core.ops.quantize import check_scale, codes

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

register_op(
    name=_FORWARD,
    reference=_interaction,
    check=lambda a: _check_inputs(_FORWARD, a.inputs),
    fake=_fake,
    samples=_samples,
    stock=_stock,
    autocast="lower_precision",
    tolerance=_TOLERANCE,
    bench=_bench,
    summary="Dot products of all pairs of feature vectors",
)

register_op(
    name=_BACKWARD,
    reference=_backward,
    check=_check_backward,
    fake=lambda a: a.grad.new_empty(len(a.inputs), *a.inputs[0].shape),
    samples=_samples_backward,
    stock=_stock_backward,
    backward=None,
    tolerance=_TOLERANCE,
    bench=_bench_backward,
    summary="The derivative of `interaction`",
)


# --- on 8-bit integers ------------------------------------------------------------------------------------------------


OP = "int8_interaction"
_CODES = (torch.int8, torch.uint8)
_MOST_DIM, _MOST_INPUTS = 32768, 4096


def _result(inputs: Sequence[Tensor], dtype: torch.dtype | None) -> torch.dtype:
    own = inputs[0].dtype
    return dtype or (torch.float32 if own == torch.int8 else own)


def _int8_interaction(
    inputs: Sequence[Tensor],
    scales: Tensor,
    dtype: torch.dtype | None = None,
    output_scale: float = 0.0,
    output_zero: int = 0,
) -> Tensor:
    """The first feature vector of each sample, followed by the dot products of all pairs, on int8 codes.

    A number is about ``code * scale`` with one symmetric scale for each input. The products of codes are exact; the
    result is scaled, and rounded once.

    Args:
        inputs: N tensors ``[B, D]``, all of one shape and dtype: int8 codes, or float32, bfloat16 or float16, which are
            quantized on the way in: ``round(x / scale)``, limited to -128..127. At most 4096, with D up to 32768.
        scales: float32 ``[N]``, finite and at least 2^-120.
        dtype: Of the result: the dtype of float inputs, a float for codes (None: float32), or int8 or uint8 codes.
        output_scale: Scale of an int8 or uint8 result, finite and at least 2^-120.
        output_zero: Its zero point, a number of its dtype.

    Returns:
        ``[B, D + N * (N - 1) / 2]``: ``inputs[0]``, then ``inputs[i] . inputs[j]`` for ``i > j``, row by row.

    Raises:
        RuntimeError: An argument is not as described.
    """
    check_scale(OP, "scales", scales)
    none = torch.zeros((), dtype=torch.int32, device=scales.device)
    parts = [
        x if x.dtype == torch.int8 else codes(x, scale, none, symmetric=True)
        for x, scale in zip(inputs, scales, strict=True)
    ]
    x = torch.stack(parts, 1).double() * scales.double()[:, None]
    row, column = torch.tril_indices(len(inputs), len(inputs), -1)
    y = torch.cat([x[:, 0], (x @ x.mT)[:, row, column]], 1)
    result = _result(inputs, dtype)
    if result in _CODES:
        step = torch.tensor(output_scale, dtype=torch.float32, device=y.device)
        shift = torch.tensor(output_zero, dtype=torch.int32, device=y.device)
        return codes(y, step, shift, result == torch.int8)
    return y.to(result)


def _int8_check(a: Arguments) -> None:
    a.require(len(a.inputs) > 0, "inputs", "hold at least 1 tensor", len(a.inputs))
    few = len(a.inputs) <= _MOST_INPUTS
    a.require(few, "inputs", f"hold at most {_MOST_INPUTS} tensors", len(a.inputs))
    first = a.inputs[0]
    check_tensor(OP, "inputs[0]", first, (*FLOATS, torch.int8))
    a.require(first.dim() == 2, "inputs[0]", "be 2-D [B, D]", f"{first.dim()}-D")
    narrow = first.shape[1] <= _MOST_DIM
    a.require(narrow, "inputs[0]", f"have at most {_MOST_DIM} columns", first.shape[1])
    for i, value in enumerate(a.inputs):
        check_like(OP, f"inputs[{i}]", value, first, "inputs[0]")
    check_device(OP, "scales", a.scales, first, "inputs[0]")
    is_float = a.scales.dtype == torch.float32
    a.require(is_float, "scales", "have dtype float32", dtype_name(a.scales.dtype))
    shape = [len(a.inputs)]
    check_shape(OP, "scales", a.scales, shape)
    result = _result(a.inputs, a.dtype)
    known = result in (*FLOATS, *_CODES)
    text = "be float32, bfloat16, float16, int8 or uint8"
    a.require(known, "dtype", text, dtype_name(result))
    fits = first.dtype == torch.int8 or result in (first.dtype, *_CODES)
    text = f"be the dtype of inputs[0] = {dtype_name(first.dtype)}, int8 or uint8"
    a.require(fits, "dtype", text, dtype_name(result))
    if result in _CODES:
        check_scale(OP, "output_scale", a.output_scale)
        low = -128 if result == torch.int8 else 0
        usable = low <= a.output_zero <= low + 255
        a.require(usable, "output_zero", f"be in [{low}, {low + 255}]")


def _int8_fake(a: Arguments) -> Tensor:
    batch, dim = a.inputs[0].shape
    return a.inputs[0].new_empty(
        batch, _width(len(a.inputs), dim), dtype=_result(a.inputs, a.dtype)
    )


def _scales(count: int) -> Tensor:
    return randn(count, seed=9).abs() * 0.01 + 0.02


def _int8_samples(dtype: torch.dtype) -> Iterator[Sample]:
    for count, batch, dim in (
        (1, 2, 5),
        (2, 1, 1),
        (4, 3, 7),
        (9, 5, 64),
        (27, 3, 128),
        (40, 2, 33),
        (70, 2, 130),
    ):
        name = f"{count}x{batch}x{dim}"
        floats = [randn(batch, dim, dtype=dtype, seed=i) for i in range(count)]
        yield Sample((floats, _scales(count)), id=name)
        ints = [int8_randn(batch, dim, seed=i) for i in range(count)]
        yield Sample((ints, _scales(count), dtype), id=f"{name}-codes")
    for out, zero in ((torch.int8, -3), (torch.uint8, 120)):
        name = dtype_name(out)
        yield Sample((floats, _scales(count), out, 0.3, zero), id=f"to-{name}")
        yield Sample((ints, _scales(count), out, 0.3, zero), id=f"codes-to-{name}")
    wide = int8_randn(6, 8 * 40, seed=31).view(6, 8, 40)
    yield Sample(([wide[:, i, 4:36] for i in range(8)], _scales(8)), id="slices")
    yield Sample(([strided(x) for x in floats], _scales(count)), id="noncontiguous")
    least = torch.full((2, 500), -128, dtype=torch.int8)
    yield Sample(([least] * 3, _scales(3)), id="largest_codes")
    yield Sample(([x[:0] for x in ints], _scales(count)), id="no_rows")
    yield Sample(([x[:, :0] for x in ints], _scales(count)), id="no_columns")
    special = [x.clone() for x in floats[:5]]
    special[1][0, 3], special[2][1, 5] = float("nan"), float("inf")
    yield Sample((special, _scales(5)), id="special_values")


def _int8_stock(inputs: Sequence[Tensor], scale: float, zero: int) -> Tensor:
    y = _stock(inputs).float()
    return y.div_(scale).round_().add_(zero).clamp_(0, 255).to(torch.uint8)


def _stock_args(
    inputs: Sequence[Tensor], scales: Tensor, dtype: torch.dtype, scale: float, zero: int
) -> tuple[object, ...]:
    by = scales.tolist()
    floats = [
        x.float() * step if x.dtype == torch.int8 else x for x, step in zip(inputs, by, strict=True)
    ]
    return floats, scale, zero


def _int8_bench() -> Iterator[BenchCase]:
    step = 2.0**-5
    for count, batch, dim in ((27, 2048, 128), (27, 128, 128)):
        for kind in ("codes", "float"):

            def make(
                dtype: torch.dtype, n: int = count, b: int = batch, d: int = dim, k: str = kind
            ) -> tuple[object, ...]:
                rows = [int8_randn(b, d, seed=i) for i in range(n)]
                if k == "float":  # numbers whose codes are exact
                    rows = [(x * step).to(dtype) for x in rows]
                return rows, torch.full((n,), step), torch.uint8, 0.5, 128

            read = (lambda dtype: 1) if kind == "codes" else (lambda dtype: dtype.itemsize)
            yield BenchCase(
                f"{count}x{batch}x{dim}-{kind}",
                make,
                lambda dtype, n=count, b=batch, d=dim, r=read: (
                    b * (n * d * r(dtype) + _width(n, d))
                ),
                flops=batch * count * (count - 1) * dim,
                unit=torch.int8,
            )


register_op(
    reference=_int8_interaction,
    check=_int8_check,
    fake=_int8_fake,
    samples=_int8_samples,
    stock=_int8_stock,
    stock_args=_stock_args,
    backward=None,
    lift=False,
    tolerance={**_TOLERANCE, torch.int8: (0.0, 1.0), torch.uint8: (0.0, 1.0)},
    bench=_int8_bench,
    summary="Dot products of all pairs of feature vectors on 8-bit integers",
)

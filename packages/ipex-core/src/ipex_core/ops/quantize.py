# SPDX-License-Identifier: Apache-2.0
"""Quantization of activations to 8 bits, per token or per tensor."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ipex_core.library.checks import (
    check_device,
    check_dtype_in,
    check_tensor,
    randn,
    read_once,
    row_bench,
    row_samples,
)
from ipex_core.library.kernels import register_op
from ipex_core.library.spec import FLOATS, Arguments, BenchCase, Sample, check

#: Rows that are (almost) zero get this scale: it and its reciprocal are normal numbers.
LEAST_SCALE = 2.0**-120


def check_scale(op: str, name: str, scale: float | Tensor) -> None:
    """Check given scales: finite and not below `LEAST_SCALE`. The first that is not stands in the message."""
    if isinstance(scale, Tensor):
        scale = scale.cpu()
        wrong = scale[~(scale.isfinite() & (scale >= LEAST_SCALE))]
        scale = wrong[0].item() if wrong.numel() else 1.0
    usable = LEAST_SCALE <= scale < 3.4028235e38
    check(usable, op, name, "be finite and at least 2^-120", f"{scale:g}")


def choose(x: Tensor, symmetric: bool, dim: int | None) -> tuple[Tensor, Tensor]:
    """Return float32 scale and int32 zero point of the values along ``dim``, or of all values.

    What `quantize_per_token` says about ranges and values that are not finite holds here.
    """
    wide = x.float()
    if dim is None:
        wide, dim = wide.reshape(-1), 0
    if wide.shape[dim] == 0:
        low = high = wide.new_zeros(wide.shape).sum(dim, keepdim=True)
    else:
        low, high = wide.aminmax(dim=dim, keepdim=True)
        low, high = low.clamp(max=0.0), high.clamp(min=0.0)
    if symmetric:
        scale = (torch.maximum(-low, high) / 127.0).clamp(min=LEAST_SCALE)
        return scale, torch.zeros_like(scale, dtype=torch.int32)
    finite = low.isfinite() & high.isfinite()
    scale = (high / 255.0 - low / 255.0).clamp(min=LEAST_SCALE)
    zero = torch.where(finite, torch.round(-low * scale.reciprocal()), 0.0)
    return scale, zero.to(torch.int32)


def codes(x: Tensor, scale: Tensor, zero: Tensor, symmetric: bool) -> Tensor:
    """Return the codes of ``x``; values outside of the range are saturated, NaN gets the code of 0.

    With a scale that is not finite all codes are the code of 0.
    """
    value = torch.round(x.float() * scale.reciprocal())
    value = torch.where(value.isnan() | ~scale.isfinite(), 0.0, value) + zero
    low, high = (-128, 127) if symmetric else (0, 255)
    return value.clamp(low, high).to(torch.int8 if symmetric else torch.uint8)


def _quantize_per_token(x: Tensor, symmetric: bool = True) -> tuple[Tensor, Tensor, Tensor]:
    """Quantize each row of ``x`` to 8 bits with a scale of its own.

    Symmetric codes are int8 with ``scale = max|x| / 127``. The others are uint8 with
    ``scale = (max - min) / 255`` and ``zero = round(-min / scale)``, where the range includes 0. A row is about
    ``(code - zero) * scale``. Codes are rounded to nearest even; dividing by the scale is multiplying by its float32
    reciprocal. A row of zeros has the scale 2^-120. A row with a NaN or an infinity has a scale that is not finite and
    the code of 0 everywhere, so everything computed from it is NaN.

    Args:
        x: ``[..., K]``, float32, bfloat16 or float16.
        symmetric: Whether codes are signed, without a zero point.

    Returns:
        ``(codes, scale, zero)``: int8 or uint8 ``[..., K]``, float32 ``[..., 1]`` and int32 ``[..., 1]``; zero is 0
        for symmetric codes.
    """
    scale, zero = choose(x, symmetric, -1)
    return codes(x, scale, zero, symmetric), scale, zero


def _new_codes(x: Tensor, symmetric: bool) -> Tensor:
    return x.new_empty(x.shape, dtype=torch.int8 if symmetric else torch.uint8)


def _per_token_fake(a: Arguments) -> tuple[Tensor, Tensor, Tensor]:
    rows = (*a.x.shape[:-1], 1)
    return (
        _new_codes(a.x, a.symmetric),
        a.x.new_empty(rows, dtype=torch.float32),
        a.x.new_empty(rows, dtype=torch.int32),
    )


def _inputs(dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    for name, x in row_samples(dtype):
        if x.numel() < 2**15:  # the larger ones add time, not cases
            yield name, x
    yield "positive", randn(5, 200, dtype=dtype, seed=71).abs() + 1
    yield "ties", torch.arange(-127, 128).to(dtype).expand(2, 255)


def _per_token_samples(dtype: torch.dtype) -> Iterator[Sample]:
    for name, x in _inputs(dtype):
        yield Sample((x,), id=name)
    for name, x in list(_inputs(dtype))[3::2]:
        yield Sample((x, False), id=f"{name}-asymmetric")


def stock_per_token(x: Tensor, symmetric: bool = True) -> tuple[Tensor, Tensor, Tensor]:
    """What models write in stock PyTorch."""
    scale = x.abs().amax(-1, keepdim=True).float() / 127.0
    value = torch.round(x * (1.0 / scale)).clamp(-128, 127).to(torch.int8)
    return value, scale, torch.zeros_like(scale, dtype=torch.int32)


def _per_token_bench() -> Iterator[BenchCase]:
    for case in row_bench(
        lambda rows, columns, dtype: (randn(rows, columns, dtype=dtype),), moves=1
    ):
        rows, columns = map(int, case.id.split("x"))
        yield BenchCase(
            case.id,
            case.make,
            lambda dtype, r=rows, c=columns: r * c * (dtype.itemsize + 1) + 8 * r,
        )


register_op(
    reference=_quantize_per_token,
    check=lambda a: check_tensor(a.op, "x", a.x),
    fake=_per_token_fake,
    samples=_per_token_samples,
    stock=stock_per_token,
    backward=None,
    lift=False,
    tolerance={d: (0.0, 0.0) for d in FLOATS},
    bench=_per_token_bench,
    summary="Quantize each row to 8 bits with its own scale",
)


def check_one(scale: Tensor, zero: Tensor | None) -> None:
    """Check the values that are given to `quantize_per_tensor`."""
    op = "quantize_per_tensor"
    read_once(scale, _check_scale)
    code = 0 if zero is None else int(read_once(zero, Tensor.item))
    check(0 <= code <= 255, op, "zero", "be in [0, 255]", code)


def _check_scale(scale: Tensor) -> None:
    check_scale("quantize_per_tensor", "scale", scale)


def _quantize_per_tensor(
    x: Tensor, scale: Tensor | None = None, zero: Tensor | None = None, symmetric: bool = True
) -> tuple[Tensor, Tensor, Tensor]:
    """Quantize ``x`` to 8 bits with one scale, which is given (static) or computed from its range (dynamic).

    See `quantize_per_token` for the codes. With a given scale, values outside of its range are saturated, to -128 too,
    and NaN gets the code of 0.

    Args:
        x: Any shape, float32, bfloat16 or float16.
        scale: One element, float32, finite and at least 2^-120; None to compute it from the range of ``x``.
        zero: One element, int32 in ``[0, 255]``, only with ``scale`` and for codes that are not symmetric; 0 if None.
        symmetric: Whether codes are signed, without a zero point.

    Returns:
        ``(codes, scale, zero)``: int8 or uint8 in the shape of ``x``, and 0-D float32 and int32 tensors.
    """
    if scale is None:
        new_scale, new_zero = choose(x, symmetric, None)
    else:
        new_scale = scale.float().clone()
        new_zero = torch.zeros(1, dtype=torch.int32, device=x.device)
        if zero is not None:
            new_zero = zero.clone()
        check_one(scale, zero)
    new_scale, new_zero = new_scale.reshape(()), new_zero.reshape(())
    return codes(x, new_scale, new_zero, symmetric), new_scale, new_zero


def _check_one(op: str, name: str, value: Tensor, dtype: torch.dtype, x: Tensor) -> None:
    check_device(op, name, value, x)
    check_dtype_in(op, name, value, dtype)
    check(value.numel() == 1, op, name, "have one element", list(value.shape))


def _per_tensor_check(a: Arguments) -> None:
    check_tensor(a.op, "x", a.x, min_dim=0)
    if a.scale is not None:
        _check_one(a.op, "scale", a.scale, torch.float32, a.x)
    if a.zero is not None:
        a.require(a.scale is not None, "zero", "be None without scale", "a tensor")
        a.require(not a.symmetric, "zero", "be None for symmetric codes", "a tensor")
        _check_one(a.op, "zero", a.zero, torch.int32, a.x)


def _per_tensor_fake(a: Arguments) -> tuple[Tensor, Tensor, Tensor]:
    return (
        _new_codes(a.x, a.symmetric),
        a.x.new_empty((), dtype=torch.float32),
        a.x.new_empty((), dtype=torch.int32),
    )


def _per_tensor_samples(dtype: torch.dtype) -> Iterator[Sample]:
    for name, x in list(_inputs(dtype))[1::2]:
        yield Sample((x,), id=name)
        yield Sample((x, None, None, False), id=f"{name}-asymmetric")
    for name, x in list(_inputs(dtype))[4::3]:
        yield Sample((x, torch.tensor(0.02)), id=f"{name}-static")
        yield Sample(
            (x, torch.tensor([0.01]), torch.tensor([7], dtype=torch.int32), False),
            id=f"{name}-static-asymmetric",
        )
    yield Sample((randn(3, 5000, dtype=dtype, seed=72),), id="several_pieces")
    yield Sample((randn(dtype=dtype, seed=73),), id="scalar")


def stock_per_tensor(
    x: Tensor, scale: Tensor | None = None, zero: Tensor | None = None, symmetric: bool = True
) -> tuple[Tensor, Tensor, Tensor]:
    """What models write in stock PyTorch."""
    if scale is None:
        scale = x.abs().amax().float() / 127.0
    value = torch.round(x * (1.0 / scale)).clamp(-128, 127).to(torch.int8)
    return value, scale, torch.zeros_like(scale, dtype=torch.int32)


def _per_tensor_bench() -> Iterator[BenchCase]:
    for rows in (1, 512):
        for scale in (None, torch.tensor(0.03)):
            yield BenchCase(
                f"{rows}x4096-{'dynamic' if scale is None else 'static'}",
                lambda dtype, r=rows, s=scale: (randn(r, 4096, dtype=dtype), s),
                lambda dtype, r=rows: r * 4096 * (dtype.itemsize + 1),
            )


register_op(
    reference=_quantize_per_tensor,
    check=_per_tensor_check,
    fake=_per_tensor_fake,
    samples=_per_tensor_samples,
    stock=stock_per_tensor,
    backward=None,
    lift=False,
    tolerance={d: (0.0, 0.0) for d in FLOATS},
    bench=_per_tensor_bench,
    summary="Quantize a tensor to 8 bits with one given or computed scale",
)

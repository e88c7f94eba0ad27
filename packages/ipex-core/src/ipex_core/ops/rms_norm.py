# SPDX-License-Identifier: Apache-2.0
"""Root-mean-square normalization, alone and after a residual addition, and norms whose result is quantized to int8."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from ipex_core.library.checks import (
    acc,
    check_broadcastable,
    check_device,
    dtype_name,
    randn,
    row_samples,
)
from ipex_core.library.kernels import register_op, run_op, specs
from ipex_core.library.spec import Arguments, BenchCase, Sample
from ipex_core.ops.layer_norm import _normalize as normalize_layer
from ipex_core.ops.layer_norm import (
    bench_of_norm,
    check_norm,
    fake_norm,
    fake_sum,
    stock_after_sum,
)
from ipex_core.ops.quantize import check_scale, choose, codes


def _normalize(x: Tensor, weight: Tensor | None, eps: float, weight_offset: float) -> Tensor:
    y = acc(x)
    y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + eps)
    if weight is not None:
        y = y * (acc(weight) + weight_offset)
    return y.to(x.dtype)


def of_rows(x: Tensor, weight: Tensor | None) -> bool:
    """Return whether the ops of norms take a weight: None, or a vector in the dtype of ``x`` or float32."""
    return weight is None or (
        weight.dim() == 1
        and weight.dtype in (x.dtype, torch.float32)
        and x.dtype != torch.float64  # without a kernel
    )


def times(op: str, x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """Return the norm of the last dimension of ``x`` times a weight of any shape and float dtype, rounded once.

    Raises:
        OpArgumentError: The weight does not broadcast to ``x``.
    """
    wide = acc(x)
    y: Tensor = run_op("rms_norm", wide.dtype, wide, None, eps)
    if weight is not None:
        check_broadcastable(op, "weight", weight, x.shape, "x")
        y = y * acc(weight)
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


def _add_rms_norm_(
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


register_op(
    reference=_rms_norm,
    check=check_norm,
    fake=fake_norm,
    samples=_samples,
    stock=_stock,
    bench=bench_of_norm(1, 1e-6),
    summary="RMS normalization over the last dimension",
)
register_op(
    reference=_add_rms_norm,
    check=check_norm,
    fake=fake_sum,
    autocast="widest_type",
    samples=_add_samples,
    stock=stock_after_sum(_stock),
    bench=bench_of_norm(1, 1e-6, added=1),
    summary="Residual addition followed by RMS normalization",
)
register_op(
    mutates=("residual",),
    reference=_add_rms_norm_,
    check=check_norm,
    fake=fake_norm,
    samples=_in_place_samples,
    stock=stock_after_sum(_stock, in_place=True),
    bench=bench_of_norm(1, 1e-6, added=1),
    summary="Residual addition in place followed by RMS normalization",
)


# --- quantized results ------------------------------------------------------------------------------------------------


def _quantize(op: str, y: Tensor, scale: Tensor | None) -> tuple[Tensor, Tensor]:
    if scale is None:
        scale, zero = choose(y, True, -1)
        return codes(y, scale, zero, True), scale
    scale = scale.reshape(()).clone()
    check_scale(op, "scale", scale)
    return codes(y, scale, torch.zeros_like(scale, dtype=torch.int32), True), scale


def _rms_norm_quant(
    x: Tensor,
    weight: Tensor | None,
    eps: float = 1e-6,
    weight_offset: float = 0.0,
    scale: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Normalize each row as `rms_norm` does and quantize the result to int8.

    The same as `rms_norm` followed by `quantize_per_token`, or by `quantize_per_tensor` with a given scale, without
    writing the normalized rows to memory.

    Args:
        x: ``[..., C]``, float32, bfloat16 or float16.
        weight: ``[C]`` in the dtype of ``x`` or float32, or None.
        eps: Added to the mean square.
        weight_offset: Added to ``weight``; ignored without a weight.
        scale: One element, float32: the scale of all rows (static quantization). None: each row has its own,
            ``max|y| / 127``.

    Returns:
        ``(codes, scale)``: int8 in the shape of ``x``, and float32 ``[..., 1]``, or 0-D for a given scale.
    """
    return _quantize("rms_norm_quant", _normalize(x, weight, eps, weight_offset), scale)


def _add_rms_norm_quant(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None,
    eps: float = 1e-6,
    weight_offset: float = 0.0,
    scale: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Add ``x`` to ``residual`` in place, then normalize and quantize the sum as `rms_norm_quant` does.

    Args:
        x: ``[..., C]``, float32, bfloat16 or float16.
        residual: Like ``x``; becomes the sum.
        weight: As for `rms_norm_quant`.
        eps: As for `rms_norm_quant`.
        weight_offset: As for `rms_norm_quant`.
        scale: As for `rms_norm_quant`.

    Returns:
        ``(codes, scale)`` as `rms_norm_quant`.
    """
    if scale is not None:
        check_scale("add_rms_norm_quant_", "scale", scale.reshape(()))
    residual.add_(x)
    y = _normalize(residual, weight, eps, weight_offset)
    return _quantize("add_rms_norm_quant_", y, scale)


def _layer_norm_quant(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float = 1e-5,
    scale: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Normalize each row as `layer_norm` does and quantize the result to int8.

    Args:
        x: ``[..., C]``, float32, bfloat16 or float16.
        weight: ``[C]`` in the dtype of ``x`` or float32, or None.
        bias: ``[C]`` in the dtype of ``x`` or float32, or None.
        eps: Added to the variance.
        scale: As for `rms_norm_quant`.

    Returns:
        ``(codes, scale)`` as `rms_norm_quant`.
    """
    return _quantize("layer_norm_quant", normalize_layer(x, weight, bias, eps), scale)


def _add_layer_norm_quant(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float = 1e-5,
    scale: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Add ``x`` to ``residual`` in place, then normalize and quantize the sum as `layer_norm_quant` does.

    Args:
        x: ``[..., C]``, float32, bfloat16 or float16.
        residual: Like ``x``; becomes the sum.
        weight: As for `layer_norm_quant`.
        bias: As for `layer_norm_quant`.
        eps: As for `layer_norm_quant`.
        scale: As for `rms_norm_quant`.

    Returns:
        ``(codes, scale)`` as `rms_norm_quant`.
    """
    if scale is not None:
        check_scale("add_layer_norm_quant_", "scale", scale.reshape(()))
    residual.add_(x)
    y = normalize_layer(residual, weight, bias, eps)
    return _quantize("add_layer_norm_quant_", y, scale)


def _quant_check(a: Arguments) -> None:
    check_norm(a)
    if a.scale is None:
        return
    check_device(a.op, "scale", a.scale, a.x)
    a.require(
        a.scale.dtype == torch.float32, "scale", "have dtype float32", dtype_name(a.scale.dtype)
    )
    a.require(a.scale.numel() == 1, "scale", "have one element", list(a.scale.shape))


def _quant_fake(a: Arguments) -> tuple[Tensor, Tensor]:
    shape = () if a.scale is not None else (*a.x.shape[:-1], 1)
    return a.x.new_empty(a.x.shape, dtype=torch.int8), a.x.new_empty(shape, dtype=torch.float32)


def _samples_of(norm: str, defaults: tuple[float, ...]) -> Callable[..., Iterator[Sample]]:
    """Return samples of the fused op from samples of the normalization alone."""

    def samples(dtype: torch.dtype) -> Iterator[Sample]:
        for sample in specs()[norm].samples(dtype):
            # Where all elements are equal up to rounding, the order of a sum decides about the codes.
            if sample.args[0].numel() > 2**15 or sample.id == "large_mean":
                continue
            yield sample
            if sample.id in ("4x129", "7x1024", "no_weight", "special_values", "no_rows"):
                fixed = tuple(a for a in sample.args if not isinstance(a, float))
                scale = torch.tensor([0.03])
                yield Sample((*fixed, *defaults, scale), id=f"{sample.id}-static")

    return samples


def _stock_quant(y: Tensor) -> tuple[Tensor, Tensor]:
    scale = y.abs().amax(-1, keepdim=True).float() / 127.0
    return torch.round(y * (1.0 / scale)).clamp(-128, 127).to(torch.int8), scale


def _stock_of(norm: str) -> Callable[..., tuple[Tensor, Tensor]]:
    def stock(*args: Any) -> tuple[Tensor, Tensor]:
        function = specs()[norm].stock
        assert function is not None
        return _stock_quant(function(*args))

    return stock


def _bench_of(norm: str) -> Callable[[], Iterator[BenchCase]]:
    def bench() -> Iterator[BenchCase]:
        bench_norm = specs()[norm].bench
        assert bench_norm is not None
        for case in bench_norm():
            rows, columns = map(int, case.id.split("x"))
            yield BenchCase(
                case.id,
                case.make,
                lambda dtype, n=rows * columns, m=3 if "add" in norm else 1: (
                    n * (m * dtype.itemsize + 1)
                ),
            )

    return bench


for _name, _norm, _reference, _defaults in (
    ("rms_norm_quant", "rms_norm", _rms_norm_quant, (1e-6, 0.0)),
    ("add_rms_norm_quant_", "add_rms_norm_", _add_rms_norm_quant, (1e-6, 0.0)),
    ("layer_norm_quant", "layer_norm", _layer_norm_quant, (1e-5,)),
    ("add_layer_norm_quant_", "add_layer_norm_", _add_layer_norm_quant, (1e-5,)),
):
    register_op(
        name=_name,
        mutates=("residual",) if _name.startswith("add") else (),
        reference=_reference,
        check=_quant_check,
        fake=_quant_fake,
        samples=_samples_of(_norm, _defaults),
        stock=_stock_of(_norm),
        backward=None,
        lift=False,
        # An element that rounds to its neighbor moves the scale by 2^-8 in bfloat16 and the codes by one.
        tolerance={
            torch.float32: (8e-3, 1e-5),
            torch.bfloat16: (1.6e-2, 1e-2),
            torch.float16: (2e-3, 2e-3),
            torch.int8: (0.0, 1.0),
        },
        bench=_bench_of(_norm),
        summary=f"`{_norm}` followed by quantization to int8",
    )

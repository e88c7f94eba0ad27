# SPDX-License-Identifier: Apache-2.0
"""Normalizations fused with the quantization of their result to int8, the input of an int8 linear."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from ipex_core.library.arguments import Arguments
from ipex_core.library.checks import (
    check_device,
    check_like,
    check_not_expanded,
    check_tensor,
    check_vector,
    dtype_name,
)
from ipex_core.library.kernels import register, specs
from ipex_core.library.spec import BenchCase, OpSpec, Sample
from ipex_core.ops.int8.quantize import check_scale, choose, codes
from ipex_core.ops.norm.layer_norm import _normalize as normalize_layer
from ipex_core.ops.norm.rms_norm import _normalize as normalize_rms

Tensor = torch.Tensor


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
    return _quantize("rms_norm_quant", normalize_rms(x, weight, eps, weight_offset), scale)


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
    y = normalize_rms(residual, weight, eps, weight_offset)
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


def _check(a: Arguments) -> None:
    given = vars(a)  # the ops differ in their arguments, not in what is wrong with one
    check_tensor(a.op, "x", a.x)
    if "residual" in given:
        check_like(a.op, "residual", a.residual, a.x)
        check_not_expanded(a.op, "residual", a.residual)
    check_vector(a.op, "weight", a.weight, a.x)
    check_vector(a.op, "bias", given.get("bias"), a.x)
    if a.scale is None:
        return
    check_device(a.op, "scale", a.scale, a.x)
    a.require(
        a.scale.dtype == torch.float32, "scale", "have dtype float32", dtype_name(a.scale.dtype)
    )
    a.require(a.scale.numel() == 1, "scale", "have one element", list(a.scale.shape))


def _fake(a: Arguments) -> tuple[Tensor, Tensor]:
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


def _stock_quant(y: Tensor, scale: Tensor | None = None) -> tuple[Tensor, Tensor]:
    if scale is None:
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


for _name, _norm, _reference, _schema, _defaults in (
    (
        "rms_norm_quant",
        "rms_norm",
        _rms_norm_quant,
        "Tensor x, Tensor? weight, float eps=1e-6, float weight_offset=0.0",
        (1e-6, 0.0),
    ),
    (
        "add_rms_norm_quant_",
        "add_rms_norm_",
        _add_rms_norm_quant,
        "Tensor x, Tensor(a!) residual, Tensor? weight, float eps=1e-6, float weight_offset=0.0",
        (1e-6, 0.0),
    ),
    (
        "layer_norm_quant",
        "layer_norm",
        _layer_norm_quant,
        "Tensor x, Tensor? weight, Tensor? bias, float eps=1e-5",
        (1e-5,),
    ),
    (
        "add_layer_norm_quant_",
        "add_layer_norm_",
        _add_layer_norm_quant,
        "Tensor x, Tensor(a!) residual, Tensor? weight, Tensor? bias, float eps=1e-5",
        (1e-5,),
    ),
):
    register(
        OpSpec(
            name=_name,
            schema=f"({_schema}, Tensor? scale=None) -> (Tensor, Tensor)",
            reference=_reference,
            check=_check,
            fake=_fake,
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
    )

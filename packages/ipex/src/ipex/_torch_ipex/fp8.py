# SPDX-License-Identifier: Apache-2.0
"""Second names of ops on 8-bit floating-point numbers."""

from __future__ import annotations

import torch

from ipex._torch_ipex._alias_op import alias_op
from ipex_core._fp8 import DTYPES, amax, to_fp8
from ipex_core._spec import check

Tensor = torch.Tensor


@alias_op("dynamic_scaled_fp8_quant(Tensor(a!) out, Tensor input, Tensor(b!) scale) -> ()")
def _dynamic_scaled_fp8_quant(out: Tensor, input: Tensor, scale: Tensor) -> None:
    """Write ``input / scale`` to ``out`` and ``max|input| / largest number of out`` to ``scale``."""
    largest = torch.finfo(out.dtype).max
    _static(out, input, scale.copy_(input.abs().amax().float().clamp(min=1e-12) / largest))


@alias_op("static_scaled_fp8_quant(Tensor(a!) out, Tensor input, Tensor scale) -> ()")
def _static_scaled_fp8_quant(out: Tensor, input: Tensor, scale: Tensor) -> None:
    _static(out, input, scale)


def _static(out: Tensor, input: Tensor, scale: Tensor) -> None:
    largest = torch.finfo(out.dtype).max
    out.copy_((input.float() / scale).clamp(-largest, largest))


def _dtype(op: str, name: str, value: int) -> torch.dtype:
    check(value in DTYPES, op, name, "be 24 (e4m3) or 23 (e5m2)", value)
    return DTYPES[value]


@alias_op(
    "cast_to_fp8(Tensor input, Tensor scale, Tensor(a!) amax_history, Tensor(b!) scale_inv, int idx, int otype)"
    " -> Tensor"
)
def _cast_to_fp8(
    input: Tensor, scale: Tensor, amax_history: Tensor, scale_inv: Tensor, idx: int, otype: int
) -> Tensor:
    """Return ``input * scale[idx]`` in 8 bits; enter its magnitude into row 0 of the history."""
    dtype = _dtype("cast_to_fp8", "otype", otype)
    current = amax_history[0]
    current[idx] = torch.maximum(current[idx], amax(input))
    scale_inv[idx] = 1.0 / scale[idx]
    return to_fp8(input, scale[idx], dtype)


@alias_op(
    "cast_from_fp8(Tensor input, Tensor scale_inv, int idx, int itype, ScalarType otype) -> Tensor"
)
def _cast_from_fp8(
    input: Tensor, scale_inv: Tensor, idx: int, itype: int, otype: torch.dtype
) -> Tensor:
    dtype = _dtype("cast_from_fp8", "itype", itype)
    return (_floats(input, dtype) * scale_inv[idx]).to(otype)


@alias_op(
    "fp8_linear(Tensor input, Tensor input_scale_inv, int input_idx, int input_type, Tensor weight,"
    " Tensor weight_scale_inv, int weight_idx, int weight_type, Tensor bias, Tensor(a!) output) -> Tensor"
)
def _fp8_linear(
    input: Tensor,
    input_scale_inv: Tensor,
    input_idx: int,
    input_type: int,
    weight: Tensor,
    weight_scale_inv: Tensor,
    weight_idx: int,
    weight_type: int,
    bias: Tensor,
    output: Tensor,
) -> Tensor:
    """Write the product of 8-bit operands to ``output``; an empty bias is none. The result is a copy of it."""
    rows = _floats(input, _dtype("fp8_linear", "input_type", input_type))
    columns = _floats(weight, _dtype("fp8_linear", "weight_type", weight_type))
    y = torch.nn.functional.linear(
        rows * input_scale_inv[input_idx],
        columns * weight_scale_inv[weight_idx],
        bias.float() if bias.numel() else None,
    )
    return output.copy_(y.view_as(output)).clone()


def _floats(values: Tensor, dtype: torch.dtype) -> Tensor:
    return (values.view(dtype) if values.dtype == torch.uint8 else values).float()

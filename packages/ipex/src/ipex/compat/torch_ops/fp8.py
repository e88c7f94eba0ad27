# SPDX-License-Identifier: Apache-2.0
"""Second names of ops on 8-bit floating-point numbers."""

from __future__ import annotations

import torch
from torch import Tensor

from ipex.compat.torch_ops import alias_op
from ipex_core.errors import OpArgumentError
from ipex_core.library.spec import check
from ipex_core.packing.quantize import DTYPES, amax, to_fp8


@alias_op("dynamic_scaled_fp8_quant", mutates=("out", "scale"))
def _dynamic_scaled_fp8_quant(out: Tensor, input: Tensor, scale: Tensor) -> None:
    """Write ``input / scale`` to ``out`` and ``max|input| / largest number of out`` to ``scale``."""
    largest = torch.finfo(out.dtype).max
    _static(out, input, scale.copy_(input.abs().amax().float().clamp(min=1e-12) / largest))


@alias_op("static_scaled_fp8_quant", mutates=("out",))
def _static_scaled_fp8_quant(out: Tensor, input: Tensor, scale: Tensor) -> None:
    _static(out, input, scale)


def _static(out: Tensor, input: Tensor, scale: Tensor) -> None:
    largest = torch.finfo(out.dtype).max
    out.copy_((input.float() / scale).clamp(-largest, largest))


def _dtype(op: str, name: str, value: int) -> torch.dtype:
    check(value in DTYPES, op, name, "be 24 (e4m3) or 23 (e5m2)", value)
    return DTYPES[value]


@alias_op("cast_to_fp8", mutates=("amax_history", "scale_inv"))
def _cast_to_fp8(
    input: Tensor, scale: Tensor, amax_history: Tensor, scale_inv: Tensor, idx: int, otype: int
) -> Tensor:
    """Return ``input * scale[idx]`` in 8 bits; enter its magnitude into row 0 of the history."""
    dtype = _dtype("cast_to_fp8", "otype", otype)
    current = amax_history[0]
    current[idx] = torch.maximum(current[idx], amax(input))
    scale_inv[idx] = 1.0 / scale[idx]
    return to_fp8(input, scale[idx], dtype)


@alias_op("cast_from_fp8")
def _cast_from_fp8(
    input: Tensor, scale_inv: Tensor, idx: int, itype: int, otype: torch.dtype
) -> Tensor:
    dtype = _dtype("cast_from_fp8", "itype", itype)
    return (_floats(input, dtype) * scale_inv[idx]).to(otype)


@alias_op("fp8_linear", mutates=("output",))
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
    """Write the product of 8-bit operands to ``output``; an empty bias means no bias. The result is a copy of it."""
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


# --- as on XPU, where a scale belongs to one tensor -------------------------------------------------------------------


@alias_op("cast_to_fp8.Tensor")
def _cast_tensor_to_fp8(
    input: Tensor,
    scale: Tensor | None,
    stochastic: bool,
    is_amax: bool,
    dtype: torch.dtype,
    scale_shape: list[int] | None = None,
) -> tuple[Tensor, Tensor]:
    """Return ``input * scale`` in 8 bits and the largest magnitude, 0 if it is not asked for."""
    op = "cast_to_fp8"
    check(dtype in DTYPES.values(), op, "dtype", "be float8_e4m3fn or float8_e5m2", dtype)
    check(not stochastic, op, "stochastic", "be False: numbers are rounded to nearest", stochastic)
    factor = input.new_ones(()) if scale is None else scale
    if scale_shape is not None:
        factor = factor.reshape(scale_shape)
    largest = amax(input) if is_amax else input.new_zeros(())
    return to_fp8(input, factor, dtype), largest


@alias_op("cast_from_fp8.Tensor")
def _cast_tensor_from_fp8(input: Tensor, scale: Tensor | None, dtype: torch.dtype) -> Tensor:
    return _scaled(input, scale).to(dtype)


@alias_op("fp8_gemm")
def _fp8_gemm(
    A: Tensor,
    trans_A: bool,
    B: Tensor,
    trans_B: bool,
    D: Tensor | None,
    out_dtype: torch.dtype,
    A_scale_inv: Tensor | None = None,
    B_scale_inv: Tensor | None = None,
    bias: Tensor | None = None,
    accumulate: bool = False,
) -> Tensor:
    """Return ``(A * A_scale_inv) @ (B * B_scale_inv) + bias``, plus ``D`` if it is accumulated."""
    left, right = _scaled(A, A_scale_inv), _scaled(B, B_scale_inv)
    y = (left.mT if trans_A else left) @ (right.mT if trans_B else right)
    if bias is not None:
        y = y + bias.float()
    if accumulate:
        if D is None:
            raise OpArgumentError("fp8_gemm: D must be a tensor to accumulate to, got None")
        y = y + D.float()
    return y.to(out_dtype)


@alias_op("fp8_gemm_w8a16")
def _fp8_gemm_w8a16(
    input: Tensor,
    weight: Tensor,
    trans: bool,
    scale: Tensor | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """Return ``input @ (weight * scale) + bias`` in the dtype of the input, for a weight of 8-bit numbers."""
    right = _scaled(weight, scale).to(input.dtype)
    y = input @ (right.mT if trans else right)
    return y if bias is None else y + bias.to(y.dtype)


def _scaled(values: Tensor, scale: Tensor | None) -> Tensor:
    return values.float() if scale is None else values.float() * scale.float()

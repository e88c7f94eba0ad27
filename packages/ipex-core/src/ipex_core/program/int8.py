# SPDX-License-Identifier: Apache-2.0
"""The built-ins ``int8_conv`` and ``int8_conv_sum_``: convolutions of static INT8 on 8-bit codes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.nn import functional

from ipex_core.library.checks import check_dtype_in
from ipex_core.library.spec import CHANNELS_LAST, FLOATS, check, dtype_name
from ipex_core.program.tensors import check_window

_OP = "int8_conv"
_ACTIVATIONS = ("none", "relu", "relu6", "silu")
_RESULTS = (torch.uint8, torch.float32, torch.bfloat16)
#: The place of the residual.
RESIDUAL = 14


def check_int8_conv(*args: Any) -> None:
    """Check what does not depend on the tensors."""
    stride, padding, dilation, groups, activation, dtype = args[6:12]
    check_window(_OP, len(stride), stride, padding, dilation)
    check(not isinstance(groups, int) or groups > 0, _OP, "groups", "be positive", groups)
    known = activation in _ACTIVATIONS
    check(known, _OP, "activation", f"be one of {', '.join(_ACTIVATIONS)}", activation)
    names = ", ".join(map(dtype_name, _RESULTS))
    check(dtype in _RESULTS, _OP, "dtype", f"be {names}", dtype_name(dtype))
    plain = dtype == torch.uint8 or args[12:14] == (1.0, 0)
    got = f"{args[12]}, {args[13]}"
    wanted = "be 1 and 0 for a result that is no codes"
    check(plain, _OP, "output_scale, output_zero", wanted, got)
    for name, scale, zero in (
        ("x", *args[3:5]),
        ("output", *args[12:14]),
        ("residual", *args[15:17]),
    ):
        check(scale > 0, _OP, f"{name}_scale", "be positive", scale)
        fits = not isinstance(zero, int) or 0 <= zero < 256
        check(fits, _OP, f"{name}_zero", "be in [0, 256)", zero)


def _check_rows(name: str, value: torch.Tensor, rows: int) -> None:
    got = dtype_name(value.dtype)
    check(value.dtype == torch.float32, _OP, name, "have dtype float32", got)
    fits = list(value.shape) == [rows] and value.is_contiguous()
    check(fits, _OP, name, f"be contiguous of shape {[rows]}", list(value.shape))


def _codes(x: torch.Tensor, scale: float, zero: int) -> torch.Tensor:
    one, by = torch.tensor(scale, dtype=torch.float32), torch.tensor([zero], dtype=torch.int32)
    found: torch.Tensor = torch.ops.ipex.quantize_per_tensor(x.contiguous(), one, by, False)[0]
    return found


def _real(x: torch.Tensor, scale: float, zero: int) -> torch.Tensor:
    return (x.float() - zero) * scale if x.dtype == torch.uint8 else x.float()


def int8_conv(
    x: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    x_scale: float,
    x_zero: int,
    bias: torch.Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
    activation: str,
    dtype: torch.dtype,
    output_scale: float,
    output_zero: int,
    residual: torch.Tensor | None,
    residual_scale: float,
    residual_zero: int,
) -> torch.Tensor:
    """Convolve codes, add, activate, and return codes or floating-point numbers.

    ``x`` [N, C, ...] or [C, ...] is uint8 codes of ``x_scale`` and ``x_zero``, or floats, which are quantized with
    these. ``weight`` is int8 [O, C / groups, ...] with ``weight_scale`` and ``bias`` float32 [O]. ``residual`` has the
    shape of the result: codes of its own scale, or floats. The result is uint8 codes of ``output_scale`` and
    ``output_zero``, float32 or bfloat16. ``int8_conv_sum_`` may overwrite the residual.
    """
    args = (stride, padding, dilation, groups, activation, dtype, output_scale, output_zero)
    check_int8_conv(
        *(x, weight, weight_scale, x_scale, x_zero, bias, *args),
        *(residual, residual_scale, residual_zero),
    )
    check_dtype_in(_OP, "x", x, torch.uint8, *FLOATS)
    check_dtype_in(_OP, "weight", weight, torch.int8)
    sizes, rows = list(weight.shape), weight.shape[0]
    fits = 3 <= weight.dim() <= 5 and weight.numel() > 0
    check(fits, _OP, "weight", "be 3-D to 5-D and not empty", sizes)
    dims = weight.dim() - 2
    check(len(stride) == dims, _OP, "stride", f"have {dims} numbers", len(stride))
    check(rows % groups == 0, _OP, "groups", f"be a divisor of {rows}", groups)
    _check_rows("weight_scale", weight_scale, rows)
    if bias is not None:
        _check_rows("bias", bias, rows)
    lead, channels = x.dim() - dims - 1, sizes[1] * groups
    fits = lead in (0, 1) and x.shape[lead] == channels
    wanted = f"have {dims} dimensions behind {channels} channels"
    check(fits, _OP, "x", wanted, list(x.shape))
    shape = [*x.shape[:lead], rows]
    for i in range(dims):
        size, window = x.shape[lead + 1 + i], dilation[i] * (sizes[2 + i] - 1) + 1
        room = size + 2 * padding[i] - window
        wanted = f"have room for a window of {window} in dimension {lead + 1 + i}"
        check(size > 0 and room >= 0, _OP, "x", wanted, list(x.shape))
        shape.append(room // stride[i] + 1)
    if residual is not None:
        check_dtype_in(_OP, "residual", residual, torch.uint8, *FLOATS)
        # oneDNN has no others behind an addition.
        simple = dims == 3 or activation in _ACTIVATIONS[:2]
        check(simple, _OP, "activation", "be none or relu behind a residual", activation)
        fits = list(residual.shape) == shape
        check(fits, _OP, "residual", f"have shape {shape}", list(residual.shape))
    codes = x if x.dtype == torch.uint8 else _codes(x, x_scale, x_zero)
    # float64 holds the sums of products of codes exactly.
    convolve = (functional.conv1d, functional.conv2d, functional.conv3d)[dims - 1]
    sums = convolve(
        *(codes.double() - x_zero, weight.double(), None, stride, padding, dilation, groups)
    )
    per_row = (x_scale * weight_scale.double()).view(-1, *[1] * dims)
    y = (sums * per_row).float()
    y = y if bias is None else y + bias.view(-1, *[1] * dims)
    if residual is not None:
        y = y + _real(residual, residual_scale, residual_zero)
    if activation != "none":
        y = getattr(functional, activation)(y)
    y = _codes(y, output_scale, output_zero) if dtype == torch.uint8 else y.to(dtype)
    last = CHANNELS_LAST.get(y.dim())
    return y if last is None or not lead else y.contiguous(memory_format=last)

# SPDX-License-Identifier: Apache-2.0
"""Quantizing weights, per output channel or per block of input channels, and back: IPEX's functions and numbers.

Rows of a weight are output channels. The extremes of a row, or of a block of a row, set its scale; the range always
contains zero, and a scale is never below the spacing of float32 at 1.

==========  =============================  =========================  ====================================
dtype       scale                          zero point                 code
==========  =============================  =========================  ====================================
INT8 sym    ``max|w| / 127``               none                       ``clamp(round(w / s), -128, 127)``
INT8 asym   ``(max - min) / 255``          ``-round(min / s) - 128``  ``clamp(round(w / s) + z, -128, 127)``
INT4 sym    ``max|w| / 7``                 none                       ``clamp(round(w / s) + 8, 0, 15)``
INT4 asym   ``(max - min) / 15``           ``-round(min / s)``        ``clamp(round(w / s) + z, 0, 15)``
NF4         ``max|w|``                     none                       nearest of 16 values
FP8         ``max|w| / 448``               none                       e4m3
FP4         ``max|w| / 6``                 none                       e2m1
==========  =============================  =========================  ====================================

Example:
    >>> import torch
    >>> from ipex_quant import WoqWeightDtype, dequantize_per_block, quantize_per_block
    >>> weight = torch.randn(4, 100)
    >>> codes, scales, zeros = quantize_per_block(weight, WoqWeightDtype.INT4, group_size=32)
    >>> codes.shape, scales.shape, zeros.shape
    (torch.Size([4, 50]), torch.Size([4, 4]), torch.Size([4, 4]))
    >>> back = dequantize_per_block(codes, scales, zeros, WoqWeightDtype.INT4, 32, [4, 100])
    >>> bool(((back - weight).abs() <= scales.max()).all())
    True
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ipex_core import woq
from ipex_core.library.spec import check
from ipex_core.packing import quantize as core
from ipex_quant.qconfig.weight_only import WoqWeightDtype, _weight_dtype, weight_format
from ipex_quant.weight.tensor import float_scales, movable

__all__ = [
    "dequantize_per_block",
    "dequantize_per_channel",
    "quantize_per_block",
    "quantize_per_channel",
]

#: Weights quantized at a time: float32 copies of more than that would be larger than the layer.
_PART = 1 << 18


def is_4bit(dtype: WoqWeightDtype) -> bool:
    """Return whether codes of a weight dtype lie in pairs in a byte."""
    return core.QWEIGHT_DTYPES[weight_format(dtype)] == torch.uint8


def quantize_per_channel(
    t: Tensor,
    dtype: Any,
    scales: Tensor | None = None,
    zero_points: Tensor | None = None,
    sym_quant: bool = False,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Quantize a weight with one scale for each output channel.

    Args:
        t: ``[N, K]``, float.
        dtype: A `WoqWeightDtype` other than MXFP4.
        scales: ``[N]`` or ``[N, 1]`` to use, or None: computed from the extremes.
        zero_points: Likewise; goes with ``scales``.
        sym_quant: Without zero points; only INT8 and INT4 can have them.

    Returns:
        ``(codes, scales, zero_points)``: int8 ``[N, K]``, float8_e4m3fn ``[N, K]``, or for 4 bits uint8
        ``[N, ceil(K / 2)]`` with the even column in the low nibble; float32 ``[N]``; int32 ``[N]`` or None.

    Raises:
        OpArgumentError: An argument is not as described.
    """
    op = "quantize_per_channel"
    kind = _checked(op, "t", t, dtype)
    check(kind is not WoqWeightDtype.MXFP4, op, "dtype", "be quantized per block", "MXFP4")
    codes, found, zeros = _quantize(op, t, kind, -1, scales, zero_points, sym_quant)
    return codes, found.flatten(), None if zeros is None else zeros.flatten()


def quantize_per_block(
    input: Tensor,
    dtype: Any,
    group_size: int,
    scales: Tensor | None = None,
    zero_points: Tensor | None = None,
    sym_quant: bool = False,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Quantize a weight with one scale for each block of ``group_size`` input channels of an output channel.

    Args:
        input: ``[N, K]``, float.
        dtype: A `WoqWeightDtype`.
        group_size: Positive, or -1 for all of K. The last block may be shorter and has a scale of its own.
        scales: ``[N, G]`` with G = ceil(K / group_size) to use, or None: computed from the extremes.
        zero_points: Likewise; goes with ``scales``.
        sym_quant: Without zero points; only INT8 and INT4 can have them.

    Returns:
        ``(codes, scales, zero_points)`` as of `quantize_per_channel`, but ``[N, G]`` scales (float32; float8_e8m0fnu
        for MXFP4) and zero points (int32 or None).

    Raises:
        OpArgumentError: An argument is not as described.
    """
    op = "quantize_per_block"
    kind = _checked(op, "input", input, dtype)
    _check_group(op, group_size)
    return _quantize(op, input, kind, group_size, scales, zero_points, sym_quant)


def dequantize_per_channel(
    qt: Tensor,
    scales: Tensor,
    zps: Tensor | None,
    dtype: Any,
    weight_shape: Sequence[int] | None = None,
    dequant_nf4_via_int8: bool = False,
) -> Tensor:
    """Return the float weight of `quantize_per_channel`.

    Args:
        qt: Codes, as `quantize_per_channel` returns them.
        scales: ``[N]`` or ``[N, 1]``.
        zps: Zero points of that shape, or None for symmetric codes.
        dtype: The `WoqWeightDtype` of the codes.
        weight_shape: ``[N, K]``; needed for 4 bits where K is odd.
        dequant_nf4_via_int8: Use the values of NF4 as multiples of 1 / 127, as ``lowp_mode=INT8`` does.

    Returns:
        float32 ``[N, K]``.

    Raises:
        OpArgumentError: An argument is not as described.
    """
    op = "dequantize_per_channel"
    return _dequantize(op, qt, scales, zps, dtype, -1, weight_shape, dequant_nf4_via_int8)


def dequantize_per_block(
    qt: Tensor,
    scales: Tensor,
    zps: Tensor | None,
    dtype: Any,
    group_size: int,
    weight_shape: Sequence[int] | None = None,
    dequant_nf4_via_int8: bool = False,
) -> Tensor:
    """Return the float weight of `quantize_per_block`.

    Args:
        qt: Codes, as `quantize_per_block` returns them.
        scales: ``[N, G]``.
        zps: ``[N, G]`` zero points, or None for symmetric codes.
        dtype: The `WoqWeightDtype` of the codes.
        group_size: Input channels that share a scale, or -1 for all.
        weight_shape: ``[N, K]``; needed for 4 bits where K is odd.
        dequant_nf4_via_int8: Use the values of NF4 as multiples of 1 / 127, as ``lowp_mode=INT8`` does.

    Returns:
        float32 ``[N, K]``.

    Raises:
        OpArgumentError: An argument is not as described.
    """
    op = "dequantize_per_block"
    _check_group(op, group_size)
    return _dequantize(op, qt, scales, zps, dtype, group_size, weight_shape, dequant_nf4_via_int8)


def quantize_in_parts(
    weight: Tensor,
    format: str,
    group_size: int,
    symmetric: bool,
    scale_dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return what `ipex_core.woq.quantize` returns, with temporary memory that does not grow with the weight."""
    n, k = weight.shape
    rows = max(1, _PART // max(k, 1))
    if rows >= n:
        return woq.quantize(weight, format, group_size, symmetric, scale_dtype)
    results: list[Tensor | None] = []
    for start in range(0, n, rows):
        part = woq.quantize(
            weight[start : start + rows], format, group_size, symmetric, scale_dtype
        )
        if not results:
            results = [None if p is None else p.new_empty((n, *p.shape[1:])) for p in part]
        for whole, piece in zip(results, part, strict=True):
            if whole is not None and piece is not None:
                movable(whole)[start : start + rows] = movable(piece)
    codes, scales, zeros = results
    assert codes is not None and scales is not None
    return codes, scales, zeros


def _checked(op: str, name: str, t: Tensor, dtype: Any) -> WoqWeightDtype:
    kind = _weight_dtype(op, dtype)
    check(t.dim() == 2, op, name, "be 2-D", list(t.shape))
    check(t.is_floating_point(), op, name, "be floating point", t.dtype)
    return kind


def _check_group(op: str, group_size: int) -> None:
    check(group_size == -1 or group_size > 0, op, "group_size", "be -1 or positive", group_size)


def _parameters(
    op: str, names: tuple[str, str], scales: Tensor, zeros: Tensor | None, n: int, groups: int
) -> tuple[Tensor, Tensor | None]:
    """Return scales and zero points as ``[N, G]``."""
    results = []
    for name, value in zip(names, (scales, zeros), strict=True):
        if value is not None:
            shape = list(value.shape)
            fits = shape == [n, groups] or (groups == 1 and shape == [n])
            check(fits, op, name, f"have shape [{n}, {groups}]", shape)
            value = value.reshape(n, groups)
        results.append(value)
    first, second = results
    assert first is not None
    return first, second


def _quantize(
    op: str,
    t: Tensor,
    kind: WoqWeightDtype,
    group_size: int,
    scales: Tensor | None,
    zeros: Tensor | None,
    symmetric: bool,
) -> tuple[Tensor, Tensor, Tensor | None]:
    form = weight_format(kind)
    symmetric = symmetric or form not in ("int8", "int4")
    scale_dtype = torch.float32
    if kind is WoqWeightDtype.MXFP4:
        check(group_size == 32, op, "group_size", "be 32 for MXFP4", group_size)
        scale_dtype = torch.float8_e8m0fnu
    check(zeros is None or scales is not None, op, "zero_points", "come with scales", "without")
    if scales is None:
        codes, scales, found = quantize_in_parts(t, form, group_size, symmetric, scale_dtype)
        return codes, scales, None if found is None else found.to(torch.int32)
    n, k = t.shape
    group = k if group_size == -1 else min(group_size, k)
    groups = -(-k // group)
    scales, zeros = _parameters(op, ("scales", "zero_points"), scales, zeros, n, groups)
    if not symmetric:
        check(zeros is not None, op, "zero_points", "be given for asymmetric codes", None)
    scaled = t.float() / core.expand_groups(float_scales(scales), k, group)
    if not symmetric:
        assert zeros is not None
        scaled = torch.round(scaled) + core.expand_groups(zeros.float(), k, group)
    return core._encode(scaled, form, symmetric), scales, None if symmetric else zeros


def _dequantize(
    op: str,
    qt: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    dtype: Any,
    group_size: int,
    weight_shape: Sequence[int] | None,
    via_int8: bool,
) -> Tensor:
    kind = _weight_dtype(op, dtype)
    form = weight_format(kind)
    stored = core.QWEIGHT_DTYPES[form]
    check(qt.dim() == 2, op, "qt", "be 2-D", list(qt.shape))
    check(qt.dtype == stored, op, "qt", f"have dtype {stored}", qt.dtype)
    n, columns = qt.shape
    nibbles = stored == torch.uint8
    k = columns * 2 if nibbles else columns
    if weight_shape is not None:
        shape = list(weight_shape)
        possible = [[n, k]] + ([[n, k - 1]] if nibbles else [])
        text = " or ".join(map(str, possible))
        check(shape in possible, op, "weight_shape", f"be {text}", shape)
        k = shape[1]
    group = k if group_size == -1 else min(group_size, k)
    scales, zeros = _parameters(op, ("scales", "zps"), scales, zeros, n, -(-k // group))
    fits = zeros is None or form in ("int8", "int4")
    check(fits, op, "zps", f"be None for {kind.name}", "a tensor")
    codes = core.unpack_nibbles(qt, k) if nibbles else qt
    if form in core.CODEBOOKS:
        values = torch.tensor(core.CODEBOOKS[form], device=qt.device)[codes.int()]
        if via_int8 and form == "nf4":
            values = torch.round(values * 127) / 127
    else:
        values = codes.float() - (8 if form == "int4" and zeros is None else 0)
    if zeros is not None:
        values = values - core.expand_groups(zeros.float(), k, group)
    return values * core.expand_groups(float_scales(scales), k, group)

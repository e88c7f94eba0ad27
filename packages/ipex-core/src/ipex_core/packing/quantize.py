# SPDX-License-Identifier: Apache-2.0
"""Quantization of float tensors: groups of weight-only formats, FP8 with one scale."""

from __future__ import annotations

import torch
from torch import Tensor

from ipex_core.library.spec import check
from ipex_core.util.symbolic import tracing

#: The formats by their id in the binary format.
FORMATS = {"int8": 3, "int4": 4, "nf4": 5, "fp4": 6, "fp8_e4m3": 7, "fp8_e5m2": 8}

#: The dtype that holds the codes of a format; 4-bit codes lie in pairs in a byte, the low nibble is the even column.
QWEIGHT_DTYPES = {
    "int8": torch.int8,
    "int4": torch.uint8,
    "nf4": torch.uint8,
    "fp4": torch.uint8,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
}

NF4_VALUES = (
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
)
FP4_VALUES = (
    *(0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0),
    *(-0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0),
)
CODEBOOKS = {"nf4": NF4_VALUES, "fp4": FP4_VALUES}

#: A value belongs to code i if it is at least threshold i - 1 and below threshold i.
_NF4_THRESHOLDS = (
    *(-0.8481, -0.6106, -0.4600, -0.3397, -0.2346, -0.1379, -0.0455),
    *(0.0398, 0.1203, 0.2035, 0.2920, 0.3893, 0.5017, 0.6428, 0.8615),
)
_FP4_THRESHOLDS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)


def pack_nibbles(codes: Tensor) -> Tensor:
    """Return ``[N, ceil(K / 2)]`` bytes for ``[N, K]`` codes of 4 bits; the even column is the low nibble."""
    if codes.shape[1] % 2:
        codes = torch.nn.functional.pad(codes, (0, 1))
    return codes[:, 0::2] | (codes[:, 1::2] << 4)


def unpack_nibbles(qweight: Tensor, in_features: int) -> Tensor:
    """Return the ``[N, K]`` codes of `pack_nibbles`."""
    codes = torch.stack((qweight & 15, qweight >> 4), dim=-1)
    return codes.flatten(1)[:, :in_features].contiguous()


def expand_groups(values: Tensor, in_features: int, group_size: int) -> Tensor:
    """Return ``[N, K]`` for one value per group, ``[N, G]``."""
    return values.repeat_interleave(group_size, dim=1)[:, :in_features]


def quantize(
    weight: Tensor,
    format: str,
    group_size: int = -1,
    symmetric: bool = True,
    scale_dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Quantize a ``[N, K]`` float weight for `pack_woq_weight`.

    The extremes of each group of ``group_size`` neighbors along K set its scale; the range always contains zero.

    Args:
        weight: ``[N, K]``, any float dtype.
        format: ``"int8"``, ``"int4"``, ``"nf4"``, ``"fp4"``, ``"fp8_e4m3"`` or ``"fp8_e5m2"``.
        group_size: Elements of K that share a scale, or -1 for all of K. The last group may be shorter.
        symmetric: Without zero points. Only int8 and int4 can have them.
        scale_dtype: float32, bfloat16, float16, or float8_e8m0fnu for powers of two (MXFP4 is fp4 with groups of 32
            and this dtype).

    Returns:
        ``(qweight, scales, zeros)``: the codes as `pack_woq_weight` takes them, ``[N, G]`` scales and ``[N, G]`` int8
        zero points or None.

    Raises:
        OpArgumentError: An argument is not as described.
    """
    op = "quantize"
    check(weight.dim() == 2, op, "weight", "be 2-D", list(weight.shape))
    check(format in FORMATS, op, "format", f"be one of {', '.join(FORMATS)}", format)
    check(group_size == -1 or group_size > 0, op, "group_size", "be -1 or positive", group_size)
    fits = symmetric or format in ("int8", "int4")
    check(fits, op, "symmetric", f"be True for format {format}", symmetric)
    n, k = weight.shape
    group = k if group_size == -1 else min(group_size, max(k, 1))
    groups = -(-k // group) if k else 0
    padded = torch.nn.functional.pad(weight.float(), (0, groups * group - k))
    grouped = padded.view(n, groups, group)  # zeros do not widen the range
    high = grouped.amax(-1).clamp(min=0)
    low = grouped.amin(-1).clamp(max=0)
    if symmetric:
        largest = torch.maximum(high, -low)
        steps = {"int8": 127, "int4": 7, "nf4": 1, "fp4": 6, "fp8_e4m3": 448, "fp8_e5m2": 57344}
        scales = _round_scale(largest / steps[format], largest, format, scale_dtype)
    else:
        scales = _round_scale(
            (high - low) / (255 if format == "int8" else 15), high, "", scale_dtype
        )
    wide = _to_float(scales)
    scaled = (grouped / wide.unsqueeze(-1)).flatten(1)[:, :k]
    zeros: Tensor | None = None
    if not symmetric:
        offset = 128 if format == "int8" else 0
        zeros = (-torch.round(low / wide) - offset).clamp(-128, 127).to(torch.int8)
        scaled = torch.round(scaled) + expand_groups(zeros.float(), k, group)
    return _encode(scaled, format, symmetric), scales, zeros


def _round_scale(scale: Tensor, largest: Tensor, format: str, dtype: torch.dtype) -> Tensor:
    scale = scale.clamp(min=torch.finfo(torch.float32).eps)
    if dtype == torch.float8_e8m0fnu:
        if (
            format == "fp4"
        ):  # the exponent of the largest value meets the exponent of 4.0, as the MX formats define it
            scale = torch.exp2(torch.floor(torch.log2(largest.clamp(min=2.0**-120))) - 2)
        else:
            scale = torch.exp2(torch.ceil(torch.log2(scale)))
    return scale.to(dtype)


def _to_float(scales: Tensor) -> Tensor:
    return (
        scales.view(torch.uint8).view(torch.float8_e8m0fnu).float()
        if (scales.dtype == torch.uint8)
        else scales.float()
    )


def _encode(scaled: Tensor, format: str, symmetric: bool) -> Tensor:
    if format == "int8":
        return torch.round(scaled).clamp(-128, 127).to(torch.int8)
    if format == "int4":
        offset = 8 if symmetric else 0
        return pack_nibbles((torch.round(scaled) + offset).clamp(0, 15).to(torch.uint8))
    if format == "nf4":
        limits = torch.tensor(_NF4_THRESHOLDS, device=scaled.device)
        return pack_nibbles(
            torch.bucketize(scaled.contiguous(), limits, right=True).to(torch.uint8)
        )
    if format == "fp4":
        limits = torch.tensor(_FP4_THRESHOLDS, device=scaled.device)
        magnitude = torch.bucketize(scaled.abs(), limits).to(torch.uint8)
        return pack_nibbles(magnitude | (torch.signbit(scaled).to(torch.uint8) << 3))
    dtype = QWEIGHT_DTYPES[format]
    limit = torch.finfo(dtype).max
    return scaled.clamp(-limit, limit).to(dtype)


# --- FP8 with one scale -----------------------------------------------------------------------------------------------


#: By the numbers of formats in IPEX's functions: values of `c10::ScalarType`.
DTYPES = {24: torch.float8_e4m3fn, 23: torch.float8_e5m2}


def amax(x: Tensor) -> Tensor:
    """Return the largest magnitude of a tensor, a float32 scalar; 0 if it is empty or has numbers that are not finite.

    A history of magnitudes takes 0 for "nothing was seen", so a step with an infinity does not spoil it.
    """
    # Sizes are tensors in a trace, and no test of them is possible.
    if not tracing() and not x.numel():
        return torch.zeros((), dtype=torch.float32, device=x.device)
    low, high = torch.aminmax(x.detach())
    largest = torch.maximum(high, -low).float()
    return torch.nan_to_num(largest, nan=0.0, posinf=0.0, neginf=0.0)


def power_of_two_scale(largest: Tensor, former: Tensor, limit: float, margin: int) -> Tensor:
    """Return ``2 ** (floor(log2(limit / largest)) - margin)``, exactly.

    It is ``former`` where ``largest`` is 0 or not finite. Exponents are kept in -126 ... 126, so that a scale and its
    inverse are normal float32 numbers.
    """
    known = (largest > 0) & largest.isfinite()
    ratio = (
        limit / largest.where(known, 1.0).double()
    )  # the logarithm of a rounded quotient could be too large
    exponent = (torch.frexp(ratio).exponent - 1 - margin).clamp(-126, 126)
    scale = torch.ldexp(torch.ones_like(ratio), exponent).to(former.dtype)
    return torch.where(known, scale, former)


def to_fp8(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Return ``x * scale`` rounded to nearest even in an 8-bit float dtype.

    Too large numbers become the largest one; infinities stay infinite in float8_e5m2 and become NaN in float8_e4m3fn,
    and NaN stays NaN, so that a loss scaler still sees them.
    """
    limit = torch.finfo(dtype).max
    x = x.float()
    # float8_e4m3fn has no infinity, and releases of torch differ in what they make of one.
    odd = x if dtype == torch.float8_e5m2 else torch.nan
    return torch.where(x.isinf(), odd, (x * scale).clamp(-limit, limit)).to(dtype)

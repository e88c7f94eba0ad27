# SPDX-License-Identifier: Apache-2.0
"""Numbers of 8-bit floating-point tensors with one scale: casts, magnitudes, scales."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["DTYPES", "amax", "power_of_two_scale", "to_fp8", "tracing"]

Tensor = torch.Tensor

#: By the numbers with which IPEX's functions call formats, those of `c10::ScalarType`.
DTYPES = {24: torch.float8_e4m3fn, 23: torch.float8_e5m2}


def tracing() -> bool:
    """Return whether `torch.jit.trace` records: sizes are tensors then, and no test of them is possible."""
    interpreter: Any = torch.jit
    return bool(interpreter.is_tracing())


def amax(x: Tensor) -> Tensor:
    """Return the largest magnitude of a tensor, a float32 scalar; 0 if it is empty or has numbers that are not finite.

    A history of magnitudes takes 0 for "nothing was seen", so a step with an infinity does not spoil it.
    """
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

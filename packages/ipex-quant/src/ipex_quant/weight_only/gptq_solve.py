# SPDX-License-Identifier: Apache-2.0
"""Rounding of one weight so that what the layer computes changes little: GPTQ.

Columns of a weight W ``[N, K]`` are rounded one after the other, and the error of each is spread over the columns that
are still to come, weighted by the inverse of H = X^T X, where X are inputs of the layer. What is minimized is
``trace((W - Q) H (W - Q)^T)``, the squared change of the outputs.
"""

from __future__ import annotations

import dataclasses

import torch

from ipex_core.library.spec import check

__all__ = ["Solved", "change", "nearest", "solve"]

Tensor = torch.Tensor

#: Columns whose errors are carried to the rest at once.
_BLOCK = 128


@dataclasses.dataclass(frozen=True, slots=True)
class Solved:
    """A rounded weight.

    Attributes:
        codes: uint8 ``[N, K]``.
        scales: ``[N, G]`` in the dtype they are stored in.
        zeros: uint8 ``[N, G]``.
        g_idx: int32 ``[K]``, the group of each input feature.
        error: The squared change of the outputs, relative to them.
        nearest_error: The same for rounding to nearest.
    """

    codes: Tensor
    scales: Tensor
    zeros: Tensor
    g_idx: Tensor
    error: float
    nearest_error: float


def _grid(
    part: Tensor, bits: int, symmetric: bool, scale_dtype: torch.dtype, name: str
) -> tuple[Tensor, Tensor]:
    """Return scales and zero points, both float32 ``[N]``, for columns ``[g, N]``."""
    largest = (1 << bits) - 1
    high, low = part.amax(0).clamp(min=0), part.amin(0).clamp(max=0)
    span = 2 * torch.maximum(high, -low) if symmetric else high - low
    scale = (span / largest).clamp(min=torch.finfo(torch.float32).eps).to(scale_dtype).float()
    fits = bool(scale.isfinite().all())
    check(
        fits, name, "scale_dtype", "hold the scales", f"{scale_dtype} for a weight of {span.max()}"
    )
    if symmetric:
        return scale, torch.full_like(scale, 1 << (bits - 1))
    return scale, torch.round(-low / scale).clamp(0, largest)


def _encode(columns: Tensor, scale: Tensor, zero: Tensor, bits: int) -> Tensor:
    return (torch.round(columns / scale) + zero).clamp_(0, (1 << bits) - 1)


def change(error: Tensor, hessian: Tensor) -> float:
    """Return ``trace(E H E^T)`` for the transposed error ``[K, N]``."""
    return float((error * (hessian @ error)).sum())


def nearest(
    weight: Tensor, bits: int, group: int, symmetric: bool, scale_dtype: torch.dtype, name: str = ""
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Round a transposed weight ``[K, N]`` to nearest.

    Returns:
        ``(codes, scales, zeros, values)``: uint8 ``[K, N]``, float32 ``[G, N]`` twice, and float32 ``[K, N]``.
    """
    codes, values = torch.empty_like(weight, dtype=torch.uint8), torch.empty_like(weight)
    scales, zeros = [], []
    for start in range(0, weight.shape[0], group):
        part = weight[start : start + group]
        scale, zero = _grid(part, bits, symmetric, scale_dtype, name)
        code = _encode(part, scale, zero, bits)
        codes[start : start + group] = code.to(torch.uint8)
        values[start : start + group] = (code - zero) * scale
        scales.append(scale)
        zeros.append(zero)
    return codes, torch.stack(scales), torch.stack(zeros), values


def _inverse(hessian: Tensor, percdamp: float, name: str) -> Tensor:
    """Return the upper Cholesky factor of the inverse, with as much damping as it needs."""
    k = hessian.shape[0]
    mean = float(hessian.diagonal().mean())
    eye = torch.arange(k)
    for times in (1, 10, 100, 1000):
        damped = hessian.clone()
        damped[eye, eye] += max(percdamp * times, 1e-7) * mean
        factor, failed = torch.linalg.cholesky_ex(damped)
        if not bool(failed):
            inverse, failed = torch.linalg.cholesky_ex(torch.cholesky_inverse(factor), upper=True)
            if not bool(failed) and bool(inverse.isfinite().all()):
                return inverse
    check(False, name, "percdamp", "be larger for these inputs", percdamp)
    raise AssertionError


@torch.no_grad()
def solve(
    weight: Tensor,
    hessian: Tensor,
    *,
    bits: int = 4,
    group_size: int = -1,
    symmetric: bool = False,
    percdamp: float = 0.01,
    act_order: bool = False,
    scale_dtype: torch.dtype = torch.float16,
    name: str = "gptq",
) -> Solved:
    """Round a weight ``[N, K]`` for inputs with ``hessian`` ``[K, K]``, a float32 mean of ``x x^T``.

    Where rounding to nearest changes the outputs less (inputs that say little), that is the result.
    """
    wide = weight.float().t().contiguous()  # rows are the columns that are rounded one by one
    k = wide.shape[0]
    group = k if group_size == -1 else min(group_size, k)
    in_order = torch.arange(k, dtype=torch.int32) // group
    plain = nearest(wide, bits, group, symmetric, scale_dtype, name)
    base = max(change(wide, hessian), torch.finfo(torch.float32).tiny)
    usual = change(wide - plain[3], hessian) / base
    diagonal = hessian.diagonal()
    solved = None
    if bool((diagonal > 0).any()):
        solved = _columns(
            wide, hessian, bits, group, symmetric, percdamp, act_order, scale_dtype, name
        )
    error = usual
    codes, scales, zeros, g_idx = plain[0], plain[1], plain[2], in_order
    if solved is not None:
        found = change(wide - solved[4], hessian) / base
        if found <= usual:
            codes, scales, zeros, g_idx, _ = solved
            error = found
    return Solved(
        codes.t().contiguous(),
        scales.t().to(scale_dtype).contiguous(),
        zeros.t().to(torch.uint8).contiguous(),
        g_idx,
        error,
        usual,
    )


def _columns(
    weight: Tensor,
    hessian: Tensor,
    bits: int,
    group: int,
    symmetric: bool,
    percdamp: float,
    act_order: bool,
    scale_dtype: torch.dtype,
    name: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return codes, scales, zero points, groups and values, all by columns in their own order."""
    k, n = weight.shape
    hessian = hessian.clone()
    dead = hessian.diagonal() == 0
    hessian[dead, dead] = 1  # an input that is always zero: any code will do, so the nearest
    order = torch.arange(k)
    if act_order:
        order = torch.argsort(hessian.diagonal(), descending=True, stable=True)
        hessian = hessian[order][:, order]
    inverse = _inverse(hessian, percdamp, name)
    del hessian
    rest = weight[order].clone()
    codes, values = torch.empty(k, n, dtype=torch.uint8), torch.empty(k, n)
    scales, zeros = [], []
    for start in range(0, k, _BLOCK):
        end = min(start + _BLOCK, k)
        block, errors = rest[start:end], torch.empty(end - start, n)
        factor = inverse[start:end, start:end]
        for i in range(end - start):
            if (start + i) % group == 0:
                scale, zero = _grid(
                    rest[start + i : start + i + group], bits, symmetric, scale_dtype, name
                )
                scales.append(scale)
                zeros.append(zero)
            code = _encode(block[i], scales[-1], zeros[-1], bits)
            value = (code - zeros[-1]) * scales[-1]
            codes[start + i], values[start + i] = code.to(torch.uint8), value
            error = (block[i] - value) / factor[i, i]
            block[i:].addr_(factor[i, i:], error, alpha=-1)
            errors[i] = error
        rest[end:].addmm_(inverse[start:end, end:].t(), errors, alpha=-1)
    back = torch.argsort(order)
    g_idx = (back // group).to(torch.int32)
    return codes[back], torch.stack(scales), torch.stack(zeros), g_idx, values[back]

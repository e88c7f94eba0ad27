# SPDX-License-Identifier: Apache-2.0
"""Random quantised weights for samples and benchmarks."""

from __future__ import annotations

from typing import Any

import torch

from ipex_core.library.checks import randn
from ipex_core.packing import woq

__all__ = ["woq_parts", "woq_weight"]

Tensor = torch.Tensor


def woq_parts(
    n: int,
    k: int,
    format: str,
    group_size: int = -1,
    symmetric: bool = True,
    scale_dtype: torch.dtype = torch.float32,
    *,
    act_order: bool = False,
    blocks: bool = False,
    powers: bool = False,
    float_zeros: bool = False,
    seed: int = 0,
) -> tuple[Tensor, Tensor, Tensor | None, str, int, int, Tensor | None]:
    """Return arguments of `pack_woq_weight` but for the order, from random numbers.

    ``powers``: scales are powers of two, so that 4-bit weights are exact in every float dtype.
    """
    weight = randn(n, k, seed=seed + 1, scale=k**-0.5)
    qweight, scales, zeros = woq.quantize(weight, format, group_size, symmetric, scale_dtype)
    if powers:
        scales = torch.exp2(torch.floor(torch.log2(scales.float()))).to(scale_dtype)
    if blocks:
        scales = randn(-(-n // 128), -(-k // 128), seed=seed + 2).abs().add(0.1).to(scale_dtype)
        scales = (scales.float() * 2.0**-12).to(scale_dtype)
    if zeros is not None and float_zeros:
        zeros = zeros.float() + 0.25
    g_idx = None
    if act_order:
        group = k if group_size == -1 else group_size
        generator = torch.Generator().manual_seed(seed)
        g_idx = (torch.arange(k) // group)[torch.randperm(k, generator=generator)].int()
    return qweight, scales, zeros, format, k, group_size, g_idx


def woq_weight(n: int, k: int, *args: Any, order: str = "dot", **options: Any) -> Tensor:
    """Return a packed random weight; the arguments are those of `woq_parts`."""
    qweight, scales, zeros, format, _, group_size, g_idx = woq_parts(n, k, *args, **options)
    layout = woq.layout_of(qweight, scales, zeros, format, k, group_size, g_idx, order)
    return woq.pack(qweight, scales, zeros, layout, g_idx)

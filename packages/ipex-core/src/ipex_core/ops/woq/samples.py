# SPDX-License-Identifier: Apache-2.0
"""Samples and benchmark shapes of the weight-only ops."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.nn import functional

from ipex_core.library.checks import randn
from ipex_core.library.spec import BenchCase
from ipex_core.packing import woq

__all__ = [
    "stock_args",
    "stock_woq_linear",
    "woq_bench",
    "woq_parts",
    "woq_weight",
]

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
    """Return a packed random weight; the arguments are as for `woq_parts`."""
    qweight, scales, zeros, format, _, group_size, g_idx = woq_parts(n, k, *args, **options)
    layout = woq.layout_of(qweight, scales, zeros, format, k, group_size, g_idx, order)
    return woq.pack(qweight, scales, zeros, layout, g_idx)


# --- benchmark --------------------------------------------------------------------------------------------------------


def stock_args(x: Tensor, packed_weight: Tensor, out_features: int, *_: Any) -> tuple[Any, ...]:
    """Return the weight as stock torch takes it; without an op of its own a plain one in the dtype of ``x``."""
    layout = woq.read_layout(packed_weight)
    assert layout is not None
    qweight, scales, zeros, _g_idx = woq.unpack(packed_weight, layout)
    if layout.format == "int4" and layout.groups > 1 and not layout.permuted:
        codes = woq.codes_of(qweight, "int4", layout.k).int()
        packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes, 1)
        # torch's weight is (code - 8) * scale + offset.
        wide = scales.float()
        offset = (8 - zeros.float()) * wide if zeros.numel() else torch.zeros_like(wide)
        pairs = torch.stack((wide, offset), dim=-1).transpose(0, 1).contiguous().to(x.dtype)
        return "int4", x, packed, layout.group, pairs
    if layout.format == "int8" and layout.groups == 1 and layout.zeros == "none":
        return "int8", x, qweight, 0, scales.view(-1).to(x.dtype)
    return "plain", x, woq.dequantize(packed_weight, layout).to(x.dtype), 0, scales


def stock_woq_linear(kind: str, x: Tensor, weight: Tensor, group: int, scales: Tensor) -> Tensor:
    """Stock baseline, on what `stock_args` made."""
    if kind == "int4":
        return torch._weight_int4pack_mm_for_cpu(x, weight, group, scales)
    if kind == "int8":
        return torch._weight_int8pack_mm(x, weight, scales)
    return functional.linear(x, weight)


#: Format, group size, whether there are zero points, dtype of the scales.
_FORMATS: dict[str, tuple[str, int, bool, torch.dtype]] = {
    "int4": ("int4", 128, False, torch.bfloat16),
    "int4-asym": ("int4", 128, True, torch.bfloat16),
    "int8": ("int8", -1, False, torch.float32),
    "nf4": ("nf4", 64, False, torch.bfloat16),
    "mxfp4": ("fp4", 32, False, torch.float8_e8m0fnu),
    "fp8": ("fp8_e4m3", -1, False, torch.float32),
}
_ROWS = {
    "int4": (1, 4, 16, 128, 512, 2048),
    "int8": (1, 4, 16, 128, 512),
}


def _weight(
    n: int, k: int, format: str, group: int, asymmetric: bool, dtype: torch.dtype
) -> Tensor:
    """Return a packed weight of random codes: pages of equal content can be read faster than memory."""
    columns = k // 2 if woq.is_nibble(format) else k
    qweight = torch.randint(0, 256, (n, columns), dtype=torch.uint8)
    if format == "fp8_e4m3":
        qweight &= 0xBF  # no NaN, and numbers below 2
    groups = -(-k // group) if group > 0 else 1
    scales = torch.full((n, groups), 2.0**-10).to(dtype)
    zeros = torch.randint(0, 16, (n, groups), dtype=torch.int8) if asymmetric else None
    codes = qweight.view(woq.QWEIGHT_DTYPES[format])
    packed: Tensor = torch.ops.ipex.pack_woq_weight(codes, scales, zeros, format, k, group)
    return packed


def woq_bench() -> Iterator[BenchCase]:
    """Yield 4096 x 4096 weights of each format, which come from memory, as in a model's step, and a small one."""
    for name, args in _FORMATS.items():
        for m in _ROWS.get(name, (1,)):
            yield _case(name, args, m, 4096)
    yield _case("int4-asym", _FORMATS["int4-asym"], 4, 512)


def _case(name: str, args: tuple[str, int, bool, torch.dtype], m: int, n: int) -> BenchCase:
    # The packed bytes of 32 rows: strips are independent of each other.
    size = _weight(32, n, *args).numel() * (n // 32)
    return BenchCase(
        f"{name}-{m}x{n}x{n}",
        lambda dtype: (randn(m, n, dtype=dtype), _weight(n, n, *args), n),
        lambda dtype: size + m * 2 * n * dtype.itemsize,
        flops=2 * m * n * n if m > 1 else 0,
        rotate=n == 4096 and m < 128,
    )

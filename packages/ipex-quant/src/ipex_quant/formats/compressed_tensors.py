# SPDX-License-Identifier: Apache-2.0
"""Weights with one code per byte, and weights of compressed-tensors, read into `QuantizedWeight`."""

from __future__ import annotations

import torch

from ipex_core.library.spec import check
from ipex_quant.weight.layouts import unpack_words, unsigned_weight
from ipex_quant.weight.tensor import QuantizedWeight, movable

__all__ = ["codebook_weight", "fp8_weight", "int8_weight", "packed_weight"]

Tensor = torch.Tensor

_BLOCK = 128
_FP8 = {torch.float8_e4m3fn: "fp8_e4m3", torch.float8_e5m2: "fp8_e5m2"}


def _scale_groups(
    scales: Tensor, n: int, k: int, group_size: int | None, name: str
) -> tuple[Tensor, int]:
    """Return ``[N, G]`` scales and the group size for ``[N, G]``, ``[N]`` or a single one.

    Without a known group size (None) all groups are alike.
    """
    shape = list(scales.shape)
    if group_size not in (None, -1):
        assert group_size is not None
        wanted = [n, -(-k // group_size)]
        what = f"have shape {wanted} for groups of {group_size}"
        check(shape == wanted, name, "scales", what, shape)
        return scales, group_size
    if scales.numel() == 1:
        return scales.reshape(1, 1).expand(n, 1).contiguous(), -1
    if shape == [n]:
        return scales.reshape(n, 1), -1
    fits = len(shape) == 2 and shape[0] == n and 0 < shape[1] <= k
    check(fits, name, "scales", f"have shape [{n}, G], [{n}] or [1]", shape)
    if shape[1] == 1:
        return scales, -1
    check(k % shape[1] == 0, name, "scales", f"have a divisor of {k} groups", shape[1])
    return scales, k // shape[1]


def int8_weight(
    weight: Tensor,
    scales: Tensor,
    zeros: Tensor | None = None,
    group_size: int | None = None,
    bias: Tensor | None = None,
    name: str = "",
) -> QuantizedWeight:
    """Read int8 codes ``[N, K]`` with scales (and zero points) ``[N, G]``, ``[N]`` or ``[1]``."""
    n, k = weight.shape
    scales, group = _scale_groups(scales, n, k, group_size, f"{name}.weight_scale")
    if zeros is not None:
        zeros, _ = _scale_groups(zeros, n, k, group_size, f"{name}.weight_zero_point")
        zeros = zeros.to(torch.int8) if bool(zeros.any()) else None
    return QuantizedWeight("int8", k, weight, scales, zeros, group, None, bias, name)


def fp8_weight(
    weight: Tensor,
    scales: Tensor,
    block: tuple[int, int] | None = None,
    group_size: int | None = None,
    bias: Tensor | None = None,
    name: str = "",
) -> QuantizedWeight:
    """Read 8-bit floats ``[N, K]`` with a factor for each block, output feature, group, or all of them.

    Args:
        weight: float8_e4m3fn or float8_e5m2.
        scales: What codes are multiplied by: ``[ceil(N / rows), ceil(K / columns)]`` with a block, otherwise
            ``[N, G]``, ``[N]`` or ``[1]``.
        block: Rows and columns that share a factor, or None.
        group_size: Input features that share a factor, -1 for all, None if it follows from the shapes.
        bias: ``[N]``, or None.
        name: The module's name, for messages.
    """
    n, k = weight.shape
    form = _FP8[weight.dtype]
    if block is not None and scales.numel() > 1:
        rows, group = block
        wanted = [-(-n // rows), -(-k // group)]
        got = list(scales.shape)
        what = f"have shape {wanted} for blocks of {rows} x {group}"
        check(got == wanted, f"{name}.weight_scale_inv", "scales", what, got)
        if block != (_BLOCK, _BLOCK):
            scales = _repeat_rows(scales, rows, n)
    else:
        scales, group = _scale_groups(scales, n, k, group_size, f"{name}.weight_scale")
    return QuantizedWeight(form, k, weight, scales, None, group, None, bias, name)


def _repeat_rows(scales: Tensor, times: int, n: int) -> Tensor:
    return movable(scales).repeat_interleave(times, dim=0)[:n].view(scales.dtype)


def packed_weight(
    words: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    shape: tuple[int, int],
    bits: int,
    group_size: int,
    g_idx: Tensor | None = None,
    bias: Tensor | None = None,
    name: str = "",
) -> QuantizedWeight:
    """Read a weight of compressed-tensors' format ``pack-quantized``.

    Args:
        words: int32 ``[N, ceil(K * bits / 32)]``, the first code in the lowest bits.
        scales: ``[N, G]``.
        zeros: int32 ``[ceil(N * bits / 32), G]``, packed along N, or int8 ``[N, G]``, or None for symmetric codes.
        shape: ``(N, K)``.
        bits: 2, 3, 4 or 8.
        group_size: Input features that share a scale, or -1.
        g_idx: ``[K]``, or None.
        bias: ``[N]``, or None.
        name: The module's name, for messages.
    """
    n, k = shape
    key = f"{name}.weight_packed"
    wanted = [n, -(-k * bits // 32)]
    check(words.dtype == torch.int32, key, "weight_packed", "have dtype int32", words.dtype)
    got = list(words.shape)
    check(got == wanted, key, "weight_packed", f"have shape {wanted} for {bits} bits", got)
    groups = 1 if group_size == -1 else -(-k // group_size)
    got = list(scales.shape)
    check(got == [n, groups], f"{name}.weight_scale", "scales", f"have shape {[n, groups]}", got)
    unsigned: Tensor | None = None
    if zeros is not None:
        unsigned = _zeros(zeros, n, groups, bits, name)
    codes = unpack_words(words.t().contiguous(), bits, k).t().contiguous()
    if g_idx is not None and bool((g_idx < 0).any()):
        g_idx = None  # filled with -1 where it is not used
    return unsigned_weight(codes, unsigned, scales, bits, group_size, g_idx, bias, name)


def _zeros(zeros: Tensor, n: int, groups: int, bits: int, name: str) -> Tensor:
    """Return zero points as unsigned numbers, like the codes."""
    key = f"{name}.weight_zero_point"
    got = list(zeros.shape)
    if zeros.dtype == torch.int32:
        packed = [-(-n * bits // 32), groups]
        check(got == packed, key, "zero points", f"have shape {packed}", got)
        return unpack_words(zeros.contiguous(), bits, n)
    check(got == [n, groups], key, "zero points", f"have shape {[n, groups]}", got)
    return zeros.int() + (1 << (bits - 1))


def codebook_weight(
    codes: Tensor,
    scales: Tensor,
    in_features: int,
    form: str,
    group_size: int | None = None,
    bias: Tensor | None = None,
    name: str = "",
) -> QuantizedWeight:
    """Read indices of 4 bits, ``[N, ceil(K / 2)]`` with the even column in the low nibble.

    Args:
        codes: uint8.
        scales: ``[N, G]``; uint8 are exponents of two with bias 127.
        in_features: K.
        form: ``"nf4"`` or ``"fp4"``.
        group_size: Input features that share a scale, -1 for all, None if it follows from the shapes.
        bias: ``[N]``, or None.
        name: The module's name, for messages.
    """
    key = f"{name}.weight_packed"
    check(codes.dtype == torch.uint8, key, "weight_packed", "have dtype uint8", codes.dtype)
    n = codes.shape[0]
    scales, group = _scale_groups(scales, n, in_features, group_size, f"{name}.weight_scale")
    if scales.dtype == torch.uint8:
        scales = scales.view(torch.float8_e8m0fnu)
    return QuantizedWeight(form, in_features, codes, scales, None, group, None, bias, name)

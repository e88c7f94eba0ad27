# SPDX-License-Identifier: Apache-2.0
"""The quantized weights that `GatedMLPMOE` takes."""

from __future__ import annotations

import torch

from ipex_core.library.spec import check
from ipex_core.nn.moe import PackedExperts, pack_woq_experts

__all__ = ["FP8", "from_eight_bits", "from_four_bits"]

Tensor = torch.Tensor

_OP = "GatedMLPMOE"
FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)


def from_eight_bits(name: str, weight: Tensor, scale: Tensor | None) -> Tensor:
    """Return a stack of weights as bfloat16, times a scale for each of them."""
    check(weight.dtype in FP8, _OP, name, "have 8-bit floats where scales are given", weight.dtype)
    if scale is None:
        return weight.to(torch.bfloat16)
    experts = weight.shape[0]
    text = f"have {experts} numbers, one for each expert"
    check(scale.numel() == experts, _OP, f"scales of {name}", text, list(scale.shape))
    return (weight.float() * scale.float().view(experts, 1, 1)).to(torch.bfloat16)


def from_four_bits(
    w13: Tensor, w2: Tensor, scales: tuple[Tensor | None, Tensor | None], is_mxfp4: bool
) -> PackedExperts:
    """Return packed experts of two codes per byte, the even column in the low nibble.

    Args:
        w13: uint8 ``[E, 2 I, H / 2]``, or the same bytes as int32 ``[E, 2 I, H / 8]``.
        w2: uint8 ``[E, H, I / 2]``, or int32.
        scales: ``[E, 2 I, G]`` and ``[E, H, G']``. MXFP4: one e8m0 byte for 32 columns; int4: floats, groups of equal
            size.
        is_mxfp4: Codes are e2m1 floats; else integers whose zero is 8.

    Raises:
        OpArgumentError: A shape or dtype is another one.
    """
    codes, groups, columns = [], [], []
    for name, weight, scale in (("W13", w13, scales[0]), ("W2", w2, scales[1])):
        good = weight.dtype in (torch.uint8, torch.int32) and weight.dim() == 3
        check(good, _OP, name, "be 3-D and uint8 or int32 for 4-bit weights", weight.dtype)
        code = weight.contiguous().view(torch.uint8)
        text = f"have shape [{code.shape[0]}, {code.shape[1]}, groups] for 4-bit weights"
        good = scale is not None and scale.dim() == 3 and scale.shape[:2] == code.shape[:2]
        check(good, _OP, f"scales of {name}", text, None if scale is None else list(scale.shape))
        assert scale is not None
        codes.append(code)
        columns.append(2 * code.shape[2])
        groups.append(scale.view(torch.uint8) if scale.dtype.itemsize == 1 else scale)
    fits = codes[1].shape[0] == codes[0].shape[0] and codes[0].shape[1] == 2 * columns[1]
    text = f"have shape [E, H, I / 2] for W13 of shape {list(codes[0].shape)} in bytes"
    check(fits and codes[1].shape[1] == columns[0], _OP, "W2", text, list(codes[1].shape))
    size = 32 if is_mxfp4 else columns[0] // max(groups[0].shape[2], 1)
    for name, scale, width in zip(("W13", "W2"), groups, columns, strict=True):
        text = f"have {-(-width // size)} groups of {size} columns"
        check(scale.shape[2] * size == width, _OP, f"scales of {name}", text, scale.shape[2])
    if is_mxfp4:
        bytes_only = all(scale.dtype == torch.uint8 for scale in groups)
        check(bytes_only, _OP, "scales", "be e8m0 bytes for MXFP4", groups[0].dtype)
    return pack_woq_experts(
        (codes[0], codes[1]),
        (groups[0], groups[1]),
        format="fp4" if is_mxfp4 else "int4",
        in_features=(columns[0], columns[1]),
        group_size=size,
    )

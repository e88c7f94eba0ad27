# SPDX-License-Identifier: Apache-2.0
"""Quantized linear weights: from a float weight to a packed one and back.

Example:
    >>> import torch
    >>> from ipex_core import woq
    >>> packed = woq.pack_weight(torch.randn(64, 128), "int4", group_size=32)
    >>> y = torch.ops.ipex.woq_linear(torch.randn(2, 128), packed, 64)
    >>> woq.describe(packed).format
    'int4'

`interleave_gate_up` is for dense weights as well: all ops with an argument ``gate`` take the order that it makes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ipex_core.library.spec import check
from ipex_core.packing.dense import deinterleave_gate_up, interleave_gate_up
from ipex_core.packing.woq import Layout, quantize, read_layout

__all__ = [
    "Layout",
    "deinterleave_gate_up",
    "describe",
    "interleave_gate_up",
    "pack_weight",
    "quantize",
    "unpack",
]


def pack_weight(
    weight: Tensor,
    format: str,
    group_size: int = -1,
    symmetric: bool = True,
    scale_dtype: torch.dtype = torch.float32,
    order: str = "dot",
) -> Tensor:
    """Quantize and pack a ``[N, K]`` float weight; see `quantize` and the op ``pack_woq_weight``.

    Raises:
        OpArgumentError: An argument is not as described there.
    """
    qweight, scales, zeros = quantize(weight, format, group_size, symmetric, scale_dtype)
    packed: Tensor = torch.ops.ipex.pack_woq_weight(
        qweight, scales, zeros, format, weight.shape[1], group_size, None, order
    )
    return packed


def describe(packed: Tensor) -> Layout:
    """Return format, shape, group size and the other properties of a packed quantized weight.

    Raises:
        OpArgumentError: The tensor is not one.
    """
    layout = read_layout(packed)
    expected = "be packed by pack_woq_weight"
    check(layout is not None, "describe", "packed", expected, "a tensor with another header")
    assert layout is not None
    return layout


def unpack(packed: Tensor) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Return ``(qweight, scales, zeros, g_idx)`` as they were packed, None for those there were not.

    Raises:
        OpArgumentError: The tensor is not a packed quantized weight.
    """
    at = describe(packed)
    qweight, scales, zeros, g_idx = torch.ops.ipex.unpack_woq_weight(
        *(packed, at.n, at.k, at.format, at.group, at.scale_dtype),
        *(at.zeros, at.block_scales, at.permuted, at.order),
    )
    return qweight, scales, zeros if zeros.numel() else None, g_idx if g_idx.numel() else None

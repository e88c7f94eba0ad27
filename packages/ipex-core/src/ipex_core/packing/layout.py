# SPDX-License-Identifier: Apache-2.0
"""Memory formats by name: torch's own, and channels-last for sequences, which torch has no name for."""

from __future__ import annotations

import torch

__all__ = ["in_layout", "is_channels_last_1d"]


def in_layout(value: torch.Tensor, name: str) -> torch.Tensor:
    """Return a tensor in a memory format; the same one if it is in that already.

    Args:
        value: 3-D for ``"channels_last_1d"``, 4-D for ``"channels_last"``, 5-D for ``"channels_last_3d"``.
        name: The memory format. A tensor ``[N, C, W]`` in ``"channels_last_1d"`` lies in memory as ``[N, W, C]``.
    """
    if name == "channels_last_1d":
        return value.transpose(1, 2).contiguous().transpose(1, 2)
    return value.contiguous(memory_format=getattr(torch, name))


def is_channels_last_1d(value: torch.Tensor) -> bool:
    """Return whether a tensor ``[N, C, W]`` lies in memory as ``[N, W, C]``; False for other numbers of dimensions."""
    return value.dim() == 3 and value.transpose(1, 2).is_contiguous()

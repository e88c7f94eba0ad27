# SPDX-License-Identifier: Apache-2.0
"""The layout of sequences in which the channels of a position lie side by side."""

from __future__ import annotations

from typing import TypeVar

import torch

__all__ = ["is_contiguous_channels_last_1d", "tensor_to_channels_last_1d", "to_channels_last_1d"]

_T = TypeVar("_T", torch.Tensor, torch.nn.Module)


def is_contiguous_channels_last_1d(input: torch.Tensor) -> bool:
    """Return whether a tensor ``[N, C, W]`` lies in memory as ``[N, W, C]``; False for other numbers of dimensions."""
    return input.dim() == 3 and input.transpose(1, 2).is_contiguous()


def tensor_to_channels_last_1d(t: torch.Tensor) -> torch.Tensor:
    """Return a tensor of the same shape and values ``[N, C, W]`` that lies in memory as ``[N, W, C]``.

    Raises:
        ValueError: ``t`` does not have 3 dimensions.
    """
    if t.dim() != 3:
        raise ValueError(
            f"tensor_to_channels_last_1d: t must have 3 dimensions, got shape {list(t.shape)}"
        )
    return t.transpose(1, 2).contiguous().transpose(1, 2)


def to_channels_last_1d(t: _T) -> _T:
    """Return a tensor in this layout, or a module after its Conv1d weights were put in it, in place."""
    if isinstance(t, torch.nn.Module):
        for module in t.modules():
            if isinstance(module, torch.nn.Conv1d):
                module.weight.data = tensor_to_channels_last_1d(module.weight.data)
        return t
    return tensor_to_channels_last_1d(t) if t.dim() == 3 else t

# SPDX-License-Identifier: Apache-2.0
"""Tensors on huge pages."""

from __future__ import annotations

import contextlib
import mmap

import torch

from ipex_core import config

__all__ = ["on_huge_pages"]

Tensor = torch.Tensor

_HUGE_PAGE = 2 << 20


def on_huge_pages(tensor: Tensor) -> Tensor:
    """Return a contiguous copy of a large CPU tensor on huge pages; the tensor itself where that brings nothing.

    Args:
        tensor: Any shape and dtype.

    Returns:
        The copy, aligned to 2 MB; ``tensor`` if it has less than 2 MB, is not on the CPU, or ``huge_pages`` is off.
    """
    bytes_ = tensor.numel() * tensor.element_size()
    if tensor.device.type != "cpu" or bytes_ < _HUGE_PAGE or not config.get("huge_pages"):
        return tensor
    advice = getattr(mmap, "MADV_HUGEPAGE", None)
    if advice is None:
        return tensor
    # One page more than needed: a mapping begins at any small page.
    memory = mmap.mmap(-1, bytes_ + _HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel without them
        memory.madvise(advice)
    room = torch.frombuffer(memory, dtype=torch.uint8)
    first = -room.data_ptr() % _HUGE_PAGE
    placed = room[first : first + bytes_].view(tensor.dtype).view(tensor.shape)
    return placed.copy_(tensor)

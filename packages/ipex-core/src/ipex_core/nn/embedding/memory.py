# SPDX-License-Identifier: Apache-2.0
"""Tensors on huge pages: rows that lie anywhere in memory are found faster there.

Of 4 KB pages each row of a large table needs another entry of the TLB, and walking the page tables takes as long as
fetching the row.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import mmap
import sys
from typing import Any

import torch

from ipex_core import config

__all__ = ["gather", "on_huge_pages"]

Tensor = torch.Tensor

_HUGE_PAGE = 2 << 20
_HUGEPAGE, _COLLAPSE = (
    14,
    25,
)  # advice of Linux: pages filled from now on; pages that are there, at once (6.1)


@functools.cache
def _madvise() -> Any:
    if sys.platform != "linux":
        return None
    function = ctypes.CDLL(None).madvise
    function.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return function


def _wanted(tensor: Tensor) -> bool:
    bytes_ = tensor.numel() * tensor.element_size()
    return tensor.device.type == "cpu" and bytes_ >= _HUGE_PAGE and bool(config.get("huge_pages"))


def gather(tensor: Tensor) -> bool:
    """Ask the system to put the memory of a large CPU tensor on huge pages, where it is.

    Addresses and contents stay, so those who share the memory notice nothing.

    Args:
        tensor: Contiguous, any shape and dtype.

    Returns:
        Whether the pages that are filled now are huge. False for less than 2 MB, other devices, other systems than
        Linux from 6.1 on, memory that cannot be (of a file) or is short, and where ``huge_pages`` is off.
    """
    madvise = _madvise()
    if madvise is None or not tensor.is_contiguous() or not _wanted(tensor):
        return False
    begin = tensor.data_ptr()
    first = -(-begin // _HUGE_PAGE) * _HUGE_PAGE
    size = (begin + tensor.numel() * tensor.element_size()) // _HUGE_PAGE * _HUGE_PAGE - first
    if size <= 0 or madvise(first, size, _HUGEPAGE) != 0:
        return False
    return bool(madvise(first, size, _COLLAPSE) == 0)


def on_huge_pages(tensor: Tensor) -> Tensor:
    """Return a large CPU tensor on huge pages: itself where the system can gather it, else a contiguous copy.

    Args:
        tensor: Any shape and dtype.

    Returns:
        The tensor or its copy; also the tensor if it has less than 2 MB, is not on the CPU, or ``huge_pages`` is off.
    """
    if not _wanted(tensor) or gather(tensor):
        return tensor
    advice = getattr(mmap, "MADV_HUGEPAGE", None)
    if advice is None:
        return tensor
    # One page more than needed: a mapping begins at any small page.
    bytes_ = tensor.numel() * tensor.element_size()
    memory = mmap.mmap(-1, bytes_ + _HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel without them
        memory.madvise(advice)
    room = torch.frombuffer(memory, dtype=torch.uint8)
    first = -room.data_ptr() % _HUGE_PAGE
    placed = room[first : first + bytes_].view(tensor.dtype).view(tensor.shape)
    return placed.copy_(tensor)

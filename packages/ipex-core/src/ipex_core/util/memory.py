# SPDX-License-Identifier: Apache-2.0
"""Memory that is given back to the system."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from typing import Any

__all__ = ["return_free_memory"]


def return_free_memory() -> None:
    """Give freed memory back to the system, where the allocator (glibc's) would keep it.

    Code that replaces the weights of a model one by one frees blocks between blocks that live on; without this the
    process keeps both the old and the new ones until it ends.
    """
    trim = _trim()
    if trim is not None:
        trim(0)


@functools.cache
def _trim() -> Callable[[int], Any] | None:
    try:
        return ctypes.CDLL(None).malloc_trim
    except (OSError, AttributeError, TypeError):  # another C library
        return None

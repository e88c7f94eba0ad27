# SPDX-License-Identifier: Apache-2.0
"""What the machine can do: reading memory and multiplying matrices, measured in the same rounds as the engines."""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Callable
from typing import Any

import torch

from .result import SIDE, footprint

__all__ = ["calls"]


def calls(n_bytes: int) -> dict[str, Callable[[], Any]]:
    """Return the calls: ``read`` and one product for each element type."""
    memory = mmap.mmap(-1, footprint(n_bytes))
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):
            memory.madvise(mmap.MADV_HUGEPAGE)
    numbers = torch.frombuffer(memory, dtype=torch.float32).fill_(1.0)
    found: dict[str, Callable[[], Any]] = {"read": lambda: torch.sum(numbers)}
    for name in ("float32", "bfloat16", "int8"):
        a = torch.ones(SIDE, SIDE, dtype=getattr(torch, name))
        product = torch._int_mm if name == "int8" else torch.mm
        found[name] = _product(product, a)
    return found


def _product(function: Callable[..., Any], a: torch.Tensor) -> Callable[[], Any]:
    return lambda: function(a, a)

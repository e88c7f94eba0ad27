# SPDX-License-Identifier: Apache-2.0
"""``torch.xpu.amp`` as IPEX had it, over ``torch.autocast("xpu")``."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.amp import GradScaler as _GradScaler

__all__ = [
    "GradScaler",
    "autocast",
    "custom_bwd",
    "custom_fwd",
    "get_autocast_xpu_dtype",
    "is_autocast_xpu_enabled",
    "set_autocast_xpu_dtype",
    "set_autocast_xpu_enabled",
]


class autocast(torch.autocast):
    """``torch.autocast("xpu", ...)``; in new code write that.

    Args:
        enabled: Whether ops choose their dtype.
        dtype: ``torch.bfloat16`` or ``torch.float16``.
        cache_enabled: Whether weights are cast once in the block.
    """

    def __init__(
        self,
        enabled: bool = True,
        dtype: torch.dtype = torch.bfloat16,
        cache_enabled: bool = True,
    ) -> None:
        super().__init__("xpu", dtype=dtype, enabled=enabled, cache_enabled=cache_enabled)


class GradScaler(_GradScaler):
    """``torch.amp.GradScaler("xpu", ...)``."""

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__("xpu", *arguments, **keywords)


custom_fwd = functools.partial(torch.amp.custom_fwd, device_type="xpu")
custom_bwd = functools.partial(torch.amp.custom_bwd, device_type="xpu")


def get_autocast_xpu_dtype() -> torch.dtype:
    """Return the dtype that autocast gives to ops of lower precision."""
    return torch.get_autocast_dtype("xpu")


def set_autocast_xpu_dtype(dtype: torch.dtype) -> None:
    """Set the dtype that autocast gives to ops of lower precision."""
    torch.set_autocast_dtype("xpu", dtype)


def is_autocast_xpu_enabled() -> bool:
    """Return whether autocast is on for xpu."""
    return torch.is_autocast_enabled("xpu")


def set_autocast_xpu_enabled(enabled: bool) -> None:
    """Turn autocast on or off for xpu."""
    torch.set_autocast_enabled("xpu", enabled)

# SPDX-License-Identifier: Apache-2.0
"""`torch.jit.trace` without autocast's cache of weights, as Intel Extension for PyTorch replaced it at import.

In a region of autocast torch keeps cast weights. A program that is traced there holds the cache's tensors as constants,
which fails for weights that want gradients. ``import intel_extension_for_pytorch`` therefore wraps `torch.jit.trace`;
``import ipex`` does not. `unwrap` or the environment variable ``IPEX_WRAP_TRACE=0`` leave torch as it is.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

__all__ = ["unwrap", "wrap", "wrapped"]

#: The wrapper, once there is one.
_wrapper: Any = None


def wrapped() -> bool:
    """Return whether `torch.jit.trace` leaves the cache alone, also below a wrapper of another library."""
    trace: Any = torch.jit.trace
    while trace is not None and trace is not _wrapper:
        trace = getattr(trace, "__wrapped__", None)
    return trace is not None


def wrap() -> bool:
    """Wrap `torch.jit.trace`, once; the function of torch is its attribute ``__wrapped__``.

    Returns:
        Whether `torch.jit.trace` is wrapped: not with ``IPEX_WRAP_TRACE=0`` in the environment.
    """
    from ipex_core import config

    global _wrapper
    if wrapped() or not config.get("wrap_trace"):
        return wrapped()
    trace: Any = torch.jit.trace

    @functools.wraps(trace)
    def without_cache(*args: Any, **kwargs: Any) -> Any:
        enabled = torch.is_autocast_cache_enabled()
        torch.set_autocast_cache_enabled(False)
        try:
            return trace(*args, **kwargs)
        finally:
            torch.set_autocast_cache_enabled(enabled)

    torch.jit.trace = _wrapper = without_cache
    return True


def unwrap() -> bool:
    """Put the function of torch back.

    Returns:
        Whether it was put back. A wrapper that another library put over ours stays.
    """
    if _wrapper is None or torch.jit.trace is not _wrapper:
        return False
    torch.jit.trace = _wrapper.__wrapped__  # type: ignore[attr-defined]
    return True

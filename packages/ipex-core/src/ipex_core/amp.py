# SPDX-License-Identifier: Apache-2.0
"""Automatic mixed precision on the CPU: the names that scripts use, based on the ones of torch.

Importing ipex changes nothing about `torch.autocast`: stock ops keep the lists of the installed torch, and the ops of
ipex follow the rule in their specification (``ipex.op_info(name)["autocast"]``).
"""

from __future__ import annotations

import logging
import threading

import torch

__all__ = ["GradScaler", "autocast", "native_reason"]

log = logging.getLogger("ipex")


class autocast(torch.autocast):
    """`torch.autocast` for the CPU, as ``torch.cpu.amp.autocast`` was before it was deprecated.

    Args:
        enabled: Whether the block is mixed precision; False turns an outer one off.
        dtype: ``torch.bfloat16`` or ``torch.float16``.
        cache_enabled: Whether a float32 weight is cast once in the block, not at each use.

    Example:
        >>> import torch
        >>> layer = torch.nn.Linear(4, 4)
        >>> with autocast():
        ...     layer(torch.ones(2, 4)).dtype
        torch.bfloat16
    """

    def __init__(
        self,
        enabled: bool = True,
        dtype: torch.dtype = torch.bfloat16,
        cache_enabled: bool = True,
    ) -> None:
        super().__init__("cpu", dtype=dtype, enabled=enabled, cache_enabled=cache_enabled)


class GradScaler(torch.amp.GradScaler):
    """`torch.amp.GradScaler` for the CPU, with the arguments of IPEX's: scales the loss of float16 training.

    Args:
        init_scale: The first factor.
        growth_factor: What the factor is multiplied with after ``growth_interval`` steps without inf or NaN.
        backoff_factor: What it is multiplied with after a step with one; such a step leaves the weights alone.
        growth_interval: See there.
        enabled: If False, all methods do nothing but call the optimizer.

    Raises:
        AssertionError: ``growth_factor <= 1`` or ``backoff_factor >= 1``.
    """

    def __init__(
        self,
        init_scale: float = 65536.0,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
    ) -> None:
        super().__init__("cpu", init_scale, growth_factor, backoff_factor, growth_interval, enabled)


def native_reason(dtype: torch.dtype) -> str | None:
    """Return why products in a reduced dtype are not computed in it here, or None if they are.

    Args:
        dtype: ``torch.bfloat16`` or ``torch.float16``; for others the answer is None.
    """
    from ipex_core.kernels import machine, providers

    name = str(dtype).removeprefix("torch.")
    if name not in machine.NATIVE_LEVELS:
        return None
    slow = "products are computed in float32 and may be slower than in float32"
    features = set(machine.cpu_info().features)
    if features and not features.intersection(machine.NATIVE_FEATURES[name]):
        return f"this CPU has no {name} instructions: {slow}"
    level = providers.cpu_level()
    if level is not None and level not in machine.NATIVE_LEVELS[name]:
        return f"the kernels run at ISA level {level}, which has no {name} instructions: {slow}"
    return None


_warned: set[torch.dtype] = set()
_lock = threading.Lock()


def warn_if_emulated(dtype: torch.dtype, caller: str) -> str | None:
    """Log once per dtype and process that it is not native; return the reason, at every call."""
    reason = native_reason(dtype)
    if reason is not None:
        with _lock:
            first = dtype not in _warned
            _warned.add(dtype)
        if first:
            log.warning("%s: %s", caller, reason)
    return reason

# SPDX-License-Identifier: Apache-2.0
"""State that belongs to a thread and that a call takes along to another one."""

from __future__ import annotations

import contextvars
from collections.abc import Callable
from typing import Any

import torch

__all__ = ["CallerState"]


class CallerState:
    """Grad mode, inference mode, autocast on the CPU and context variables of the thread that makes it."""

    __slots__ = ("_autocast", "_context", "_grad", "_inference")

    def __init__(self) -> None:
        self._grad = torch.is_grad_enabled()
        self._inference = torch.is_inference_mode_enabled()
        self._autocast: tuple[torch.dtype, bool] | None = None
        if torch.is_autocast_enabled("cpu"):
            self._autocast = (torch.get_autocast_dtype("cpu"), torch.is_autocast_cache_enabled())
        self._context = contextvars.copy_context()

    def call(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Call a function in this thread with the state of the other one.

        One object may serve several threads, but not at the same time: each needs `copy`.
        """
        return self._context.run(self._call, function, args, kwargs)

    def copy(self) -> CallerState:
        """Return a state for one more thread."""
        other = CallerState.__new__(CallerState)
        other._grad, other._inference, other._autocast = self._grad, self._inference, self._autocast
        other._context = self._context.copy()
        return other

    def _call(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if self._inference:
            with torch.inference_mode(), torch.set_grad_enabled(self._grad):
                return self._under_autocast(function, args, kwargs)
        if self._grad == torch.is_grad_enabled():
            return self._under_autocast(function, args, kwargs)
        with torch.set_grad_enabled(self._grad):
            return self._under_autocast(function, args, kwargs)

    def _under_autocast(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if self._autocast is None:
            return function(*args, **kwargs)
        dtype, cache = self._autocast
        with torch.autocast("cpu", dtype=dtype, cache_enabled=cache):
            return function(*args, **kwargs)

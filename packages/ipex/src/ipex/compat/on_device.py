# SPDX-License-Identifier: Apache-2.0
"""`OnDevice`: models without memory, as Intel Extension for PyTorch made them before it loaded a checkpoint."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

_FACTORIES = frozenset(
    {
        torch.empty,
        torch.empty_strided,
        torch.full,
        torch.ones,
        torch.rand,
        torch.randn,
        torch.scalar_tensor,
        torch.tensor,
        torch.zeros,
    }
)


class _Cast(TorchFunctionMode):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self._dtype = dtype

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        value = func(*args, **(kwargs or {}))
        if func in _FACTORIES and value.is_floating_point():
            return value.to(self._dtype)
        return value


class OnDevice:
    """Creates tensors on a device and in a dtype for the length of a block.

    Args:
        dtype: Of the floating-point tensors that are made; None: as they would be.
        device: Where tensors are made for which no device is named; ``"meta"`` takes no memory.
        enabled: False: the block does nothing.

    Example:
        >>> import torch, ipex
        >>> with ipex.OnDevice(dtype=torch.bfloat16, device="meta"):
        ...     layer = torch.nn.Linear(4096, 4096)
        >>> layer.weight.device.type, layer.weight.dtype
        ('meta', torch.bfloat16)

    Source:
        ``ipex.OnDevice`` of Intel Extension for PyTorch, which replaced functions of torch for the block. This one
        replaces none, so other threads are not concerned; the old constructor ``torch.Tensor(2, 3)`` is not either.
    """

    def __init__(
        self,
        dtype: torch.dtype | None,
        device: str | torch.device = "meta",
        enabled: bool = True,
    ) -> None:
        if dtype is not None and not dtype.is_floating_point:
            raise ValueError(f"OnDevice: dtype must be a floating-point dtype, got {dtype}")
        self._dtype, self._device, self._enabled = dtype, torch.device(device), enabled
        self._stack: list[contextlib.ExitStack] = []

    def __enter__(self) -> None:
        stack = contextlib.ExitStack()
        if self._enabled:
            stack.enter_context(self._device)
            if self._dtype is not None:
                stack.enter_context(_Cast(self._dtype))
        self._stack.append(stack)

    def __exit__(self, *exception: object) -> None:
        self._stack.pop().close()

# SPDX-License-Identifier: Apache-2.0
"""``ipex.xpu.overrides``: other dtypes for programs that ask for one that a device does not have."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

__all__ = ["convert_default_dtype"]

_FACTORIES = (
    "tensor", "as_tensor", "empty", "zeros", "ones", "full", "rand", "randn", "arange", "linspace", "logspace", "eye",
    "empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like", "from_numpy",
)  # fmt: skip
_METHODS = ("to", "type", "new_empty", "new_zeros", "new_ones", "new_full", "new_tensor", "xpu")
_originals: dict[tuple[Any, str], Any] = {}


def convert_default_dtype(
    src_dtype: torch.dtype | None, dst_dtype: torch.dtype | None, only_device: bool = False
) -> None:
    """Let functions that make tensors, and ``Tensor.to`` and its kin, give another dtype than was asked for.

    For programs that use float64 on a device without it. It changes ``torch``'s functions for the whole process; None
    for both dtypes takes it back.

    Args:
        src_dtype: What programs ask for.
        dst_dtype: What they get.
        only_device: Only for tensors of xpu; else for all.

    Raises:
        TypeError: Only one is None, or they are not dtypes.

    Example:
        >>> convert_default_dtype(torch.float64, torch.float32)
        >>> torch.zeros(2, dtype=torch.float64).dtype
        torch.float32
        >>> convert_default_dtype(None, None)
    """
    if (src_dtype is None) != (dst_dtype is None) or not all(
        d is None or isinstance(d, torch.dtype) for d in (src_dtype, dst_dtype)
    ):
        raise TypeError(
            f"convert_default_dtype: src_dtype and dst_dtype must be dtypes, or both None, got {src_dtype!r} and"
            f" {dst_dtype!r}"
        )
    for (owner, name), original in _originals.items():
        setattr(owner, name, original)
    _originals.clear()
    if src_dtype is None or dst_dtype is None:
        return
    for owner, names in ((torch, _FACTORIES), (torch.Tensor, _METHODS)):
        for name in names:
            original = getattr(owner, name, None)
            if original is not None:
                _originals[owner, name] = original
                setattr(owner, name, _converting(original, src_dtype, dst_dtype, only_device))


def _converting(
    function: Callable[..., Any], source: torch.dtype, target: torch.dtype, only_device: bool
) -> Callable[..., Any]:
    name = str(source).removeprefix("torch.")
    names = {name, f"torch.{name}", "torch.DoubleTensor" if source == torch.float64 else name}

    @functools.wraps(function)
    def call(*arguments: Any, **keywords: Any) -> Any:
        if not only_device:
            arguments = tuple(
                target if a is source or (isinstance(a, str) and a in names) else a
                for a in arguments
            )
            keywords = {k: target if v is source else v for k, v in keywords.items()}
        result = function(*arguments, **keywords)
        if (
            isinstance(result, torch.Tensor)
            and result.dtype == source
            and (not only_device or result.device.type == "xpu")
        ):
            convert = _originals.get((torch.Tensor, "to"), torch.Tensor.to)
            converted = convert(result.detach(), target)
            return (
                converted.requires_grad_()
                if result.requires_grad and result.is_leaf
                else (convert(result, target) if result.requires_grad else converted)
            )
        return result

    return call

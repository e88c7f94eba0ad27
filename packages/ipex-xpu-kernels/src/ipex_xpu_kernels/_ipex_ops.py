# SPDX-License-Identifier: Apache-2.0
"""Registers kernels of the device for the ops ``torch.ops.ipex.*``; the others run as they are defined."""

from __future__ import annotations

import functools
import importlib
import warnings
from collections.abc import Callable
from typing import Any

import torch

from ipex_core.library.checks import are_checked
from ipex_core.library.kernels import specs


def _with_definition(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the op whose ``function`` returns None or False for arguments that the kernel does not have."""
    spec = specs()[name]

    def kernel(*args: Any, **kwargs: Any) -> Any:
        a = spec.bind(*args, **kwargs)
        if not are_checked():
            spec.check(a)
        result = function(a)
        if result is None or result is False:
            result = spec.reference(*args, **kwargs)
        return None if result is True else result

    return kernel


def _before_kernel(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the op whose ``function`` returns None for arguments that the kernel before it is to have."""
    bind = specs()[name].bind
    kernel_before = torch.library.get_kernel(f"ipex::{name}", "XPU")

    def kernel(keyset: torch.DispatchKeySet, *args: Any, **kwargs: Any) -> Any:
        result = function(bind(*args, **kwargs))
        return kernel_before.call_boxed(keyset, *args, **kwargs) if result is None else result

    return kernel


@functools.cache
def register() -> tuple[str, ...]:
    """Register them with torch, once, and return the names of the ops."""
    from ipex_xpu_kernels import _experts

    functions: dict[str, Callable[..., Any]] = {}
    for name in ("attention", "cache", "choice", "int8", "optim", "recurrence", "woq"):
        module = importlib.import_module(f"ipex_xpu_kernels._{name}")
        functions.update(module.FUNCTIONS)
    for name, function in functions.items():
        _library().impl(name, _with_definition(name, function), "XPU")
    with warnings.catch_warnings():  # that the kernel is replaced
        warnings.simplefilter("ignore")
        kernel = _before_kernel("fused_experts", _experts.fused_experts)
        _library().impl("fused_experts", kernel, "XPU", with_keyset=True)
    return tuple(functions)


@functools.cache
def _library() -> torch.library.Library:
    return torch.library.Library("ipex", "IMPL")  # kept alive: its end would remove the kernels

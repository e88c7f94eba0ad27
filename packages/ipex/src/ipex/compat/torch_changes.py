# SPDX-License-Identifier: Apache-2.0
"""What ``import intel_extension_for_pytorch`` changes in torch, as Intel Extension for PyTorch did at import.

``import ipex`` changes nothing. Scripts that were written for IPEX rely on these:

- `torch.jit.trace` records without autocast's cache of weights. A program that is traced in a region of autocast would
  hold the cache's tensors as constants, which fails for weights that want gradients.
- `torch.Tensor.numpy` of a bfloat16 tensor returns a float32 copy; stock torch raises, NumPy has no bfloat16.
- In a region of autocast on the CPU ``group_norm`` is lower precision in bfloat16, ``_adaptive_avg_pool3d`` is float32,
  and ``embedding_bag`` without gradients gives the dtype of the region. It sums in the dtype of the table and rounds
  the result once; IPEX cast the whole table at each call. `interaction`, which takes such results, has the widest dtype
  of its inputs.
- TorchScript adds no casts of its own to a program that runs in a region of autocast: torch's lists decide there, too.

`undo` puts torch back, and with ``IPEX_CHANGE_TORCH=0`` in the environment nothing is changed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from ipex_core.library import set_autocast_rule

__all__ = ["apply", "applied", "undo"]

#: What was put into torch, and how it is taken out again; empty before `apply` and after `undo`.
_undo: list[Callable[[], None]] = []
#: The wrapper of `torch.jit.trace`, once there is one.
_wrapper: Any = None


def applied() -> bool:
    """Return whether torch is changed."""
    return bool(_undo)


def apply() -> bool:
    """Change torch, once; the functions of torch are the attribute ``__wrapped__`` of what replaces them.

    Returns:
        Whether torch is changed: not with ``IPEX_CHANGE_TORCH=0`` in the environment.
    """
    from ipex_core import config

    if not _undo and config.get("change_torch"):
        _undo.extend((_trace(), _numpy(), _autocast(), _interaction(), _torchscript()))
    return applied()


def undo() -> bool:
    """Put torch back as it was.

    Returns:
        Whether torch was changed. A wrapper that another library put over `torch.jit.trace` or
        `torch.Tensor.numpy` stays, and what it wraps.
    """
    changed = applied()
    while _undo:
        _undo.pop()()
    return changed


# --- functions --------------------------------------------------------------------------------------------------------


def _trace() -> Callable[[], None]:
    global _wrapper
    stock: Any = torch.jit.trace
    below = stock
    while below is not None and below is not _wrapper:
        below = getattr(below, "__wrapped__", None)
    if below is not None:  # still there, below a wrapper of another library
        return lambda: None

    @functools.wraps(stock)
    def trace(*args: Any, **kwargs: Any) -> Any:
        enabled = torch.is_autocast_cache_enabled()
        torch.set_autocast_cache_enabled(False)
        try:
            return stock(*args, **kwargs)
        finally:
            torch.set_autocast_cache_enabled(enabled)

    def put_back() -> None:
        if torch.jit.trace is trace:
            torch.jit.trace = stock

    torch.jit.trace = _wrapper = trace
    return put_back


def _numpy() -> Callable[[], None]:
    stock: Any = torch.Tensor.numpy
    own = "numpy" in vars(torch.Tensor)  # else the method of the base class

    @functools.wraps(stock)
    def numpy(self: torch.Tensor, *, force: bool = False) -> Any:
        if self.dtype is torch.bfloat16:
            self = self.float()
        return stock(self, force=force)

    def put_back() -> None:
        if vars(torch.Tensor).get("numpy") is not numpy:
            return
        if own:
            torch.Tensor.numpy = stock  # type: ignore[method-assign]
        else:
            del torch.Tensor.numpy

    torch.Tensor.numpy = numpy  # type: ignore[method-assign, assignment]
    return put_back


# --- autocast ---------------------------------------------------------------------------------------------------------


def _group_norm(x: torch.Tensor, *rest: Any) -> torch.Tensor:
    if torch.get_autocast_dtype("cpu") is torch.bfloat16:
        return torch.ops.aten.group_norm.default(*(_cast(v, torch.bfloat16) for v in (x, *rest)))
    return torch.ops.aten.group_norm.default(x, *rest)


def _adaptive_avg_pool3d(x: torch.Tensor, output_size: Any) -> torch.Tensor:
    return torch.ops.aten._adaptive_avg_pool3d.default(_cast(x, torch.float32), output_size)


def _embedding_bag(*args: Any) -> tuple[torch.Tensor, ...]:
    # Called with and without `padding_idx`: two overloads.
    overload = "padding_idx" if len(args) > 8 else "default"
    bags, *rest = getattr(torch.ops.aten.embedding_bag, overload)(*args)
    if not bags.requires_grad:
        bags = _cast(bags, torch.get_autocast_dtype("cpu"))
    return (bags, *rest)


def _cast(value: Any, dtype: torch.dtype) -> Any:
    wide = isinstance(value, torch.Tensor) and value.is_floating_point()
    return value.to(dtype) if wide and value.dtype is not torch.float64 else value


#: op -> what it does in a region.
_LISTED: dict[str, Callable[..., Any]] = {
    "group_norm": _group_norm,
    "_adaptive_avg_pool3d": _adaptive_avg_pool3d,
    "embedding_bag": _embedding_bag,
    "embedding_bag.padding_idx": _embedding_bag,
}


def _autocast() -> Callable[[], None]:
    key = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)

    def outside(kernel: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            with torch._C._ExcludeDispatchKeyGuard(key):
                return kernel(*args, **kwargs)

        return run

    library: Any = torch.library.Library("aten", "IMPL")
    for name, kernel in _LISTED.items():
        library.impl(name, outside(kernel), "AutocastCPU")
    return library._destroy  # type: ignore[no-any-return]


def _interaction() -> Callable[[], None]:
    before = set_autocast_rule("interaction", "widest_type")

    def put_back() -> None:
        set_autocast_rule("interaction", before)

    return put_back


def _torchscript() -> Callable[[], None]:
    interpreter: Any = torch._C
    before = interpreter._jit_set_autocast_mode(False)
    return lambda: interpreter._jit_set_autocast_mode(before)

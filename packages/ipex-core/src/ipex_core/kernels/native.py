# SPDX-License-Identifier: Apache-2.0
"""Which ops have native kernels for CPU tensors, in a form that Dynamo can trace."""

from __future__ import annotations

import torch

__all__ = ["find_kernels", "has_kernel", "onednn_supports"]


# A plain global and no functools.cache: Dynamo traces through this module and warns about caches.
_native_ops: frozenset[str] | None = None


def has_kernel(op: str) -> bool:
    """Return whether a kernel package implements ``torch.ops.ipex.<op>`` for CPU tensors."""
    find_kernels()
    return _native_ops is not None and op in _native_ops


def find_kernels() -> None:
    """Look for the kernel package, if nobody has; Dynamo cannot follow that, so do it before something is compiled."""
    global _native_ops
    if _native_ops is not None:
        return
    from ipex_core.kernels import providers

    provider = providers.provider_for("cpu")
    _native_ops = frozenset(provider.ops) if provider is not None else frozenset()


def onednn_supports(dtype: torch.dtype) -> bool:
    """Return whether oneDNN has packed kernels for this dtype on this CPU."""
    if not torch.backends.mkldnn.is_available():
        return False
    if dtype == torch.float32:
        return True
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    if dtype == torch.float16:
        return bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())
    return False

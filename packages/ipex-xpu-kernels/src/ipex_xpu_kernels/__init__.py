# SPDX-License-Identifier: Apache-2.0
"""The ``xpu`` device for a torch without one, on any SYCL device; the facade shows it as ``ipex.xpu``.

The package is found through the entry point group ``ipex.kernels``, and by torch through ``torch.backends``, so that
``import torch`` is enough where there is a device. Names of ``torch.xpu`` are found here, too.

Example:
    >>> import torch, ipex_xpu_kernels
    >>> ipex_xpu_kernels.state().mode in ("own", "native", "none")
    True
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ipex_xpu_kernels import _device, _names
from ipex_xpu_kernels._device import State, activate, state
from ipex_xpu_kernels._doctor import doctor
from ipex_xpu_kernels._fallback import (
    fallback_stats,
    reset_fallback_stats,
    set_fallback_mode,
    set_kernel_mode,
)
from ipex_xpu_kernels._version import __version__

if TYPE_CHECKING:
    from ipex_core.kernels.providers import ProviderInfo
    from ipex_xpu_kernels._inline import SyclCompileError as SyclCompileError
    from ipex_xpu_kernels._inline import SyclLibrary as SyclLibrary
    from ipex_xpu_kernels._inline import SyclOp as SyclOp
    from ipex_xpu_kernels._inline import load_inline as load_inline

__all__ = [
    "KERNEL_API",
    "State",
    "SyclCompileError",
    "SyclLibrary",
    "SyclOp",
    "__version__",
    "activate",
    "doctor",
    "fallback_stats",
    "kernel_load_stats",
    "kernel_names",
    "load_inline",
    "register",
    "reset_fallback_stats",
    "set_fallback_mode",
    "set_kernel_mode",
    "state",
]

#: Contract version of these kernels; must equal the version of the core.
KERNEL_API = 1


def register(api: int) -> ProviderInfo:
    """Register the device and its kernels with torch; called once by the core.

    Args:
        api: ``KERNEL_API`` of the core.

    Raises:
        KernelApiError: Core and kernels were built for different contracts.
        ImportError: A device was asked for, but the native module cannot be loaded.
        RuntimeError: A backward pass has run before, after which torch cannot take another device.
    """
    from ipex_core.errors import KernelApiError
    from ipex_core.kernels.providers import ProviderInfo

    if api != KERNEL_API:
        raise KernelApiError(
            f"ipex-xpu-kernels {__version__} needs an ipex-core of KERNEL_API {KERNEL_API}, got {api}:"
            " pip install --upgrade ipex-core ipex-xpu-kernels"
        )
    names: tuple[str, ...] = ()
    found = activate()
    if found.mode == "native" and found.count:
        _device.serve_native()
    if found.count:
        from ipex_xpu_kernels import _ipex_ops

        names = _ipex_ops.register()
    return ProviderInfo(
        name="xpu",
        version=__version__,
        device="xpu",
        kernel_api=KERNEL_API,
        isa="spirv",
        isa_available=("spirv",),
        isa_built=("spirv",),
        ops=names,
        kernels=lambda op: (),
    )


def kernel_names() -> tuple[str, ...]:
    """Return the names of the SYCL kernels in this package, as ``family<operation,dtype>``.

    Raises:
        RuntimeError: There is no xpu device.
    """
    return tuple(_device.kernels("kernel_names").kernel_names())


def kernel_load_stats() -> dict[str, int]:
    """Return how kernels came into this process.

    Returns:
        ``translated``: from SPIR-V; ``compiled``: files of their source; ``from_cache``: from the binaries on disk;
        ``cache_errors``: how often those could not be read or written.

    Raises:
        RuntimeError: There is no xpu device.
    """
    return dict(_device.kernels("kernel_load_stats").load_stats())


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(f"module 'ipex.xpu' has no attribute {name!r}")
    import torch

    if name in vars(torch.xpu):
        return vars(torch.xpu)[name]
    try:
        return _names.resolve(name)
    except AttributeError:
        raise AttributeError(f"module 'ipex.xpu' has no attribute {name!r}") from None


def __dir__() -> list[str]:
    return sorted({*globals(), *_names.NAMES, *_names.SUBMODULES})

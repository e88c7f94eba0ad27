# SPDX-License-Identifier: Apache-2.0
"""The device of this process: found, registered with torch and shut down at exit."""

from __future__ import annotations

import atexit
import functools
import importlib
import importlib.util
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ipex_xpu_kernels import _names, _onednn, _sycl


@dataclass(frozen=True)
class State:
    """What has become of the device in this process.

    Attributes:
        mode: "own" (this package is the device), "native" (torch has XPU itself) or "none".
        count: Number of devices.
        reason: Why there is no device; empty otherwise.
    """

    mode: str
    count: int = 0
    reason: str = ""


_state: State | None = None


def state() -> State:
    """Return what has become of the device; `activate` is called first if it was not called."""
    return _state if _state is not None else activate()


def failed(error: Exception) -> None:
    """Note why the device could not be registered, for the one who asks."""
    _set(State("none", 0, f"{type(error).__name__}: {error}"))


def require(function: str) -> Any:
    """Return the native module of the device that this package has registered.

    Args:
        function: For the message.

    Raises:
        RuntimeError: There is no device.
    """
    now = state()
    if now.mode == "own":
        return native()
    why = now.reason or "this torch has XPU itself"
    raise RuntimeError(
        f"{function}: there is no xpu device of ipex-xpu-kernels: {why}. Run 'ipex doctor' to see the devices."
    )


def kernels(function: str) -> Any:
    """Return the native module for what a torch that has XPU itself uses as well: kernels, and the compiler of users'.

    Args:
        function: For the message.

    Raises:
        RuntimeError: There is no xpu device.
    """
    return native() if state().mode == "native" and state().count else require(function)


def native() -> Any:
    """Return the native module.

    Raises:
        ImportError: It was built for another torch, or a library that it needs is missing.
    """
    from ipex_xpu_kernels import _load

    return _load.native()


def activate() -> State:
    """Find the devices and register them with torch; does nothing the second time.

    Without a device torch is left as it is.

    Raises:
        ImportError: The native module cannot be loaded although a device was asked for.
        RuntimeError: A backward pass has run before, after which torch cannot take another device.
    """
    if _state is None:
        try:
            _check_siblings()
            # The first import of torch comes here itself, and keeps to itself an error that is to be raised here.
            importlib.import_module("torch")
            if _state is None or _state.mode == "none":
                _set(_find())
        except Exception as error:
            failed(error)
            raise
    assert _state is not None
    return _state


def _check_siblings() -> None:
    # Not when the package is imported: torch does that itself, and would not import.
    wanted = {"torch": "torch", "ipex_core": "ipex-core"}
    missing = [n for n in wanted if n not in sys.modules and importlib.util.find_spec(n) is None]
    if missing:
        names = " ".join(wanted[name] for name in missing)
        raise ModuleNotFoundError(
            f"ipex-xpu-kernels needs packages that are not installed: pip install {names}",
            name=missing[0],
        )


def _set(found: State) -> None:
    global _state
    _state = found


def _find() -> State:
    import torch

    if getattr(torch._C, "_has_xpu", False):
        _names.attach()
        return State("native", torch.xpu.device_count())
    if not _sycl.device_possible():
        return State("none", 0, "no GPU was found (IPEX_XPU_DEVICE=cpu uses the CPU)")
    if torch.cuda.is_available():
        return State("none", 0, "torch has a CUDA device and takes no second kind of accelerator")
    _sycl.prepare_environment()
    module = native()
    count = module.initialize(_sycl.requested_device())
    if count == 0:
        return State("none", 0, module.why_no_device())
    _configure(module)
    module.register_device()
    module.register_ipex_kernels()

    from ipex_xpu_kernels import _chains, _distributed, _torch_xpu

    _torch_xpu.install(module)
    _distributed.install(module)
    _chains.install()
    _torch_xpu.add_profiles()
    _names.attach()
    atexit.register(_shut_down, module)
    return State("own", count)


@functools.cache
def serve_native() -> None:
    """Register the kernels of ``torch.ops.ipex`` with a torch that has XPU itself; they run in its queues."""
    import torch

    module = native()
    _configure(module)
    streams = [torch.xpu.current_stream(i) for i in range(torch.xpu.device_count())]
    module.adopt([stream.sycl_queue for stream in streams])
    module.register_ipex_kernels()


def _configure(module: Any) -> None:
    module.set_fallback_mode(
        {"error": "error", "warn": "warn"}.get(
            os.environ.get("IPEX_XPU_FALLBACK", "").lower(), "silent"
        )
    )
    always = os.environ.get("IPEX_XPU_KERNELS", "").lower() == "always"
    module.set_kernel_mode("always" if always else "auto")
    path, why = _onednn.find()
    module.set_onednn_path(path, why)
    module.set_onednn_mode("auto" if path else "off")
    module.set_zero_copy(os.environ.get("IPEX_XPU_ZERO_COPY", "1") != "0")
    module.set_collective_mode(os.environ.get("IPEX_XPU_COLLECTIVES", "").lower() or "auto")
    module.set_kernel_library(str(Path(__file__).with_name("kernels")))
    module.set_kernels_from_source(
        os.environ.get("IPEX_XPU_SOURCE", "").lower() in ("1", "true", "on", "yes")
    )
    module.set_cache_directory(_sycl.cache_directory())


def _shut_down(module: Any) -> None:
    # Registered at activation, this runs after whatever scripts have registered since.
    import torch

    if torch._C._autograd._profiler_enabled():
        # What it gathered will not be read, and it would end when parts of torch are gone: an abort.
        torch._C._autograd._disable_profiler()
    module.stop_collectives()
    module.stop_autograd_threads()
    module.shutdown()

# SPDX-License-Identifier: Apache-2.0
"""What ``ipex doctor`` says about the device xpu."""

from __future__ import annotations

import importlib.metadata
import os
from typing import Any

from ipex_xpu_kernels import _device, _load, _onednn, _sycl

_CPU = (
    "xpu: without a GPU, IPEX_XPU_DEVICE=cpu makes the CPU the device, to write and test code for xpu"
    " (pip install 'ipex-xpu-kernels[cpu-device]')"
)


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def doctor(root: Any = "/") -> tuple[list[tuple[str, str]], list[str]]:
    """Return what there is and what to do, for ``ipex doctor``; never raises and registers nothing new by itself.

    Args:
        root: Of the system, as the other parts of the report take it; devices are the devices of this process.
    """
    try:
        now = _device.state()
    except Exception as error:
        now = _device.State("none", 0, f"{type(error).__name__}: {error}")
    advice: list[str] = []
    rows = [
        ("built for", f"torch {_load.built_for() or 'of none: sources'}"),
        ("SYCL run-time", f"intel-sycl-rt {_version('intel-sycl-rt')}"),
        ("CPU device", f"intel-opencl-rt {_version('intel-opencl-rt')}"),
        ("IPEX_XPU_DEVICE", os.environ.get(_sycl.DEVICE_VARIABLE) or "not set: GPUs only"),
    ]
    if now.mode == "own":
        from ipex_xpu_kernels._torch_xpu import why_no_profiles

        native = _device.native()
        for index in range(now.count):
            found = native.properties(index)
            rows.append(
                (
                    f"xpu:{index}",
                    f"{found['name']}, {found['type']}, {found['total_memory'] / (1 << 30):.1f} GiB,"
                    f" {found['max_compute_units']} units, driver {found['driver_version']}",
                )
            )
        rows.append(("kernels", f"{len(native.kernel_names())} of SYCL"))
        rows.append(("torch.profiler", why_no_profiles() or "shows kernels (activity XPU)"))
        rows.append(("oneDNN", _onednn.describe(native.onednn_state())))
        rows.append(("cache", _sycl.cache_directory() or "off (IPEX_XPU_CACHE)"))
        fallbacks = sum(count for _, count in native.fallback_stats().items())
        rows.append(("ops on the host", f"{fallbacks} in this process"))
    elif now.mode == "native":
        rows.append(
            ("device", f"torch has XPU itself ({now.count} devices); unverified, see docs/xpu.md")
        )
    else:
        rows.append(("device", f"none: {now.reason}"))
        # Without a GPU nothing has tried to load the native module.
        reason = _load.misfit() or ("" if not _sycl.requested_device() else now.reason)
        advice.append(f"xpu: {reason}" if reason else _CPU)
    return rows, advice

# SPDX-License-Identifier: Apache-2.0
"""Where the SYCL run-time of this environment is, and whether there can be a device at all."""

from __future__ import annotations

import importlib.metadata
import os
from pathlib import Path

#: Devices that may be used: GPUs unless the variable says otherwise.
DEVICE_VARIABLE = "IPEX_XPU_DEVICE"


def requested_device() -> str:
    """Return what IPEX_XPU_DEVICE asks for: "", "gpu", "cpu", "cpu:N" or "auto"."""
    return os.environ.get(DEVICE_VARIABLE, "").strip().lower()


def device_possible() -> bool:
    """Return whether to look for devices; costs microseconds, since it runs at every ``import torch``.

    Looking costs 40 ms. Without a render node there is no GPU of Level Zero; others, and the CPU, are used on demand
    only.
    """
    if requested_device():
        return True
    nodes = Path("/dev/dri")
    return nodes.is_dir() and any(nodes.glob("renderD*"))


def opencl_cpu_driver() -> Path | None:
    """Return the OpenCL driver of the CPU that the package intel-opencl-rt has brought, if it is installed."""
    try:
        files = importlib.metadata.files("intel-opencl-rt") or []
    except importlib.metadata.PackageNotFoundError:
        return None
    for file in files:
        if file.name == "libintelocl.so":
            return Path(str(file.locate())).resolve()
    return None


def prepare_environment() -> None:
    """Let the OpenCL loader find the CPU driver; the file that the package has for it names a folder of its build."""
    # Kernels that users write are compiled in the process (2 s); with this the run-time keeps what it has compiled.
    if cache_directory() and "SYCL_CACHE_PERSISTENT" not in os.environ:
        os.environ["SYCL_CACHE_PERSISTENT"] = "1"
        os.environ.setdefault("SYCL_CACHE_DIR", str(Path(cache_directory()) / "sycl"))
    if requested_device() in ("", "gpu") or "OCL_ICD_FILENAMES" in os.environ:
        return
    driver = opencl_cpu_driver()
    if driver is not None:
        os.environ["OCL_ICD_FILENAMES"] = str(driver)


def cache_directory() -> str:
    """Return the folder for device binaries; empty if IPEX_XPU_CACHE is "0"."""
    chosen = os.environ.get("IPEX_XPU_CACHE")
    if chosen is not None:
        return "" if chosen in ("", "0") else chosen
    home = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return str(Path(home) / "ipex" / "xpu")

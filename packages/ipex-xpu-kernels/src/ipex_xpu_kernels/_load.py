# SPDX-License-Identifier: Apache-2.0
"""Loads the native module, whose C++ interface fits one torch release."""

from __future__ import annotations

import importlib
import importlib.util
import re
import sys
from pathlib import Path
from typing import Any

#: The SYCL run-time that the native module is linked with.
SONAME = "libsycl.so.9"


def foreign_runtime(maps: str = "/proc/self/maps") -> str:
    """Return the path of a SYCL run-time of another release that this process has loaded, or an empty path.

    Args:
        maps: List of what is mapped into the process.
    """
    try:
        text = Path(maps).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    for path in re.findall(r"(/\S*/libsycl\.so\.\d\S*)", text):
        if (
            not Path(path).name.startswith((SONAME + ".", SONAME + "-"))
            and Path(path).name != SONAME
        ):
            return str(path)
    return ""


def built_for() -> str:
    """Return the release of torch that the native module was built for; empty for sources that were not built."""
    try:
        return str(importlib.import_module("ipex_xpu_kernels._build").TORCH)
    except ImportError:
        return ""


def misfit() -> str:
    """Return why this wheel does not fit the installed torch or this Python, and which wheel does; empty if it fits."""
    import torch

    from ipex_xpu_kernels._version import __version__

    wanted = built_for()
    installed = ".".join(torch.__version__.split("+")[0].split(".")[:2])
    other_torch = bool(wanted) and installed != wanted
    other_python = bool(wanted) and importlib.util.find_spec("ipex_xpu_kernels._C") is None
    if not (other_torch or other_python):
        return ""
    # Not before: importing it checks all variables, and a wrong IPEX_XPU_DEVICE has a message of its own.
    from ipex_core.kernels.providers import xpu_wheel

    needed = xpu_wheel(torch.__version__, __version__)
    if other_torch:
        return (
            f"ipex-xpu-kernels {__version__} was built for torch {wanted}, but torch {torch.__version__} is installed:"
            f" pip install 'torch=={wanted}.*', or install the wheel {needed}"
        )
    python = ".".join(map(str, sys.version_info[:2]))
    return (
        f"ipex-xpu-kernels {__version__} was built for another Python than {python}{sys.abiflags}:"
        f" install the wheel {needed}"
    )


def native() -> Any:
    """Return ``ipex_xpu_kernels._C``.

    Raises:
        ImportError: torch or Python is not the one that it was built for, or the SYCL run-time is missing.
    """
    loaded = sys.modules.get("ipex_xpu_kernels._C")
    if loaded is not None:
        return loaded
    wrong = misfit()
    if wrong:
        raise ImportError(wrong)
    other = foreign_runtime()
    if other:
        raise ImportError(
            f"another SYCL run-time is loaded in this process ({other}), and two cannot be: ipex-xpu-kernels needs"
            f" {SONAME} of the package intel-sycl-rt; import ipex before the library that loads the other"
        )
    try:
        return importlib.import_module("ipex_xpu_kernels._C")
    except ImportError as error:
        if "libsycl" in str(error) or "libur_" in str(error):
            raise ImportError(
                f"the SYCL run-time cannot be loaded ({error}): pip install 'intel-sycl-rt>=2026.0,<2027'"
            ) from error
        raise

# SPDX-License-Identifier: Apache-2.0
"""Loads the native module, whose C++ interface is that of one torch release."""

from __future__ import annotations

import importlib
from typing import Any


def native() -> Any:
    """Return ``ipex_xpu_kernels._C``.

    Raises:
        ImportError: The installed torch is not the one it was built with, or the SYCL run-time is missing.
    """
    import torch

    from ipex_xpu_kernels._version import __version__

    try:
        wanted: str = importlib.import_module("ipex_xpu_kernels._build").TORCH
    except ImportError:
        wanted = ""  # sources that were not built
    installed = ".".join(torch.__version__.split("+")[0].split(".")[:2])
    if wanted and installed != wanted:
        raise ImportError(
            f"ipex-xpu-kernels {__version__} was built for torch {wanted}, but torch {torch.__version__} is installed:"
            f" pip install 'torch=={wanted}.*', or the release of ipex-xpu-kernels for torch {installed}"
        )
    try:
        return importlib.import_module("ipex_xpu_kernels._C")
    except ImportError as error:
        if "libsycl" in str(error) or "libur_" in str(error):
            raise ImportError(
                f"the SYCL run-time cannot be loaded ({error}): pip install 'intel-sycl-rt>=2026.0,<2027'"
            ) from error
        raise

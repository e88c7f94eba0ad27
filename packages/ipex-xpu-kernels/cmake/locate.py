# SPDX-License-Identifier: Apache-2.0
"""Print where the build finds torch, pybind11 and the SYCL run-time, as a CMake list."""

from __future__ import annotations

import contextlib
import importlib.metadata
from pathlib import Path

import pybind11
import torch


def file_of(distribution: str, name: str) -> Path:
    """Return the path of a file that a distribution has installed."""
    for file in importlib.metadata.files(distribution) or ():
        if file.name == name:
            return Path(str(file.locate())).resolve()
    raise SystemExit(f"{distribution} has no file {name}")


torch_folder = Path(torch.__file__).parent
sycl_header = next(
    Path(str(file.locate())).resolve()
    for file in importlib.metadata.files("intel-sycl-rt") or ()
    if file.as_posix().endswith("include/sycl/sycl.hpp")
)
release = ".".join(torch.__version__.split("+")[0].split(".")[:2])
places = [
    torch_folder / "include",
    torch_folder / "lib",
    release,
    pybind11.get_include(),
    sycl_header.parent.parent,
    file_of("intel-sycl-rt", "libsycl.so"),
]
# Needed to compile kernels only.
with contextlib.suppress(importlib.metadata.PackageNotFoundError):
    places.append(file_of("intel-opencl-rt", "libintelocl.so"))
print(";".join(str(place) for place in places), end="")

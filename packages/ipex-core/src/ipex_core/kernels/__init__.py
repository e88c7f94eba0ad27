# SPDX-License-Identifier: Apache-2.0
"""Providers of kernels, ISA levels of this machine, and the thresholds that choose a kernel."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

__all__ = ["cmake_prefix_path"]

if TYPE_CHECKING:
    #: For CMAKE_PREFIX_PATH of C++ programs, beside ``torch.utils.cmake_prefix_path``.
    cmake_prefix_path: str


def __getattr__(name: str) -> str:
    if name != "cmake_prefix_path":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from ipex_core.errors import MissingComponentError
    from ipex_core.kernels import providers

    entry = next(
        (e for e in providers._entry_points(providers.KERNEL_GROUP) if e.name == "cpu"), None
    )
    if entry is None:
        known = providers.KNOWN_PROVIDERS["cpu"]
        raise MissingComponentError(
            f"ipex.cmake_prefix_path needs the package {known.distribution}: pip install 'ipex[{known.extra}]'"
        )
    entry.load()
    path: str = sys.modules[entry.module].cmake_prefix_path
    return path

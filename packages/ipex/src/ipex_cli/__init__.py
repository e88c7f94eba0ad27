# SPDX-License-Identifier: Apache-2.0
"""The ``ipex`` command. It starts without torch, so that it can show its help and say what is wrong with torch."""

from __future__ import annotations

import importlib.metadata

__all__ = ["print_versions"]


def print_versions() -> None:
    """Print the versions of ipex, of the packages of its kernels and of torch."""
    for name in ("ipex", "ipex-core", "ipex-cpu-kernels", "torch"):
        try:
            print(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            print(f"{name} not installed")

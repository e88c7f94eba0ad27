# SPDX-License-Identifier: Apache-2.0
"""Finds libraries that can be preloaded: memory allocators and OpenMP runtimes. None of them is needed."""

from __future__ import annotations

import glob
import os
import re
import sys
from collections.abc import Sequence

__all__ = ["find_library", "names_library", "search_paths", "valid_preload"]


def search_paths() -> list[str]:
    """Return the folders to search, in order: environments, the user's, then the system's."""
    folders = [
        f"{os.environ[name]}/lib"
        for name in ("CONDA_PREFIX", "VIRTUAL_ENV")
        if os.environ.get(name)
    ]
    folders.append(f"{sys.prefix}/lib")
    folders += [part for part in os.environ.get("LD_LIBRARY_PATH", "").split(":") if part]
    folders.append(os.path.expanduser("~/.local/lib"))
    folders += ["/usr/local/lib", "/usr/local/lib64", "/usr/lib", "/usr/lib64"]
    machine = os.uname().machine
    folders += [f"/usr/lib/{machine}-linux-gnu", f"/lib/{machine}-linux-gnu"]
    return list(dict.fromkeys(folders))


def names_library(path: str, name: str) -> bool:
    """Return whether a file name belongs to the library ``name``, of any version.

    Example:
        >>> names_library("/usr/lib/libjemalloc.so.2", "jemalloc")
        True
        >>> names_library("/usr/lib/libtcmalloc_minimal.so.4", "tcmalloc")
        True
    """
    pattern = rf"lib{re.escape(name)}(_minimal)?\.so(\.[0-9.]+)?"
    return re.fullmatch(pattern, os.path.basename(path)) is not None


def find_library(name: str, folders: Sequence[str]) -> str | None:
    """Return the path of ``lib<name>.so`` or of its lowest installed version, None if it is not installed."""
    for folder in folders:
        found = glob.glob(f"{glob.escape(folder)}/lib{name}*.so*")
        # The development link and the whole library come before versions and the minimal one.
        matches = sorted((p for p in found if names_library(p, name)), key=lambda p: (len(p), p))
        if matches:
            return matches[0]
    return None


def valid_preload(value: str) -> tuple[list[str], list[str]]:
    """Return the entries of an ``LD_PRELOAD`` that exist and those that do not.

    A name without a slash is left to the loader, which searches its own folders.
    """
    # The loader takes blanks and colons as separators.
    entries = [entry for entry in re.split(r"[:\s]+", value) if entry]
    good = [entry for entry in entries if "/" not in entry or os.path.exists(entry)]
    return good, [entry for entry in entries if entry not in good]

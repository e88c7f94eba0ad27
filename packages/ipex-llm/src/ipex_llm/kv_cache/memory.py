# SPDX-License-Identifier: Apache-2.0
"""How much memory there is for the cache."""

from __future__ import annotations

import os
from pathlib import Path

from ipex_core.errors import IpexError

__all__ = ["CacheMemoryError", "available_memory", "format_bytes", "peak_memory", "resident_memory"]


class CacheMemoryError(IpexError, MemoryError):
    """The cache of keys and values does not fit the memory, or a request does not fit the cache."""


def _number(path: str) -> int | None:
    try:
        return int(Path(path).read_text())
    except (OSError, ValueError):
        return None  # no such limit, or "max"


def available_memory() -> int | None:
    """Return the bytes that this process can still use, without swapping; None if the system does not tell.

    On Linux the smaller of what the machine has left and what the control group of the process has left.
    """
    found: list[int] = []
    try:
        with open("/proc/meminfo", encoding="ascii") as lines:
            found += [int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvail")]
    except (OSError, ValueError, IndexError):
        pass
    for limit, used in (
        ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
        (
            "/sys/fs/cgroup/memory/memory.limit_in_bytes",
            "/sys/fs/cgroup/memory/memory.usage_in_bytes",
        ),
    ):
        most, now = _number(limit), _number(used)
        if most is not None and now is not None and most < 1 << 60:
            found.append(max(most - now, 0))
    if not found and hasattr(os, "sysconf"):
        try:
            found.append(os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
        except (OSError, ValueError):
            return None
    return min(found, default=None)


def _status(name: str) -> int:
    try:
        with open("/proc/self/status", encoding="ascii") as lines:
            return next((int(line.split()[1]) << 10 for line in lines if line.startswith(name)), 0)
    except OSError:
        return 0


def resident_memory() -> int:
    """Return the bytes of this process that are in memory and are no mapped file; 0 if the system does not tell."""
    return _status("RssAnon:")


def peak_memory() -> int:
    """Return the most bytes this process has had in memory, mapped files included; 0 if the system does not tell."""
    return _status("VmHWM:")


def format_bytes(count: float) -> str:
    """Return a size for people.

    Example:
        >>> format_bytes(3 << 20)
        '3.0 MiB'
    """
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"

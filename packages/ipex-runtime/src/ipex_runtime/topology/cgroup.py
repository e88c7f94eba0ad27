# SPDX-License-Identifier: Apache-2.0
"""CPU limits of the control group of this process, versions 1 and 2 and both at once.

Source: Linux, Documentation/admin-guide/cgroup-v1/cpusets.rst and cgroup-v2.rst.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from ipex_runtime.topology.cpu_lists import CpuListError, parse_cpu_list

__all__ = ["cpuset", "crowded", "quota", "read_text"]


def read_text(path: Path) -> str:
    """Return the stripped text of a file, or an empty string if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


def _groups(root: Path, controller: str) -> Iterator[tuple[Path, bool]]:
    """Yield the folders of the process's group and of those above it, with whether they are of version 2.

    A container may see its group as the root of the mount (namespaces) or not: what does not exist is passed over.
    """
    mount = root / "sys/fs/cgroup"
    for line in read_text(root / "proc/self/cgroup").splitlines():
        _, _, rest = line.partition(":")
        names, _, path = rest.partition(":")
        if names and controller not in names.split(","):
            continue
        second = not names
        if second:
            bases = [b for b in (mount, mount / "unified") if (b / "cgroup.controllers").exists()]
        else:
            bases = _first_version_mounts(mount, controller)
        parts = [p for p in path.split("/") if p not in ("", ".", "..")]
        for base in bases:
            for depth in range(len(parts), -1, -1):
                yield base.joinpath(*parts[:depth]), second


def _first_version_mounts(mount: Path, controller: str) -> list[Path]:
    try:
        return sorted(p for p in mount.iterdir() if controller in p.name.split(","))
    except OSError:
        return []


def cpuset(root: Path) -> frozenset[int] | None:
    """Return the CPUs the group may use, None if nothing limits them."""
    found: frozenset[int] | None = None
    for folder, second in _groups(root, "cpuset"):
        names = (
            ("cpuset.cpus.effective", "cpuset.cpus")
            if second
            else ("cpuset.effective_cpus", "cpuset.cpus")
        )
        text = next((t for t in (read_text(folder / name) for name in names) if t), "")
        try:
            cpus = frozenset(parse_cpu_list(text))
        except CpuListError:
            continue
        # An empty set means that the group has no limit of its own.
        if cpus:
            found = cpus if found is None else found & cpus
    return found or None


def quota(root: Path) -> float | None:
    """Return how many CPUs' worth of time the group gets, None if nothing limits it."""
    found: list[float] = []
    for folder, second in _groups(root, "cpu"):
        if second:
            words = read_text(folder / "cpu.max").split()
        else:
            words = [read_text(folder / f"cpu.cfs_{name}_us") for name in ("quota", "period")]
        try:
            limit, period = (float(word) for word in words)
        except ValueError:  # "max", or a file that is not there
            continue
        if limit > 0 and period > 0:
            found.append(limit / period)
    return min(found, default=None)


def crowded(root: Path) -> str | None:
    """Return how it shows that programs wait for CPU time, or None; `ipex_core.kernels.machine` has the same rule."""
    waits = re.search(r"some avg10=([\d.]+)", read_text(root / "proc/pressure/cpu"))
    load = re.match(r"[\d.]+", read_text(root / "proc/loadavg"))
    cpus = len(re.findall(r"^cpu\d", read_text(root / "proc/stat"), re.MULTILINE))
    if waits:
        if float(waits[1]) >= 25:
            return f"programs waited for a CPU {float(waits[1]):.0f} % of the last 10 s"
    elif load and cpus and float(load[0]) > cpus:
        return f"the load is {float(load[0]):g} on {cpus} CPUs"
    for folder, _ in _groups(root, "cpu"):
        stat = read_text(folder / "cpu.stat")
        counts = [re.search(rf"^{name} (\d+)", stat, re.M) for name in _THROTTLED]
        throttled, periods = (int(count[1]) if count else 0 for count in counts)
        if throttled > 0.05 * periods:
            return f"the control group was throttled in {throttled} of {periods} periods"
    return None


_THROTTLED = ("nr_throttled", "nr_periods")

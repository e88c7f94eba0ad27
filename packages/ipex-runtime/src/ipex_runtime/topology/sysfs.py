# SPDX-License-Identifier: Apache-2.0
"""Cores and NUMA nodes from sysfs, and the CPU limits of the control group of this process."""

from __future__ import annotations

import dataclasses
import functools
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from ipex_runtime.topology.types import Core, CpuListError, Node, parse_cpu_list


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


# --- sysfs ------------------------------------------------------------------------------------------------------------


CPUS = "sys/devices/system/cpu"
NODES = "sys/devices/system/node"
ROOT = Path("/")

#: Cores whose highest frequency is this much below the fastest are efficiency cores, where the kernel does not say what
#: they are. Favored cores of one kind differ by less.
FREQUENCY_GAP = 0.15


@dataclasses.dataclass(frozen=True)
class Machine:
    """What does not depend on the process."""

    cores: tuple[Core, ...]
    nodes: tuple[Node, ...]
    offline: tuple[int, ...]


def _list(path: Path) -> list[int]:
    try:
        return parse_cpu_list(read_text(path))
    except CpuListError:
        return []


def _int(path: Path) -> int | None:
    text = read_text(path)
    return int(text) if re.fullmatch(r"-?\d+", text) else None


def _status(root: Path, field: str) -> list[int]:
    match = re.search(rf"^{field}:\s*(\S+)", read_text(root / "proc/self/status"), re.MULTILINE)
    try:
        return parse_cpu_list(match[1]) if match else []
    except CpuListError:
        return []


def affinity(root: Path) -> Iterable[int]:
    """Return the affinity of the calling thread, of a recorded process under another root; empty if unknown."""
    if root == ROOT and hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return _status(root, "Cpus_allowed_list")


def allowed_memory(root: Path) -> list[int]:
    """Return the NUMA nodes whose memory the process may use; empty if unknown."""
    return _status(root, "Mems_allowed_list")


def read_machine(root: Path) -> Machine:
    """Read cores, nodes and offline CPUs below ``root``."""
    if root == ROOT:
        # Some thousand small files on a large machine; they change when a CPU goes offline or comes back.
        return _read_this_machine(tuple(_online(root)))
    return _read_machine(root, _online(root))


@functools.lru_cache(maxsize=1)
def _read_this_machine(online: tuple[int, ...]) -> Machine:
    return _read_machine(ROOT, list(online))


def _read_machine(root: Path, online: list[int]) -> Machine:
    node_of, nodes = _nodes(root, online)
    if not nodes:
        nodes = {0: Node(0, tuple(online))}
    home = min(node.id for node in nodes.values() if node.cpus)
    cores = _cores(root, online, {cpu: node_of.get(cpu, home) for cpu in online})
    present = _list(root / CPUS / "present") or _list(root / CPUS / "possible")
    offline = _list(root / CPUS / "offline")
    if present:
        # "offline" also counts numbers for CPUs that could be plugged in and are not there.
        offline = [cpu for cpu in present if cpu not in online]
    return Machine(cores, tuple(nodes[i] for i in sorted(nodes)), tuple(offline))


def _online(root: Path) -> list[int]:
    online = _list(root / CPUS / "online")
    if online:
        return online
    if root == ROOT:
        return sorted(affinity(root)) or list(range(os.cpu_count() or 1))
    return _status(root, "Cpus_allowed_list") or [0]


def _nodes(root: Path, online: Iterable[int]) -> tuple[dict[int, int], dict[int, Node]]:
    wanted = set(online)
    numbers = _list(root / NODES / "online")
    if not numbers:
        numbers = sorted(
            int(p.name[4:])
            for p in (root / NODES).glob("node[0-9]*")
            if re.fullmatch(r"node\d+", p.name)
        )
    node_of: dict[int, int] = {}
    nodes: dict[int, Node] = {}
    for number in numbers:
        folder = root / NODES / f"node{number}"
        cpus = tuple(cpu for cpu in _list(folder / "cpulist") if cpu in wanted)
        total = re.search(r"MemTotal:\s*(\d+) kB", read_text(folder / "meminfo"))
        distances = read_text(folder / "distance").split()
        nodes[number] = Node(
            number,
            cpus,
            int(total[1]) * 1024 if total else None,
            tuple(int(d) for d in distances if d.isdigit()),
        )
        node_of.update(dict.fromkeys(cpus, number))
    if not any(node.cpus for node in nodes.values()):
        return {}, {}
    return node_of, nodes


def _cores(root: Path, online: list[int], node_of: Mapping[int, int]) -> tuple[Core, ...]:
    wanted = set(online)
    groups: dict[int, set[int]] = {}
    for cpu in online:
        folder = root / CPUS / f"cpu{cpu}" / "topology"
        siblings = _list(folder / "core_cpus_list") or _list(folder / "thread_siblings_list")
        # Lists that contradict each other (seen in virtual machines) are joined.
        members = {cpu, *wanted.intersection(siblings)}
        for other in list(members):
            members |= groups.get(other, set())
        groups.update(dict.fromkeys(members, members))
    kinds = _kinds(root, online)
    cores = []
    for members in {id(group): group for group in groups.values()}.values():
        first = min(members)
        folder = root / CPUS / f"cpu{first}"
        khz = _int(folder / "cpufreq/cpuinfo_max_freq")
        cores.append(
            Core(
                cpus=tuple(sorted(members)),
                # -1: the firmware does not tell.
                package=max(0, _int(folder / "topology/physical_package_id") or 0),
                die=max(0, _int(folder / "topology/die_id") or 0),
                node=node_of[first],
                kind=kinds.get(first, ""),
                max_mhz=khz // 1000 if khz else None,
            )
        )
    return tuple(sorted(cores, key=lambda c: (c.package, c.node, c.cpus)))


def _kinds(root: Path, online: list[int]) -> dict[int, str]:
    """Return the kind of each CPU; empty if there is only one kind."""
    slow = _slow_by_name(root, online) or _slow_by_number(root, online)
    if not slow or slow >= set(online):
        return {}
    return {cpu: "efficiency" if cpu in slow else "performance" for cpu in online}


def _slow_by_name(root: Path, online: list[int]) -> set[int]:
    """Return what the kernel calls small: performance counters of hybrid x86 CPUs are one unit per kind."""
    devices = root / "sys/devices"
    atoms = [*devices.glob("cpu_atom*/cpus"), *devices.glob("cpu_lowpower*/cpus")]
    types = (root / CPUS / "types").glob("intel_atom*/cpulist")
    return set(online).intersection(*[{cpu for path in (*atoms, *types) for cpu in _list(path)}])


def _slow_by_number(root: Path, online: list[int]) -> set[int]:
    """Return what has a clearly smaller capacity (ARM) or highest frequency than the largest."""
    for name in ("cpu_capacity", "cpufreq/cpuinfo_max_freq"):
        values = {cpu: _int(root / CPUS / f"cpu{cpu}" / name) for cpu in online}
        known = {cpu: value for cpu, value in values.items() if value}
        if len(known) == len(online) and known:
            limit = max(known.values()) * (1 - FREQUENCY_GAP)
            slow = {cpu for cpu, value in known.items() if value <= limit}
            if slow:
                return slow
    return set()

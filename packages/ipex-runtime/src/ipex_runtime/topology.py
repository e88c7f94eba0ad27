# SPDX-License-Identifier: Apache-2.0
"""What the CPUs of this machine are, and which of them this process may use.

Read from sysfs, procfs and control groups, never from `lscpu` or the order of CPU numbers: virtual machines and
containers number and hide CPUs in any way. Pure Python, without torch.

Example:
    >>> from ipex_runtime import topology
    >>> machine = topology.read()
    >>> len(machine.allowed) >= 1
    True
"""

from __future__ import annotations

import collections
import dataclasses
import math
import os
from collections.abc import Iterable
from pathlib import Path

from ipex_runtime import _cgroup, _sysfs
from ipex_runtime._lists import CpuListError, format_cpu_list, parse_cpu_list

__all__ = [
    "Core",
    "CpuListError",
    "Node",
    "Topology",
    "format_cpu_list",
    "parse_cpu_list",
    "read",
]


@dataclasses.dataclass(frozen=True, slots=True)
class Core:
    """One physical core.

    Attributes:
        cpus: Its online hardware threads (CPU numbers of the kernel), ascending.
        package: The socket it is in.
        die: The die within the package, 0 if the kernel tells nothing.
        node: Its NUMA node.
        kind: ``"performance"`` or ``"efficiency"`` on a machine that has both, else ``""``.
        max_mhz: Highest frequency in MHz, None if unknown.
    """

    cpus: tuple[int, ...]
    package: int
    die: int
    node: int
    kind: str = ""
    max_mhz: int | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Node:
    """One NUMA node.

    Attributes:
        id: Its number.
        cpus: Its online CPUs; none on a node that is memory alone.
        memory_bytes: Its memory, None if unknown.
        distances: Distance to each node, in the order of `Topology.nodes`; 10 is local.
    """

    id: int
    cpus: tuple[int, ...]
    memory_bytes: int | None = None
    distances: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True)
class Topology:
    """The machine and the limits of this process.

    Attributes:
        cores: All cores with an online CPU, by package, node and lowest CPU.
        nodes: All NUMA nodes, at least one.
        offline: CPUs that exist and are switched off.
        allowed: CPUs this process may run on: affinity and control group, online only; ascending, at least one.
        quota: CPUs' worth of time the control group gives, None without a limit.
        memory_nodes: NUMA nodes whose memory this process may use.
    """

    cores: tuple[Core, ...]
    nodes: tuple[Node, ...]
    offline: tuple[int, ...]
    allowed: tuple[int, ...]
    quota: float | None
    memory_nodes: tuple[int, ...]

    @property
    def cpus(self) -> tuple[int, ...]:
        """All online CPUs, ascending."""
        return tuple(sorted(cpu for core in self.cores for cpu in core.cpus))

    @property
    def packages(self) -> tuple[int, ...]:
        """Numbers of the sockets."""
        return tuple(sorted({core.package for core in self.cores}))

    @property
    def threads_per_core(self) -> int:
        """The most hardware threads of one core."""
        return max(len(core.cpus) for core in self.cores)

    @property
    def hybrid(self) -> bool:
        """Whether there are performance and efficiency cores."""
        return any(core.kind for core in self.cores)

    @property
    def nodes_per_package(self) -> int:
        """The most NUMA nodes with CPUs in one package: above 1 with sub-NUMA clusters (SNC, NPS)."""
        found = collections.Counter(p for p, _ in {(c.package, c.node) for c in self.cores})
        return max(found.values())

    @property
    def usable_threads(self) -> int:
        """How many computing threads make sense: cores that are allowed, the quota rounded up, whichever is less."""
        cores = len(self.allowed_cores())
        return cores if self.quota is None else max(1, min(cores, math.ceil(self.quota)))

    def core_of(self, cpu: int) -> Core:
        """Return the core of a CPU; raises ValueError if the CPU is not online."""
        for core in self.cores:
            if cpu in core.cpus:
                return core
        raise ValueError(f"core_of: cpu must be one of {format_cpu_list(self.cpus)}, got {cpu!r}")

    def allowed_cores(self, node: int | None = None, kind: str | None = None) -> tuple[Core, ...]:
        """Return the cores this process may use, each with its allowed CPUs only.

        Args:
            node: Only those of this NUMA node.
            kind: Only ``"performance"`` or ``"efficiency"`` cores; a machine with one kind has it under both names.
        """
        allowed = set(self.allowed)
        found = []
        for core in self.cores:
            cpus = tuple(cpu for cpu in core.cpus if cpu in allowed)
            if not cpus or node not in (None, core.node) or (kind and core.kind not in ("", kind)):
                continue
            found.append(dataclasses.replace(core, cpus=cpus))
        return tuple(found)

    def physical(self, node: int | None = None, kind: str | None = None) -> tuple[int, ...]:
        """Return one allowed CPU per allowed core, ascending: what a team of threads should run on."""
        return tuple(sorted(core.cpus[0] for core in self.allowed_cores(node, kind)))

    def rows(self) -> list[tuple[str, str]]:
        """Return the facts as (title, text) pairs, for tables."""
        from ipex_runtime._report import rows

        return rows(self)

    def advice(self, threads: int | None = None) -> list[str]:
        """Return what could be better for a process that computes with ``threads`` threads."""
        from ipex_runtime._report import advice

        return advice(self, threads)

    def to_dict(self) -> dict[str, object]:
        """Return nested dictionaries and lists of JSON types."""
        return dataclasses.asdict(self)

    def __str__(self) -> str:
        return "\n".join(f"{title:<22}{text}" for title, text in self.rows())


def read(root: str | os.PathLike[str] = "/", affinity: Iterable[int] | None = None) -> Topology:
    """Examine the machine.

    Args:
        root: Root of the procfs and sysfs trees; other than ``/`` for tests and for recorded machines.
        affinity: The CPUs of the process; default those of the calling thread, or under another root those in
            ``proc/self/status``.

    Returns:
        The topology. Where the system tells nothing (not Linux, a sandbox without sysfs) each CPU is a core of its own
        on one node.

    Example:
        >>> from ipex_runtime import topology
        >>> topology.read().nodes[0].id >= 0
        True
    """
    tree = Path(root)
    machine = _sysfs.read_machine(tree)
    if affinity is None:
        affinity = _sysfs.affinity(tree)
    online = {cpu for core in machine.cores for cpu in core.cpus}
    allowed = (online & set(affinity)) or online
    limit = _cgroup.cpuset(tree)
    # A stale or foreign cpuset (a mount of the host seen from a container) cannot take the last CPU.
    allowed = (allowed & limit if limit is not None else allowed) or allowed
    nodes = {node.id for node in machine.nodes}
    memory = nodes & set(_sysfs.allowed_memory(tree)) or nodes
    return Topology(
        cores=machine.cores,
        nodes=machine.nodes,
        offline=machine.offline,
        allowed=tuple(sorted(allowed)),
        quota=_cgroup.quota(tree),
        memory_nodes=tuple(sorted(memory)),
    )

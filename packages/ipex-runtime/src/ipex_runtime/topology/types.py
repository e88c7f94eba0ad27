# SPDX-License-Identifier: Apache-2.0
"""CPU lists as Linux and the command line write them: ``0-3,8,10-14:2``."""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Iterable

#: No kernel is configured for more; a list such as 0-4000000000 must not fill the memory.
MAX_CPUS = 8192


class CpuListError(ValueError):
    """A text is not a CPU list."""


def parse_cpu_list(text: str) -> list[int]:
    """Return the numbers of a CPU list, ascending and without duplicates.

    Args:
        text: Numbers and ranges separated by commas; ``a-b:s`` is every s-th number. Blanks are ignored.

    Raises:
        CpuListError: A part is no number or range, a range runs backwards, or a number is negative or above 8191.
    """
    found: set[int] = set()
    for part in text.replace(" ", "").strip().split(","):
        if not part:
            continue
        span, _, step = part.partition(":")
        first, dash, last = span.partition("-")
        numbers = [first, last if dash else first, step or "1"]
        if not all(n.isascii() and n.isdigit() for n in numbers) or (":" in part and not step):
            raise CpuListError(
                f"a CPU list must be numbers and ranges such as 0,2-4, got {part!r} in {text!r}"
            )
        low, high, stride = (int(n) for n in numbers)
        if high < low or high >= MAX_CPUS or stride < 1:
            raise CpuListError(
                f"the ranges of a CPU list must rise and stay below {MAX_CPUS}, as in 0-3, got {part!r} in {text!r}"
            )
        found.update(range(low, high + 1, stride))
    return sorted(found)


def format_cpu_list(cpus: Iterable[int]) -> str:
    """Return numbers as a CPU list, ranges shortened: ``[0, 1, 2, 5]`` gives ``"0-2,5"``."""
    spans: list[list[int]] = []
    for cpu in sorted(set(cpus)):
        if spans and cpu == spans[-1][1] + 1:
            spans[-1][1] = cpu
        else:
            spans.append([cpu, cpu])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in spans)


# --- topology ---------------------------------------------------------------------------------------------------------


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
            node: Only cores of this NUMA node.
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
        return _rows(self)

    def advice(self, threads: int | None = None) -> list[str]:
        """Return what could be better for a process that computes with ``threads`` threads."""
        return _advice(self, threads)

    def to_dict(self) -> dict[str, object]:
        """Return nested dictionaries and lists of JSON types."""
        return dataclasses.asdict(self)

    def __str__(self) -> str:
        return "\n".join(f"{title:<22}{text}" for title, text in self.rows())


def _rows(machine: Topology) -> list[tuple[str, str]]:
    """Return the facts as (title, text) pairs."""
    cores = machine.cores
    text = f"{len(cores)} in {len(machine.packages)} package(s), {machine.threads_per_core} hardware thread(s) each"
    kinds = collections.Counter(core.kind for core in cores if core.kind)
    if kinds:
        text += "; " + ", ".join(f"{kinds[kind]} {kind}" for kind in sorted(kinds, reverse=True))
    table = [("cores", text)]
    for kind in sorted(kinds, reverse=True):
        cpus = [cpu for core in cores if core.kind == kind for cpu in core.cpus]
        table.append((f"  {kind}", f"CPUs {format_cpu_list(cpus)}"))
    if machine.offline:
        table.append(("offline CPUs", format_cpu_list(machine.offline)))
    for node in machine.nodes:
        own = [core for core in cores if core.node == node.id]
        where = ",".join(str(p) for p in sorted({core.package for core in own}))
        memory = "" if node.memory_bytes is None else f", {node.memory_bytes / 2**30:.1f} GiB"
        shown = f"CPUs {format_cpu_list(node.cpus)}" if node.cpus else "no CPUs"
        inside = f" of package {where}" if own else ""
        table.append((f"NUMA node {node.id}", f"{shown}, {len(own)} cores{inside}{memory}"))
    allowed = machine.allowed_cores()
    text = f"CPUs {format_cpu_list(machine.allowed)} ({len(allowed)} cores)"
    if machine.quota is not None:
        text += f", time of {machine.quota:g} CPU(s)"
    table.append(("allowed here", text))
    return table


def _advice(machine: Topology, threads: int | None = None) -> list[str]:
    """Return what could be better for a process that computes with ``threads`` threads."""
    found = []
    allowed = machine.allowed_cores()
    nodes = sorted({core.node for core in allowed})
    if len(nodes) > 1:
        why = (
            f" (sub-NUMA clusters: {machine.nodes_per_package} nodes in a package)"
            if machine.nodes_per_package > 1
            else ""
        )
        found.append(
            f"the process may run on {len(nodes)} NUMA nodes{why}: keep a model and its memory on one, "
            f"ipex_runtime.pin(ipex_runtime.CPUPool(node_id={nodes[0]})), or one stream per node"
        )
    kinds = {core.kind for core in allowed}
    if {"performance", "efficiency"} <= kinds:
        fast = format_cpu_list(machine.physical(kind="performance"))
        found.append(
            "performance and efficiency cores are mixed: equal shares of work wait for the slow cores; "
            f"run on the performance cores alone, taskset -c {fast} or ipex_runtime.CPUPool"
        )
    if machine.quota is not None and machine.quota < len(allowed):
        found.append(
            f"the control group gives the time of {machine.quota:g} CPU(s), but {len(allowed)} cores are visible: "
            f"more than {machine.usable_threads} threads are stopped by the quota"
        )
    pairs = [core for core in machine.cores if len(core.cpus) > 1]
    if pairs and all(core.cpus[1] == core.cpus[0] + 1 for core in pairs) and len(pairs) > 1:
        example = format_cpu_list(machine.physical()[:2])
        found.append(
            "neighboring CPU numbers are hardware threads of one core: a range such as 0-3 is two cores; "
            f"CPUs of different cores are {example} and so on"
        )
    if threads is not None and threads > machine.usable_threads:
        found.append(
            f"{threads} threads compute on {machine.usable_threads} usable core(s): set "
            f"OMP_NUM_THREADS={machine.usable_threads}"
        )
    return found

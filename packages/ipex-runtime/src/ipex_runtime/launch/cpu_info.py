# SPDX-License-Identifier: Apache-2.0
"""The CPUs of this machine, or of the text of another machine's ``lscpu``, and how instances divide them.

Source of the rules: the launcher of Intel Extension for PyTorch 2.8 (``ipexrun``), whose class names these are.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ipex_runtime import topology
from ipex_runtime._errors import LaunchArgumentError
from ipex_runtime.topology.types import format_cpu_list

__all__ = ["CPUPool", "CPUPoolList", "CoreInfo"]

#: Cores that are slower than the next faster ones by this share of the highest frequency are efficiency cores.
E_CORE_GAP = 0.15


class CoreInfo:
    """One logical CPU.

    Attributes:
        cpu: Number of the CPU, as in ``taskset``.
        core: Number of its physical core, unique in the machine.
        socket: Number of its socket.
        node: Number of its NUMA node; the number of the socket if there are no nodes.
        is_physical_core: True for the first CPU of each core.
        maxmhz: Highest frequency in MHz, 0 if unknown.
        is_p_core: False for efficiency cores.
    """

    def __init__(self, lscpu_txt: Any = "", headers: Mapping[str, int] | None = None) -> None:
        self.cpu = -1
        self.core = -1
        self.socket = -1
        self.node = -1
        self.is_physical_core = True
        self.maxmhz = 0.0
        self.is_p_core = True
        if lscpu_txt and headers:
            self.parse_raw(lscpu_txt, headers)

    def parse_raw(self, cols: Sequence[str] | str, headers: Mapping[str, int]) -> None:
        """Take over one row of ``lscpu --extended``.

        Args:
            cols: The columns of the row, or the row.
            headers: Column number of ``cpu``, ``core``, ``socket`` and, where there are any, ``node`` and ``maxmhz``.
        """
        row = cols.split() if isinstance(cols, str) else cols
        self.cpu = int(row[headers["cpu"]])
        self.core = int(row[headers["core"]])
        self.socket = int(row[headers["socket"]])
        self.node = int(row[headers["node"]]) if "node" in headers else self.socket
        if "maxmhz" in headers:
            text = row[headers["maxmhz"]].replace(",", ".")
            self.maxmhz = float(text) if text.replace(".", "", 1).isdigit() else 0.0

    def __str__(self) -> str:
        columns = (self.cpu, self.core, self.socket, self.node)
        flags = (self.is_physical_core, self.maxmhz, self.is_p_core)
        return "\t".join(map(str, (*columns, *flags)))

    def __repr__(self) -> str:
        return f"CoreInfo(cpu={self.cpu}, core={self.core}, socket={self.socket}, node={self.node})"


class CPUPool(list[CoreInfo]):
    """The CPUs of one instance."""

    def __init__(self, cores: Sequence[CoreInfo] = ()) -> None:
        super().__init__(cores)

    def get_ranges(self, l: Sequence[int]) -> Iterator[tuple[int, int]]:
        """Yield the first and the last of each run of consecutive numbers."""
        first = last = None
        for number in l:
            if first is None or last is None:
                first = last = number
            elif number == last + 1:
                last = number
            else:
                yield first, last
                first = last = number
        if first is not None and last is not None:
            yield first, last

    def get_pool_txt(self, return_mode: str = "auto") -> dict[str, str]:
        """Return CPUs and NUMA nodes as text.

        Args:
            return_mode: ``"list"`` (``"0,1,2"``), ``"range"`` (``"0-2"``) or ``"auto"``: ranges where they are fewer.

        Returns:
            ``{"cores": ..., "nodes": ...}``.
        """
        cpus = [c.cpu for c in self]
        runs = list(self.get_ranges(cpus))
        as_list = ",".join(map(str, cpus))
        as_runs = ",".join(f"{a}-{b}" for a, b in runs)
        mode = return_mode.lower()
        short = as_list if len(cpus) <= len(runs) else as_runs
        return {
            "cores": {"list": as_list, "range": as_runs}.get(mode, short),
            "nodes": ",".join(map(str, sorted({c.node for c in self}))),
        }

    def cpus(self) -> tuple[int, ...]:
        """Return the numbers of the CPUs."""
        return tuple(c.cpu for c in self)

    def nodes(self) -> tuple[int, ...]:
        """Return the numbers of the NUMA nodes, sorted."""
        return tuple(sorted({c.node for c in self}))


class CPUPoolList:
    """All CPUs that this process may use, and pools of them on demand.

    Args:
        logger: A `logging.Logger` for notes, or None: notes are printed to stderr.
        lscpu_txt: Text of ``lscpu --all --extended`` of some machine. Empty: this machine, limited to the CPUs that
            this process may use.

    Attributes:
        pool_all: All CPUs, by number.
        pools_ondemand: What `gen_pools_ondemand` made, one pool for each instance.
        memory_nodes: NUMA nodes whose memory this process may use; empty for another machine.

    Raises:
        RuntimeError: Not on Linux.
        LaunchArgumentError: ``lscpu_txt`` has no CPU.
    """

    def __init__(self, logger: Any = None, lscpu_txt: str = "") -> None:
        if sys.platform != "linux":
            raise RuntimeError(f"CPUPoolList: the launcher needs Linux, got {sys.platform}")
        self.logger = logger
        self.pools_ondemand: list[CPUPool] = []
        self.memory_nodes: tuple[int, ...] = ()
        self._worth: int | None = None
        if lscpu_txt.strip():
            self.pool_all = _parse(lscpu_txt)
            _find_e_cores(self.pool_all)
        else:
            machine = topology.read()
            self.pool_all = _pool_of(machine)
            self.memory_nodes = machine.memory_nodes
            if machine.usable_threads < len(machine.allowed_cores()):
                self._worth = machine.usable_threads
        _find_physical(self.pool_all)

    def verbose(self, level: str, msg: str, warning_type: Any = None) -> None:
        """Write a note of ``level`` ``"info"`` or ``"warning"``."""
        if level not in ("info", "warning"):
            raise LaunchArgumentError(f"verbose: level must be 'info' or 'warning', got {level!r}")
        if self.logger is not None:
            getattr(self.logger, level)(msg)
        elif level == "warning":
            print(f"ipexrun: warning: {msg}", file=sys.stderr)

    def gen_pools_ondemand(
        self,
        ninstances: int = 0,
        ncores_per_instance: int = 0,
        use_logical_cores: bool = False,
        use_e_cores: bool = False,
        bind_numa_node: bool = False,
        nodes_list: Sequence[int] | None = None,
        cores_list: Sequence[int] | None = None,
        strategy: str = "close",
        return_mode: str = "auto",
    ) -> None:
        """Divide the CPUs among instances; the result is in ``pools_ondemand``.

        Args:
            ninstances: Number of instances; 0: as many as there is room for, or one.
            ncores_per_instance: Cores of each; 0: an even part, what remains is unused; -1: an even part, all are used.
            use_logical_cores: Use all CPUs of each core, otherwise the first one.
            use_e_cores: Use efficiency cores, too (they are used anyway where there are no others).
            bind_numa_node: Keep each instance within one NUMA node.
            nodes_list: NUMA nodes to use; empty: all.
            cores_list: CPUs to use; empty: all. Wins over ``nodes_list``.
            strategy: Where fewer instances are wanted than there is room for: ``"scatter"`` spreads them over the
                machine, ``"close"`` takes the first ones.
            return_mode: Accepted for old callers.

        Raises:
            LaunchArgumentError: A CPU or node that this process cannot use, or more instances or cores than there are.
        """
        if strategy not in ("scatter", "close"):
            raise LaunchArgumentError(
                f"gen_pools_ondemand: --strategy must be scatter or close, got {strategy!r}"
            )
        if ncores_per_instance < -1:
            raise LaunchArgumentError(
                f"gen_pools_ondemand: --ncores-per-instance must be at least -1, got {ncores_per_instance}"
            )
        if ninstances < 0:
            raise LaunchArgumentError(
                f"gen_pools_ondemand: --ninstances must be at least 0, got {ninstances}"
            )
        cores = self._usable(nodes_list or (), cores_list or (), use_logical_cores, use_e_cores)
        if ncores_per_instance > 0:
            found = _of_size(cores, ncores_per_instance, ninstances, bind_numa_node, strategy)
        else:
            greedy = ncores_per_instance == -1
            found = _even_parts(cores, max(ninstances, 1), greedy, bind_numa_node)
        self.pools_ondemand = [CPUPool(sorted(pool, key=lambda c: c.cpu)) for pool in found]

    def _usable(
        self, nodes: Sequence[int], cpus: Sequence[int], logical: bool, e_cores: bool
    ) -> list[CoreInfo]:
        pool: list[CoreInfo] = list(self.pool_all)
        if cpus:
            known = {c.cpu for c in pool}
            if wrong := set(cpus) - known:
                raise LaunchArgumentError(
                    "gen_pools_ondemand: --cores-list must name CPUs that this process may use "
                    f"({format_cpu_list(known)}), got {format_cpu_list(wrong)}"
                )
            pool = [c for c in pool if c.cpu in set(cpus)]
        elif nodes:
            there = {c.node for c in pool}
            if wrong := set(nodes) - there:
                raise LaunchArgumentError(
                    "gen_pools_ondemand: --nodes-list must name NUMA nodes with CPUs that this process may use "
                    f"({format_cpu_list(there)}), got {format_cpu_list(wrong)}"
                )
            pool = [c for c in pool if c.node in set(nodes)]
        pool.sort(key=lambda c: (c.node, c.core, not c.is_physical_core, c.cpu))
        if not logical:
            # Of each core the first CPU in the selection: a list may name the second ones only.
            first: dict[int, CoreInfo] = {}
            for c in pool:
                first.setdefault(c.core, c)
            left_out = [c.cpu for c in pool if first[c.core] is not c]
            pool = list(first.values())
            if left_out:
                self.verbose(
                    "info",
                    f"CPUs {format_cpu_list(left_out)} share cores with others and are not used "
                    "(--use-logical-cores uses them)",
                )
        fast = [c for c in pool if c.is_p_core]
        if not e_cores and fast and len(fast) < len(pool):
            slow = format_cpu_list(c.cpu for c in pool if not c.is_p_core)
            self.verbose(
                "info", f"CPUs {slow} are efficiency cores and not used (--use-e-cores uses them)"
            )
            pool = fast
        if self._worth is not None and not cpus and len(pool) > self._worth:
            self.verbose(
                "info",
                f"the control group gives time of {self._worth} of {len(pool)} CPUs: more are not used "
                "(--cores-list uses them)",
            )
            pool = pool[: self._worth]
        return pool


def _parse(text: str) -> CPUPool:
    headers: dict[str, int] = {}
    pool = CPUPool()
    columns = 0
    for line in text.lower().splitlines():
        words = line.split()
        if {"cpu", "core", "socket"} <= set(words):
            columns = len(words)
            names = ("cpu", "core", "socket", "node", "maxmhz")
            headers = {name: words.index(name) for name in names if name in words}
        elif columns == len(words) and all(
            words[headers[name]].isdigit() for name in ("cpu", "core", "socket")
        ):
            # (An offline CPU has "-" for its core.)
            pool.append(CoreInfo(words, headers))
    if not pool:
        raise LaunchArgumentError(
            "CPUPoolList: lscpu_txt must have the columns CPU, CORE and SOCKET and a row for each CPU, "
            f"got {text.strip()[:60]!r}"
        )
    pool.sort(key=lambda c: c.cpu)
    return pool


def _pool_of(machine: topology.Topology) -> CPUPool:
    pool = CPUPool()
    allowed = set(machine.allowed)
    for number, core in enumerate(machine.cores):
        for cpu in allowed.intersection(core.cpus):
            info = CoreInfo()
            info.cpu, info.core, info.socket, info.node = cpu, number, core.package, core.node
            info.maxmhz = float(core.max_mhz or 0)
            info.is_p_core = core.kind != "efficiency"
            pool.append(info)
    pool.sort(key=lambda c: c.cpu)
    return pool


def _find_physical(pool: CPUPool) -> None:
    seen: set[int] = set()
    for c in pool:
        c.is_physical_core = c.core not in seen
        seen.add(c.core)


def _find_e_cores(pool: CPUPool) -> None:
    steps = sorted({c.maxmhz for c in pool})
    for slower, faster in itertools.pairwise(steps):
        if faster - slower >= E_CORE_GAP * steps[-1]:
            for c in pool:
                c.is_p_core = c.maxmhz >= faster
            return


# -- the division ------------------------------------------------------------------------------------------------------


def _by_node(cores: Sequence[CoreInfo]) -> list[list[CoreInfo]]:
    return [[c for c in cores if c.node == node] for node in sorted({c.node for c in cores})]


def _even_parts(
    cores: Sequence[CoreInfo], ninstances: int, greedy: bool, bind: bool
) -> list[list[CoreInfo]]:
    if ninstances > len(cores):
        raise LaunchArgumentError(
            f"gen_pools_ondemand: --ninstances must be at most {len(cores)}, the number of usable cores, "
            f"got {ninstances}"
        )
    groups = _by_node(cores) if bind else [list(cores)]
    counts = _share([len(group) for group in groups], ninstances) if bind else [ninstances]
    found = []
    for group, count in zip(groups, counts, strict=True):
        size, rest = divmod(len(group), count) if count else (0, 0)
        start = 0
        for i in range(count):
            end = start + size + (1 if greedy and i < rest else 0)
            found.append(group[start:end])
            start = end
    return found


def _share(sizes: Sequence[int], ninstances: int) -> list[int]:
    """Return how many instances each node gets, so that the smallest instance is as large as possible."""
    total = sum(sizes)
    counts = [max(1, -(-ninstances * size // total)) for size in sizes]
    while sum(counts) > ninstances:
        shared = [i for i, count in enumerate(counts) if count > 1]
        if shared:
            counts[min(shared, key=lambda i: sizes[i] / counts[i])] -= 1
        else:
            # More nodes than instances: the smallest nodes stay empty, of equal ones the last.
            left = [i for i, count in enumerate(counts) if count]
            counts[min(left, key=lambda i: (sizes[i], -i))] = 0
    return counts


def _of_size(
    cores: Sequence[CoreInfo], size: int, ninstances: int, bind: bool, strategy: str
) -> list[list[CoreInfo]]:
    groups = _by_node(cores) if bind else [list(cores)]
    parts = [[g[i : i + size] for i in range(0, len(g) - size + 1, size)] for g in groups]
    room = sum(map(len, parts))
    within = " within single NUMA nodes" if bind else ""
    if room == 0:
        most = max(map(len, groups))
        raise LaunchArgumentError(
            f"gen_pools_ondemand: --ncores-per-instance must be at most {most}, the number of usable cores{within}, "
            f"got {size}"
        )
    if ninstances > room:
        raise LaunchArgumentError(
            f"gen_pools_ondemand: --ninstances must be at most {room} with --ncores-per-instance {size} on "
            f"{len(cores)} usable cores{within}, got {ninstances}"
        )
    whole = [part for group in parts for part in group]
    if ninstances in (0, room):
        return whole
    if strategy == "close":
        return whole[:ninstances]
    if len(parts) == 1:
        picked = whole[:: -(-room // ninstances)]
        if len(picked) < ninstances:  # such steps are too long: 4 of 5
            picked = [whole[i * room // ninstances] for i in range(ninstances)]
        return picked
    counts = [0] * len(parts)
    while sum(counts) < ninstances:
        for i, group in enumerate(parts):
            if counts[i] < len(group) and sum(counts) < ninstances:
                counts[i] += 1
    return [part for group, count in zip(parts, counts, strict=True) for part in group[:count]]

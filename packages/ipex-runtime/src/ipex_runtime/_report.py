# SPDX-License-Identifier: Apache-2.0
"""What `ipex topology` and `ipex doctor` say about the machine."""

from __future__ import annotations

import collections
from typing import TYPE_CHECKING

from ipex_runtime._lists import format_cpu_list

if TYPE_CHECKING:
    from ipex_runtime.topology import Topology

__all__ = ["advice", "rows"]


def rows(machine: Topology) -> list[tuple[str, str]]:
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


def advice(machine: Topology, threads: int | None = None) -> list[str]:
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
            "neighbouring CPU numbers are hardware threads of one core: a range such as 0-3 is two cores; "
            f"CPUs of different cores are {example} and so on"
        )
    if threads is not None and threads > machine.usable_threads:
        found.append(
            f"{threads} threads compute on {machine.usable_threads} usable core(s): set "
            f"OMP_NUM_THREADS={machine.usable_threads}"
        )
    return found

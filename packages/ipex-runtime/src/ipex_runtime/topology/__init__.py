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

import os
from collections.abc import Iterable
from pathlib import Path

from ipex_runtime.topology import sysfs
from ipex_runtime.topology.types import (
    Core,
    CpuListError,
    Node,
    Topology,
    format_cpu_list,
    parse_cpu_list,
)

__all__ = [
    "Core",
    "CpuListError",
    "Node",
    "Topology",
    "format_cpu_list",
    "parse_cpu_list",
    "read",
]


def read(root: str | os.PathLike[str] = "/", affinity: Iterable[int] | None = None) -> Topology:
    """Examine the machine.

    Args:
        root: Root of the procfs and sysfs trees; other than ``/`` for tests and for recorded machines.
        affinity: The CPUs of the process; default the CPUs of the calling thread, or under another root the CPUs
            in ``proc/self/status``.

    Returns:
        The topology. Where the system tells nothing (not Linux, a sandbox without sysfs) each CPU is a core of its own
        on one node.

    Example:
        >>> from ipex_runtime import topology
        >>> topology.read().nodes[0].id >= 0
        True
    """
    tree = Path(root)
    machine = sysfs.read_machine(tree)
    if affinity is None:
        affinity = sysfs.affinity(tree)
    online = {cpu for core in machine.cores for cpu in core.cpus}
    allowed = (online & set(affinity)) or online
    limit = sysfs.cpuset(tree)
    # A stale or foreign cpuset (a mount of the host seen from a container) cannot take the last CPU.
    allowed = (allowed & limit if limit is not None else allowed) or allowed
    nodes = {node.id for node in machine.nodes}
    memory = nodes & set(sysfs.allowed_memory(tree)) or nodes
    return Topology(
        cores=machine.cores,
        nodes=machine.nodes,
        offline=machine.offline,
        allowed=tuple(sorted(allowed)),
        quota=sysfs.quota(tree),
        memory_nodes=tuple(sorted(memory)),
    )

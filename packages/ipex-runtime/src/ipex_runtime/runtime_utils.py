# SPDX-License-Identifier: Apache-2.0
"""IPEX's helpers about nodes and cores, from sysfs instead of `lscpu`."""

from __future__ import annotations

from ipex_runtime import topology
from ipex_runtime._errors import WrongValueError

__all__ = ["get_core_list_of_node_id", "get_num_cores_per_node", "get_num_nodes"]


def check_node(function: str, node_id: int, machine: topology.Topology) -> None:
    """Raise unless ``node_id`` is a NUMA node with CPUs."""
    if isinstance(node_id, bool) or not isinstance(node_id, int):
        raise TypeError(f"{function}: node_id must be an integer, got {type(node_id).__name__}")
    known = [node.id for node in machine.nodes if node.cpus]
    if node_id not in known:
        raise WrongValueError(f"{function}: node_id must be one of {known}, got {node_id}")


def get_num_nodes() -> int:
    """Return the number of NUMA nodes that have CPUs."""
    return sum(1 for node in topology.read().nodes if node.cpus)


def get_num_cores_per_node() -> int:
    """Return the number of cores of a NUMA node; of the largest one if they differ."""
    machine = topology.read()
    return max(sum(core.node == node.id for core in machine.cores) for node in machine.nodes)


def get_core_list_of_node_id(node_id: int) -> list[int]:
    """Return one CPU number per core of a NUMA node, ascending, whether this process may use them or not.

    Raises:
        TypeError: ``node_id`` is no integer.
        ValueError: There is no such node.

    Example:
        >>> from ipex_runtime import get_core_list_of_node_id
        >>> len(get_core_list_of_node_id(0)) >= 1
        True
    """
    machine = topology.read()
    check_node("get_core_list_of_node_id", node_id, machine)
    return sorted(core.cpus[0] for core in machine.cores if core.node == node_id)

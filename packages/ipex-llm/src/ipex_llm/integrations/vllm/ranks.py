# SPDX-License-Identifier: Apache-2.0
"""Which cores each rank of a server computes on: from the affinity mask, the NUMA nodes and the control group.

vLLM's own choice gives each rank a NUMA node, and none to ranks that have no node of their own.
"""

from __future__ import annotations

import importlib
import logging
import os
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from ipex_core.kernels.machine import cgroup_limits

_log = logging.getLogger("ipex")

#: vLLM's variable: "auto", "nobind", or lists of CPUs with a bar between ranks.
VARIABLE = "VLLM_CPU_OMP_THREADS_BIND"
#: The number of ranks, and what `bind` has set it to for them: later engines, also of processes that this one starts,
#: may have another number.
BOUND = "_IPEX_VLLM_BIND"

#: With as many cores as this for a rank, one of them is left to the scheduler and the server.
_SPARE_FROM = 8


class Cpu(NamedTuple):
    """A CPU of the kernel: its number, its physical core and its NUMA node."""

    number: int
    core: int
    node: int


def cores_of_ranks(
    cpus: Iterable[Cpu], ranks: int, quota: float | None = None, spare: int | None = None
) -> list[list[int]]:
    """Return the CPUs of each rank: one of each core, neighbors on one NUMA node.

    Args:
        cpus: CPUs that the process may run on.
        ranks: Processes that compute on this machine.
        quota: CPUs' worth of time that the control group gives, None without a limit.
        spare: Cores of each rank that are left to other processes; None: one of 8 and more.

    Returns:
        A list for each rank; an empty list of lists where there are fewer cores than ranks.
    """
    nodes: dict[int, dict[int, int]] = {}
    for cpu in sorted(cpus):
        nodes.setdefault(cpu.node, {}).setdefault(cpu.core, cpu.number)
    groups = [list(cores.values()) for _, cores in sorted(nodes.items())]
    shares = _shares([len(group) for group in groups], ranks)
    if not shares:
        return []
    found = []
    for group, share in zip(groups, shares, strict=True):
        for i in range(share):
            part = group[i * len(group) // share : (i + 1) * len(group) // share]
            least = 1 if len(part) >= _SPARE_FROM else 0
            found.append(part[: max(1, len(part) - (least if spare is None else spare))])
    if quota is not None:
        most = max(1, int(quota) // ranks)
        found = [part[:most] for part in found]
    return found


def _shares(sizes: Sequence[int], ranks: int) -> list[int]:
    """Return how many ranks each node gets: those with the most cores for a rank first."""
    if sum(sizes) < ranks:
        return []
    shares = [0] * len(sizes)
    for _ in range(ranks):
        # The first of equals, so that ranks follow the order of the nodes.
        best = max(range(len(sizes)), key=lambda i: (sizes[i] / (shares[i] + 1), -i))
        shares[best] += 1
    return shares


def cores_of_this_machine(ranks: int) -> list[list[int]]:
    """Return `cores_of_ranks` of the CPUs and the quota that this process has."""
    resources: Any = importlib.import_module("vllm.utils.cpu_resource_utils")
    cpus = [Cpu(c.id, c.physical_core, c.numa_node) for c in resources.get_allowed_cpu_list()]
    reserved = os.environ.get("VLLM_CPU_NUM_OF_RESERVED_CPU")
    spare = None if reserved is None else -(-int(reserved) // ranks)
    return cores_of_ranks(cpus, ranks, cgroup_limits().cpus, spare)


def bind(ranks: int) -> None:
    """Set vLLM's variable for the ranks of this machine, if the user has not; its processes read it.

    Args:
        ranks: Processes that compute on this machine, with all data-parallel replicas.
    """
    count, _, before = os.environ.get(BOUND, "").partition(" ")
    given = os.environ.get(VARIABLE, "auto")
    if given != "auto" and (given != before or count == str(ranks)):
        return
    found = cores_of_this_machine(ranks)
    lists = "|".join(",".join(map(str, part)) for part in found)
    os.environ[VARIABLE] = lists or "nobind"
    os.environ[BOUND] = f"{ranks} {lists or 'nobind'}"
    if found:
        return
    _log.warning(
        "vLLM plug-in: %d ranks on this machine share its cores, of which there are fewer: they are not bound",
        ranks,
    )

# SPDX-License-Identifier: Apache-2.0
"""``ipex topology``: the cores of the machine, as text or as JSON."""

from __future__ import annotations

from ipex_runtime import topology

__all__ = ["command"]


def command(json: bool = False) -> None:
    """Show sockets, NUMA nodes, cores and what this process may use of them, with advice."""
    machine = topology.read()
    if json:
        from json import dumps

        print(dumps({"schema": 1, **machine.to_dict()}, indent=2))
        return
    print(machine)
    for line in machine.advice():
        print(f"\nadvice: {line}")

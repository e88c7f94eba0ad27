# SPDX-License-Identifier: Apache-2.0
"""Sub-commands of ``ipex``, found through the entry-point group ``ipex.commands``."""

from __future__ import annotations

import sys

from ipex_runtime import topology


def run(argv: list[str]) -> None:
    """Run a program on the right cores, with the right memory and libraries; the same as ipexrun."""
    from ipex_runtime.launch.launch import main

    sys.exit(main(argv, "ipex run"))


def auto(argv: list[str]) -> None:
    """Run a script whose models are optimized for inference, without changing it."""
    from ipex_runtime.launch.launch import main

    # Through the launcher, which starts the script in a process of its own: here, torch may be imported already.
    sys.exit(main(["--auto-ipex", *argv], "ipex auto"))


def hypertune(argv: list[str]) -> None:
    """Find the options of ipex run with which a script reaches the best numbers."""
    from ipex_runtime.hypertune.__main__ import main

    main(argv, "ipex hypertune")


def show_topology(json: bool = False) -> None:
    """Show sockets, NUMA nodes, cores and what this process may use of them, with advice."""
    machine = topology.read()
    if json:
        from json import dumps

        print(dumps({"schema": 1, **machine.to_dict()}, indent=2))
        return
    print(machine)
    for line in machine.advice():
        print(f"\nadvice: {line}")

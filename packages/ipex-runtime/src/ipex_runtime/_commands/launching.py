# SPDX-License-Identifier: Apache-2.0
"""``ipex run``, ``ipex auto`` and ``ipex hypertune``; their arguments are not parsed by the ``ipex`` command."""

from __future__ import annotations

import sys

__all__ = ["auto", "hypertune", "run"]


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

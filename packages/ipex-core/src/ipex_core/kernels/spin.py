# SPDX-License-Identifier: Apache-2.0
"""How long OpenMP threads of a server wait for each other before they sleep."""

from __future__ import annotations

import os
import sys

from ipex_core.kernels import machine

__all__ = ["restart_if_crowded"]


def restart_if_crowded() -> None:
    """Start this command again with a short spin if programs wait for CPU time; else return.

    libgomp reads ``GOMP_SPINCOUNT`` when it is loaded, which importing torch has done. Variables that the user has set
    (``GOMP_SPINCOUNT``, ``OMP_WAIT_POLICY``) decide instead.
    """
    if os.environ.get("GOMP_SPINCOUNT") or os.environ.get("OMP_WAIT_POLICY"):
        return
    reason = machine.crowded() if sys.platform.startswith("linux") else None
    gomp = any("libgomp" in path for path in machine.loaded_libraries())
    if reason is None or not gomp or not sys.orig_argv:
        return
    text = f"{reason}: starting with GOMP_SPINCOUNT={machine.SHORT_SPIN}"
    print(text, file=sys.stderr, flush=True)
    environment = {**os.environ, "GOMP_SPINCOUNT": str(machine.SHORT_SPIN)}
    os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], environment)  # noqa: S606

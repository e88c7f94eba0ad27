# SPDX-License-Identifier: Apache-2.0
"""Starts processes on chosen CPUs and NUMA nodes without numactl.

A new process inherits both bindings of the thread that starts it, so this thread takes them on for that moment. The
process is bound before its first instruction, and no code has to run between fork and exec.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
from collections.abc import Callable, Iterator, Sequence

__all__ = ["bound"]

_SET_MEMPOLICY = {"x86_64": 238, "aarch64": 237}
_MPOL_DEFAULT = 0
_MPOL_BIND = 2


def _set_mempolicy(mode: int, nodes: Sequence[int]) -> None:
    number = _SET_MEMPOLICY.get(platform.machine())
    if number is None:
        raise OSError(f"no number of set_mempolicy known for {platform.machine()}")
    bits = 8 * ctypes.sizeof(ctypes.c_ulong)
    words = (max(nodes, default=0) // bits) + 1
    mask = (ctypes.c_ulong * words)()
    for node in nodes:
        mask[node // bits] |= 1 << (node % bits)
    libc = ctypes.CDLL(None, use_errno=True)
    # The kernel takes one bit less than it is told.
    arguments = (mask, ctypes.c_ulong(words * bits + 1)) if nodes else (None, ctypes.c_ulong(0))
    if libc.syscall(ctypes.c_long(number), ctypes.c_int(mode), *arguments) != 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))


@contextlib.contextmanager
def bound(
    cpus: Sequence[int], nodes: Sequence[int], complain: Callable[[str], None]
) -> Iterator[None]:
    """Bind the calling thread, and so what it starts, for the time of the context.

    Args:
        cpus: Numbers of CPUs; empty: as it is.
        nodes: Numbers of the NUMA nodes that memory comes from; empty: as it is.
        complain: Gets a message where the system refuses the memory policy, as containers do; the CPUs hold anyway.

    Raises:
        OSError: The CPUs are refused.
    """
    before = os.sched_getaffinity(0)
    memory = False
    try:
        if cpus:
            os.sched_setaffinity(0, cpus)
        if nodes:
            try:
                _set_mempolicy(_MPOL_BIND, nodes)
                memory = True
            except OSError as error:
                complain(
                    f"the memory of instances is not bound to NUMA nodes: {error} "
                    "(in a container: --cap-add SYS_NICE); the kernel takes it near the CPUs if it can"
                )
        yield
    finally:
        if memory:
            with contextlib.suppress(OSError):
                _set_mempolicy(_MPOL_DEFAULT, ())
        if cpus:
            os.sched_setaffinity(0, before)

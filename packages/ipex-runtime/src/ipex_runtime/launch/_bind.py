# SPDX-License-Identifier: Apache-2.0
"""Starts processes on chosen CPUs and NUMA nodes without numactl.

A new process inherits both bindings of the thread that starts it, so this thread takes them on for that moment. The
process is bound before its first instruction, and no code has to run between fork and exec.
"""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Callable, Iterator, Sequence

from ipex_runtime.memory import set_memory_policy

__all__ = ["bound"]


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
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                memory = set_memory_policy("bind", nodes)
            for warning in caught:
                complain(str(warning.message))
        yield
    finally:
        if memory:
            set_memory_policy("default")
        if cpus:
            os.sched_setaffinity(0, before)

# SPDX-License-Identifier: Apache-2.0
"""The OpenMP team of the calling thread: how many threads it has, where they run, where their memory comes from."""

from __future__ import annotations

import ctypes
import functools
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from ipex_runtime import memory

__all__ = ["State", "library", "omp_places", "set_threads"]

CPU_WORDS = 128  # 8192 CPUs


@functools.cache
def library() -> ctypes.CDLL | None:
    """Return the native library, None where the wheel has none or it cannot be loaded."""
    path = Path(__file__).parent / "lib" / "libipex_runtime.so"
    try:
        return ctypes.CDLL(str(path))
    except OSError:
        return None


@functools.cache
def _omp(name: str) -> Callable[..., int] | None:
    # Looked up as torch's own calls are: in what is preloaded first, then in what torch brought.
    return getattr(ctypes.CDLL(None), name, None) if os.name == "posix" else None


@functools.cache
def _mkl_set_threads() -> Callable[[int], int] | None:
    path = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    try:
        return getattr(ctypes.CDLL(str(path)), "MKL_Set_Num_Threads_Local", None)
    except OSError:
        return None


def set_threads(count: int, mkl: int | None = None) -> tuple[int, int]:
    """Set how many threads torch and MKL use in the calling thread, and return the previous numbers for a later call.

    `torch.set_num_threads` would also change what threads that start later find.
    """
    before = torch.get_num_threads()  # also gives this thread the settings of the process
    set_omp, set_mkl = _omp("omp_set_num_threads"), _mkl_set_threads()
    if set_omp is not None:
        set_omp(count)
    mkl_before = set_mkl(count if mkl is None else mkl) if set_mkl is not None else 0
    if (
        torch.get_num_threads() != count
    ):  # built without OpenMP, or with one that is not found by name
        torch.set_num_threads(count)
    return before, mkl_before


def omp_places() -> set[int]:
    """Return the CPUs of OpenMP's places, empty if the program has none.

    With ``OMP_PROC_BIND`` the runtime binds the first thread to one place when it is loaded, so that the thread's own
    affinity no longer tells what the process may use; the places do.
    """
    names = ("omp_get_num_places", "omp_get_place_num_procs", "omp_get_place_proc_ids")
    functions = [f for f in map(_omp, names) if f is not None]
    if len(functions) < len(names):
        return set()
    count, size, ids = functions
    found: set[int] = set()
    for place in range(count()):
        cpus = (ctypes.c_int * max(0, size(place)))()
        ids(place, cpus)
        found.update(cpus)
    return found


class State:
    """Affinity and memory policy for each thread of a team; `exchange` swaps them with the present ones.

    Args:
        places: CPUs of each thread.
        policy: Name of a memory policy, None: as it is.
        nodes: NUMA nodes of the policy.
    """

    def __init__(
        self, places: Sequence[Iterable[int]], policy: str | None = None, nodes: Sequence[int] = ()
    ) -> None:
        count = len(places)
        self.threads = count
        self._cpus: set[int] = set().union(*places)
        self._masks = (ctypes.c_uint64 * (count * CPU_WORDS))()
        for row, cpus in enumerate(places):
            for cpu in cpus:
                self._masks[row * CPU_WORDS + cpu // 64] |= 1 << cpu % 64
        mode, words = memory.policy_row(policy, nodes)
        self._modes = (ctypes.c_int32 * count)(*[mode] * count)
        self._nodes = (ctypes.c_uint64 * (count * memory.NODE_WORDS))(*words * count)

    def copy(self) -> State:
        """Return a copy, for one exchange and the one that undoes it."""
        other = State.__new__(State)
        other.threads, other._cpus = self.threads, set(self._cpus)
        other._masks = type(self._masks).from_buffer_copy(self._masks)
        other._modes = type(self._modes).from_buffer_copy(self._modes)
        other._nodes = type(self._nodes).from_buffer_copy(self._nodes)
        return other

    def exchange(self) -> None:
        """Swap with the state of the calling thread's team; a second call restores. A refusal is told once."""
        native = library()
        errors = (ctypes.c_int32 * (2 * self.threads))()
        pointers: list[Any] = [self._masks, self._modes, self._nodes, errors]
        if native is None or native.ipex_runtime_exchange(self.threads, CPU_WORDS, *pointers):
            self._exchange_caller()
            return
        for what, codes in (("sched_setaffinity", errors[::2]), ("set_mempolicy", errors[1::2])):
            code = next((c for c in codes if c > 0), 0)
            if code:
                memory.tell_refusal(what, code)

    def _exchange_caller(self) -> None:
        """Without the native library: the calling thread alone. A team that it starts later inherits its CPUs."""
        if not sys.platform.startswith("linux"):
            return
        before = os.sched_getaffinity(0)
        try:
            os.sched_setaffinity(0, self._cpus)
        except OSError as error:
            memory.tell_refusal("sched_setaffinity", error.errno or 0)
            return
        self._cpus = before

# SPDX-License-Identifier: Apache-2.0
"""Pools of cores, and pinning the calling thread and its OpenMP team to one."""

from __future__ import annotations

import ctypes
import functools
import inspect
import operator
import os
import sys
import threading
import warnings
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch

from ipex_runtime import memory, topology
from ipex_runtime._errors import WrongTypeError
from ipex_runtime.memory import MODES
from ipex_runtime.topology.types import MAX_CPUS, format_cpu_list

__all__ = [
    "CPUPool",
    "is_runtime_ext_enabled",
    "pin",
    "process_cpus",
]

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


# --- pools ------------------------------------------------------------------------------------------------------------


Function = TypeVar("Function", bound=Callable[..., Any])

#: CPUs of the main thread before it was pinned; None while it is not.
_before_pin: frozenset[int] | None = None


def process_cpus() -> tuple[int, ...]:
    """Return the CPUs this process may use, ascending, whatever its threads are pinned to at the moment."""
    return topology.read(affinity=_affinity()).allowed


def _affinity() -> frozenset[int]:
    if _before_pin is not None:
        return _before_pin
    if not sys.platform.startswith("linux"):
        return frozenset()
    # Of the main thread: the calling one may be the worker of a pool.
    affinity = frozenset(os.sched_getaffinity(os.getpid()))
    if "torch" in sys.modules:  # without torch there is no OpenMP that could have bound the thread
        from ipex_runtime.cpupool import omp_places

        affinity |= omp_places()
    return affinity


class CPUPool:
    """A set of cores for threads to run on.

    Args:
        core_ids: CPU numbers, as a list, tuple or range. What this process may not use is left out with a warning.
        node_id: Take the cores of this NUMA node, one hardware thread each. Ignored, with a warning, beside
            ``core_ids``.
        memory: Memory policy of the threads, on the nodes of the cores: ``"local"``, ``"preferred"``, ``"bind"`` or
            ``"interleave"``. None leaves it alone, which means the node of the thread that first writes a page.

    Attributes:
        core_ids: The CPU numbers, in the given order.
        places: CPUs of each thread; as many as the pool has threads. One CPU each for numbers that were given; without
            numbers all hardware threads of a core; under a CPU quota, whose time may come from any CPU, all CPUs.

    Raises:
        TypeError: ``core_ids`` is no sequence of integers, or ``node_id`` no integer.
        ValueError: A number is negative or twice there, there are none, or the node or the policy does not exist.
        RuntimeError: The process may use none of the cores.

    Example:
        >>> from ipex_runtime import CPUPool
        >>> pool = CPUPool()
        >>> pool.num_threads >= 1
        True
    """

    def __init__(
        self,
        core_ids: Sequence[int] | None = None,
        node_id: int | None = None,
        *,
        memory: str | None = None,
    ) -> None:
        machine = topology.read(affinity=_affinity())
        if core_ids is not None and node_id is not None:
            warnings.warn(
                "CPUPool: node_id is ignored, because core_ids is given", UserWarning, stacklevel=2
            )
        if memory is not None and memory not in tuple(MODES):
            raise ValueError(
                f"CPUPool: memory must be one of {', '.join(MODES)} or None, got {memory!r}"
            )
        if core_ids is not None:
            self.core_ids = _usable(_numbers(core_ids), machine)
            self.places: tuple[tuple[int, ...], ...] = tuple((cpu,) for cpu in self.core_ids)
        elif node_id is not None:
            self.core_ids = _of_node(node_id, machine)
            self.places = tuple((cpu,) for cpu in self.core_ids)
        else:
            self.core_ids = list(machine.allowed)
            cores = machine.allowed_cores()
            if machine.usable_threads < len(cores):
                self.places = (machine.allowed,) * machine.usable_threads
            else:
                self.places = tuple(core.cpus for core in cores)
        self.memory = memory
        homes = {machine.core_of(cpu).node for cpu in self.core_ids}
        self.nodes = sorted(homes.intersection(machine.memory_nodes) or machine.memory_nodes)

    @property
    def num_threads(self) -> int:
        """How many threads compute on the pool."""
        return len(self.places)

    @property
    def cpu_pool(self) -> CPUPool:
        """The pool itself; IPEX had a C++ object here, with the method `get_core_list`."""
        return self

    def get_core_list(self) -> list[int]:
        """Return the CPU numbers."""
        return list(self.core_ids)

    def split(self, parts: int) -> list[CPUPool]:
        """Return ``parts`` pools that share the threads evenly; the first ones have one more if it does not come out.

        Raises:
            ValueError: ``parts`` is below 1 or above the number of threads.
        """
        if not 1 <= parts <= self.num_threads:
            raise ValueError(
                f"CPUPool.split: parts must be in 1..{self.num_threads}, the threads of the pool, got {parts}"
            )
        size, more = divmod(self.num_threads, parts)
        found = []
        start = 0
        for part in range(parts):
            end = start + size + (part < more)
            pool = CPUPool.__new__(CPUPool)
            pool.places = self.places[start:end]
            pool.core_ids = list(dict.fromkeys(cpu for place in pool.places for cpu in place))
            pool.memory = self.memory
            pool.nodes = self.nodes
            found.append(pool)
            start = end
        return found

    def __repr__(self) -> str:
        return f"CPUPool({format_cpu_list(self.core_ids)}, {self.num_threads} threads)"


def _numbers(core_ids: Sequence[int]) -> list[int]:
    if isinstance(core_ids, str) or not isinstance(core_ids, (list, tuple, range)):
        raise WrongTypeError(
            "CPUPool: core_ids must be a list, tuple or range of CPU numbers, got "
            f"{type(core_ids).__name__} (ipex_runtime.parse_cpu_list reads texts such as '0-3,8')"
        )
    numbers = []
    for value in core_ids:
        if isinstance(value, bool) or not hasattr(type(value), "__index__"):
            raise TypeError(f"CPUPool: core_ids must hold integers, got {value!r}")
        numbers.append(operator.index(value))
    if not numbers:
        raise ValueError("CPUPool: core_ids must name at least one core, got none")
    wrong = [n for n in numbers if not 0 <= n < MAX_CPUS]
    if wrong:
        raise ValueError(f"CPUPool: core_ids must lie in 0..{MAX_CPUS - 1}, got {wrong}")
    twice = sorted({n for n in numbers if numbers.count(n) > 1})
    if twice:
        raise ValueError(f"CPUPool: core_ids must be different, got {twice} more than once")
    return numbers


def _usable(numbers: list[int], machine: topology.Topology) -> list[int]:
    allowed = set(machine.allowed)
    usable = [n for n in numbers if n in allowed]
    if len(usable) == len(numbers):
        return usable
    missing = format_cpu_list(set(numbers) - allowed)
    exist = f"this process may use {format_cpu_list(allowed)}"
    if not usable:
        raise RuntimeError(
            f"CPUPool: core_ids must have a core this process may use, got {missing}; {exist}"
        )
    warnings.warn(f"CPUPool: the cores {missing} are left out, {exist}", UserWarning, stacklevel=3)
    return usable


def _of_node(node_id: int, machine: topology.Topology) -> list[int]:
    from ipex_runtime.runtime_utils import check_node

    check_node("CPUPool", node_id, machine)
    cpus = list(machine.physical(node=node_id))
    if not cpus:
        raise RuntimeError(
            f"CPUPool: node_id must be a NUMA node with cores this process may use, got {node_id}; "
            f"it may use {format_cpu_list(machine.allowed)}"
        )
    return cpus


class _Pins(threading.local):
    """What the open pins of a thread have to restore, innermost last."""

    def __init__(self) -> None:
        self.stack: list[tuple[tuple[int, int], Any]] = []


_pins = _Pins()


class pin:
    """Pin the calling thread and the threads it computes with to a pool: a context manager and a decorator.

    Afterwards affinity, memory policy and number of threads are what they were. Pins nest; the innermost counts. Each
    thread has pins of its own.

    Args:
        cpu_pool: The pool.

    Raises:
        TypeError: ``cpu_pool`` is no `CPUPool`, or the decorated function is a generator or coroutine function.

    Example:
        >>> import torch
        >>> from ipex_runtime import CPUPool, pin
        >>> with pin(CPUPool([CPUPool().core_ids[0]])):
        ...     torch.get_num_threads()
        1
    """

    def __init__(self, cpu_pool: CPUPool) -> None:
        if not isinstance(cpu_pool, CPUPool):
            raise TypeError(f"pin: cpu_pool must be a CPUPool, got {type(cpu_pool).__name__}")
        self.cpu_pool = cpu_pool

    def __enter__(self) -> CPUPool:
        from ipex_runtime.cpupool import State, set_threads

        global _before_pin
        pool = self.cpu_pool
        if not _pins.stack and threading.current_thread() is threading.main_thread():
            _before_pin = _affinity()
        before = set_threads(pool.num_threads)
        state = State(pool.places, pool.memory, pool.nodes)
        state.exchange()
        _pins.stack.append((before, state))
        return pool

    def __exit__(self, *exception: object) -> None:
        from ipex_runtime.cpupool import set_threads

        global _before_pin
        (threads, mkl), state = _pins.stack.pop()
        state.exchange()
        set_threads(threads, mkl)
        if not _pins.stack and threading.current_thread() is threading.main_thread():
            _before_pin = None

    def __call__(self, func: Function) -> Function:
        """Return ``func`` running inside the pin."""
        if not callable(func):
            raise TypeError(f"pin: func must be callable, got {type(func).__name__}")
        if inspect.isgeneratorfunction(func) or inspect.iscoroutinefunction(func):
            raise TypeError(
                "pin: func must be a plain function, got a generator or coroutine function, whose body runs after the "
                "pin has ended; use 'with pin(...)' inside it"
            )

        @functools.wraps(func)
        def pinned(*args: Any, **kwargs: Any) -> Any:
            with self:
                return func(*args, **kwargs)

        return pinned  # type: ignore[return-value]


def is_runtime_ext_enabled() -> bool:
    """Return whether pinning works here: Linux, and an OpenMP runtime whose threads can be reached.

    IPEX wanted Intel's OpenMP preloaded; torch's own does.
    """
    return (
        sys.platform.startswith("linux")
        and library() is not None
        and _omp("GOMP_parallel") is not None
    )

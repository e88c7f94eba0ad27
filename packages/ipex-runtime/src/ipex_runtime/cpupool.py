# SPDX-License-Identifier: Apache-2.0
"""Pools of cores, and pinning the calling thread and its team to one."""

from __future__ import annotations

import functools
import inspect
import operator
import os
import sys
import threading
import warnings
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from ipex_runtime import topology
from ipex_runtime._errors import WrongTypeError
from ipex_runtime.memory import MODES
from ipex_runtime.topology.types import MAX_CPUS, format_cpu_list

__all__ = ["CPUPool", "is_runtime_ext_enabled", "pin", "process_cpus"]

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
        from ipex_runtime.team import omp_places

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
        from ipex_runtime.team import State, set_threads

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
        from ipex_runtime.team import set_threads

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
    from ipex_runtime import team

    return (
        sys.platform.startswith("linux")
        and team.library() is not None
        and team._omp("GOMP_parallel") is not None
    )

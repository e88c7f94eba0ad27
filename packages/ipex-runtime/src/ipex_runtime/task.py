# SPDX-License-Identifier: Apache-2.0
"""Threads pinned to a pool that run calls one after the other, with the state of the thread that calls.

Python threads: torch gives the interpreter's lock back inside its ops, compiled code and TorchScript programs, so that
streams compute at the same time. A worker that has nothing to do sleeps in a queue.
"""

from __future__ import annotations

import atexit
import concurrent.futures
import contextlib
import contextvars
import os
import queue
import sys
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from ipex_runtime.cpupool import CPUPool

__all__ = [
    "Task",
    "TaskFuture",
]


class CallerState:
    """Grad mode, inference mode, autocast on the CPU and context variables of the thread that makes it."""

    __slots__ = ("_autocast", "_context", "_grad", "_inference")

    def __init__(self) -> None:
        self._grad = torch.is_grad_enabled()
        self._inference = torch.is_inference_mode_enabled()
        self._autocast: tuple[torch.dtype, bool] | None = None
        if torch.is_autocast_enabled("cpu"):
            self._autocast = (torch.get_autocast_dtype("cpu"), torch.is_autocast_cache_enabled())
        self._context = contextvars.copy_context()

    def call(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Call a function in this thread with the state of the other one.

        One object may serve several threads, but not at the same time: each needs `copy`.
        """
        return self._context.run(self._call, function, args, kwargs)

    def copy(self) -> CallerState:
        """Return a state for one more thread."""
        other = CallerState.__new__(CallerState)
        other._grad, other._inference, other._autocast = self._grad, self._inference, self._autocast
        other._context = self._context.copy()
        return other

    def _call(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if self._inference:
            with torch.inference_mode(), torch.set_grad_enabled(self._grad):
                return self._under_autocast(function, args, kwargs)
        if self._grad == torch.is_grad_enabled():
            return self._under_autocast(function, args, kwargs)
        with torch.set_grad_enabled(self._grad):
            return self._under_autocast(function, args, kwargs)

    def _under_autocast(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if self._autocast is None:
            return function(*args, **kwargs)
        dtype, cache = self._autocast
        with torch.autocast("cpu", dtype=dtype, cache_enabled=cache):
            return function(*args, **kwargs)


#: How long the end of the interpreter waits for calls that are running.
EXIT_SECONDS = 5.0


class Call(Protocol):
    """What a worker runs. It must not raise."""

    def run(self) -> None:
        """Run it."""

    def drop(self, error: BaseException) -> None:
        """It will not be run: tell the threads that wait for it."""


class ExitError(BaseException):
    """Raised inside a call that is still running when the interpreter has waited long enough."""


class _Lane:
    """What a worker shares with its thread, which must not keep the worker itself alive."""

    def __init__(self) -> None:
        self.lock = threading.Lock()  # nothing is queued behind the end
        self.calls: queue.SimpleQueue[Call | None] = queue.SimpleQueue()
        self.thread: threading.Thread | None = None
        self.closed = False
        self.busy = False


class Worker:
    """One pinned thread, started by the first call."""

    def __init__(self, pool: CPUPool, name: str) -> None:
        self.pool = pool
        self._name = name
        self._open()
        _workers.add(self)

    def _open(self) -> None:
        self._lane = _Lane()
        self._finalizer = weakref.finalize(self, _close, self._lane)
        self._finalizer.atexit = False  # `_at_exit` does more

    @property
    def thread(self) -> threading.Thread | None:
        """The thread, None before the first call."""
        return self._lane.thread

    def submit(self, call: Call) -> None:
        """Queue a call.

        Raises:
            RuntimeError: The worker is closed, or the interpreter is about to end.
        """
        lane = self._lane
        with lane.lock:
            if lane.closed:
                raise RuntimeError(f"{self._name}: is closed and takes no more calls")
            if lane.thread is None:
                self._start(lane)
            lane.calls.put(call)

    def close(self, wait: bool = True) -> None:
        """Take no more calls; those that are queued still run. ``wait``: until they are done."""
        self._finalizer()
        thread = self._lane.thread
        if wait and thread is not None and thread is not threading.current_thread():
            thread.join()

    def _start(self, lane: _Lane) -> None:
        # A daemon: the end of the interpreter is ours to arrange (`_at_exit`), with a limit.
        arguments = (lane, self.pool)
        thread = threading.Thread(target=_work, args=arguments, name=self._name, daemon=True)
        thread.start()
        lane.thread = thread

    def _after_fork(self) -> None:
        # The thread exists in the parent only, and another thread may have held the lock.
        closed = self._lane.closed
        self._finalizer.detach()
        self._open()
        self._lane.closed = closed


def _close(lane: _Lane) -> None:
    with lane.lock:
        if not lane.closed:
            lane.closed = True
            lane.calls.put(None)


def _work(lane: _Lane, pool: CPUPool) -> None:
    from ipex_runtime.team import State, set_threads

    # Where the native library is missing, a team of threads inherits the CPUs of the thread that starts it: so first
    # the whole pool for this thread, then one place for each of its team.
    if sys.platform.startswith("linux"):
        with contextlib.suppress(OSError):  # told by the exchange
            os.sched_setaffinity(0, set().union(*pool.places))
    set_threads(pool.num_threads)
    State(pool.places, pool.memory, pool.nodes).exchange()
    while (call := lane.calls.get()) is not None:
        lane.busy = True
        call.run()
        lane.busy = False
        # Not until the next call comes: arguments and results may be large.
        del call


_workers: weakref.WeakSet[Worker] = weakref.WeakSet()


def _after_fork() -> None:
    for worker in list(_workers):
        worker._after_fork()


def _at_exit() -> None:
    lanes = [worker._lane for worker in list(_workers) if worker._lane.thread is not None]
    dropped = 0
    for lane in lanes:
        with lane.lock:
            lane.closed = True
        dropped += _drop_queued(lane)
        lane.calls.put(None)
    if dropped:
        print(
            f"ipex_runtime: the program ends, {dropped} queued call(s) are not run", file=sys.stderr
        )
    _join(lanes, EXIT_SECONDS * 0.8)
    running = [lane for lane in lanes if lane.busy]
    if not running:
        return
    # A thread that comes back from native code while the interpreter is taken down would abort the process.
    for lane in running:
        _interrupt(lane.thread)
    _join(running, EXIT_SECONDS * 0.2)
    print(
        f"ipex_runtime: the program ends, {len(running)} call(s) still ran after {EXIT_SECONDS:g} s and were stopped",
        file=sys.stderr,
    )


def _drop_queued(lane: _Lane) -> int:
    count = 0
    while True:
        try:
            call = lane.calls.get_nowait()
        except queue.Empty:
            return count
        if call is not None:
            call.drop(RuntimeError("the program ended before the call was run"))
            count += 1


def _join(lanes: Sequence[_Lane], seconds: float) -> None:
    end = time.monotonic() + seconds
    for lane in lanes:
        if lane.thread is not None:
            lane.thread.join(max(0.0, end - time.monotonic()))


def _interrupt(thread: threading.Thread | None) -> None:
    import ctypes

    if thread is not None and thread.ident is not None:
        error: Any = ctypes.py_object(ExitError)
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), error)


atexit.register(_at_exit)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


# --- tasks ------------------------------------------------------------------------------------------------------------


class TaskFuture(concurrent.futures.Future):  # type: ignore[type-arg]
    """The result of a call that may still be running.

    It is a `concurrent.futures.Future`: `cancel` takes back a call that has not begun, `add_done_callback`,
    `concurrent.futures.wait` and `asyncio.wrap_future` work.
    """

    def __init__(self, worker: Worker) -> None:
        super().__init__()
        self._worker = worker
        self._pid = os.getpid()

    def get(self, timeout: float | None = None) -> Any:
        """Wait for the call and return its result.

        Args:
            timeout: Seconds to wait at most; None: as long as it takes. The call goes on after a timeout.

        Raises:
            TimeoutError: The time is over.
            concurrent.futures.CancelledError: The call was taken back.
            RuntimeError: The call will never run: it is waited for inside its own task, or was queued before the
                process was forked.
            Exception: What the call itself raised.
        """
        return self.result(timeout)

    def result(self, timeout: float | None = None) -> Any:
        """As `get`."""
        self._check_that_it_can_come()
        try:
            return super().result(timeout)
        except concurrent.futures.TimeoutError as error:
            if self.done():  # the call itself raised it
                raise
            raise TimeoutError(f"Task: no result after {timeout} s; the call goes on") from error

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait as `get` does, and return what the call raised, None if nothing."""
        self._check_that_it_can_come()
        return super().exception(timeout)

    def _check_that_it_can_come(self) -> None:
        # Without the lock of the future, which a thread of the parent process may have held in a fork.
        if self._state in ("FINISHED", "CANCELLED", "CANCELLED_AND_NOTIFIED"):
            return
        if self._pid != os.getpid():
            raise RuntimeError(
                f"Task: a result must be read in the process that queued the call, {self._pid}, got {os.getpid()}: the"
                " call was queued before this process was forked. Queue it again in this process."
            )
        if self._worker.thread is threading.current_thread():
            raise RuntimeError(
                f"Task: a call must not wait for a later call of its own task, got a wait in"
                f" {self._worker.thread.name}: the later call would never begin. Use a second task."
            )


class _Call:
    __slots__ = ("_args", "_function", "_future", "_kwargs", "_state")

    def __init__(self, future: TaskFuture, function: Any, args: Any, kwargs: Any) -> None:
        self._future = future
        self._function = function
        self._args = args
        self._kwargs = kwargs
        self._state = CallerState()

    def run(self) -> None:
        future = self._future
        if not future.set_running_or_notify_cancel():
            return
        try:
            result = self._state.call(self._function, self._args, self._kwargs)
        except BaseException as error:
            future.set_exception(error)
        else:
            future.set_result(result)

    def drop(self, error: BaseException) -> None:
        if self._future.set_running_or_notify_cancel():
            self._future.set_exception(error)


class Task:
    """Runs a module or function on a thread of its own, pinned to a pool; calls are queued and run in order.

    The calls see grad mode, inference mode, CPU autocast and context variables of their callers. The thread starts with
    the first call and ends when the task is closed or no longer referenced and its queue is empty.

    Args:
        module: Module (eager, compiled, TorchScript, optimized) or any callable.
        cpu_pool: The cores.

    Raises:
        TypeError: ``module`` is not callable, or ``cpu_pool`` no `CPUPool`.

    Example:
        >>> import torch
        >>> from ipex_runtime import CPUPool, Task
        >>> task = Task(torch.nn.Linear(4, 2), CPUPool())
        >>> future = task(torch.zeros(3, 4))
        >>> future.get().shape
        torch.Size([3, 2])
    """

    def __init__(self, module: Callable[..., Any], cpu_pool: CPUPool) -> None:
        if not callable(module):
            raise TypeError(f"Task: module must be callable, got {type(module).__name__}")
        if not isinstance(cpu_pool, CPUPool):
            raise TypeError(f"Task: cpu_pool must be a CPUPool, got {type(cpu_pool).__name__}")
        self.module = module
        self.cpu_pool = cpu_pool
        self._worker = Worker(cpu_pool, "Task")

    def __call__(self, *args: Any, **kwargs: Any) -> TaskFuture:
        """Queue a call with these arguments and return its future at once.

        Raises:
            RuntimeError: The task is closed.
        """
        future = TaskFuture(self._worker)
        self._worker.submit(_Call(future, self.module, args, kwargs))
        return future

    def run_sync(self, *args: Any, **kwargs: Any) -> Any:
        """Queue a call, wait for it and return its result."""
        return self(*args, **kwargs).get()

    def close(self, wait: bool = True) -> None:
        """Take no more calls. Those that are queued still run; ``wait``: until they are done."""
        self._worker.close(wait)

    def __enter__(self) -> Task:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

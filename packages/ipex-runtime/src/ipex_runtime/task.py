# SPDX-License-Identifier: Apache-2.0
"""Calls that run on a thread of their own, pinned to a pool."""

from __future__ import annotations

import concurrent.futures
import os
import threading
from collections.abc import Callable
from typing import Any

from ipex_runtime._worker import CallerState, Worker
from ipex_runtime.cpupool import CPUPool

__all__ = ["Task", "TaskFuture"]


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

# SPDX-License-Identifier: Apache-2.0
"""One model, several pinned streams: the batch of a call is shared out, the weights exist once."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from ipex_runtime import _split
from ipex_runtime._split import MultiStreamModuleHint
from ipex_runtime._worker import CallerState, Worker
from ipex_runtime.cpupool import CPUPool

__all__ = [
    "MultiStreamBenchmarkModule",
    "MultiStreamModule",
    "MultiStreamModuleHint",
    "default_multi_stream_module_concat_hint",
    "default_multi_stream_module_split_hint",
    "get_default_num_streams",
]

#: Split, or join, the first argument along its first dimension: what IPEX's `MultiStreamModule` did without a hint.
default_multi_stream_module_split_hint = MultiStreamModuleHint(0)
default_multi_stream_module_concat_hint = MultiStreamModuleHint(0)


def get_default_num_streams(cpu_pool: CPUPool) -> int:
    """Return one stream per core of the pool.

    Raises:
        TypeError: ``cpu_pool`` is not a `CPUPool`.
    """
    if not isinstance(cpu_pool, CPUPool):
        raise TypeError(
            f"get_default_num_streams: cpu_pool must be a CPUPool, got {type(cpu_pool).__name__}"
        )
    return cpu_pool.num_threads


class _Round:
    """One call of all streams: results by stream, and a lock that the last of them opens."""

    __slots__ = ("done", "error", "left", "lock", "results")

    def __init__(self, count: int) -> None:
        self.results: list[Any] = [None] * count
        self.error: BaseException | None = None
        self.left = count
        self.lock = threading.Lock()
        self.done = threading.Lock()
        self.done.acquire()

    def finish(self, error: BaseException | None = None) -> None:
        with self.lock:
            self.left -= 1
            if error is not None and self.error is None:
                self.error = error
            last = self.left == 0
        if last:
            self.done.release()


class _Part:
    __slots__ = ("_args", "_index", "_kwargs", "_model", "_round", "_state")

    def __init__(
        self, state: CallerState, model: Any, args: Any, kwargs: Any, round_: _Round, index: int
    ) -> None:
        self._state = state
        self._model = model
        self._args = args
        self._kwargs = kwargs
        self._round = round_
        self._index = index

    def run(self) -> None:
        if self._round.error is not None:  # another stream failed: this result is not returned
            self._round.finish()
            return
        try:
            result = self._state.call(self._model, self._args, self._kwargs)
        except BaseException as error:
            self._round.finish(error)
        else:
            self._round.results[self._index] = result
            self._round.finish()

    def drop(self, error: BaseException) -> None:
        self._round.finish(error)


class _Streams(nn.Module):
    """What runs a model on several workers."""

    def __init__(
        self, name: str, model: Any, num_streams: int | str, cpu_pool: CPUPool | None
    ) -> None:
        super().__init__()
        if not callable(model):
            raise TypeError(f"{name}: model must be callable, got {type(model).__name__}")
        if cpu_pool is None:
            cpu_pool = CPUPool()
        if not isinstance(cpu_pool, CPUPool):
            raise TypeError(f"{name}: cpu_pool must be a CPUPool, got {type(cpu_pool).__name__}")
        self.model = model
        self.cpu_pool = cpu_pool
        self.num_streams = _stream_count(name, num_streams, cpu_pool)
        self._name = name
        self._make_workers()

    def _make_workers(self) -> None:
        self._workers = [
            Worker(pool, f"{self._name}-{index}")
            for index, pool in enumerate(self.cpu_pool.split(self.num_streams))
        ]

    def __getstate__(self) -> dict[str, Any]:
        # Copies and pickles get threads of their own.
        return {name: value for name, value in self.__dict__.items() if name != "_workers"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._make_workers()

    def get_stream_number(self) -> int:
        """Return the number of streams."""
        return self.num_streams

    def _run(self, parts: Sequence[tuple[Any, Any]]) -> list[Any]:
        """Run the model once per part, one stream each, and return the results in order."""
        me = threading.current_thread()
        if any(worker.thread is me for worker in self._workers):
            raise RuntimeError(
                f"{self._name}: the model of a stream must not call its own {self._name}, got a call in {me.name}:"
                " the stream would wait for itself"
            )
        round_ = _Round(len(parts))
        state = CallerState()
        for index, (args, kwargs) in enumerate(parts):
            own = state.copy() if index else state
            part = _Part(own, self.model, args, kwargs, round_, index)
            self._workers[index].submit(part)
        try:
            # All of them, also after an error: arguments of the caller must not be read when it has gone on.
            round_.done.acquire()
        except BaseException as error:  # KeyboardInterrupt: what has not begun is not run
            round_.error = error
            raise
        if round_.error is not None:
            try:
                raise round_.error
            finally:
                del round_  # error -> traceback -> this frame -> round -> error
        return round_.results


class MultiStreamModule(_Streams):
    """Splits the batch of each call over streams, each on cores of its own, and joins the results.

    All streams use the same model object: there is one copy of its weights, packed ones included. The call waits for
    all streams. Streams see grad mode, inference mode, CPU autocast and context variables of the caller.

    Args:
        model: Module (eager, compiled, TorchScript, optimized) or callable that may run in several threads at once.
        num_streams: Number of streams, or ``"AUTO"``: one per core of the pool. More than the pool has threads is too
            many, and reduced with a warning. If they do not share the cores evenly the first ones have one more.
        cpu_pool: The cores; default: all that this process may use.
        concat_output: Join the results; otherwise the call returns a list with the result of each stream.
        input_split_hint: What is split, and where; default: all tensors in the arguments, also nested, whose first
            dimension is as long as in the first tensor. Arguments without a hint go whole to each stream. The first
            streams get a row more if the batch does not come out even; a batch smaller than the number of streams
            uses fewer.
        output_concat_hint: Where results are joined; default: all tensors along dimension 0. What is no tensor is
            taken from the first stream.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: ``num_streams`` is below 1 or another text than ``"AUTO"``.

    Example:
        >>> import torch
        >>> from ipex_runtime import CPUPool, MultiStreamModule
        >>> streams = MultiStreamModule(torch.nn.Linear(4, 2), num_streams="AUTO", cpu_pool=CPUPool())
        >>> streams(torch.zeros(3, 4)).shape
        torch.Size([3, 2])
    """

    def __init__(
        self,
        model: Any,
        num_streams: int | str = "AUTO",
        cpu_pool: CPUPool | None = None,
        concat_output: bool = True,
        input_split_hint: MultiStreamModuleHint | None = None,
        output_concat_hint: MultiStreamModuleHint | None = None,
    ) -> None:
        super().__init__("MultiStreamModule", model, num_streams, cpu_pool)
        for name, hint in (
            ("input_split_hint", input_split_hint),
            ("output_concat_hint", output_concat_hint),
        ):
            if hint is not None and not isinstance(hint, MultiStreamModuleHint):
                raise TypeError(
                    f"MultiStreamModule: {name} must be a MultiStreamModuleHint, got {type(hint).__name__}"
                )
        self.concat_output = concat_output
        self.input_split_hint = input_split_hint
        self.output_concat_hint = output_concat_hint or default_multi_stream_module_concat_hint

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model on all streams.

        Raises:
            TypeError: A hint does not have the form of its argument.
            ValueError: A split dimension does not exist, or the sizes differ.
            RuntimeError: A stream calls its own module, or the call is traced.
            Exception: What the model raised in a stream; the first one, after all streams have ended.
        """
        if torch._C._get_tracing_state() is not None:
            raise RuntimeError(
                "MultiStreamModule: a call cannot be traced, got torch.jit.trace:"
                " trace the model, then make a MultiStreamModule of the result"
            )
        if self.num_streams == 1:
            results = self._run([(args, kwargs)])
            return results[0] if self.concat_output else results
        arguments = (args, kwargs)
        hint = self.input_split_hint or _split.guess(args, kwargs)
        batch = _split.batch_size(hint, arguments)
        streams = min(self.num_streams, batch or 1)
        if streams == 1:
            results = self._run([(args, kwargs)])
        else:
            results = self._run(_split.cut(hint, arguments, _split.sizes(batch or 1, streams)))
        return _split.join(self.output_concat_hint, results) if self.concat_output else results


class MultiStreamBenchmarkModule(_Streams):
    """Runs the whole input on every stream and returns the list of results: measures streams with shared weights."""

    def __init__(
        self, model: Any, num_streams: int | str = "AUTO", cpu_pool: CPUPool | None = None
    ) -> None:
        super().__init__("MultiStreamBenchmarkModule", model, num_streams, cpu_pool)

    def forward(self, *args: Any, **kwargs: Any) -> list[Any]:
        """Run the model on all streams."""
        return self._run([(args, kwargs)] * self.num_streams)


#: IPEX's name.
_MultiStreamBenchmarkModule = MultiStreamBenchmarkModule


def _stream_count(name: str, num_streams: int | str, pool: CPUPool) -> int:
    if isinstance(num_streams, str):
        if num_streams != "AUTO":
            raise ValueError(f'{name}: num_streams must be a number or "AUTO", got {num_streams!r}')
        return get_default_num_streams(pool)
    if isinstance(num_streams, bool) or not isinstance(num_streams, int):
        raise TypeError(
            f'{name}: num_streams must be a number or "AUTO", got {type(num_streams).__name__}'
        )
    if num_streams < 1:
        raise ValueError(f"{name}: num_streams must be at least 1, got {num_streams}")
    most = get_default_num_streams(pool)
    if num_streams > most:
        warnings.warn(
            f"{name}: num_streams is {num_streams}, more than the {most} thread(s) of the pool; {most} are used",
            UserWarning,
            stacklevel=4,
        )
    return min(num_streams, most)

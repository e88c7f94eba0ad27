# SPDX-License-Identifier: Apache-2.0
"""One model, several pinned streams: the batch of a call is shared out, the weights exist once."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ipex_runtime.cpupool import CPUPool
from ipex_runtime.task import CallerState, Worker

__all__ = [
    "MultiStreamBenchmarkModule",
    "MultiStreamModule",
    "MultiStreamModuleHint",
    "default_multi_stream_module_concat_hint",
    "default_multi_stream_module_split_hint",
    "get_default_num_streams",
]


class MultiStreamModuleHint:
    """Says along which dimension each argument, or each part of a result, is split.

    Args:
        args: For each positional argument a dimension, None (every stream gets the whole argument), or a list, tuple or
            dictionary of these that matches the argument. A dimension given for a nested argument holds for all tensors
            in it.
        kwargs: The same for arguments passed by name.

    Raises:
        TypeError: Something else is in there.

    Example:
        >>> from ipex_runtime import MultiStreamModuleHint
        >>> hint = MultiStreamModuleHint(0, [0, None], mask={"keys": 1})
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        for hint in (*args, *kwargs.values()):
            _check_hint(hint)
        self.args = list(args)
        self.kwargs = dict(kwargs)

    def __repr__(self) -> str:
        parts = [repr(a) for a in self.args] + [f"{k}={v!r}" for k, v in self.kwargs.items()]
        return f"MultiStreamModuleHint({', '.join(parts)})"


def _check_hint(hint: Any) -> None:
    if hint is None or (isinstance(hint, int) and not isinstance(hint, bool)):
        return
    if isinstance(hint, Mapping):
        hint = list(hint.values())
    if not isinstance(hint, (list, tuple)):
        raise TypeError(
            "MultiStreamModuleHint: hints must be dimensions, None, or lists, tuples and dictionaries of these, got "
            f"{hint!r}"
        )
    for inner in hint:
        _check_hint(inner)


Arguments = tuple[Sequence[Any], Mapping[str, Any]]


def guess(args: Sequence[Any], kwargs: Mapping[str, Any]) -> MultiStreamModuleHint:
    """Return hints for a call without any: all tensors whose first dimension equals the one in the first tensor."""
    hint = MultiStreamModuleHint()
    if not kwargs and len(args) == 1 and isinstance(args[0], torch.Tensor):  # the usual call
        hint.args = [0 if args[0].dim() else None]
        return hint
    first = next((t for t in _tensors((args, kwargs)) if t.dim() > 0), None)
    if first is None:
        return hint
    size = first.size(0)
    hint.args = [_guess(value, size) for value in args]
    hint.kwargs = {name: _guess(value, size) for name, value in kwargs.items()}
    return hint


def _guess(value: Any, size: int) -> Any:
    if isinstance(value, torch.Tensor):
        return 0 if value.dim() > 0 and value.size(0) == size else None
    if isinstance(value, Mapping):
        return {key: _guess(inner, size) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_guess(inner, size) for inner in value]
    return None


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for inner in value.values():
            yield from _tensors(inner)
    elif isinstance(value, (list, tuple)):
        for inner in value:
            yield from _tensors(inner)


def _pairs(hint: MultiStreamModuleHint, arguments: Arguments) -> Iterator[tuple[str, Any, Any]]:
    args, kwargs = arguments
    if len(hint.args) > len(args):
        raise ValueError(
            f"MultiStreamModule: input_split_hint must not have more positional hints than arguments, got "
            f"{len(hint.args)} for {len(args)}"
        )
    unknown = sorted(set(hint.kwargs) - set(kwargs))
    if unknown:
        raise ValueError(
            f"MultiStreamModule: input_split_hint must name arguments of the call, got {unknown}; the call has "
            f"{sorted(kwargs)}"
        )
    for index, dim in enumerate(hint.args):
        yield f"argument {index}", args[index], dim
    for name, dim in hint.kwargs.items():
        yield f"argument {name!r}", kwargs[name], dim


def batch_size(hint: MultiStreamModuleHint, arguments: Arguments) -> int | None:
    """Return the size of all split dimensions, None if nothing is split.

    Raises:
        TypeError: A hint does not have the form of its argument.
        ValueError: A dimension does not exist, or the sizes differ.
    """
    found: tuple[str, int] | None = None
    for name, value, dim in _pairs(hint, arguments):
        for where, size in _split_sizes(name, value, dim):
            if found is not None and found[1] != size:
                raise ValueError(
                    f"MultiStreamModule: split dimensions must have one size, got {found[1]} for {found[0]} and "
                    f"{size} for {where}"
                )
            found = (where, size)
    return None if found is None else found[1]


def _split_sizes(name: str, value: Any, hint: Any) -> Iterator[tuple[str, int]]:
    if hint is None:
        return
    if isinstance(value, torch.Tensor):
        if not isinstance(hint, int):
            raise TypeError(
                f"MultiStreamModule: the hint of {name} must be a dimension, got {hint!r}"
            )
        if not -value.dim() <= hint < value.dim():
            raise ValueError(
                f"MultiStreamModule: the hint of {name} must be a dimension of shape {list(value.shape)}, got {hint}"
            )
        yield name, value.size(hint)
        return
    for key, inner, dim in _inside(name, value, hint):
        yield from _split_sizes(f"{name}[{key!r}]", inner, dim)


def _inside(name: str, value: Any, hint: Any) -> Iterator[tuple[Any, Any, Any]]:
    """Yield (key, part, hint of the part) of a nested value."""
    if isinstance(value, Mapping):
        keys: list[Any] = list(value)
    elif isinstance(value, (list, tuple)):
        keys = list(range(len(value)))
    elif isinstance(hint, int):
        raise TypeError(
            f"MultiStreamModule: {name} must be a tensor to be split along dimension {hint}, got "
            f"{type(value).__name__}; its hint can be None"
        )
    else:
        raise TypeError(
            f"MultiStreamModule: the hint of {name} must fit a {type(value).__name__}, got {hint!r}"
        )
    if isinstance(hint, int):
        for key in keys:
            # Numbers, texts and None beside tensors stay whole.
            nested = isinstance(value[key], (torch.Tensor, Mapping, list, tuple))
            yield key, value[key], hint if nested else None
        return
    hints = hint if isinstance(hint, Mapping) else dict(enumerate(hint))
    if not set(hints) <= set(keys) or isinstance(hint, Mapping) != isinstance(value, Mapping):
        raise TypeError(f"MultiStreamModule: the hint of {name} must have its form, got {hint!r}")
    for key in keys:
        yield key, value[key], hints.get(key)


def sizes(total: int, parts: int) -> list[int]:
    """Return how ``total`` rows are shared by ``parts`` streams: evenly, the first ones get one more."""
    size, more = divmod(total, parts)
    return [size + (part < more) for part in range(parts)]


def cut(
    hint: MultiStreamModuleHint, arguments: Arguments, lengths: Sequence[int]
) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
    """Return the arguments of each part; tensors are views."""
    args, kwargs = arguments
    hints = [*hint.args, *[None] * (len(args) - len(hint.args))]
    own = [_cut(value, dim, lengths) for value, dim in zip(args, hints, strict=True)]
    named = {name: _cut(value, hint.kwargs.get(name), lengths) for name, value in kwargs.items()}
    return [
        (tuple(parts[i] for parts in own), {name: parts[i] for name, parts in named.items()})
        for i in range(len(lengths))
    ]


def _cut(value: Any, hint: Any, lengths: Sequence[int]) -> Sequence[Any]:
    """Return the part of each stream."""
    if hint is None:
        return [value] * len(lengths)
    if isinstance(value, torch.Tensor):
        return torch.split_with_sizes(value, lengths, hint)
    inner = {key: _cut(v, dim, lengths) for key, v, dim in _inside("", value, hint)}
    return [
        _like(value, {key: parts[i] for key, parts in inner.items()}) for i in range(len(lengths))
    ]


def _like(value: Any, inner: dict[Any, Any]) -> Any:
    """Return a container of the type of ``value`` with other contents."""
    if isinstance(value, Mapping):
        if type(value) is dict:
            return inner
        # Outputs of transformers and other mappings that are made from names.
        try:
            return type(value)(**inner)
        except TypeError:
            return type(value)(inner)  # type: ignore[call-arg]
    parts = list(inner.values())
    if hasattr(value, "_fields"):
        return type(value)(*parts)
    return type(value)(parts)


def join(hint: MultiStreamModuleHint, results: list[Any]) -> Any:
    """Return the joined results: tensors concatenated, containers entered, of the rest the result of the first stream.

    Raises:
        TypeError: The hint does not have the form of the result.
    """
    first = results[0]
    whole: Any = hint.args[0] if len(hint.args) == 1 and not hint.kwargs else None
    if whole is None and hint.kwargs and not hint.args:
        whole = hint.kwargs
    elif whole is None and len(hint.args) > 1:
        whole = hint.args
    if len(results) == 1:
        return first
    return _join("result", whole, results)


def _join(name: str, hint: Any, results: list[Any]) -> Any:
    first = results[0]
    if hint is None:
        return first
    if isinstance(first, torch.Tensor):
        if not isinstance(hint, int):
            raise TypeError(
                f"MultiStreamModule: output_concat_hint of the {name} must be a dimension, got {hint!r}"
            )
        if not first.dim():
            raise ValueError(
                f"MultiStreamModule: the {name} must have a dimension {hint} to be joined, got a scalar; its hint can "
                "be None, or concat_output False"
            )
        return torch.cat(results, dim=hint)
    if not isinstance(first, (Mapping, list, tuple)):
        return first
    inner = {}
    for key, _, dim in _inside(name, first, hint):
        inner[key] = _join(f"{name}[{key!r}]", dim, [result[key] for result in results])
    return _like(first, inner)


# --- streams ----------------------------------------------------------------------------------------------------------


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
        hint = self.input_split_hint or guess(args, kwargs)
        batch = batch_size(hint, arguments)
        streams = min(self.num_streams, batch or 1)
        if streams == 1:
            results = self._run([(args, kwargs)])
        else:
            results = self._run(cut(hint, arguments, sizes(batch or 1, streams)))
        return join(self.output_concat_hint, results) if self.concat_output else results


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

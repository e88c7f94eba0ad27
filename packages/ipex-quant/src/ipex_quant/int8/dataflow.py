# SPDX-License-Identifier: Apache-2.0
"""Which module's output goes where, read from one run of a model.

Every tensor that passes between modules is a numbered value. Modules whose meaning is known are one event each;
elsewhere each function that takes tensors is one. No tracing: any forward can be recorded.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from ipex_core.module_swap.base import computed_by
from ipex_quant.int8.boundary import FIELDS, MOVES, SIZES
from ipex_quant.int8.modules.matmul import Interaction, MatMul
from ipex_quant.int8.modules.pool import role_of_pool


class Add(nn.Module):
    """``a + b`` as a module; stands in a forward that was rewritten, so that it can be quantized."""

    def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        """Return the sum."""
        return a + b


@dataclasses.dataclass
class Event:
    """One call.

    Attributes:
        index: Position in the order of calls.
        role: ``"linear"``, ``"conv"``, ``"norm"``, ``"batch_norm"``, ``"activation"``, ``"add"``, ``"same_codes"``,
            ``"mean"``, ``"product"``, ``"other"`` for a known module without a meaning here, or ``"function"``.
        path: Path of the module; for a function the path of the module whose forward called it.
        name: Name of the class or function.
        inputs: The values that go in, in the order of arguments.
        outputs: The values that come out.
        simple: Whether the arguments were tensors and nothing else.
        moves: Whether it is a function that gives the same elements in another shape or order.
        shape: That of the first output.
        shapes: Those of the inputs.
    """

    index: int
    role: str
    path: str
    name: str
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    simple: bool
    moves: bool = False
    shape: tuple[int, ...] = ()
    shapes: tuple[tuple[int, ...], ...] = ()


@dataclasses.dataclass
class Flow:
    """All calls of a run, in order.

    Attributes:
        events: The calls.
        results: Values that the model returns.
        asked: Values whose sizes a forward reads.
        parameters: Values that are parameters which a forward used itself.
        packed: Paths of modules that were called with a `torch.nn.utils.rnn.PackedSequence`.
    """

    events: list[Event]
    results: frozenset[int]
    asked: frozenset[int] = frozenset()
    parameters: frozenset[int] = frozenset()
    packed: frozenset[str] = frozenset()

    @functools.cached_property
    def calls(self) -> dict[str, list[Event]]:
        """The calls of each known module."""
        found: dict[str, list[Event]] = {}
        for event in self.events:
            if event.role != "function":
                found.setdefault(event.path, []).append(event)
        return found

    @functools.cached_property
    def consumers(self) -> dict[int, list[Event]]:
        """Who reads a value."""
        found: dict[int, list[Event]] = {}
        for event in self.events:
            for value in event.inputs:
                found.setdefault(value, []).append(event)
        return found

    @functools.cached_property
    def producers(self) -> dict[int, Event]:
        """Who made a value."""
        return {value: event for event in self.events for value in event.outputs}

    def constant(self, value: int) -> bool:
        """Return whether a value is a parameter, or computed from parameters alone."""
        event = self.producers.get(value)
        if event is None or event.role != "function":
            return value in self.parameters
        return bool(event.inputs) and all(map(self.constant, event.inputs))

    def only_consumer(self, value: int) -> Event | None:
        """Return the only call that reads a value, if its module is called once."""
        readers = self.consumers.get(value, [])
        if value in self.results or len(readers) != 1 or readers[0].role == "function":
            return None
        return readers[0] if len(self.calls[readers[0].path]) == 1 else None


_NORMS = (nn.LayerNorm, nn.RMSNorm)
CONVS = (
    nn.Conv1d,
    nn.Conv2d,
    nn.Conv3d,
    nn.ConvTranspose1d,
    nn.ConvTranspose2d,
    nn.ConvTranspose3d,
)
_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
_RESHAPES = (nn.Flatten, nn.Unflatten)
_NOTHING = (nn.Identity, nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout)
_ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "relu": nn.functional.relu,
    "gelu": nn.functional.gelu,
    "gelu_tanh": functools.partial(nn.functional.gelu, approximate="tanh"),
    "silu": nn.functional.silu,
    "relu6": nn.functional.relu6,
}


def activation_of(module: nn.Module) -> str:
    """Return which activation a module without parameters computes, or an empty string."""
    if next(module.parameters(), None) is not None or next(module.children(), None) is not None:
        return ""
    named = re.search("relu|gelu|silu|swish", type(module).__name__.lower())
    return computed_by(module, _ACTIVATIONS) if named else ""


def role_of(module: nn.Module) -> str:
    """Return what a module means to quantization, or an empty string to look at what its forward does."""
    kind = type(module)
    if kind is nn.Linear:
        return "linear"
    if kind in CONVS:
        return "conv"
    if kind in _NORMS:
        return "norm"
    if kind in _BATCH_NORMS:
        return "batch_norm"
    if kind is Add:
        return "add"
    if kind in (Interaction, MatMul):
        return "product"
    if kind in _RESHAPES:
        return "same_codes"
    if pool := role_of_pool(module):
        return pool
    if kind in _NOTHING:
        return "nothing"
    if activation_of(module):
        return "activation"
    leaf = next(module.children(), None) is None
    return "other" if leaf and kind.__module__.startswith("torch.nn.modules") else ""


class _Recorder(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.events: list[Event] = []
        self.numbers: dict[int, int] = {}
        self.alive: list[torch.Tensor] = []  # an id is unique only while its tensor lives
        self.asked: set[int] = set()
        self.packed: set[str] = set()
        self.owners: list[str] = [""]
        self.inside = 0

    def value(self, tensor: torch.Tensor, new: bool = False) -> int:
        if new or id(tensor) not in self.numbers:
            self.alive.append(tensor)
            self.numbers[id(tensor)] = len(self.alive) - 1
        return self.numbers[id(tensor)]

    def add(self, role: str, path: str, name: str, args: Any, results: Any) -> None:
        leaves = tree_leaves(args)
        inputs = tuple(self.value(t) for t in leaves if isinstance(t, torch.Tensor))
        outputs = tuple(
            self.value(t, new=True) for t in tree_leaves(results) if isinstance(t, torch.Tensor)
        )
        simple = all(isinstance(t, torch.Tensor) for t in leaves)
        made = [t for t in tree_leaves(results) if isinstance(t, torch.Tensor)]
        read = [t for t in leaves if isinstance(t, torch.Tensor)]
        moves = role == "function" and name in MOVES and len(read) == len(made) == 1
        moves = moves and read[0].dtype == made[0].dtype and read[0].numel() == made[0].numel()
        shape = tuple(made[0].shape) if made else ()
        shapes = tuple(tuple(t.shape) for t in read)
        values = inputs, outputs
        self.events.append(
            Event(len(self.events), role, path, name, *values, simple, moves, shape, shapes)
        )

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        result = func(*args, **kwargs)
        if self.inside:
            return result
        name = getattr(func, "__name__", "")
        if name == "__get__":
            field = getattr(getattr(func, "__self__", None), "__name__", "")
            if field in FIELDS:
                name = "size"
        if name in SIZES:
            self.asked.add(self.value(args[0]))
            return result
        if any(isinstance(t, torch.Tensor) for t in tree_leaves((args, kwargs))):
            self.add("function", self.owners[-1], name, (args, kwargs), result)
        return result


def _enter(recorder: _Recorder, role: str, path: str, *_: Any) -> None:
    if role:
        recorder.inside += 1
    else:
        recorder.owners.append(path)


def _leave(
    recorder: _Recorder, role: str, path: str, module: Any, args: Any, kwargs: Any, result: Any
) -> None:
    if not role:
        recorder.owners.pop()
        return
    if any(isinstance(arg, PackedSequence) for arg in (*args, *kwargs.values())):
        recorder.packed.add(path)
    if recorder.inside == 1 and role != "nothing":
        recorder.add(role, path, type(module).__name__, (args, kwargs), result)
    recorder.inside -= 1


def record(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Flow:
    """Run a model once without gradients and return what went where; errors of the model are passed on."""
    recorder = _Recorder()
    with contextlib.ExitStack() as hooks:
        for path, module in model.named_modules():
            if isinstance(module, torch.jit.ScriptModule):  # they take no hooks
                continue
            role = role_of(module)
            enter = functools.partial(_enter, recorder, role, path)
            leave = functools.partial(_leave, recorder, role, path)
            hooks.enter_context(module.register_forward_pre_hook(enter, prepend=True))
            hooks.enter_context(module.register_forward_hook(leave, with_kwargs=True))
        with torch.no_grad(), recorder:
            results = model(*args, **kwargs)
    kept = (t for t in recorder.alive if isinstance(t, (nn.Parameter, nn.Buffer)))
    return Flow(
        recorder.events,
        frozenset(recorder.value(t) for t in tensors_of(results)),
        frozenset(recorder.asked),
        frozenset(recorder.numbers[id(t)] for t in kept),
        frozenset(recorder.packed),
    )


def tensors_of(results: Any) -> Iterator[torch.Tensor]:
    """Return all tensors of an output, also those in objects that are not known to pytree."""
    for leaf in tree_leaves(results):
        if isinstance(leaf, torch.Tensor):
            yield leaf
        elif isinstance(leaf, Mapping):
            yield from tensors_of(list(leaf.values()))
        elif dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
            yield from tensors_of([getattr(leaf, f.name) for f in dataclasses.fields(leaf)])

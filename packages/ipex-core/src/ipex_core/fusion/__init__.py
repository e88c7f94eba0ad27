# SPDX-License-Identifier: Apache-2.0
"""Fusion of graphs: reports, and what a pattern is, described once for all kinds of graphs.

A description, which a `Reader` looks for in a kind of graph, is

* a word: a value of any kind, the same one wherever the word stands;
* a word with ``#`` in front: a constant number;
* a number: that constant;
* a list: one of several descriptions;
* a tuple: an op and its operands. The operands of ``add`` and ``mul`` stand in either order. ``("scale", x, c)`` is a
  product with a constant or a quotient by its inverse, ``("shift", x, c)`` a sum with one, ``("wide", x)`` is x or what
  conversions make of it that lose nothing, and ``("as", word, x)`` is x, which the word means from there on.

Ops whose names begin with ``row_`` reduce the last dimension and keep it as one of size 1; ``low`` and ``high`` are
the halves of the last dimension, which ``halves`` puts side by side; ``full`` is a tensor of one number.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import operator
import weakref
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch import Tensor, nn
from torch.utils.weak import WeakIdRef

__all__ = [
    "ACTIVATIONS",
    "Found",
    "Fusion",
    "GUARDED_SOFTMAX",
    "GraphReport",
    "LAYER_NORM",
    "Origin",
    "RMS_NORM",
    "ROTATED",
    "Reader",
    "SHARES",
    "SHIFTED_BY_MAX",
    "SOFTCAP",
    "SOFTMAX",
    "Weights",
    "log",
    "remember",
    "reports_of",
    "tensor_refs",
]


#: ``TORCH_LOGS="+ipex_core.compile_backend"`` shows every decision, like the logs of torch's own compiler.
log = logging.getLogger("ipex_core.compile_backend")


@dataclasses.dataclass(frozen=True)
class Fusion:
    """One place of a graph that a pattern looked at.

    Attributes:
        pattern: Name of the pattern, as the option ``"ipex.disable"`` takes it.
        fired: Whether the graph was changed.
        op: The op that runs now, or the one that would have.
        text: What was fused, or the reason against it.
        module: Path of the module in the model, as far as Dynamo knows it.
        shape: Shape of the result; symbolic sizes by name.
    """

    pattern: str
    fired: bool
    op: str
    text: str
    module: str = ""
    shape: str = ""


@dataclasses.dataclass
class GraphReport:
    """All decisions on one graph.

    Attributes:
        name: Where the graph begins: file, line and function.
        inference: Whether it was compiled for inference.
        frozen: Whether its weights are constants.
        fusions: One `Fusion` per place that a pattern looked at.
        notes: Remarks on the whole graph.
    """

    name: str
    inference: bool
    frozen: bool = False
    fusions: list[Fusion] = dataclasses.field(default_factory=list)
    notes: list[str] = dataclasses.field(default_factory=list)

    def add(self, fusion: Fusion) -> None:
        """Append and log a decision."""
        self.fusions.append(fusion)
        log.debug(
            "%s %s -> %s %s: %s",
            fusion.module or fusion.shape,
            fusion.pattern,
            fusion.op,
            "fused" if fusion.fired else "kept",
            fusion.text,
        )

    def count(self, pattern: str | None = None, fired: bool = True) -> int:
        """Return how often a pattern (None: any) fired, or with ``fired=False`` how often it was rejected."""
        return sum(
            f.fired is fired and (pattern is None or f.pattern == pattern) for f in self.fusions
        )


@dataclasses.dataclass(frozen=True)
class Origin:
    """Whose graph it is.

    Attributes:
        code: File and first line of the function that Dynamo was compiling.
        tensors: The parameters and buffers it uses, of `tensor_refs`.
    """

    code: tuple[str, int] | None = None
    tensors: frozenset[WeakIdRef] = frozenset()


def tensor_refs(tensors: Iterable[Tensor]) -> frozenset[WeakIdRef]:
    """Return references that compare by identity; a bare id may by now belong to another tensor."""
    return frozenset(map(WeakIdRef, tensors))


#: Compiled graphs that are alive. Dynamo drops a graph with the function it belongs to.
_alive: weakref.WeakKeyDictionary[Any, tuple[GraphReport, Origin]] = weakref.WeakKeyDictionary()


def remember(compiled: Any, report: GraphReport, origin: Origin) -> None:
    """Keep a report for as long as the compiled graph lives."""
    _alive[compiled] = (report, origin)


def reports_of(compiled: Any) -> list[GraphReport]:
    """Return the reports of the graphs that belong to a compiled module or function, oldest first.

    A graph belongs to a module if it uses one of its parameters or buffers, or, where it uses none, if it starts in its
    ``forward``; to a function if it starts in its code.
    """
    own = _alive.get(compiled) if callable(compiled) and _hashable(compiled) else None
    if own is not None:
        return [own[0]]
    original = getattr(compiled, "_torchdynamo_orig_callable", compiled)
    tensors = tensor_refs(())
    if isinstance(compiled, nn.Module):
        module = getattr(compiled, "_orig_mod", compiled)
        tensors = tensor_refs((*module.parameters(), *module.buffers()))
        original = type(module).forward
    code = getattr(getattr(original, "__func__", original), "__code__", None)
    start = (code.co_filename, code.co_firstlineno) if code is not None else ("", 0)
    return [
        report
        for report, origin in list(_alive.values())
        if (origin.tensors & tensors if origin.tensors and tensors else origin.code == start)
    ]


def _hashable(value: Any) -> bool:
    try:
        hash(value)
    except TypeError:
        return False
    return True


class Weights:
    """Parameters and buffers, with their versions and places in memory.

    Versions tell of changes in place (``load_state_dict``), places of ``p.data = ...``. Inference tensors have no
    version, packed oneDNN weights no place. A look takes about 0.1 us a weight.

    Args:
        tensors: What is watched.
    """

    def __init__(self, tensors: Iterable[Tensor | None]) -> None:
        self._watch([("", None, "", tensor) for tensor in tensors])

    @classmethod
    def of(cls, model: nn.Module) -> Weights:
        """Watch a model, whose modules and tensors may be replaced, too."""
        found = cls(())
        found._watch(
            [
                (f"{path}.{name}" if path else name, held, name, value)
                for path, module in model.named_modules()
                for held in (module._parameters, module._buffers, module._modules)
                for name, value in held.items()
            ]
        )
        return found

    def _watch(self, entries: list[tuple[str, Any, str, Any]]) -> None:
        self._paths = [path for path, *_ in entries]
        self._owners = [(held, name) for _, held, name, _ in entries if held is not None]
        self._held = [value for *_, value in entries]
        tensors = [value for value in self._held if isinstance(value, Tensor)]
        self._counted = [t for t in tensors if not t.is_inference()]
        self._located = [t for t in tensors if not t.is_mkldnn]
        self._state = self._versions()

    def _versions(self) -> tuple[list[int], list[int]]:
        return (
            [tensor._version for tensor in self._counted],
            [tensor.data_ptr() for tensor in self._located],
        )

    def _replaced(self) -> list[Any]:
        return [held.get(name) for held, name in self._owners]

    def same(self) -> bool:
        """Return whether nothing was replaced or changed."""
        return all(map(operator.is_, self._replaced(), self._held)) and (
            self._versions() == self._state
        )

    def changed(self) -> str:
        """Return the path of the first that was replaced or changed, or an empty string."""
        changed = {
            id(tensor)
            for tensors, old, new in zip(
                (self._counted, self._located), self._state, self._versions(), strict=True
            )
            for tensor, before, after in zip(tensors, old, new, strict=True)
            if before != after
        }
        return next(
            (
                path
                for path, now, value in zip(self._paths, self._replaced(), self._held, strict=True)
                if now is not value or id(value) in changed
            ),
            "",
        )


# --- patterns ---------------------------------------------------------------------------------------------------------


def _square(x: Any) -> list[Any]:
    return [("pow", x, 2.0), ("mul", x, x), ("square", x)]


def _gelu(anchor: tuple[Any, ...]) -> list[Any]:
    """``0.5 * x * (1 + anchor)`` in any grouping of the factors."""
    one = ("shift", anchor, 1.0)
    return [("mul", ("scale", "x", 0.5), one), ("scale", ("mul", "x", one), 0.5)]


_CUBE = [("pow", "x", 3.0), ("mul", _square("x"), "x")]

#: Name, as `ipex::linear` takes it -> what it is of ``x``.
ACTIVATIONS: Mapping[str, Any] = {
    "relu": ("relu", "x"),
    "silu": [
        ("silu", "x"),
        ("div", "x", ("shift", ("exp", ("neg", "x")), 1.0)),
        ("mul", "x", ("sigmoid", "x")),
    ],
    "gelu": _gelu(("erf", ("scale", "x", math.sqrt(0.5)))),
    "gelu_tanh": _gelu(
        ("tanh", ("scale", ("add", "x", ("scale", _CUBE, 0.044715)), math.sqrt(2 / math.pi)))
    ),
}

_WIDE = ("wide", "x")

#: Of ``x``, without what may follow: weight, bias and the conversion back.
_MEAN_SQUARE = ("shift", ("row_mean", _square(_WIDE)), "#eps")
RMS_NORM = [
    ("mul", _WIDE, ("rsqrt", _MEAN_SQUARE)),
    ("div", _WIDE, ("sqrt", _MEAN_SQUARE)),
    ("mul", _WIDE, ("pow", _MEAN_SQUARE, -0.5)),
]
LAYER_NORM = (
    "mul",
    ("sub", _WIDE, ("row_mean", _WIDE)),
    ("rsqrt", ("shift", ("row_variance", _WIDE), "#eps")),
)

_EXP = ("exp", ("sub", "scores", ("row_max", "scores")))
#: Of ``scores``.
SOFTMAX = ("div", ("as", "exp", _EXP), ("row_sum", "exp"))
#: Of ``scores``: what they are of their sum.
SHARES = ("div", "scores", ("row_sum", "scores"))
#: ``softmax``, with zeros where all ``scores`` of the row are -inf.
GUARDED_SOFTMAX = (
    "where",
    ("logical_not", ("row_any", ("logical_not", ("eq", "scores", -math.inf)))),
    [0.0, ("full", 0.0)],
    "softmax",
)
#: A softmax of it is one of ``x``.
SHIFTED_BY_MAX = ("sub", "x", ("row_max", "x"))
#: ``cap`` times ``factor`` is 1.
SOFTCAP = ("scale", ("tanh", ("scale", "x", "#factor")), "#cap")

#: A rotary embedding of heads whose halves are rotated against each other.
ROTATED = (
    "add",
    ("mul", "x", "cos"),
    ("mul", ("halves", ("neg", ("high", "x")), ("low", "x")), "sin"),
)
#: The same by tables of half the size.
ROTATED_HALVES = (
    "halves",
    ("sub", ("mul", ("low", "x"), "cos"), ("mul", ("high", "x"), "sin")),
    ("add", ("mul", ("high", "x"), "cos"), ("mul", ("low", "x"), "sin")),
)


@dataclasses.dataclass(frozen=True)
class Found:
    """A place that fits a description.

    Attributes:
        values: What the words mean.
        passed: The nodes between the root and the values of the words, the root first.
    """

    values: Mapping[str, Any]
    passed: tuple[Any, ...] = ()

    def __getitem__(self, word: str) -> Any:
        return self.values[word]

    def bind(self, word: str, value: Any) -> Iterator[Found]:
        """Yield this with a word more, unless the word means something else."""
        known = self.values.get(word, self)
        if known is self:
            yield Found({**self.values, word: value}, self.passed)
        elif known == value:  # nodes are equal to themselves alone
            yield self

    def over(self, *nodes: Any) -> Found:
        """Return this with more nodes passed."""
        return Found(self.values, (*self.passed, *nodes))


class Reader:
    """Reads a kind of graph for `find`."""

    def call(self, value: Any) -> tuple[str, tuple[Any, ...], tuple[Any, ...]] | None:
        """Return the op that makes a value, its operands, and the nodes this takes; None where none is known."""
        raise NotImplementedError

    def number(self, value: Any) -> float | None:
        """Return the constant number that a value is, or None."""
        raise NotImplementedError

    def source(self, value: Any) -> tuple[Any, tuple[Any, ...]]:
        """Return what a value was before conversions that lose nothing, and these."""
        raise NotImplementedError

    def find(self, description: Any, value: Any, **known: Any) -> Found | None:
        """Return the first way in which a value fits a description, or None.

        Args:
            description: See the module.
            value: The root.
            known: What words mean.
        """
        return next(self._find(description, value, Found(known)), None)

    def _find(self, description: Any, value: Any, found: Found) -> Iterator[Found]:
        if isinstance(description, list):
            for one in description:
                yield from self._find(one, value, found)
        elif isinstance(description, float):
            number = self.number(value)
            if number is not None and _close(number, description):
                yield found
        elif isinstance(description, str):
            if description.startswith("#"):
                number = self.number(value)
                if number is not None:
                    yield from found.bind(description[1:], number)
            elif value is not None and not isinstance(value, (int, float)):
                yield from found.bind(description, value)
        elif description[0] == "as":
            for inner in self._find(description[2], value, found):
                yield from inner.bind(description[1], value)
        elif description[0] == "wide":
            value, passed = self.source(value)
            yield from self._find(description[1], value, found.over(*passed))
        else:
            name, *wanted = description
            for operands, passed in self._forms(name, value):
                if len(operands) == len(wanted):
                    yield from self._all(wanted, operands, found.over(*passed))

    def _all(self, wanted: Any, operands: Any, found: Found) -> Iterator[Found]:
        if not wanted:
            yield found
            return
        for first in self._find(wanted[0], operands[0], found):
            yield from self._all(wanted[1:], operands[1:], first)

    def _forms(self, name: str, value: Any) -> Iterator[tuple[tuple[Any, ...], tuple[Any, ...]]]:
        call = self.call(value)
        if call is None:
            return
        op, operands, passed = call
        if name == op:
            yield operands, passed
            if name in ("add", "mul"):
                yield operands[::-1], passed
        elif (name == "shift" and op == "add") or (name == "scale" and op in ("mul", "div")):
            for x, number in (operands, operands[::-1]) if op != "div" else (operands,):
                factor = self.number(number)
                if factor is not None and (op != "div" or factor):
                    yield (x, 1.0 / factor if op == "div" else factor), passed


def _close(number: float, wanted: float) -> bool:
    # Models write square roots and the constants of GELU with few digits.
    exact = math.isinf(wanted) or (2 * wanted).is_integer()
    return number == wanted if exact else math.isclose(number, wanted, rel_tol=1e-4)

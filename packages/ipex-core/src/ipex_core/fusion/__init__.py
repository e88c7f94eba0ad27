# SPDX-License-Identifier: Apache-2.0
"""Fusion of graphs: one folder for each front end."""

from __future__ import annotations

import dataclasses
import logging
import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdRef

__all__ = [
    "Fusion",
    "GraphReport",
    "Origin",
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
    if isinstance(compiled, torch.nn.Module):
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

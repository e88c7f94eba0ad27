# SPDX-License-Identifier: Apache-2.0
"""The record of what `ipex.optimize` did to a model; the data behind `ipex.explain` and `ipex.restore`."""

from __future__ import annotations

import dataclasses
from typing import Any

from torch import nn

from ipex_core.optimization.options import Options

__all__ = ["Log", "Quantisation", "Record", "log_of", "quantisation_of"]

KEY = "_ipex_log"
QUANTISATION = "_ipex_quantisation"


@dataclasses.dataclass(frozen=True)
class Record:
    """One decision: what a pass did to a module, or why it did nothing.

    Attributes:
        module: Path of the module, ``""`` for the model itself.
        kind: Name of the original class.
        step: Name of the pass.
        done: Whether something was changed.
        text: What was done, or why not.
        kernel: The op that runs now, empty if this pass does not choose one.
    """

    module: str
    kind: str
    step: str
    done: bool
    text: str
    kernel: str = ""


@dataclasses.dataclass
class Log:
    """All records of a model, its options, and what passes need for undoing."""

    options: Options
    records: list[Record] = dataclasses.field(default_factory=list)
    notes: list[str] = dataclasses.field(default_factory=list)
    undo: dict[str, Any] = dataclasses.field(default_factory=dict)

    def add(
        self, path: str, module: nn.Module | str, step: str, done: bool, text: str, kernel: str = ""
    ) -> None:
        """Append a record."""
        kind = module if isinstance(module, str) else class_name(module)
        self.records.append(Record(path, kind, step, done, text, kernel))


@dataclasses.dataclass
class Quantisation:
    """What was quantised in a model; `optimize` and `restore` leave it alone."""

    records: list[Record] = dataclasses.field(default_factory=list)
    notes: list[str] = dataclasses.field(default_factory=list)

    def add(self, path: str, kind: str, step: str, done: bool, text: str, kernel: str = "") -> None:
        """Append a record."""
        self.records.append(Record(path, kind, step, done, text, kernel))


def class_name(module: nn.Module) -> str:
    """Return the name of the class a module had before it was optimized."""
    from ipex_core.module_swap.state_dict import state_of

    state = state_of(module)
    kind = state.original_class if state is not None and state.original_class else type(module)
    return kind.__name__


def log_of(model: nn.Module) -> Log | None:
    """Return the log of an optimized model, or None."""
    log = model.__dict__.get(KEY)
    return log if isinstance(log, Log) else None


def quantisation_of(model: nn.Module) -> Quantisation | None:
    """Return what was quantised in a model, or None."""
    found = model.__dict__.get(QUANTISATION)
    return found if isinstance(found, Quantisation) else None

# SPDX-License-Identifier: Apache-2.0
"""How a second name of an op is registered."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
from torch.library import Library

__all__ = ["alias_names", "alias_op", "python_op"]

_F = TypeVar("_F", bound=Callable[..., object])
_LIBRARIES: dict[str, Library] = {}  # kept alive: their end would remove the registrations
_NAMES: list[str] = []


def alias_op(schema: str, namespace: str = "torch_ipex") -> Callable[[_F], _F]:
    """Register the decorated function as ``torch.ops.<namespace>.<name of the schema>``."""
    library = _LIBRARIES.get(namespace)
    if library is None:
        library = _LIBRARIES[namespace] = Library(namespace, "FRAGMENT")

    def register(function: _F) -> _F:
        name = schema.partition("(")[0]
        library.define(schema)
        library.impl(name, function, "CompositeImplicitAutograd")
        _NAMES.append(f"{namespace}::{name}")
        return function

    return register


def python_op(namespace: str) -> Callable[[_F], _F]:
    """Put the decorated function at ``torch.ops.<namespace>.<its name>``: for objects that no schema can have.

    A trace sees the ops in it, but TorchScript does not know it.
    """

    def register(function: _F) -> _F:
        setattr(getattr(torch.ops, namespace), function.__name__, function)
        _NAMES.append(f"{namespace}::{function.__name__}")
        return function

    return register


def alias_names() -> tuple[str, ...]:
    """Return the qualified names of all ops registered here."""
    return tuple(_NAMES)

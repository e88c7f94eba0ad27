# SPDX-License-Identifier: Apache-2.0
"""The op namespaces ``torch.ops.torch_ipex`` and ``torch.ops.ipex_prepack`` that other projects call.

Every op here is a second name: same argument order as in Intel Extension for PyTorch, computed by ops of
``torch.ops.ipex``. They are decompositions (``CompositeImplicitAutograd``): a trace, a compiled graph or a derivative
sees the ops below and needs nothing of its own. Importing this package registers them; ``import ipex`` does.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch.library import Library

from ipex_core.library.spec import schema_of

__all__ = ["alias_names", "alias_op", "python_op"]

_F = TypeVar("_F", bound=Callable[..., object])
_LIBRARIES: dict[str, Library] = {}  # kept alive: their end would remove the registrations
_NAMES: list[str] = []


def alias_op(
    schema: str, namespace: str = "torch_ipex", *, mutates: Sequence[str] = ()
) -> Callable[[_F], _F]:
    """Register the decorated function as ``torch.ops.<namespace>.<name of the schema>``.

    Without arguments in ``schema``, they and the result are what the annotations of the function spell; it writes to
    those in ``mutates``.
    """
    library = _LIBRARIES.get(namespace)
    if library is None:
        library = _LIBRARIES[namespace] = Library(namespace, "FRAGMENT")

    def register(function: _F) -> _F:
        name, has_arguments, _ = schema.partition("(")
        library.define(schema if has_arguments else schema + schema_of(function, mutates))
        library.impl(name, function, "CompositeImplicitAutograd")
        _NAMES.append(f"{namespace}::{name}")
        return function

    return register


def python_op(namespace: str, name: str = "") -> Callable[[_F], _F]:
    """Put the decorated function at ``torch.ops.<namespace>.<name>``: for objects that no schema can have.

    A trace sees the ops in it, but TorchScript does not know it.
    """

    def register(function: _F) -> _F:
        setattr(getattr(torch.ops, namespace), name or function.__name__, function)
        _NAMES.append(f"{namespace}::{name or function.__name__}")
        return function

    return register


def alias_names() -> tuple[str, ...]:
    """Return the qualified names of all ops registered here."""
    return tuple(_NAMES)


# -- The namespaces ---------------------------------------------------------------------------------------------------


for _module in pkgutil.iter_modules(__path__):
    if not _module.name.startswith("_"):
        importlib.import_module(f"{__name__}.{_module.name}")


class _Namespace(torch._ops._OpNamespace):
    """A namespace of ops that knows what IPEX had in it; ``hasattr`` is False for what is not there, as in torch."""

    def __getattr__(self, op_name: str) -> Any:
        try:
            return super().__getattr__(op_name)
        except AttributeError:
            from ipex.compat import migration

            if not op_name.startswith("__"):
                migration.refuse(f"torch.ops.{self.name}.{op_name}")
            raise


for _namespace in (torch.ops.torch_ipex, torch.ops.ipex_prepack):
    _namespace.__class__ = _Namespace

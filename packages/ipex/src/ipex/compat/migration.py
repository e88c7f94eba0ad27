# SPDX-License-Identifier: Apache-2.0
"""Imports of names of Intel Extension for PyTorch that live elsewhere here, by the rows of the migration table.

A module of IPEX that has no counterpart is made from its rows: names that are offered elsewhere are the objects there,
the others raise `NotOfferedError` with the alternative. The table is read when a name is found nowhere else.
"""

from __future__ import annotations

import functools
import importlib
import importlib.abc
import importlib.util
import types
from importlib.machinery import ModuleSpec
from typing import Any

from ipex_cli.migration_table import Row, find, rows

__all__ = ["resolve", "spec", "teach"]


@functools.cache
def _modules() -> frozenset[str]:
    """Return the names of all modules that have rows."""
    found: set[str] = set()
    for name in rows():
        parts = name.split(".")[:-1]
        if parts[:2] != ["torch", "ops"]:
            found.update(".".join(parts[: i + 1]) for i in range(len(parts)))
    return frozenset(found)


def resolve(path: str) -> Any:
    """Return the object with a dotted name, importing what has to be.

    Raises:
        ImportError: The package of the first word, or what it needs, is not installed.
        AttributeError: There is no such name.
    """
    parts = path.split(".")
    value: Any = None
    for end in range(len(parts), 0, -1):
        # Modules of the table first: a module may have another object under the name of one that was below it.
        prefix = ".".join(parts[:end])
        if end == 1 or (parts[0] in _PACKAGES and prefix.partition(".")[2] in _modules()):
            value = importlib.import_module(prefix)
            break
    for i in range(end, len(parts)):
        try:
            value = getattr(value, parts[i])
        except AttributeError:
            if not isinstance(value, types.ModuleType) or find(path.partition(".")[2]) is not None:
                raise
            value = importlib.import_module(".".join(parts[: i + 1]))
    return value


_PACKAGES = ("ipex", "intel_extension_for_pytorch")
_XPU = "ipex_xpu_kernels"


def _text(name: str, row: Row) -> str:
    shown = name if name.startswith("torch.ops.") else f"intel_extension_for_pytorch.{name}"
    if row.state == "xpu":
        return f"{shown} needs ipex-xpu-kernels: pip install 'ipex[xpu]', or use {row.here}"
    return f"{shown} is not offered: use {row.here}"


def _is_missing(row: Row) -> bool:
    """Return whether a name is knowingly not there, or in a package that is not installed."""
    if row.state == "xpu":
        return importlib.util.find_spec(_XPU) is None
    return row.state == "absent"


def refuse(name: str) -> None:
    """Do nothing unless a name is knowingly not there.

    Raises:
        NotOfferedNameError: It is.
    """
    row = find(name)
    if row is not None and _is_missing(row):
        from ipex_core.errors import NotOfferedNameError

        raise NotOfferedNameError(_text(name, row)) from None


def lookup(module: str, name: str) -> Any:
    """Return what the table offers as ``name`` in ``module``; dotted names below the package, "" for the package.

    Raises:
        NotOfferedNameError: The name is knowingly not there.
        AttributeError: The table does not have it.
    """
    dotted = f"{module}.{name}" if module else name
    if not name.startswith("__"):
        if dotted in _modules():
            return importlib.import_module(f"ipex.{dotted}")
        refuse(dotted)
        row = find(dotted)
        if row is not None and row.state == "xpu":
            # Without the class's `__getattr__`: the module may be a `_TaughtModule`, which asks here for what it lacks.
            return types.ModuleType.__getattribute__(importlib.import_module(_XPU), name)
        if row is not None and row.here != f"ipex.{dotted}":
            return resolve(row.here)
    raise AttributeError(f"module 'ipex.{module}' has no attribute {name!r}")


def _keep(module: types.ModuleType, name: str, value: Any) -> Any:
    """Enter a value into a module and return it; values that may be reassigned where they live are not entered."""
    if callable(value) or isinstance(value, types.ModuleType):
        module.__dict__[name] = value
    return value


class _TaughtModule(types.ModuleType):
    """A module with code of its own, which answers for the rest of the names that IPEX had in it, too."""

    __ipex_name__: str

    def __getattr__(self, name: str) -> Any:
        # Called for what neither the module nor a function `__getattr__` in it has.
        dotted = self.__dict__["__ipex_name__"]
        if name == "__path__" and dotted in _parents():
            return []  # what was below it is imported through the table
        if not name.startswith("__") and (
            f"{dotted}.{name}" in _modules() or find(f"{dotted}.{name}")
        ):
            return _keep(self, name, lookup(dotted, name))
        own = self.__dict__.get("__getattr__")
        try:
            if own is not None:
                own(name)  # raises, with a text that may say more
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        except AttributeError as error:
            error.name, error.obj = name, self  # from which Python finds names that are alike
            raise

    def __setattr__(self, name: str, value: Any) -> None:
        # An import enters the module into the one above.
        if isinstance(value, types.ModuleType):
            if isinstance(value, _TableModule) and name in self.__dict__:
                return
            child = f"{self.__dict__['__ipex_name__']}.{name}"
            if child in _modules():
                teach(value, child)
        super().__setattr__(name, value)


def teach(module: types.ModuleType, dotted: str) -> None:
    """Let a module answer for the rest of the names that IPEX had in it."""
    if type(module) is not types.ModuleType or dotted not in _modules():
        return
    module.__dict__["__ipex_name__"] = dotted
    module.__class__ = _TaughtModule
    for name, child in list(module.__dict__.items()):
        below = f"{dotted}.{name}"
        if below in _modules() and getattr(child, "__package__", "").partition(".")[0] in _OURS:
            teach(child, below)  # it was imported under its own name


#: Packages of this project.
_OURS = frozenset({"ipex", "ipex_core", "ipex_llm", "ipex_quant", "ipex_runtime"})


class _TableModule(types.ModuleType):
    """A module that has no code: its rows are all there is."""

    def __getattr__(self, name: str) -> Any:
        dotted = self.__name__.partition(".")[2]
        if name == "__all__":
            prefix = f"{dotted}."
            names = [n.removeprefix(prefix) for n in rows() if n.startswith(prefix)]
            return [n for n in names if "." not in n and not _is_missing(rows()[prefix + n])]
        full = f"{dotted}.{name}"
        if dotted == "xpu" and not name.startswith("__") and find(full) is None:
            import torch

            if full not in _modules() and hasattr(torch.xpu, name):
                return getattr(torch.xpu, name)
        return _keep(self, name, lookup(dotted, name))

    def __dir__(self) -> list[str]:
        return sorted({*self.__dict__, *self.__all__})


@functools.cache
def _parents() -> frozenset[str]:
    """Return the modules that were above others, or that had names that are knowingly not there.

    Python asks for both as for modules below (``from module import name``), and hands on what is said then.
    """
    absent = (name for name, row in rows().items() if row.state in ("absent", "xpu"))
    return frozenset(name.rpartition(".")[0] for name in (*_modules(), *absent))


class _TableLoader(importlib.abc.Loader):
    def create_module(self, spec: ModuleSpec) -> types.ModuleType:
        return _TableModule(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        """Do nothing: the module has no code."""


def spec(fullname: str) -> ModuleSpec | None:
    """Return a spec for a module that IPEX had and ipex has not, None for other names.

    Args:
        fullname: A name below ``ipex`` that nothing else finds.

    Raises:
        NotOfferedModuleError: What is imported is a name that is knowingly not there.
    """
    dotted = fullname.partition(".")[2]
    if dotted in _modules():
        return ModuleSpec(fullname, _TableLoader(), is_package=True)
    row = find(dotted)
    if row is not None and _is_missing(row):
        from ipex_core.errors import NotOfferedModuleError

        raise NotOfferedModuleError(_text(dotted, row))
    return None

# SPDX-License-Identifier: Apache-2.0
"""Names of Intel Extension for PyTorch: second names of modules, and imports by the rows of the migration table.

``ipex.nn`` is `ipex_core.nn`, ``intel_extension_for_pytorch.nn`` is ``ipex.nn``: a finder on ``sys.meta_path`` answers
only for names below the two prefixes, imports the real module and enters the same object under the second name. Nothing
is imported before it is named.

A module of IPEX that has no counterpart and that no other finder has is made from its rows: names that are offered
elsewhere are the objects there, the others raise `NotOfferedError` with the alternative. The table is read when
a name is found nowhere else.
"""

from __future__ import annotations

import functools
import importlib
import importlib.abc
import importlib.util
import sys
import types
from collections.abc import Mapping, Sequence
from importlib.machinery import ModuleSpec
from typing import Any

from ipex_cli.migration_table import OLD_NAME, Row, find, rows


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
        """Return the module."""
        return _TableModule(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        """Do nothing: the module has no code."""


def _spec(fullname: str) -> ModuleSpec | None:
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


# -- Second names of modules ------------------------------------------------------------------------------------------


#: Submodules of the facade that live in another package.
SUBMODULES: Mapping[str, str] = {
    "_C": "ipex.compat.native_names",
    "_isa_help": "ipex.compat.isa_help",
    "amp": "ipex_core.amp",
    "config": "ipex_core.config",
    "distributed": "ipex_core.distributed",
    "errors": "ipex_core.errors",
    "jit": "ipex_core.jit",
    "nn": "ipex_core.nn",
    "optim": "ipex_core.optim",
    "testing": "ipex_core.testing",
}


def component_names() -> frozenset[str]:
    """Return the names under which components appear here, installed or not."""
    from ipex_core.kernels import providers

    return frozenset({*providers.KNOWN_COMPONENTS, *(c.name for c in providers.components())})


def load_component(name: str) -> types.ModuleType:
    """Import the component ``name``; raises Missing-, Broken- or UnknownComponentError."""
    from ipex_core import errors
    from ipex_core.kernels import providers

    loaded = providers.load_component(name)
    if not isinstance(loaded, types.ModuleType):
        raise errors.BrokenComponentError(
            f"ipex.{name}: its entry point must name a module, but names a {type(loaded).__name__}"
        )
    return loaded


class _Loader(importlib.abc.Loader):
    def __init__(self, real: str) -> None:
        self._real = real

    def create_module(self, spec: ModuleSpec) -> None:
        return None

    def exec_module(self, module: types.ModuleType) -> None:
        # The import system takes what sys.modules holds afterwards, so the second name gets the real module itself,
        # with its own name and spec.
        assert module.__spec__ is not None
        name = module.__spec__.name
        real = sys.modules[name] = importlib.import_module(self._real)
        teach(real, name.partition(".")[2])

    def get_code(self, fullname: str) -> types.CodeType | None:
        """Return the code of the real module, which ``python -m`` runs."""
        spec = importlib.util.find_spec(self._real)
        # (Not by class: the real one may be an alias itself.)
        get = getattr(spec.loader, "get_code", None) if spec is not None else None
        return None if get is None else get(self._real)


class AliasFinder(importlib.abc.MetaPathFinder):
    """Finds modules under their second names."""

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None = None,
        target: types.ModuleType | None = None,
    ) -> ModuleSpec | None:
        """Return a spec for a second name, None for every other name.

        Raises:
            MissingComponentError: The name belongs to a component that is not installed.
            BrokenComponentError: The component is installed, but cannot be imported.
            NotOfferedModuleError: IPEX had the name, and it is knowingly not there.
        """
        package, _, rest = fullname.partition(".")
        if not rest or package not in ("ipex", OLD_NAME):
            return None
        real = f"ipex.{rest}" if package == OLD_NAME else _real_name(rest)
        if real is not None and _exists(real):
            # `python -m` runs no packages but the `__main__` inside.
            return ModuleSpec(
                fullname, _Loader(real), is_package=not fullname.endswith(".__main__")
            )
        if package == OLD_NAME:
            return None
        return self._from_others(fullname, path, target) or _spec(fullname)

    def _from_others(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None
    ) -> ModuleSpec | None:
        for other in list(sys.meta_path):
            find = getattr(other, "find_spec", None) if other is not self else None
            found: ModuleSpec | None = None if find is None else find(fullname, path, target)
            if found is not None:
                return found
        return None


def _exists(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False  # not even what it lies in


#: Modules of ipex-runtime under the names that they had.
RUNTIME: Mapping[str, str] = {
    "cpu.launch": "ipex_runtime.launch",
    "cpu.hypertune": "ipex_runtime.hypertune",
    "cpu.auto_ipex": "ipex_runtime.codeless",
}


def _real_name(name: str) -> str | None:
    if name == "tpp" or name.startswith("tpp."):
        return f"ipex.cpu.{name}"
    for old, new in RUNTIME.items():
        if name == old or name.startswith(f"{old}."):
            # They start without torch, which a look at the components would import.
            if importlib.util.find_spec("ipex_runtime") is None:
                load_component("runtime")  # says what to install
            return new + name.removeprefix(old)
    if name == "cpu.tpp.optim":
        return "ipex_core.optim.tpp"
    if name == "cpu.runtime" or name.startswith("cpu.runtime."):
        name = name.removeprefix("cpu.")
    first, _, rest = name.partition(".")
    if first in SUBMODULES:
        return SUBMODULES[first] + (f".{rest}" if rest else "")
    if first in _OWN or first.startswith("_") or first not in component_names():
        return None
    from ipex_core.errors import MissingComponentError

    try:
        return load_component(first).__name__ + (f".{rest}" if rest else "")
    except MissingComponentError:
        if first != "xpu":
            raise
        return None  # made from the table: as in IPEX on a machine without the device


#: Files of this package, known without a look at the entry points; so are all private names.
_OWN = frozenset({"compat", "cpu", "utils"})


def started_by_dash_m() -> bool:
    """Return whether ``python -m`` runs the command or the launcher, which start without torch."""
    words = getattr(sys, "orig_argv", ())[1:] if sys.argv[:1] == ["-m"] else ()
    commands = {f"{package}.{name}" for package in ("ipex", OLD_NAME) for name in RUNTIME}
    return not commands.union({"ipex"}).isdisjoint(words)


def install() -> None:
    """Put the finder before the usual ones, once."""
    if not any(isinstance(finder, AliasFinder) for finder in sys.meta_path):
        # Before them: the usual finder would load the files of ipex a second time under the old name.
        sys.meta_path.insert(0, AliasFinder())

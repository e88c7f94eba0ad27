# SPDX-License-Identifier: Apache-2.0
"""Second names of modules: ``ipex.nn`` is `ipex_core.nn`, ``intel_extension_for_pytorch.nn`` is ``ipex.nn``.

A finder on ``sys.meta_path`` answers only for names below the two prefixes, imports the real module and enters the same
object under the second name. Nothing is imported before it is named. What no finder knows is looked up in the migration
table.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.util
import sys
import types
from collections.abc import Mapping, Sequence
from importlib.machinery import ModuleSpec

from ipex.compat import migration
from ipex_cli.migration_table import OLD_NAME

__all__ = ["SUBMODULES", "AliasFinder", "component_names", "install"]

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
        migration.teach(real, name.partition(".")[2])

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
        return self._from_others(fullname, path, target) or migration.spec(fullname)

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

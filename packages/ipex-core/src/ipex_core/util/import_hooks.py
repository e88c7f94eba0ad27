# SPDX-License-Identifier: Apache-2.0
"""Calls at the import of modules of other libraries, and second names of modules: one finder on ``sys.meta_path``.

The finder is there while something waits for it. It asks the finders of Python for the module, so ``find_spec``,
``reload`` and the loader that the module remembers stay as they are.
"""

from __future__ import annotations

import importlib
import sys
import threading
import types
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from typing import Any, TypeVar

_Call = Callable[[types.ModuleType], object]
_Function = TypeVar("_Function", bound=Callable[..., Any])

_lock = threading.Lock()
#: Name of a module -> what is called once, when it was imported.
_once: dict[str, list[_Call]] = {}
#: What chooses modules by their names, and what is called after each import of one.
_always: list[tuple[Callable[[str], bool], _Call]] = []
#: Second name of a module -> its first.
_second: dict[str, str] = {}


def when_imported(name: str, call: _Call) -> None:
    """Call a function with a module: now if it is imported, or once after its import.

    Args:
        name: Full name of the module.
        call: What takes the module.
    """
    with _lock:
        module = sys.modules.get(name)
        if module is None:
            _once.setdefault(name, []).append(call)
            _place()
    if module is not None:
        call(module)


def when_matching(chosen: Callable[[str], bool], call: _Call) -> None:
    """Call a function with each module whose name is chosen: those imported before now, and others after each import.

    Args:
        chosen: Tells from the full name whether a module counts. It is asked at every import.
        call: What takes the module.
    """
    with _lock:
        _always.append((chosen, call))
        _place()
    for name, module in list(sys.modules.items()):
        if chosen(name) and isinstance(module, types.ModuleType):
            call(module)


def constant_when_traced(function: _Function) -> _Function:
    """Decorate a function that Dynamo calls once, while it traces; Dynamo, which takes 2 s, is not imported for it."""
    when_imported("torch._dynamo", lambda dynamo: dynamo.assume_constant_result(function))
    return function


def second_names(names: dict[str, str]) -> None:
    """Let modules be imported under second names that no library has.

    Args:
        names: Second name -> the module that it means, both in full.
    """
    with _lock:
        _second.update(names)
        _place()


def _place() -> None:
    """Put the finder in front of the others, or take it away when nothing waits for it."""
    wanted = bool(_once or _always or _second)
    if wanted and _FINDER not in sys.meta_path:
        sys.meta_path.insert(0, _FINDER)
    elif not wanted and _FINDER in sys.meta_path:
        sys.meta_path.remove(_FINDER)


class _Finder:
    def find_spec(
        self,
        name: str,
        path: Sequence[str] | None = None,
        target: types.ModuleType | None = None,
    ) -> ModuleSpec | None:
        calls = [call for chosen, call in _always if chosen(name)]
        if not calls and name not in _once and name not in _second:
            return None
        spec = _from_others(name, path, target)
        if spec is None:
            return ModuleSpec(name, _SecondName(_second[name])) if name in _second else None  # type: ignore[arg-type]
        if (calls or name in _once) and hasattr(spec.loader, "exec_module"):
            spec.loader = _Loader(spec.loader, calls)  # type: ignore[assignment]
        return spec


_FINDER: Any = _Finder()


def _from_others(
    name: str, path: Sequence[str] | None, target: types.ModuleType | None
) -> ModuleSpec | None:
    for finder in list(sys.meta_path):
        find = getattr(finder, "find_spec", None) if finder is not _FINDER else None
        spec: ModuleSpec | None = None if find is None else find(name, path, target)
        if spec is not None:
            return spec
    return None


class _Loader:
    """The loader of a module, which makes the calls after it has run the module."""

    def __init__(self, loader: Any, calls: list[_Call]) -> None:
        self._loader = loader
        self._calls = calls

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def create_module(self, spec: ModuleSpec) -> types.ModuleType | None:
        made: types.ModuleType | None = self._loader.create_module(spec)
        return made

    def exec_module(self, module: types.ModuleType) -> None:
        # The module remembers its own loader: `inspect` and `pickle` ask for it.
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        module.__loader__ = self._loader
        self._loader.exec_module(module)
        with _lock:
            once = _once.pop(module.__name__, [])
            _place()
        for call in (*self._calls, *once):
            call(module)


class _SecondName:
    """Gives out a module that has another name, with its own name and spec."""

    def __init__(self, real: str) -> None:
        self._real = real

    def create_module(self, spec: ModuleSpec) -> None:
        return None

    def exec_module(self, module: types.ModuleType) -> None:
        # The import system takes what sys.modules holds afterwards.
        assert module.__spec__ is not None
        sys.modules[module.__spec__.name] = importlib.import_module(self._real)

# SPDX-License-Identifier: Apache-2.0
"""Wraps the call of modules of this process, so that the first outermost call of a model optimizes it.

torch is not imported here: a finder on ``sys.meta_path`` waits for the module that has ``nn.Module``. So a script may
set its environment variables before it imports torch, and one that does not need torch stays as light as it is.
"""

from __future__ import annotations

import functools
import importlib.abc
import importlib.machinery
import sys
import threading
import types
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ipex_runtime.codeless._script import Settings

_TARGET = "torch.nn.modules.module"

_original: Callable[..., Any] | None = None
_finder: _Finder | None = None


class _Finder(importlib.abc.MetaPathFinder):
    """Waits for one module and wraps its class after it was loaded."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != _TARGET:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, self._settings)
        return spec


class _Loader(importlib.abc.Loader):
    def __init__(self, loader: Any, settings: Settings) -> None:
        self._loader = loader
        self._settings = settings

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType | None:
        return self._loader.create_module(spec)  # type: ignore[no-any-return]

    def exec_module(self, module: types.ModuleType) -> None:
        self._loader.exec_module(module)
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        module.__loader__ = self._loader
        _wrap(module.Module, self._settings)


def enable(settings: Settings) -> None:
    """Optimize models of this process from now on; a second call changes the settings of models not yet seen."""
    global _finder
    disable()
    loaded = sys.modules.get(_TARGET)
    if loaded is not None:
        _wrap(loaded.Module, settings)
    else:
        _finder = _Finder(settings)
        sys.meta_path.insert(0, _finder)


def disable() -> None:
    """Take the wrapper away. Models that were optimized stay so."""
    global _finder, _original
    if _finder in sys.meta_path:
        sys.meta_path.remove(_finder)
    _finder = None
    if _original is not None:
        sys.modules[_TARGET].Module.__call__ = _original  # type: ignore[attr-defined]
        _original = None


def _wrap(module_class: Any, settings: Settings) -> None:
    global _original
    original = _original = module_class.__call__
    inside = threading.local()
    models: Any = None
    lock = threading.Lock()
    # torch is being imported: what needs it comes later.
    is_compiling: Callable[[], bool] | None = None

    @functools.wraps(original)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal models, is_compiling
        if (
            is_compiling is not None and is_compiling()
        ):  # the compiler sees nothing but the original
            return original(self, *args, **kwargs)
        if getattr(inside, "call", False):
            return original(self, *args, **kwargs)
        if models is None:
            with lock:
                if models is None:
                    from ipex_runtime.codeless import _models

                    models = _models.Models(settings, original)
                    is_compiling = sys.modules["torch"].compiler.is_compiling
        inside.call = True
        try:
            return models.call(self, args, kwargs)
        finally:
            inside.call = False

    module_class.__call__ = call

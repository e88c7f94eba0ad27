# SPDX-License-Identifier: Apache-2.0
"""The name ``"ipex"`` for models of transformers that choose a class of attention from a table of their own.

A few modelling modules (Falcon, GPT-J, SAM ...) index a dictionary such as `FALCON_ATTENTION_CLASSES` by the name of
the attention and know only the names in it: transformers accepts a registered name, and making the model fails with a
`KeyError`. Such a table gets one entry more, which makes the class of ``"sdpa"``, or else of ``"eager"``, and tells
its caller. transformers has no registry for these tables. They are found by what is in a module, not by a list
of models: in modules that are imported already at once, in others when they are imported. No entry is replaced.
"""

from __future__ import annotations

import importlib.machinery
import sys
import types
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from typing import Any

__all__ = ["offer", "watch"]

_PACKAGE = "transformers.models."

Made = Callable[[type, str], None]


def offer(module: types.ModuleType, name: str, made: Made) -> None:
    """Add an entry to the tables of attention classes in a module.

    Args:
        module: A modelling module.
        name: The new key.
        made: Called with the class of the configuration and the name of the stock class when a model is made so.
    """
    for key, table in list(vars(module).items()):
        if not key.endswith("ATTENTION_CLASSES") or not isinstance(table, dict):
            continue
        stock = table.get("sdpa", table.get("eager"))
        if isinstance(stock, type):
            table.setdefault(name, _entry(stock, made))


def _entry(stock: type, made: Made) -> Callable[..., Any]:
    def make(config: Any, *args: Any, **kwargs: Any) -> Any:
        made(type(config), stock.__name__)
        return stock(config, *args, **kwargs)

    return make


def watch(name: str, made: Made) -> None:
    """Call `offer` for the modelling modules that are imported, and for each one that will be; once for a name."""
    if any(isinstance(finder, _Finder) and finder.name == name for finder in sys.meta_path):
        return
    sys.meta_path.insert(0, _Finder(name, made))
    for key, module in list(sys.modules.items()):
        if _is_modelling(key) and isinstance(module, types.ModuleType):
            offer(module, name, made)


def _is_modelling(name: str) -> bool:
    return name.startswith(_PACKAGE) and name.rpartition(".")[2].startswith("modeling_")


class _Loader(importlib.machinery.SourceFileLoader):
    """Runs a module as usual, and looks for tables in it afterwards."""

    finder: _Finder

    def exec_module(self, module: types.ModuleType) -> None:
        super().exec_module(module)
        offer(module, self.finder.name, self.finder.made)


class _Finder:
    """Finds modelling modules as Python does, for `_Loader` to run; other names are not looked at."""

    def __init__(self, name: str, made: Made) -> None:
        self.name = name
        self.made = made

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None = None,
        target: types.ModuleType | None = None,
    ) -> ModuleSpec | None:
        if not _is_modelling(fullname):
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is None or type(spec.loader) is not importlib.machinery.SourceFileLoader:
            return None  # leave modules with a custom loader alone
        loader = _Loader(fullname, spec.loader.path)
        loader.finder = self
        spec.loader = loader
        return spec

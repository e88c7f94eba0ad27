# SPDX-License-Identifier: Apache-2.0
"""Plain ``torch.compile`` needs a Triton for XPU: torch's error then says what works without one."""

from __future__ import annotations

import importlib.util
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

_MODULE = "torch._inductor.exc"
HINT = (
    " There is none for the xpu device of ipex-xpu-kernels on this system. torch.compile(model, backend='ipex'),"
    " backend='aot_eager' and uncompiled models need none."
)


def install() -> None:
    """Add the hint when torch's module of these errors is imported, or now if it has been."""
    if _MODULE in sys.modules:
        _add_hint(sys.modules[_MODULE])
    else:
        sys.meta_path.insert(0, _Finder())


def _add_hint(module: ModuleType) -> None:
    missing: Any = getattr(module, "TritonMissing", None)
    if missing is None:
        return  # of a torch that calls it otherwise

    class TritonMissing(missing):  # type: ignore[misc]
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            text, *others = BaseException.__getattribute__(self, "args")
            self.args = (f"{text}{HINT}", *others)

    TritonMissing.__module__, TritonMissing.__qualname__ = module.__name__, "TritonMissing"
    module.TritonMissing = TritonMissing  # type: ignore[attr-defined]


class _Finder:
    """Finds one module, once, where torch has it."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        if name != _MODULE:
            return None
        sys.meta_path.remove(self)  # type: ignore[arg-type]
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader)  # type: ignore[assignment]
        return spec


class _Loader:
    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> Any:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        _add_hint(module)

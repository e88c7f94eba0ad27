# SPDX-License-Identifier: Apache-2.0
"""CPU topology, pinned thread pools and streams.

Names are imported from the module they live in when they are first used; importing this package does not import torch.
"""

from __future__ import annotations

import importlib
from typing import Any

from ipex_runtime._version import __version__

#: Public name -> module that has it.
_LAZY: dict[str, str] = {
    "format_cpu_list": "ipex_runtime.topology",
    "parse_cpu_list": "ipex_runtime.topology",
}

#: Modules that have names of their own.
_MODULES: tuple[str, ...] = ("topology",)

__all__ = ["__version__", *_LAZY, *_MODULES]  # noqa: PLE0604  (the keys are strings)


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"ipex_runtime.{name}")
    if name in _LAZY:
        value = getattr(importlib.import_module(_LAZY[name]), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module 'ipex_runtime' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

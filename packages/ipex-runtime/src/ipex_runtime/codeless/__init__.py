# SPDX-License-Identifier: Apache-2.0
"""Codeless optimization: runs a script whose models are optimized at their first call, without changing the script.

``ipexrun --auto-ipex script.py``, ``ipex auto script.py`` and ``python -m ipex_runtime.codeless script.py`` do it.
"""

from __future__ import annotations

import importlib
import importlib.metadata
from typing import Any

#: Public name -> module that has it.
_LAZY = {
    "add_auto_ipex_params": "_script",
    "disable": "_hook",
    "enable": "_hook",
    "main": "__main__",
    "parse_args": "__main__",
}

__all__ = list(_LAZY)

GROUP = "ipex_runtime.optimizers"


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        value = getattr(importlib.import_module(f"{__name__}.{_LAZY[name]}"), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def facade() -> Any:
    """Return the package that optimizes models, ipex: it has ``optimize``, ``restore``, ``quantization`` and ``xpu``.

    Raises:
        ImportError: No installed package offers one.
    """
    for entry in importlib.metadata.entry_points(group=GROUP):
        return entry.load()
    raise ImportError("the package ipex is not installed: pip install ipex")

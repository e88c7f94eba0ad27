# SPDX-License-Identifier: Apache-2.0
"""Quantisation: weight-only configurations, quantised layers and checkpoint readers.

Names are imported from the module they live in when they are first used.
"""

from __future__ import annotations

import importlib
from typing import Any

from ipex_quant._version import __version__

#: Public name -> module that has it.
_LAZY: dict[str, str] = {}

__all__ = ["__version__", *_LAZY]  # noqa: PLE0604  (the keys are strings)


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        value = getattr(importlib.import_module(_LAZY[name]), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module 'ipex_quant' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

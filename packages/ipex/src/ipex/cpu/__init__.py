# SPDX-License-Identifier: Apache-2.0
"""CPU-specific names. ``ipex.cpu.runtime`` is the component ``ipex.runtime``, ``ipex.cpu.launch`` the launcher in it.

Nothing is imported before it is named: the launcher starts without torch.
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

from ipex.compat import migration

if TYPE_CHECKING:
    from ipex.compat.native_names import _get_current_isa_level as _get_current_isa_level
    from ipex.compat.native_names import (
        _get_highest_binary_support_isa_level as _get_highest_binary_support_isa_level,
    )
    from ipex.compat.native_names import (
        _get_highest_cpu_support_isa_level as _get_highest_cpu_support_isa_level,
    )
    from ipex.cpu import runtime as runtime
    from ipex_core.config import FP32MathMode as FP32MathMode
    from ipex_core.config import get_fp32_math_mode as get_fp32_math_mode
    from ipex_core.config import set_fp32_math_mode as set_fp32_math_mode
    from ipex_core.config import verbose as verbose
    from ipex_core.metrics import roc_auc_score as roc_auc_score

#: Public name -> module that has it.
_NAMES = {
    "FP32MathMode": "ipex_core.config",
    "_get_current_isa_level": "ipex.compat.native_names",
    "_get_highest_binary_support_isa_level": "ipex.compat.native_names",
    "_get_highest_cpu_support_isa_level": "ipex.compat.native_names",
    "get_fp32_math_mode": "ipex_core.config",
    "roc_auc_score": "ipex_core.metrics",
    "set_fp32_math_mode": "ipex_core.config",
    "verbose": "ipex_core.config",
}

#: Modules; all but `tpp` live in ipex-runtime.
_MODULES = ("auto_ipex", "hypertune", "launch", "runtime", "tpp")

__all__ = list(_NAMES)


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module("ipex.runtime" if name == "runtime" else f"ipex.cpu.{name}")
    if name in _NAMES:
        value = getattr(importlib.import_module(_NAMES[name]), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module 'ipex.cpu' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


migration.teach(sys.modules[__name__], "cpu")

# SPDX-License-Identifier: Apache-2.0
"""CPU-specific names. ``ipex.cpu.runtime`` is the component ``ipex.runtime``."""

from __future__ import annotations

import importlib
from typing import Any

from ipex._C import (
    _get_current_isa_level,
    _get_highest_binary_support_isa_level,
    _get_highest_cpu_support_isa_level,
)
from ipex_core.config import FP32MathMode, get_fp32_math_mode, set_fp32_math_mode, verbose

__all__ = [
    "FP32MathMode",
    "_get_current_isa_level",
    "_get_highest_binary_support_isa_level",
    "_get_highest_cpu_support_isa_level",
    "get_fp32_math_mode",
    "roc_auc_score",
    "set_fp32_math_mode",
    "verbose",
]


def __getattr__(name: str) -> Any:
    if name == "runtime":
        return importlib.import_module("ipex.runtime")
    if name == "tpp":
        return importlib.import_module("ipex.cpu.tpp")
    if name == "roc_auc_score":
        return importlib.import_module("ipex_core.metrics").roc_auc_score
    raise AttributeError(f"module 'ipex.cpu' has no attribute {name!r}")

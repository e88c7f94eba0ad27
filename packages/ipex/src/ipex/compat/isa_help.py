# SPDX-License-Identifier: Apache-2.0
"""Two questions scripts ask Intel Extension for PyTorch before they use it, and the numbers of 8-bit operands."""

from __future__ import annotations

import sys
from typing import Any

from ipex.compat import migration
from ipex.compat.native_names import _cpu_levels

__all__: list[str] = []


def _check_isa_avx2() -> bool:
    """Return whether the CPU runs AVX2 code."""
    return "avx2" in _cpu_levels()


def _check_isa_avx512() -> bool:
    """Return whether the CPU runs AVX-512 code."""
    return "avx512" in _cpu_levels()


_FP8 = ("FP8BwdTensors", "FP8FwdTensors", "FP8TensorMeta", "Float8Format")


def __getattr__(name: str) -> Any:
    if name in _FP8:
        from ipex.compat.migration import load_component

        return getattr(load_component("quantization").fp8, name)
    raise AttributeError(f"module 'ipex.compat.isa_help' has no attribute {name!r}")


migration.teach(sys.modules[__name__], "_isa_help")

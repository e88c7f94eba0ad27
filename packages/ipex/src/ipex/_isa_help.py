# SPDX-License-Identifier: Apache-2.0
"""Two questions scripts ask Intel Extension for PyTorch before they use it."""

from __future__ import annotations

from ipex._C import isa_has_avx2_support, isa_has_avx512_support

__all__: list[str] = []


def _check_isa_avx2() -> bool:
    """Return whether the CPU runs AVX2 code."""
    return isa_has_avx2_support()


def _check_isa_avx512() -> bool:
    """Return whether the CPU runs AVX-512 code."""
    return isa_has_avx512_support()

# SPDX-License-Identifier: Apache-2.0
"""IPEX's module path for layers that live in packages of their own: ``ipex.nn.modules``.

A name loads the package that has it; `MissingComponentError` says what to install.
"""

from __future__ import annotations

from typing import Any

__all__ = ["WeightOnlyQuantizedLinear", "WoqWeightFormat"]  # noqa: F822  (made when named)

#: Name -> component that has it.
_NAMES = {
    "WeightOnlyQuantizedLinear": "quantization",
    "WoqWeightFormat": "quantization",
}


def __getattr__(name: str) -> Any:
    if name not in _NAMES:
        raise AttributeError(f"module 'ipex.nn.modules' has no attribute {name!r}")
    from ipex_core import _plugins

    return getattr(_plugins.load_component(_NAMES[name]), name)


def __dir__() -> list[str]:
    return __all__

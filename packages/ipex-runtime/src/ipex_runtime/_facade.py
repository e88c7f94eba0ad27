# SPDX-License-Identifier: Apache-2.0
"""The package that optimizes models: what the entry-point group ``ipex_runtime.optimizers`` names, which is ipex."""

from __future__ import annotations

import importlib.metadata
from typing import Any

__all__ = ["facade"]

GROUP = "ipex_runtime.optimizers"


def facade() -> Any:
    """Return the package, with ``optimize``, ``restore``, ``quantization`` and ``xpu``.

    Raises:
        ImportError: No installed package offers one.
    """
    for entry in importlib.metadata.entry_points(group=GROUP):
        return entry.load()
    raise ImportError("the package ipex is not installed: pip install ipex")

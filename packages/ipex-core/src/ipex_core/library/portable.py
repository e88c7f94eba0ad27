# SPDX-License-Identifier: Apache-2.0
"""Ops that exist in Python only, and what takes their place in programs that leave it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

__all__ = ["FUNCTIONAL", "PORTABLE"]

#: Op -> the same in ops that C++ has. Packages with such ops add theirs.
PORTABLE: dict[Any, Callable[..., Any]] = {}

#: Op that writes to an argument that is not read afterwards -> the same without writing; applied before `PORTABLE`.
FUNCTIONAL: dict[Any, Any] = {}

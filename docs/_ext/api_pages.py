# SPDX-License-Identifier: Apache-2.0
"""The reference of the public Python names, from ``ipex.__all__``."""

from __future__ import annotations

import inspect
from types import ModuleType

import ipex
import ipex_core.errors

__all__ = ["pages"]


def pages() -> dict[str, str]:
    """Return the pages by file name."""
    functions: list[str] = []
    classes: list[str] = []
    others: list[str] = []
    for name in sorted(ipex.__all__, key=str.lower):
        try:
            value = getattr(ipex, name)
        except ImportError:
            continue  # the name belongs to a component that is not installed for this build
        if isinstance(value, ModuleType) or (
            inspect.isclass(value) and issubclass(value, Exception)
        ):
            continue
        if inspect.isclass(value):
            classes += [f".. autoclass:: ipex.{name}", "   :members:", ""]
        elif callable(value):
            functions += [f".. autofunction:: ipex.{name}", ""]
        else:
            others.append(f"| `ipex.{name}` | `{value!r}` |")
    errors: list[str] = []
    for name in ipex_core.errors.__all__:
        errors += [f".. autoexception:: ipex_core.errors.{name}", "   :show-inheritance:", ""]
    lines = [
        "# Python reference",
        "",
        "What `import ipex` offers. Generated from the docstrings, whose examples are run.",
        "",
    ]
    for title, body in (("Functions", functions), ("Classes", classes), ("Errors", errors)):
        if body:
            lines += [f"## {title}", "", "```{eval-rst}", *body, "```", ""]
    if others:
        lines += ["## Constants", "", "| Name | Value |", "|---|---|", *others, ""]
    return {"api.md": "\n".join(lines)}

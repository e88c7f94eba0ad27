# SPDX-License-Identifier: Apache-2.0
"""A dictionary whose items are attributes, too."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["DotDict"]


class DotDict(dict[str, Any]):
    """``d.tuning.strategy`` is ``d["tuning"]["strategy"]``."""

    def __init__(self, value: Mapping[str, Any] | None = None) -> None:
        super().__init__()
        for name, item in (value or {}).items():
            self[name] = DotDict(item) if isinstance(item, Mapping) else item

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(f"DotDict: no item {name!r}") from None

    def __setattr__(self, name: str, value: Any) -> None:
        self[name] = value

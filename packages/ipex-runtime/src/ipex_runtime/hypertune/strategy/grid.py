# SPDX-License-Identifier: Apache-2.0
"""All configurations, one after the other."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ipex_runtime.hypertune.strategy.strategy import TuneStrategy, strategy_registry

__all__ = ["GridTuneStrategy"]


@strategy_registry
class GridTuneStrategy(TuneStrategy):
    """Tries all configurations; the last parameter varies fastest."""

    def next_tune_cfg(self) -> Iterator[dict[str, Any]]:
        """Yield them."""
        yield from self.space

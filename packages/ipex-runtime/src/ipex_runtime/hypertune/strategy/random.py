# SPDX-License-Identifier: Apache-2.0
"""Configurations at random, none twice."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

from ipex_runtime.hypertune.strategy.strategy import TuneStrategy, strategy_registry

__all__ = ["RandomTuneStrategy"]


@strategy_registry
class RandomTuneStrategy(TuneStrategy):
    """Tries configurations in random order; the seed is ``tuning.seed``."""

    def next_tune_cfg(self) -> Iterator[dict[str, Any]]:
        """Yield them."""
        generator = random.Random(self.seed)
        if self.space.product() <= 100_000:
            everything = list(self.space)
            generator.shuffle(everything)
            yield from everything
            return
        seen: set[tuple[Any, ...]] = set()
        # The space is far larger than the number of trials: hits on what was tried are rare.
        for _ in range(100 * self.max_trials):
            cfg = {name: generator.choice(values) for name, values in self.space.values.items()}
            key = tuple(cfg.values())
            if key not in seen and self.space.possible(cfg):
                seen.add(key)
                yield cfg

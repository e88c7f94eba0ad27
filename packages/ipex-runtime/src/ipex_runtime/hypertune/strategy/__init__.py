# SPDX-License-Identifier: Apache-2.0
"""The orders in which configurations are tried."""

from __future__ import annotations

from ipex_runtime.hypertune.strategy.bayesian import BayesianTuneStrategy
from ipex_runtime.hypertune.strategy.grid import GridTuneStrategy
from ipex_runtime.hypertune.strategy.random import RandomTuneStrategy
from ipex_runtime.hypertune.strategy.strategy import STRATEGIES, TuneStrategy, strategy_registry

__all__ = [
    "STRATEGIES",
    "BayesianTuneStrategy",
    "GridTuneStrategy",
    "RandomTuneStrategy",
    "TuneStrategy",
    "strategy_registry",
]

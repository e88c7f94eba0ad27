# SPDX-License-Identifier: Apache-2.0
"""Configurations that a model of the results so far expects to be good (tree-structured Parzen estimator).

Source: Bergstra et al., Algorithms for Hyper-Parameter Optimization, 2011, as optuna implements it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ipex_runtime.hypertune._record import Trial
from ipex_runtime.hypertune.strategy.strategy import TuneStrategy, strategy_registry

__all__ = ["BayesianTuneStrategy"]

#: Proposals in a row that were tried before, after which the search takes the next untried configuration.
MOST_REPEATS = 20


@strategy_registry
class BayesianTuneStrategy(TuneStrategy):
    """Tries what optuna proposes; needs the package ``optuna``."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        try:
            import optuna
        except ImportError as error:
            raise ImportError(
                "hypertune: the strategy bayesian needs optuna: pip install 'ipex-runtime[bayesian]'"
            ) from error
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self._optuna: Any = optuna
        self._study: Any = None
        self._results: list[Trial] = []

    def feedback(self, trial: Trial) -> None:
        """Keep a result for the next proposal."""
        if trial.values:
            self._results.append(trial)

    def next_tune_cfg(self) -> Iterator[dict[str, Any]]:
        """Yield configurations; until there is a result, of the grid."""
        tried: set[tuple[Any, ...]] = {tuple(t.configuration.values()) for t in self.record.trials}
        for cfg in self.space:
            if self._results:
                break
            tried.add(tuple(cfg.values()))
            yield cfg
        while len(tried) < self.space.size():
            cfg = self._propose(tried)
            tried.add(tuple(cfg.values()))
            yield cfg

    def _propose(self, tried: set[tuple[Any, ...]]) -> dict[str, Any]:
        optuna = self._optuna
        spaces = {
            name: optuna.distributions.CategoricalDistribution(values)
            for name, values in self.space.values.items()
        }
        if self._study is None:
            directions = [
                "maximize" if o["higher_is_better"] else "minimize" for o in self.usr_objectives
            ]
            sampler = optuna.samplers.TPESampler(seed=self.seed, n_startup_trials=5)
            self._study = optuna.create_study(directions=directions, sampler=sampler)
        for trial in self._results:
            self._study.add_trial(
                optuna.trial.create_trial(
                    params=trial.configuration, distributions=spaces, values=trial.values
                )
            )
        self._results = []
        for _ in range(MOST_REPEATS):
            asked = self._study.ask(spaces)
            self._study.tell(
                asked, state=optuna.trial.TrialState.FAIL
            )  # the result comes by add_trial
            cfg = {name: asked.params[name] for name in self.space.names}
            if tuple(cfg.values()) not in tried and self.space.possible(cfg):
                return cfg
        return next(cfg for cfg in self.space if tuple(cfg.values()) not in tried)

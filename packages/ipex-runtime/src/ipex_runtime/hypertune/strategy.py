# SPDX-License-Identifier: Apache-2.0
"""The search itself; what differs between strategies is the order of configurations."""

from __future__ import annotations

import os
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

from ipex_runtime.hypertune._record import Record, Space, Trial, locked
from ipex_runtime.hypertune.conf import Conf
from ipex_runtime.hypertune.objective import MultiObjective, TrialError

__all__ = [
    "BayesianTuneStrategy",
    "GridTuneStrategy",
    "RandomTuneStrategy",
    "STRATEGIES",
    "TuneStrategy",
    "strategy_registry",
]

#: Name -> class, filled by `strategy_registry`.
STRATEGIES: dict[str, type[TuneStrategy]] = {}

_SUFFIX = "TuneStrategy"
_S = TypeVar("_S", bound="type[TuneStrategy]")


def strategy_registry(cls: _S) -> _S:
    """Make a strategy known under its class name without ``TuneStrategy``, in lower case.

    Raises:
        ValueError: The name ends otherwise or is taken.
    """
    name = cls.__name__.removesuffix(_SUFFIX).lower()
    if not cls.__name__.endswith(_SUFFIX) or name in STRATEGIES:
        raise ValueError(
            f"strategy_registry: the class must have a new name that ends with {_SUFFIX}, got {cls.__name__}"
        )
    STRATEGIES[name] = cls
    return cls


class TuneStrategy:
    """A search.

    Args:
        conf: What to run and what to vary.
        resume: Take over the trials that ``record.csv`` has.
        out: Gets lines for the user.

    Attributes:
        best_tune_cfg: The best configuration so far, None before the first result.
        best_tune_result: Its objectives.
    """

    def __init__(
        self, conf: Conf, resume: bool = False, out: Callable[[str], None] = print
    ) -> None:
        self.conf = conf.execution_conf
        self.usr_objectives: Sequence[dict[str, Any]] = conf.usr_objectives
        self.max_trials: int = self.conf.tuning.max_trials
        self.seed: int = self.conf.tuning.seed
        launcher = self.conf.hyperparams.get("launcher")
        self.multiobjective = MultiObjective(
            conf.program, conf.program_args, launcher is not None, self.conf.tuning.trial_timeout
        )
        self.space = Space({n: launcher[n] for n in launcher["hp"]} if launcher else {}, out)
        self.best_tune_cfg: dict[str, Any] | None = None
        self.best_tune_result: list[float] | None = None
        self._resume = resume
        self._out = out

    def next_tune_cfg(self) -> Iterator[dict[str, Any]]:
        """Yield configurations. When asked for the next one, `feedback` was called for the last."""
        raise NotImplementedError

    def feedback(self, trial: Trial) -> None:
        """Learn from a trial, a new one or one of an earlier search."""

    def traverse(self) -> int:
        """Run the search; returns how many trials have a result.

        Raises:
            ConfigurationError: The output folder or the record in it cannot be used.
        """
        with locked(self.conf.output_dir):
            self.record = Record(self.conf.output_dir, self.space.names, self._resume)
            try:
                self._search()
            except KeyboardInterrupt:
                self._out("\nInterrupted; --resume goes on with the next trial.")
            self._report()
        return sum(bool(trial.values) for trial in self.record.trials)

    def _search(self) -> None:
        total = min(self.max_trials, self.space.size())
        self._out(f"Starting hypertuning: {total} trials of {self.space.size()} configurations")
        for trial in self.record.trials:
            self._take(trial)
        done = len(self.record.trials)
        if done:
            self._out(f"{done} trials are taken over from {self.record.path}")
        if self._met():
            return
        seconds: list[float] = []
        for cfg in self.next_tune_cfg():
            if done >= self.max_trials:
                return
            if self.record.find(cfg) is not None:
                continue
            done += 1
            left = ""
            if seconds:
                left = f", about {_duration((total - done + 1) * sum(seconds) / len(seconds))} left"
            self._out(f"\nTune {done}/{total}{left}: {cfg}")
            trial = self._try(cfg, done)
            seconds.append(trial.seconds)
            self.record.add(trial, [o["name"] for o in self.multiobjective.objectives])
            self._take(trial)
            self._progress(trial)
            if self._met():
                self._out("\nFound a configuration that meets the target values.")
                return

    def _try(self, cfg: dict[str, Any], number: int) -> Trial:
        start = time.monotonic()
        try:
            values = self.multiobjective.evaluate(cfg)
        except TrialError as error:
            log = Path(self.conf.output_dir) / f"trial_{number}.log"
            log.write_text(error.output, encoding="utf-8")
            self._out(f"  {error.status}: {error} (output: {log})")
            return Trial(cfg, [], error.status, time.monotonic() - start)
        self.usr_objectives = self.multiobjective.objectives
        return Trial(cfg, values, "done", time.monotonic() - start)

    # -- the best ------------------------------------------------------------------------------------------------------

    def _take(self, trial: Trial) -> None:
        if not self.multiobjective.objectives and self.usr_objectives:
            self.multiobjective.objectives = list(self.usr_objectives)
        self.feedback(trial)
        if not trial.values:
            return
        if self.best_tune_result is None or self._better(trial.values, self.best_tune_result):
            self.best_tune_cfg, self.best_tune_result = trial.configuration, trial.values

    def _better(self, values: Sequence[float], than: Sequence[float]) -> bool:
        """Return whether all objectives are better."""
        return all(
            a > b if objective["higher_is_better"] else a < b
            for objective, a, b in zip(self.usr_objectives, values, than, strict=True)
        )

    def _met(self) -> bool:
        if self.best_tune_result is None or not self.usr_objectives:
            return False
        return self._better(self.best_tune_result, [o["target_val"] for o in self.usr_objectives])

    # -- what the user sees --------------------------------------------------------------------------------------------

    def _progress(self, trial: Trial) -> None:
        if trial.values:
            self._out(f"  {self._named(trial.values)} ({_duration(trial.seconds)})")
        if self.best_tune_result is not None:
            self._out(
                f"  best so far: {self._named(self.best_tune_result)} with {self.best_tune_cfg}"
            )

    def _named(self, values: Sequence[float]) -> str:
        return ", ".join(
            f"{o['name']}: {v:g}" for o, v in zip(self.usr_objectives, values, strict=True)
        )

    def _report(self) -> None:
        failed = sum(not trial.values for trial in self.record.trials)
        self._out(
            f"\n{len(self.record.trials)} trials, {failed} without a result: {self.record.path}"
        )
        if self.best_tune_cfg is None or self.best_tune_result is None:
            self._out("No configuration has a result.")
            return
        self._out(f"Best configuration found is: {self.best_tune_cfg}")
        for objective, value in zip(self.usr_objectives, self.best_tune_result, strict=True):
            self._out(f"{objective['name']}: {value}")
        options = self.multiobjective.decode_launcer_cfg(self.best_tune_cfg)
        script = os.path.basename(self.multiobjective.program)
        self._out(f"To run it: ipexrun {' '.join(options)} {script}")
        self._plot()

    def _plot(self) -> None:
        from ipex_runtime.hypertune._record import plot

        path = Path(self.conf.output_dir) / "hypertune.png"
        try:
            plot(self.record, self.usr_objectives, path)
            self._out(f"Plot: {path}")
        except ImportError:
            self._out("No plot: it needs matplotlib (pip install 'ipex-runtime[plot]').")
        except Exception as error:  # the numbers are written; a picture is no reason to fail
            print(f"hypertune: no plot: {error}", file=sys.stderr)


def _duration(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60} h {minutes % 60} min" if minutes >= 60 else f"{minutes} min {rest} s"


@strategy_registry
class GridTuneStrategy(TuneStrategy):
    """Tries all configurations; the last parameter varies fastest."""

    def next_tune_cfg(self) -> Iterator[dict[str, Any]]:
        """Yield them."""
        yield from self.space


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

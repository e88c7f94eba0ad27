# SPDX-License-Identifier: Apache-2.0
"""The tuner of neural-compressor over the recipes of this package, for those who have it installed."""

from __future__ import annotations

import functools
import importlib
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from ipex_core.errors import MissingComponentError
from ipex_core.library.spec import check
from ipex_quant.tuning.space import Trial

__all__ = ["ENGINES", "Rounds", "Tuner", "tuner_of"]

#: Takes trials, the accuracy of the float model and the least that is enough.
Tuner = Callable[[Sequence[Trial], float, float], "Rounds"]

log = logging.getLogger("ipex")

ENGINES = (None, "ipex", "neural_compressor")


class Rounds:
    """The trials of a search, as the tuner of neural-compressor orders them."""

    def __init__(
        self, tuning: Any, config: Any, trials: Sequence[Trial], baseline: float, least: float
    ) -> None:
        made = [config(number, trial.name) for number, trial in enumerate(trials)]
        # Its loss is a share of the accuracy of the float model.
        loss = (baseline - least) / baseline if baseline else 0.0
        self._trials = trials
        wanted = tuning.TuningConfig(config_set=made, tolerable_loss=loss, max_trials=len(trials))
        self._loader, _, self._monitor = tuning.init_tuning(wanted)
        self._monitor.set_baseline(baseline)

    def __iter__(self) -> Iterator[tuple[Trial, Callable[[float], bool]]]:
        """Return each trial and a function that takes its accuracy and returns whether the search may stop."""
        for number, config in enumerate(self._loader, 1):
            yield self._trials[config.number], functools.partial(self._enough, number, config)

    def _enough(self, number: int, config: Any, accuracy: float) -> bool:
        self._monitor.add_trial_result(number, accuracy, config)
        return bool(self._monitor.need_stop())


def tuner_of(engine: Any) -> Tuner | None:
    """Return the tuner of an engine; None for the search of this package.

    Raises:
        OpArgumentError: There is no such engine.
        MissingComponentError: neural-compressor is asked for and is not installed, or in a version without this tuner.
    """
    check(engine in ENGINES, "autotune", "engine", f"be one of {ENGINES}", engine)
    if engine == "ipex":
        return None
    try:
        tuning: Any = importlib.import_module("neural_compressor.common.base_tuning")
        base: Any = importlib.import_module("neural_compressor.common.base_config").BaseConfig
        usable = hasattr(tuning, "TuningConfig") and hasattr(tuning, "init_tuning")
        if not usable:
            raise ImportError("it has no init_tuning")
    except (ImportError, AttributeError) as error:
        if engine is None:
            log.debug("autotune: own search, since neural-compressor cannot be used: %s", error)
            return None
        raise MissingComponentError(
            "autotune: engine 'neural_compressor' must be installed (pip install neural-compressor-pt, version 3),"
            f" got {type(error).__name__}: {error}"
        ) from error
    return functools.partial(Rounds, tuning, _config_class(base))


def _config_class(base: Any) -> Any:
    class Recipe(base):  # type: ignore[misc]
        """One trial as a configuration of neural-compressor."""

        name = "ipex"

        def __init__(self, number: int, text: str) -> None:
            super().__init__(white_list=None)
            self.number, self.text = number, text

        def expand(self) -> list[Any]:
            return [self]

        def to_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
            return {self.name: self.text}

        def __eq__(self, other: object) -> bool:
            return isinstance(other, Recipe) and other.number == self.number

        def __hash__(self) -> int:
            return self.number

        @classmethod
        def register_supported_configs(cls) -> None:
            """There are none to choose from."""

        @classmethod
        def get_config_set_for_tuning(cls) -> None:
            """Return None: there is no such set."""

    return Recipe

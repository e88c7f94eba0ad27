# SPDX-License-Identifier: Apache-2.0
"""Trials of `autotune`: the search of this package, and the tuner of neural-compressor for those who have it."""

from __future__ import annotations

import copy
import dataclasses
import functools
import importlib
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ipex_core.benchmark import paired, ratio
from ipex_core.errors import MissingComponentError
from ipex_core.library.spec import check
from ipex_quant.int8.api import convert, prepare
from ipex_quant.int8.state import leave_out, state_of
from ipex_quant.tuning.report import Result, State
from ipex_quant.tuning.space import Trial, configuration

# --- the tuner of neural-compressor -----------------------------------------------------------------------------------


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


# --- the search of this package ---------------------------------------------------------------------------------------


_WHY = "autotune: the accuracy was not enough with it"


class OutOfTime(Exception):
    """The budget is used up."""


def speedup_of(model: nn.Module, quantized: nn.Module, args: Any, kwargs: Any) -> float:
    """Return how many times faster a model is than the float one on one batch, from paired timings."""
    functions = {
        "float": functools.partial(model, *args, **kwargs),
        "int8": functools.partial(quantized, *args, **kwargs),
    }
    with torch.no_grad():
        times = paired(functions, seconds=0.5, min_rounds=3, warmup=1)
    return ratio(times["float"], times["int8"]).median


@dataclasses.dataclass
class Search:
    """All that one search needs; `run` does it.

    Attributes:
        model: The float model.
        args: Of the batch that is timed.
        kwargs: Of the same.
        given: The configuration of a model that was prepared already.
        options: What types of layers are limited to.
        auto_alpha_args: How SmoothQuant searches alpha.
        calibrate: Runs a prepared model on so many samples.
        evaluate: Returns the accuracy of a model.
        least: The accuracy that is enough.
        state: Results so far, also of an earlier run.
        expired: Whether the time is up.
        thorough: Whether to look on for a faster model after one was found that is accurate enough.
        on_trial: Called before a trial.
        tuner: That of neural-compressor, or None.
        results: What was tried, in order.
        complete: Whether the search ended before the time did.
    """

    model: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    given: Any
    options: Mapping[type[nn.Module], Mapping[str, Any] | None]
    auto_alpha_args: Mapping[str, Any] | None
    calibrate: Callable[[nn.Module, int], None]
    evaluate: Callable[[nn.Module], float]
    least: float
    state: State
    expired: Callable[[], bool]
    thorough: bool
    on_trial: Callable[[Trial], None]
    tuner: Tuner | None = None
    results: list[Result] = dataclasses.field(default_factory=list)
    complete: bool = True
    _base: tuple[str, nn.Module] | None = None

    # -- one trial ----------------------------------------------------------------------------------------------------

    def prepared(self, trial: Trial) -> nn.Module:
        """Return a calibrated model for a trial."""
        base = trial.base
        if self._base is None or self._base[0] != base.key:
            self._base = None  # one float copy at a time
            mapping = self.given if base.method == "as prepared" else None
            mapping = mapping or configuration(base, self.options, self.auto_alpha_args)
            made = prepare(self.model, mapping, self.args, example_kwarg_inputs=self.kwargs)
            if base.samples:
                self.calibrate(made, base.samples)
            self._base = (base.key, made)
        model = copy.deepcopy(self._base[1])
        if trial.floats or trial.dynamic:
            leave_out(model, dict.fromkeys(trial.floats, _WHY), trial.dynamic, _WHY)
        return model

    def attempt(self, trial: Trial) -> Result:
        """Return the result of a trial, from the file if it is there.

        Raises:
            OutOfTime: The time is up and there is a result already.
        """
        known = self.state.results.get(trial.key)
        if known is None:
            if self.results and self.expired():
                raise OutOfTime
            self.on_trial(trial)
            quantized = convert(self.prepared(trial), inplace=True)
            accuracy = self.evaluate(quantized)
            speedup = speedup_of(self.model, quantized, self.args, self.kwargs)
            known = self.state.results[trial.key] = (accuracy, speedup)
            self.state.save()
        result = Result(trial, *known, met=known[0] >= self.least)
        if all(other.trial != trial for other in self.results):
            self.results.append(result)
        return result

    # -- the order of trials ------------------------------------------------------------------------------------------

    def run(self, trials: Sequence[Trial]) -> Result:
        """Try the whole recipes, then leave layers out; return the best result."""
        try:
            if self.tuner is None:
                for trial in trials:
                    if self.attempt(trial).met and not self.thorough:
                        break
            else:
                assert self.state.baseline is not None
                for trial, enough in self.tuner(trials, self.state.baseline, self.least):
                    if enough(self.attempt(trial).accuracy) and not self.thorough:
                        break
            if not any(result.met for result in self.results):
                self._leave_layers_out()
        except OutOfTime:
            self.complete = False
        return self.best()

    def best(self) -> Result:
        """Return the fastest result with enough accuracy, or else the most accurate one."""
        met = [result for result in self.results if result.met]
        if met:
            return max(met, key=lambda it: it.speedup)
        return max(self.results, key=_accuracy)

    def _leave_layers_out(self) -> None:
        base = max(self.results, key=_accuracy).trial.base
        state = state_of(self.prepared(base))
        assert state is not None
        modules = dict(self.model.named_modules())
        static = list(state.plan.layers)
        layers = static or state.dynamic
        linears = [path for path in static if state.plan.layers[path].kind == "linear"]
        kinds: dict[str, list[str]] = {}
        for path in layers:
            kinds.setdefault(type(modules[path]).__name__, []).append(path)
        # By type: rows of their own for linear layers cost little, so that comes first.
        if linears:
            self.attempt(dataclasses.replace(base, dynamic=tuple(linears)))
        if len(kinds) > 1:
            for paths in kinds.values():
                self.attempt(dataclasses.replace(base, floats=tuple(paths)))
        if any(result.met for result in self.results) and not self.thorough:
            return
        order = sorted(layers, key=lambda path: -self._noise(base, layers, path))

        def milder(count: int) -> Trial:
            chosen = order[:count]
            rows = tuple(path for path in chosen if path in linears)
            rest = tuple(path for path in chosen if path not in linears)
            return dataclasses.replace(base, dynamic=rows, floats=rest)

        def without(count: int) -> Trial:
            rows = tuple(path for path in linears if path not in order[:count])
            return dataclasses.replace(base, dynamic=rows, floats=tuple(order[:count]))

        if not linears or not self._fewest(milder, len(order)):
            self._fewest(without, len(order) - 1)

    def _fewest(self, made: Callable[[int], Trial], most: int) -> bool:
        """Find the least number of layers that is enough, by doubling and halving; return whether there is one."""
        low, high = 0, 1
        while high <= most and not self.attempt(made(high)).met:
            low, high = high, min(2 * high, most) if high < most else most + 1
        if high > most:
            return False
        while high - low > 1:
            middle = (low + high) // 2
            if self.attempt(made(middle)).met:
                high = middle
            else:
                low = middle
        return True

    def _noise(self, base: Trial, layers: Sequence[str], path: str) -> float:
        """Return the squared error of the output when only one layer is quantized, from the file if it is there."""
        key = f"{base.key} {path}"
        if key not in self.state.noise:
            if self.expired():
                raise OutOfTime
            others = tuple(name for name in layers if name != path)
            self.on_trial(dataclasses.replace(base, floats=others))
            quantized = convert(self.prepared(dataclasses.replace(base, floats=others)), True)
            noise = 0.0
            with torch.no_grad():
                pairs = zip(self._outputs(self.model), self._outputs(quantized), strict=True)
                for expected, found in pairs:
                    noise += (expected - found).double().square().sum().item()
            self.state.noise[key] = noise if math.isfinite(noise) else 3e38
            self.state.save()
        return self.state.noise[key]

    def _outputs(self, model: nn.Module) -> list[torch.Tensor]:
        from ipex_quant.int8.dataflow import tensors_of

        return [t.float() for t in tensors_of(model(*self.args, **self.kwargs))]


def _accuracy(result: Result) -> float:
    return -math.inf if math.isnan(result.accuracy) else result.accuracy

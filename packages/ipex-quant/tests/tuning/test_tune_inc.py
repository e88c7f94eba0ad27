# SPDX-License-Identifier: Apache-2.0
"""`autotune` with the tuner of neural-compressor: what it is asked and told, and what happens where it is missing."""

from __future__ import annotations

import abc
import sys
import types
from typing import Any

import pytest
import torch
from torch import nn

from ipex_core.errors import MissingComponentError, OpArgumentError
from ipex_quant import autotune

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")


class BaseConfig(abc.ABC):
    """As in neural_compressor.common.base_config: what a subclass must have."""

    def __init__(self, white_list: Any = "*") -> None:
        self.white_list = white_list

    @classmethod
    @abc.abstractmethod
    def register_supported_configs(cls) -> None: ...

    @classmethod
    @abc.abstractmethod
    def get_config_set_for_tuning(cls) -> None: ...

    def expand(self) -> list[BaseConfig]:
        raise NotImplementedError


class TuningConfig:
    """As in neural_compressor.common.base_tuning."""

    def __init__(
        self,
        config_set: Any,
        sampler: Any = None,
        tolerable_loss: float = 0.01,
        max_trials: Any = 9,
    ) -> None:
        self.config_set, self.tolerable_loss, self.max_trials = (
            config_set,
            tolerable_loss,
            max_trials,
        )


class Monitor:
    """The monitor, which decides when to stop."""

    made: list[Monitor] = []

    def __init__(self, config: TuningConfig) -> None:
        self.config, self.told, self.baseline = config, [], 0.0
        Monitor.made.append(self)

    def set_baseline(self, baseline: float) -> None:
        self.baseline = baseline

    def add_trial_result(self, index: int, result: float, config: Any) -> None:
        self.told.append((index, result, config.to_dict()["ipex"]))

    def need_stop(self) -> bool:
        enough = self.baseline * (1 - self.config.tolerable_loss)
        return len(self.told) >= self.config.max_trials or self.told[-1][1] >= enough


def init_tuning(config: TuningConfig) -> Any:
    expanded = [it for one in config.config_set for it in one.expand()]
    return list(reversed(expanded)), None, Monitor(config)  # an order of its own


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    Monitor.made.clear()
    names = ("neural_compressor", "neural_compressor.common")
    for name in names:
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    tuning: Any = types.ModuleType("base_tuning")
    tuning.TuningConfig, tuning.init_tuning = TuningConfig, init_tuning
    config: Any = types.ModuleType("base_config")
    config.BaseConfig = BaseConfig
    monkeypatch.setitem(sys.modules, f"{names[1]}.base_tuning", tuning)
    monkeypatch.setitem(sys.modules, f"{names[1]}.base_config", config)


@pytest.fixture(autouse=True)
def speeds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ipex_quant.tuning.search.speedup_of", lambda *_: 2.0)


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4)).eval()


LOADER = [torch.randn(8, 16, generator=torch.Generator().manual_seed(1))]


@pytest.mark.parametrize("engine", [None, "neural_compressor"])
@pytest.mark.usefixtures("installed")
def test_its_order_and_its_stop(engine: str | None) -> None:
    tuned = autotune(model(), LOADER, engine=engine, accuracy_criterion={"absolute": 0.05})
    (monitor,) = Monitor.made
    assert monitor.baseline == 1.0 and monitor.config.tolerable_loss == pytest.approx(0.05)
    # The first in its order was accurate enough.
    assert [(row[0], row[2]) for row in monitor.told] == [(1, "dynamic")]
    assert monitor.told[0][1] == tuned.tuning.best.accuracy > 0.95
    assert tuned.tuning.best.trial.method == "dynamic"


@pytest.mark.usefixtures("installed")
def test_all_of_them_when_there_is_time() -> None:
    tuned = autotune(model(), LOADER, engine="neural_compressor", tuning_time=1000)
    (monitor,) = Monitor.made
    assert len(monitor.told) == monitor.config.max_trials == len(tuned.tuning.results) > 5


@pytest.mark.usefixtures("installed")
def test_own_search_if_wanted() -> None:
    tuned = autotune(model(), LOADER, engine="ipex")
    assert not Monitor.made and tuned.tuning.best.trial.method == "static"


def test_missing_and_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(OpArgumentError, match=r"engine must be one of .*, got inc"):
        autotune(model(), LOADER, engine="inc")
    monkeypatch.setitem(sys.modules, "neural_compressor", None)
    assert autotune(model(), LOADER).tuning.best.trial.method == "static"
    with pytest.raises(MissingComponentError, match="pip install neural-compressor-pt"):
        autotune(model(), LOADER, engine="neural_compressor")
    # Version 2 has no such tuner.
    old: Any = types.ModuleType("neural_compressor")
    old.__path__ = []
    monkeypatch.setitem(sys.modules, "neural_compressor", old)
    with pytest.raises(MissingComponentError, match="version 3"):
        autotune(model(), LOADER, engine="neural_compressor")

# SPDX-License-Identifier: Apache-2.0
"""`autotune`: what the search tries and chooses, that it goes on where it stopped, and bad input."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ipex_quant
from ipex_core import explain
from ipex_core.errors import OpArgumentError
from ipex_quant import (
    DynamicInt8Linear,
    Int8Linear,
    autotune,
    convert,
    default_static_qconfig_mapping,
    prepare,
)

Tensor = torch.Tensor


class Net(nn.Module):
    """A convolution and three linear layers, of which one gets an outlier and makes most of the error."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3)
        self.a, self.bad, self.c = nn.Linear(144, 32), nn.Linear(32, 32), nn.Linear(32, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(self.conv(x).flatten(1)).tanh()
        size = torch.ones(len(x), 1)
        size[0] = 100.0  # the first image only: rows of their own see nothing of it
        return self.c(self.bad(x * size).tanh())


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(0)
    return Net().eval()


def loader(count: int = 3) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(8, 1, 8, 8, generator=generator) for _ in range(count)]


@pytest.fixture(autouse=True)
def speeds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Timings that depend on nothing but the model: static INT8 is faster than dynamic, that than float."""

    def speedup(_: nn.Module, quantized: nn.Module, *__: Any) -> float:
        cost = {"DynamicInt8Linear": 0.5, "Int8Linear": 0.3, "Int8Conv": 0.3}
        kinds = [type(m).__name__ for m in quantized.modules()]
        costs = [cost.get(k, 1.0) for k in kinds if k in cost or k in ("Linear", "Conv2d")]
        return len(costs) / sum(costs) if costs else 1.0

    monkeypatch.setattr("ipex_quant.tuning.search.speedup_of", speedup)


def kinds_of(model: nn.Module) -> dict[str, str]:
    return {name: type(m).__name__ for name, m in model.named_children()}


def quality(model: nn.Module) -> Callable[[nn.Module], float]:
    """Accuracy as one minus the relative error of the output."""
    batches = loader()

    def evaluate(candidate: nn.Module) -> float:
        error = size = 0.0
        for x in batches:
            expected = model(x)
            error += (candidate(x) - expected).square().sum().item()
            size += expected.square().sum().item()
        return 1.0 - math.sqrt(error / size)

    return evaluate


def names(tuned: Any) -> list[str]:
    return [result.trial.name for result in tuned.tuning.results]


@torch.no_grad()
def test_first_that_is_enough(model: nn.Module) -> None:
    criterion = {"absolute": 0.9}
    tuned = autotune(model, loader(), eval_func=quality(model), accuracy_criterion=criterion)
    assert names(tuned) == ["static, 100 samples"]
    assert tuned.tuning.met and tuned.tuning.complete
    assert set(kinds_of(convert(tuned)).values()) == {"Int8Conv", "Int8Linear"}
    assert type(model.a) is nn.Linear and not model.a._forward_pre_hooks
    expected = prepare(model, default_static_qconfig_mapping, loader()[0])
    for x in loader():
        expected(x)
    assert torch.equal(convert(tuned)(x), convert(expected)(x))


@torch.no_grad()
def test_layers_are_left_out(model: nn.Module, tmp_path: Path) -> None:
    criterion = {"absolute": 0.03}
    smooth = {"alpha": 0.5}
    tuned = autotune(
        model,
        loader(),
        eval_func=quality(model),
        accuracy_criterion=criterion,
        tuning_time=1e6,
        smoothquant_args=smooth,
        state_file=tmp_path / "state.json",
        report=tmp_path / "report",
    )
    best = tuned.tuning.best
    assert best.met and not tuned.tuning.results[0].met
    assert best.trial.dynamic == ("bad",) and not best.trial.floats
    assert best.speedup == max(it.speedup for it in tuned.tuning.results if it.met)
    quantized = convert(tuned)
    kinds = {"conv": "Int8Conv", "a": "Int8Linear", "bad": "DynamicInt8Linear", "c": "Int8Linear"}
    assert kinds_of(quantized) == kinds
    assert quality(model)(quantized) == pytest.approx(best.accuracy)
    assert any(row.module == "bad" and row.done for row in explain(quantized).rows)
    data = json.loads((tmp_path / "report/tuning.json").read_text())
    assert data["met"] and data["best"]["configuration"]["dynamic"] == ["bad"]
    assert len(data["results"]) == len(tuned.tuning.results)
    table = (tmp_path / "report/tuning.txt").read_text()
    assert table == f"{tuned.tuning}\n" and "* smooth alpha 0.5, 100 samples, 1 dynamic" in table


@torch.no_grad()
@pytest.mark.parametrize(
    "order",
    [
        (None, [8], {"absolute": 10}),  # IPEX 2.2 to 2.6
        ({"alpha": 0.5}, [8], {"absolute": 10}),
        ([8], {"absolute": 10}),  # IPEX 2.7 and 2.8
        ([8], {"absolute": 10}, 1e-9),
    ],
)
def test_arguments_by_position(model: nn.Module, order: tuple[Any, ...]) -> None:
    tuned = autotune(model, loader(1), None, None, None, *order)
    name = "smooth alpha 0.5" if isinstance(order[0], dict) else "static"
    assert names(tuned) == [f"{name}, 8 samples"]
    tuned = autotune(model, loader(1), None, None, None, [8], accuracy_criterion={"absolute": 10})
    assert names(tuned) == ["static, 8 samples"]


@torch.no_grad()
def test_chart(model: nn.Module, tmp_path: Path, monkeypatch: Any, caplog: Any) -> None:
    options: dict[str, Any] = {"accuracy_criterion": {"absolute": 10}, "report": tmp_path}
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    autotune(model, loader(1), **options)
    assert "pip install 'ipex[plot]'" in caplog.text and not (tmp_path / "tuning.png").exists()
    monkeypatch.undo()
    pytest.importorskip("matplotlib")
    monkeypatch.setattr("ipex_quant.tuning.search.speedup_of", lambda *_: 2.0)
    autotune(model, loader(1), **options)
    assert (tmp_path / "tuning.png").read_bytes().startswith(b"\x89PNG")


@torch.no_grad()
def test_floats_and_reasons(model: nn.Module) -> None:
    """Without linear layers of other granularity only float is left."""
    convs = nn.Sequential(*(nn.Conv2d(1, 1, 3, padding=1) for _ in range(4))).eval()
    batches, wanted = loader(1), 0.9999

    def evaluate(candidate: nn.Module) -> float:
        kinds = [type(m).__name__ for m in candidate]
        return 1.0 - 0.01 * kinds.count("Int8Conv") if candidate is not convs else 1.0

    tuned = autotune(convs, batches, eval_func=evaluate, accuracy_criterion={"absolute": 0.021})
    quantized = convert(tuned)
    assert [type(m).__name__ for m in quantized].count("Int8Conv") == 2
    left = [row.text for row in explain(quantized).rows if not row.done]
    assert left == ["stays float: autotune: the accuracy was not enough with it"] * 2
    with pytest.warns(UserWarning, match=f"no configuration has an accuracy of {wanted:.5g}"):
        tuned = autotune(convs, batches, eval_func=evaluate, accuracy_criterion={"absolute": 1e-4})
    assert not tuned.tuning.met and "no configuration has it" in str(tuned.tuning)
    assert tuned.tuning.best.accuracy == max(it.accuracy for it in tuned.tuning.results)


@torch.no_grad()
def test_goes_on(model: nn.Module, tmp_path: Path) -> None:
    file = tmp_path / "state.json"
    calls = 0
    evaluate = quality(model)

    def counted(candidate: nn.Module) -> float:
        nonlocal calls
        calls += 1
        if calls == 4:
            raise KeyboardInterrupt
        return evaluate(candidate)

    options: dict[str, Any] = {"accuracy_criterion": {"absolute": 0.02}, "tuning_time": 1e6}
    with pytest.raises(KeyboardInterrupt):
        autotune(model, loader(1), eval_func=counted, state_file=file, **options)
    assert len(json.loads(file.read_text())["results"]) == 2
    resumed = autotune(model, loader(1), eval_func=counted, state_file=file, **options)
    trials = len(resumed.tuning.results)
    assert calls == 4 + trials - 2  # the two that were known, and the baseline, are not repeated
    again = autotune(model, loader(1), eval_func=counted, state_file=file, **options)
    assert calls == 4 + trials - 2
    fresh = autotune(model, loader(1), eval_func=evaluate, **options)
    assert again.tuning == resumed.tuning == fresh.tuning
    x = loader(1)[0]
    assert torch.equal(convert(again)(x), convert(fresh)(x))
    options["accuracy_criterion"] = {"relative": 0.02}
    with pytest.raises(OpArgumentError, match=r"must be of the same search, got .* criterion"):
        autotune(model, loader(1), eval_func=evaluate, state_file=file, **options)
    file.write_text(file.read_text()[:-20])
    with pytest.raises(OpArgumentError, match="state_file must be one that autotune wrote"):
        autotune(model, loader(1), eval_func=evaluate, state_file=file, **options)
    assert [path.name for path in tmp_path.iterdir()] == ["state.json"]


@torch.no_grad()
def test_time(model: nn.Module) -> None:
    now = 0.0

    def evaluate(candidate: nn.Module) -> float:
        nonlocal now
        now += 10
        return 0.5 if candidate is not model else 1.0

    for seconds, count in ((1e-9, 1), (15, 2), (25, 3)):
        with pytest.warns(UserWarning, match="no configuration"):
            tuned = autotune(
                model, loader(1), eval_func=evaluate, tuning_time=seconds, timer=lambda: now
            )
        assert len(tuned.tuning.results) == count and not tuned.tuning.complete
        assert "the time was up" in str(tuned.tuning)


@torch.no_grad()
def test_choices_of_types(model: nn.Module) -> None:
    everything = {"absolute": 10.0}
    types: dict[str, Any] = {
        "conv2d": {"activation": {"dtype": ["fp32"]}, "weight": {"dtype": ["fp32"]}},
        "linear": {
            "activation": {"scheme": ["sym"], "algo": ["minmax"]},
            "weight": {"granularity": ["per_tensor"]},
        },
        "add": {"weight": {"dtype": ["fp32"]}, "activation": {"dtype": ["fp32"]}},
    }
    tuned = autotune(model, loader(1), op_type_dict=types, accuracy_criterion=everything)
    quantized = convert(tuned)
    assert type(quantized.conv) is nn.Conv2d
    layer: Any = quantized.a
    assert layer.input.zero == 128 and layer.weight_scale.unique().numel() == 1
    prepared = prepare(model, ipex_quant.default_dynamic_qconfig_mapping)
    tuned = autotune(prepared, loader(1), accuracy_criterion=everything)
    assert names(tuned)[0].startswith("as prepared")
    assert isinstance(convert(tuned).a, DynamicInt8Linear)
    pairs = [(x, torch.zeros(8)) for x in loader(2)]
    tuned = autotune(model, pairs, sampling_sizes=[8], accuracy_criterion=everything)
    assert isinstance(convert(tuned).a, Int8Linear)
    seen = []
    autotune(model, pairs, lambda m: seen.append(m(pairs[0][0])), accuracy_criterion=everything)
    assert len(seen) == 1


def test_recurrent() -> None:
    model = nn.Sequential(nn.GRU(8, 8)).eval()
    tuned = autotune(model, [torch.randn(3, 2, 8)], sampling_sizes=2)
    assert names(tuned) == ["dynamic"] and tuned.tuning.met


def test_bad_input(model: nn.Module) -> None:
    def fails(text: str, *args: Any, **options: Any) -> None:
        with pytest.raises(OpArgumentError, match=text):
            autotune(*(args or (model, loader(1))), **options)

    with pytest.raises(TypeError, match=r"model must be a torch.nn.Module"):
        autotune("net", [])  # type: ignore[arg-type]
    fails("calib_dataloader must have at least one batch", model, [])
    fails("calib_dataloader must be iterable, got int", model, 3)
    fails("calib_dataloader must be iterable more than once, got list_iterator", model, iter([1]))
    fails("must yield batches that the model takes", model, [torch.ones(3)])
    fails("model must be in evaluation mode", Net(), loader(1))
    fails("model must have layers that can become INT8", nn.ReLU().eval(), loader(1))
    fails("eval_func must return a number, got str", eval_func=lambda _: "0.9")
    fails("eval_func must return a number, got NoneType", eval_func=lambda _: None)
    fails("eval_func must give a finite number", eval_func=lambda _: math.nan)
    fails("eval_func must be a function", eval_func=0.5)
    for loss in (-0.1, 1.0, math.nan, "1 %", True):
        fails(r"accuracy_criterion must have a loss in", accuracy_criterion={"relative": loss})
    fails("must have a finite loss", accuracy_criterion={"absolute": math.inf})
    for criterion in ({}, {"relatively": 0.1}, 0.01, {"relative": 0.1, "absolute": 1}):
        fails("accuracy_criterion must be {'relative'", accuracy_criterion=criterion)
    for seconds in (-1, math.nan, math.inf, "60"):
        fails("tuning_time must be a finite number", tuning_time=seconds)
    for sizes in ([], [0], [10.5], -3):
        fails("sampling_sizes must have positive", sampling_sizes=sizes)
    fails("op_type_dict must have types out of", op_type_dict={"lineal": {}})
    fails(
        "must have values out of minmax, kl", op_type_dict={"conv": {"activation": {"algo": "x"}}}
    )
    fails("smoothquant_args must have alpha", smoothquant_args={"beta": 1})
    fails("alpha must be in", smoothquant_args={"alpha": 2})


@torch.no_grad()
def test_nan_is_not_enough(model: nn.Module, tmp_path: Path) -> None:
    def evaluate(candidate: nn.Module) -> float:
        if any(isinstance(m, DynamicInt8Linear) for m in candidate.modules()):
            return 0.9
        return 1.0 if candidate is model else math.nan

    options: dict[str, Any] = {"accuracy_criterion": {"absolute": 0.2}, "report": tmp_path}
    tuned = autotune(model, loader(1), eval_func=evaluate, state_file=tmp_path / "s", **options)
    assert tuned.tuning.met and math.isnan(tuned.tuning.results[0].accuracy)
    again = autotune(model, loader(1), eval_func=evaluate, state_file=tmp_path / "s", **options)
    assert names(again) == names(tuned)
    assert json.loads((tmp_path / "tuning.json").read_text())["results"][0]["accuracy"] is None

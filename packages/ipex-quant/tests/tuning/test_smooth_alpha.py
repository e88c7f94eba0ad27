# SPDX-License-Identifier: Apache-2.0
"""SmoothQuant's search of alpha: what is tried, for single layers and for blocks."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ipex_core.errors import OpArgumentError
from ipex_quant import Int8Linear, autotune, convert, get_smooth_quant_qconfig_mapping, prepare
from ipex_quant.qconfig.static import AutoAlpha

Tensor = torch.Tensor


class Block(nn.Module):
    """Two layers that read one activation, and one that reads their product."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(24, 24) for _ in range(3))

    def forward(self, x: Tensor, *, scale: float = 1.0) -> Tensor:
        return x + self.c(self.a(x).tanh() * self.b(x)) * scale


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(24, 4)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x, scale=0.5)
        return self.head(x)


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(0)
    return Model().eval()


def data() -> Tensor:
    x = torch.randn(64, 24, generator=torch.Generator().manual_seed(1))
    x[:, 3] *= 30  # channels that make the scale large
    x[:, 7] *= 8
    return x


def prepared_with(model: nn.Module, **options: Any) -> Any:
    mapping = get_smooth_quant_qconfig_mapping(**options)
    prepared = prepare(model, mapping, data())
    prepared(data())
    return prepared


def factors(model: nn.Module) -> dict[str, Tensor]:
    return {
        name: module.smooth
        for name, module in model.named_modules()
        if isinstance(module, Int8Linear) and module.smooth is not None
    }


@torch.no_grad()
def test_alpha_of_blocks(model: nn.Module, tmp_path: Path) -> None:
    """The one alpha of a block is that with the least error of the block's output, among all that are tried."""
    auto = {"alpha_step": 0.25, "enable_blockwise_loss": True}
    prepared = prepared_with(model, alpha="auto", auto_alpha_args=auto)
    found = factors(convert(prepared))
    assert set(found) == {"head", *(f"blocks.{i}.{n}" for i in (0, 1) for n in "abc")}
    expected = model.blocks[0](data(), scale=0.5)
    errors = {}
    for alpha in (0.0, 0.25, 0.5, 0.75, 1.0):
        one = convert(prepared_with(model, alpha={"blocks.0.*": alpha}))
        error = (one.blocks[0](data(), scale=0.5) - expected).square().sum().item()
        errors[alpha] = (error, factors(one))
    ordered = sorted(errors, key=lambda alpha: errors[alpha][0])
    assert errors[ordered[-1]][0] > 1.5 * errors[ordered[0]][0]  # a choice that matters
    same = [
        alpha
        for alpha, (_, made) in errors.items()
        if all(torch.equal(made[f"blocks.0.{n}"], found[f"blocks.0.{n}"]) for n in "abc")
    ]
    assert same == ordered[:1]
    # Asking for the scales does not change them, nor what was observed.
    prepared.save_qconf_summary(tmp_path / "scales.json")
    again = factors(convert(copy.deepcopy(prepared)))
    assert all(torch.equal(again[name], found[name]) for name in found)
    assert not any(m._forward_pre_hooks for m in convert(prepared).modules())


@torch.no_grad()
def test_grid_and_criterion(model: nn.Module) -> None:
    assert AutoAlpha().grid() == [0.5, 0.0, 0.1, 0.2, 0.3, 0.4, 0.6, 0.7, 0.8, 0.9, 1.0]
    assert AutoAlpha(0.8, 0.8, 0.99, 0.01).grid()[-1] == 0.99
    assert AutoAlpha(0.3, 0.7, 0.7).grid() == [0.3, 0.7]
    made: dict[str, Tensor] = {}
    for criterion in ("mean", "min", "max"):
        auto = {"shared_criterion": criterion, "alpha_step": 0.05}
        changed = copy.deepcopy(model)
        changed.blocks[0].b.weight[:, 3] *= 20  # its best alpha is another than that of a
        quantized = convert(prepared_with(changed, alpha="auto", auto_alpha_args=auto))
        made[criterion] = factors(quantized)["blocks.0.a"]
    # The channel with the largest activation is multiplied by less, the larger alpha is.
    ratio = {key: (factor[3] / factor[5]).item() for key, factor in made.items()}
    assert ratio["max"] < ratio["min"]
    assert ratio["max"] <= ratio["mean"] <= ratio["min"]
    fixed = {"alpha_min": 0.7, "alpha_max": 0.7, "init_alpha": 0.7}
    one = factors(convert(prepared_with(model, alpha="auto", auto_alpha_args=fixed)))
    same = factors(convert(prepared_with(model, alpha=0.7)))
    assert all(torch.equal(one[name], same[name]) for name in same)


@torch.no_grad()
def test_autotune_passes_it_on(model: nn.Module) -> None:
    auto = {"alpha_step": 0.5, "enable_blockwise_loss": True}
    options: dict[str, Any] = {"smoothquant_args": {"alpha": "auto", "auto_alpha_args": auto}}
    tuned = autotune(model, [data()], accuracy_criterion={"absolute": 0.1}, **options)
    assert [it.trial.method for it in tuned.tuning.results] == ["smooth"]
    expected = factors(convert(prepared_with(model, alpha="auto", auto_alpha_args=auto)))
    found = factors(convert(tuned))
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_bad_arguments() -> None:
    for given, text in (
        (0.5, "auto_alpha_args must be a dict, got float"),
        ({"alpha": 1}, "auto_alpha_args must have init_alpha, .* got .'alpha'"),
        ({"alpha_max": 1.5}, r"auto_alpha_args.'alpha_max'. must be in \[0, 1\], got 1.5"),
        ({"alpha_min": 0.9, "alpha_max": 0.1}, "must have alpha_min <= alpha_max"),
        ({"alpha_step": 0}, "a positive alpha_step"),
        ({"shared_criterion": "median"}, "must be mean, min or max, got median"),
        ({"enable_blockwise_loss": 1}, "must be a bool"),
    ):
        with pytest.raises(OpArgumentError, match=text):
            get_smooth_quant_qconfig_mapping(alpha="auto", auto_alpha_args=given)  # type: ignore[arg-type]

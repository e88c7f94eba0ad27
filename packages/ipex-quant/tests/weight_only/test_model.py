# SPDX-License-Identifier: Apache-2.0
"""Quantizing all linear layers of a model in place."""

from __future__ import annotations

import gc
import logging
from typing import Any

import pytest
import torch
from torch import nn

from ipex_core.errors import OpArgumentError
from ipex_quant import (
    WeightOnlyQuantizedLinear,
    WoqWeightDtype,
    get_weight_only_quant_qconfig_mapping,
    quantize_linears,
    woq_qconfig,
)
from ipex_quant.weight.primitives import quantize_in_parts

INT4 = woq_qconfig(weight_dtype=WoqWeightDtype.INT4, group_size=16)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(32, 48)
        self.down = nn.Linear(48, 32, bias=False)
        self.router = nn.Linear(32, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(x).relu())


class Own(nn.Linear):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input) * 2


class OtherWords(nn.Linear):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        hidden = input @ self.weight.T
        return hidden if self.bias is None else hidden + self.bias


def model() -> Any:
    torch.manual_seed(0)
    return nn.ModuleDict({"a": Block(), "b": Block(), "own": Own(32, 32), "lm_head": Own(32, 8)})


def test_all() -> None:
    m = model()
    names = quantize_linears(m, INT4)
    assert names == ("a.up", "a.down", "a.router", "b.up", "b.down", "b.router")
    for name in names:
        assert type(m.get_submodule(name)) is WeightOnlyQuantizedLinear
    assert type(m["own"]) is Own  # its forward is not that of a linear layer
    x = torch.randn(2, 32)
    assert m["a"](x).shape == (2, 32)
    assert quantize_linears(m, INT4) == ()


def test_linear_layers_in_other_words() -> None:
    m: Any = nn.ModuleDict({"a": OtherWords(32, 32), "hooked": OtherWords(32, 32)})
    m["hooked"].register_forward_hook(lambda *_: None)
    before = torch.get_rng_state()
    assert quantize_linears(m, INT4) == ("a",)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_mapping_works_too() -> None:
    m = model()
    quantize_linears(m, get_weight_only_quant_qconfig_mapping())
    assert m["a"].up.dtype is WoqWeightDtype.INT8
    with pytest.raises(OpArgumentError, match="qconfig must be a QConfigWoq"):
        quantize_linears(m, "int8")


@pytest.mark.parametrize(
    ("skip", "left"),
    [
        (["router"], {"a.router", "b.router"}),
        (["a"], {"a.up", "a.down", "a.router"}),
        (["b.up", "*.down"], {"b.up", "a.down", "b.down"}),
    ],
)
def test_skip(skip: list[str], left: set[str]) -> None:
    m = model()
    names = quantize_linears(m, INT4, modules_to_skip=skip)
    linears = {n for n, x in m.named_modules() if type(x) is nn.Linear}
    assert linears == left
    assert not left & set(names)


def test_skip_by_the_end_of_the_name_of_a_module_around() -> None:
    m = nn.Sequential(model(), model())
    names = quantize_linears(m, INT4, modules_to_skip=["b"])
    assert names and all(".a." in name for name in names)
    with pytest.raises(TypeError, match="modules_to_skip must be a list of texts, got 'b'"):
        quantize_linears(m, INT4, modules_to_skip="b")


def test_skip_that_matches_nothing_is_told(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "ipex"):
        quantize_linears(model(), INT4, modules_to_skip=["routr"])
    assert "no linear layer matches 'routr'" in caplog.text


def test_shared_layers_stay_shared() -> None:
    m = model()
    m["b"].up = m["a"].up
    names = quantize_linears(m, INT4)
    assert {"a.up", "b.up"} <= set(names)
    assert m["a"].up is m["b"].up


def test_tied_embedding_survives() -> None:
    m = nn.ModuleDict({"embed": nn.Embedding(64, 32), "head": nn.Linear(32, 64, bias=False)})
    m["head"].weight = m["embed"].weight
    before = m["embed"].weight.detach().clone()
    quantize_linears(m, INT4)
    assert torch.equal(m["embed"].weight, before)


def test_progress() -> None:
    calls: list[tuple[int, int, str]] = []
    quantize_linears(model(), INT4, progress=lambda *args: calls.append(args))
    assert [c[:2] for c in calls] == [(i, 6) for i in range(1, 7)]
    assert calls[-1][2] == "b.router"


def test_nothing_changes_if_a_group_does_not_fit() -> None:
    m = model()
    with pytest.raises(OpArgumentError, match=r"group_size must be -1 or at least 16 for a.up"):
        quantize_linears(m, woq_qconfig(group_size=4))
    assert type(m["a"].up) is nn.Linear and m["a"].up.weight.numel()


def test_error_names_the_layer() -> None:
    m = model()
    with torch.no_grad():
        m["b"].down.weight[0, 0] = float("nan")
    with pytest.raises(OpArgumentError, match=r"b.down: .*weight must be finite"):
        quantize_linears(m, INT4)
    assert not hasattr(m["b"].down, "qconfig")


def test_a_linear_layer_alone() -> None:
    with pytest.raises(OpArgumentError, match="model must contain linear layers"):
        quantize_linears(nn.Linear(4, 4), INT4)


def test_meta_then_load() -> None:
    m = model()
    quantize_linears(m, INT4)
    with torch.device("meta"):
        empty = model()
    quantize_linears(empty, INT4)
    assert empty["a"].up.packed_weight is None
    empty.load_state_dict(m.state_dict(), assign=True)
    x = torch.randn(2, 32)
    assert torch.equal(empty["a"](x), m["a"](x))


def test_conv1d() -> None:
    utils = pytest.importorskip("transformers.pytorch_utils")
    conv = utils.Conv1D(24, 32)
    nn.init.normal_(conv.bias)
    m: Any = nn.Sequential(conv)
    x = torch.randn(2, 32)
    wanted = conv(x)
    quantize_linears(m, woq_qconfig())
    assert (m[0].in_features, m[0].out_features) == (32, 24)
    torch.testing.assert_close(m[0](x), wanted, rtol=0.02, atol=0.02)
    assert conv.weight.numel() == 0


def test_originals_are_freed_one_by_one() -> None:
    """While layer i is quantized, the float weights of the layers before it are gone."""
    m = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
    originals = list(m)
    seen: list[int] = []

    def watch(done: int, total: int, name: str) -> None:
        gc.collect()
        seen.append(sum(layer.weight.numel() for layer in originals))

    quantize_linears(m, INT4, progress=watch)
    assert seen == [3 * 4096, 2 * 4096, 4096, 0]


def test_scale_dtype() -> None:
    m: Any = nn.Sequential(nn.Linear(64, 32))
    weight = m[0].weight.detach().clone()
    quantize_linears(m, INT4, scale_dtype=torch.bfloat16)
    found = m[0].quantized_weight()
    codes, scales, _ = quantize_in_parts(weight, "int4", 16, False, torch.bfloat16)
    assert torch.equal(found.scales, scales) and torch.equal(found.codes, codes)

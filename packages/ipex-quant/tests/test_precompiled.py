# SPDX-License-Identifier: Apache-2.0
"""Quantized models as programs: the same numbers, also after a file."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import ipex_core
import ipex_quant as quantization
from ipex_core.precompiled.lower import Run


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16)
        self.second = nn.Conv2d(16, 16, 3, padding=1)
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.first(x)).relu()
        y = (self.second(y) + y).relu()
        return self.down(self.up(y.mean((2, 3))).relu())


@pytest.mark.parametrize("kind", ["static", "dynamic"])
def test_int8_models(kind: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 3, 16, 16)
    mapping = getattr(quantization, f"default_{kind}_qconfig_mapping")
    prepared = quantization.prepare(Net().eval(), mapping, example_inputs=x)
    with torch.no_grad():
        for _ in range(3):
            prepared(torch.randn(2, 3, 16, 16))
        model = quantization.convert(prepared)
        want = model(x)
    fast = ipex_core.precompile(model, x)
    torch.testing.assert_close(fast(x), want, rtol=1e-4, atol=1e-5)
    again = ipex_core.load_precompiled(fast.save(tmp_path / "model.safetensors"))
    assert torch.equal(again(x), fast(x))
    if kind == "static":
        ops = [
            one.op
            for step in fast._parts.plan.steps
            if isinstance(step, Run)
            for one in step.program.instructions
        ]
        # The second one reads the codes that it adds as its input, too: they are not overwritten.
        assert [op for op in ops if "conv" in op] == ["int8_conv", "int8_conv"]


class Chain(nn.Module):
    """Some of the codes that are added are not read afterwards."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Conv2d(8, 8, 3, padding=1) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        a = self.layers[0](x).relu()
        b = self.layers[1](a).relu()
        c = (self.layers[2](b) + a).relu()
        return (self.layers[3](c) + b).relu().mean((2, 3))


@pytest.mark.parametrize("options", [None, {"ipex.program": True}])
def test_int8_networks_compile_to_programs(options: dict[str, bool] | None) -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 8, 12, 12)
    mapping = quantization.default_static_qconfig_mapping
    prepared = quantization.prepare(Chain().eval(), mapping, example_inputs=x)
    with torch.no_grad():
        prepared(x)
        model = quantization.convert(prepared)
        torch.compiler.reset()
        fast, want = torch.compile(model, backend="ipex", options=options), model(x)
        for _ in range(3):
            assert torch.equal(fast(x), want)
        again = ipex_core.precompile(model, x)
        for _ in range(2):
            assert torch.equal(again(x), want)
        assert "int8_conv_sum_" in str(
            [s.program.instructions for s in again._parts.plan.steps if isinstance(s, Run)]
        )
    (graph,) = ipex_core.explain(fast).graphs
    assert any(note.startswith("a program of") for note in graph.notes)
    torch.compiler.reset()


def test_weight_only_models(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)).eval()
    mapping = quantization.get_weight_only_quant_qconfig_mapping(
        weight_dtype=quantization.WoqWeightDtype.INT4, group_size=32
    )
    quantized = quantization.convert(quantization.prepare(model, mapping))
    x = torch.randn(4, 64)
    with torch.no_grad():
        want = quantized(x)
    fast = ipex_core.precompile(quantized, x)
    torch.testing.assert_close(fast(x), want, rtol=1e-4, atol=1e-5)
    target = fast.save(tmp_path / "model.safetensors")
    assert target.stat().st_size < 2 * 64 * 256  # four bits for a weight
    assert torch.equal(ipex_core.load_precompiled(target)(x), fast(x))

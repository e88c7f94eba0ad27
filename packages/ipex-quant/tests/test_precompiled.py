# SPDX-License-Identifier: Apache-2.0
"""Quantized models as programs: the same numbers, also after a file."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import ipex_core
import ipex_quant as quantization


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

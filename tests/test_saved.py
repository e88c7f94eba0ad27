# SPDX-License-Identifier: Apache-2.0
"""What version 0.1 wrote is read by this one: folders, state dicts, and pickles of whole models.

``tests/data/saved_0_1`` was written before the modules moved; ``results.json`` has what the models gave then.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

ipex = pytest.importorskip("ipex")
quantization = pytest.importorskip("ipex_quant")

DATA = Path(__file__).parent / "data" / "saved_0_1"
RESULTS = json.loads((DATA / "results.json").read_text(encoding="utf-8"))
X = torch.linspace(-1, 1, 64).reshape(2, 32)
IMAGE = torch.linspace(-1, 1, 3 * 8 * 8).reshape(1, 3, 8, 8)


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, 8)).eval()


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bn = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.fc, self.pool = nn.Linear(8, 4), nn.AdaptiveAvgPool2d(1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.relu(self.bn(self.conv(x)))
        return self.fc(self.pool(y).flatten(1))


def check(found: torch.Tensor, name: str, rtol: float = 1e-4) -> None:
    torch.testing.assert_close(found.float(), torch.tensor(RESULTS[name]), rtol=rtol, atol=1e-5)


def read(name: str) -> Any:
    # Files of this repository: whole models are pickles, which run code when they are read.
    return torch.load(DATA / name, weights_only=False)


def test_folder_of_a_weight_only_model() -> None:
    check(quantization.load(DATA / "weight_only", model=net())(X), "weight_only")


def test_folder_of_an_int8_model() -> None:
    # Rounding to 8 bits may go the other way on other processors: one step of the output.
    check(quantization.load(DATA / "int8", model=Small().eval())(IMAGE), "int8", rtol=0.02)


def test_folder_of_a_language_model() -> None:
    transformers = pytest.importorskip("transformers")
    model = quantization.load(DATA / "llama_int4")
    assert isinstance(model, transformers.LlamaForCausalLM)
    check(model(torch.arange(3, 9)[None]).logits[0, -1], "llama_int4")


def test_state_dict_of_a_weight_only_model() -> None:
    model = net()
    quantization.quantize_linears(model, quantization.woq_qconfig(weight_dtype=2, group_size=16))
    model.load_state_dict(torch.load(DATA / "weight_only_state.pt", weights_only=True))
    check(model(X), "weight_only")


def test_state_dict_of_an_optimized_model() -> None:
    state = torch.load(DATA / "optimized_state.pt", weights_only=True)
    model = net()
    model.load_state_dict(state)
    check(ipex.optimize(model)(X), "optimized")


def test_checkpoint_of_training() -> None:
    saved = torch.load(DATA / "training.pt", weights_only=True)
    model = net().train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model, optimizer = ipex.optimize(model, optimizer=optimizer, dtype=torch.bfloat16)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value.float(), torch.tensor(RESULTS["training"][name]))
    with torch.autocast("cpu", torch.bfloat16):
        model(X).float().sum().backward()
    optimizer.step()


@pytest.mark.parametrize("name", ["weight_only", "optimized"])
def test_pickle_of_a_model(name: str) -> None:
    check(read(f"{name}_model.pt")(X), name)


def test_restore_of_a_pickle() -> None:
    model = ipex.restore(read("optimized_model.pt"))
    check(model(X), "optimized")
    training, _ = read("training_objects.pt")
    assert any(p.dtype == torch.bfloat16 for p in training.parameters())
    training = ipex.restore(training)
    for name, value in training.named_parameters():
        torch.testing.assert_close(value.detach(), torch.tensor(RESULTS["training"][name]))
    kept = {name for top in (model, training) for m in top.modules() for name in m.__dict__}
    assert not any(name.startswith("_ipex") for name in kept)


def test_pickle_of_a_model_and_its_optimizer() -> None:
    model, optimizer = read("training_objects.pt")
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value.float(), torch.tensor(RESULTS["training"][name]))
    with torch.autocast("cpu", torch.bfloat16):
        model(X).float().sum().backward()
    optimizer.step()
    assert not torch.equal(
        model.state_dict()["0.bias"], torch.tensor(RESULTS["training"]["0.bias"])
    )

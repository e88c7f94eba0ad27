# SPDX-License-Identifier: Apache-2.0
"""AWQ: scales are folded where that changes nothing, and make the change by rounding smaller."""

from __future__ import annotations

import copy
import logging
import re
from typing import Any

import pytest
import torch
from torch import nn

from ipex_core.errors import OpArgumentError
from ipex_quant import WeightOnlyQuantizedLinear, awq, load, save


class Norm(nn.Module):
    """An RMS norm whose weight is w, or 1 + w."""

    def __init__(self, size: int, shifted: bool) -> None:
        super().__init__()
        self.weight, self.shifted = (
            nn.Parameter(torch.zeros(size) if shifted else torch.ones(size)),
            shifted,
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
        return y * (1 + self.weight if self.shifted else self.weight)


class Layer(nn.Module):
    """A feed-forward part: with a gate scales fold into ``up``; ``after`` adds what the norm gives, as BERT does."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.norm = nn.LayerNorm(64) if kind == "layer" else Norm(64, kind == "shifted")
        self.gate, self.up, self.down = nn.Linear(64, 96), nn.Linear(64, 96), nn.Linear(96, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        z = self.down(torch.relu(self.gate(y)) * self.up(y))
        return y + z if self.kind == "after" else x + z  # type: ignore[no-any-return]


class Net(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 64)
        self.layers = nn.ModuleList(Layer(kind) for _ in range(2))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return x  # type: ignore[no-any-return]


def make(kind: str = "plain") -> Net:
    """Return a model with a few features that are much larger than the others."""
    torch.manual_seed(0)
    model = Net(kind).eval()
    large = torch.ones(64)
    large[:4] = 30
    with torch.no_grad():
        for layer in model.layers:
            layer.norm.weight.copy_(large - 1 if kind == "shifted" else large)
            layer.up.weight[:3] *= 20
    return model


IDS = torch.randint(0, 50, (4, 16), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("kind", ["plain", "shifted", "layer", "after"])
@torch.no_grad()
def test_scales(kind: str, caplog: Any) -> None:
    model, plain = make(kind), make(kind)
    expected = make(kind)(IDS)
    # With one power there is one scale, which is 1: rounding to nearest.
    assert awq(plain, [IDS], group_size=32, n_grid=1) is plain
    caplog.clear()
    with caplog.at_level(logging.INFO, "ipex"):
        awq(model, [IDS], group_size=32)
    assert all(
        type(getattr(model.layers[0], n)) is WeightOnlyQuantizedLinear
        for n in ("gate", "up", "down")
    )
    found = [float(v) for v in re.findall(r"outputs (\S+) of that without", caplog.text)]
    assert len(found) == (2 if kind == "after" else 4) and max(found) <= 1 and min(found) < 0.7
    assert caplog.text.count("nothing to fold") == (2 if kind == "after" else 0)
    errors = [float((m(IDS) - expected).norm()) for m in (model, plain)]
    assert errors[0] < errors[1]


@torch.no_grad()
def test_skipped_layers_follow_the_scales() -> None:
    """A layer that stays in floats sees scaled inputs too."""
    model = make()
    stock = copy.deepcopy(model)
    awq(model, [IDS], group_size=32, modules_to_skip=["gate"], wbits=8)
    assert type(model.layers[0].gate) is nn.Linear
    assert not torch.equal(model.layers[0].gate.weight, stock.layers[0].gate.weight)
    torch.testing.assert_close(model(IDS), stock(IDS), rtol=0.05, atol=0.3)


@torch.no_grad()
def test_saved_and_loaded(tmp_path: Any) -> None:
    model = awq(make(), [IDS], group_size=32)
    save(model, tmp_path / "m")
    assert torch.equal(load(tmp_path / "m", make())(IDS), model(IDS))


@torch.no_grad()
def test_transformers_models() -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "vocab_size": 64,
    }
    for dtype in (torch.float32, torch.bfloat16):
        config = transformers.LlamaConfig(**sizes, num_key_value_heads=4)
        model = transformers.LlamaForCausalLM(config).eval().to(dtype)
        with torch.no_grad():
            for layer in model.model.layers:
                layer.input_layernorm.weight[:3] = 30
        before = [layer.input_layernorm.weight.clone() for layer in model.model.layers]
        ids = IDS.clamp(max=63)
        expected = model(ids).logits
        awq(model, [{"input_ids": ids}], group_size=32)
        assert not torch.equal(model.model.layers[0].input_layernorm.weight, before[0])
        cosine = torch.nn.functional.cosine_similarity(model(ids).logits, expected, dim=-1)
        assert float(cosine.mean()) > 0.97


def test_bad_input() -> None:
    def fails(message: str, model: Any = None, loader: Any = None, **options: Any) -> None:
        with pytest.raises(OpArgumentError, match=message):
            awq(model or make(), [IDS] if loader is None else loader, **options)

    fails("awq: dataloader must have samples, got none", loader=[])
    fails("awq: n_grid must be positive, got 0", n_grid=0)
    fails("awq: wbits must be one of", wbits=1)
    fails("awq: model must have linear layers", nn.Embedding(3, 4))
    model = make()
    model.embed.weight.data[:] = float("inf")
    fails("dataloader must give finite activations, got NaN or infinity", model)

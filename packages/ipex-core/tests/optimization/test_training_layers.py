# SPDX-License-Identifier: Apache-2.0
"""`optimize` with an optimizer: which layers get weights in 16 bits, and how those beside them go on."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from ipex_core import explain, optimize, restore

Tensor = torch.Tensor


def test_embeddings_and_what_stays() -> None:
    class Text(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(20, 8)
            self.sparse = nn.Embedding(20, 8, sparse=True)
            self.frozen = nn.Linear(8, 8)
            self.out = nn.Linear(8, 20)
            self.out.weight = self.table.weight

        def forward(self, ids: Tensor) -> Tensor:
            return self.out(self.frozen(self.table(ids).float() + self.sparse(ids)))

    model = Text().train()
    parameters = [model.table.weight, model.sparse.weight, model.out.bias]
    sgd = torch.optim.SGD(parameters, lr=0.5)
    fast, optimizer = optimize(model, optimizer=sgd, dtype=torch.bfloat16)
    assert fast.table.weight is fast.out.weight and fast.table.weight.dtype == torch.bfloat16
    assert fast.sparse.weight.dtype == fast.frozen.weight.dtype == torch.float32
    texts = {r.module: r.text for r in explain(fast).rows if r.step == "master weights"}
    assert "sparse gradients" in texts["sparse"] and "does not have" in texts["frozen"]
    ids = torch.randint(0, 20, (4, 5))
    losses = []
    for _ in range(20):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(fast(ids).float().flatten(0, 1), ids.flatten())
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0]


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 3)
        self.lstm, self.gru = nn.LSTM(8, 4, bidirectional=True), nn.GRU(8, 8)
        self.cell, self.both = nn.GRUCell(8, 8), nn.Bilinear(3, 3, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = self.gru(self.first(self.lstm(self.first(x))[0]))[0]
        y = self.last(self.cell(self.first(h[0])))
        return self.both(y, y)


class Attention(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 16), nn.Linear(16, 2)
        self.attention = nn.MultiheadAttention(16, 4, **options)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        return self.last(self.attention(h, h, h)[0])


def frozen(kind: Any, *args: Any) -> nn.Module:
    layer: nn.Module = kind(*args).requires_grad_(False)
    return layer


MODELS: dict[str, Any] = {
    "frozen_linear": lambda: nn.Sequential(nn.Linear(8, 8), nn.ReLU(), frozen(nn.Linear, 8, 3)),
    "frozen_conv": lambda: nn.Sequential(
        nn.Conv1d(4, 6, 3), nn.BatchNorm1d(6), frozen(nn.Conv1d, 6, 2, 1)
    ),
    "frozen_projection": lambda: _frozen_projection(),
    "recurrent": Recurrent,
    "attention": Attention,
    "attention_with_parts": lambda: Attention(kdim=16, vdim=16, add_bias_kv=True),
    "encoder": lambda: nn.Sequential(
        nn.Linear(8, 16), nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0), nn.Linear(16, 3)
    ),
    "computed": lambda: nn.Sequential(
        nn.Linear(8, 8), nn.utils.parametrizations.weight_norm(nn.Linear(8, 8)), nn.PReLU()
    ),
    "norms": lambda: nn.Sequential(
        nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8), nn.GroupNorm(2, 4)
    ),
}


def _frozen_projection() -> nn.Module:
    model = Attention()
    model.attention.out_proj.requires_grad_(False)
    return model


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", MODELS)
def test_layers_follow_stock_ones_with_and_without_autocast(name: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model, x = MODELS[name](), torch.randn(5, 4, 8)
    adam = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    losses = []
    for amp in (None, False, True):
        pair = copy.deepcopy((model, adam))
        if amp is not None:
            pair = optimize(pair[0], optimizer=pair[1], dtype=dtype)
        loss = torch.zeros(())
        for _ in range(4):
            pair[1].zero_grad()
            with torch.autocast("cpu", dtype=dtype, enabled=bool(amp)):
                loss = pair[0](x).float().square().mean()
            loss.backward()
            pair[1].step()
        losses.append(loss.detach())
        want = {k: v.shape for k, v in model.state_dict().items()}
        saved = pair[0].state_dict()
        assert {k: v.shape for k, v in saved.items()} == want
        assert all(v.dtype == torch.float32 for v in saved.values() if v.is_floating_point())
    torch.testing.assert_close(losses[1], losses[0], rtol=0.05, atol=1e-3)
    torch.testing.assert_close(losses[2], losses[0], rtol=0.05, atol=1e-3)
    back = restore(pair[0])
    assert not any(m._forward_pre_hooks for m in back.modules())
    assert all(p.dtype == torch.float32 for p in back.parameters())


def test_parameters_added_later_stay_in_float32() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))
    adam = torch.optim.Adam(model[0].parameters(), lr=0.1)
    fast, optimizer = optimize(model, optimizer=adam, dtype=torch.bfloat16)
    optimizer.add_param_group({"params": list(fast[2].parameters()), "lr": 0.5})
    before = fast[2].weight.detach().clone()
    fast(torch.randn(3, 8)).sum().backward()
    optimizer.step()
    assert fast[2].weight.dtype == torch.float32 and not torch.equal(fast[2].weight, before)


def test_a_parameter_shared_with_a_layer_that_stays_stays() -> None:
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(11, 8, max_norm=1.0)
            self.out = nn.Linear(8, 11, bias=False)
            self.out.weight = self.table.weight

        def forward(self, ids: Tensor) -> Tensor:
            return self.out(self.table(ids))

    model = Shared()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    fast, _ = optimize(model, optimizer=sgd, dtype=torch.bfloat16)
    assert fast.out.weight is fast.table.weight and fast.out.weight.dtype == torch.float32
    texts = {r.module: r.text for r in explain(fast).rows if r.step == "master weights"}
    assert "shares a parameter" in texts["out"]


def test_parameters_that_a_container_holds_as_well_are_cast() -> None:
    class Head(nn.Module):  # as in BERT of transformers
        def __init__(self) -> None:
            super().__init__()
            self.table, self.out = nn.Embedding(11, 8), nn.Linear(8, 11)
            self.out.weight, self.bias = self.table.weight, self.out.bias

        def forward(self, ids: Tensor) -> Tensor:
            return self.out(self.table(ids))

    model = Head()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    fast, _ = optimize(model, optimizer=sgd, dtype=torch.bfloat16)
    assert fast.out.weight.dtype == fast.bias.dtype == torch.bfloat16
    assert fast(torch.arange(3)).dtype == torch.bfloat16
    saved = fast.state_dict()
    assert all(v.dtype == torch.float32 for v in saved.values())
    assert torch.equal(saved["bias"], saved["out.bias"])
    fast.load_state_dict({k: v + 1 for k, v in saved.items()})
    assert all(torch.equal(v, saved[k] + 1) for k, v in fast.state_dict().items())
    assert all(p.dtype == torch.float32 for p in restore(fast).parameters())


def test_tied_weights_are_one_tensor_in_state_dicts() -> None:
    table, out = nn.Embedding(11, 8), nn.Linear(8, 11, bias=False)
    out.weight = table.weight
    model = nn.Sequential(table, out)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    fast, optimizer = optimize(model, optimizer=sgd, dtype=torch.bfloat16)
    kept: dict[str, Tensor] = nn.ParameterDict().state_dict()  # an ordinary state dict, empty
    for _ in range(2):
        fast(torch.arange(5)).sum().backward()
        optimizer.step()
        saved = fast.state_dict()
        assert saved["0.weight"].data_ptr() == saved["1.weight"].data_ptr()
        assert saved["0.weight"].dtype == torch.float32
        # Asked again, into the same: new values.
        assert torch.equal(fast.state_dict(destination=kept)["0.weight"], saved["0.weight"])

# SPDX-License-Identifier: Apache-2.0
"""`optimize(inplace=True)` on what it has to be careful with: shared parameters, hooks, computed weights."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from ipex_core import explain, optimize, restore


class Awkward(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(128, 128)
        self.b = nn.Linear(128, 128)
        self.b.weight = self.a.weight
        self.computed = nn.utils.parametrizations.weight_norm(nn.Linear(128, 128))
        self.hooked = nn.utils.weight_norm(nn.Linear(128, 128))
        self.watched = nn.Linear(128, 128)
        self.calls = 0
        self.watched.register_forward_hook(self.count)

    def count(self, *_):
        self.calls += 1

    def forward(self, x):
        return self.watched(self.hooked(self.computed(self.b(self.a(x)))))


@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.no_grad()
def test_shared_hooked_and_computed_weights(dtype):
    """Skipped where it must be, recorded, explained; nothing is lost and everything is undone."""
    model = Awkward().eval()
    x = torch.randn(4, 128)
    want = model(x)
    before = {name: value.clone() for name, value in model.state_dict().items()}

    assert optimize(model, dtype=dtype, inplace=True) is model
    model.calls = 0
    torch.testing.assert_close(model(x).float(), want, rtol=2e-2, atol=2e-2)
    assert model.calls == 1
    assert model.a.weight is model.b.weight
    assert list(model.state_dict()) == list(before)
    for name, value in model.state_dict().items():
        assert value.dtype == before[name].dtype, name
        assert torch.equal(value, before[name]), name

    told = {(r.module, r.step): r for r in explain(model).rows}
    for module in ("a", "b"):
        assert not told[module, "prepack"].done
        assert "shared" in told[module, "prepack"].text
    for module in ("computed", "hooked"):
        assert not told[module, "prepack"].done

    restore(model)
    assert torch.equal(model(x), want)
    assert model.a.weight is model.b.weight
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())

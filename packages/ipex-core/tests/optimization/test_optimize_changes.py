# SPDX-License-Identifier: Apache-2.0
"""What a user does to the layers of an optimized model has the effect it has on the original, or is an error."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, prune, weight_norm

from ipex_core.optimization import optimize

pytestmark = pytest.mark.usefixtures("small_weights_are_packed")


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.q, self.k = nn.Linear(64, 64), nn.Linear(64, 64)
        self.up, self.down = nn.Linear(64, 64), nn.Linear(64, 64)
        self.act, self.norm = nn.GELU(), nn.LayerNorm(64)

    def forward(self, x):
        return self.norm(self.down(self.act(self.up(x))) + self.q(x) * self.k(x) + x)


X = torch.randn(3, 5, 64, generator=torch.Generator().manual_seed(1))
OPTIONS = [{}, {"dtype": torch.bfloat16}, {"concat_linear": True}]


def parameter(*size):
    return nn.Parameter(torch.randn(size))


CHANGES = {
    "prune": lambda m: prune.l1_unstructured(m.q, "weight", 0.5),
    "prune bias": lambda m: prune.l1_unstructured(m.q, "bias", 0.5),
    "prune norm": lambda m: prune.l1_unstructured(m.norm, "weight", 0.5),
    "weight_norm": lambda m: weight_norm(m.up),
    "parametrize": lambda m: parametrizations.weight_norm(m.q),
    "assign weight": lambda m: setattr(m.q, "weight", parameter(64, 64)),
    "assign bias": lambda m: setattr(m.q, "bias", parameter(64)),
    "no bias": lambda m: setattr(m.q, "bias", None),
    "other layer": lambda m: setattr(m, "q", nn.Identity()),
    "other forward": lambda m: setattr(m.q, "forward", lambda x: x * 2),
    "other activation": lambda m: setattr(m.act, "forward", lambda x: x * 2),
    "other norm": lambda m: setattr(m.norm, "forward", lambda x: x * 2),
}


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("change", CHANGES)
def test_changes_have_their_effect(change, options):
    want, got = Net().eval(), optimize(Net().eval(), **options)
    for model in (want, got):
        torch.manual_seed(1)
        CHANGES[change](model)
        with torch.no_grad():
            model.result = model(X).float()
    close = 8e-2 if "dtype" in options else 1e-4
    torch.testing.assert_close(got.result, want.result, rtol=close, atol=close)


def test_the_mode_of_a_fused_activation_can_change():
    model = nn.Sequential(nn.Linear(64, 64), nn.GELU()).eval()
    result = optimize(model)
    model[1].approximate = result[1].approximate = "tanh"
    with torch.no_grad():
        torch.testing.assert_close(result(X), model(X), rtol=1e-5, atol=1e-5)


def test_an_assigned_weight_is_compiled():
    model = nn.Sequential(nn.Linear(64, 64)).eval()
    result = optimize(model)
    result[0].weight = model[0].weight = parameter(64, 64)
    with torch.no_grad():
        got = torch.compile(result, backend="eager")(X)
        torch.testing.assert_close(got, model(X), rtol=1e-4, atol=1e-4)


def test_data_of_a_packed_weight():
    layer = optimize(nn.Sequential(nn.Linear(64, 64)).eval())[0]
    with pytest.raises(RuntimeError, match="packed and cannot be changed in place"):
        layer.weight.data = torch.zeros(64, 64)
    with pytest.raises(RuntimeError, match="packed and cannot be changed in place"):
        layer.weight.data.zero_()
    assert layer.weight.detach().numpy().tolist() == layer.weight.tolist()
    with pytest.raises(RuntimeError, match="requires grad"):
        layer.weight.numpy()


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("autocast", [False, True])
def test_gradients_reach_every_weight(options, autocast):
    model = Net().eval()
    result = optimize(model, **options)
    with torch.no_grad():
        result(X)  # merges what can be merged
    for net in (model, result):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            (net(X).float() * X).sum().backward()
    close = 5e-2 if autocast or "dtype" in options else 1e-4
    for (name, got), want in zip(result.named_parameters(), model.parameters(), strict=True):
        assert got.grad is not None, name
        error = (got.grad.float() - want.grad).norm() / want.grad.norm()
        assert error < close, name

# SPDX-License-Identifier: Apache-2.0
"""Parameters that several modules hold, and layers that keep their dtype."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import nn

from ipex_core import explain, optimize, restore

DTYPES = [torch.bfloat16, torch.float16]


class Tied(nn.Module):
    """An embedding and a linear layer with one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(8, 8)
        self.head = nn.Linear(8, 8)
        self.head.weight = self.embed.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.head(self.embed(x))
        return y


class Held(nn.Module):
    """A linear layer whose weight is a parameter of the model, which computes with it."""

    def __init__(self) -> None:
        super().__init__()
        self.matrix = nn.Parameter(torch.rand(6, 6))
        self.linear = nn.Linear(6, 6)
        self.linear.weight = self.matrix
        self.last = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.last(self.linear(x @ self.matrix))
        return y


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_tied_weight_is_one_tensor_in_a_state_dict(dtype: torch.dtype) -> None:
    model = Tied().eval()
    fast = optimize(model, dtype=dtype)
    state = fast.state_dict()
    assert state["embed.weight"] is state["head.weight"]
    assert torch.equal(state["head.weight"], model.head.weight)
    kept = fast.state_dict(keep_vars=True)
    assert kept["embed.weight"] is kept["head.weight"]
    assert isinstance(kept["head.weight"], nn.Parameter)
    with torch.no_grad():
        fast.head.weight.zero_()
    assert not fast.state_dict()["embed.weight"].any()
    assert state["embed.weight"].any()


def test_a_tied_weight_made_in_inference_mode() -> None:
    with torch.inference_mode():
        state = optimize(Tied().eval(), dtype=torch.bfloat16).state_dict()
    assert state["embed.weight"] is state["head.weight"]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("train", [False, True])
def test_a_weight_that_the_model_holds_too_stays_float32(dtype: torch.dtype, train: bool) -> None:
    torch.manual_seed(0)
    model = Held().train(train)
    if train:
        fast, _ = optimize(model, dtype=dtype, optimizer=torch.optim.SGD(model.parameters(), 0.1))
    else:
        fast = optimize(model, dtype=dtype)
    assert fast.matrix is fast.linear.weight
    assert fast.linear.weight.dtype == fast.linear.bias.dtype == torch.float32
    assert fast.last.weight.dtype == dtype
    assert "holds the weight" in str(explain(fast)) or train
    x = torch.randn(3, 6)
    torch.testing.assert_close(fast(x).float(), model(x), rtol=0.1, atol=0.05)
    # What comes from a cast layer is widened.
    assert fast.linear(x.to(dtype)).dtype == torch.float32
    assert restore(fast).last.weight.dtype == torch.float32


def test_a_shared_bias_is_cast() -> None:
    """Heads of masked language models hold the bias of their decoder."""

    class Head(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.decoder = nn.Linear(4, 9)
            self.bias = self.decoder.bias

    fast = optimize(Head().eval(), dtype=torch.bfloat16)
    assert fast.decoder.weight.dtype == fast.bias.dtype == torch.bfloat16


def test_float64_layers_stay_and_the_log_says_so(caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3).double(), nn.Linear(5, 5).double()).eval()
    with caplog.at_level(logging.WARNING, "ipex"):
        fast = optimize(model, dtype=torch.bfloat16)
    assert fast[0].weight.dtype == fast[1].weight.dtype == torch.float64
    assert "2 layers keep their parameters in torch.float64" in caplog.text
    assert "model.float()" in caplog.text


@pytest.mark.parametrize("split", [True, False])
@pytest.mark.parametrize("momentum", [0.0, 0.5])
def test_sgd_leaves_the_state_that_torch_leaves(momentum: float, split: bool) -> None:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=momentum)
    fast, other = optimize(
        model, dtype=torch.bfloat16, optimizer=optimizer, split_master_weight_for_bf16=split
    )
    for one, step in ((model, optimizer), (fast, other)):
        one(torch.ones(2, 4)).sum().backward()
        step.step()
    want, got = (o.state_dict()["state"] for o in (optimizer, other))
    assert {k: set(v) for k, v in got.items()} == {k: set(v) for k, v in want.items()}


KINDS = (
    *(nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d),
    *(nn.AlphaDropout, nn.FeatureAlphaDropout),
)


@pytest.mark.parametrize("kind", KINDS)
def test_dropout_is_an_identity_and_still_a_dropout(kind: type[nn.Module]) -> None:
    model = nn.Sequential(kind(0.25)).eval()  # type: ignore[call-arg]
    fast = optimize(model)
    assert isinstance(fast[0], nn.Identity) and isinstance(fast[0], kind)
    assert fast[0].p == 0.25
    assert "identity" in str(explain(fast))
    plain = optimize(model, replace_dropout_with_identity=False)
    assert not isinstance(plain[0], nn.Identity)
    assert type(restore(fast)[0]) is kind


def test_an_optimizer_with_none_of_the_parameters_keeps_no_layer_from_the_cast() -> None:
    model = Tied()
    other = torch.optim.SGD(nn.Linear(2, 2).parameters(), 0.1)
    fast, _ = optimize(model, dtype=torch.bfloat16, optimizer=other)
    assert fast.embed.weight is fast.head.weight
    assert fast.head.weight.dtype == fast.head.bias.dtype == torch.bfloat16
    assert fast.state_dict()["embed.weight"].dtype == torch.float32
    some = torch.optim.SGD([model.head.bias], 0.1)
    fast, _ = optimize(nn.Sequential(model, nn.Linear(8, 8)), dtype=torch.bfloat16, optimizer=some)
    assert fast[1].weight.dtype == torch.float32

# SPDX-License-Identifier: Apache-2.0
"""Copies of optimized models and optimizers, and what else is done to their weights: writes, casts."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch
from torch import nn
from training_checks import OPTIMIZERS, net, train

from ipex_core import optimize

pytestmark = pytest.mark.usefixtures("one_thread")

Tensor = torch.Tensor


def test_a_weight_that_is_written_to_is_followed() -> None:
    model = nn.Linear(8, 8).train()
    for split in (True, False):
        fast, optimizer = optimize(
            model,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            dtype=torch.bfloat16,
            split_master_weight_for_bf16=split,
        )
        with torch.no_grad():
            fast.weight.fill_(2.0)
        assert torch.equal(fast.state_dict()["weight"], torch.full((8, 8), 2.0))
        fast.weight.grad = torch.ones(8, 8, dtype=torch.bfloat16)
        optimizer.step()
        torch.testing.assert_close(fast.state_dict()["weight"], torch.full((8, 8), 1.9))


@pytest.mark.parametrize("how", ["deepcopy", "pickle", "torch.save"])
@pytest.mark.parametrize("name", ["sgd", "rmsprop"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_copies_train_on_their_own(name: str, dtype: torch.dtype, how: str) -> None:
    model = net()
    make = OPTIMIZERS[name]
    fast, optimizer = optimize(model, optimizer=make(model.parameters()), dtype=dtype)
    train(fast, optimizer, 2, dtype=dtype)
    kept = {k: v.clone() for k, v in fast.state_dict().items()}
    if how == "deepcopy":
        again, other = copy.deepcopy((fast, optimizer))
    elif how == "pickle":
        again, other = pickle.loads(pickle.dumps((fast, optimizer)))
    else:
        torch.save((fast, optimizer), memory := io.BytesIO())
        memory.seek(0)
        again, other = torch.load(memory, weights_only=False)
    assert all(torch.equal(v, kept[k]) for k, v in again.state_dict().items())
    train(again, other, 2, dtype=dtype)
    assert again[4].weight.grad.dtype == fast[4].weight.grad.dtype
    assert all(torch.equal(v, kept[k]) for k, v in fast.state_dict().items())
    train(fast, optimizer, 2, dtype=dtype)
    assert all(torch.equal(v, again.state_dict()[k]) for k, v in fast.state_dict().items())


class Counting(torch.optim.SGD):
    """An optimizer with state that is in neither its groups nor its parameters' states."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr=lr)
        self.first = self.param_groups[0]["params"][0]
        self.count = [0]

    def step(self, closure: Any = None) -> Any:
        self.count[0] += 1
        return super().step(closure)


def test_attributes_of_an_optimizer_are_copied() -> None:
    model = net()
    sgd = Counting(model.parameters(), lr=0.1)
    fast, optimizer = optimize(model, optimizer=sgd, dtype=torch.bfloat16)
    train(fast, optimizer, 2, dtype=torch.bfloat16)
    assert optimizer.count == [2] and sgd.count == [0]
    assert optimizer.first is next(fast.parameters())


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_a_copy_has_a_step_of_its_own_below_a_scheduler(dtype: Any) -> None:
    model = net()
    sgd = OPTIMIZERS["sgd"](model.parameters())
    fast, optimizer = optimize(model, optimizer=sgd, dtype=dtype)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    train(fast, optimizer, 1, dtype=dtype)
    scheduler.step()
    kept = {k: v.clone() for k, v in fast.state_dict().items()}
    for again, other in (
        copy.deepcopy((fast, optimizer)),
        pickle.loads(pickle.dumps((fast, optimizer))),
    ):
        train(again, other, 1, dtype=dtype)
        assert not torch.equal(again.state_dict()["4.weight"], kept["4.weight"])
        assert torch.equal(fast.state_dict()["4.weight"], kept["4.weight"])
    again, other, follower = copy.deepcopy((fast, optimizer, scheduler))
    train(again, other, 1, dtype=dtype)
    follower.step()
    assert other.param_groups[0]["lr"] < optimizer.param_groups[0]["lr"]


def test_hooks_of_an_optimizer_are_kept() -> None:
    model, calls = net(), []
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    sgd.register_step_pre_hook(lambda *_: calls.append("before"))
    sgd.register_step_post_hook(lambda *_: calls.append("after"))
    fast, optimizer = optimize(model, optimizer=sgd, dtype=torch.bfloat16)
    train(fast, optimizer, 1, dtype=torch.bfloat16)
    assert calls == ["before", "after"]


FORMS: list[dict[str, Any]] = [
    {"dtype": torch.bfloat16},
    {"dtype": torch.bfloat16, "split_master_weight_for_bf16": False},
    {"dtype": torch.float16},
]


@pytest.mark.parametrize("form", FORMS, ids=["split", "whole", "float16"])
def test_data_that_is_written_to_is_followed(form: dict[str, Any]) -> None:
    model = nn.Linear(64, 8).train()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    fast, optimizer = optimize(model, optimizer=sgd, **form)
    fast.weight.data[:4] = 0.0
    fast.weight.data[4].clamp_(-0.01, 0.01)
    saved = fast.state_dict()["weight"]
    assert torch.equal(saved[:4], torch.zeros(4, 64))
    assert saved[4].abs().max() <= 0.0101
    # Rows nobody wrote to keep all bits.
    assert torch.equal(saved[5:], model.weight.detach()[5:])
    fast.weight.grad = torch.ones_like(fast.weight, dtype=fast.weight.grad_dtype)
    optimizer.step()
    torch.testing.assert_close(fast.state_dict()["weight"][:4], torch.full((4, 64), -0.1))


@pytest.mark.parametrize("form", FORMS, ids=["split", "whole", "float16"])
@pytest.mark.parametrize("to", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
def test_a_model_that_is_cast_goes_on_in_that_dtype(form: dict[str, Any], to: torch.dtype) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2)).train()
    fast, optimizer = optimize(
        model, optimizer=torch.optim.SGD(model.parameters(), lr=0.01), **form
    )
    fast(torch.ones(3, 8)).sum().backward()
    optimizer.step()
    exact = {k: v.clone() for k, v in fast.state_dict().items()}
    fast.to(to)
    saved = fast.state_dict()
    if to != form["dtype"]:
        assert all(v.dtype == to for v in saved.values())
    rtol = 0 if to in (torch.float32, torch.float64) else 1e-2
    for key, value in exact.items():
        torch.testing.assert_close(saved[key].float(), value, rtol=rtol, atol=1e-3 * rtol)
    optimizer.zero_grad()
    fast(torch.ones(3, 8)).sum().backward()
    optimizer.step()
    moved = fast.state_dict()["1.bias"].float() - exact["1.bias"]
    torch.testing.assert_close(moved, torch.full((2,), -0.03), rtol=0.05, atol=2e-3)


@pytest.mark.parametrize("form", [*FORMS, {}], ids=["split", "whole", "float16", "float32"])
def test_a_step_spoils_the_graphs_before_it(form: dict[str, Any]) -> None:
    # Gradients of new weights with old activations would be wrong, silently.
    model = nn.Linear(8, 8).train()
    fast, optimizer = optimize(model, optimizer=OPTIMIZERS["lamb"](model.parameters()), **form)
    loss = fast(torch.randn(3, 8, requires_grad=True)).sum()
    loss.backward(retain_graph=True)
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()

# SPDX-License-Identifier: Apache-2.0
"""Steps of many parameters by one call of an op: the same bits as one at a time."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from training_checks import OPTIMIZERS

import ipex_core as ipex
from ipex_core.library.kernels import specs
from ipex_core.optim._optimizer_utils import optimizer_fusion
from ipex_core.optim.steps import Calls

Tensor = torch.Tensor

STOCK: dict[str, tuple[Any, dict[str, Any]]] = {
    "sgd": (torch.optim.SGD, {"weight_decay": 1e-2}),
    "sgd_momentum": (torch.optim.SGD, {"momentum": 0.9, "dampening": 0.1, "weight_decay": 1e-2}),
    "sgd_nesterov": (torch.optim.SGD, {"momentum": 0.9, "nesterov": True, "maximize": True}),
    "adagrad": (
        torch.optim.Adagrad,
        {"lr_decay": 0.1, "weight_decay": 1e-2, "initial_accumulator_value": 0.3},
    ),
    "adam": (torch.optim.Adam, {"weight_decay": 1e-2, "betas": (0.8, 0.9)}),
    "adam_decoupled": (torch.optim.Adam, {"decoupled_weight_decay": True, "weight_decay": 1e-2}),
    "adam_amsgrad": (torch.optim.Adam, {"amsgrad": True, "maximize": True, "eps": 1e-6}),
    "adamw": (torch.optim.AdamW, {"weight_decay": 0.1}),
}


def parameters() -> list[nn.Parameter]:
    torch.manual_seed(0)
    shapes: tuple[tuple[int, ...], ...] = ((4, 5), (3,), (), (0, 2), (2, 3, 4, 5), (33,), (7, 2))
    made = [nn.Parameter(torch.randn(shape)) for shape in shapes]
    made[4].data = made[4].data.contiguous(memory_format=torch.channels_last)
    made[5].requires_grad_(False)
    return made


def gradients(params: list[nn.Parameter], step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    for i, p in enumerate(params):
        grad = torch.empty_like(p).copy_(torch.randn(p.shape, generator=generator))
        # One has none in some steps, so that it counts fewer than the others.
        p.grad = grad if p.requires_grad and (i, step % 3) != (1, 1) else None


def groups(params: list[nn.Parameter]) -> list[dict[str, Any]]:
    return [{"params": params[:4]}, {"params": params[4:], "lr": 0.3}, {"params": []}]


def steps(optimizer: Any, params: list[nn.Parameter], numbers: range) -> None:
    for number in numbers:
        gradients(params, number)
        optimizer.step()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", STOCK)
def test_stock_optimizers_are_those_with_fused_true(name: str, dtype: torch.dtype) -> None:
    kind, options = STOCK[name]
    results = []
    for fused in (True, False):
        params = [p.to(dtype).detach().requires_grad_(p.requires_grad) for p in parameters()]
        params = [nn.Parameter(p, p.requires_grad) for p in params]
        optimizer = kind(groups(params), lr=0.1, **options, **({"fused": True} if fused else {}))
        if not fused:
            optimizer_fusion(optimizer)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        for number in range(5):
            steps(optimizer, params, range(number, number + 1))
            scheduler.step()
        optimizer.load_state_dict(optimizer.state_dict())
        for group in optimizer.param_groups:
            group["lr"] = torch.tensor(0.05)  # which torch allows
        steps(optimizer, params, range(5, 9))
        state = optimizer.state_dict()["state"]
        results.append([params, [v for _, s in sorted(state.items()) for v in s.values()]])
    for one, other in zip(*results, strict=True):
        for a, b in zip(one, other, strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize(
    ("name", "op"),
    [("sgd_momentum", "sgd"), ("adagrad", "adagrad"), ("adam", "adam"), ("adamw", "adamw")],
)
def test_float32_takes_the_stock_side(name: str, op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ours gains a few percent at most, and would give other bits than ``fused=True``."""
    kind, options = STOCK[name]
    stock, calls = getattr(torch, f"_fused_{op}_"), []

    def counted(*args: Any, **kwargs: Any) -> None:
        calls.append(len(args[0]))
        stock(*args, **kwargs)

    params = [nn.Parameter(torch.ones(4, 5)), nn.Parameter(torch.ones(3))]
    optimizer = kind(params, lr=0.1, **options)
    optimizer_fusion(optimizer)
    for number in range(2):
        monkeypatch.setattr(torch, f"_fused_{op}_", counted if number else stock)
        for p in params:
            p.grad = torch.ones_like(p)
        optimizer.step()
    assert calls == [2]


@pytest.mark.parametrize("name", ["sgd_momentum", "adam_amsgrad"])
@pytest.mark.parametrize(
    "change",
    [{"foreach": True}, {"fused": False}, {"differentiable": True}, {"maximize": True}],
    ids=str,
)
def test_what_is_asked_for_while_training_counts(name: str, change: dict[str, Any]) -> None:
    kind, options = STOCK[name]
    results = []
    for ours in (False, True):
        params = parameters()
        optimizer = kind(groups(params), lr=0.1, **options)
        if ours:
            optimizer_fusion(optimizer)
        steps(optimizer, params, range(3))
        for group in optimizer.param_groups:
            group.update(change)
        steps(optimizer, params, range(3, 6))
        results.append(params)
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_one_unusual_parameter_leaves_the_step_to_torch() -> None:
    table = nn.EmbeddingBag(20, 4, sparse=True)
    other = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([*table.parameters(), other], lr=0.5)
    optimizer_fusion(optimizer)
    before = table.weight.detach().clone()
    for _ in range(2):
        table(torch.tensor([[1, 2]])).sum().backward()
        other.grad = torch.ones(3)
        optimizer.step()
        optimizer.zero_grad()
    assert torch.equal(table.weight[3:], before[3:])
    torch.testing.assert_close(table.weight[1:3], before[1:3] - 0.5)
    torch.testing.assert_close(other, torch.zeros(3))
    with pytest.raises(RuntimeError, match="sparse"):
        adam = torch.optim.Adam(table.parameters())
        optimizer_fusion(adam)
        table(torch.tensor([[1, 2]])).sum().backward()
        adam.step()


def test_grad_scaler_with_a_fused_optimizer() -> None:
    """It hands its scale to an optimizer with ``fused=True``, which does not unscale before."""
    results = []
    for ours in (False, True):
        params = parameters()
        optimizer = torch.optim.AdamW(params, lr=0.1, fused=True)
        if ours:
            optimizer_fusion(optimizer)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)
        for step in range(6):
            gradients(params, step)
            for p in params:
                if p.grad is not None:
                    p.grad.mul_(scaler.scale(torch.ones(())))
            if step == 3:
                assert params[0].grad is not None
                params[0].grad[0, 0] = float("inf")
            scaler.step(optimizer)
            scaler.update()
        results.append(params)
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)


def one_by_one(calls: Calls) -> None:
    for (name, numbers, _, _), rows in calls._of.items():
        for row in rows:
            getattr(torch.ops.ipex, name)(*row, *numbers)
    calls._of = {}


@pytest.mark.parametrize("form", ["split", "whole", "float16", "float32"])
@pytest.mark.parametrize("name", [n for n in OPTIMIZERS if n != "rmsprop"])
def test_lists_give_the_bits_of_single_steps(
    name: str, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    kinds = {"float16": torch.float16, "float32": None}
    results = []
    for listed in (True, False):
        if not listed:
            monkeypatch.setattr(Calls, "run", one_by_one)
        torch.manual_seed(0)
        layers = (nn.Linear(8, 16), nn.Linear(16, 16, bias=False), nn.LayerNorm(16))
        model = nn.Sequential(*layers, nn.Linear(16, 40), nn.Linear(40, 2)).train()
        options = {"split_master_weight_for_bf16": form == "split"}
        model, optimizer = ipex.optimize(
            model,
            dtype=kinds.get(form, torch.bfloat16),
            optimizer=OPTIMIZERS[name](model.parameters()),
            inplace=True,
            **options,
        )
        params = list(model.parameters())
        for step in range(4):
            generator = torch.Generator().manual_seed(step)
            for i, p in enumerate(params):
                wanted = p.grad_dtype or p.dtype
                grad = torch.randn(p.shape, generator=generator).to(wanted)
                p.grad = None if (i, step) == (2, 1) else grad  # which counts fewer steps
            optimizer.step()
        results.append(list(model.state_dict().values()))
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)


def test_lists_of_different_lengths() -> None:
    w, grad = torch.ones(3), torch.ones(3)
    numbers = (0.9, 0.1, 0.0, 0.0, False)
    words = r"sgd_fused_steps: grads must hold 2 tensor\(s\), got 1"
    op = torch.ops.ipex.sgd_fused_steps
    spec = specs()["sgd_fused_steps"]
    for call in (op, lambda *args: spec.check(spec.bind(*args))):
        with pytest.raises(RuntimeError, match=words):
            call([w, w], [grad], [], [], *numbers)
        with pytest.raises(RuntimeError, match=r"momentum_buffers must hold 1 tensor\(s\), got 2"):
            call([w], [grad], [w, w], [], *numbers)
    with torch.no_grad(), pytest.raises(RuntimeError, match="grad must have the shape"):
        op([w], [torch.ones(2)], [], [], *numbers)
    assert torch.equal(w, torch.ones(3))


@pytest.mark.parametrize("first", [True, False], ids=["first", "later"])
@pytest.mark.parametrize("name", STOCK)
def test_strides_of_gradients_and_states_count(name: str, first: bool) -> None:
    """torch's fused ops take numbers in the order of memory, whatever the strides say."""
    kind, options = STOCK[name]
    results = []
    for ours in (False, True):
        torch.manual_seed(0)
        params = [nn.Parameter(torch.randn(6, 4)), nn.Parameter(torch.randn(2, 3, 4, 5))]
        params.append(nn.Parameter(torch.randn(6, 8)[:, ::2]))  # with gaps
        # Adagrad of torch 2.11 makes states of the first parameters only, stock too.
        later = ours and name != "adagrad"
        optimizer = kind(params[:2] if later else params, lr=0.1, **options)
        if ours:
            optimizer_fusion(optimizer)
        if later:
            optimizer.add_param_group({"params": params[2:]})
        for step in range(4):
            torch.manual_seed(step)
            turned = ours and (first or step)
            for p in params:
                grad = torch.randn(p.shape)
                p.grad = grad.mT.contiguous().mT if turned else grad
            if step == 2 and ours:
                last = params[1].data.contiguous(memory_format=torch.channels_last)
                params[1].data = last  # and its states stay as they are
            optimizer.step()
        results.append(params)
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(b, a, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("loaded", [False, True])
@pytest.mark.parametrize("name", ["sgd_momentum", "adagrad", "adamw"])
def test_convolutions_go_on_from_stock_states(name: str, loaded: bool) -> None:
    """`optimize` makes them channels-last; the states of the optimizer are not."""
    kind, options = STOCK[name]
    torch.manual_seed(0)
    stock = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3)).train()
    plain = kind(stock.parameters(), lr=0.05, **options)
    x = torch.randn(2, 3, 8, 8)

    def train(model: nn.Module, optimizer: Any) -> None:
        for _ in range(3):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()

    train(stock, plain)
    model, optimizer = copy.deepcopy((stock, plain))
    if loaded:
        optimizer = kind(model.parameters(), lr=0.05, **options)
    model, optimizer = ipex.optimize(model, optimizer=optimizer, inplace=True)
    if loaded:
        optimizer.load_state_dict(copy.deepcopy(plain.state_dict()))
    train(stock, plain)
    train(model, optimizer)
    for a, b in zip(stock.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(b, a, rtol=1e-4, atol=1e-6)

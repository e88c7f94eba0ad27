# SPDX-License-Identifier: Apache-2.0
"""Linear layers in training whose products pack the weight on the way."""

from __future__ import annotations

import copy
import io
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from ipex_core import explain, optimize, restore
from ipex_core.nn import training_linear
from ipex_core.nn import training_linear as training_products
from ipex_core.nn.training_linear import TrainingLinear
from ipex_core.optimization import training

Tensor = torch.Tensor
BOUNDS = {
    torch.float32: {"rtol": 2e-5, "atol": 2e-5},
    torch.bfloat16: {"rtol": 2e-2, "atol": 2e-2},
}


@pytest.fixture
def everywhere(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Pack weights of any size for any number of rows, with kernels or without; collects the products that do."""
    calls: list[str] = []

    def noting(name: str) -> Any:
        original = getattr(training_products, name)

        def run(*args: Any) -> Tensor:
            if args[-1]:
                calls.append(name)
            return original(*args)

        return run

    monkeypatch.setattr(training, "why_not", lambda *_: None)
    monkeypatch.setattr(
        training_linear, "choose", lambda *_: training_products.Choice(True, True, True)
    )
    for name in ("product", "input_gradient", "weight_gradient"):
        monkeypatch.setattr(training_linear, name, noting(name))
    yield calls


def net(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    layers = (
        nn.Linear(24, 40),
        nn.Tanh(),
        nn.Linear(40, 24, bias=False),
        nn.Tanh(),
        nn.Linear(24, 3),
    )
    return nn.Sequential(*layers).train()


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def gradients(model: nn.Module, x: Tensor, grad: Tensor | None = None) -> list[Tensor]:
    x = x.clone().requires_grad_()
    y = model(x)
    y.backward(torch.ones_like(y) if grad is None else grad)
    assert x.grad is not None
    found = [y.detach(), x.grad, *(p.grad for p in model.parameters() if p.grad is not None)]
    model.zero_grad()
    return [value.float() for value in found]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [(5, 24), (2, 3, 24), (24,)])
def test_same_results_and_gradients(
    everywhere: list[str], dtype: torch.dtype, size: tuple[int, ...]
) -> None:
    stock, (model, _) = net(), optimize(net(), optimizer=sgd(net()), dtype=None)
    x = torch.randn(size)
    if dtype != torch.float32:
        stock, model, x = stock.to(dtype), model.to(dtype), x.to(dtype)
    assert [type(m) for m in model if isinstance(m, nn.Linear)] == [TrainingLinear] * 3
    for ours, theirs in zip(gradients(model, x), gradients(stock, x), strict=True):
        torch.testing.assert_close(ours, theirs, **BOUNDS[dtype])
    assert everywhere.count("product") == everywhere.count("weight_gradient") == 3
    strided = torch.randn(*size[:-1], 48).to(dtype)[
        ..., ::2
    ]  # an input, and a gradient of stride 0
    for ours, theirs in zip(
        gradients(model, strided, torch.ones((), dtype=dtype).expand(*size[:-1], 3)),
        gradients(stock, strided),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs, **BOUNDS[dtype])


def test_gradients_of_gradients_and_checkpoints(everywhere: list[str]) -> None:
    stock, (model, _) = net(), optimize(net(), optimizer=sgd(net()))
    x = torch.randn(4, 24)
    results = []
    for one in (stock, model):
        given = x.clone().requires_grad_()
        y = checkpoint(one, given, use_reentrant=False)
        (first,) = torch.autograd.grad(y.square().sum(), given, create_graph=True)
        (second,) = torch.autograd.grad(first.square().sum(), given)
        results.append((y.detach(), first.detach(), second))
    for ours, theirs in zip(results[1], results[0], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_training_shared_accumulated_clipped_written_weights(everywhere: list[str]) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.first, self.unused = nn.Linear(16, 16), nn.Linear(16, 16)
            self.second, self.out = nn.Linear(16, 16), nn.Linear(16, 2)
            self.second.weight = self.first.weight

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.out(torch.tanh(self.second(torch.tanh(self.first(x)))))
            return y

    stock = Tied()
    theirs = sgd(stock)
    model, optimizer = (lambda m: optimize(m, optimizer=sgd(m)))(Tied().train())
    assert model.first.weight is model.second.weight
    x = torch.randn(6, 8, 16)
    for step in range(6):
        for one, opt in ((stock, theirs), (model, optimizer)):
            opt.zero_grad()
            for part in x[:, : 8 - step].split(3):  # accumulated
                one(part).square().sum().backward()
            nn.utils.clip_grad_norm_(one.parameters(), 0.5)
            opt.step()
            if step == 3:
                one.first.weight.data.mul_(0.5)  # which no version counts
    for name, value in stock.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name], value, rtol=1e-4, atol=1e-5)
    assert model.unused.weight.grad is None
    assert set(everywhere) == {"product", "input_gradient", "weight_gradient"}


def test_split_weights_keep_float32_state_dicts(everywhere: list[str]) -> None:
    model, optimizer = (lambda m: optimize(m, optimizer=sgd(m), dtype=torch.bfloat16))(net())
    for name, value in net().state_dict().items():
        assert torch.equal(model.state_dict()[name], value)
    losses = []
    x, target = torch.randn(32, 24), torch.randint(0, 3, (32,))
    for _ in range(30):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = nn.functional.cross_entropy(model(x).float(), target)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.5 * losses[0] and "product" in everywhere
    again = net(1)
    again.load_state_dict(model.state_dict())
    back = restore(copy.deepcopy(model))
    assert all(type(m) is not TrainingLinear for m in back)
    torch.testing.assert_close(back(x), again(x))
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    torch.testing.assert_close(torch.load(file, weights_only=False)(x), model(x))


def test_where_the_stock_op_runs(everywhere: list[str]) -> None:
    model, _ = optimize(net(), optimizer=sgd(net()))
    x = torch.randn(4, 24)
    stock = restore(copy.deepcopy(model))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(model(x), stock(x))  # computes in bfloat16, the weight is float32
    traced = torch.jit.trace(model, x, check_trace=False)
    assert torch.equal(traced(x), stock(x))
    assert torch.equal(torch.jit.script(model)(x), stock(x))
    per_sample = torch.func.vmap(torch.func.grad(lambda v: model(v).sum()))(x)
    assert per_sample.shape == x.shape
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, torch.ones_like(x))
        assert torch.autograd.forward_ad.unpack_dual(model(dual)).tangent is not None
    assert not everywhere
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        model(torch.randn(4, 23))
    compiled = torch.compile(model, backend="aot_eager")
    compiled(x).sum().backward()
    assert not everywhere
    model(x)
    assert everywhere == ["product"] * 3


def test_explain_tells_what_is_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(1024, 512), nn.Linear(512, 8), nn.Conv2d(3, 3, 1)).train()
    monkeypatch.setattr(training_products, "has_kernel", lambda op: True)
    monkeypatch.setattr(training_products, "_LEVELS", _Any())

    def rows(**options: Any) -> list[tuple[bool, str]]:
        packed, _ = optimize(model, optimizer=sgd(model), **options)
        found = [r for r in explain(packed).rows if r.step == "prepack"]
        return [(r.done, r.text) for r in found]

    first, second, third = rows()
    assert first[0] and "64 rows" in first[1]
    assert not second[0] and "fewer than 524288 elements" in second[1]
    assert not third[0] and "convolutions" in third[1]
    assert [done for done, _ in rows(dtype=torch.bfloat16)] == [True, False, False]
    assert "float16" in rows(dtype=torch.float16)[0][1]
    assert [done for done, _ in rows(auto_kernel_selection=True)] == [True, True, False]
    assert rows(weights_prepack=False) == []
    monkeypatch.setattr(training_products, "_LEVELS", ())
    assert "auto_kernel_selection" in rows()[0][1]
    monkeypatch.setattr(training_products, "has_kernel", lambda op: False)
    assert "no kernel package" in rows()[0][1]


class _Any:
    def __contains__(self, what: object) -> bool:
        return True


def test_products_are_timed_on_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training_products, "has_kernel", lambda op: True)
    model = net()
    model, _ = optimize(model, optimizer=sgd(model), auto_kernel_selection=True)
    asked = []
    monkeypatch.setattr(
        training_products, "_gains", lambda run: asked.append(run(True).shape) or True
    )
    x = torch.randn(70, 24)
    for _ in range(2):
        ours, theirs = gradients(model, x), gradients(restore(copy.deepcopy(model)), x)
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, **BOUNDS[torch.float32])
    assert asked[:3] == [(64, 40), (64, 24), (40, 24)] and len(asked) == 9
    training_products._measure.cache_clear()
    torch.manual_seed(3)
    model(x)
    assert len(asked) == 18
    drawn = torch.rand(1)
    torch.manual_seed(3)
    assert drawn == torch.rand(1)  # timing took none of the numbers of the program
    training_products._measure.cache_clear()

# SPDX-License-Identifier: Apache-2.0
"""The optimizers of IPEX's tpp modules, functional steps, and clipping."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch

from ipex_core import optimize
from ipex_core.optim import Lamb as PlainLamb
from ipex_core.optim import Lars, _functional, _optimizer_utils, tpp
from ipex_core.testing import run_ranks

Tensor = torch.Tensor


def _train(make: Any, steps: int = 6, dtype: torch.dtype | None = None) -> Tensor:
    torch.manual_seed(0)
    model = torch.nn.Linear(7, 5).train()
    optimizer = make(model.parameters())
    if dtype is not None:
        model, optimizer = optimize(model, dtype, optimizer=optimizer)
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(4, 7, generator=generator)).square().sum().backward()
        optimizer.step()
    return torch.cat([v.reshape(-1) for v in model.state_dict().values()])


def test_equal_to_stock() -> None:
    for ours, stock in (
        (
            lambda p: tpp.SGD(p, lr=0.01, momentum=0.9, nesterov=True),
            lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9, nesterov=True),
        ),
        (
            lambda p: tpp.AdamW(p, lr=0.01, weight_decay=0.1),
            lambda p: torch.optim.AdamW(p, lr=0.01, eps=1e-6, weight_decay=0.1),
        ),
        (
            lambda p: tpp.Lamb(p, lr=0.01, adam=True),
            lambda p: torch.optim.AdamW(p, lr=0.01, eps=1e-6, weight_decay=0),
        ),
        (
            lambda p: tpp.Lamb(p, lr=0.01, weight_decay=0.1),
            lambda p: PlainLamb(p, lr=0.01, eps=1e-6, weight_decay=0.1),
        ),
        (lambda p: tpp.DistLamb(p, lr=0.01), lambda p: PlainLamb(p, lr=0.01, eps=1e-6)),
    ):
        torch.testing.assert_close(_train(ours), _train(stock), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", ["SGD", "AdamW", "Lamb", "DistLamb"])
def test_split_weights(kind: str) -> None:
    make = lambda p: getattr(tpp, kind)(p, lr=0.01)  # noqa: E731
    torch.testing.assert_close(
        _train(make, dtype=torch.bfloat16), _train(make), rtol=0.1, atol=0.02
    )


def test_without_bias_correction() -> None:
    p = torch.nn.Parameter(torch.tensor([1.0, -2.0]))
    optimizer = tpp.AdamW([p], lr=0.1, correct_bias=False)
    p.grad = torch.tensor([0.5, 0.5])
    optimizer.step()
    want = torch.tensor([1.0, -2.0]) - 0.1 * (0.1 * 0.5) / (math.sqrt(0.001 * 0.25) + 1e-6)
    torch.testing.assert_close(p.detach(), want)
    lamb = tpp.Lamb([p], lr=0.1, correct_bias=False)
    for count in (1, 2):
        lamb.step()
        assert float(lamb.state[p]["step"]) == count
    assert lamb.state[p]["exp_avg"].abs().max() > 0


def test_collected_gradients() -> None:
    p = torch.nn.Parameter(torch.ones(3))
    optimizer = tpp.DistLamb([p], lr=0.1)
    for value in (1.0, 3.0):
        p.grad = torch.full((3,), value)
        optimizer.acc_and_zero_grad()
    assert p.grad is None
    optimizer.merge_acc_grad()
    assert torch.equal(p.grad, torch.full((3,), 2.0))
    optimizer.sync_grads()  # one process: nothing to do
    optimizer.sync_params()
    assert optimizer.clip_grad_norm_(1.0) == pytest.approx(math.sqrt(12))
    optimizer.step()


@pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.float16])
def test_collected_gradients_of_an_optimized_model(dtype: torch.dtype | None) -> None:
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 2).train()
    fast, optimizer = optimize(model, dtype, optimizer=tpp.DistLamb(model.parameters(), lr=0.1))
    for _ in range(2):
        fast(torch.ones(3, 4)).sum().backward()
        optimizer.acc_and_zero_grad()
    optimizer.step()
    same = tpp.DistLamb(model.parameters(), lr=0.1)
    model(torch.ones(3, 4)).sum().backward()
    same.step()
    torch.testing.assert_close(fast.state_dict()["weight"], model.weight.detach())


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", ["AdamW", "Lamb", "Lars"])
def test_native_dtypes_and_their_checkpoints(kind: str, dtype: torch.dtype) -> None:
    def make(model: Any) -> Any:
        if kind == "Lars":
            return Lars(model.parameters(), lr=1.0, momentum=0.9, weight_decay=0.1)
        return getattr(tpp, kind)(model.parameters(), lr=0.1, weight_decay=0.1)

    def train(model: Any, optimizer: Any) -> None:
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.ones(3, 4, dtype=model.weight.dtype)).square().sum().backward()
            optimizer.step()

    torch.manual_seed(0)
    wide = torch.nn.Linear(4, 2)
    model = copy.deepcopy(wide).to(dtype)
    optimizer = make(model)
    train(model, optimizer)
    again = copy.deepcopy(model)
    other = make(again)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for state in other.state.values():
        want = torch.float64 if dtype == torch.float64 else torch.float32
        assert all(v.dtype == want for k, v in state.items() if k != "step")
    train(model, optimizer)
    train(again, other)
    assert torch.equal(model.weight, again.weight)
    steps = make(wide)
    train(wide, steps)
    train(wide, steps)
    tolerance = 1e-5 if dtype == torch.float64 else 0.03
    torch.testing.assert_close(model.weight.float(), wide.weight, rtol=tolerance, atol=tolerance)


def averaged(rank: int, ranks: int) -> list[float]:
    p = torch.nn.Parameter(torch.full((2,), float(rank)))
    idle = torch.nn.Parameter(torch.ones(1))
    optimizer = tpp.DistLamb([p, idle], lr=0.1, perform_allreduce=True)
    optimizer.sync_params()
    start = p.tolist()
    p.grad = torch.full((2,), float(2 + rank))
    optimizer.step()
    assert idle.grad is not None
    return [*start, *p.grad.tolist(), *idle.grad.tolist(), *p.tolist()]


@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch without distributed")
def test_ranks_agree() -> None:
    first, second = run_ranks(averaged, 2)
    assert first == second
    assert first[:5] == [0.0, 0.0, 2.5, 2.5, 0.0]


@pytest.mark.parametrize("kind", [1.0, 2.0, math.inf])
def test_clip(kind: float) -> None:
    parameters = [torch.nn.Parameter(torch.zeros(n)) for n in (3, 5)]
    for p in parameters:
        p.grad = torch.randn(p.shape)
    others = copy.deepcopy(parameters)
    for p, q in zip(parameters, others, strict=True):
        q.grad = p.grad.clone()
    want = torch.nn.utils.clip_grad_norm_(others, 0.5, kind)
    got = tpp.clip_grad_norm_([p.grad for p in parameters], 0.5, kind, grad_list=True)
    torch.testing.assert_close(got, want)
    for p, q in zip(parameters, others, strict=True):
        torch.testing.assert_close(p.grad, q.grad)
    assert tpp.clip_grad_norm_([], 1.0) == 0
    with pytest.raises(ValueError, match="max_norm must not be negative"):
        tpp.clip_grad_norm_(parameters, -1.0)


def test_bad_numbers() -> None:
    p = [torch.nn.Parameter(torch.ones(1))]
    for kind in (tpp.AdamW, tpp.Lamb, tpp.DistLamb):
        with pytest.raises(ValueError, match="lr must not be negative"):
            kind(p, lr=-1)
        with pytest.raises(ValueError, match=r"betas\[1\] must be in \[0, 1\)"):
            kind(p, betas=(0.9, 1.0))


def test_lists_of_tensors() -> None:
    torch.manual_seed(0)
    start, grad = torch.randn(3, 4), torch.randn(3, 4)
    none = torch.empty(0)

    def stock(kind: Any, **settings: Any) -> Tensor:
        p = torch.nn.Parameter(start.clone())
        optimizer = kind([p], **settings)
        for _ in range(3):
            p.grad = grad.clone()
            optimizer.step()
        return p.detach()

    p = start.clone()
    buffers: list[Tensor | None] = [None]
    for _ in range(3):
        _functional.sgd(
            [p],
            [none],
            [grad],
            buffers,
            weight_decay=0.1,
            momentum=0.9,
            lr=0.1,
            dampening=0.0,
            nesterov=False,
        )
    torch.testing.assert_close(p, stock(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.1))
    for function, kind, decay in (
        (_functional.adam, torch.optim.Adam, 0.1),
        (_functional.adamw, torch.optim.AdamW, 0.1),
    ):
        p, step = start.clone(), torch.tensor(0.0)
        states = [torch.zeros(3, 4), torch.zeros(3, 4)]
        for _ in range(3):
            function(
                [p],
                [None],
                [grad],
                [states[0]],
                [states[1]],
                [],
                [step],
                amsgrad=False,
                beta1=0.9,
                beta2=0.999,
                lr=0.1,
                weight_decay=decay,
                eps=1e-8,
            )
        torch.testing.assert_close(p, stock(kind, lr=0.1, weight_decay=decay))
    p, step, total = start.clone(), torch.tensor(0.0), torch.zeros(3, 4)
    for _ in range(3):
        _functional.adagrad(
            [p], [none], [grad], [total], [step], lr=0.1, weight_decay=0.0, lr_decay=0.1, eps=1e-8
        )
    torch.testing.assert_close(
        p, stock(torch.optim.Adagrad, lr=0.1, lr_decay=0.1, eps=1e-8), rtol=1e-5, atol=1e-5
    )
    p = start.clone()
    _functional.lars(
        [p],
        [none],
        [grad],
        [None],
        eeta=1e-3,
        eps=0.0,
        weight_decay=0.0,
        momentum=0.9,
        lr=0.1,
        dampening=0.0,
        nesterov=False,
    )
    assert not torch.equal(p, start)


def test_fusion_of_an_optimizer() -> None:
    p = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.Adam([p])
    assert _optimizer_utils.optimizer_fusion(optimizer, "cpu", True) is optimizer
    p.grad = torch.ones(3)
    optimizer.step()
    assert torch.optim.SGD in _optimizer_utils.IPEX_FUSED_OPTIMIZER_LIST_CPU
    with pytest.warns(UserWarning, match="RMSprop has no fused step"):
        _optimizer_utils.optimizer_fusion(torch.optim.RMSprop([p]), "cpu", True)
    with pytest.raises(ValueError, match="device_type must be"):
        _optimizer_utils.optimizer_fusion(optimizer, "cuda")

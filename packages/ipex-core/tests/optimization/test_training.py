# SPDX-License-Identifier: Apache-2.0
"""`optimize` with an optimizer: master weights, split weights, fused steps, state dicts."""

from __future__ import annotations

import io
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import nn
from training_checks import OPTIMIZERS, batches, net, train

from ipex_core import optimize, restore
from ipex_core.optim import Lamb, Lars, create_optimizer_lars

pytestmark = pytest.mark.usefixtures("one_thread")

Tensor = torch.Tensor


def in_bfloat16(model: nn.Module) -> Any:
    """Return a model with 16-bit weights and its optimizer."""
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    return optimize(model, optimizer=sgd, dtype=torch.bfloat16)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_float32_follows_the_stock_optimizer(name: str) -> None:
    stock, make = net(), OPTIMIZERS[name]
    other = make(stock.parameters())
    fast, optimizer = optimize(stock, optimizer=other)
    want, got = train(stock, other, 200), train(fast, optimizer, 200)
    torch.testing.assert_close(torch.tensor(got), torch.tensor(want), rtol=5e-3, atol=1e-3)
    assert got[-1] < 0.5 * got[0] or name == "lars"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_16_bits_learn_as_well(name: str, dtype: torch.dtype) -> None:
    stock, make = net(), OPTIMIZERS[name]
    fast, optimizer = optimize(stock, optimizer=make(stock.parameters()), dtype=dtype)
    assert fast[0].weight.dtype == fast[4].bias.dtype == dtype
    assert fast[1].weight.dtype == fast[5].weight.dtype == torch.float32
    want = train(stock, make(stock.parameters()), 60)
    got = train(fast, optimizer, 60, dtype=dtype)
    assert abs(sum(got[-10:]) - sum(want[-10:])) / 10 < 0.1
    for value in fast.state_dict().values():
        assert value.dtype in (torch.float32, torch.int64)
    for state in optimizer.state_dict()["state"].values():
        for value in state.values():
            assert not isinstance(value, Tensor) or value.dtype == torch.float32


@pytest.mark.parametrize("name", ["sgd", "adam", "adamw", "adagrad", "lamb", "lars"])
def test_split_weights_are_updated_like_float32_ones(name: str) -> None:
    """With the same gradients the float32 weights follow the stock optimizer's, whatever the model sees."""
    torch.manual_seed(0)
    model = nn.Linear(40, 30).train()
    optimizer = OPTIMIZERS[name](model.parameters())
    fast, split = optimize(model, optimizer=optimizer, dtype=torch.bfloat16)
    for step in range(5):
        for p, q in zip(model.parameters(), fast.parameters(), strict=True):
            grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(step))
            q.grad = grad.bfloat16()
            p.grad = q.grad.float()
        optimizer.step()
        split.step()
    for want, got in zip(model.parameters(), fast.state_dict().values(), strict=True):
        torch.testing.assert_close(got, want.detach(), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("split", [True, False])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_nan_and_inf_in_gradients_go_where_stock_lets_them(
    name: str, dtype: torch.dtype | None, split: bool
) -> None:
    """A NaN must not become an infinity in a half of a split weight, nor reach the elements beside it."""
    model = nn.Linear(40, 30).train()
    optimizer = OPTIMIZERS[name](model.parameters())
    fast, fused = optimize(
        model, optimizer=optimizer, dtype=dtype, split_master_weight_for_bf16=split
    )
    for step in range(3):
        for p, q in zip(model.parameters(), fast.parameters(), strict=True):
            grad = torch.randn(p.shape).bfloat16()
            if step == 1:
                grad.view(-1)[::7] = float("nan")
                grad.view(-1)[3::7] = float("inf")
                grad.view(-1)[5::7] = -float("inf")
            q.grad, p.grad = grad.to(q.dtype), grad.float()
        optimizer.step()
        fused.step()
    for want, got in zip(model.parameters(), fast.state_dict().values(), strict=True):
        torch.testing.assert_close(got, want.detach(), rtol=1e-5, atol=1e-5, equal_nan=True)
        assert want.isnan().any()
    for want, got in zip(model.parameters(), fast.parameters(), strict=True):
        torch.testing.assert_close(got.isnan(), want.isnan())


def test_split_takes_the_memory_of_float32() -> None:
    model = nn.Linear(64, 64).train()
    fast, optimizer = in_bfloat16(model)
    rest = optimizer._ipex.masters._of[fast.weight].rest
    assert fast.weight.dtype == rest.dtype == torch.bfloat16
    assert torch.equal(fast.state_dict()["weight"], model.weight)  # bit for bit


RESIDENT = """
import ctypes, gc, mmap, sys, torch
from torch import nn
from ipex_core import optimize
torch.set_num_threads(1)

def resident():
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    pages = int(open("/proc/self/statm").read().split()[1])
    return pages * mmap.PAGESIZE / 2**20

def ratio(layers, split):
    base = resident()
    model = nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(layers))).train()
    before = resident() - base
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    model, sgd = optimize(
        model, torch.bfloat16, sgd, inplace=True, split_master_weight_for_bf16=split
    )
    for p in model.parameters():
        p.grad = torch.ones_like(p)
        sgd.step()
        sgd.zero_grad()
    return (resident() - base) / before

ratio(1, sys.argv[1] == "True")  # what is loaded at the first use is not the weights'
print(ratio(16, sys.argv[1] == "True"))
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="/proc and malloc_trim")
@pytest.mark.parametrize(("split", "least", "most"), [(True, 0.95, 1.15), (False, 1.4, 1.65)])
def test_memory_of_the_process(split: bool, least: float, most: float) -> None:
    """Split weights take what float32 ones do, those with a whole master half as much again."""
    command = [sys.executable, "-c", RESIDENT, str(split)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert least <= float(done.stdout) <= most, done.stdout


def test_without_split_there_is_a_whole_master() -> None:
    model = nn.Linear(64, 64).train()
    fast, optimizer = optimize(
        model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        dtype=torch.bfloat16,
        split_master_weight_for_bf16=False,
    )
    assert optimizer._ipex.masters._of[fast.weight].rest.dtype == torch.float32
    assert torch.equal(fast.weight.detach(), model.weight.detach().bfloat16())


@pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["sgd", "adam", "adagrad", "lamb"])
def test_checkpoints_go_both_ways(name: str, dtype: torch.dtype | None) -> None:
    make = OPTIMIZERS[name]
    stock = net()
    other = make(stock.parameters())
    train(stock, other, 5)
    model = net(1)
    fast, optimizer = optimize(model, optimizer=make(model.parameters()), dtype=dtype)
    fast.load_state_dict(stock.state_dict())
    optimizer.load_state_dict(other.state_dict())
    for (key, a), b in zip(fast.state_dict().items(), stock.state_dict().values(), strict=True):
        assert torch.equal(a, b), key
    train(fast, optimizer, 5, dtype=dtype)
    file = io.BytesIO()
    torch.save({"model": fast.state_dict(), "optimizer": optimizer.state_dict()}, file)
    file.seek(0)
    saved = torch.load(file)
    back = net(2)
    third = make(back.parameters())
    back.load_state_dict(saved["model"])
    third.load_state_dict(saved["optimizer"])
    assert (
        saved["optimizer"]["param_groups"][0].keys() == other.state_dict()["param_groups"][0].keys()
    )
    train(back, third, 3)


def test_schedulers_clipping_accumulation_closures_and_groups() -> None:
    stock = net()
    groups = [
        {"params": list(stock[:3].parameters()), "lr": 0.01},
        {"params": list(stock[3:].parameters())},
    ]
    sgd = torch.optim.SGD(groups, lr=0.05, momentum=0.9)
    fast, optimizer = optimize(stock, optimizer=sgd, dtype=torch.bfloat16)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
    calls = []
    optimizer.register_step_post_hook(lambda *a: calls.append(1))
    for x, y in batches(4):

        def closure(x: Tensor = x, y: Tensor = y) -> Tensor:
            optimizer.zero_grad()
            for part in (slice(0, 8), slice(8, 16)):
                with torch.autocast("cpu", dtype=torch.bfloat16):
                    loss = nn.functional.cross_entropy(fast(x[part]).float(), y[part]) / 2
                loss.backward()
            total = nn.utils.clip_grad_norm_(fast.parameters(), 0.1)
            assert torch.isfinite(total)
            return loss

        assert optimizer.step(closure) is not None
        scheduler.step()
    assert len(calls) == 4
    assert [g["lr"] for g in optimizer.param_groups] == pytest.approx([0.0025, 0.0125])


def test_a_scheduler_made_before_goes_on_in_place() -> None:
    model = net()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(sgd, 0.5)
    optimize(model, optimizer=sgd, dtype=torch.bfloat16, inplace=True)
    before = model.state_dict()["4.weight"]
    train(model, sgd, 1, dtype=torch.bfloat16)
    scheduler.step()
    assert sgd.param_groups[0]["lr"] == pytest.approx(0.05)
    assert not torch.equal(model.state_dict()["4.weight"], before)


def test_grad_scaler_skips_steps_that_overflow() -> None:
    model = net()
    adam = torch.optim.Adam(model.parameters(), lr=1e-3)
    fast, optimizer = optimize(model, optimizer=adam, dtype=torch.float16)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=100)
    (x, y), *_ = batches(1)

    def once(factor: float) -> dict[str, Tensor]:
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = nn.functional.cross_entropy(fast(x).float(), y) * factor
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(fast.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        return {k: v.clone() for k, v in fast.state_dict().items() if "weight" in k}

    first = once(1.0)
    assert scaler.get_scale() == 2.0**10
    second = once(float("inf"))
    assert scaler.get_scale() == 2.0**9
    assert all(torch.equal(first[k], second[k]) for k in ("0.weight", "4.weight"))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("split", [True, False])
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
def test_grad_scaler_hands_its_scale_to_fused_optimizers(
    kind: Any, split: bool, dtype: torch.dtype
) -> None:
    """With ``fused=True`` the step unscales, and leaves out what overflowed."""
    models = []
    for fused in (None, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8)).train()
        optimizer = kind(model.parameters(), lr=0.1, fused=fused)
        model, optimizer = optimize(
            model, optimizer=optimizer, dtype=dtype, split_master_weight_for_bf16=split
        )
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
        for step in range(4):
            optimizer.zero_grad()
            x = torch.randn(4, 8, generator=torch.Generator().manual_seed(step))
            loss = model(x).float().square().sum() * (float("inf") if step == 2 else 1.0)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        models.append(model)
    for want, got in zip(*(model.state_dict().values() for model in models), strict=True):
        assert want.isfinite().all()
        torch.testing.assert_close(got, want)


def test_first_gradient_after_other_steps() -> None:
    """torch's fused op of SGD takes momenta of all parameters or of none."""
    torch.manual_seed(0)
    stock = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)).train()

    def made() -> Any:
        return torch.optim.SGD(stock.parameters(), lr=0.1, momentum=0.9)

    fast, optimizer = optimize(stock, optimizer=made())
    for model, other in ((stock, made()), (fast, optimizer)):
        for depth in (1, 1, 2, 2):
            other.zero_grad()
            model[:depth](torch.ones(2, 8)).square().sum().backward()
            other.step()
    for want, got in zip(stock.parameters(), fast.parameters(), strict=True):
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("split", [True, False])
def test_gradients_that_are_there(dtype: torch.dtype, split: bool) -> None:
    """Gradients that were accumulated before `optimize`, and before `restore`, count."""
    torch.manual_seed(0)
    models = []
    for low in (False, True):
        model = nn.Linear(8, 8).train()
        with torch.no_grad():
            model.weight.fill_(0.5)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        x = torch.ones(2, 8)
        model(x).sum().backward()
        if low:
            options = {"dtype": dtype, "split_master_weight_for_bf16": split, "inplace": True}
            optimize(model, optimizer=optimizer, **options)
        model(x).float().square().sum().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        model(x).float().square().sum().backward()
        if low:
            restore(model)
        optimizer.step()
        models.append(model)
    torch.testing.assert_close(models[1].weight, models[0].weight, rtol=0.02, atol=0.02)


class Wrapper(torch.optim.Optimizer):
    """As `ZeroRedundancyOptimizer` and Lookahead do: another optimizer has the state and does the step."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        super().__init__(inner.param_groups, inner.defaults)
        self.inner = inner

    def step(self, closure: Any = None) -> Any:
        return self.inner.step(closure)


def test_an_optimizer_around_another_one() -> None:
    model = net()
    before = [p.detach().clone() for p in model.parameters()]
    optimizer = Wrapper(OPTIMIZERS["sgd"](model.parameters()))
    with pytest.raises(
        NotImplementedError, match="dtype must be None for Wrapper, which calls the step"
    ):
        optimize(model, optimizer=optimizer, dtype=torch.bfloat16, inplace=True)
    model, optimizer = optimize(model, optimizer=optimizer, inplace=True)
    train(model, optimizer, 2)
    assert not any(map(torch.equal, before, model.parameters()))


def test_restore_gives_float32_parameters_back() -> None:
    model = net()
    fast, optimizer = in_bfloat16(model)
    train(fast, optimizer, 2, dtype=torch.bfloat16)
    want = {k: v.clone() for k, v in fast.state_dict().items()}
    back = restore(fast)
    assert all(p.dtype == torch.float32 for p in back.parameters())
    assert all(torch.equal(v, want[k]) for k, v in back.state_dict().items())
    train(back, optimizer, 2)  # goes on in float32


def test_inference_after_training() -> None:
    model = net()
    fast, optimizer = in_bfloat16(model)
    train(fast, optimizer, 3, dtype=torch.bfloat16)
    ready = optimize(fast.eval(), dtype=torch.bfloat16)
    (x, _), *_ = batches(1)
    with torch.no_grad():
        want = fast(x)
        torch.testing.assert_close(ready(x).float(), want.float(), rtol=5e-2, atol=5e-2)


def test_sparse_gradients_of_reduced_parameters_are_refused() -> None:
    model = nn.Linear(8, 8).train()
    fast, optimizer = in_bfloat16(model)
    fast.weight.grad = torch.eye(8, dtype=torch.bfloat16).to_sparse()
    with pytest.raises(RuntimeError, match="must be dense"):
        optimizer.step()


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda p: Lamb(p, lr=-1.0), "Lamb: lr must not be negative"),
        (lambda p: Lamb(p, eps=-1.0), "Lamb: eps must not be negative"),
        (lambda p: Lamb(p, weight_decay=-1.0), "Lamb: weight_decay must not be negative"),
        (lambda p: Lamb(p, betas=(1.0, 0.9)), r"Lamb: betas\[0\] must be in \[0, 1\)"),
        (lambda p: Lamb(p, betas=(0.9,)), "Lamb: betas must be two numbers"),
        (lambda p: Lamb(p, lr="1"), "Lamb: lr must be a number, got '1'"),
        (lambda p: Lars(p, lr=-1.0), "Lars: lr must not be negative"),
        (lambda p: Lars(p, momentum=-0.1), "Lars: momentum must not be negative"),
        (lambda p: Lars(p, eeta=float("nan")), "Lars: eeta must not be negative"),
        (lambda p: Lamb([]), "empty parameter list"),
    ],
)
def test_bad_hyperparameters(call: Any, words: str) -> None:
    with pytest.raises((TypeError, ValueError), match=words):
        call(nn.Linear(2, 2).parameters())


def test_create_optimizer_lars() -> None:
    model = net()
    one = create_optimizer_lars(model, 0.1, 0.9, 1e-4, False, 0.0)
    assert len(one.param_groups) == 1
    two = create_optimizer_lars(model, 0.1, 0.9, 1e-4, True, 0.0)
    names = {id(p): n for n, p in model.named_parameters()}
    plain = {names[id(p)] for p in two.param_groups[1]["params"]}
    assert plain == {"0.bias", "1.weight", "1.bias", "4.bias", "5.weight", "5.bias", "6.bias"}
    assert two.param_groups[1]["weight_decay"] == 0.0
    train(model, two, 2)


def test_steps_compare_with_plain_arithmetic() -> None:
    """Lamb and Lars against their definitions, in float64."""
    generator = torch.Generator().manual_seed(3)
    w = torch.randn(50, generator=generator, dtype=torch.float64)
    lamb_p, lars_p = (nn.Parameter(w.float()) for _ in range(2))
    lamb = Lamb([lamb_p], lr=0.1, weight_decay=0.01, eps=1e-6)
    lars = Lars([lars_p], lr=0.1, momentum=0.9, eeta=0.02, weight_decay=0.01, epsilon=1e-9)
    a, b = w.clone(), w.clone()
    m, v, buffer = torch.zeros_like(w), torch.zeros_like(w), None
    for step in range(1, 4):
        g = torch.randn(50, generator=generator, dtype=torch.float64)
        m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g
        u = m / (1 - 0.9**step) / ((v / (1 - 0.999**step)).sqrt() + 1e-6) + 0.01 * a
        a = a - 0.1 * a.norm() / u.norm() * u
        d = (g + 0.01 * b) * 0.02 * b.norm() / (g.norm() + 0.01 * b.norm() + 1e-9)
        buffer = d if buffer is None else 0.9 * buffer + d
        b = b - 0.1 * buffer
        lamb_p.grad, lars_p.grad = g.float(), g.float()
        lamb.step()
        lars.step()
    torch.testing.assert_close(lamb_p.detach().double(), a, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(lars_p.detach().double(), b, rtol=1e-5, atol=1e-5)


def test_an_optimizer_whose_step_calls_the_model() -> None:
    def run(dtype: torch.dtype | None, prepare: bool) -> float:
        torch.manual_seed(0)
        layers = nn.Flatten(), nn.Linear(108, 8), nn.Tanh(), nn.Linear(8, 4)
        model: nn.Module = nn.Sequential(*layers).train()
        optimizer: Any = torch.optim.LBFGS(model.parameters(), lr=0.1)
        if prepare:
            model, optimizer = optimize(model, optimizer=optimizer, dtype=dtype)
        x, y = batches(1)[0]

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            return loss

        return sum(optimizer.step(closure).item() for _ in range(2))

    assert run(None, True) == run(None, False)
    with pytest.raises(NotImplementedError, match="dtype must be None for LBFGS"):
        run(torch.bfloat16, True)


@pytest.mark.parametrize("name", ["gradient_as_bucket_view", "find_unused_parameters"])
def test_what_float16_under_ddp_cannot(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from types import SimpleNamespace

    ddp = nn.parallel.DistributedDataParallel
    kinds = ("mixed_precision", "static_graph", "gradient_as_bucket_view", "find_unused_parameters")
    wrapper = SimpleNamespace(
        **{**dict.fromkeys(kinds, False), "mixed_precision": None, name: True}
    )
    monkeypatch.setattr(ddp, "_get_active_ddp_module", lambda: wrapper)
    model = net()
    model, _ = optimize(model, optimizer=torch.optim.SGD(model.parameters()), dtype=torch.float16)
    with pytest.raises(NotImplementedError, match=f"{name} must be False for float16"):
        model(batches(1)[0][0])

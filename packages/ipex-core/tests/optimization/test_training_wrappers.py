# SPDX-License-Identifier: Apache-2.0
"""Training prepared by `optimize`, inside what people wrap it in: DDP, FSDP2, checkpointing, compilation, files."""

from __future__ import annotations

import copy
import os
import signal
from typing import Any

import pytest
import torch
from torch import nn

from ipex_core import optimize
from ipex_core.optim import Lamb, Lars
from ipex_core.testing import run_ranks

Tensor = torch.Tensor

MAKE: dict[str, Any] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2),
    "lamb": lambda p: Lamb(p, lr=1e-2),
    "lars": lambda p: Lars(p, lr=1.0, momentum=0.9, eeta=1e-2, weight_decay=1e-3),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=1e-3),
}


def net(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(8, 16),
        nn.LayerNorm(16),
        nn.GELU(),
        nn.Linear(16, 16),
        nn.ReLU(),
        nn.Linear(16, 3),
    ).train()


def data(step: int, rows: int = 12) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    y = torch.randint(0, 3, (rows,), generator=generator)
    centers = torch.eye(3, 8)
    return centers[y] + 0.1 * torch.randn(rows, 8, generator=generator), y


def loss_of(model: Any, x: Tensor, y: Tensor, dtype: Any = None) -> Tensor:
    with torch.autocast("cpu", dtype=dtype or torch.bfloat16, enabled=dtype is not None):
        return nn.functional.cross_entropy(model(x).float(), y)


def steps(model: Any, optimizer: Any, numbers: range, dtype: Any = None) -> list[float]:
    losses = []
    for step in numbers:
        optimizer.zero_grad()
        loss = loss_of(model, *data(step), dtype)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def prepared(name: str, dtype: Any, **options: Any) -> tuple[Any, Any]:
    model = net()
    return optimize(model, optimizer=MAKE[name](model.parameters()), dtype=dtype, **options)


# ------------------------------------------------------------------------------------------------- several processes


def with_ddp(rank: int, ranks: int) -> list[str]:
    """Each rank has a part of the batch; the result is that of one process with the whole batch."""
    found = []
    for name, dtype, split in (
        ("sgd", None, None),
        ("adamw", torch.bfloat16, None),
        ("lamb", torch.bfloat16, None),
        ("adamw", torch.bfloat16, False),
        ("rmsprop", torch.bfloat16, None),
        ("adamw", torch.float16, None),
    ):
        model, optimizer = prepared(name, dtype, split_master_weight_for_bf16=split)
        whole, other = prepared(name, dtype, split_master_weight_for_bf16=split)
        wrapped = nn.parallel.DistributedDataParallel(model)
        for step in range(6):
            if step == 4:  # loading does not cut the wires to the wrapper either
                optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
                wrapped.load_state_dict(copy.deepcopy(wrapped.state_dict()))
            x, y = data(step)
            optimizer.zero_grad()
            loss_of(wrapped, x.chunk(ranks)[rank], y.chunk(ranks)[rank], dtype).backward()
            if step == 2:
                nn.utils.clip_grad_norm_(wrapped.parameters(), 0.5)
            optimizer.step()
            other.zero_grad()
            loss_of(whole, x, y, dtype).backward()
            if step == 2:
                nn.utils.clip_grad_norm_(whole.parameters(), 0.5)
            other.step()
        tolerance = 1e-5 if dtype is None else 2e-2
        worst = max(
            float((a - b).abs().max())
            for a, b in zip(model.state_dict().values(), whole.state_dict().values(), strict=True)
        )
        same = all(v.dtype == torch.float32 for v in wrapped.state_dict().values())
        found.append("ok" if worst < tolerance and same else f"{name} {dtype} {split}: {worst}")
        # Every rank has the same bits.
        mine = torch.cat([v.flatten() for v in model.state_dict().values()])
        first = mine.clone()
        torch.distributed.broadcast(first, 0)
        found.append("ok" if torch.equal(mine, first) else f"{name}: ranks differ")
    return found


def test_distributed_data_parallel() -> None:
    for result in run_ranks(with_ddp, 2):
        assert result == ["ok"] * 12, result


def with_fsdp(rank: int, ranks: int) -> list[str]:
    """`fully_shard` before the optimizer is made and `optimize` is called, as its documentation asks for."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    mesh = init_device_mesh("cpu", (ranks,))
    found = []
    for name, policy, tolerance in (
        ("sgd", None, 1e-5),
        ("adamw", None, 1e-5),
        ("lamb", None, 1e-4),
        ("lars", None, 1e-4),
        ("adamw", MixedPrecisionPolicy(torch.bfloat16, torch.float32), 3e-2),
    ):
        model, stock = net(), net()
        for layer in (model[0], model[3], model):
            fully_shard(layer, mesh=mesh, **({"mp_policy": policy} if policy else {}))
        model, optimizer = optimize(model, optimizer=MAKE[name](model.parameters()), inplace=True)
        other = MAKE[name](stock.parameters())
        for step in range(5):
            x, y = data(step)
            optimizer.zero_grad()
            nn.functional.cross_entropy(
                model(x.chunk(ranks)[rank]).float(), y.chunk(ranks)[rank]
            ).backward()
            optimizer.step()
            other.zero_grad()
            nn.functional.cross_entropy(stock(x), y).backward()
            other.step()
        worst = max(
            float((a.full_tensor() - b).abs().max())
            for a, b in zip(model.parameters(), stock.parameters(), strict=True)
        )
        found.append("ok" if worst < tolerance else f"{name} {policy}: {worst}")
    # 16-bit master weights of parameters that are spread: FSDP has a policy of its own for that.
    model = net()
    fully_shard(model, mesh=mesh)
    try:
        optimize(
            model, optimizer=MAKE["sgd"](model.parameters()), dtype=torch.bfloat16, inplace=True
        )
    except NotImplementedError as error:
        found.append("ok" if "MixedPrecisionPolicy" in str(error) else str(error))
    else:
        found.append("no error")
    return found


def test_fully_sharded() -> None:
    for result in run_ranks(with_fsdp, 2):
        assert result == ["ok"] * 6, result


def fsdp_after(rank: int, ranks: int) -> list[str]:
    """`optimize` first, then FSDP, which puts other parameters in the place of the optimizer's."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

    mesh = init_device_mesh("cpu", (ranks,))
    found = []
    for name in ("sgd", "adamw", "lamb"):
        stock = net()
        other = MAKE[name](stock.parameters())
        model, optimizer = prepared(name, None)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
        slower = torch.optim.lr_scheduler.StepLR(other, 2)
        for layer in (model[0], model[3], model):
            fully_shard(layer, mesh=mesh)
        for step in range(4):
            x, y = data(step)
            optimizer.zero_grad()
            loss_of(model, x.chunk(ranks)[rank], y.chunk(ranks)[rank]).backward()
            optimizer.step()
            other.zero_grad()
            loss_of(stock, x, y).backward()
            other.step()
            schedule.step()
            slower.step()
        worst = max(
            float((a.full_tensor() - b).abs().max())
            for a, b in zip(model.parameters(), stock.parameters(), strict=True)
        )
        found.append("ok" if worst < 1e-5 else f"{name}: {worst}")

    def message(call: Any) -> None:
        try:
            call()
        except (RuntimeError, NotImplementedError) as error:
            found.append(f"{type(error).__name__}: {error}")
        else:
            found.append("no error")

    cpu = torch.device("cpu")
    model, optimizer = prepared("sgd", torch.bfloat16)
    for index in (0, 3, 5):
        fully_shard(model[index], mesh=mesh)
    message(lambda: steps(model, optimizer, range(1), torch.bfloat16))
    model, optimizer = prepared("sgd", None)
    whole = FullyShardedDataParallel(model, device_id=cpu)
    message(lambda: steps(whole, optimizer, range(1)))
    whole = FullyShardedDataParallel(net(), device_id=cpu, use_orig_params=True)
    other = MAKE["sgd"](whole.parameters())
    message(lambda: optimize(whole, optimizer=other, dtype=torch.bfloat16, inplace=True))
    return found


def test_fully_sharded_after_optimize() -> None:
    for result in run_ranks(fsdp_after, 2):
        assert result[:3] == ["ok"] * 3, result
        for text in result[3:5]:
            assert "RuntimeError: optimize: parameters must not be replaced by FSDP" in text, result
        assert "NotImplementedError: optimize: dtype must be None" in result[5], result


def scaled_in_float16(rank: int, ranks: int) -> str:
    """Gradients are scaled, summed over ranks, unscaled, clipped; too large a scale is found and lowered."""
    model, optimizer = prepared("sgd", torch.float16)
    whole = net()
    other = MAKE["sgd"](whole.parameters())
    wrapped = nn.parallel.DistributedDataParallel(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20, growth_interval=100)
    for step in range(16):
        x, y = data(step)
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            loss = nn.functional.cross_entropy(
                wrapped(x.chunk(ranks)[rank]).float(), y.chunk(ranks)[rank]
            )
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        before = scaler.get_scale()
        nn.utils.clip_grad_norm_(wrapped.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()
        if scaler.get_scale() < before:
            continue  # skipped
        other.zero_grad()
        nn.functional.cross_entropy(whole(x), y).backward()
        nn.utils.clip_grad_norm_(whole.parameters(), 0.5)
        other.step()
    pairs = zip(model.state_dict().values(), whole.state_dict().values(), strict=True)
    worst = max(float((a - b).abs().max()) for a, b in pairs)
    # Some steps were skipped, most were not.
    fine = worst < 2e-2 and 2.0**12 < scaler.get_scale() < 2.0**20
    return "ok" if fine else f"{worst}, scale {scaler.get_scale()}"


def test_scaled_gradients_of_ranks() -> None:
    assert run_ranks(scaled_in_float16, 2) == ["ok", "ok"]


def a_rank_dies(rank: int, ranks: int) -> str:
    model, optimizer = prepared("adamw", torch.bfloat16)
    wrapped = nn.parallel.DistributedDataParallel(model)
    steps(wrapped, optimizer, range(2), torch.bfloat16)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        steps(wrapped, optimizer, range(5), torch.bfloat16)
    except RuntimeError as error:
        return str(error)
    return "no error"


def test_a_killed_rank_is_an_error_of_the_others() -> None:
    found = run_ranks(a_rank_dies, 2, timeout=5.0)
    assert found[1] is None
    text = found[0].lower()
    assert any(word in text for word in ("closed by peer", "timed out", "reset by peer")), text


# ------------------------------------------------------------------------------------------------------- one process


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_activation_checkpointing(dtype: Any, reentrant: bool) -> None:
    from torch.utils.checkpoint import checkpoint

    class Checkpointed(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: Tensor) -> Tensor:
            x = x.clone().requires_grad_()
            return checkpoint(self.inner, x, use_reentrant=reentrant)

    model, optimizer = prepared("adamw", dtype)
    plain, other = prepared("adamw", dtype)
    got = steps(Checkpointed(model), optimizer, range(5), dtype)
    assert got == steps(plain, other, range(5), dtype)


@pytest.mark.parametrize("name", ["sgd", "adamw", "lamb"])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_accumulation_and_clipping(name: str, dtype: Any) -> None:
    model, optimizer = prepared(name, dtype)
    whole, other = prepared(name, dtype)
    for step in range(4):
        x, y = data(step)
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        for a, b in zip(x.chunk(3), y.chunk(3), strict=True):
            (loss_of(model, a, b, dtype) / 3).backward()
        first = nn.utils.clip_grad_norm_(model.parameters(), 0.3)
        optimizer.step()
        other.zero_grad()
        loss_of(whole, x, y, dtype).backward()
        second = nn.utils.clip_grad_norm_(whole.parameters(), 0.3)
        other.step()
        torch.testing.assert_close(first, second, rtol=3e-2 if dtype else 1e-5, atol=1e-6)
    tolerance = {"rtol": 2e-2, "atol": 2e-2} if dtype else {"rtol": 1e-5, "atol": 1e-5}
    torch.testing.assert_close(model.state_dict(), whole.state_dict(), **tolerance)


# Dynamo looks for a gradient at the loss, which is no leaf.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_compiled_step(dtype: Any) -> None:
    """Forward and loss compiled, the step of the optimizer compiled or left to a break in the graph."""
    model, optimizer = prepared("adamw", dtype)
    plain, other = prepared("adamw", dtype)

    def one(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(model, x, y, dtype)
        loss.backward()
        optimizer.step()
        return loss.detach()

    compiled = torch.compile(one, backend="aot_eager")
    got = [float(compiled(*data(step))) for step in range(4)]
    want = steps(plain, other, range(4), dtype)
    torch.testing.assert_close(torch.tensor(got), torch.tensor(want), rtol=2e-2, atol=1e-3)
    torch.testing.assert_close(
        model.state_dict(), plain.state_dict(), rtol=2e-2, atol=2e-2 if dtype else 1e-5
    )


@pytest.mark.parametrize("name", list(MAKE))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_stock_checkpoint_and_back(name: str, dtype: torch.dtype, tmp_path: Any) -> None:
    stock = net()
    other = MAKE[name](stock.parameters())
    steps(stock, other, range(3))
    file = tmp_path / "stock.pt"
    torch.save({"model": stock.state_dict(), "optimizer": other.state_dict()}, file)
    model, optimizer = prepared(name, dtype)
    saved = torch.load(file, weights_only=True)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    for key, value in model.state_dict().items():
        assert torch.equal(value, saved["model"][key]), key
    reduced = None if dtype == torch.float32 else dtype
    steps(model, optimizer, range(3, 6), reduced)
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    again = net(seed=1)
    last = MAKE[name](again.parameters())
    saved = torch.load(file, weights_only=True)
    again.load_state_dict(saved["model"])
    last.load_state_dict(saved["optimizer"])
    got = steps(again, last, range(6, 9))
    want = steps(stock, other, range(3, 9))[3:]
    torch.testing.assert_close(
        torch.tensor(got), torch.tensor(want), rtol=1e-5 if reduced is None else 0.1, atol=3e-2
    )


def test_copy_of_a_trained_model_goes_on_alone() -> None:
    model, optimizer = prepared("adamw", torch.bfloat16)
    steps(model, optimizer, range(2), torch.bfloat16)
    twin, second = copy.deepcopy((model, optimizer))
    before = {k: v.clone() for k, v in model.state_dict().items()}
    steps(twin, second, range(2, 4), torch.bfloat16)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    steps(model, optimizer, range(2, 4), torch.bfloat16)
    for key, value in model.state_dict().items():
        assert torch.equal(value, twin.state_dict()[key]), key

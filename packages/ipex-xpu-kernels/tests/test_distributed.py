# SPDX-License-Identifier: Apache-2.0
"""Collectives, DDP and FSDP of tensors of the device, in two processes."""

from __future__ import annotations

import os
import re
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from ipex_core.testing import run_ranks

pytestmark = pytest.mark.usefixtures("needs_device")


def native() -> Any:
    """Return the native module of the package."""
    from ipex_xpu_kernels import _device

    return _device.native()


def start(rank: int, ranks: int, folder: str, way: str = "auto") -> None:
    """Take the device, and then a group: where the package is not installed, torch does not load it.

    Tensors move as `set_collective_mode` says, or by copies, as on a device whose memory the host cannot read.
    """
    import ipex_xpu_kernels

    assert ipex_xpu_kernels.activate().mode == "own"
    dist.destroy_process_group()
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/start", rank=rank, world_size=ranks
    )
    native().set_zero_copy(way != "copies")
    native().set_collective_mode("auto" if way == "copies" else way)
    dist.barrier()  # one that ends early is not to end before the others are connected


def leave() -> None:
    """Leave the group once all processes are in it: another one may still be connecting to this one."""
    dist.barrier()
    dist.destroy_process_group()


def backends(rank: int, ranks: int, folder: str) -> list[Any]:
    """All names of back ends that users write."""
    start(rank, ranks, folder)
    leave()
    found: list[Any] = []
    for name in ("gloo", "xpu_gloo", None, "cpu:gloo,xpu:xpu_gloo", "xpu:gloo"):
        dist.init_process_group(
            name, init_method=f"file://{folder}/{name}", rank=rank, world_size=ranks
        )
        x = torch.full((3,), float(rank + 1), device="xpu")
        dist.all_reduce(x)
        found.append(x.tolist())
        leave()
    try:
        dist.init_process_group(
            "xccl", init_method=f"file://{folder}/x", rank=rank, world_size=ranks
        )
    except RuntimeError as error:
        found.append(str(error))
    return found


def collectives(rank: int, ranks: int, folder: str, way: str) -> dict[str, Any]:
    """One result of each collective, as lists."""
    start(rank, ranks, folder, way)
    found: dict[str, Any] = {}
    device = "xpu"
    mine = torch.arange(4, dtype=torch.float32, device=device) + 10 * rank

    x = mine.clone()
    dist.all_reduce(x, op=dist.ReduceOp.AVG)
    found["mean"] = x.tolist()
    x = mine.clone().bfloat16()
    dist.all_reduce(x, op=dist.ReduceOp.MAX)
    found["max"] = x.tolist()
    # Not contiguous, and without waiting at once.
    x = torch.zeros(3, 2, device=device).t()
    x.copy_(torch.full((2, 3), float(rank + 1)))
    work = dist.all_reduce(x, async_op=True)
    work.wait()
    found["strided"] = (x.tolist(), work.is_completed(), x.is_contiguous())
    x = mine.clone()
    future = dist.all_reduce(x, async_op=True).get_future()
    found["future"] = future.then(lambda f: (f.value()[0] * 2).tolist()).wait()
    x = mine.clone()
    dist.all_reduce(x, async_op=True)  # nobody keeps the work
    dist.barrier()

    x = mine.clone() > 11
    dist.broadcast(x, src=1)
    found["broadcast bool"] = x.tolist()
    parts = [torch.empty(4, device=device) for _ in range(ranks)]
    dist.all_gather(parts, mine)
    found["all_gather"] = [p.tolist() for p in parts]
    whole = torch.empty(8, dtype=torch.int16, device=device)
    dist.all_gather_into_tensor(whole, mine.to(torch.int16))
    found["all_gather_into_tensor"] = whole.tolist()
    out = torch.empty(2, device=device)
    dist.reduce_scatter_tensor(out, mine, op=dist.ReduceOp.AVG)
    found["reduce_scatter_tensor"] = out.tolist()
    dist.reduce_scatter(out, [mine[:2].clone(), mine[2:].clone()])
    found["reduce_scatter"] = out.tolist()
    out = torch.empty(4, device=device)
    dist.all_to_all_single(out, mine)
    found["all_to_all_single"] = out.tolist()
    out = torch.empty(1 if rank == 0 else 3, dtype=torch.bool, device=device)
    sizes = [1, 0] if rank == 0 else [1, 2]
    dist.all_to_all_single(
        out,
        mine[:2] > 0,
        output_split_sizes=sizes,
        input_split_sizes=[1, 1] if rank == 0 else [0, 2],
    )
    found["all_to_all_single bool"] = out.tolist()
    outs = [torch.empty(2, device=device) for _ in range(ranks)]
    if torch.__version__ >= "2.13":  # gloo of older ones has none for lists
        dist.all_to_all(outs, list(mine.view(2, 2)))
        found["all_to_all"] = [o.tolist() for o in outs]
    x = mine.clone()
    dist.reduce(x, dst=0)
    found["reduce"] = x.tolist() if rank == 0 else None
    parts = [torch.empty(4, device=device) for _ in range(ranks)] if rank == 0 else None
    dist.gather(mine, parts, dst=0)
    found["gather"] = parts and [p.tolist() for p in parts]
    out = torch.empty(2, device=device)
    dist.scatter(out, list(mine.view(2, 2)) if rank == 1 else None, src=1)
    found["scatter"] = out.tolist()
    x = torch.empty(4, device=device)
    if rank == 0:
        dist.send(mine, 1)
        dist.isend(mine * 2, 1, tag=3).wait()
    else:
        dist.recv(x, 0)
        y = torch.empty(4, device=device)
        dist.irecv(y, 0, tag=3).wait()
        found["recv"] = (x.tolist(), y.tolist())
    ops = [
        dist.P2POp(dist.isend, mine, 1 - rank),
        dist.P2POp(dist.irecv, x, 1 - rank),
    ]
    for request in dist.batch_isend_irecv(ops):
        request.wait()
    found["batch"] = x.tolist()
    objects: list[Any] = [None] * ranks
    dist.all_gather_object(objects, {"rank": rank})
    found["objects"] = objects
    payload = [torch.ones(2, device=device) if rank == 0 else None]
    dist.broadcast_object_list(payload, src=0)
    found["object of the device"] = str(payload[0].device) if payload[0] is not None else ""
    from torch.distributed import _functional_collectives as functional

    found["functional"] = functional.all_reduce(mine, "sum", dist.group.WORLD).tolist()
    group = [dist.new_group([r]) for r in range(ranks)][rank]
    x = mine.clone()
    dist.all_reduce(x, group=group)
    found["subgroup"] = x.equal(mine)
    found["direct"] = native().direct_collectives() > 0
    return found


def large(rank: int, ranks: int, folder: str) -> tuple[int, list[str]]:
    """Values that do not fit the shared memory at once, and wrong results by name."""
    start(rank, ranks, folder, "direct")
    wrong = []

    def check(name: str, found: torch.Tensor, expected: torch.Tensor) -> None:
        if not found.cpu().equal(expected):
            wrong.append(f"{name}: {found.dtype} {found.shape}")

    for dtype, n in (
        (torch.float32, 1_300_001),
        (torch.bfloat16, 70_000),
        (torch.int32, 5),
        (torch.int8, 3_000_000),
    ):
        generator = torch.Generator().manual_seed(7)
        every = torch.randint(-4, 5, (ranks, n), generator=generator).to(dtype)
        mine = every[rank].to("xpu")
        for op, expected in (
            (dist.ReduceOp.SUM, every.sum(0).to(dtype)),
            (dist.ReduceOp.MAX, every.amax(0)),
            (dist.ReduceOp.MIN, every.amin(0)),
            (dist.ReduceOp.PRODUCT, every.prod(0).to(dtype)),
        ):
            x = mine.clone()
            works = [dist.all_reduce(x, op=op, async_op=True)]
            y = (mine if rank == 1 else torch.zeros_like(mine)).clone()
            works.append(dist.broadcast(y, src=1, async_op=True))
            for work in works:
                work.wait()
            check(f"all_reduce {op}", x, expected)
            check("broadcast", y, every[1])
        whole = torch.empty(ranks * n, dtype=dtype, device="xpu")
        dist.all_gather_into_tensor(whole, mine)
        check("all_gather_into_tensor", whole, every.flatten())
        columns = torch.empty(n, ranks, dtype=dtype, device="xpu")
        dist.all_gather(list(columns.unbind(1)), mine)
        check("all_gather", columns, every.t().contiguous())
        out = torch.empty(n, dtype=dtype, device="xpu")
        dist.reduce_scatter_tensor(out, torch.cat([mine * (r + 1) for r in range(ranks)]))
        check("reduce_scatter_tensor", out, (every.sum(0) * (rank + 1)).to(dtype))
    leave()
    return native().direct_collectives(), wrong


def groups(rank: int, ranks: int, folder: str) -> tuple[int, list[float]]:
    """Count the files that are mapped once groups came and went."""
    start(rank, ranks, folder, "direct")
    found = []
    for i in range(6):
        group = dist.new_group()
        x = torch.full((5,), float(i), device="xpu")
        dist.all_reduce(x, group=group)
        found.append(x[0].item())
        dist.destroy_process_group(group)
        del group
        dist.barrier()
    leave()
    return Path("/proc/self/maps").read_text().count("/dev/shm/ipex-xpu"), found


def network() -> nn.Module:
    """The model of the tests of training; equal in all processes."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(6, 16),
        nn.GELU(),
        nn.LayerNorm(16),
        nn.Linear(16, 16),
        nn.ReLU(),
        nn.Linear(16, 3),
    )


def data() -> tuple[torch.Tensor, torch.Tensor]:
    """Four steps of eight samples."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(4, 8, 6, generator=generator)
    return x, torch.randint(3, (4, 8), generator=generator)


def steps(model: nn.Module, part: slice, device: str) -> None:
    """Train with the samples of one process."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    inputs, labels = (t.to(device) for t in data())
    for x, y in zip(inputs, labels, strict=True):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x[part]), y[part]).backward()
        optimizer.step()


def train(rank: int, ranks: int, folder: str, kind: str, way: str) -> tuple[list[float], str, int]:
    """Train with DDP or FSDP2 and return all parameters."""
    start(rank, ranks, folder, way)
    model = network()
    part = slice(rank * 8 // ranks, (rank + 1) * 8 // ranks)
    torch.xpu.set_device(0)
    if kind == "ddp":
        wrapped: nn.Module = nn.parallel.DistributedDataParallel(model.to("xpu"), device_ids=[0])
        steps(wrapped, part, "xpu")
        state = model.state_dict()
    else:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh("xpu", (ranks,))
        for layer in model:
            if isinstance(layer, nn.Linear):
                fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        steps(model, part, "xpu")
        state = {n: p.full_tensor() for n, p in model.state_dict().items()}
    device = str(next(iter(state.values())).device)
    values = torch.cat([p.detach().cpu().flatten() for p in state.values()]).tolist()
    return values, device, native().direct_collectives()


def fsdp1(rank: int, ranks: int, folder: str) -> list[float]:
    """Train with the older FSDP and return all parameters."""
    start(rank, ranks, folder)
    from torch.distributed.fsdp import FullyShardedDataParallel

    torch.xpu.set_device(0)
    model = FullyShardedDataParallel(network().to("xpu"), device_id=0, use_orig_params=True)
    steps(model, slice(rank * 8 // ranks, (rank + 1) * 8 // ranks), "xpu")
    with FullyShardedDataParallel.summon_full_params(model):
        return torch.cat([p.detach().cpu().flatten() for p in model.parameters()]).tolist()


def late_error(rank: int, ranks: int, folder: str) -> str:
    """A process that ends early must be an error of the other one's work, not a wrong result."""
    start(rank, ranks, folder)
    if rank == 1:
        os._exit(0)
    x = torch.ones(4, device="xpu")
    try:
        dist.all_reduce(x, async_op=True).wait()
    except RuntimeError as error:
        return f"error: {type(error).__name__}"
    return "none"


def left_alone(rank: int, ranks: int, folder: str, kind: str) -> tuple[str, float]:
    """Wait for a process that has ended, or that comes to a collective later than the group allows."""
    start(rank, ranks, folder, "direct")
    seconds = 3 if kind == "late" else 600
    group = dist.new_group(timeout=timedelta(seconds=seconds))
    x = torch.ones(4, device="xpu")
    dist.all_reduce(x, group=group)
    if rank == 1 and kind == "ended":
        os._exit(0)
    if rank == 1:
        time.sleep(8)
    begin = time.monotonic()
    texts = []
    for _ in range(2):
        try:
            dist.all_reduce(x, group=group)
            texts.append("no error")
        except dist.DistBackendError as error:
            texts.append(str(error).splitlines()[0])
    return " | ".join(texts), time.monotonic() - begin


def run(function: Any, *args: Any) -> list[Any]:
    results = run_ranks(function, 2, *args)
    for result in results:
        assert result is not None and not (isinstance(result, str) and "Error" in result), result
    return results


def language_model(rank: int, ranks: int, folder: str, kind: str) -> tuple[Any, ...]:
    """Tokens, logits and the number of weights of a model that is divided among the processes."""
    start(rank, ranks, folder)
    from test_language_models import llama, tokens

    from ipex_llm import optimize
    from ipex_quant import WoqWeightDtype, get_weight_only_quant_qconfig_mapping

    options: dict[str, Any] = {"kv_cache_dtype": "int8"} if kind == "cache" else {}
    if kind == "int4":
        options["quantization_config"] = get_weight_only_quant_qconfig_mapping(
            weight_dtype=WoqWeightDtype.INT4, group_size=16
        )
    whole = optimize(llama(), dtype=torch.float32, device="xpu", **options)
    part = optimize(llama(), dtype=torch.float32, device="xpu", tp_group=True, **options)
    ids = torch.tensor([[1, 5, 9, 13, 2]], device="xpu")
    with torch.no_grad():
        logits = [model(ids).logits.cpu() for model in (part, whole)]
    found = [tokens(model, "xpu") for model in (part, whole)]
    torch.manual_seed(rank)  # what is drawn is the same all the same
    drawn = part.generate(ids, do_sample=True, max_new_tokens=8, pad_token_id=0).tolist()
    sizes = [sum(t.numel() for t in model.state_dict().values()) for model in (part, whole)]
    leave()
    return found, [t.tolist() for t in logits], drawn, sizes


@pytest.mark.parametrize("kind", ["plain", "int4", "cache"])
def test_a_language_model_that_is_divided(kind: str, tmp_path: Path) -> None:
    pytest.importorskip("ipex_llm")
    pytest.importorskip("transformers")
    results = run(language_model, str(tmp_path), kind)
    for found, logits, drawn, sizes in results:
        assert found[0] == found[1]
        torch.testing.assert_close(*map(torch.tensor, logits), rtol=1e-3, atol=1e-3)
        assert drawn == results[0][2]
        assert sizes[0] < 0.8 * sizes[1]


def test_names_of_back_ends(tmp_path: Path) -> None:
    for result in run(backends, str(tmp_path)):
        *values, message = result
        assert values == [[3.0] * 3] * 5
        assert "xccl is not there" in message and "init_process_group('gloo')" in message


EXPECTED: dict[str, list[Any]] = {
    "mean": [[5.0, 6.0, 7.0, 8.0]] * 2,
    "max": [[10.0, 11.0, 12.0, 13.0]] * 2,
    "strided": [([[3.0] * 3] * 2, True, False)] * 2,
    "future": [[20.0, 24.0, 28.0, 32.0]] * 2,
    "broadcast bool": [[False, False, True, True]] * 2,
    "all_gather": [[[0.0, 1.0, 2.0, 3.0], [10.0, 11.0, 12.0, 13.0]]] * 2,
    "all_gather_into_tensor": [[0, 1, 2, 3, 10, 11, 12, 13]] * 2,
    "reduce_scatter_tensor": [[5.0, 6.0], [7.0, 8.0]],
    "reduce_scatter": [[10.0, 12.0], [14.0, 16.0]],
    "all_to_all_single": [[0.0, 1.0, 10.0, 11.0], [2.0, 3.0, 12.0, 13.0]],
    "all_to_all_single bool": [[False], [True, True, True]],
    "all_to_all": [[[0.0, 1.0], [10.0, 11.0]], [[2.0, 3.0], [12.0, 13.0]]],
    "reduce": [[10.0, 12.0, 14.0, 16.0], None],
    "gather": [[[0.0, 1.0, 2.0, 3.0], [10.0, 11.0, 12.0, 13.0]], None],
    "scatter": [[10.0, 11.0], [12.0, 13.0]],
    "recv": [None, ([0.0, 1.0, 2.0, 3.0], [0.0, 2.0, 4.0, 6.0])],
    "batch": [[10.0, 11.0, 12.0, 13.0], [0.0, 1.0, 2.0, 3.0]],
    "objects": [[{"rank": 0}, {"rank": 1}]] * 2,
    "object of the device": ["xpu:0"] * 2,
    "functional": [[10.0, 12.0, 14.0, 16.0]] * 2,
    "subgroup": [True] * 2,
}


@pytest.mark.parametrize("way", ["auto", "copies", "direct"])
def test_collectives(way: str, tmp_path: Path) -> None:
    for rank, found in enumerate(run(collectives, str(tmp_path), way)):
        assert found["direct"] or way != "direct"
        for name, expected in EXPECTED.items():
            if name == "all_to_all" and torch.__version__ < "2.13":
                continue
            assert found.get(name) == expected[rank], (rank, name)


@pytest.mark.parametrize("way", ["auto", "direct"])
@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_training_equals_one_process(kind: str, way: str, tmp_path: Path) -> None:
    model = network()
    steps(model, slice(None), "cpu")
    expected = torch.cat([p.detach().flatten() for p in model.parameters()])
    for values, device, direct in run(train, str(tmp_path), kind, way):
        assert device == "xpu:0"
        assert direct > 0 or way == "auto"
        torch.testing.assert_close(torch.tensor(values), expected, rtol=1e-4, atol=1e-5)


def test_older_fsdp_equals_one_process(tmp_path: Path) -> None:
    model = network()
    steps(model, slice(None), "cpu")
    expected = torch.cat([p.detach().flatten() for p in model.parameters()])
    for values in run(fsdp1, str(tmp_path)):
        torch.testing.assert_close(torch.tensor(values), expected, rtol=1e-4, atol=1e-5)


def test_a_lost_process_is_an_error(tmp_path: Path) -> None:
    assert str(run_ranks(late_error, 2, str(tmp_path))[0]).startswith("error:")


@pytest.mark.parametrize("ranks", [2, 3])
def test_values_that_stay_on_the_device(ranks: int, tmp_path: Path) -> None:
    for result in run_ranks(large, ranks, str(tmp_path)):
        assert not isinstance(result, str), result
        count, wrong = result
        assert not wrong
        assert count == 4 * (4 * 2 + 3)


def test_groups_that_are_gone_keep_no_memory(tmp_path: Path) -> None:
    for maps, found in run(groups, str(tmp_path)):
        assert maps <= 2
        assert found == [2.0 * i for i in range(6)]


def test_a_process_that_has_ended_is_named(tmp_path: Path) -> None:
    (text, seconds), _ = run_ranks(left_alone, 2, str(tmp_path), "ended")
    assert re.search(r"rank 1 \(process \d+\) has ended", text) and "no error" not in text
    assert seconds < 30


def test_a_process_that_comes_too_late(tmp_path: Path) -> None:
    first, second = run_ranks(left_alone, 2, str(tmp_path), "late")
    assert "rank 1 did not come to a collective within the timeout" in first[0]
    assert second[0].count("has failed in rank 0") == 2
    assert first[1] < 30 and second[1] < 30

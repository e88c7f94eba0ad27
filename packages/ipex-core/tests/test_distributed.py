# SPDX-License-Identifier: Apache-2.0
"""Collectives over two and three processes: sums in shared memory, fallbacks, and what happens if a rank is missing."""

from __future__ import annotations

import os
import signal
import time
import warnings

import pytest
import torch

from ipex_core import config, distributed
from ipex_core.errors import OpArgumentError
from ipex_core.ops.collective import SLOT_BYTES
from ipex_core.testing import run_ranks

pytestmark = pytest.mark.skipif(not os.path.isdir("/dev/shm"), reason="no memory to share here")


def data_of(rank: int, size: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * rank + size)
    return torch.randn(size, generator=generator).to(dtype)


SIZES = (0, 1, 37, 4096, SLOT_BYTES // 2 + 5)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def sums(rank: int, ranks: int) -> list[object]:
    shared = distributed.shared_group() is not None
    found: list[object] = [shared]
    for dtype in DTYPES:
        for size in SIZES:
            x = data_of(rank, size, dtype)
            assert distributed.all_reduce(x) is None
            want = sum(data_of(r, size, dtype).float() for r in range(ranks)).to(dtype)
            found.append((torch.equal(x, want), x.float().sum().item()))
    # What shared memory does not do goes to the backend.
    x = torch.tensor([rank + 1])
    distributed.all_reduce(x)
    found.append(x.item() == ranks * (ranks + 1) // 2)
    x = torch.tensor([float(rank)])
    distributed.all_reduce(x, torch.distributed.ReduceOp.MAX)
    found.append(x.item() == ranks - 1)
    x = torch.ones(3)
    distributed.all_reduce(x, async_op=True).wait()
    found.append(x.tolist() == [float(ranks)] * 3)
    wide = torch.zeros(4, 2 * ranks).T
    columns = data_of(rank, 8, torch.float32).view(2, 4)
    wide[2 * rank : 2 * rank + 2] = columns
    distributed.all_reduce(wide)  # not contiguous
    parts = [torch.empty(2, 4) for _ in range(ranks)]
    distributed.all_gather(parts, columns)
    whole = torch.empty(2 * ranks, 4)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        distributed.all_gather_into_tensor(whole, columns)
    found.append(torch.equal(wide, torch.cat(parts)) and torch.equal(whole, wide))
    return found


@pytest.mark.parametrize("ranks", [2, 3])
def test_sums_are_those_of_float32_in_the_order_of_ranks(ranks):
    found = run_ranks(sums, ranks)
    assert found[0][0] is True, found
    assert all(result == found[0] for result in found)
    assert all(one is True or one[0] for one in found[0]), found[0]


def without_memory(rank: int, ranks: int) -> list[object]:
    with config.override(shared_memory=rank != 1):
        shared = distributed.shared_group()
    x = data_of(rank, 1000, torch.float32)
    distributed.all_reduce(x)
    want = sum(data_of(r, 1000, torch.float32) for r in range(ranks))
    y = torch.full((2, 3 - rank), float(rank + 1), dtype=torch.bfloat16)
    name = torch.distributed.group.WORLD.group_name
    wide = torch.ops.ipex.all_gather_columns(y, [3, 2], None, rank, 30.0, name)
    z = torch.ones(5, dtype=torch.bfloat16)
    torch.ops.ipex.all_reduce_(z, None, rank, 30.0, name)
    return [
        shared is None,
        torch.allclose(x, want),
        wide.float().tolist() == [[1.0, 1.0, 1.0, 2.0, 2.0]] * 2,
        z.float().tolist() == [2.0] * 5,
    ]


def test_one_rank_can_forbid_shared_memory():
    for result in run_ranks(without_memory, 2):
        assert result == [True] * 4


def gathers(rank: int, ranks: int) -> list[object]:
    shared = distributed.shared_group()
    found = []
    for sizes in ([5, 4, 4], [7, 0, 2], [90000, 1, 3]):
        x = data_of(rank, 2 * sizes[rank], torch.bfloat16).view(2, sizes[rank])
        y = torch.ops.ipex.all_gather_columns(x, sizes, shared.memory, rank, shared.timeout)
        every = [data_of(r, 2 * n, torch.bfloat16).view(2, n) for r, n in enumerate(sizes)]
        found.append(torch.equal(y, torch.cat(every, dim=1)))
    return found


def test_columns_of_different_widths_are_gathered():
    assert run_ranks(gathers, 3) == [[True] * 3] * 3


def one_dies(rank: int, ranks: int) -> object:
    x = torch.ones(8)
    distributed.all_reduce(x)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    start = time.monotonic()
    try:
        distributed.all_reduce(x)
    except RuntimeError as error:
        again = ""
        try:
            distributed.all_reduce(x)
        except RuntimeError as second:
            again = str(second)
        return [str(error), again, time.monotonic() - start]
    return "no error"


def test_a_killed_rank_is_named():
    found = run_ranks(one_dies, 3, timeout=3.0)
    assert found[1] is None
    for result in (found[0], found[2]):
        first, again, seconds = result
        assert "all_reduce_: rank 1 of 3" in first
        assert "rank 1 of 3 is missing" in again or "rank 1 of 3 did not arrive" in again
        assert seconds < 12


def different_sizes(rank: int, ranks: int) -> str:
    try:
        distributed.all_reduce(torch.ones(4 + rank))
    except RuntimeError as error:
        message = str(error)
    x = torch.ones(4)
    distributed.all_reduce(x)  # the group still works
    return f"{message} {x[0].item()}"


def test_different_sizes_are_an_error_of_all():
    found = run_ranks(different_sizes, 2)
    for rank, text in enumerate(found):
        want = f"got {5 - rank} elements of float32 to all_reduce_ on rank {1 - rank} and {4 + rank} elements"
        assert want in text and text.endswith("2.0"), text


def test_there_must_be_a_group():
    with pytest.raises(ValueError, match="default process group"):
        distributed.shared_group()


def test_memory_must_be_that_of_a_group():
    x = torch.ones(3)
    with pytest.raises(RuntimeError, match="memory must be the shared memory of a group"):
        torch.ops.ipex.all_reduce_(x, torch.zeros(640, dtype=torch.uint8), 0)
    with pytest.raises(RuntimeError, match="memory must be given where group is empty"):
        torch.ops.ipex.all_reduce_(x, None, 0)
    with pytest.raises(OpArgumentError, match="timeout must be positive"):
        from ipex_core.library.kernels import specs

        spec = specs()["all_reduce_"]
        spec.check(spec.bind(x, torch.zeros(640, dtype=torch.uint8), 0, 0.0))


def test_rank_of_a_launcher_is_used(monkeypatch):
    seen = {}
    monkeypatch.setattr(torch.distributed, "init_process_group", lambda *a: seen.update(args=a))
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setenv("PMI_RANK", "3")
    monkeypatch.setenv("PMI_SIZE", "8")
    distributed.init_process_group("gloo")
    assert seen["args"][0] == "gloo" and seen["args"][3:5] == (8, 3)

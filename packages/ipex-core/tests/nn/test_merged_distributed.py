# SPDX-License-Identifier: Apache-2.0
"""Embedding tables spread over two and three processes, against the same tables in one process."""

from __future__ import annotations

import copy
import os
import signal

import pytest
import torch
import torch.distributed as dist

from ipex_core.nn.embedding import (
    DistMergeEmbeddingBagWithAdaGrad,
    EmbeddingSpec,
    MergedEmbeddingBagWithAdaGrad,
)
from ipex_core.nn.embedding import distributed as _exchange
from ipex_core.testing import run_ranks

ROWS, DIM = (20, 7, 2), 5


def tables(dtype=torch.float32, last=False, mode="sum"):
    torch.manual_seed(0)
    return [
        torch.nn.EmbeddingBag(n, DIM, mode=mode, dtype=dtype, include_last_offset=last)
        for n in ROWS
    ]


def lookups(seed, bags, dtype=torch.int64, last=False):
    torch.manual_seed(seed)
    indices, offsets = [], []
    for n in ROWS:
        ends = torch.tensor([0, *torch.randint(0, 4, (bags,)).tolist()]).cumsum(0)
        indices.append(torch.randint(n, (int(ends[-1]),)).to(dtype))
        offsets.append((ends if last else ends[:-1]).to(dtype))
    return indices, offsets


def loss_of(bags):
    """Of bags ``[B, tables, D]``; a different weight for each table."""
    return (bags.float() * torch.arange(1.0, 4.0)[:, None]).square().sum()


def trains(rank, ranks, dtype, index, last, bags, split):
    kind = DistMergeEmbeddingBagWithAdaGrad
    merged = kind.from_embeddingbag_list(tables(dtype, last), lr=0.05)
    whole = MergedEmbeddingBagWithAdaGrad.from_embeddingbag_list(tables(dtype, last), lr=0.05)
    if split:
        merged.to_bfloat16_train()
        whole.to_bfloat16_train()
    close = dtype == torch.float32 and not split
    tolerance = {"rtol": 1e-5, "atol": 1e-5} if close else {"rtol": 3e-2, "atol": 3e-2}
    if dtype == torch.float64:
        tolerance = {"rtol": 1e-12, "atol": 1e-12}
    found = []
    for step in range(4):
        arguments = lookups(step, bags, index, last)
        got, want = merged(*arguments), torch.stack(whole(*arguments), 1)
        part = want.tensor_split(ranks)[rank]
        found.append(got.shape == part.shape and got.dtype == part.dtype)
        torch.testing.assert_close(got, part, **tolerance)
        loss_of(got).backward()
        loss_of(want).backward()
    found.append(all(weight.grad is None for weight in merged.weights))
    state = merged.gathered_state_dict()
    for key, value in whole.state_dict().items():
        torch.testing.assert_close(state[key], value, **tolerance)
    # A checkpoint of whole tables loads on any number of ranks, and into whole tables.
    again = kind.from_embeddingbag_list(tables(dtype, last))
    again.load_state_dict(state)
    own = merged.state_dict()
    found.append(all(torch.equal(value, own[key]) for key, value in again.state_dict().items()))
    whole.load_state_dict(state)
    return found


#: dtype, dtype of indices, include_last_offset, bags, split tables
CASES = (
    (torch.float32, torch.int64, False, 8, False),
    (torch.float32, torch.int32, True, 7, False),
    (torch.float64, torch.int64, True, 4, False),
    (torch.float32, torch.int64, False, 2, True),
)


def all_cases(rank, ranks):
    return [trains(rank, ranks, *case) for case in CASES]


@pytest.mark.parametrize("ranks", [2, 3])
def test_the_same_as_in_one_process(ranks):
    for result in run_ranks(all_cases, ranks):
        assert result == [[True] * 6] * len(CASES), result


def other_ways(rank, ranks):
    counts = torch.tensor([[1, 0, 2], [3, 1, 0], [0, 2, 2]])
    rows = torch.arange(int(counts[rank].sum())) + 10 * rank
    sent, received = counts[rank].tolist(), counts[:, rank].tolist()
    starts = counts.cumsum(1) - counts
    want = [10 * r + int(starts[r, rank]) + i for r in range(ranks) for i in range(received[r])]
    found = []
    for way in (_exchange._at_once, _exchange._by_gathering):
        got = way(rows.view(torch.uint8), [8 * n for n in sent], [8 * n for n in received], None)
        found.append(got.view(torch.int64).tolist() == want)
    # A backend that cannot do the first.
    refused = []

    def refusing(*_):
        refused.append(1)
        raise RuntimeError("Backend does not support alltoall")

    _exchange._at_once = _exchange._by_list = refusing
    wide = torch.stack([rows, rows], 1).bfloat16()
    got = _exchange.exchange(wide, sent, received, None)
    found.append(got.tolist() == [[x, x] for x in want])
    _exchange.exchange(wide, sent, received, None)
    return [
        *found,
        len(refused) == 2,
        _exchange.exchange(wide[:0], [0] * 3, [0] * 3, None).shape[0] == 0,
    ]


def test_backends_without_all_to_all():
    for result in run_ranks(other_ways, 3):
        assert result == [True] * 5, result


def wrong(rank, ranks):
    make = DistMergeEmbeddingBagWithAdaGrad.from_embeddingbag_list
    merged = make(tables())
    indices, offsets = lookups(0, 4)
    found = []

    def message(function):
        try:
            function()
        except (RuntimeError, AssertionError, ValueError) as error:
            found.append(f"{type(error).__name__}: {error}")
        else:
            found.append("no error")

    message(lambda: merged([indices[0] + 20, *indices[1:]], offsets))
    message(lambda: merged(indices, [offsets[0] - 1, *offsets[1:]]))
    message(lambda: merged(indices[:2], offsets[:2]))
    message(lambda: merged(indices, [offsets[0][:-1], *offsets[1:]]))
    message(lambda: make(tables(mode="mean")))
    message(lambda: make(tables(), lr=-1.0))
    message(lambda: merged(*lookups(rank, 4)))
    turned = [index.flip(0) if rank else index for index in indices]  # the same numbers
    message(lambda: merged(turned, offsets))
    message(lambda: merged([index.float() for index in indices], offsets))
    message(lambda: merged([index[None] for index in indices], offsets))
    # Wrong on one rank: the other one is told, and both are in step afterwards.
    message(lambda: merged([0 * indices[0] - rank, *indices[1:]], offsets))
    merged(indices, offsets)  # the group still works
    return found


def test_wrong_arguments():
    for rank, found in enumerate(run_ranks(wrong, 2)):
        texts = (
            r"indices[0] must hold rows in [0, 20)",
            "offset[0] must begin with 0",
            "must hold 3 tensor(s), one per table, got 2 and 2",
            "the same number of bags for each table, got [3, 4, 4]",
            "AssertionError: DistMergeEmbeddingBagWithAdaGrad: pooling_mode must be 'sum'",
            "ValueError: DistMergeEmbeddingBagWithAdaGrad: lr must be a finite number",
            *[f"must be the same on all ranks, got others on rank {1 - rank}"] * 2,
            "indices[0] must be 1-D, int32 or int64, got 1-D, float32",
            "indices[0] must be 1-D, int32 or int64, got 2-D, int64",
            ("must be the same on all ranks, got others on rank 1", "got -1")[rank],
        )
        for text, message in zip(texts, found, strict=True):
            assert text in message, (text, message)


def in_part_of_the_ranks(rank, ranks):
    group = dist.new_group([1, 2])
    if rank == 0:
        return [True] * 5
    specs = [
        EmbeddingSpec(n, DIM, "sum", torch.float32, table.weight, False, False)
        for n, table in zip(ROWS, tables(), strict=True)
    ]
    whole = MergedEmbeddingBagWithAdaGrad.from_embeddingbag_list(tables())
    merged = DistMergeEmbeddingBagWithAdaGrad(specs, group=group)
    other = copy.deepcopy(merged)
    want = torch.stack(whole(*lookups(0, 5)), 1).tensor_split(2)[rank - 1]
    found = [torch.allclose(module(*lookups(0, 5)), want) for module in (merged, other)]
    loss = loss_of(other(*lookups(0, 5)))
    loss.backward()
    try:
        loss.sum().backward()
        found.append(False)
    except RuntimeError as error:  # as of stock tables, on all ranks, before anything is sent
        found.append("second time" in str(error))
    found.append(torch.equal(merged.gathered_state_dict()["weights.0"], tables()[0].weight))
    return [*found, not torch.equal(other.weights[0], merged.weights[0])]


def test_a_copy_stays_in_its_group():
    for result in run_ranks(in_part_of_the_ranks, 3):
        assert result == [True] * 5, result


class Net(torch.nn.Module):
    def __init__(self, kind):
        super().__init__()
        torch.manual_seed(0)
        # As many rows on each rank: uneven ones are refused by the wrapper itself.
        even = [torch.nn.EmbeddingBag(n + n % 2, DIM, mode="sum") for n in ROWS]
        self.tables = kind.from_embeddingbag_list(even)
        self.linear = torch.nn.Linear(DIM, 1)

    def forward(self, indices, offsets):
        bags = self.tables(indices, offsets)
        return self.linear(bags if isinstance(bags, torch.Tensor) else torch.stack(bags, 1))


def inside_ddp(rank, ranks):
    parallel, found = torch.nn.parallel.DistributedDataParallel, []
    for kind in (DistMergeEmbeddingBagWithAdaGrad, MergedEmbeddingBagWithAdaGrad):
        net = Net(kind)
        names = [name for name, _ in net.named_parameters() if name.startswith("tables.")]
        before = [weight.detach().clone() for weight in net.tables.weights]
        parallel._set_params_and_buffers_to_ignore_for_model(net, names)
        whole = parallel(net)
        found.append(all(map(torch.equal, before, net.tables.weights)))
        for step in range(2):
            whole(*lookups(step, 6)).square().sum().backward()
        found.append(not any(map(torch.equal, before, net.tables.weights)))
        parallel._set_params_and_buffers_to_ignore_for_model(net, [])
        try:
            parallel(net)(*lookups(0, 6))
        except RuntimeError as error:
            found.append(str(error))
    return found


def test_tables_in_ddp_are_refused_unless_it_ignores_them():
    for found in run_ranks(inside_ddp, 2):
        assert found[:2] == [True, True], found
        assert "DistMergeEmbeddingBagWithAdaGrad: tables must not be parameters of" in found[2]
        assert "all ranks got the rows of rank 0" in found[2]
        assert found[3:5] == [True, True], found
        assert "each rank would update its own" in found[5]


def one_dies(rank, ranks):
    merged = DistMergeEmbeddingBagWithAdaGrad.from_embeddingbag_list(tables())
    bags = merged(*lookups(0, 6))
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        loss_of(bags).backward()
        for _ in range(3):  # what a rank sent before it was gone still arrives
            merged(*lookups(0, 6))
    except RuntimeError as error:
        return str(error)
    return "no error"


def test_a_killed_rank_is_an_error_of_the_others():
    found = run_ranks(one_dies, 3, timeout=5.0)
    assert found[1] is None
    for rank in (0, 2):
        assert f"on rank {rank} of 3: another rank has ended" in found[rank], found


def test_without_a_group():
    with pytest.raises(RuntimeError, match="process group must be initialized"):
        DistMergeEmbeddingBagWithAdaGrad.from_embeddingbag_list(tables())

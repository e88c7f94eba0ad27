# SPDX-License-Identifier: Apache-2.0
"""Forms of merged embedding tables: split, cast, int8, in huge pages."""

from __future__ import annotations

import copy

import pytest
import torch
from merged_checks import BAGS, DIM, lookups, loss_of, stock_tables

from ipex_core import config, optimize
from ipex_core.nn.embedding import (
    MergedEmbeddingBag,
    MergedEmbeddingBagWithAdaGrad,
    MergedEmbeddingBagWithCat,
    MergedEmbeddingBagWithSGD,
)
from ipex_core.nn.embedding import tables as memory


@pytest.mark.parametrize("kind", [MergedEmbeddingBagWithSGD, MergedEmbeddingBagWithAdaGrad])
def test_split_tables_train_as_float32(kind):
    """Steps too small for bfloat16 add up; the state dict is that of float32 tables."""
    whole = kind.from_embeddingbag_list(copy.deepcopy(stock_tables()), lr=1e-5)
    split = kind.from_embeddingbag_list(copy.deepcopy(stock_tables()), lr=1e-5)
    start = split.state_dict()["weights.0"].clone()
    split.to_bfloat16_train()
    split.to_bfloat16_train()  # once is enough
    assert torch.equal(split.state_dict()["weights.0"], start), "cut and joined bit by bit"
    assert split.weights[0].dtype == torch.bfloat16
    assert split(*lookups())[0].dtype == torch.bfloat16
    for seed in range(30):
        for module in (whole, split):
            bags = module(*lookups(seed))
            sum((value * 2).sum() for value in bags).backward()  # gradients that bfloat16 has
    state = split.state_dict()
    assert state["weights.0"].dtype == torch.float32
    assert not torch.equal(state["weights.0"], start)
    torch.testing.assert_close(state["weights.0"], whole.state_dict()["weights.0"])

    other = kind.from_embeddingbag_list(stock_tables(), lr=1e-5)
    other.to_bfloat16_train()
    other.load_state_dict(state)
    for key, value in other.state_dict().items():
        assert torch.equal(value, state[key]), key
    whole.load_state_dict(state)
    assert torch.equal(whole.weights[1], state["weights.1"])


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("to", [torch.float32, torch.float64, torch.float16])
@pytest.mark.parametrize("kind", [MergedEmbeddingBagWithSGD, MergedEmbeddingBagWithAdaGrad])
def test_tables_that_are_cast_train_in_that_dtype(kind, to, split):
    """Split ones are whole again, with all bits where the dtype has them."""
    stock = kind.from_embeddingbag_list(copy.deepcopy(stock_tables()), lr=0.01)
    merged = kind.from_embeddingbag_list(copy.deepcopy(stock_tables()), lr=0.01)
    if split:
        merged.to_bfloat16_train()
    merged.to(to)
    assert merged.dtype == merged.weights[0].dtype == merged.state_dict()["weights.0"].dtype == to
    if to != torch.float16:
        assert torch.equal(merged.weights[2].float(), stock.weights[2])
    for seed in range(2):
        for module in (stock, merged):
            loss_of(module(*lookups(seed))).backward()
    tolerance = 1e-5 if to != torch.float16 else 3e-2
    torch.testing.assert_close(
        merged.weights[2].float(), stock.weights[2], rtol=tolerance, atol=tolerance
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_int8_tables(dtype):
    whole = MergedEmbeddingBagWithCat.from_embeddingbag_list(stock_tables("mean"))
    small = MergedEmbeddingBagWithCat.from_embeddingbag_list(stock_tables("mean"))
    with torch.no_grad():
        small.weights[1][3] = 0.0
        whole.weights[1][3] = 0.0
    small.to_int8()
    small.to_int8()  # once is enough
    assert small.weights[0].dtype == small.dtype == torch.int8
    dense = torch.randn(BAGS, DIM)
    with torch.no_grad():
        got, want = small(*lookups(), dense.to(dtype)), whole(*lookups(), dense)
    assert got.dtype == dtype
    # Half a step of the largest number of a row.
    most = max(float(w.detach().abs().max()) for w in whole.weights) / 254
    tolerance = most * 1.01 + (0.0 if dtype == torch.float32 else 2e-2)
    torch.testing.assert_close(got.float(), want, rtol=0, atol=tolerance)
    other = MergedEmbeddingBagWithCat.from_embeddingbag_list(stock_tables("mean"))
    other.to_int8()
    other.load_state_dict(small.state_dict())
    with torch.no_grad():
        assert torch.equal(other(*lookups(), dense.to(dtype)), got)
        cast = optimize(torch.nn.ModuleList([small]).eval(), dtype=torch.bfloat16)[0]
        assert torch.equal(cast(*lookups(), dense.to(dtype)), got)
        cast = copy.deepcopy(small).bfloat16()
        torch.testing.assert_close(cast(*lookups(), dense.to(dtype)), got, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize(
    "kind", [MergedEmbeddingBag, MergedEmbeddingBagWithSGD, MergedEmbeddingBagWithAdaGrad]
)
@pytest.mark.parametrize("copies", [False, True])
def test_huge_pages(kind, copies, monkeypatch):
    torch.manual_seed(0)
    tables = [torch.nn.EmbeddingBag(n, 64, mode="sum") for n in (20000, 5)]
    advised = []
    if copies:  # as on systems that cannot gather memory where it is
        monkeypatch.setattr(memory, "_madvise", lambda: None)
    else:
        call = memory._madvise()
        monkeypatch.setattr(memory, "_madvise", lambda: lambda *a: advised.append(a) or call(*a))
    merged = kind.from_embeddingbag_list(tables)
    before = {key: value.clone() for key, value in merged.state_dict().items()}
    table, end = merged.weights[0].data_ptr(), merged.weights[0][-1].data_ptr() + 64 * 4
    assert table == tables[0].weight.data_ptr()
    if not copies and call is not None:
        assert advised
        assert all(first % (2 << 20) == size % (2 << 20) == 0 for first, size, _ in advised)
        assert any(table <= first and first + size <= end for first, size, _ in advised)
        with config.override(huge_pages=False):
            assert not memory.gather(merged.weights[0])
    merged.use_huge_pages()
    if copies:
        assert merged.weights[0].data_ptr() % (2 << 20) == 0
        assert merged.weights[0].data_ptr() != table
    assert merged.weights[1].data_ptr() == tables[1].weight.data_ptr()  # too small
    for key, value in merged.state_dict().items():
        assert torch.equal(value, before[key])
    indices, offsets = (
        [torch.tensor([19999, 1, 1]), torch.tensor([0, 4, 4])],
        [torch.tensor([0])] * 2,
    )
    merged(indices, offsets)[0].sum().backward()
    copied = copy.deepcopy(merged)
    assert torch.equal(copied.weights[0], merged.weights[0])

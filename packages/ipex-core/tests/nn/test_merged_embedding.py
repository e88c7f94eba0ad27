# SPDX-License-Identifier: Apache-2.0
"""Merged embedding tables against stock layers and optimizers."""

from __future__ import annotations

import copy

import pytest
import torch
from merged_checks import BAGS, DIM, ROWS, lookups, loss_of, stock_tables
from torch.nn import functional as F

import ipex_core.nn
from ipex_core.nn import modules
from ipex_core.nn.embedding import (
    EmbeddingSpec,
    MergedEmbeddingBag,
    MergedEmbeddingBagWithAdaGrad,
    MergedEmbeddingBagWithCat,
    MergedEmbeddingBagWithSGD,
)


@pytest.mark.parametrize("mode", ["sum", "mean"])
@pytest.mark.parametrize("last", [False, True])
def test_forward_and_gradients(mode, last):
    stock = stock_tables(mode, include_last_offset=last)
    merged = MergedEmbeddingBag.from_embeddingbag_list(stock)
    assert [key for key, _ in merged.named_parameters()] == ["weights.0", "weights.1", "weights.2"]
    assert merged.weights[0].data_ptr() == stock[0].weight.data_ptr()
    indices, offsets = lookups(dtype=torch.int32, last=last)
    want = [table(i, o) for table, i, o in zip(stock, indices, offsets, strict=True)]
    got = merged(indices, offsets)
    assert isinstance(got, tuple)
    torch.testing.assert_close(got, tuple(want))
    loss_of(got).backward()
    loss_of(want).backward()
    for ours, theirs in zip(merged.weights, stock, strict=True):
        torch.testing.assert_close(ours.grad, theirs.weight.grad)
    with torch.no_grad():
        torch.testing.assert_close(merged(indices, offsets), tuple(want))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(dtype):
    stock = stock_tables()
    merged = MergedEmbeddingBag.from_embeddingbag_list(stock)
    indices, offsets = lookups()
    plain = merged(indices, offsets)
    with torch.autocast("cpu", dtype=dtype):
        assert all(bag.dtype == torch.float32 for bag in merged(indices, offsets))  # for training
        with torch.no_grad():
            got = merged(indices, offsets)
    for bag, want in zip(got, plain, strict=True):
        assert torch.equal(bag, want.to(dtype))  # rounded once
    with torch.no_grad(), torch.autocast("cpu", dtype=dtype):
        wide = MergedEmbeddingBag.from_embeddingbag_list([t.double() for t in stock])
        assert wide(indices, offsets)[0].dtype == torch.float64


@torch.no_grad()
def test_with_dense_features_in_float64():
    stock = [table.double() for table in stock_tables()]
    merged = MergedEmbeddingBagWithCat.from_embeddingbag_list(stock)
    indices, offsets = lookups()
    dense = torch.randn(BAGS, DIM, dtype=torch.float64)
    bags = [table(i, o) for table, i, o in zip(stock, indices, offsets, strict=True)]
    torch.testing.assert_close(merged(indices, offsets, dense), torch.cat([dense, *bags], 1))


def test_results_may_be_changed_in_place():
    merged = MergedEmbeddingBag.from_embeddingbag_list(stock_tables())
    bags = merged(*lookups())
    sum(F.relu_(value).sum() for value in bags).backward()
    assert merged.weights[0].grad is not None


def test_factors():
    stock = stock_tables()
    merged = MergedEmbeddingBag.from_embeddingbag_list(stock)
    indices, offsets = lookups()
    factors = [torch.randn(i.shape) for i in indices]
    want = [
        table(i, o, per_sample_weights=f)
        for table, i, o, f in zip(stock, indices, offsets, factors, strict=True)
    ]
    got = merged(indices, offsets, factors)
    torch.testing.assert_close(got, tuple(want))
    loss_of(got).backward()
    loss_of(want).backward()
    torch.testing.assert_close(merged.weights[2].grad, stock[2].weight.grad)


@pytest.mark.parametrize("kind", ["plain", "frozen", "sgd"])
def test_gradients_of_factors(kind):
    """Of all tables or some, with tables that get gradients, none, or that the backward pass changes."""
    stock, (indices, offsets) = stock_tables(), lookups()
    if kind == "sgd":
        merged = MergedEmbeddingBagWithSGD.from_embeddingbag_list(copy.deepcopy(stock), lr=0.5)
    else:
        merged = MergedEmbeddingBag.from_embeddingbag_list(copy.deepcopy(stock))
        merged.requires_grad_(kind == "plain")
    ours = [torch.randn(i.shape) for i in indices]
    theirs = [f.clone() for f in ours]
    for leaf in (ours[0], ours[2], theirs[0], theirs[2]):
        leaf.requires_grad_()
    got = merged(indices, offsets, ours)
    want = [
        table(i, o, per_sample_weights=f)
        for table, i, o, f in zip(stock, indices, offsets, theirs, strict=True)
    ]
    loss_of(got).backward()
    loss_of(want).backward()
    for mine, other in zip(ours, theirs, strict=True):
        assert (mine.grad is None) == (other.grad is None)
        if other.grad is not None:
            torch.testing.assert_close(mine.grad, other.grad)
    if kind == "plain":
        torch.testing.assert_close(merged.weights[1].grad, stock[1].weight.grad)


def test_factors_in_double_precision():
    merged = MergedEmbeddingBag.from_embeddingbag_list([t.double() for t in stock_tables()])
    indices, offsets = lookups()
    factors = [torch.randn(i.shape, dtype=torch.float64, requires_grad=True) for i in indices]
    assert torch.autograd.gradcheck(lambda *f: merged(indices, offsets, f), factors)


def train(module, steps):
    for seed in steps:
        loss_of(module(*lookups(seed))).backward()
    assert all(weight.grad is None for weight in module.weights)
    return [weight.detach().clone() for weight in module.weights]


def train_stock(tables, make, steps):
    optimizer = make([table.weight for table in tables])
    for seed in steps:
        indices, offsets = lookups(seed)
        bags = [table(i, o) for table, i, o in zip(tables, indices, offsets, strict=True)]
        optimizer.zero_grad()
        loss_of(bags).backward()
        optimizer.step()
    return [table.weight.detach() for table in tables]


@pytest.mark.parametrize("mode", ["sum", "mean"])
def test_sgd_equals_stock(mode):
    merged = MergedEmbeddingBagWithSGD.from_embeddingbag_list(stock_tables(mode), lr=0.002)
    want = train_stock(
        stock_tables(mode, sparse=True), lambda p: torch.optim.SGD(p, lr=0.002), range(20)
    )
    torch.testing.assert_close(train(merged, range(20)), want, rtol=1e-5, atol=1e-5)
    by_place = MergedEmbeddingBagWithSGD.from_embeddingbag_list(stock_tables(mode), 0.002, 0.0)
    assert by_place.sgd_args.lr == 0.002 and by_place.sgd_args.weight_decay == 0


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")  # of the stock optimizer
def test_adagrad_equals_stock():
    merged = MergedEmbeddingBagWithAdaGrad.from_embeddingbag_list(stock_tables(), lr=0.05, eps=1e-8)
    want = train_stock(
        stock_tables(sparse=True), lambda p: torch.optim.Adagrad(p, lr=0.05, eps=1e-8), range(20)
    )
    torch.testing.assert_close(train(merged, range(20)), want, rtol=1e-5, atol=1e-5)


def test_weight_decay_is_that_of_rows_that_were_looked_up():
    merged = MergedEmbeddingBagWithSGD.from_embeddingbag_list(
        stock_tables(), lr=0.1, weight_decay=0.5
    )
    before = [weight.detach().clone() for weight in merged.weights]
    indices, offsets = lookups()
    (merged(indices, offsets)[0].sum() * 0.0).backward()
    for table, (old, new) in enumerate(zip(before, merged.weights, strict=True)):
        seen = torch.zeros(ROWS[table], dtype=torch.bool)
        seen[indices[table]] = True
        torch.testing.assert_close(new[seen].detach(), old[seen] * 0.95)
        assert torch.equal(new[~seen], old[~seen])


def test_checkpoint_of_the_tables_alone_loads():
    merged = MergedEmbeddingBagWithAdaGrad.from_embeddingbag_list(stock_tables())
    merged.load_state_dict({f"weights.{i}": torch.ones(n, DIM) for i, n in enumerate(ROWS)})
    assert merged.weights[1].sum() == ROWS[1] * DIM


def test_lookups_that_are_written_to_and_second_passes_are_refused():
    """As by stock embedding bags: a buffer of indices that is used again would move the steps to other rows."""
    tables = [torch.nn.EmbeddingBag(5, 4, mode="sum") for _ in range(2)]
    for merged in (
        MergedEmbeddingBag.from_embeddingbag_list(tables),
        MergedEmbeddingBagWithSGD.from_embeddingbag_list(tables, lr=0.1),
        MergedEmbeddingBagWithAdaGrad.from_embeddingbag_list(tables, lr=0.1),
    ):
        for written in ("indices", "offsets", None):
            indices, offsets = [torch.tensor([0, 3, 1])] * 2, [torch.tensor([0, 2])] * 2
            before = {k: v.clone() for k, v in merged.state_dict().items()}
            loss = torch.cat(merged(indices, offsets)).sum()
            if written is None:
                loss.backward(retain_graph=True)
                loss.backward()
                before = {k: v.clone() for k, v in merged.state_dict().items()}
                with pytest.raises(RuntimeError, match="second time"):
                    loss.backward()
            else:
                {"indices": indices, "offsets": offsets}[written][1].fill_(1)
                with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                    loss.backward()
            assert all(torch.equal(v, before[k]) for k, v in merged.state_dict().items())


def test_frozen_tables_stay():
    merged = MergedEmbeddingBagWithSGD.from_embeddingbag_list(stock_tables())
    merged.weights[1].requires_grad_(False)
    before = [weight.detach().clone() for weight in merged.weights]
    after = train(merged, [0])
    assert [torch.equal(a, b) for a, b in zip(after, before, strict=True)] == [False, True, False]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_cat(dtype):
    merged = MergedEmbeddingBagWithCat.from_embeddingbag_list(stock_tables(dtype=dtype))
    dense = torch.randn(BAGS, DIM, dtype=dtype)
    with torch.no_grad():
        got = merged(*lookups(), dense)
        bags = MergedEmbeddingBag.forward(merged, *lookups())
    assert torch.equal(got, torch.cat([dense, *bags], 1))
    with pytest.raises(NotImplementedError, match=r"torch.no_grad\(\)"):
        merged(*lookups(), dense)


def test_from_specs():
    specs_ = [EmbeddingSpec(n, DIM, "mean", torch.float32, None, False, True) for n in ROWS]
    merged = MergedEmbeddingBag(specs_)
    assert merged.pooling_mode == 1
    assert merged.include_last_offset
    assert "table2: 50, 9, mean" in repr(merged)


def test_wrong_tables():
    def make(**change):
        first = EmbeddingSpec(5, 4, "sum", torch.float32, None, False, False)
        return MergedEmbeddingBag([first, first._replace(**change)])

    for change, text in (
        ({"embedding_dim": 3}, "embedding_dim must be the same for all tables, got 3, 4"),
        ({"dtype": torch.bfloat16}, "dtype must be the same"),
        ({"pooling_mode": "mean"}, "pooling_mode must be the same"),
        ({"include_last_offset": True}, "include_last_offset must be the same"),
        ({"weight": torch.ones(5, 3)}, r"weight must have shape \[5, 4\]"),
    ):
        with pytest.raises(AssertionError, match=text):
            make(**change)
    with pytest.raises(ValueError, match="at least 1 table, got 0"):
        MergedEmbeddingBag([])
    with pytest.raises(ValueError, match="pooling_mode must be 'sum' or 'mean', got 'max'"):
        MergedEmbeddingBag.from_embeddingbag_list(stock_tables("max"))
    with pytest.raises(ValueError, match=r"tables\[0\] must not have padding_idx, got 1"):
        MergedEmbeddingBag.from_embeddingbag_list(stock_tables(padding_idx=1))
    sparse = MergedEmbeddingBag.from_embeddingbag_list(stock_tables(sparse=True))
    with pytest.raises(AssertionError, match="sparse=False"):
        sparse(*lookups())


def test_wrong_settings():
    tables = stock_tables()
    for value in (-0.1, float("nan"), float("inf")):
        for name in ("lr", "weight_decay"):
            with pytest.raises(ValueError, match=f"{name} must be a finite number"):
                MergedEmbeddingBagWithSGD.from_embeddingbag_list(tables, **{name: value})
        for name in ("lr", "eps"):
            with pytest.raises(ValueError, match=f"{name} must be a finite number"):
                MergedEmbeddingBagWithAdaGrad.from_embeddingbag_list(tables, **{name: value})
    with pytest.raises(TypeError, match="lr must be a number, got 'a'"):
        MergedEmbeddingBagWithSGD.from_embeddingbag_list(tables, lr="a")
    half = MergedEmbeddingBagWithSGD.from_embeddingbag_list(stock_tables(dtype=torch.float16))
    with pytest.raises(ValueError, match="to_bfloat16_train"):
        half.to_bfloat16_train()


def test_wrong_lookups_change_nothing():
    merged = MergedEmbeddingBagWithSGD.from_embeddingbag_list(stock_tables())
    indices, offsets = lookups()
    before = merged.weights[1].detach().clone()
    bad = indices[1].clone()
    bad[-1] = ROWS[1]
    with pytest.raises(RuntimeError, match=r"indices\[1\] must hold rows in \[0, 7\), got 7"):
        merged([indices[0], bad, indices[2]], offsets)
    with pytest.raises(RuntimeError, match=r"offsets\[0\] must not decrease"):
        merged(indices, [torch.tensor([0, 3, 2, 3, 3, 3]), *offsets[1:]])
    with pytest.raises(
        TypeError, match="offsets must be a list of tensors, one per table, got None"
    ):
        merged(indices, None)
    with pytest.raises(TypeError, match=r"indices must be a list of tensors, .* got \[\[1, 2\]"):
        merged([[1, 2]] * 3, offsets)
    with pytest.raises(
        TypeError, match=r"tables\[0\] must be a torch.nn.EmbeddingBag, got Embedding"
    ):
        MergedEmbeddingBag.from_embeddingbag_list([torch.nn.Embedding(3, 4)])
    with pytest.raises(RuntimeError, match="indices must hold 3 tensor"):
        merged(indices[:2], offsets)
    assert torch.equal(merged.weights[1], before)


def test_module_names():
    for name in ("", "WithSGD", "WithAdaGrad", "WithCat"):
        assert getattr(modules, f"MergedEmbeddingBag{name}").__name__ == f"MergedEmbeddingBag{name}"


def test_module_path_and_functions():
    """IPEX's module and its functions on tables of the caller."""
    import ipex_core.nn.modules.merged_embeddingbag as names

    for name in names.__all__:
        assert hasattr(names, name)
    assert modules.merged_embeddingbag is names
    assert ipex_core.nn.DistMergeEmbeddingBagWithAdaGrad is modules.DistMergeEmbeddingBagWithAdaGrad
    tables = [table.weight for table in stock_tables()]
    merged = MergedEmbeddingBag.from_embeddingbag_list(stock_tables())
    indices, offsets = lookups()
    bags = names.merged_embeddingbag(tables, indices, offsets, names.PoolingMode.SUM, False)
    loss_of(bags).backward()
    loss_of(merged(indices, offsets)).backward()
    for ours, theirs in zip(tables, merged.weights, strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)
    for kind, function in (
        (MergedEmbeddingBagWithSGD, names.merged_embeddingbag_sgd),
        (MergedEmbeddingBagWithAdaGrad, names.merged_embeddingbag_adagrad),
    ):
        module = kind.from_embeddingbag_list(stock_tables())
        mine = kind.from_embeddingbag_list(stock_tables())
        args = getattr(mine, kind._ARGS)
        loss_of(function(list(mine.weights), indices, offsets, 0, False, args)).backward()
        loss_of(module(indices, offsets)).backward()
        for a, b in zip(mine.weights, module.weights, strict=True):
            assert torch.equal(a, b) and a.grad is None
    dense = torch.randn(BAGS, DIM)
    with torch.no_grad():
        cat = names.merged_embeddingbag_with_cat(list(merged.weights), indices, offsets, dense)
        assert torch.equal(cat, torch.cat([dense, *merged(indices, offsets)], 1))


def test_float64_tables():
    """They have no kernels, but IPEX takes them."""
    stock = stock_tables(dtype=torch.float64)
    merged = MergedEmbeddingBag.from_embeddingbag_list(stock)
    indices, offsets = lookups()
    got = merged(indices, offsets)
    want = [table(i, o) for table, i, o in zip(stock, indices, offsets, strict=True)]
    torch.testing.assert_close(got, tuple(want))
    sum(value.square().sum() for value in got).backward()
    sum(value.square().sum() for value in want).backward()
    torch.testing.assert_close(merged.weights[0].grad, stock[0].weight.grad)
    sgd = MergedEmbeddingBagWithSGD.from_embeddingbag_list(
        stock_tables(dtype=torch.float64), lr=0.1
    )
    sum(value.square().sum() for value in sgd(indices, offsets)).backward()
    expected = stock_tables(dtype=torch.float64)[0].weight - 0.1 * stock[0].weight.grad
    torch.testing.assert_close(sgd.weights[0].detach(), expected.detach())

# SPDX-License-Identifier: Apache-2.0
"""Merged embedding tables against stock layers and optimizers; the interaction and its derivative."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.nn import functional as F

import ipex_core.nn
from ipex_core import config, optimize
from ipex_core._spec import specs
from ipex_core.nn import modules
from ipex_core.nn.functional import InteractionFunc, interaction
from ipex_core.nn.merged_embedding import (
    EmbeddingSpec,
    MergedEmbeddingBag,
    MergedEmbeddingBagWithAdaGrad,
    MergedEmbeddingBagWithCat,
    MergedEmbeddingBagWithSGD,
    _memory,
)

ROWS, DIM, BAGS = (20, 7, 50), 9, 6


def stock_tables(mode="sum", dtype=torch.float32, **options):
    torch.manual_seed(0)
    return [torch.nn.EmbeddingBag(n, DIM, mode=mode, dtype=dtype, **options) for n in ROWS]


def lookups(seed=0, dtype=torch.int64, last=False):
    """Indices, many of them repeated, and offsets, with empty bags."""
    torch.manual_seed(seed)
    indices, offsets = [], []
    for n in ROWS:
        ends = torch.tensor([0, *torch.randint(0, 5, (BAGS,)).tolist()]).cumsum(0)
        indices.append(torch.randint(n, (int(ends[-1]),)).to(dtype))
        offsets.append((ends if last else ends[:-1]).to(dtype))
    return indices, offsets


def loss_of(bags):
    return sum((value.float() * (i + 1)).square().sum() for i, value in enumerate(bags))


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


def test_checkpoint_of_the_tables_alone_loads():
    merged = MergedEmbeddingBagWithAdaGrad.from_embeddingbag_list(stock_tables())
    merged.load_state_dict({f"weights.{i}": torch.ones(n, DIM) for i, n in enumerate(ROWS)})
    assert merged.weights[1].sum() == ROWS[1] * DIM


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


def stock_interaction(*args):
    x = torch.stack(args, 1)
    products = x @ x.mT
    row, column = torch.tril_indices(len(args), len(args), -1)
    return torch.cat([args[0], products[:, row, column]], 1)


@pytest.mark.parametrize("count", [1, 2, 5])
def test_interaction(count):
    torch.manual_seed(count)
    ours = [torch.randn(4, 6, requires_grad=True) for _ in range(count)]
    theirs = [value.detach().clone().requires_grad_() for value in ours]
    got, want = interaction(*ours), stock_interaction(*theirs)
    torch.testing.assert_close(got, want)
    got.square().sum().backward()
    want.square().sum().backward()
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a.grad, b.grad)
    torch.testing.assert_close(InteractionFunc.apply(*ours), want)


def test_interaction_gradcheck():
    """In float64, with the definition of the derivative that the kernels are compared with."""
    torch.manual_seed(0)
    args = tuple(torch.randn(3, 4, dtype=torch.float64, requires_grad=True) for _ in range(4))
    assert torch.autograd.gradcheck(interaction, args)

    class Definition(torch.autograd.Function):
        @staticmethod
        def forward(ctx, *inputs):
            ctx.save_for_backward(*inputs)
            return specs()["interaction"].reference(inputs)

        @staticmethod
        def backward(ctx, grad):
            return tuple(specs()["interaction_backward"].reference(grad, ctx.saved_tensors))

    assert torch.autograd.gradcheck(Definition.apply, args)


def test_interaction_autocast():
    first = torch.randn(4, 6, requires_grad=True)
    rest = [torch.randn(4, 6).bfloat16() for _ in range(2)]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = interaction(first, *rest)
        direct = torch.ops.ipex.interaction([first, *rest])
    assert got.dtype == direct.dtype == torch.bfloat16
    assert torch.equal(got, direct)
    got.float().sum().backward()
    assert first.grad is not None
    assert first.grad.dtype == torch.float32


def test_interaction_of_wrong_tensors():
    with pytest.raises(RuntimeError, match="at least 1 tensor, got 0"):
        interaction()
    with pytest.raises(TypeError, match=r"args\[0\] must be a tensor, got list"):
        interaction([torch.ones(2, 3), torch.ones(2, 3)])
    with pytest.raises(RuntimeError, match=r"inputs\[1\] must have the shape of inputs\[0\]"):
        interaction(torch.ones(2, 3), torch.ones(2, 4))


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
        monkeypatch.setattr(_memory, "_madvise", lambda: None)
    else:
        call = _memory._madvise()
        monkeypatch.setattr(_memory, "_madvise", lambda: lambda *a: advised.append(a) or call(*a))
    merged = kind.from_embeddingbag_list(tables)
    before = {key: value.clone() for key, value in merged.state_dict().items()}
    table, end = merged.weights[0].data_ptr(), merged.weights[0][-1].data_ptr() + 64 * 4
    assert table == tables[0].weight.data_ptr()
    if not copies and call is not None:
        assert advised
        assert all(first % (2 << 20) == size % (2 << 20) == 0 for first, size, _ in advised)
        assert any(table <= first and first + size <= end for first, size, _ in advised)
        with config.override(huge_pages=False):
            assert not _memory.gather(merged.weights[0])
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

# SPDX-License-Identifier: Apache-2.0
"""Recommendation ops: bad input, nothing written on errors, split tables bit by bit, many repeated rows."""

from __future__ import annotations

import re

import pytest
import refusals
import torch

import ipex_core  # noqa: F401

ops = torch.ops.ipex
X = torch.ones(3, 4)
NONE = torch.empty(0, dtype=torch.bfloat16)


def tables(dtype=torch.float32):
    return [torch.ones(5, 4, dtype=dtype), torch.ones(2, 4, dtype=dtype)]


def index(*values, dtype=torch.int64):
    return torch.tensor(values, dtype=dtype)


INDICES = [index(0, 4, 2), index(1, 0)]
OFFSETS = [index(0, 1, 1), index(0, 0, 2)]
GRADS = [torch.ones(3, 4)] * 2


def bad_lookups():
    """Lists of (weights, indices, offsets, factors, pooling_mode, include_last_offset), and the text."""
    t, i, o = tables(), INDICES, OFFSETS
    yield ([t[0][0], t[1]], i, o, [], "sum", False), "weights[0] must be 2-D [rows, D], got 1-D"
    yield ([t[0].double(), t[1]], i, o, [], "sum", False), "weights[0] must have dtype float32,"
    yield ([t[0], t[1].half()], i, o, [], "sum", False), "weights[1] must have the dtype of"
    yield ([t[0], t[1][:, :3]], i, o, [], "sum", False), "weights[1] must have shape [rows, 4]"
    yield (t, i, o, [], "max", False), "pooling_mode must be 'sum' or 'mean', got 'max'"
    yield (t, i[:1], o, [], "sum", False), "indices must hold 2 tensor(s), one per table, got 1"
    yield (t, i, o[:1], [], "sum", False), "offsets must hold 2 tensor(s), one per table, got 1"
    yield (t, [i[0].float(), i[1]], o, [], "sum", False), "indices[0] must have dtype int32, int64"
    yield (t, [i[0], i[1][None]], o, [], "sum", False), "indices[1] must be 1-D, got 2-D"
    yield (t, [i[0], i[1].int()], o, [], "sum", False), "indices[1] must have the dtype of indices"
    yield (t, i, [o[0], o[1].int()], [], "sum", False), "offsets[1] must have the dtype of indices"
    yield (t, i, [o[0], o[1][:2]], [], "sum", False), "offsets[1] must have the shape of offsets[0]"
    yield (t, i, [x[:0] for x in o], [], "sum", True), "offsets[0] must have at least 1 element(s)"
    yield (t, i, [index(1, 1, 1), o[1]], [], "sum", False), "offsets[0] must begin with 0, got 1"
    yield (
        (t, i, [o[0], index(0, 2, 1)], [], "sum", False),
        "offsets[1] must not decrease, got 1 aft",
    )
    yield (t, i, [o[0], index(0, 2, 3)], [], "sum", False), "offsets[1] must not exceed the number"
    yield (
        (t, [i[0], index(1, 2)], o, [], "sum", False),
        "indices[1] must hold rows in [0, 2), got 2",
    )
    yield (t, [index(0, -1, 1), i[1]], o, [], "sum", False), "rows in [0, 5), got -1"
    yield (t, [index(0, 2**40, 1), i[1]], o, [], "sum", False), "rows in [0, 5), got 1099511627776"
    factors = [torch.ones(3), torch.ones(2)]
    yield (t, i, o, factors, "mean", False), "pooling_mode must be 'sum' with per_sample_weights"
    yield (t, i, o, factors[:1], "sum", False), "per_sample_weights must hold 2 tensor(s)"
    yield (t, i, o, [factors[0], factors[0]], "sum", False), "per_sample_weights[1] must have shape"
    yield (
        (t, i, o, [f.half() for f in factors], "sum", False),
        "per_sample_weights[0] must have the",
    )


def bad_calls():
    yield "interaction", ([X[0]],), "inputs[0] must be 2-D [B, D], got 1-D"
    yield "interaction", ([X.long()],), "inputs[0] must have dtype float32, bfloat16, float16"
    yield "interaction", ([X, X[:2]],), "inputs[1] must have the shape of inputs[0] = [3, 4]"
    yield "interaction", ([X, X.half()],), "inputs[1] must have the dtype of inputs[0] = float32"
    grad = torch.ones(3, 5)
    yield "interaction_backward", (grad[:, :4], [X, X]), "grad must have shape [3, 5], got [3, 4]"
    yield "interaction_backward", (grad.half(), [X, X]), "grad must have dtype float32, got float16"
    for args, text in bad_lookups():
        yield "merged_embeddingbag_forward", args, text
        weights, *rest = args
        none = [NONE, NONE]
        yield "merged_embeddingbag_sgd", (GRADS, weights, none, *rest, 0.1, 0.0), text
        more = [torch.ones(5, 4), torch.ones(2, 4)]
        yield "merged_embeddingbag_adagrad", (GRADS, weights, none, more, *rest, 0.1, 0.1), text
    t, lookups = tables(), (INDICES, OFFSETS)
    cat = "merged_embeddingbag_cat_forward"
    yield cat, (t, *lookups, torch.ones(2, 4), "sum", False), "dense must have shape [3, 4]"
    yield cat, (t, *lookups, X.half(), "sum", False), "dense must have the dtype of weights[0]"
    last = (*lookups, [], "sum", False, 0.1, 0.0)
    sgd, none = "merged_embeddingbag_sgd", [NONE, NONE]
    yield sgd, (GRADS[:1], t, none, *last), "grads must hold 2 tensor(s), one per table, got 1"
    yield sgd, ([X, X[:2]], t, none, *last), "grads[1] must have shape [3, 4], got [2, 4]"
    yield sgd, ([X, X.half()], t, none, *last), "grads[1] must have the dtype of weights[0]"
    yield sgd, (GRADS, t, none[:1], *last), "trails must hold 2 tensor(s)"
    halves = [x.bfloat16() for x in t]
    yield sgd, (GRADS, t, halves, *last), "trails[0] must be empty for tables of float32"
    grads = [g.bfloat16() for g in GRADS]
    yield sgd, (grads, halves, [halves[0].half(), NONE], *last), "trails[0] must have dtype bfloat"
    yield sgd, (grads, halves, [NONE, X.bfloat16()], *last), "trails[1] must have shape [2, 4]"
    yield sgd, (grads, halves, halves, *last), "weights must not share memory"
    turned = [torch.ones(4, 5).t(), t[1]]
    yield sgd, (GRADS, turned, none, *last), "weights[0] must be contiguous, got strides [1, 5]"
    wide = torch.ones(8, 4)
    yield sgd, (GRADS, [wide[:5], wide[4:]], none, *last), "weights must not share memory"
    adagrad = "merged_embeddingbag_adagrad"
    yield adagrad, (GRADS, t, none, t[:1], *last), "hessians must hold 2 tensor(s)"
    yield adagrad, (GRADS, t, none, halves, *last), "hessians[0] must have dtype float32"
    yield adagrad, (GRADS, t, none, [X, X], *last), "hessians[0] must have shape [5, 4]"
    yield adagrad, (GRADS, t, none, t, *last), "weights must not share memory"


@refusals.each((op, args, re.escape(text)) for op, args, text in bad_calls())
def test_bad_input(op, args, text):
    refusals.assert_refused(op, args, text)


@pytest.mark.parametrize("op", ["interaction", "merged_embeddingbag_forward"])
def test_no_tensor_at_all(op):
    more = () if op == "interaction" else ([], [], [], "sum", False)
    with pytest.raises(RuntimeError, match=f"^{op}: .* must hold at least 1 tensor, got 0"):
        getattr(ops, op)([], *more)


@pytest.mark.parametrize("rows", [3, 40000])
def test_many_lookups_of_few_rows_and_of_many(rows, level):
    """More lookups than one piece of the sort holds; all gradients of a row are added before the one step."""
    torch.manual_seed(rows)
    count, dim = 70000, 8
    weight, indices = torch.zeros(rows, dim), torch.randint(rows, (count,))
    grad = torch.randint(-4, 5, (count, dim)).float()
    hessian = torch.zeros(rows, dim)
    offsets = torch.arange(count)
    want = torch.zeros(rows, dim).index_add_(0, indices, grad)
    bags = ([indices], [offsets], [], "sum", False)
    ops.merged_embeddingbag_sgd([grad], [weight], [NONE], *bags, 0.5, 0.0)
    assert torch.equal(weight, -0.5 * want)
    ops.merged_embeddingbag_adagrad([grad], [weight], [NONE], [hessian], *bags, 0.5, 1e-10)
    assert torch.equal(hessian, want.square())


@pytest.mark.parametrize("sizes", [(1, 5000, 40, 1), (1, 1), (3000, 1, 70000)], ids=str)
def test_tables_of_different_sizes_are_sorted_apart(sizes, level):
    """Tables with fewer rows go through as many passes of the sort; their lookups meet only their own rows."""
    torch.manual_seed(len(sizes))
    bags, dim = 3000, 5
    indices = [torch.randint(rows, (bags,)) for rows in sizes]
    grads = [torch.randint(-4, 5, (bags, dim)).float() for _ in sizes]
    factors = [torch.randint(1, 4, (bags,)).float() for _ in sizes]
    none, offsets = [NONE] * len(sizes), [torch.arange(bags)] * len(sizes)
    for threads in (1, 2):
        weights = [torch.zeros(rows, dim) for rows in sizes]
        last = (indices, offsets, factors, "sum", False, 0.5, 0.0)
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        try:
            ops.merged_embeddingbag_sgd(grads, weights, none, *last)
        finally:
            torch.set_num_threads(before)
        for weight, rows, grad, factor in zip(weights, indices, grads, factors, strict=True):
            want = torch.zeros_like(weight).index_add_(0, rows, grad * factor[:, None])
            assert torch.equal(weight, -0.5 * want)


def test_split_tables_keep_all_bits(level):
    """A step of nothing leaves each number as it is, infinities and denormal ones too."""
    torch.manual_seed(0)
    top = torch.randint(-(2**15), 2**15, (64, 40)).to(torch.int16).view(torch.bfloat16)
    top[0, :4] = torch.tensor([float("inf"), -float("inf"), 0.0, 1e-40])
    low = torch.randint(-(2**15), 2**15, (64, 40)).to(torch.int16).view(torch.bfloat16)
    low[0, :2] = 0
    before = [value.view(torch.int16).clone() for value in (top, low)]
    bags = ([torch.arange(64)], [torch.arange(64)], [], "sum", False)
    grad = torch.zeros(64, 40, dtype=torch.bfloat16)
    ops.merged_embeddingbag_sgd([grad], [top], [low], *bags, 0.25, 0.0)
    wide = (before[0].int() << 16 | before[1].int() & 0xFFFF).view(torch.float32)
    same = ~wide.isnan()
    for value, old in zip((top, low), before, strict=True):
        assert torch.equal(value.view(torch.int16)[same], old[same])

# SPDX-License-Identifier: Apache-2.0
"""`nn.EmbeddingBag` after `optimize`, against the stock layer, for arguments of all kinds."""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from ipex_core import explain, optimize, restore
from ipex_core.kernels.policy import has_kernel
from ipex_core.nn import OptimizedEmbeddingBag
from ipex_core.nn.embedding import MergedEmbeddingBag

OP = "merged_embeddingbag_forward"


def fast_of(layer, dtype=None):
    return optimize(nn.Sequential(layer).eval(), dtype=dtype)[0]


@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    rows=st.integers(1, 9),
    dim=st.integers(1, 20),
    sizes=st.lists(st.integers(0, 4), min_size=0, max_size=6),
    mode=st.sampled_from(["sum", "mean", "max"]),
    index=st.sampled_from([torch.int32, torch.int64]),
    form=st.sampled_from(["offsets", "last", "matrix"]),
    weighted=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    padding=st.booleans(),
    seed=st.integers(0, 100),
)
def test_the_same_as_stock(rows, dim, sizes, mode, index, form, weighted, dtype, padding, seed):
    torch.manual_seed(seed)
    layer = nn.EmbeddingBag(
        rows,
        dim,
        mode=mode,
        include_last_offset=form == "last",
        padding_idx=0 if padding else None,
        dtype=dtype,
    )
    fast = fast_of(copy.deepcopy(layer))
    assert isinstance(fast, OptimizedEmbeddingBag) == (has_kernel(OP) and mode == "mean")
    if form == "matrix":
        args = [torch.randint(rows, (len(sizes), 3)).to(index)]
    else:
        ends = torch.tensor([0, *sizes]).cumsum(0)
        args = [
            torch.randint(rows, (int(ends[-1]),)).to(index),
            (ends if form == "last" else ends[:-1]).to(index),
        ]
    factors = torch.randn(args[0].shape).to(dtype) if weighted and mode == "sum" else None
    tolerance = {"rtol": 1e-5, "atol": 1e-5}
    if dtype != torch.float32:  # stock rounds partial sums too
        tolerance = {"rtol": 5e-2, "atol": 5e-2}
    with torch.no_grad():
        try:
            want = layer(*args, per_sample_weights=factors)
        except (RuntimeError, ValueError):
            return
        got = fast(*args, per_sample_weights=factors)
    assert got.dtype == want.dtype and got.shape == want.shape
    torch.testing.assert_close(got, want, **tolerance)
    if padding or mode == "max" or form == "matrix":
        return
    merged = MergedEmbeddingBag.from_embeddingbag_list([layer])
    with torch.no_grad():
        also = merged([args[0]], [args[1]], None if factors is None else [factors])[0]
    torch.testing.assert_close(also, want, **tolerance)


def test_gradients_are_those_of_the_stock_layer():
    torch.manual_seed(0)
    layer = nn.EmbeddingBag(10, 4)
    fast = fast_of(copy.deepcopy(layer))
    rows, starts = torch.tensor([1, 2, 2, 9]), torch.tensor([0, 3])
    for each in (layer, fast):
        each(rows, starts).square().sum().backward()
    torch.testing.assert_close(fast.weight.grad, layer.weight.grad)


@pytest.mark.skipif(not has_kernel(OP), reason="no kernels are installed")
def test_it_is_chosen_by_optimize_and_undone():
    model = nn.Sequential(nn.EmbeddingBag(10, 4), nn.EmbeddingBag(10, 4, mode="sum")).eval()
    fast = optimize(model, dtype=torch.bfloat16)
    assert "ipex::merged_embeddingbag_forward" in str(explain(fast))
    assert "the stock op is faster for mode sum" in str(explain(fast))
    assert fast[0].weight.dtype == torch.bfloat16
    with torch.no_grad():
        y = fast[1](torch.tensor([1, 2]), torch.tensor([0]), torch.ones(2))  # factors in float32
        assert y.dtype == torch.bfloat16
        with pytest.raises(RuntimeError, match=r"must hold rows in \[0, 10\), got 10"):
            fast[0](torch.tensor([10]), torch.tensor([0]))
    assert (
        torch.nn.functional.embedding_bag.__module__ == "torch.nn.functional"
    )  # nothing is patched
    back = restore(fast)
    assert all(type(layer) is nn.EmbeddingBag for layer in back)
    assert torch.equal(back[0].weight, model[0].weight)

# SPDX-License-Identifier: Apache-2.0
"""Merged embedding tables called as in IPEX 2.0: one argument, or lookups that were merged before."""

from __future__ import annotations

import pytest
import torch
from merged_checks import lookups, loss_of, stock_tables

from ipex_core.nn.embedding import MergedEmbeddingBag, MergedEmbeddingBagWithSGD


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize("kind", [MergedEmbeddingBag, MergedEmbeddingBagWithSGD])
def test_all_forms_of_a_call(kind, own, given):
    merged = kind.from_embeddingbag_list(stock_tables(include_last_offset=own))
    with torch.no_grad():
        want = merged(*lookups(last=own))
        indices, offsets = lookups(last=given)
        last = [given] * merged.n_tables
        linear = merged.linearize_indices_and_offsets(indices, offsets, last)
        calls = [
            merged((indices, offsets, last)),
            merged((indices, offsets, last), torch.BoolTensor([True])),
            merged(linear, torch.BoolTensor([False])),
            merged(linear, need_linearize_indices_and_offsets=torch.BoolTensor([False])),
            merged(linear, need_linearize_indices_and_offsets=False),
        ]
    for got in calls:
        assert all(map(torch.equal, got, want))


def test_result_and_two_dimensions():
    merged = MergedEmbeddingBag.from_embeddingbag_list(stock_tables())
    first = merged.weights[0].shape[0]
    rows = [torch.tensor([[1, 2], [3, 0]], dtype=torch.int32) for _ in range(3)]
    indices, offsets, wide = merged.linearize_indices_and_offsets(rows, [None] * 3)
    assert indices.tolist() == [1, 2, 3, 0] * 3 and indices.dtype == torch.int64
    assert offsets.tolist() == [0, 2, 4, 6, 8, 10, 12]
    assert wide[4:8].tolist() == [first + i for i in (1, 2, 3, 0)]
    starts = [torch.tensor([0, 2], dtype=torch.int32)] * 3
    want = merged([r.flatten() for r in rows], starts)
    got = merged((rows, [None] * 3, [False] * 3))
    assert all(map(torch.equal, got, want))


def test_gradients_and_steps():
    tables = stock_tables()
    merged = MergedEmbeddingBag.from_embeddingbag_list(tables)
    indices, offsets = lookups()
    linear = merged.linearize_indices_and_offsets(indices, offsets)
    loss_of(merged(linear, need_linearize_indices_and_offsets=False)).backward()
    loss_of([t(i, o) for t, i, o in zip(tables, indices, offsets, strict=True)]).backward()
    for weight, table in zip(merged.weights, tables, strict=True):
        torch.testing.assert_close(weight.grad, table.weight.grad)


def test_errors():
    merged = MergedEmbeddingBag.from_embeddingbag_list(stock_tables())
    indices, offsets = lookups()
    with pytest.raises(
        TypeError, match=r"input must be \(indices, offsets, include_last_offsets\)"
    ):
        merged(indices[0])
    with pytest.raises(TypeError, match="must be a result of linearize_indices_and_offsets"):
        merged((indices, offsets, [False] * 3), need_linearize_indices_and_offsets=False)
    with pytest.raises(ValueError, match="offsets must have an element per table, 3, got 2"):
        merged.linearize_indices_and_offsets(indices, offsets[:2])
    with pytest.raises(ValueError, match=r"must be a tensor for 1-D indices"):
        merged.linearize_indices_and_offsets(indices, [None] * 3)
    with pytest.raises(ValueError, match="as many bags"):
        merged.linearize_indices_and_offsets(indices, [offsets[0][:1], *offsets[1:]])
    with pytest.raises(TypeError, match="needs need_linearize_indices_and_offsets=False"):
        merged(merged.linearize_indices_and_offsets(indices, offsets))
    a, b, c = merged.linearize_indices_and_offsets(indices, offsets)
    with pytest.raises(ValueError, match=r"3 \* bags \+ 1 elements"):
        merged((a, b[:-1], c), need_linearize_indices_and_offsets=False)

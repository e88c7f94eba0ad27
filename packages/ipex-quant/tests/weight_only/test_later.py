# SPDX-License-Identifier: Apache-2.0
"""Quantized layers whose weights are packed when they are needed, and words that are codes as they lie in a file."""

from __future__ import annotations

import copy
import io

import pytest
import torch

from ipex_quant import combine_linears, woq_qconfig
from ipex_quant.formats.schemes import packed_weight
from ipex_quant.weight.layouts import unpack_words, unsigned_weight
from ipex_quant.weight.tensor import QuantizedWeight
from ipex_quant.weight_only.checkpoint import linear_from


def weight(rows: int, k: int, seed: int = 0, zeros: bool = False) -> QuantizedWeight:
    draw = torch.Generator().manual_seed(seed)
    words = torch.randint(-(2**31), 2**31 - 1, (rows, -(-k // 8)), generator=draw).to(torch.int32)
    scales = torch.rand(rows, -(-k // 32), generator=draw) + 0.1
    points = torch.randint(0, 8, scales.shape, generator=draw).to(torch.int8) if zeros else None
    found = packed_weight(words, scales, points, (rows, k), 4, 32)
    codes = unpack_words(words.t().contiguous(), 4, k).t().contiguous()
    unsigned = None if points is None else points.int() + 8
    want = unsigned_weight(codes, unsigned, scales, 4, 32)
    assert torch.equal(found.dequantize(), want.dequantize())
    assert torch.equal(found.codes, want.codes)
    return found


@pytest.mark.parametrize("k", [64, 68, 67])
@pytest.mark.parametrize("zeros", [False, True])
def test_words_are_codes(k: int, zeros: bool) -> None:
    weight(16, k, zeros=zeros)


def test_words_of_a_file_are_not_copied() -> None:
    words = torch.arange(64, dtype=torch.int32).view(8, 8)
    found = packed_weight(words, torch.ones(8, 2), None, (8, 64), 4, 32)
    assert found.codes.data_ptr() == words.data_ptr()


def test_a_weight_is_packed_when_it_is_needed() -> None:
    x = torch.randn(3, 64)
    config = woq_qconfig(weight_dtype=2, group_size=32)
    want = linear_from(weight(16, 64), config)
    for use in ("call", "state", "copy", "weight", "cast"):
        layer = linear_from(weight(16, 64), config, later=True)
        assert layer.packed_weight is None
        if use == "state":
            torch.save(layer.state_dict(), io.BytesIO())
            assert set(layer.state_dict()) == set(want.state_dict())
        elif use == "copy":
            layer = copy.deepcopy(layer)
        elif use == "weight":
            assert torch.equal(layer.weight.dequantize(), want.weight.dequantize())
        elif use == "cast":
            layer = layer.to(torch.bfloat16)
        assert torch.equal(layer(x), want(x)), use
        assert torch.equal(layer.packed_weight, want.packed_weight)


def test_layers_are_combined_before_they_are_packed() -> None:
    config = woq_qconfig(weight_dtype=2, group_size=32)
    pairs = [
        [linear_from(weight(16, 64, seed), config, later=later) for seed in (1, 2)]
        for later in (False, True)
    ]
    for gate in (False, True):
        (want, _), (got, _) = (combine_linears(pair, gate=gate) for pair in pairs)
        assert torch.equal(got, want)
    assert all(layer.packed_weight is None for layer in pairs[1])

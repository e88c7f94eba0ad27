# SPDX-License-Identifier: Apache-2.0
"""Attention in the graph passes of the compile backend."""

from __future__ import annotations

import functools
import math

import pytest
import torch
from compile_checks import DTYPES, attention_inputs, fired, fuse, randn, reasons, stock
from torch.nn import functional as F

from ipex_core.kernels import policy


def repeat_kv(x, times):
    batch, heads, length, size = x.shape
    x = x[:, :, None].expand(batch, heads, times, length, size)
    return x.reshape(batch, heads * times, length, size)


def bert(q, k, v, mask):
    scores = torch.matmul(q, k.transpose(-1, -2)) / math.sqrt(q.shape[-1])
    return torch.matmul(F.softmax(scores + mask, dim=-1), v)


def vit(q, k, v, mask):
    weights = F.softmax(q @ k.transpose(-2, -1) * 0.25, dim=-1, dtype=torch.float32).to(q.dtype)
    return (weights @ v).transpose(1, 2).contiguous()


def llama(q, k, v, mask):
    k, v = (repeat_kv(t, q.shape[1] // t.shape[1]) for t in (k, v))
    scores = torch.matmul(q, k.transpose(2, 3)) * 0.3 + mask
    weights = F.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype)
    return torch.matmul(weights, v).transpose(1, 2).contiguous()


def gpt2(q, k, v, mask):
    scores = torch.matmul(q, k.transpose(-1, -2))
    scores = scores / torch.full([], q.shape[-1] ** 0.5, dtype=scores.dtype)
    causal = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril()[None, None]
    low = torch.full([], torch.finfo(scores.dtype).min, dtype=scores.dtype)
    scores = torch.where(causal, scores.to(scores.dtype), low) + mask
    return torch.matmul(F.softmax(scores, dim=-1).type(v.dtype), v)


def t5(q, k, v, mask):
    scores = torch.matmul(q, k.transpose(3, 2))
    scores += mask
    return torch.matmul(F.softmax(scores.float(), dim=-1).type_as(scores), v)


def gemma2(q, k, v, mask):
    k, v = (repeat_kv(t, q.shape[1] // t.shape[1]) for t in (k, v))
    scores = torch.matmul(q, k.transpose(2, 3)) * 0.3
    scores = torch.tanh(scores / 5.0) * 5.0 + mask
    weights = F.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype)
    return torch.matmul(weights, v).transpose(1, 2).contiguous()


def masked_fill(q, k, v, mask):
    scores = torch.matmul(q, k.transpose(-1, -2)).masked_fill(mask < 0, -1e9)
    return torch.matmul(scores.softmax(-1), v)


def stock_repeated(q, k, v, mask):
    k, v = (repeat_kv(t, q.shape[1] // t.shape[1]) for t in (k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


ATTENTIONS = (bert, vit, llama, gpt2, t5, gemma2, masked_fill, stock, stock_repeated)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("function", ATTENTIONS)
def test_attention(function, dtype):
    shared = function in (llama, gemma2, stock_repeated)
    report, _ = fuse(function, *attention_inputs(dtype, 2 if shared else 4))
    assert fired(report) == {"attention": 1}, reasons(report)
    assert ("shared heads" in report.fusions[0].text) == shared
    assert ("softcap" in report.fusions[0].text) == (function is gemma2)


def test_attention_near_misses():
    q, k, v, mask = attention_inputs(torch.float32)

    def weights_returned(q, k, v, mask):
        weights = F.softmax(q @ k.transpose(-1, -2) + mask, -1)
        return weights @ v, weights

    def other_softmax_dim(q, k, v, mask):
        return F.softmax(q @ k.transpose(-1, -2), -2) @ v

    def small_fill(q, k, v, mask):
        return (q @ k.transpose(-1, -2)).masked_fill(mask < 0, -3.0).softmax(-1) @ v

    def stretched_after_the_mask(q, k, v, mask):  # what is added may become infinite
        return ((q @ k.transpose(-1, -2) + mask.clamp_min(-2)) * 1.5).softmax(-1) @ v

    def soft_capped(q, k, v, mask):
        return torch.tanh(q @ k.transpose(-1, -2)).softmax(-1) @ v

    def cap_of_another_size(q, k, v, mask):
        return (torch.tanh(q @ k.transpose(-1, -2) / 5.0) * 4.0).softmax(-1) @ v

    def capped_after_the_mask(q, k, v, mask):
        return (torch.tanh((q @ k.transpose(-1, -2) + mask) / 5.0) * 5.0).softmax(-1) @ v

    def negative_scale(q, k, v, mask):
        return (q @ k.transpose(-1, -2) * -0.5).softmax(-1) @ v

    def negative_scale_of_the_stock_op(q, k, v, mask):
        return F.scaled_dot_product_attention(q, k, v, scale=-0.5)

    def mask_of_one_dimension(q, k, v, mask):
        return (q @ k.transpose(-1, -2) + mask[0, 0, 0]).softmax(-1) @ v

    def other_value_size(q, k, v, mask):
        return (q @ k.transpose(-1, -2)).softmax(-1) @ v[..., :7]

    def number_added(q, k, v, mask):
        return (q @ k.transpose(-1, -2) * 0.5 + 2.0).softmax(-1) @ v

    for function in (
        weights_returned,
        other_softmax_dim,
        small_fill,
        stretched_after_the_mask,
        soft_capped,
        cap_of_another_size,
        capped_after_the_mask,
        negative_scale,
        negative_scale_of_the_stock_op,
        mask_of_one_dimension,
        other_value_size,
        number_added,
    ):
        assert not fired(fuse(function, q, k, v, mask)[0]), function
    for function in (small_fill, number_added):  # as many keys as numbers in a head
        inputs = attention_inputs(torch.float32, length=16)
        assert not fired(fuse(function, *inputs)[0]), function
    assert not fired(fuse(bert, *(t.double() for t in (q, k, v, mask)))[0])


@pytest.mark.parametrize("dtype", DTYPES)
def test_attention_of_one_key_head(dtype):
    """What Falcon gives to the stock op, which then is a sequence of others."""
    q, k = randn(2, 4, 5, 16, dtype=dtype), randn(2, 1, 5, 16, dtype=dtype)
    v = randn(2, 1, 5, 16, dtype=dtype)
    mask = torch.ones(5, 5, dtype=torch.bool).tril().expand(2, 1, 5, 5).clone()
    mask[1, 0, 3] = False  # a row without a key gives zeros
    report, _ = fuse(F.scaled_dot_product_attention, q, k, v, mask)
    assert fired(report) == {"attention": 1}


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float16])
@pytest.mark.parametrize("fill", [-1e4, -6e4, -1e9, -math.inf, None])
def test_rows_that_are_filled_as_a_whole(fill, dtype):
    """What is in the place of all their scores is the same for all keys."""
    q, k, v, added = attention_inputs(dtype)
    drop = torch.zeros(2, 1, 6, 6, dtype=torch.bool)
    drop[0, :, 1:4] = True
    drop[1, :, :, 2] = True
    if fill == -math.inf:
        drop[0, :, 1:4, 5] = False
    elif fill is None or fill < torch.finfo(dtype).min:
        fill = torch.finfo(dtype).min

    def filled(q, k, v, drop, added):
        scores = q @ k.transpose(-1, -2) * 3.0 + added.clamp_min(-8)
        return scores.masked_fill(drop, fill).softmax(-1) @ v

    report, _ = fuse(filled, q, k, v, drop, added)
    assert fired(report) == {"attention": 1}


def test_rows_without_a_key():
    q, k, v = randn(2, 4, 5, 16), randn(2, 1, 5, 16), randn(2, 1, 5, 16)
    mask = torch.zeros(2, 1, 5, 5).index_fill(2, torch.tensor([1]), -math.inf)

    def guarded(q, k, v, m, fill=0.0, other=-math.inf, scale=0.5):
        scores = (q * scale).matmul((k * 0.5).transpose(-1, -2).expand(2, 4, 16, 5)) + m
        some = torch.logical_not(scores == other).any(-1, keepdim=True)
        zeros = torch.full(scores.shape, fill)
        weights = torch.where(torch.logical_not(some), zeros, scores.softmax(-1))
        return weights.matmul(v.expand(2, 4, 5, 16))

    for options, count in (
        ({}, 1),
        ({"scale": -0.5}, 1),
        ({"fill": 1.0}, 0),
        ({"other": 0.0}, 0),
    ):
        report, _ = fuse(functools.partial(guarded, **options), q, k, v, mask)
        assert report.count("attention") == count, options


@pytest.mark.parametrize("mode", ["fake", "symbolic"])
def test_views_of_a_result_that_lies_otherwise(mode):
    """`torch.nn.MultiheadAttention` puts the batch second; the stock op lays its result out as the query."""

    def heads_first(x):
        return x.view(6, 8, 16).transpose(0, 1).view(2, 4, 6, 16)

    def function(x):
        q = heads_first(x)
        y = F.scaled_dot_product_attention(q, q, q)
        return y.permute(2, 0, 1, 3).contiguous().view(12, 64)

    report, _ = fuse(function, randn(6, 2, 64), mode=mode)
    assert fired(report) == {"attention": 1}


def test_a_key_head_spread_over_batches():
    q, k = randn(2, 4, 5, 16), randn(2, 1, 5, 16)

    def mixed(q, k):
        k = k.view(1, 2, 5, 16).expand(4, 2, 5, 16).reshape(2, 4, 5, 16)
        return q.matmul(k.transpose(-1, -2)).softmax(-1).matmul(k)

    fuse(mixed, q, k)


def test_attention_keys_that_are_already_transposed():
    q, k, v, _ = attention_inputs(torch.float32)
    report, _ = fuse(lambda q, k, v: (q @ k).softmax(-1) @ v, q, k.transpose(2, 3).contiguous(), v)
    assert fired(report) == {"attention": 1}


def test_attention_is_chosen_by_shape(monkeypatch):
    inputs = attention_inputs(torch.float32)
    report, _ = fuse(stock, *inputs, always=False)
    assert not fired(report) and "the stock op is as fast" in reasons(report)
    monkeypatch.setattr(
        "ipex_core.fusion.aten.attention.prefer_ipex_attention", lambda q, k, dtype: q[2] == 6
    )
    assert fired(fuse(stock, *inputs, always=False)[0]) == {"attention": 1}
    assert policy.prefer_ipex_attention([1, 4, 512, 16], [1, 4, 512, 16], torch.float32)

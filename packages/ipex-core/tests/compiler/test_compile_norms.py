# SPDX-License-Identifier: Apache-2.0
"""Norms and rotary embeddings in the graph passes of the compile backend."""

from __future__ import annotations

import functools

import pytest
import torch
from compile_checks import (
    DTYPES,
    attention_inputs,
    fired,
    fuse,
    llama_norm,
    randn,
    reasons,
    rotary,
    rotate_half,
)
from torch.nn import functional as F

from ipex_core.kernels.policy import prefer_ipex_norm


def gemma_norm(x, weight):
    wide = x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
    return (wide * (1.0 + weight.float())).type_as(x)


def t5_norm(x, weight):
    variance = x.to(torch.float32).pow(2).mean(-1, keepdim=True)
    x = x * torch.rsqrt(variance + 1e-6)
    if weight.dtype in (torch.float16, torch.bfloat16):
        x = x.to(weight.dtype)
    return weight * x


def squared_norm(x, weight):
    wide = x.float()
    return (wide * torch.rsqrt((wide * wide).mean(-1, True) + 1e-6) * weight.float()).to(x.dtype)


def stock_norm(x, weight):
    return F.rms_norm(x, x.shape[-1:], weight, 1e-6)


NORMS = (llama_norm, gemma_norm, t5_norm, squared_norm, stock_norm)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("norm", NORMS)
def test_rms_norm(norm, dtype):
    x, weight = randn(2, 5, 64, dtype=dtype), randn(64, dtype=dtype)
    report, _ = fuse(norm, x, weight)
    assert fired(report) == {"rms_norm": 1}
    assert ("offset 1" in report.fusions[0].text) == (norm is gemma_norm)
    report, _ = fuse(
        lambda x, r, w: (norm(x + r, w), x + r), x, randn(2, 5, 64, dtype=dtype), weight
    )
    assert fired(report)["rms_norm"] == 1


@pytest.mark.parametrize("dtype", DTYPES)
def test_norms_without_parameters_and_at_any_length(dtype):
    x = randn(3, 7, 32, dtype=dtype)
    report, _ = fuse(lambda x: (F.rms_norm(x, (32,), None, 1e-6), F.layer_norm(x, (32,))), x)
    assert fired(report) == {"rms_norm": 1, "layer_norm": 1}
    weight, bias = randn(32, dtype=dtype), randn(32, dtype=dtype)
    report, gm = fuse(
        lambda x, w, b: F.layer_norm(llama_norm(x, w), (32,), w, b),
        *(x, weight, bias),
        mode="symbolic",
    )
    assert fired(report) == {"rms_norm": 1, "layer_norm": 1}
    longer = randn(4, 3, 32, dtype=dtype)
    assert gm(longer, weight, bias).shape == longer.shape


@pytest.mark.parametrize("dtype", DTYPES)
def test_addition_and_norm(dtype):
    def function(x, r, w, b):
        total = x + r
        other = F.layer_norm(total * 2 + r, (64,), w, b, 1e-12)
        return llama_norm(total, w) + other, total

    x, r = randn(4, 64, dtype=dtype), randn(4, 64, dtype=dtype)
    report, _ = fuse(function, x, r, randn(64, dtype=dtype), randn(64, dtype=dtype))
    assert fired(report) == {"rms_norm": 1, "layer_norm": 1, "add_norm": 2}


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_layer_norm_with_an_offset(bias, dtype):
    """As Nemotron writes it."""
    x, w, b = (randn(*size, dtype=dtype) for size in ((4, 64), (64,), (64,)))
    report, _ = fuse(lambda x, w, b: F.layer_norm(x, (64,), w + 1, b if bias else None), x, w, b)
    assert fired(report) == {"layer_norm": 1}


def test_norms_that_are_not():
    x, weight = randn(4, 6, 32), randn(32)

    def other_dim(x, w):
        return x * torch.rsqrt(x.pow(2).mean(1, keepdim=True) + 1e-6) * w

    def cubed(x, w):
        return x * torch.rsqrt(x.abs().pow(3).mean(-1, keepdim=True) + 1e-6) * w

    def of_another(x, w):
        return (x + 1) * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * w

    def unbiased(x, w):
        var, mean = torch.var_mean(x, -1, correction=1, keepdim=True)
        return (x - mean) * torch.rsqrt(var + 1e-6) * w

    def two_dims(x, w):
        return F.layer_norm(x, (6, 32))

    for function in (other_dim, cubed, of_another, unbiased, two_dims):
        assert not fired(fuse(function, x, weight)[0]), function


def test_norm_with_other_users_stays():
    def function(x, w):
        root = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
        return x * root * w, root

    report, _ = fuse(function, randn(4, 32), randn(32))
    assert not fired(report) and "has another user" in reasons(report)


def test_norm_of_another_dtype_or_shape_keeps_what_it_can():
    x = randn(4, 32, dtype=torch.bfloat16)
    report, _ = fuse(llama_norm, x, randn(32))  # the float32 weight widens the result
    assert report.count("rms_norm") <= 1
    report, _ = fuse(llama_norm, randn(4, 32), randn(4, 32))  # a weight per row
    assert fired(report) == {"rms_norm": 1} and "no weight" in report.fusions[0].text
    report, _ = fuse(lambda x, r, w: llama_norm(x + r, w), randn(4, 32), randn(1, 32), randn(32))
    assert fired(report) == {"rms_norm": 1} and "operands of the addition" in reasons(report)


def test_float64_stays():
    x = torch.randn(4, 32, dtype=torch.float64)
    report, _ = fuse(lambda x, w: F.layer_norm(x, (32,), w), x, x[0].clone())
    assert not fired(report)


# -- rotary embedding -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("batch", [1, 2])
def test_rotary(dtype, batch):
    q, k, _, _ = attention_inputs(dtype, kv_heads=2)
    tables = (randn(batch, 6, 16, dtype=dtype), randn(batch, 6, 16, dtype=dtype))
    report, _ = fuse(rotary, q, k, *tables)
    assert fired(report) == {"rotary": 2}, reasons(report)


def partial_rotary(q, k, cos, sin):
    """As GPT-NeoX and Phi rotate the first elements of each head."""
    heads = [(x[..., :8], x[..., 8:]) for x in (q, k)]
    turned = rotary(heads[0][0], heads[1][0], cos, sin)
    return tuple(torch.cat((t, rest), -1) for t, (_, rest) in zip(turned, heads, strict=True))


@pytest.mark.parametrize("dtype", DTYPES)
def test_partial_rotary(dtype):
    q, k, _, _ = attention_inputs(dtype, kv_heads=2)
    tables = (randn(1, 6, 8, dtype=dtype), randn(1, 6, 8, dtype=dtype))
    report, gm = fuse(partial_rotary, q, k, *tables)
    assert fired(report) == {"rotary": 2}, reasons(report)
    assert not gm.graph.find_nodes(op="call_function", target=torch.ops.aten.cat.default)
    assert not gm.graph.find_nodes(op="call_function", target=torch.ops.aten.slice.Tensor)

    def other_rest(q, k, cos, sin):
        turned = rotary(q[..., :8], k[..., :8], cos, sin)
        return tuple(torch.cat((t, x[..., :8]), -1) for t, x in zip(turned, (q, k), strict=True))

    report, gm = fuse(other_rest, q, k, *tables)
    assert len(gm.graph.find_nodes(op="call_function", target=torch.ops.aten.cat.default)) == 2


def by_halves(part, q, k, cos, sin):
    """By tables of half the size, as servers compute it."""

    def turn(x):
        low, high = x[..., :part].chunk(2, -1)
        c, s = cos.unsqueeze(-2), sin.unsqueeze(-2)
        turned = torch.cat((low * c - high * s, high * c + low * s), -1)
        return turned if part == x.shape[-1] else torch.cat((turned, x[..., part:]), -1)

    return turn(q), turn(k)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("part", [16, 8])
@pytest.mark.parametrize("lead", [(6,), (2, 6)])
def test_rotary_by_tables_of_half_the_size(dtype, part, lead):
    q, k = randn(*lead, 4, 16, dtype=dtype), randn(*lead, 2, 16, dtype=dtype)
    tables = [randn(*lead, part // 2, dtype=dtype) for _ in range(2)]
    report, gm = fuse(functools.partial(by_halves, part), q, k, *tables)
    assert fired(report) == {"rotary": 2}, reasons(report)
    assert not gm.graph.find_nodes(op="call_function", target=torch.ops.aten.cat.default)


def test_rotary_with_heads_behind_positions():
    def function(q, k, cos, sin):
        c, s = cos.unsqueeze(2), sin.unsqueeze(2)
        return tuple(x * c + rotate_half(x) * s for x in (q, k))

    q, k = randn(2, 6, 4, 16), randn(2, 6, 2, 16)
    report, _ = fuse(function, q, k, randn(1, 6, 16), randn(1, 6, 16))
    assert fired(report) == {"rotary": 2}, reasons(report)


def test_rotary_by_halves_near_misses():
    q, k, cos, sin = randn(6, 4, 16), randn(6, 2, 16), randn(6, 8), randn(6, 8)

    def like(form):
        def function(q, k, cos, sin):
            c, s = cos.unsqueeze(-2), sin.unsqueeze(-2)
            return tuple(torch.cat(form(*x.chunk(2, -1), c, s), -1) for x in (q, k))

        return function

    wrong = [
        lambda low, high, c, s: (low * c + high * s, high * c + low * s),
        lambda low, high, c, s: (low * c - high * s, high * c - low * s),
        lambda low, high, c, s: (low * s - high * c, high * s + low * s),
        lambda low, high, c, s: (high * c + low * s, low * c - high * s),
        lambda low, high, c, s: (low * c - low * s, high * c + high * s),
        lambda low, high, c, s: (low * c - high * s, high * c + low * s, low),
    ]
    for form in wrong:
        assert "rotary" not in fired(fuse(like(form), q, k, cos, sin)[0])
    # Tables for each head, and of one head for all tokens.
    every = [randn(6, 4, 8), randn(6, 4, 8)]
    report, _ = fuse(
        lambda q, k, c, s: tuple(
            torch.cat(
                (
                    x.chunk(2, -1)[0] * c - x.chunk(2, -1)[1] * s,
                    x.chunk(2, -1)[1] * c + x.chunk(2, -1)[0] * s,
                ),
                -1,
            )
            for x in (q, k)
        ),
        q,
        q + 1,
        *every,
    )
    assert "rotary" not in fired(report)


@pytest.mark.parametrize("columns", [96, 192])
def test_short_rows_stay(columns):
    x, weight = randn(600, columns), randn(columns)
    for function in (llama_norm, lambda x, w: F.layer_norm(x, (columns,), w)):
        report, _ = fuse(function, x, weight, always=False)
        assert bool(fired(report)) is (columns > 128)
        assert fired(report) or "as fast" in reasons(report)
    assert prefer_ipex_norm(None, columns, torch.float32) is (columns > 128)  # rows that vary


def test_rotary_near_misses():
    q, k, _, _ = attention_inputs(torch.float32)
    cos, sin = randn(1, 6, 16), randn(1, 6, 16)

    def alone(q, k, cos, sin):
        return rotary(q, k, cos, sin)[0]

    def subtracted(q, k, cos, sin):
        return tuple(x * cos.unsqueeze(1) - rotate_half(x) * sin.unsqueeze(1) for x in (q, k))

    def not_negated(q, k, cos, sin):
        turned = [torch.cat((x[..., 8:], x[..., :8]), -1) for x in (q, k)]
        return tuple(
            x * cos[:, None] + t * sin[:, None] for x, t in zip((q, k), turned, strict=True)
        )

    def by_quarters(q, k, cos, sin):
        turned = [torch.cat((-x[..., 4:], x[..., :4]), -1) for x in (q, k)]
        return tuple(
            x * cos[:, None] + t * sin[:, None] for x, t in zip((q, k), turned, strict=True)
        )

    def key_from_query(q, k, cos, sin):
        q, _ = rotary(q, q, cos, sin)
        return q, rotary(q + k, k, cos, sin)[0]

    for function in (alone, subtracted, not_negated, by_quarters, key_from_query):
        assert "rotary" not in fired(fuse(function, q, k, cos, sin)[0]), function
    report, _ = fuse(rotary, q.to(torch.bfloat16), k.to(torch.bfloat16), cos, sin)
    assert not fired(report)  # float32 tables widen the result

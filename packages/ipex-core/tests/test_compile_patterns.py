# SPDX-License-Identifier: Apache-2.0
"""The graph passes of torch.compile(backend="ipex"), on graphs of ATen ops and without Inductor's code generation."""

from __future__ import annotations

import functools
import math

import pytest
import torch
from torch import nn
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.fx_passes.post_grad import remove_noop_ops
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

from ipex_core import _choice
from ipex_core._compile._passes import PATTERNS, run_passes
from ipex_core._compile._report import GraphReport

DTYPES = (torch.float32, torch.bfloat16)


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@torch.no_grad()
def fuse(function, *inputs, constants=(), mode="fake", **options):
    """Run the passes on the graph of a function, compare the results, and return report and graph.

    ``constants`` are the positions of the inputs that freezing would make constant.
    """
    plain = make_fx(function, decomposition_table=select_decomp_table(), tracing_mode=mode)(*inputs)
    # AOTAutograd removes mutations below the decompositions.
    gm = make_fx(torch.func.functionalize(plain, remove="mutations"), tracing_mode=mode)(*inputs)
    remove_noop_ops(gm.graph)
    placeholders = gm.graph.find_nodes(op="placeholder")
    report = GraphReport("test", inference=True)
    options = {"always": True, "kernels": lambda op: True} | options
    changed = run_passes(gm.graph, report, [placeholders[i] for i in constants], **options)
    assert changed == report.count()
    gm.graph.lint()
    gm.recompile()
    expected, got = function(*inputs), gm(*inputs)
    pairs = zip(expected, got, strict=True) if isinstance(expected, tuple) else [(expected, got)]
    for e, g in pairs:
        limit = {torch.float32: 1e-4, torch.bfloat16: 3e-2}.get(e.dtype, 1e-9)
        absolute = limit * max(1.0, e.abs().max().item())
        assert g.dtype == e.dtype
        torch.testing.assert_close(g, e, rtol=limit, atol=absolute, equal_nan=True)
    return report, gm


def fired(report):
    return {p: report.count(p) for p in PATTERNS if report.count(p)}


def reasons(report):
    return "; ".join(f.text for f in report.fusions if not f.fired)


def randn(*shape, dtype=torch.float32, scale=1.0):
    return (torch.randn(*shape) * scale).to(dtype)


# -- norms ------------------------------------------------------------------------------------------------------------


def llama_norm(x, weight):
    wide = x.to(torch.float32)
    variance = wide.pow(2).mean(-1, keepdim=True)
    wide = wide * torch.rsqrt(variance + 1e-6)
    return weight * wide.to(x.dtype)


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


# -- attention --------------------------------------------------------------------------------------------------------


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


def stock(q, k, v, mask):
    return F.scaled_dot_product_attention(q, k, v, mask, scale=0.2)


def stock_repeated(q, k, v, mask):
    k, v = (repeat_kv(t, q.shape[1] // t.shape[1]) for t in (k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


ATTENTIONS = (bert, vit, llama, gpt2, t5, gemma2, masked_fill, stock, stock_repeated)


def attention_inputs(dtype, kv_heads=4, length=6):
    q = randn(2, length, 4 * 16, dtype=dtype).view(2, length, 4, 16).transpose(1, 2)
    k, v = (
        randn(2, length, kv_heads * 16, dtype=dtype).view(2, length, kv_heads, 16).transpose(1, 2)
        for _ in range(2)
    )
    mask = torch.zeros(2, 1, length, length, dtype=dtype)
    mask[1, :, :, -2:] = torch.finfo(dtype).min
    return q, k, v, mask


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

    def scaled_after_the_mask(q, k, v, mask):
        return ((q @ k.transpose(-1, -2) + mask.clamp_min(-2)) * 0.5).softmax(-1) @ v

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
        return (q @ k.transpose(-1, -2)).softmax(-1) @ v[..., :8]

    for function in (
        weights_returned,
        other_softmax_dim,
        small_fill,
        scaled_after_the_mask,
        soft_capped,
        cap_of_another_size,
        capped_after_the_mask,
        negative_scale,
        negative_scale_of_the_stock_op,
        mask_of_one_dimension,
        other_value_size,
    ):
        assert not fired(fuse(function, q, k, v, mask)[0]), function
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
        "ipex_core._compile.attention.prefer_ipex_attention", lambda q, k, dtype: q[2] == 6
    )
    assert fired(fuse(stock, *inputs, always=False)[0]) == {"attention": 1}
    assert _choice.prefer_ipex_attention([1, 4, 512, 16], [1, 4, 512, 16], torch.float32)


# -- rotary embedding -------------------------------------------------------------------------------------------------


def rotate_half(x):
    first, second = x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :]
    return torch.cat((-second, first), dim=-1)


def rotary(q, k, cos, sin):
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return (q * cos) + (rotate_half(q) * sin), (k * cos) + (rotate_half(k) * sin)


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


# -- linear layers ----------------------------------------------------------------------------------------------------


def weight(n, k, dtype):
    return randn(n, k, dtype=dtype, scale=k**-0.5)


ACTIVATIONS = {
    "relu": F.relu,
    "silu": F.silu,
    "swish": lambda x: x * torch.sigmoid(x),
    "gelu": F.gelu,
    "gelu_python": lambda x: x * 0.5 * (1.0 + torch.erf(x / math.sqrt(2.0))),
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "gelu_new": lambda x: (
        0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))))
    ),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_linear_and_activation(name, dtype):
    x, w, b = randn(2, 5, 32, dtype=dtype), weight(48, 32, dtype), randn(48, dtype=dtype)
    report, gm = fuse(
        lambda x, w, b: ACTIVATIONS[name](F.linear(x, w, b)), x, w, b, constants=(1, 2)
    )
    assert fired(report) == {"linear": 1, "post_op": 1}
    left = {str(n.target) for n in gm.graph.nodes if n.op == "call_function"}
    assert left <= {
        "ipex.linear.default",
        "ipex.pack_linear_weight.default",
        "aten.permute.default",
        "aten.t.default",
        "aten.clone.default",
    }


@pytest.mark.parametrize("dtype", DTYPES)
def test_linear_and_what_follows(dtype):
    x, y = randn(2, 5, 32, dtype=dtype), randn(2, 5, 48, dtype=dtype)
    w, b = weight(48, 32, dtype), randn(48, dtype=dtype)

    def function(x, w, b, y):
        first = F.silu(F.linear(x, w, b)) * y + y
        return first + y * 2, y + F.linear(x, w)

    report, _ = fuse(function, x, w, b, y, constants=(1, 2))
    assert fired(report) == {"linear": 2, "post_op": 5}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("name", ["silu", "gelu", "gelu_tanh"])
def test_gated_mlp(name, bias, dtype):
    x, gate, up = randn(2, 3, 32, dtype=dtype), weight(72, 32, dtype), weight(72, 32, dtype)
    biases = (randn(72, dtype=dtype), randn(72, dtype=dtype)) if bias else (None, None)

    def function(x, gate, up, *biases):
        a, b = biases or (None, None)
        return ACTIVATIONS[name](F.linear(x, gate, a)) * F.linear(x, up, b)

    given = [b for b in biases if b is not None]
    report, _ = fuse(function, x, gate, up, *given, constants=range(1, 3 + len(given)))
    assert fired(report) == {"linear": 2, "gated": 1}
    report, gm = fuse(function, x, gate, up, *given)
    assert fired(report) == {"gated": 1} and "not frozen" in reasons(report)
    assert any("ipex." in str(n.target) and "_mul" in str(n.target) for n in gm.graph.nodes)


def test_gate_of_other_inputs_or_with_other_users():
    x, y, gate, up = (
        randn(4, 32),
        randn(4, 32),
        weight(40, 32, torch.float32),
        weight(40, 32, torch.float32),
    )
    report, _ = fuse(
        lambda x, gate, up, y: F.silu(F.linear(x, gate)) * F.linear(y, up),
        *(x, gate, up, y),
        constants=(1, 2),
    )
    assert fired(report) == {"linear": 2, "post_op": 2}  # as activation and factor

    def shared(x, gate, up):
        left = F.silu(F.linear(x, gate))
        return left * F.linear(x, up), left

    report, _ = fuse(shared, x, gate, up, constants=(1, 2))
    assert "gated" not in fired(report) and "has another user" in reasons(report)
    report, _ = fuse(lambda x: F.silu(x + 1) * (x - 1), x)
    assert not fired(report) and "elementwise" in reasons(report)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("swap", [False, True])
def test_gated_mlp_of_one_layer(swap, bias, dtype):
    x, both = randn(2, 3, 32, dtype=dtype), weight(144, 32, dtype)
    given = [randn(144, dtype=dtype)] if bias else []

    def phi3(x, both, *bias):
        halves = F.linear(x, both, *bias).chunk(2, dim=-1)
        return halves[not swap] * F.silu(halves[swap])

    def sliced(x, both, *bias):
        h = F.linear(x, both, *bias)
        gate, up = (h[..., 72:], h[..., :-72]) if swap else (h[..., :72], h[..., 72:])
        return F.silu(gate) * up

    for function in (phi3, sliced):
        inputs = (x, both, *given)
        report, _ = fuse(function, *inputs, constants=range(1, len(inputs)))
        assert fired(report) == {"linear": 1, "gated": 1}
        report, _ = fuse(function, *inputs, mode="symbolic")  # weights of any size
        assert not fired(report)


def test_halves_that_are_no_gated_mlp():
    x, both = randn(4, 32), weight(80, 32, torch.float32)

    def used(x, w):
        a, b = F.linear(x, w).chunk(2, -1)
        return F.silu(a) * b, b

    def one(x, w):
        a, _ = F.linear(x, w).chunk(2, -1)
        return F.silu(a) * a

    def uneven(x, w):
        h = F.linear(x, w)
        return F.silu(h[:, :40]) * h[:, 39:79]

    def strided(x, w):
        h = F.linear(x, w)
        return F.silu(h[:, ::2]) * h[:, 1::2]

    def rows(x, w):
        a, b = F.linear(x, w).chunk(2, 0)
        return F.silu(a) * b

    for function in (used, one, uneven, strided, rows):
        report, _ = fuse(function, x, both, constants=(1,))
        assert "gated" not in fired(report), function


def test_linear_that_must_stay():
    x, w = randn(4, 32), weight(48, 32, torch.float32)
    report, _ = fuse(lambda x, w: F.linear(x, w), x, w)
    assert not fired(report) and "not frozen" in reasons(report)
    report, _ = fuse(lambda a, b: (a + 1) @ (b + 1).t(), x, w)
    assert not report.fusions  # a product of activations
    report, _ = fuse(
        lambda x, w, b: torch.addmm(b, x, w.t(), beta=2), x, w, randn(48), constants=(1, 2)
    )
    assert not fired(report) and "alpha or beta" in reasons(report)
    report, _ = fuse(lambda x, w: F.linear(x, w), x.double(), w.double(), constants=(1,))
    assert not fired(report)
    report, _ = fuse(lambda x, w: F.linear(x, w), x, w, constants=(1,), always=False)
    assert not fired(report) and "fewer than" in reasons(report)
    report, _ = fuse(lambda x, w: F.linear(x, w), x, w, constants=(1,), kernels=lambda op: False)
    assert not fired(report) and "no kernel package" in reasons(report)


def test_weights_as_gpt2_stores_them():
    x, w, b = randn(2, 3, 32), weight(32, 48, torch.float32), randn(48)
    report, _ = fuse(
        lambda x, w, b: torch.addmm(b, x.view(-1, 32), w).view(2, 3, 48), x, w, b, constants=(1, 2)
    )
    assert fired(report) == {"linear": 1}


def test_post_ops_that_do_not_fit():
    x, w = randn(4, 32), weight(48, 32, torch.float32)
    report, _ = fuse(lambda x, w, y: F.linear(x, w) + y, x, w, randn(48), constants=(1,))
    assert fired(report) == {"linear": 1} and "the addend is float32[48]" in reasons(report)
    report, _ = fuse(lambda x, w: F.relu(F.linear(x, w) * 2), x, w, constants=(1,))
    assert fired(report) == {"linear": 1}

    def shared(x, w):
        y = F.linear(x, w)
        return F.relu(y), y

    report, _ = fuse(shared, x, w, constants=(1,))
    assert fired(report) == {"linear": 1} and "has another user" in reasons(report)
    report, _ = fuse(lambda x, w: (lambda y: y + y)(F.linear(x, w)), x, w, constants=(1,))
    assert fired(report) == {"linear": 1}
    report, _ = fuse(lambda x, w, y: F.relu(F.linear(x, w) + y), x, w, randn(4, 48), constants=(1,))
    assert fired(report) == {"linear": 1, "post_op": 1}  # the activation comes after the addition


@pytest.mark.parametrize("name", PATTERNS)
def test_each_pattern_can_be_disabled(name):
    class Layer(nn.Module):
        def forward(self, x, gate, up, down, codes, scales, w, q, k, v, cos, sin):
            x = torch.ops.aten._weight_int8pack_mm(x.view(12, 64), codes, scales).view(2, 6, 64)
            q, k = rotary(q, k, cos, sin)
            x = x + stock(q, k, v, None).transpose(1, 2).reshape(2, 6, 64)
            y = F.layer_norm(llama_norm(x + 1, w) + x, (64,), w)
            return F.linear(F.silu(F.linear(y, gate)) * F.linear(y, up), down) + x

    q, k, v, _ = attention_inputs(torch.float32)
    weights = [weight(*s, torch.float32) for s in ((96, 64), (96, 64), (64, 96))]
    tables = (randn(1, 6, 16), randn(1, 6, 16))
    quantised = (torch.randint(-99, 99, (64, 64), dtype=torch.int8), torch.rand(64) * 1e-3)
    inputs = (randn(2, 6, 64), *weights, *quantised, torch.rand(64), q, k, v, *tables)
    constants = range(1, 6)
    report, _ = fuse(Layer(), *inputs, constants=constants, disabled=[name])
    assert report.count() and name not in fired(report)
    assert name in fired(fuse(Layer(), *inputs, constants=constants)[0])


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_follows_quantised_layers(dtype):
    x, y = randn(3, 64, dtype=dtype), randn(3, 32, dtype=dtype)
    codes, scales = torch.randint(-99, 99, (32, 64), dtype=torch.int8), torch.rand(32) * 1e-2
    ipex = torch.ops.ipex
    woq = ipex.pack_woq_weight(codes, scales[:, None], None, "int8", 64)
    int8 = ipex.pack_int8_weight(codes)

    def function(x, y, woq, int8, scales):
        first = F.silu(ipex.woq_linear(x, woq, 32)) * y
        return first, F.gelu(ipex.int8_linear(x, int8, 32, scales)) + y

    report, _ = fuse(function, x, y, woq, int8, scales)
    assert fired(report) == {"post_op": 4}

# SPDX-License-Identifier: Apache-2.0
"""Attention as BLOOM, CodeGen, GPT-Neo, DeBERTa-v2, Swin v2, DeepSeek-V3 and gpt-oss write it, and near misses."""

from __future__ import annotations

import functools
import math

import pytest
import torch
from compile_checks import DTYPES, attention_inputs, fired, fuse, reasons
from torch import fx, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

from ipex_core.fusion import GraphReport
from ipex_core.fusion.aten import number
from ipex_core.fusion.aten.passes import run_passes


def flat(x):
    return x.reshape(-1, *x.shape[2:])


def bloom(q, k, v, mask, beta=1.0, alpha=0.25, per_batch=True):
    batch, heads, length, _ = q.shape
    slopes = torch.arange(1, heads + 1).view(1, heads, 1, 1).to(q.dtype) / 8
    bias = slopes * torch.arange(length).to(q.dtype).expand(batch, 1, 1, length)
    bias = bias.reshape(batch * heads, 1, length) if per_batch else bias[0, :1, 0].unsqueeze(0)
    scores = torch.baddbmm(bias, flat(q), flat(k).transpose(-1, -2), beta=beta, alpha=alpha).view(
        batch, heads, length, -1
    )
    weights = F.softmax(scores + mask, dim=-1, dtype=torch.float32).to(q.dtype)
    return torch.bmm(weights.view(batch * heads, length, -1), flat(v)).view(q.shape)


def bloom_of_one_bias(q, k, v, mask):
    return bloom(q, k, v, mask, per_batch=False)


def without_the_input(q, k, v, mask):  # the first operand only tells the shape
    return bloom(q, k, v, mask, beta=0)


def codegen(q, k, v, mask):
    scores = q.float() @ k.float().transpose(-1, -2) + mask
    weights = (scores / torch.tensor(4.0)).softmax(-1)
    return weights.to(v.dtype) @ v


def gpt_neo(q, k, v, mask):
    scores = q @ k.transpose(-1, -2)
    near = torch.ones(scores.shape[-2:], dtype=torch.bool).tril().triu(-3)
    low = torch.tensor(torch.finfo(scores.dtype).min, dtype=scores.dtype)
    return (torch.where(near, scores, low) + mask).softmax(-1) @ v


def deberta(q, k, v, mask):
    batch, heads, length, size = q.shape
    scale = torch.sqrt(torch.tensor(size, dtype=torch.float) * 3).to(q.dtype)
    q, k, v = map(flat, (q, k, v))
    scores = torch.bmm(q, k.transpose(-1, -2) / scale)
    places = (
        torch.arange(9 * size, dtype=torch.float)
        .cos()
        .to(q.dtype)
        .view(9, size)
        .expand(batch * heads, -1, -1)
    )
    ids = (torch.arange(length)[:, None] - torch.arange(length) + 4).clamp(0, 8)
    ids = ids.expand(batch * heads, length, length)
    to_place = torch.gather(torch.bmm(q, places.transpose(-1, -2)), -1, ids) / scale
    scores = (scores + to_place).view(batch, heads, length, length)
    scores = scores.masked_fill(mask < 0, torch.finfo(q.dtype).min)
    return torch.bmm(scores.softmax(-1).view(-1, length, length), v).view(batch, heads, length, -1)


def swin(q, k, v, mask, windows=2, last=1):
    logits = torch.linspace(1.0, 2.0, 4).to(q.dtype).view(4, 1, 1).expand(4, 1, last)
    scores = F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).transpose(-2, -1) * logits
    scores = scores + torch.linspace(-1, 1, 36).to(q.dtype).view(6, 6)
    length = q.shape[2]
    shifted = mask.clamp_min(-100)[:windows, 0, None][None]
    scores = scores.view(-1, windows, 4, length, length) + shifted
    scores = scores + shifted[0, :, :1]
    return scores.view(-1, 4, length, length).softmax(-1) @ v


def swin_of_one_group(q, k, v, mask):
    return swin(q, k, v, mask, windows=1)


def latent(q, k, v, mask):
    return (q @ k.transpose(-1, -2) * 0.2 + mask).softmax(-1) @ v[..., :10]


def with_sinks(q, k, v, mask, amount=1, kept=6, shape=(1, 4, 1, 1), maximum=True):
    times = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(times, 1) for x in (k, v))
    scores = torch.matmul(q, k.transpose(2, 3)) * 0.3 + mask
    column = torch.linspace(-1, 1, math.prod(shape) * amount).to(q.dtype).view(*shape[:3], amount)
    scores = torch.cat([scores, column.expand(2, 4, 6, amount)], dim=-1)
    if maximum:
        scores = scores - scores.max(dim=-1, keepdim=True).values
    weights = F.softmax(scores, dim=-1, dtype=scores.dtype)[..., :kept]
    return torch.matmul(F.dropout(weights, 0.1, training=False), v[:, :, :kept])


def sinks_as_they_are(q, k, v, mask):
    return with_sinks(q, k, v, mask, maximum=False)


FORMS = (bloom, bloom_of_one_bias, without_the_input, codegen, gpt_neo, deberta, swin)
FORMS += (swin_of_one_group, latent, with_sinks, sinks_as_they_are)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("function", FORMS)
def test_forms(function, dtype):
    # A function with defaults is not traced as it is called.
    report, _ = fuse(lambda *args: function(*args), *attention_inputs(dtype))
    assert fired(report) == {"attention": 1}, reasons(report)
    (fusion,) = (f for f in report.fusions if f.fired)
    for word, functions in {
        "sinks": (with_sinks, sinks_as_they_are),
        "smaller values": (latent,),
        "scales of heads": (swin, swin_of_one_group),
    }.items():
        assert (word in fusion.text) == (function in functions)


def test_what_resembles_them():
    inputs = attention_inputs(torch.float32)
    partial = functools.partial

    def logits_of_keys(q, k, v, mask):
        return swin(q, k, v, mask, last=6)

    def weights_with_the_sink(q, k, v, mask):
        scores = torch.cat([q @ k.transpose(-1, -2), mask[:, :, :, :1].expand(2, 4, 6, 1)], -1)
        weights = scores.softmax(-1)
        return weights[..., :-1] @ v + weights[..., -1:]

    def sinks_of_queries(q, k, v, mask):
        scores = torch.cat([q @ k.transpose(-1, -2), q[..., :1]], -1)
        return scores.softmax(-1)[..., :-1] @ v

    def shifted_by_others(q, k, v, mask):
        scores = q @ k.transpose(-1, -2)
        return (scores - scores.amax(-2, keepdim=True)).softmax(-1) @ v

    def divided_by_what_is_given(q, k, v, mask):
        return (q @ k.transpose(-1, -2) / v[0, 0, 0].exp().sum()).softmax(-1) @ v

    def mixed_heads(q, k, v, mask):
        scores = (q @ k.transpose(-1, -2)).view(4, 2, 6, 6) + mask[:1]
        return scores.softmax(-1).view(2, 4, 6, 6) @ v

    def scaled_per_query_below_the_mask(q, k, v, mask):
        return ((q @ k.transpose(-1, -2) + mask.clamp_min(-2)) * q[..., :1]).softmax(-1) @ v

    def biased_by_another_factor(q, k, v, mask):
        return bloom(q, k, v, mask, beta=-0.5)

    for function in (
        logits_of_keys,
        weights_with_the_sink,
        sinks_of_queries,
        shifted_by_others,
        divided_by_what_is_given,
        scaled_per_query_below_the_mask,
        biased_by_another_factor,
        partial(with_sinks, amount=2),
        partial(with_sinks, kept=5),
    ):
        assert not fired(fuse(function, *inputs)[0]), function
    for function in (gpt_neo, latent):
        wide = [t.double() for t in inputs]
        assert not fired(fuse(function, *wide)[0]), function
    # These may be fused or not, if only they are right.
    fuse(mixed_heads, *inputs)
    fuse(partial(with_sinks, shape=(1, 1, 6, 1)), *inputs)
    fuse(partial(with_sinks, shape=(2, 4, 1, 1)), *inputs)


def test_a_scale_that_is_no_number():
    owner = nn.Module()
    owner.register_buffer("scale", torch.tensor(-4.0))
    graph = fx.Graph(owning_module=owner)
    root = graph.call_function(torch.ops.aten.sqrt.default, (graph.get_attr("scale"),))
    root.meta["val"] = torch.empty(())
    assert math.isnan(number(root))


def test_operands_that_others_use_too():
    def shared(q, k, v, mask):
        a, b = flat(q), flat(k)
        scores = torch.bmm(a, b.transpose(-1, -2)).view(2, 4, 6, 6)
        y = scores.softmax(-1) @ v
        return y.transpose(1, 2).reshape(2, 6, -1), a.sum(-1), b * 2

    def scores_returned(q, k, v, mask):
        scores = torch.baddbmm(mask[:, 0].repeat(4, 1, 1), flat(q), flat(k).transpose(-1, -2))
        return scores.view(2, 4, 6, 6).softmax(-1) @ v, scores

    inputs = attention_inputs(torch.float32)
    assert fired(fuse(shared, *inputs)[0]) == {"attention": 1}
    report, _ = fuse(scores_returned, *inputs)
    assert not fired(report) and "has another user" in reasons(report)


def test_dropout_of_the_weights_stays():
    def dropped(q, k, v, mask):
        torch.manual_seed(5)
        weights = (q @ k.transpose(-1, -2)).softmax(-1)
        return F.dropout(weights, 0.5, training=True) @ v

    q, k, v, mask = attention_inputs(torch.float32)

    gm = make_fx(dropped, tracing_mode="fake")(q, k, v, mask)
    report = GraphReport("test", inference=True)
    run_passes(gm.graph, report, [], always=True, kernels=lambda op: True)
    assert not fired(report)


class LooksLikeAttention(nn.Module):
    """What Inductor takes for attention, though it runs over other dimensions."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(32, 32) for _ in range(3))
        self.dim = dim

    def forward(self, x):
        q, k, v = (layer(x).view(4, 4, 4, 8) for layer in (self.query, self.key, self.value))
        # One permutation instead of two, if the softmax is what attention has.
        k = k.permute(0, 2, 3, 1) if self.dim == -1 else k.transpose(1, 2).transpose(-1, -2)
        return ((q.transpose(1, 2) @ k) * 0.5).softmax(self.dim) @ v.transpose(1, 2)


@pytest.mark.parametrize("dim", [1, 2, -1])
def test_inductor_sees_no_attention_in_other_dimensions(dim: int) -> None:
    torch.manual_seed(0)
    model, x = LooksLikeAttention(dim).eval(), torch.randn(4, 4, 32)
    compiled = torch.compile(model, backend="ipex", options={"ipex.program": False})
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), model(x))

# SPDX-License-Identifier: Apache-2.0
"""Patterns in models under torch.compile(backend="ipex"), and what ipex.explain tells of them."""

from __future__ import annotations

import json
import logging

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import ipex_core
from ipex_core.compile_backend import compile as ipex_compile
from ipex_core.compile_backend import ipex_backend
from ipex_core.compiler import CompiledGraph
from ipex_core.fusion import GraphReport, Origin, remember, reports_of, tensor_refs

pytestmark = pytest.mark.usefixtures("inductor_cache")


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 8)).eval()


ALWAYS = {"ipex.always": True}


class Decoder(nn.Module):
    """One layer of a Llama, written as transformers does."""

    def __init__(self, size=64, heads=4, kv_heads=2):
        super().__init__()
        self.heads, self.kv_heads = heads, kv_heads
        head = size // heads
        self.q, self.o = (nn.Linear(size, size, bias=False) for _ in range(2))
        self.k, self.v = (nn.Linear(size, kv_heads * head, bias=False) for _ in range(2))
        self.gate, self.up = (nn.Linear(size, 96, bias=False) for _ in range(2))
        self.down = nn.Linear(96, size, bias=False)
        self.norms = nn.ParameterList([torch.rand(size) + 0.5 for _ in range(2)])

    def norm(self, x, weight):
        wide = x.to(torch.float32)
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        return weight * wide.to(x.dtype)

    def forward(self, x, cos, sin):
        def rotate(t):
            half = t.shape[-1] // 2
            turned = torch.cat((-t[..., half:], t[..., :half]), dim=-1)
            return t * cos.unsqueeze(1) + turned * sin.unsqueeze(1)

        batch, length, size = x.shape
        y = self.norm(x, self.norms[0])
        q, k, v = (
            p(y).view(batch, length, -1, size // self.heads) for p in (self.q, self.k, self.v)
        )
        q, k, v = rotate(q.transpose(1, 2)), rotate(k.transpose(1, 2)), v.transpose(1, 2)
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.o(a.transpose(1, 2).reshape(batch, length, size))
        y = self.norm(x, self.norms[1])
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


def decoder_inputs(dtype, length, batch=2, size=64, heads=4):
    tables = (torch.randn(1, length, size // heads, dtype=dtype) for _ in range(2))
    return torch.randn(batch, length, size, dtype=dtype), *tables


def close(got, expected):
    limit = 2e-2 if expected.dtype is torch.bfloat16 else 1e-4
    scale = expected.abs().max().item()
    torch.testing.assert_close(got, expected, rtol=limit, atol=limit * max(scale, 1.0))


def fired(report):
    return {p: report.count(p) for p in {f.pattern for f in report.fusions} if report.count(p)}


DECODER = {
    "attention": 1,
    "rotary": 2,
    "rms_norm": 2,
    "linear": 7,
    "gated": 1,
    "post_op": 2,
    "merged": 1,
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_decoder_layer_at_twenty_lengths(kernels, dtype):
    model, compilations = Decoder().eval().to(dtype), []

    def backend(gm, inputs):
        compilations.append(gm)
        return ipex_backend(gm, inputs, options=ALWAYS)

    compiled = torch.compile(model, backend=backend, fullgraph=True)
    with torch.no_grad():
        for length in range(2, 22):
            x = decoder_inputs(dtype, length)
            close(compiled(*x), model(*x))
    assert len(compilations) <= 2
    graphs = ipex_core.explain(compiled).graphs
    assert len(graphs) == len(compilations)
    for report in graphs:
        assert report.frozen
        assert fired(report) == DECODER


def test_explain_lists_what_fired_and_what_did_not(kernels):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two = nn.Linear(64, 64), nn.Linear(64, 64)

        def forward(self, x):
            y = self.one(x)
            return self.two(F.gelu(y)) + x, y

    model = Model().eval()
    compiled = torch.compile(model, backend="ipex", options=ALWAYS)
    assert ipex_core.explain(compiled).graphs == ()
    with torch.inference_mode():
        compiled(torch.randn(8, 64))
    explanation = ipex_core.explain(compiled)
    (report,) = explanation.graphs
    assert fired(report) == {"linear": 2, "post_op": 1}
    (kept,) = (f for f in report.fusions if not f.fired)
    assert kept.pattern == "post_op" and "has another user" in kept.text
    text = str(explanation)
    assert "Model: not optimized, compiled" in text
    assert "inference, weights frozen, 3 fusions" in text and "has another user" in text
    assert json.loads(json.dumps(explanation.to_dict()))["graphs"][0]["frozen"] is True
    assert ipex_core.explain(model).graphs == explanation.graphs


def test_explain_a_function(kernels):
    def function(x, y):
        return F.layer_norm(x + y, (32,))

    compiled = torch.compile(function, backend="ipex", options=ALWAYS)
    with torch.no_grad():
        x = torch.randn(4, 32)
        close(compiled(x, x), function(x, x))
    (report,) = ipex_core.explain(compiled).graphs
    assert fired(report) == {"layer_norm": 1, "add_norm": 1}
    assert "function" in report.name
    with pytest.raises(TypeError, match=r"must be a torch\.nn\.Module, got function"):
        ipex_core.explain(close)


def test_patterns_can_be_turned_off(kernels):
    model, x = mlp().requires_grad_(False), torch.randn(2, 16)
    for options, expected in (
        ({"ipex.disable": True}, {}),
        ({"ipex.disable": ["post_op"], **ALWAYS}, {"linear": 2}),
    ):
        compiled = ipex_compile(torch.fx.symbolic_trace(model), [x], options=options)
        close(compiled(x), model(x))
        assert [fired(r) for r in ipex_core.explain(compiled).graphs] == [expected]


def test_bad_options_of_our_own():
    gm, x = torch.fx.symbolic_trace(mlp()), torch.randn(2, 16)
    for options, message in (
        (
            {"ipex.disable": "rope"},
            r"'ipex.disable' must be a bool or some of attention, .*got 'rope'",
        ),
        ({"ipex.disable": 3}, "'ipex.disable' must be a bool or some of .*got 3"),
        ({"ipex.always": 1}, "'ipex.always' must be a bool, got 1"),
        ({"ipex.disabled": True}, "unknown option 'ipex.disabled', did you mean ipex.disable"),
    ):
        with pytest.raises(ValueError, match=message):
            ipex_compile(gm, [x], options=options)


def test_decisions_are_logged(kernels, caplog):
    gm, x = torch.fx.symbolic_trace(mlp().requires_grad_(False)), torch.randn(2, 16)
    with caplog.at_level(logging.DEBUG, logger="ipex_core.compile_backend"):
        ipex_compile(gm, [x], options=ALWAYS)
    assert any("post_op -> ipex::linear fused: relu" in r.message for r in caplog.records)


def test_gradients_leave_the_patterns_out(kernels):
    model, x = Decoder(), decoder_inputs(torch.float32, 4)
    compiled = torch.compile(model, backend="ipex", options=ALWAYS)
    compiled(*x).sum().backward()
    (report,) = ipex_core.explain(compiled).graphs
    assert not report.inference and not report.fusions
    assert "a gradient is needed" in report.notes[0]
    expected = torch.autograd.grad(model(*x).sum(), list(model.parameters()))
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-3, atol=1e-4)


def test_our_ops_train_in_a_compiled_graph():
    def function(x, weight):
        return torch.ops.ipex.rms_norm(x, weight, 1e-6).sin().sum()

    x, weight = torch.randn(4, 32, requires_grad=True), torch.rand(32, requires_grad=True)
    expected = torch.autograd.grad(function(x, weight), (x, weight))
    torch.compile(function, backend=ipex_backend, fullgraph=True)(x, weight).backward()
    torch.testing.assert_close((x.grad, weight.grad), expected)


def test_autocast_packs_lowered_weights(kernels):
    model, x = mlp(), torch.randn(3, 16)
    compiled = torch.compile(model, backend="ipex", options=ALWAYS)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        close(compiled(x), model(x))
    (report,) = ipex_core.explain(compiled).graphs
    assert fired(report) == {"linear": 2, "post_op": 1}


def test_after_optimize(kernels):
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.down, self.norm = nn.Linear(64, 128), nn.Linear(128, 64), nn.LayerNorm(64)

        def forward(self, x):
            return self.norm(x + self.down(F.silu(self.up(x))))

    model = ipex_core.optimize(Block().eval(), dtype=torch.bfloat16, level="O1")
    compiled = torch.compile(model, backend="ipex", fullgraph=True, options=ALWAYS)
    with torch.no_grad():
        x = torch.randn(5, 64, dtype=torch.bfloat16)
        close(compiled(x), model(x))
    assert len(ipex_core.explain(compiled).graphs) == 1


def test_a_graph_of_a_dead_weight_is_nobodys():
    """An id would not do: the next weight may have it."""
    model, weight = nn.Module(), nn.Parameter(torch.ones(2))
    graph, used = (
        CompiledGraph(torch.neg, GraphReport("old", inference=True)),
        tensor_refs([weight]),
    )
    remember(graph, graph.report, Origin(tensors=used))
    model.weight = weight
    assert reports_of(model) == [graph.report]
    model.weight = nn.Parameter(torch.ones(2))
    assert not reports_of(model)
    del weight
    assert [reference() for reference in used] == [None]
    assert not used & tensor_refs([nn.Parameter(torch.ones(2)) for _ in range(100)])


def test_graphs_below_autograd_track_changes_and_views():
    def function(x, y):
        y.add_(1)
        return torch.ops.ipex.rms_norm(x, None, 1e-6), x[:1], y

    compiled = torch.compile(function, backend=ipex_backend, fullgraph=True)
    x, y = torch.randn(4, 8), torch.zeros(3)
    before = y._version
    normed, view, same = compiled(x, y)
    assert y._version > before and same is y and y.tolist() == [1, 1, 1]
    close(normed, torch.ops.ipex.rms_norm(x, None, 1e-6))
    assert view._base is x and view.data_ptr() == x.data_ptr()
    leaf = torch.ones(1, 8, requires_grad=True)
    view.mul_(leaf)  # autograd knows the view: its base takes part in the graph
    assert x.requires_grad
    x.sum().backward()
    assert leaf.grad is not None
    with torch.no_grad():
        assert not compiled(leaf, y)[0].requires_grad

# SPDX-License-Identifier: Apache-2.0
"""torch.compile(backend="ipex") and ipex.compile."""

from __future__ import annotations

import copy
import json
import logging
import os
import subprocess
import sys
import textwrap

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn import functional as F

import ipex_core
from ipex_core import compile_backend, config
from ipex_core.compile_backend import compile as ipex_compile
from ipex_core.compile_backend import ipex_backend
from ipex_core.errors import FallbackError


@pytest.fixture(autouse=True, scope="module")
def _cache_dir(tmp_path_factory):
    patch = pytest.MonkeyPatch()
    patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path_factory.mktemp("inductor")))
    yield
    patch.undo()


@pytest.fixture(autouse=True)
def _fresh_dynamo():
    torch._dynamo.reset()
    torch.manual_seed(0)
    yield
    torch._dynamo.reset()


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 8)).eval()


@pytest.fixture
def inductor_patches(monkeypatch):
    """Record the config patches of every Inductor compilation, without compiling anything."""
    seen = []

    def record(gm, example_inputs, config_patches=None):
        frozen = not gm.graph.find_nodes(op="placeholder") or all(
            "param" not in n.name for n in gm.graph.find_nodes(op="placeholder")
        )
        patches = {k: v for k, v in (config_patches or {}).items() if k != "joint_custom_pre_pass"}
        seen.append({**patches, "lifted": frozen, "grad": torch.is_grad_enabled()})
        return gm

    monkeypatch.setattr("torch._inductor.compile_fx.compile_fx", record)
    return seen


def test_works_without_importing_ipex(tmp_path):
    code = """
        import sys, torch
        model = torch.nn.Linear(8, 8).eval()
        x = torch.randn(2, 8)
        with torch.no_grad():
            got = torch.compile(model, backend="ipex")(x)
            torch.testing.assert_close(got, model(x))
        assert "ipex_core" in sys.modules and "ipex" not in sys.modules
        assert "ipex" in torch._dynamo.list_backends()
    """
    subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        check=True,
        timeout=120,
        env={**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)},
    )


def test_same_result_frozen_in_every_inference_mode():
    model, x = mlp(), torch.randn(3, 16)
    expected = model(x).detach()
    compiled = torch.compile(model, backend=ipex_backend)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            torch.testing.assert_close(compiled(x), expected)


def test_parameters_become_constants(inductor_patches):
    with torch.no_grad():
        torch.compile(mlp(), backend=ipex_backend)(torch.randn(2, 16))
    assert inductor_patches == [{"freezing": True, "lifted": True, "grad": False}]


def test_no_freezing_when_a_gradient_is_needed(inductor_patches):
    torch.compile(mlp(), backend=ipex_backend)(torch.randn(2, 16))
    assert inductor_patches == [{"lifted": False, "grad": True}]


def test_grad_mode_on_but_nothing_requires_grad(inductor_patches):
    torch.compile(mlp().requires_grad_(False), backend=ipex_backend)(torch.randn(2, 16))
    assert inductor_patches == [{"freezing": True, "lifted": True, "grad": False}]
    assert torch.is_grad_enabled()


def test_enable_grad_inside_a_no_grad_graph(inductor_patches):
    weight = torch.randn(4, 4, requires_grad=True)

    def function(x):
        with torch.enable_grad():
            y = x @ weight
        return y

    with torch.no_grad():
        y = torch.compile(function, backend=ipex_backend)(torch.randn(2, 4))
    assert "freezing" not in inductor_patches[0]
    assert y.requires_grad


def test_two_models_of_one_class_keep_their_own_weights():
    a, b, x = mlp(), mlp(), torch.randn(2, 16)
    compiled_a, compiled_b = (torch.compile(m, backend=ipex_backend) for m in (a, b))
    with torch.no_grad():
        for _ in range(2):
            torch.testing.assert_close(compiled_a(x), a(x))
            torch.testing.assert_close(compiled_b(x), b(x))


def test_layers_compiled_one_by_one_stay_below_the_recompile_limit(inductor_patches):
    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x):
            return self.linear(x).relu()

    layers = nn.Sequential(*(Layer() for _ in range(12))).eval()
    x = torch.randn(2, 8)
    with torch.no_grad():
        expected = layers(x)
        for layer in layers:
            layer.compile(backend=ipex_backend)
        torch.testing.assert_close(layers(x), expected)
    assert sum("freezing" in p and p["lifted"] for p in inductor_patches) >= 4
    assert len(inductor_patches) <= torch._dynamo.config.recompile_limit
    assert not inductor_patches[-1]["lifted"]


@pytest.mark.parametrize("change", ["load_state_dict", "data"])
def test_changed_weights_are_noticed(change, caplog):
    model, other, x = mlp(), mlp(), torch.randn(2, 16)
    compiled = torch.compile(model, backend=ipex_backend)
    with torch.no_grad(), caplog.at_level(logging.WARNING, logger="ipex"):
        compiled(x)
        if change == "data":
            for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
                mine.data = theirs.data.clone()
        else:
            model.load_state_dict(other.state_dict())
        torch.testing.assert_close(compiled(x), other(x))
        torch.testing.assert_close(compiled(x), other(x))
        assert sum("weights changed" in r.message for r in caplog.records) == 1
        torch.compiler.reset()
        torch.testing.assert_close(compiled(x), other(x))
        model[0].weight.mul_(2)
        with config.override(strict=True), pytest.raises(FallbackError, match="weights changed"):
            compiled(x)


def test_buffers_that_the_graph_writes_are_not_frozen():
    class Counter(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("count", torch.zeros(3))

        def forward(self, x):
            self.count.add_(1)
            return x + self.count

    model, x = Counter().eval(), torch.zeros(3)
    compiled = torch.compile(model, backend=ipex_backend)
    with torch.no_grad():
        assert [compiled(x)[0].item() for _ in range(3)] == [1, 2, 3]


@pytest.mark.parametrize("change", ["user", "weight"])
def test_writes_to_buffers_of_the_graph_are_no_changes_of_weights(change, caplog):
    class Cache(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(3, 3)
            self.register_buffer("rows", torch.zeros(4, 3))
            self.register_buffer("length", torch.tensor(0))

        def forward(self, x):
            self.rows.index_copy_(0, self.length[None], self.linear(x))
            self.length.add_(1)
            return self.rows.sum(0)

    model, x = Cache().eval(), torch.randn(1, 3)
    expected = copy.deepcopy(model)
    compiled = torch.compile(model, backend=ipex_backend, fullgraph=True)
    with torch.no_grad(), caplog.at_level(logging.WARNING, logger="ipex"):
        for _ in range(3):
            torch.testing.assert_close(compiled(x), expected(x))
        for each in (model, expected):
            each.length.zero_()
            (each.rows if change == "user" else each.linear.weight).mul_(3)
        torch.testing.assert_close(compiled(x), expected(x))
    warnings = [r for r in caplog.records if "weights changed" in r.message]
    assert len(warnings) == (change == "weight")


def test_decoding_with_a_static_cache(caplog):
    transformers = pytest.importorskip("transformers")
    settings = transformers.LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=32,
    )
    model = transformers.LlamaForCausalLM(settings).eval()

    def decode(step):
        cache = transformers.StaticCache(config=settings, max_cache_len=12)
        prompt = torch.arange(4)[None] + 3
        logits = [model(prompt, past_key_values=cache, cache_position=torch.arange(4)).logits]
        for position in range(4, 9):
            token = logits[-1][:, -1:].argmax(-1)
            place = torch.tensor([position])
            logits.append(step(token, past_key_values=cache, cache_position=place).logits)
        return torch.cat(logits, 1)

    counter = CompileCounterWithBackend("ipex")
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    with torch.no_grad(), caplog.at_level(logging.WARNING, logger="ipex"):
        torch.testing.assert_close(decode(compiled), decode(model))
    assert counter.frame_count == 1
    assert not [r for r in caplog.records if r.name == "ipex"]


def test_twenty_lengths_need_two_compilations():
    model = mlp()
    counter = CompileCounterWithBackend("ipex")
    compiled = torch.compile(model, backend=counter)
    with torch.no_grad():
        for length in range(2, 22):
            x = torch.randn(2, length, 16)
            torch.testing.assert_close(compiled(x), model(x))
    assert counter.frame_count <= 2


def test_training_step_matches_eager():
    model, reference = mlp().train(), mlp().train()
    reference.load_state_dict(model.state_dict())
    x, target = torch.randn(4, 16), torch.randn(4, 8)
    compiled = torch.compile(model, backend=ipex_backend)
    F.mse_loss(compiled(x), target).backward()
    F.mse_loss(reference(x), target).backward()
    for got, expected in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(got.grad, expected.grad)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter -= 0.1 * parameter.grad
    compiled(x).sum().backward()  # weights change between steps: nothing may be frozen here


def test_autocast():
    model, x = mlp(), torch.randn(3, 16)
    compiled = torch.compile(model, backend=ipex_backend)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        got, expected = compiled(x), model(x)
    assert got.dtype is torch.bfloat16
    torch.testing.assert_close(got, expected, rtol=2e-2, atol=2e-2)


def test_optimized_model_compiles_without_a_graph_break():
    model = ipex_core.optimize(mlp(), dtype=torch.bfloat16)
    compiled = torch.compile(model, backend=ipex_backend, fullgraph=True)
    with torch.no_grad():
        for length in (3, 5, 9):
            x = torch.randn(length, 16, dtype=torch.bfloat16)
            torch.testing.assert_close(compiled(x), model(x), rtol=2e-2, atol=2e-2)


def test_ipex_compile_on_a_graph_module():
    model, x = mlp(), torch.randn(3, 16)
    gm = torch.fx.symbolic_trace(model)
    with torch.no_grad():
        torch.testing.assert_close(ipex_compile(gm, [x])(x), model(x))


def test_options_reach_inductor(inductor_patches):
    gm = torch.fx.symbolic_trace(mlp().requires_grad_(False))
    ipex_compile(
        gm, [torch.randn(2, 16)], mode="max-autotune", options={"cpp.simdlen": 8, "freezing": False}
    )
    assert inductor_patches[0]["max_autotune"] is True
    assert inductor_patches[0]["cpp.simdlen"] == 8
    assert inductor_patches[0]["freezing"] is False
    assert not any(name.startswith("triton") for name in inductor_patches[0])


def test_bad_mode_and_options():
    gm, x = torch.fx.symbolic_trace(mlp()), torch.randn(2, 16)
    with pytest.raises(ValueError, match=r"mode must be one of .*got 'turbo'"):
        ipex_compile(gm, [x], mode="turbo")
    with pytest.raises(ValueError, match="unknown option 'freezin', did you mean freezing"):
        ipex_compile(gm, [x], options={"freezin": True})
    with pytest.raises(ValueError, match="'freezing' must be a bool, got 'yes'"):
        ipex_compile(gm, [x], options={"freezing": "yes"})
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match="unknown option 'bogus'"):
        torch.compile(mlp(), backend="ipex", options={"bogus": 1})(x)


def test_compiler_backend():
    assert compile_backend._get_compiler_backend() == "inductor"
    compile_backend._set_compiler_backend("inductor")
    for name in ("torchscript", "tvm"):
        with pytest.raises(ValueError, match=rf"backend must be one of .*got '{name}'"):
            compile_backend._set_compiler_backend(name)
    assert compile_backend._get_compiler_backend() == "inductor"


# -- patterns ---------------------------------------------------------------------------------------------------------


ALWAYS = {"ipex.always": True}


@pytest.fixture
def kernels(monkeypatch):
    """Let patterns fire without a kernel package too: the ops then run their reference."""
    monkeypatch.setattr("ipex_core.nn._leaf.has_kernel", lambda op: True)


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


DECODER = {"attention": 1, "rotary": 2, "rms_norm": 2, "linear": 7, "gated": 1, "post_op": 2}


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

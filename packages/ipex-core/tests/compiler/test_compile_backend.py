# SPDX-License-Identifier: Apache-2.0
"""torch.compile(backend="ipex") and ipex.compile."""

from __future__ import annotations

import copy
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

pytestmark = pytest.mark.usefixtures("inductor_cache")


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
        patches = {k: v for k, v in (config_patches or {}).items() if "_custom_" not in k}
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


INDUCTOR = {"ipex.program": False}


def test_parameters_become_constants(inductor_patches):
    with torch.no_grad():
        torch.compile(mlp(), backend=ipex_backend, options=INDUCTOR)(torch.randn(2, 16))
    assert inductor_patches == [{"freezing": True, "lifted": True, "grad": False}]


def test_no_freezing_when_a_gradient_is_needed(inductor_patches):
    torch.compile(mlp(), backend=ipex_backend)(torch.randn(2, 16))
    assert inductor_patches == [{"lifted": False, "grad": True}]


def test_grad_mode_on_but_nothing_requires_grad(inductor_patches):
    model = mlp().requires_grad_(False)
    torch.compile(model, backend=ipex_backend, options=INDUCTOR)(torch.randn(2, 16))
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
            layer.compile(backend=ipex_backend, options=INDUCTOR)
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
        # transformers 4 asks for the size of the batch, 5 takes it for nothing.
        cache = transformers.StaticCache(config=settings, max_batch_size=1, max_cache_len=12)
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
    for options, text in (
        ({"cpp.threads": "two"}, "'cpp.threads' must be of type int, got 'two'"),
        ({"cpp.simdlen": "256"}, "'cpp.simdlen' must be of type int or None, got '256'"),
        ({"ipex.disable": [["linear"]]}, "'ipex.disable' must be a bool or some of"),
        ([("freezing", True)], "options must be a mapping of names to values, got"),
        ({3: True}, "names of options must be strings, got 3"),
    ):
        with pytest.raises(ValueError, match=text):
            ipex_compile(gm, [x], options=options)
    with pytest.raises(ValueError, match="mode must be one of"):
        ipex_compile(gm, [x], mode=["default"])
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match="unknown option 'bogus'"):
        torch.compile(mlp(), backend="ipex", options={"bogus": 1})(x)


def test_compiler_backend():
    assert compile_backend._get_compiler_backend() == "inductor"
    with pytest.warns(
        UserWarning, match='"torchscript" is not offered, "inductor" is used'
    ) as seen:
        compile_backend._set_compiler_backend("torchscript")
    assert seen[0].filename == __file__
    assert compile_backend._get_compiler_backend() == "inductor"
    compile_backend._set_compiler_backend("inductor")
    with pytest.raises(ValueError, match=r"backend must be one of .*got 'tvm'"):
        compile_backend._set_compiler_backend("tvm")
    assert compile_backend._get_compiler_backend() == "inductor"

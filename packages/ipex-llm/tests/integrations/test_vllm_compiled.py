# SPDX-License-Identifier: Apache-2.0
"""What vLLM compiles with the plug-in: the choice of the backend, and layers like vLLM's as programs."""

from __future__ import annotations

import enum
import os
import types

import pytest
import torch
import vllm_stand_in as stand_in
from torch import nn

from ipex_core import explain
from ipex_core.precompiled.whole import RUNNERS
from ipex_llm.integrations.vllm import compiled

pytestmark = pytest.mark.usefixtures("fresh_plugin", "no_fakes_left")


class Mode(enum.IntEnum):
    """As in vLLM."""

    NONE = 0
    DYNAMO_TRACE_ONCE = 2
    VLLM_COMPILE = 3


@pytest.mark.parametrize(
    ("mode", "files", "wanted"),
    [
        (Mode.VLLM_COMPILE, None, compiled.BACKEND),
        (Mode.VLLM_COMPILE, "0", compiled.BACKEND),
        (Mode.VLLM_COMPILE, "1", "inductor"),  # who asks for files of Inductor keeps it
        (Mode.DYNAMO_TRACE_ONCE, None, "inductor"),  # who names a mode keeps what it has
        (Mode.NONE, None, ""),
    ],
)
def test_the_backend_is_ours_where_vllm_compiles_by_default(
    modules, monkeypatch, mode, files, wanted
):
    platform = stand_in.use_our_platform(modules)

    def update(config):
        compilation = config.compilation_config
        if compilation.mode == Mode.VLLM_COMPILE:
            compilation.mode = Mode.DYNAMO_TRACE_ONCE
        if compilation.mode:
            compilation.backend = "inductor"

    monkeypatch.setattr(type(platform).__mro__[1], "check_and_update_config", update)
    monkeypatch.setenv("VLLM_USE_AOT_COMPILE", files or "0")
    if files is None:
        monkeypatch.delenv("VLLM_USE_AOT_COMPILE")
    config = stand_in.vllm_config(compilation_config=stand_in.Config(mode=mode, backend=""))
    platform.check_and_update_config(config)
    assert config.compilation_config.backend == wanted
    assert os.environ.get("VLLM_USE_AOT_COMPILE") == ("0" if wanted == compiled.BACKEND else files)


def test_another_backend_of_the_user_stays():
    config = stand_in.Config(mode=2, backend="eager")
    compiled.choose(config)
    assert config.backend == "eager"


@pytest.fixture
def attend():
    """An op like vLLM's: it takes the name of a layer and writes the result."""
    library = torch.library.Library("ipex_test_vllm", "FRAGMENT")
    library.define("attend(Tensor q, Tensor k, Tensor v, Tensor(a!) output, str name) -> ()")

    def run(q, k, v, output, name):
        assert name.startswith("layer") and q.shape[1:] == (4, 8) and k.shape[1:] == (2, 8)
        weights = torch.einsum("qhd,khd->hqk", q, k.repeat_interleave(2, 1)).softmax(-1)
        output.copy_(torch.einsum("hqk,khd->qhd", weights, v.repeat_interleave(2, 1)))

    library.impl("attend", run, "CPU")
    library.impl("attend", lambda *args: None, "Meta")
    yield torch.ops.ipex_test_vllm.attend
    library._destroy()


class Layer(nn.Module):
    """A decoder layer as vLLM writes it, with a residual that is passed on."""

    def __init__(self, attend, name, total=lambda x: x):
        super().__init__()
        self.attend, self.name, self.total = attend, name, total
        self.qkv, self.out = nn.Linear(32, 64, bias=False), nn.Linear(32, 32, bias=False)
        self.up, self.down = nn.Linear(32, 96, bias=False), nn.Linear(48, 32, bias=False)
        self.norms = nn.ParameterList(torch.rand(32) for _ in range(2))
        self.register_buffer("table", torch.randn(64, 8))

    def norm(self, x, residual, weight):
        x = x if residual is None else x + residual
        wide = x.float()
        normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        return (normed * weight).to(x.dtype), x

    def forward(self, positions, x, residual):
        x, residual = self.norm(x, residual, self.norms[0])
        q, k, v = self.qkv(x).split([32, 16, 16], -1)
        cos, sin = (t.unsqueeze(-2) for t in self.table.index_select(0, positions).chunk(2, -1))
        q, k = (
            torch.cat((a * cos - b * sin, b * cos + a * sin), -1)
            for a, b in (y.view(y.shape[0], -1, 8).chunk(2, -1) for y in (q, k))
        )
        output = torch.empty(x.shape[0], 32, dtype=x.dtype)
        self.attend(q, k, v.view(-1, 2, 8), output.view(-1, 4, 8), self.name)
        x, residual = self.norm(self.total(self.out(output)), residual, self.norms[1])
        gate, up = self.up(x).chunk(2, -1)
        return self.total(self.down(nn.functional.silu(gate) * up)), residual


def test_layers_like_vllms_are_programs(attend):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(Layer(attend, f"layer{i}") for i in range(3))

        def forward(self, positions, x):
            residual = None
            for layer in self.layers:
                x, residual = layer(positions, x, residual)
            return x + residual

    torch.manual_seed(0)
    model = Model().eval().requires_grad_(False)
    fast = torch.compile(model, backend=compiled.backend, fullgraph=True, dynamic=False)
    for rows in (7, 2, 16, 5):
        positions, x = torch.randint(0, 64, (rows,)), torch.randn(rows, 32)
        torch._dynamo.mark_dynamic(positions, 0)
        torch._dynamo.mark_dynamic(x, 0)
        torch.testing.assert_close(fast(positions, x), model(positions, x), rtol=1e-4, atol=1e-5)
    (graph,) = explain(fast).graphs
    (note,) = [one for one in graph.notes if "a program of" in one]
    assert "3x ipex_test_vllm::attend" in note
    assert graph.count("rotary") == 6 and graph.count("rms_norm") == 6, str(explain(fast))


# --- a step as one program --------------------------------------------------------------------------------------------

BLOCK, BLOCKS = 4, 8


class Steps:
    """A model like vLLM's with an op of vLLM's name, and the context that vLLM sets for each step."""

    def __init__(self, modules, monkeypatch, total):
        self.modules, self.calls = modules, 0
        self.attention = stand_in.ours("attention")
        self.context = types.SimpleNamespace(attn_metadata=None, no_compile_layers={})
        context = modules["vllm.forward_context"]
        monkeypatch.setattr(context, "get_forward_context", lambda: self.context)
        monkeypatch.setattr(context, "is_forward_context_available", lambda: True)
        self.transfers(monkeypatch, False)
        torch.manual_seed(0)
        op = torch.ops.vllm.unified_attention_with_output
        layers = nn.ModuleList(Layer(op, f"layer{i}", total) for i in range(3))
        for layer in layers:
            self.context.no_compile_layers[layer.name] = self.layer()

        class Model(nn.Module):
            def __init__(self):
                super().__init__()
                self.layers = layers

            def forward(self, positions, x):
                residual = None
                for layer in self.layers:
                    x, residual = layer(positions, x, residual)
                return x + residual

        # In 16 bit no linear layer is left to MKL.
        self.model = Model().eval().requires_grad_(False).bfloat16()
        self.compiled = torch.compile(self.model, backend=compiled.backend, fullgraph=True)

    def transfers(self, monkeypatch, there):
        module = self.modules["vllm.distributed.kv_transfer"]
        monkeypatch.setattr(module, "has_kv_transfer_group", lambda: there)
        monkeypatch.setattr(stand_in.ours("whole_step"), "has_kv_transfer_group", lambda: there)

    def layer(self, **options):
        given = {"alibi_slopes": None, "sliding_window": None, "kv_cache_dtype": "auto", **options}
        impl = self.attention.IpexAttentionImpl(4, 8, 8**-0.5, 2, **given)
        cache = torch.zeros(BLOCKS, 2, BLOCK, 16, dtype=torch.bfloat16)
        scales = {"_k_scale_float": 1.0, "_v_scale_float": 1.0}
        return types.SimpleNamespace(impl=impl, kv_cache=cache, dtype=torch.bfloat16, **scales)

    def run_op(self, query, key, value, output, name):
        self.calls += 1
        layer, known = self.context.no_compile_layers[name], self.context.attn_metadata
        step = None if known is None else known[name]
        layer.impl.forward(layer, query, key, value, layer.kv_cache, step, output)

    def metadata(self, queries, keys, causal=True):
        """Return the metadata of two sequences, whose blocks do not change."""
        table = torch.tensor([[5, 1, 2, 0], [3, 7, 4, 6]], dtype=torch.int32)
        slots = [
            int(row[i // BLOCK]) * BLOCK + i % BLOCK
            for row, new, all_ in zip(table, queries, keys, strict=True)
            for i in range(all_ - new, all_)
        ]
        starts, ends = (torch.tensor([0, *n]).cumsum(0).int() for n in (queries, keys))
        return self.attention.IpexMetadata(
            *(sum(queries), max(queries), max(keys), starts, ends),
            *(torch.tensor(keys, dtype=torch.int32), table, torch.tensor(slots), causal),
        )

    def step(self, queries, keys, causal=True, **more):
        """Run a step; return the result and how often the op was called."""
        step = self.metadata(queries, keys, causal)
        for name, value in more.items():
            setattr(step, name, value)
        self.context.attn_metadata = dict.fromkeys(self.context.no_compile_layers, step)
        return self.run(sum(queries))

    def run(self, rows):
        generator = torch.Generator().manual_seed(rows)
        positions = torch.arange(rows)
        x = torch.randn(rows, 32, generator=generator).bfloat16()
        torch._dynamo.mark_dynamic(positions, 0)
        torch._dynamo.mark_dynamic(x, 0)
        before = self.calls
        return self.compiled(positions, x), self.calls - before


@pytest.fixture
def steps(request, modules, monkeypatch):
    library = torch.library.Library("vllm", "FRAGMENT")
    library.define("all_reduce(Tensor tensor, str group_name) -> Tensor")
    library.impl("all_reduce", lambda x, name: torch.empty_like(x), "Meta")
    library.impl("all_reduce", lambda x, name: x + x, "CPU")
    arguments = "Tensor query, Tensor key, Tensor value, Tensor(a!) output, str layer_name"
    library.define(f"unified_attention_with_output({arguments}) -> ()")
    library.impl("unified_attention_with_output", lambda *args: None, "Meta")
    made = Steps(modules, monkeypatch, getattr(request, "param", lambda x: x))
    library.impl("unified_attention_with_output", made.run_op, "CPU")
    whole = stand_in.ours("whole_step")
    whole.register()
    yield made
    library._destroy()
    RUNNERS.pop(whole.OP)


SEQUENCES = (((3, 5), (3, 5)), ((1, 1), (4, 6)), ((1, 1), (5, 7)), ((4, 1), (9, 8)))


def test_a_step_is_one_program(steps, monkeypatch):
    assert steps.run(16)[1] == 3  # no metadata: vLLM measures memory
    found = [steps.step(*sizes) for sizes in SEQUENCES]
    assert [calls for _, calls in found] == [0] * 4
    caches = [layer.kv_cache.clone() for layer in steps.context.no_compile_layers.values()]
    for layer in steps.context.no_compile_layers.values():
        layer.kv_cache = torch.zeros_like(layer.kv_cache)  # another cache: another program
    again = [steps.step(*sizes) for sizes in SEQUENCES]
    assert all(torch.equal(a[0], b[0]) for a, b in zip(found, again, strict=True))
    for layer in steps.context.no_compile_layers.values():
        layer.kv_cache.zero_()
    monkeypatch.setattr(stand_in.ours("whole_step").WholeStep, "__call__", lambda *args: None)
    for sizes, (result, _) in zip(SEQUENCES, found, strict=True):
        wanted, calls = steps.step(*sizes)
        assert calls == 3
        torch.testing.assert_close(result, wanted, rtol=0, atol=0)
    for layer, cache in zip(steps.context.no_compile_layers.values(), caches, strict=True):
        assert torch.equal(layer.kv_cache, cache)


def summed(x):
    return torch.ops.vllm.all_reduce(x, "tp:0")


@pytest.mark.parametrize("steps", [summed], indirect=True)
@pytest.mark.parametrize("name", ["tp:0", "ep:0"])
def test_sums_over_ranks_are_instructions(steps, name, monkeypatch):
    class Twice:
        """Two ranks that have the same."""

        def of(group):
            assert group == "the group"
            return Twice

        def emit_all_reduce(builder, x):
            builder.call("copy_", x, builder.call("add", x, x))
            return x

    whole = stand_in.ours("whole_step")
    monkeypatch.setattr(whole, "TensorParallel", Twice)
    group = types.SimpleNamespace(unique_name=name, device_group="the group")
    monkeypatch.setattr(whole.parallel_state, "get_tp_group", lambda: group)
    steps.run(16)
    found = [steps.step(*sizes) for sizes in SEQUENCES]
    assert {calls for _, calls in found} == {0 if name == "tp:0" else 3}
    for layer in steps.context.no_compile_layers.values():
        layer.kv_cache.zero_()
    monkeypatch.setattr(whole.WholeStep, "__call__", lambda *args: None)
    for sizes, (result, _) in zip(SEQUENCES, found, strict=True):
        assert torch.equal(result, steps.step(*sizes)[0])


def test_layers_may_have_metadata_of_their_own(steps):
    steps.run(16)
    wanted, _ = steps.step((3, 5), (3, 5))
    first, *_, last = steps.context.no_compile_layers
    for layer in steps.context.no_compile_layers.values():
        layer.kv_cache.zero_()
    steps.context.attn_metadata[last] = steps.metadata((3, 5), (3, 5))
    other = torch.tensor([[0, 2, 1, 5], [6, 4, 7, 3]], dtype=torch.int32)
    steps.context.attn_metadata[last].block_table = other
    steps.context.attn_metadata[last].slot_mapping = torch.tensor(
        [0, 1, 2, *range(24, 28), 16], dtype=torch.int64
    )
    result, calls = steps.run(8)
    assert calls == 0 and torch.equal(result, wanted)
    used = [steps.context.no_compile_layers[name].kv_cache[0].any() for name in (first, last)]
    assert [bool(one) for one in used] == [False, True]


def test_other_steps_call_the_op(steps, monkeypatch):
    steps.run(16)
    assert steps.step((3, 5), (3, 5))[1] == 0
    assert steps.step((3, 5), (3, 5), causal=False)[1] == 3
    padded = torch.cat([steps.metadata((3, 5), (3, 5)).slot_mapping, torch.tensor([-1, -1])])
    assert steps.step((3, 5), (3, 5), slot_mapping=padded)[1] == 3
    steps.transfers(monkeypatch, True)
    assert steps.step((3, 5), (3, 5))[1] == 3
    steps.transfers(monkeypatch, False)
    assert steps.step((3, 5), (3, 5))[1] == 0


@pytest.mark.parametrize(
    "options", [{"attn_type": "encoder_only"}, {"kv_sharing_target_layer_name": "layer0"}]
)
def test_other_attention_calls_the_op(steps, options):
    steps.run(16)
    steps.context.no_compile_layers["layer2"] = steps.layer(**options)
    for _ in range(2):
        assert steps.step((3, 5), (3, 5))[1] == 3

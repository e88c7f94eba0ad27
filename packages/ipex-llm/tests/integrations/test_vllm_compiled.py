# SPDX-License-Identifier: Apache-2.0
"""What vLLM compiles with the plug-in: the choice of the backend, and layers like vLLM's as programs."""

from __future__ import annotations

import enum
import os

import pytest
import torch
import vllm_stand_in as stand_in
from torch import nn

from ipex_core import explain
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

    def __init__(self, attend, name):
        super().__init__()
        self.attend, self.name = attend, name
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
        x, residual = self.norm(self.out(output), residual, self.norms[1])
        gate, up = self.up(x).chunk(2, -1)
        return self.down(nn.functional.silu(gate) * up), residual


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

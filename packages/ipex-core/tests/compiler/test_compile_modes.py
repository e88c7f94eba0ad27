# SPDX-License-Identifier: Apache-2.0
"""torch.compile(backend="ipex") behind ipex.optimize in each of its modes, in each context, and under DDP.

One graph each time (``fullgraph``), the results of the optimized model without compiling, and a report that names what
was fused. The graphs are interpreted; the tests at the end generate code.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.exc import TensorifyScalarRestartAnalysis
from torch._inductor.utils import run_and_get_code
from torch.nn import functional as F

import ipex_core
from ipex_core import optimize
from ipex_core.compile_backend import ipex_backend
from ipex_core.compiler import read_options
from ipex_core.testing import run_ranks

Tensor = torch.Tensor
ALWAYS = {"ipex.always": True}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(64, 96), nn.Linear(96, 64), nn.LayerNorm(64)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x + self.down(F.silu(self.up(x))))  # type: ignore[no-any-return]


class Attention(nn.Module):
    """Has a function for which optimize writes another forward."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x).view(2, 9, 4, 16).transpose(1, 2)
        return F.scaled_dot_product_attention(y, y, y)


class Images(nn.Module):
    """Convolutions with what may follow them."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16)
        self.body, self.deep = nn.Conv2d(16, 16, 3, padding=1), nn.Conv2d(16, 16, 3, groups=16)
        self.head = nn.Linear(16, 64)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm(self.stem(x)))
        y = F.relu(y + self.body(y))
        return self.head(F.silu(self.deep(y)).mean((2, 3)))  # type: ignore[no-any-return]


class Bags(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.EmbeddingBag(20, 16, mode=m) for m in ("sum", "mean"))
        self.head = nn.Linear(32, 64)

    def forward(self, ids: Tensor, offsets: Tensor) -> Tensor:
        bags = [table(ids, offsets) for table in self.tables]
        return F.relu(self.head(torch.cat(bags, 1)))


class Sequence(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(16, 32, batch_first=True), nn.Linear(32, 64)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.head(self.lstm(x)[0]))


def bert() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        hidden_size=64,
        num_hidden_layers=1,
        num_attention_heads=4,
        intermediate_size=96,
        vocab_size=50,
        max_position_embeddings=32,
    )
    return transformers.BertModel(config, add_pooling_layer=False)  # type: ignore[no-any-return]


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[torch.dtype], tuple[Tensor, ...]]]] = {
    "block": (Block, lambda dtype: (torch.randn(2, 9, 64, dtype=dtype),)),
    "images": (Images, lambda dtype: (torch.randn(2, 3, 12, 12, dtype=dtype),)),
    "bags": (Bags, lambda _: (torch.randint(20, (12,)), torch.tensor([0, 4, 4]))),
    "lstm": (Sequence, lambda dtype: (torch.randn(2, 5, 16, dtype=dtype),)),
    "bert": (bert, lambda _: (torch.randint(3, 50, (2, 12)),)),
}

MODES: dict[str, dict[str, Any]] = {
    "float32": {},
    "bfloat16": {"dtype": torch.bfloat16},
    "float16": {"dtype": torch.float16},
    "O0": {"level": "O0"},
    "O0-bfloat16": {"level": "O0", "dtype": torch.bfloat16},
    "unpacked": {"weights_prepack": False},
    "graph-mode": {"graph_mode": True},
}

BERT = [("bert", mode) for mode in ("float32", "bfloat16", "O0", "graph-mode")]


def close(got: Any, expected: Any, rough: bool) -> None:
    got, expected = (getattr(y, "last_hidden_state", y) for y in (got, expected))
    assert got.dtype == expected.dtype and got.stride() == expected.stride()
    limit = 3e-2 if rough or expected.dtype is not torch.float32 else 1e-4
    scale = max(float(expected.detach().abs().max()), 1.0)
    torch.testing.assert_close(got, expected, rtol=limit, atol=limit * scale)


def check(model: nn.Module, x: tuple[Tensor, ...], rough: bool = False) -> ipex_core.Explanation:
    compiled = torch.compile(model, backend="ipex", fullgraph=True, options=ALWAYS)
    expected = model(*x)
    for _ in range(2):
        close(compiled(*x), expected, rough)
    return ipex_core.explain(compiled)


def fused(explanation: Any) -> set[str]:
    return {f.pattern for graph in explanation.graphs for f in graph.fusions if f.fired}


@pytest.mark.filterwarnings("ignore:.*float16")
@pytest.mark.parametrize(
    ("name", "mode"), [(n, m) for n in MODELS for m in MODES if n != "bert"] + BERT
)
def test_modes_of_optimize(name: str, mode: str, no_code_generation: None) -> None:
    make, inputs = MODELS[name]
    rounds = name == "lstm" and MODES[mode].get("dtype") == torch.bfloat16
    if rounds and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        pytest.skip("oneDNN has no bfloat16 on this CPU")
    model = make().eval()
    fast = optimize(model, **MODES[mode])
    x = inputs(MODES[mode].get("dtype", torch.float32))
    rnn = torch._dynamo.config.patch(allow_rnn=name == "lstm")
    with rnn, torch.no_grad():
        found = check(fast, x)
    assert found.graphs and all(graph.frozen for graph in found.graphs)
    # What optimize has not packed or fused is left to the passes.
    if mode == "O0":
        assert "linear" in fused(found)
        assert name != "bert" or {"attention", "post_op"} <= fused(found)


@pytest.mark.parametrize("optimized", [False, True])
@pytest.mark.parametrize(
    "context", ["inference_mode", "autocast", "nested", "grad", "channels_last"]
)
def test_contexts(context: str, optimized: bool, no_code_generation: None) -> None:
    names = ("images",) if context == "channels_last" else ("block", "images")
    for name in names:
        torch._dynamo.reset()
        make, inputs = MODELS[name]
        model, x = make().eval(), inputs(torch.float32)
        if optimized:
            model = optimize(model)
        if context == "channels_last":
            x = tuple(each.to(memory_format=torch.channels_last) for each in x)
        with contextlib.ExitStack() as stack:
            if context == "inference_mode":
                stack.enter_context(torch.inference_mode())
            elif context != "grad":
                stack.enter_context(torch.no_grad())
            if context in ("autocast", "nested"):
                stack.enter_context(torch.autocast("cpu", torch.bfloat16))
            if context == "nested":
                stack.enter_context(torch.autocast("cpu", enabled=False))
            (graph,) = check(model, x, rough=context == "autocast").graphs
        assert graph.inference == graph.frozen == (context != "grad")
        assert context == "grad" or optimized or graph.count("linear")


def test_optimized_models_do_not_share_the_recompile_limit(no_code_generation: None) -> None:
    """Forwards of ours once had one code object for all, so that the ninth model of a process ran uncompiled."""
    x = torch.randn(2, 9, 64)
    with torch._dynamo.config.patch(recompile_limit=3), torch.no_grad():
        for graph_mode in (False, False, False, True):
            fast = optimize(Attention().eval(), graph_mode=graph_mode)
            assert "forward" in vars(fast)
            if graph_mode:
                close(fast(x), fast._call_impl(x), False)
                graphs = ipex_core.explain(fast).graphs
            else:
                graphs = check(fast, (x,)).graphs
            assert [graph.frozen for graph in graphs] == [True]


# ---------------------------------------------------------------------------------------------------- generated code


def test_optimized_images(kernels: None) -> None:
    """Convolutions that optimize has packed, in channels-last and plain images."""
    for options in ({}, {"weights_prepack": False}):
        model, (x,) = optimize(Images().eval(), **options), MODELS["images"][1](torch.float32)
        with torch.inference_mode():
            check(model, (x,))
            found = check(model, (x.to(memory_format=torch.channels_last),))
        convolutions = [f for g in found.graphs for f in g.fusions if f.pattern == "convolution"]
        texts = {f.text for f in convolutions if f.fired}
        assert texts == {"relu", "add + relu", "silu"}, convolutions


def test_first_call_of_all(
    no_code_generation: None, kernels: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kernel packages are found before Dynamo traces what asks for them."""
    monkeypatch.setattr("ipex_core.kernels.policy._native_ops", None)
    model, (x,) = optimize(Block().eval(), weights_prepack=False), MODELS["block"][1](torch.float32)
    with torch.no_grad():
        check(model, (x,))


#: torch.compile takes a mode or options of a backend that it knows by name, not both.
LEAN = functools.partial(ipex_backend, mode="reduce-overhead", options=ALWAYS)
lean_only = pytest.mark.skipif(torch.__version__ < "2.13", reason="calls stay in Python")


@lean_only
def test_cpp_wrapper(kernels: None) -> None:
    """The calls between kernels are in C++, too, where the mode asks for little cost per call."""
    model, (x,) = optimize(Block().eval(), weights_prepack=False), MODELS["block"][1](torch.float32)
    compiled = torch.compile(model, backend=LEAN, fullgraph=True)
    with torch.no_grad():
        got, sources = run_and_get_code(compiled, x)
        close(got, model(x), False)
    assert "AOTInductorModel" in sources[0] or "aoti_torch" in sources[0]
    found = ipex_core.explain(compiled)
    assert {"linear", "post_op"} <= fused(found)
    assert found.graphs[0].notes == ["calls between kernels are in C++"]


@lean_only
def test_cpp_wrapper_that_fails(kernels: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The graph is compiled again, with the calls in Python, and explain tells why."""
    from torch._inductor.codecache import CppWrapperCodeCache

    def fail(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("no compiler today")

    monkeypatch.setattr(CppWrapperCodeCache, "load_async", fail)
    model, (x,) = Block().eval(), MODELS["block"][1](torch.float32)
    compiled = torch.compile(model, backend=LEAN, fullgraph=True)
    with torch.no_grad():
        close(compiled(x), model(x), False)
    (graph,) = ipex_core.explain(compiled).graphs
    assert "no compiler today" in graph.notes[0] and "in Python" in graph.notes[0]
    assert {"linear", "post_op"} <= {f.pattern for f in graph.fusions if f.fired}


def test_modes_without_cpp_wrapper() -> None:
    assert read_options("reduce-overhead", None).lean and read_options("max-autotune", None).lean
    for mode in (None, "default", "max-autotune-no-cudagraphs"):
        assert not read_options(mode, None).lean


class Perceptron(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.relu(self.up(x)))  # type: ignore[no-any-return]


class Recurrent(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        layer = getattr(nn, kind)
        self.embed, self.first = nn.Linear(6, 8), layer(8, 8, 2, dropout=0.5, bidirectional=True)
        self.second, self.head = layer(16, 8, batch_first=True), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.first(self.embed(x))[0])
        return self.head(self.second(y)[1][0][-1])  # type: ignore[no-any-return]


# Dynamo looks at the gradients of what comes out of the graph before.
@pytest.mark.filterwarnings("ignore:The .grad attribute")
@pytest.mark.parametrize(
    ("kind", "dtype", "allow"),
    [
        ("LSTM", torch.float32, True),
        ("LSTM", torch.bfloat16, True),
        ("GRU", torch.float32, True),
        ("GRU", torch.bfloat16, False),
    ],
)
def test_recurrent_training(
    kind: str, dtype: torch.dtype, allow: bool, no_code_generation: None
) -> None:
    """Compiled steps give the losses of eager ones, dropout included, whether Dynamo takes the layer in or not."""
    losses = []
    for compiled in (False, True):
        torch.manual_seed(0)
        net = Recurrent(kind).train()
        sgd = torch.optim.SGD(net.parameters(), lr=0.1)
        net, sgd = optimize(net, optimizer=sgd, dtype=dtype)
        run = torch.compile(net, backend="ipex", fullgraph=allow) if compiled else net
        for length in (5, 5):
            x = torch.randn(length, 4, 6, generator=torch.Generator().manual_seed(length))
            sgd.zero_grad()
            with (
                torch._dynamo.config.patch(allow_rnn=allow),
                torch.autocast("cpu", torch.bfloat16, enabled=dtype != torch.float32),
            ):
                loss = (run(x).float() - 1).square().mean()
            loss.backward()
            sgd.step()
            losses.append(loss.item())
    limit = 1e-5 if dtype is torch.float32 else 2e-2
    torch.testing.assert_close(losses[2:], losses[:2], rtol=limit, atol=limit)
    notes = [note for graph in ipex_core.explain(run).graphs for note in graph.notes]
    assert any("3 parts" in note for note in notes) == allow


def compiled_training(rank: int, ranks: int) -> str:
    """Each rank has a part of the batch; the result is that of one process with the whole batch, not compiled."""
    both = []
    for _ in range(2):
        torch.manual_seed(0)
        net = Perceptron().train()
        sgd = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
        both.append(optimize(net, optimizer=sgd, dtype=torch.bfloat16))
    (model, optimizer), (whole, other) = both
    wrapped = torch.compile(nn.parallel.DistributedDataParallel(model), backend=ipex_backend)
    for step in range(3):
        x = torch.randn(4 * ranks, 8, generator=torch.Generator().manual_seed(step))
        for one, owner, part in ((wrapped, optimizer, x.chunk(ranks)[rank]), (whole, other, x)):
            owner.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):
                loss = (one(part).float() - 1).square().mean()
            loss.backward()
            owner.step()
    worst = max(
        float((a - b).abs().max())
        for a, b in zip(model.state_dict().values(), whole.state_dict().values(), strict=True)
    )
    graphs = ipex_core.explain(wrapped).graphs
    return "ok" if worst < 2e-2 and len(graphs) == 1 else f"{worst}, {len(graphs)} graphs"


def test_training_under_ddp() -> None:
    assert run_ranks(compiled_training, 2, timeout=120.0) == ["ok"] * 2


@lean_only
def test_cpp_wrapper_is_no_reason_to_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dynamo's wish to begin anew is no failure of the calls in C++."""
    tried: list[bool] = []

    def inductor(gm: Any, inputs: Any, patches: dict[str, Any]) -> Any:
        tried.append("cpp_wrapper" in patches)
        if len(tried) == 1:
            raise TensorifyScalarRestartAnalysis(restart_reason="a number becomes a constant")
        return gm.forward

    monkeypatch.setattr("ipex_core.compile_backend._inductor", inductor)
    compiled = torch.compile(torch.sin, backend=LEAN, dynamic=True)
    with torch.no_grad():
        compiled(torch.ones(3))
    assert tried == [True, True]
    assert ipex_core.explain(compiled).graphs[0].notes == ["calls between kernels are in C++"]

# SPDX-License-Identifier: Apache-2.0
"""``torch.compile(backend="ipex", options={"ipex.program": True})``: graphs of Dynamo as programs."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from ipex_core import explain
from ipex_core.compile_backend import compile, ipex_backend
from ipex_core.compiler import read_options

OPTIONS = {"ipex.program": True}


@pytest.fixture(autouse=True)
def fresh() -> Any:
    torch.manual_seed(0)
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def compiled(model: Any, **kwargs: Any) -> Any:
    return torch.compile(model, backend=ipex_backend, options=OPTIONS, **kwargs)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16)
        self.layer = nn.Linear(16, 8)
        self.scale = 2.0

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = functional.relu(self.norm(self.conv(x)))
        return y, functional.gelu(self.layer(y.mean((2, 3)))) * self.scale


def close(got: Any, want: Any) -> None:
    for one, other in zip(got, want, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
        assert one.stride() == other.stride()


def test_graphs_are_programs() -> None:
    model = Net().eval()
    fast = compiled(model)
    x = torch.randn(2, 3, 9, 8)
    with torch.no_grad():
        close(fast(x), model(x))
    (graph,) = explain(fast).graphs
    assert graph.frozen
    assert [note for note in graph.notes if "a program of" in note and "torch: none" in note]
    assert graph.count("linear") == 1


def test_weights_that_are_computed_are_packed() -> None:
    model = nn.utils.parametrizations.weight_norm(nn.Linear(16, 8)).eval()
    fast, x = compiled(model), torch.randn(3, 16)
    with torch.no_grad():
        close([fast(x)], [model(x)])
    (graph,) = explain(fast).graphs
    assert graph.count("linear") == 1


def test_sizes_may_vary() -> None:
    model = Net().eval()
    fast = compiled(model)
    with torch.no_grad():
        for n, height in ((2, 9), (3, 9), (5, 12), (1, 9), (4, 20)):
            x = torch.randn(n, 3, height, 8)
            close(fast(x), model(x))
    assert len(explain(fast).graphs) <= 4


@pytest.mark.parametrize(
    ("asked", "called"),
    [
        ({"scale_factor": 2, "mode": "bilinear"}, "none"),
        ({"size": (13, 12), "mode": "bilinear", "align_corners": True}, "none"),
        ({"scale_factor": 1.5}, "none"),
        ({"scale_factor": 2, "mode": "bicubic"}, "1x aten::upsample_bicubic2d.default"),
        ({"pad": (1, 2, 2, 1), "mode": "reflect"}, "1x aten::reflection_pad2d.default"),
        ({"pad": (1, 2, 2, 1), "mode": "replicate"}, "1x aten::replication_pad2d.default"),
        ({"weight": torch.rand(16), "bias": torch.rand(16), "eps": 0.1}, "none"),
        ({"eps": 0.1}, "none"),
    ],
)
def test_ops_that_stay_whole(asked: dict[str, Any], called: str) -> None:
    conv = nn.Conv2d(3, 16, 3)
    other: Any = functional.pad if "pad" in asked else functional.interpolate
    op = functional.instance_norm if "eps" in asked else other

    def function(x: Tensor) -> Tensor:
        return torch.relu(op(conv(x), **asked))

    fast = torch.compile(function, backend=ipex_backend)
    with torch.no_grad():
        for n, height, width in ((2, 9, 8), (3, 10, 12)):
            x = torch.randn(n, 3, height, width)
            close([fast(x)], [function(x).contiguous()])
    for graph in explain(fast).graphs:
        assert [note for note in graph.notes if note.endswith(f"called through torch: {called}")]


def test_guards_of_dynamo_hold() -> None:
    model = Net().eval()
    fast = compiled(model)
    x = torch.randn(2, 3, 9, 8)
    with torch.no_grad():
        first = fast(x)[1]
        model.scale = 4.0
        torch.testing.assert_close(fast(x)[1], 2 * first)


def test_weights_that_change_are_seen(caplog: pytest.LogCaptureFixture) -> None:
    model = Net().eval()
    fast = compiled(model)
    x = torch.randn(2, 3, 9, 8)
    with torch.no_grad():
        fast(x)
        model.layer.weight.mul_(2)
        with caplog.at_level(logging.WARNING, "ipex"):
            close(fast(x), model(x))
        assert "the weights changed after compilation" in caplog.text
        model.conv.weight = nn.Parameter(torch.randn(16, 3, 3, 3))
        close(fast(x), model(x))


def test_caches_that_the_graph_writes_stay_tensors_of_the_model() -> None:
    class Cache(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("kept", torch.zeros(4, 8))
            self.layer = nn.Linear(8, 8)

        def forward(self, x: Tensor, place: int) -> Tensor:
            self.kept[place] = self.layer(x)
            return self.kept.sum(0) * 2

    model, other = Cache().eval(), Cache().eval()
    other.load_state_dict(model.state_dict())
    fast = compiled(model)
    with torch.no_grad():
        for place in range(3):
            x = torch.randn(8)
            torch.testing.assert_close(fast(x, place), other(x, place))
    torch.testing.assert_close(model.kept, other.kept)


def test_inputs_may_be_written_and_results_may_be_views_of_them() -> None:
    def function(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        x.add_(y)
        return x.view(-1), (x * y).relu()

    fast = compiled(function)
    x, y = torch.randn(3, 4), torch.randn(3, 4)
    mine, theirs = x.clone(), x.clone()
    with torch.no_grad():
        got, want = fast(mine, y), function(theirs, y)
        close(got, want)
        torch.testing.assert_close(mine, theirs)
        got[0].zero_()
    assert not mine.any()


def test_gradients_are_left_to_the_other_way() -> None:
    model = Net().eval()
    fast = compiled(model)
    x = torch.randn(2, 3, 9, 8)
    fast(x)[1].sum().backward()
    assert model.layer.weight.grad is not None


def test_the_option_is_checked() -> None:
    with pytest.raises(
        Exception, match=r"option 'ipex.program' must be True, False or 'auto', got 3"
    ):
        torch.compile(Net().eval(), backend=ipex_backend, options={"ipex.program": 3})(
            torch.randn(1, 3, 9, 8)
        )


def test_graphs_with_many_other_ops_may_be_left_to_inductor() -> None:
    def function(x: Tensor) -> Tensor:
        return x.cumsum(0).sort(0).values.cummax(0).values + x.topk(8, 1).values

    x = torch.randn(4, 8)
    left = "not run as a program"
    for options, text in (
        ({"ipex.program": True}, "a program of"),
        ({"ipex.program": "auto"}, left),
        (None, left),
    ):
        torch.compiler.reset()
        fast = torch.compile(function, backend=ipex_backend, options=options)
        with torch.no_grad():
            torch.testing.assert_close(fast(x), function(x))
        (graph,) = explain(fast).graphs
        assert any(note.startswith(text) for note in graph.notes)


@pytest.mark.parametrize(
    ("mode", "options", "program"),
    [
        (None, None, True),
        (None, {"ipex.disable": ["linear"]}, True),
        (None, {"ipex.program": False}, False),
        (None, {"ipex.always": True}, False),
        (None, {"cpp_wrapper": False}, False),
        ("reduce-overhead", None, False),
    ],
)
def test_programs_are_the_default_without_options_of_inductor(
    mode: str | None, options: dict[str, Any] | None, program: bool
) -> None:
    assert read_options(mode, options).program == ("auto" if program else False)
    torch.compiler.reset()
    model, x = Net().eval(), torch.randn(2, 3, 9, 8)
    if program:
        fast = torch.compile(model, backend=ipex_backend, options=options)
        with torch.no_grad():
            close(fast(x), model(x))
        (graph,) = explain(fast).graphs
        assert any(note.startswith("a program of") for note in graph.notes)


def test_a_graph_that_returns_no_tuple() -> None:
    """`ipex.compile` takes graphs that Dynamo has not made."""
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU()).eval().requires_grad_(False)
    x = torch.randn(3, 8)
    torch.testing.assert_close(compile(torch.fx.symbolic_trace(model), [x])(x), model(x))

    class Named(torch.nn.Module):
        def forward(self, x: Tensor) -> dict[str, Tensor]:
            return {"double": x * 2, "half": x / 2}

    found = compile(torch.fx.symbolic_trace(Named()), [x])(x)
    assert list(found) == ["double", "half"]
    torch.testing.assert_close(found["half"], x / 2)


@pytest.mark.parametrize("options", [None, {"ipex.program": True}])
def test_graphs_with_ops_that_write_to_inputs_are_left_to_inductor(
    options: dict[str, Any] | None,
) -> None:
    torch.compiler.reset()

    def function(x: Tensor, cache: Tensor, slots: Tensor) -> Tensor:
        torch.ops.ipex.reshape_and_cache(x, x, cache, cache.clone(), slots)
        return cache.sum() + x.relu()

    def inputs() -> tuple[Tensor, ...]:
        x = torch.arange(32.0).view(2, 2, 8) - 9
        return x, torch.zeros(3, 2, 4, 8), torch.tensor([1, 6])

    mine, theirs = inputs(), inputs()
    fast = torch.compile(function, backend=ipex_backend, options=options)
    with torch.no_grad():
        torch.testing.assert_close(fast(*mine), function(*theirs))
    torch.testing.assert_close(mine[1], theirs[1])
    assert mine[1].any()
    (graph,) = explain(fast).graphs
    assert any(
        "a program must have ops that torch calls, got ipex::reshape_and_cache writes to an input"
        in n
        for n in graph.notes
    )


@pytest.fixture(scope="module")
def writers() -> Any:
    """Ops that write to what they are given."""
    library = torch.library.Library("ipex_test_writes", "FRAGMENT")
    library.define("double(Tensor x, Tensor(a!) out, str name, Tensor(b!)? more=None) -> ()")
    library.define("both(Tensor x, Tensor(a!) out) -> Tensor")
    library.define("several(Tensor x, Tensor(a!)[] out) -> ()")

    def double(x: Tensor, out: Tensor, name: str, more: Tensor | None = None) -> None:
        assert name == "layer"
        out.copy_(2 * x)
        if more is not None:
            more.add_(1)

    def both(x: Tensor, out: Tensor) -> Tensor:
        out.add_(x)
        return out * 3

    def several(x: Tensor, out: list[Tensor]) -> None:
        for one in out:
            one.copy_(x)

    for name, function in (("double", double), ("both", both), ("several", several)):
        library.impl(name, function, "CPU")
    library.impl("double", lambda *args: None, "Meta")
    library.impl("several", lambda *args: None, "Meta")
    library.impl("both", lambda x, out: torch.empty_like(out), "Meta")
    yield torch.ops.ipex_test_writes
    library._destroy()


def _whole(ops: Any, x: Tensor) -> Tensor:
    out = torch.empty_like(x)
    ops.double(x.relu(), out, "layer")
    return out + 1


def _views(ops: Any, x: Tensor) -> Tensor:
    """As layers of attention do it: one that is flat outside and has heads inside."""
    for _ in range(2):
        rows = x.shape[0]
        q, k = (x * 2).split(4, -1)
        out = torch.empty(rows, 8)
        ops.double(torch.stack([q, k], 1), out.view(-1, 2, 4), "layer")
        x = functional.layer_norm(out.view(-1, 8), (8,)) + x
    return x


def _parts(ops: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    out, more = torch.zeros(x.shape[0], 16), x * 2
    ops.double(x, out[:, 4:12], "layer", more[1:])
    return out, more


def _read_before(ops: Any, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    y = x + 1
    z = y * 2
    result = ops.both(x, y)
    return y, z, result


def _transposed(ops: Any, x: Tensor) -> Tensor:
    out = torch.zeros(8, x.shape[0])
    ops.double(x, out.t(), "layer")
    return out * 2


@pytest.mark.parametrize("function", [_whole, _views, _parts, _read_before, _transposed])
def test_ops_that_write_to_memory_of_the_graph_are_called(function: Any, writers: Any) -> None:
    fast = compiled(lambda x: function(writers, x))
    with torch.no_grad():
        for rows in (3, 5, 2, 7):
            x = torch.randn(rows, 8)
            got, want, kept = fast(x), function(writers, x), x.clone()
            torch.testing.assert_close(got, want)
            torch.testing.assert_close(x, kept)
        first = fast(x)
        held = [one.clone() for one in (first if isinstance(first, tuple) else (first,))]
        fast(x + 1)
        for one, other in zip(first if isinstance(first, tuple) else (first,), held, strict=True):
            assert torch.equal(one, other)  # a call has memory of its own
    notes = [note for graph in explain(fast).graphs for note in graph.notes]
    assert any("a program of" in n and "ipex_test_writes::" in n for n in notes), notes


def test_ops_that_write_to_lists_are_left_to_inductor(writers: Any) -> None:
    def function(x: Tensor) -> Tensor:
        out = [torch.empty_like(x), torch.empty_like(x)]
        writers.several(x, out)
        return out[0] + out[1]

    fast = compiled(function)
    x = torch.randn(3, 8)
    with torch.no_grad():
        torch.testing.assert_close(fast(x), function(x))
    notes = [note for graph in explain(fast).graphs for note in graph.notes]
    assert any("writes to a list of tensors" in n for n in notes), notes

# SPDX-License-Identifier: Apache-2.0
"""`torch.jit.trace` of an optimized model gives a program that is fused, without `ipex.jit.fuse`."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
from torch import nn

from ipex_core import jit, optimize, restore
from ipex_core.kernels.policy import has_kernel

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.bn, self.relu = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU()
        self.next = nn.Conv2d(8, 8, 1)

    def forward(self, x, scale=None, *, skip=False):
        x = self.relu(self.bn(self.conv(x)))
        y = x if skip else torch.relu(self.next(x) + x)
        if scale is None:  # a form that only a model around this one can take
            return {"y": y, "count": 3, "pair": (y.sum(), None)}
        return {"y": y, "scaled": y * scale}


def frozen(model, *args, **kwargs):
    with torch.no_grad():
        return torch.jit.freeze(torch.jit.trace(model, *args, **kwargs))


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU()).eval()


def kinds(program):
    return [node.kind() for node in program.inlined_graph.nodes() if "::" in node.kind()]


@pytest.mark.parametrize("grad", [False, True])
def test_documented_form(grad):
    model, x = net(), torch.randn(2, 3, 9, 9)
    fast = optimize(model)
    with torch.set_grad_enabled(grad):
        program = torch.jit.freeze(torch.jit.trace(fast, x))
    assert "mkldnn::_convolution_pointwise" in kinds(program)
    assert not {"aten::_convolution", "aten::relu"} & set(kinds(program))
    for batch in (x, torch.randn(3, 3, 7, 12)):
        with torch.no_grad():
            torch.testing.assert_close(program(batch), model(batch))
    file = io.BytesIO()
    torch.jit.save(program, file)
    file.seek(0)
    with torch.no_grad():
        torch.testing.assert_close(torch.jit.load(file)(x), model(x))
    # Without freezing, too.
    with torch.no_grad():
        plain = torch.jit.trace(fast, x)
        torch.testing.assert_close(plain(x), model(x))
    assert "aten::relu" not in kinds(plain)


def test_arguments_results_and_parts():
    model, x = Net().eval(), torch.randn(2, 3, 9, 9)
    fast = optimize(model)
    wanted = model(x, torch.tensor(2.0))
    program = frozen(fast, (x, torch.tensor(2.0)), strict=False)
    assert "mkldnn::_convolution_pointwise" in kinds(program)
    with torch.no_grad():
        got = program(x, torch.tensor(3.0))
    torch.testing.assert_close(got["y"], wanted["y"])
    torch.testing.assert_close(got["scaled"], wanted["y"] * 3)
    named = {"x": x, "scale": torch.tensor(2.0)}
    program = frozen(fast, example_kwarg_inputs=named, strict=False)
    torch.testing.assert_close(program(**named)["y"], wanted["y"])
    assert "aten::relu" not in kinds(program)

    class Outer(nn.Module):
        def __init__(self, part):
            super().__init__()
            self.part = part

        def forward(self, x):
            return self.part(x)["y"] * 2 + self.part(x, skip=True)["pair"][0]

    program = frozen(Outer(fast).eval(), x)
    assert kinds(program).count("mkldnn::_convolution_pointwise") >= 1
    torch.testing.assert_close(program(x), Outer(model)(x))


def test_what_is_left_alone():
    x = torch.randn(2, 3, 9, 9)
    jit.enable_onednn_fusion(False)
    try:
        assert "aten::relu" in kinds(frozen(optimize(net()), x))
    finally:
        jit.enable_onednn_fusion(True)
    assert "aten::relu" in kinds(frozen(net(), x))  # not optimized
    assert "aten::relu" in kinds(frozen(restore(optimize(net())), x))
    # Gradients are wanted: the stock ops have them.
    needs = x.clone().requires_grad_()
    program = torch.jit.trace(optimize(net()), needs)
    program(needs).sum().backward()
    assert needs.grad is not None

    class Counts(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(3, 8, 3)
            self.register_buffer("calls", torch.zeros(1))

        def forward(self, x):
            self.calls += 1
            return torch.relu(self.conv(x)) + self.calls

    with torch.no_grad():
        program = torch.jit.trace(optimize(Counts().eval()), x, check_trace=False)
        torch.testing.assert_close(program(x) + 1, program(x))


def test_a_script_in_front_and_copies():
    x = torch.randn(2, 3, 9, 9)
    double = torch.jit.script(Double())

    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.twice, self.net = double, optimize(net())

        def forward(self, x):
            return self.net(self.twice(x)) + 1

    program = frozen(Outer().eval(), x)
    torch.testing.assert_close(program(x), net()(2 * x) + 1)
    fast = optimize(net())
    for other in (copy.deepcopy(fast), pickle.loads(pickle.dumps(fast))):
        assert "aten::relu" not in kinds(frozen(other, x))


class Attends(nn.Module):
    """Attention as a model writes it, behind linear layers, with a mask."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(64, 64) for _ in range(3))

    def forward(self, x, mask):
        q, k, v = (f(x).view(*x.shape[:2], 4, 16).transpose(1, 2) for f in (self.q, self.k, self.v))
        weights = torch.softmax(q @ k.transpose(-1, -2) / 4.0 + mask, -1)
        return (weights @ v).transpose(1, 2).reshape(x.shape)


class Swish(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(4, 8, 3)

    def forward(self, x):
        return nn.functional.silu(self.conv(x))


def everywhere(program):
    """Return the kinds of nodes, also in branches."""
    graph = program.inlined_graph  # owns the blocks
    found, blocks = [], [graph]
    while blocks:
        for node in blocks.pop().nodes():
            found.append(node.kind())
            blocks += node.blocks()
    return found


@pytest.mark.skipif(not has_kernel("attention"), reason="no kernel package")
@pytest.mark.filterwarnings("error::torch.jit.TracerWarning")
@pytest.mark.parametrize("how", ["float32", "bfloat16", "autocast"])
@pytest.mark.parametrize("kind", [Attends, Swish])
def test_results_that_are_rounded_less_often(kind, how):
    """Until it is frozen, a trace rounds as the model does: torch compares the two."""
    if how != "float32" and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        pytest.skip("oneDNN has no bfloat16 on this CPU")
    torch.manual_seed(0)
    dtype = torch.bfloat16 if how == "bfloat16" else torch.float32
    mask = torch.zeros(2, 1, 1, 6, dtype=dtype)
    mask[1, ..., 4:] = -1e4
    x = torch.randn(2, 6, 64).to(dtype)
    call = (x, mask) if kind is Attends else (torch.randn(2, 4, 9, 9).to(dtype),)
    model = kind().eval()
    fast = optimize(model, dtype=None if how == "float32" else torch.bfloat16)
    with torch.no_grad(), torch.autocast("cpu", enabled=how == "autocast"):
        wanted = fast(*call)
        trace = torch.jit.trace(fast, call)
        file = io.BytesIO()
        torch.jit.save(trace, file)
        program = torch.jit.freeze(trace)
        file.seek(0)
        again = torch.jit.freeze(torch.jit.load(file))
        for one in (program, again):
            assert "prim::requires_grad" not in everywhere(one)
            if kind is Attends:
                assert everywhere(one).count("ipex::attention") == 1
            else:
                assert "aten::silu" not in everywhere(one)
            for _ in range(3):  # torch optimizes the second and third run
                torch.testing.assert_close(one(*call), wanted, rtol=2e-2, atol=2e-2)
        if how == "bfloat16":
            assert torch.equal(trace(*call), wanted)
        other = tuple(torch.cat([t, t]) for t in call)
        torch.testing.assert_close(program(*other), fast(*other), rtol=2e-2, atol=2e-2)


@pytest.mark.skipif(not has_kernel("attention"), reason="no kernel package")
@pytest.mark.filterwarnings("error::torch.jit.TracerWarning")
def test_no_parameter_that_wants_gradients():
    """Then nothing tells that a trace is frozen, and float32 alone is fused."""
    for dtype, count in ((torch.float32, 1), (torch.bfloat16, 0)):
        model = Attends().eval().requires_grad_(False)
        call = torch.randn(2, 6, 64).to(dtype), torch.zeros(2, 1, 1, 6, dtype=dtype)
        program = frozen(optimize(model, dtype=dtype), call)
        assert everywhere(program).count("ipex::attention") == count


@pytest.mark.skipif(not has_kernel("attention"), reason="no kernel package")
def test_attention_of_a_stock_model_under_autocast():
    """The casts that torch's own pass puts into a program are no obstacle."""
    torch.manual_seed(0)
    model = Attends().eval().requires_grad_(False)
    call = torch.randn(2, 6, 64), torch.zeros(2, 1, 1, 6)
    with torch.no_grad(), torch.autocast("cpu"):
        program = torch.jit.freeze(torch.jit.trace(model, call))
        fused = jit.fuse(program)
        assert jit.fused(fused)["attention"] == 1
        torch.testing.assert_close(fused(*call), program(*call), rtol=2e-2, atol=2e-2)
        # What the op does not take: a mask of five dimensions.
        odd = call[0], call[1].unsqueeze(0).expand(1, 2, 1, 1, 6)
        torch.testing.assert_close(fused(*odd), program(*odd), rtol=2e-2, atol=2e-2)


class Double(nn.Module):
    def forward(self, x):
        return x * 2


class Kept:
    """An object in a result, as transformers has caches."""

    def __init__(self, keys: torch.Tensor) -> None:
        self.keys = keys


def test_what_lies_in_an_object_of_the_result_is_part_of_the_trace() -> None:
    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.key, self.value = nn.Linear(64, 64), nn.Linear(64, 64)

        def forward(self, x):
            keys = self.key(x)
            return torch.relu(self.value(keys)), Kept(keys)

    class Outer(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x):
            y, kept = self.inner(x)
            return y, kept.keys, y + kept.keys

    model, x, other = Inner().eval(), torch.randn(3, 64), torch.randn(3, 64)
    with torch.no_grad():
        program = torch.jit.freeze(torch.jit.trace(Outer(optimize(model)).eval(), x))
        for got, expected in zip(program(other), Outer(model)(other), strict=True):
            torch.testing.assert_close(got, expected)

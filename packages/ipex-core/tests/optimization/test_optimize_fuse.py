# SPDX-License-Identifier: Apache-2.0
"""Fusion inside modules, attention of Hugging Face models, and torch.compile of optimized models."""

from __future__ import annotations

import copy
import inspect
import io
import pickle

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from ipex_core.diagnostics.explain import explain
from ipex_core.kernels.policy import has_kernel
from ipex_core.optimization import optimize, restore

pytestmark = pytest.mark.usefixtures("small_weights_are_packed")

needs = {
    op: pytest.mark.skipif(not has_kernel(op), reason=f"no kernel for {op}")
    for op in ("rms_norm", "silu_mul", "attention", "add_layer_norm")
}


def fused(model, path=""):
    return next(
        (r.text for r in explain(model).for_module(path) if r.step == "fuse" and r.done), ""
    )


def check(model, *inputs, dtype=None, tolerance=None):
    model.eval()
    result = optimize(model, dtype=dtype)
    tolerance = tolerance or (1e-4 if dtype is None else 5e-2)
    with torch.no_grad():
        got, want = result(*inputs), model(*inputs)
        torch.testing.assert_close(got.float(), want, rtol=tolerance, atol=tolerance)
        assert torch.equal(copy.deepcopy(result)(*inputs), got)
        if "<locals>" not in type(model).__qualname__:
            assert torch.equal(pickle.loads(pickle.dumps(result))(*inputs), got)
    return result


class Activation(nn.Module):
    """An activation written as a module, as transformers does."""

    def __init__(self):
        super().__init__()
        self.act = F.gelu

    def forward(self, x):
        return self.act(x)


class Output(nn.Module):
    def __init__(self):
        super().__init__()
        self.dense = nn.Linear(128, 96)
        self.norm = nn.LayerNorm(96)
        self.dropout = nn.Dropout(0.1)

    def forward(self, states, residual):
        states = self.dropout(self.dense(states))
        return self.norm(states + residual)


class Intermediate(nn.Module):
    def __init__(self, act):
        super().__init__()
        self.dense = nn.Linear(96, 128)
        self.act = act

    def forward(self, states):
        return self.act(self.dense(states))


class Gated(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(96, 128, bias=False)
        self.up = nn.Linear(96, 128, bias=False)
        self.down = nn.Linear(128, 96, bias=False)
        self.act = nn.SiLU()

    def forward(self, x):
        return self.down(self.act(self.gate(x)) * self.up(x))


@pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("act", [nn.GELU(), nn.GELU("tanh"), nn.ReLU(), nn.SiLU(), Activation()])
def test_linear_activation(act, dtype):
    result = check(Intermediate(act), torch.randn(2, 5, 96), dtype=dtype)
    if dtype != torch.float16:
        assert fused(result).startswith("fused: linear + ")


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_sequential(dtype):
    model = nn.Sequential(nn.Linear(96, 128), nn.GELU(), nn.Linear(128, 96), nn.ReLU())
    result = check(model, torch.randn(4, 96), dtype=dtype)
    assert fused(result) == "fused: linear + gelu, linear + relu"
    assert type(result) is nn.Sequential and len(result) == 4
    x = torch.randn(2, 96)
    with torch.no_grad():
        torch.testing.assert_close(result[:2](x).float(), model[:2](x), rtol=5e-2, atol=5e-2)


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_linear_add_norm(dtype):
    result = check(Output(), torch.randn(2, 5, 128), torch.randn(2, 5, 96), dtype=dtype)
    assert "linear + add" in fused(result)
    check(Output(), torch.randn(2, 5, 128), torch.randn(5, 96), dtype=dtype)  # broadcast
    states, residual = torch.randn(2, 5, 128), torch.randn(2, 5, 96)
    with torch.no_grad():
        assert torch.equal(result(states, residual=residual), result(states, residual))
        assert torch.equal(result(residual=residual, states=states), result(states, residual))


@needs["silu_mul"]
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_gated(dtype):
    assert fused(check(Gated(), torch.randn(2, 5, 96), dtype=dtype)) == "fused: ipex::silu_mul"


@needs["add_layer_norm"]
def test_add_norm_with_the_sum_used_again():
    class Residual(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.LayerNorm(96)

        def forward(self, x, y):
            s = x + y
            return self.norm(s) * s

    result = check(Residual(), torch.randn(4, 96), torch.randn(4, 96))
    assert fused(result) == "fused: ipex::add_layer_norm"
    check(Residual(), torch.randn(4, 96), torch.randn(96))


def rms_norm(body, offset=0.0):
    class Norm(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(96) * 0.3 + 1.0 - offset)
            self.epsilon = 1e-6

        def forward(self, x):
            return body(self, x)

    return Norm()


def _transformers(self, x):
    dtype = x.dtype
    x = x.to(torch.float32)
    x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.epsilon)
    return self.weight * x.to(dtype)


def _gemma(self, x):
    y = x.float()
    y = y * torch.rsqrt((y * y).mean(-1, keepdim=True) + self.epsilon)
    return (y * (1.0 + self.weight.float())).type_as(x)


def _root(self, x):
    return x / torch.sqrt(torch.mean(x**2, -1, True) + self.epsilon) * self.weight


@needs["rms_norm"]
@pytest.mark.parametrize("body", [_transformers, _gemma, _root])
def test_hand_written_rms_norm(body):
    norm = rms_norm(body, offset=1.0 if body is _gemma else 0.0).eval()
    result = optimize(norm)
    assert (
        fused(result) == "fused: ipex::rms_norm"
        and "functional_rms_norm(x, weight, 1e-06" in result.forward.source
    )
    x = torch.randn(4, 96)
    torch.testing.assert_close(result(x), norm(x))


def test_what_only_looks_like_an_rms_norm():
    def centered(self, x):
        x = x - x.mean(-1, keepdim=True)
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.epsilon))

    def doubled(self, x):
        return 2 * self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.epsilon))

    for body in (centered, doubled):
        assert not fused(optimize(rms_norm(body).eval()))


@needs["attention"]
def test_attention_calls_in_other_models():
    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.qkv = nn.Linear(64, 192)

        def forward(self, x):
            q, k, v = self.qkv(x).view(2, 7, 3, 4, 16).permute(2, 0, 3, 1, 4).unbind(0)
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    assert "ipex::attention" in fused(check(Attention(), torch.randn(2, 7, 64)))


@needs["attention"]
def test_annotations_that_are_no_importable_names():
    """This file's are strings; a union has no name either."""

    class Annotated(nn.Module):
        def forward(self, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
            return F.scaled_dot_product_attention(q, k, k)

    class Union(Annotated):
        def forward(self, q, k):
            return F.scaled_dot_product_attention(q, k, k)

    Union.forward.__annotations__ = {"q": torch.Tensor | None, "return": tuple[torch.Tensor, ...]}
    q, k = torch.randn(1, 2, 5, 16), torch.randn(1, 2, 7, 16)
    for kind in (Annotated, Union):
        assert "ipex::attention" in fused(check(kind(), q, k))


def test_optional_arguments_and_training_take_the_original_forward():
    class Optional(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(96, 96)
            self.drop = nn.Dropout(0.5)

        def forward(self, x, bias=None, *, scale=1.0):
            y = F.relu(self.fc(self.drop(x))) * scale
            return y if bias is None else y + bias

    model = Optional().eval()
    result = optimize(model)
    assert fused(result) == "fused: linear + relu"
    x = torch.randn(3, 96)
    for args, kwargs in (
        ((x,), {}),
        ((x, x), {}),
        ((x,), {"scale": 2.0}),
        ((), {"x": x}),
        ((x, None), {}),
    ):
        with torch.no_grad():
            torch.testing.assert_close(result(*args, **kwargs), model(*args, **kwargs))
    result.train()
    assert not torch.equal(result(x), result(x))  # dropout is back


def test_hooks_and_children_that_change_later():
    model = Intermediate(nn.GELU()).eval()
    x = torch.randn(3, 96)
    result = optimize(model)
    seen = []
    for child in (result.dense, result.act):
        handle = child.register_forward_hook(lambda *a: seen.append(1))
        with torch.no_grad():
            torch.testing.assert_close(result(x), model(x), rtol=1e-4, atol=1e-4)
        handle.remove()
    assert len(seen) == 2
    result.act = nn.ReLU()
    with torch.no_grad():
        torch.testing.assert_close(result(x), F.relu(model.dense(x)), rtol=1e-4, atol=1e-4)


def test_forwards_that_cannot_be_traced_are_left_alone():
    class Branches(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(96, 96)
            self.calls = 0

        def forward(self, x):
            self.calls += 1
            return F.relu(self.fc(x)) if x.sum() > 0 else self.fc(x)

    class Remembers(Branches):
        def forward(self, x):
            self.last = x
            return F.relu(self.fc(x))

    for kind in (Branches, Remembers):
        model = kind().eval()
        result = check(model, torch.randn(3, 96))
        assert "forward" not in result.__dict__ and "cannot be traced" in str(explain(result))
    assert "forward must not change attributes of modules, got a change of 'last'" in str(
        explain(result)
    )
    assert isinstance(result.last, torch.Tensor)
    assert not hasattr(optimize(Remembers().eval()), "last")


def test_a_keyword_only_argument_is_named():
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(96, 96)

        def forward(self, x, *, scale):
            return F.relu(self.fc(x)) * scale

    text = str(explain(optimize(Scaled().eval())))
    assert "must not require keyword-only arguments, got 'scale'" in text


def test_gradients_through_fused_forwards():
    for kind, inputs in (
        (lambda: Intermediate(nn.GELU()), [(3, 96)]),
        (Output, [(3, 128), (3, 96)]),
        (Gated, [(3, 96)]),
    ):
        model = kind().eval()
        result = optimize(model)
        xs = [torch.randn(s, requires_grad=True) for s in inputs]
        ys = [x.detach().clone().requires_grad_() for x in xs]
        model(*xs).square().sum().backward()
        result(*ys).square().sum().backward()
        for x, y in zip(xs, ys, strict=True):
            torch.testing.assert_close(y.grad, x.grad, rtol=1e-3, atol=1e-3)
        for p, q in zip(result.parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(p.grad, q.grad, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("backend", ["eager", "inductor"])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_compile(backend, dtype):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.bn = nn.Conv2d(3, 96, 3), nn.BatchNorm2d(96)
            self.mid, self.out = Intermediate(nn.GELU()), Output()

        def forward(self, x):
            y = self.bn(self.conv(x)).mean((2, 3))
            return self.out(self.mid(y), y)

    model = Net().eval()
    x = torch.randn(2, 3, 9, 9)
    result = optimize(model, dtype=dtype)
    with torch.no_grad():
        want = result(x)
        compiled = torch.compile(result, backend=backend, fullgraph=True)
        torch.testing.assert_close(compiled(x), want, rtol=2e-2, atol=2e-2)


def test_rewrites_are_undone():
    model = Intermediate(nn.GELU()).eval()
    result = optimize(model)
    assert "forward" in result.__dict__
    assert "forward" not in restore(result).__dict__


def test_concat_in_a_trace():
    result = optimize(Gated().eval(), concat_linear=True)
    assert "concat of gate, up" in fused(result)
    check_against = Gated().eval()
    check_against.load_state_dict(result.state_dict())
    x = torch.randn(3, 96)
    with torch.no_grad():
        torch.testing.assert_close(result(x), check_against(x), rtol=1e-4, atol=1e-4)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_jit_trace_and_export(dtype):
    model = nn.Sequential(Intermediate(nn.GELU()), nn.Linear(128, 96), nn.ReLU()).eval()
    x = torch.randn(3, 96)
    result = optimize(model, dtype=dtype, concat_linear=True)
    with torch.no_grad():
        want = result(x)
        traced = torch.jit.freeze(torch.jit.trace(result, x).eval())
        buffer = io.BytesIO()
        torch.jit.save(traced, buffer)
        buffer.seek(0)
        exported = torch.export.export(result, (x,)).module()
        for program in (traced, torch.jit.load(buffer), exported):
            torch.testing.assert_close(program(x), want, rtol=2e-2, atol=2e-2)


def test_signature_of_a_fused_forward_is_the_original():
    result = optimize(Output().eval())
    assert "forward" in result.__dict__
    assert list(inspect.signature(result.forward).parameters) == ["states", "residual"]

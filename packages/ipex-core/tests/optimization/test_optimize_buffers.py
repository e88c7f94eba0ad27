# SPDX-License-Identifier: Apache-2.0
"""Buffers and parameters that a cast leaves in float32, and buffers that it casts so that a model runs."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn

from ipex_core.diagnostics.explain import explain
from ipex_core.optimization import optimize, restore

DTYPES = [torch.bfloat16, torch.float16]


class Mixer(nn.Module):
    """Multiplies what its layer gives by a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(64, 64)
        self.register_buffer("decay", torch.randn(64, 64) / 8)
        self.register_buffer("slopes", torch.randn(64), persistent=False)
        self.register_buffer("steps", torch.arange(64))

    def forward(self, x):
        y = self.inner(x)
        return torch.matmul(y, self.decay) * self.slopes


class Rotary(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("inv_freq", torch.rand(64))

    def forward(self, x):
        return x * self.inv_freq.cos().to(x.dtype)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.mixer = Mixer()
        self.rotary = Rotary()
        self.register_buffer("table", torch.randn(64))

    def forward(self, x):
        return self.rotary(self.mixer(x)) + self.table


X = torch.randn(3, 64, generator=torch.Generator().manual_seed(0))


def steps(model):
    return [row.text for row in explain(model).rows if row.step == "buffers"]


@pytest.mark.parametrize("dtype", DTYPES)
@torch.no_grad()
def test_buffers_are_cast_where_a_model_does_not_run_without(dtype):
    model = Net().eval()
    want = model(X)
    with pytest.raises(RuntimeError, match="dtype"):
        optimize(model, dtype=dtype)(X)  # nothing to run it on
    fast = optimize(model, dtype=dtype, sample_input=X)
    torch.testing.assert_close(fast(X).float(), want, rtol=0.05, atol=0.05)
    assert fast.mixer.decay.dtype == fast.mixer.slopes.dtype == dtype
    assert fast.rotary.inv_freq.dtype == torch.float32
    assert fast.mixer.steps.dtype == torch.int64
    text = f"buffers cast to {str(dtype)[6:]}, without which the model raises: decay, slopes"
    assert text in steps(fast)


@pytest.mark.parametrize("dtype", DTYPES)
def test_cast_buffers_are_saved_loaded_copied_and_restored(dtype):
    model = Net().eval()
    former = {name: value.clone() for name, value in model.state_dict().items()}
    fast = optimize(model, dtype=dtype, sample_input=X)
    for one in (fast, copy.deepcopy(fast), pickle.loads(pickle.dumps(fast))):
        saved = one.state_dict()
        assert list(saved) == list(former)
        for name, value in former.items():
            assert saved[name].dtype == value.dtype and torch.equal(saved[name], value), name
        assert torch.equal(one(X), fast(X))
    other = Net().eval()
    with torch.no_grad():
        for tensor in (*other.parameters(), other.mixer.decay):
            tensor.mul_(0.5)
    fast.load_state_dict(other.state_dict())
    assert fast.mixer.decay.dtype == dtype
    torch.testing.assert_close(fast(X).float(), other(X), rtol=0.05, atol=0.05)
    back = restore(fast)
    for name, value in other.state_dict().items():
        assert torch.equal(back.state_dict()[name], value), name
    assert torch.equal(back.mixer.slopes, other.mixer.slopes)
    assert torch.equal(back(X), other(X))


def test_buffers_of_a_model_that_runs_stay():
    class Plain(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(64, 64)
            self.register_buffer("mean", torch.randn(64))

        def forward(self, x):
            return self.inner(x - self.mean)

    fast = optimize(Plain().eval(), dtype=torch.bfloat16, sample_input=X)
    assert fast.mean.dtype == torch.float32
    assert not steps(fast)


def test_buffers_stay_where_casting_them_does_not_help():
    class Odd(Net):
        def forward(self, x):
            y = super().forward(x)
            if self.mixer.inner.weight.dtype != torch.float32:
                raise RuntimeError("this type of model takes float32")
            return y

    fast = optimize(Odd().eval(), dtype=torch.bfloat16)
    assert fast.mixer.decay.dtype == torch.float32
    model = Odd().eval()
    fast = optimize(model, dtype=torch.bfloat16, sample_input=X)
    assert fast.mixer.decay.dtype == fast.mixer.slopes.dtype == torch.float32
    assert torch.equal(fast.mixer.decay, model.mixer.decay)
    assert not steps(fast)


def test_a_buffer_of_a_module_without_parameters():
    class Basis(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("rows", torch.eye(64))

        def forward(self, x):
            return x @ self.rows

    model = nn.Sequential(nn.Linear(64, 64), Basis()).eval()
    fast = optimize(model, dtype=torch.bfloat16, sample_input=X)
    assert fast[1].rows.dtype == torch.bfloat16
    torch.testing.assert_close(fast(X).float(), model(X), rtol=0.05, atol=0.05)


class Router(nn.Module):
    """Counts on float32 weights, as routers of transformers do."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(64, 64) / 8)

    def forward(self, x):
        return nn.functional.linear(x.float(), self.weight).to(x.dtype)


class Routed(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self._keep_in_fp32_modules_strict = {"gate.weight", "norms.*.bias"}  # as post_init does
        self.gate = Router()
        self.norms = nn.ModuleList([nn.LayerNorm(64)])
        self.out = nn.Linear(64, 64)

    def forward(self, x):
        return self.out(self.norms[0](self.gate(x)))


@pytest.mark.parametrize("dtype", DTYPES)
def test_parameters_that_a_class_keeps_in_float32(dtype):
    model = Routed().eval()
    fast = optimize(model, dtype=dtype)
    assert fast.gate.weight.dtype == torch.float32
    assert fast.out.weight.dtype == dtype
    assert fast.norms[0].weight.dtype == dtype  # its weight is not asked for
    text = "kept in float32: the class of the model asks for it"
    assert [r.module for r in explain(fast).rows if r.text == text] == ["gate"]
    with torch.no_grad():
        torch.testing.assert_close(fast(X).float(), model(X), rtol=0.05, atol=0.05)
    assert torch.equal(restore(fast).out.weight, model.out.weight)

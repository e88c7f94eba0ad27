# SPDX-License-Identifier: Apache-2.0
"""Forwards that do more than compute on tensors: tracing them must neither run side effects nor freeze decisions."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from ipex_core.optimization import optimize
from ipex_core.optimization.passes import prepack

pytestmark = pytest.mark.usefixtures("small_weights_are_packed")


X = torch.randn(3, 5, 32, generator=torch.Generator().manual_seed(1))


class Base(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.a = nn.Linear(32, 32)
        self.b = nn.Linear(32, 32)
        self.act = nn.GELU()
        self.norm = nn.LayerNorm(32)
        self.flag, self.scale, self.seen = True, 2.0, []
        self.register_buffer("calls", torch.zeros(()))

    def hidden(self, x):
        return self.act(self.a(x))


def same(model, result, *args):
    for _ in range(2):
        got, want = result(*args), model(*args)
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


class TensorOrTuple(Base):
    def forward(self, x):
        if isinstance(x, tuple):
            x = x[0]
        return self.hidden(x)


class TensorOrNot(Base):
    def forward(self, x):
        return self.hidden(x[0]) if not isinstance(x, torch.Tensor) else self.act(self.b(x))


class MaskOrNone(Base):
    def forward(self, x, mask):
        h = self.hidden(x)
        return h if mask is None else h + mask


@pytest.mark.parametrize(
    ("kind", "args"),
    [
        (TensorOrTuple, ((X,),)),
        (TensorOrNot, (X,)),
        (TensorOrNot, ((X,),)),
        (MaskOrNone, (X, None)),
        (MaskOrNone, (X, X)),
    ],
)
def test_arguments_that_are_no_tensors(kind, args):
    model = kind().eval()
    same(model, optimize(model), *args)


class Later(Base):  # the input of a layer changes after its call
    def forward(self, x):
        x = x * 1
        y = self.a(x)
        x.add_(1)
        return y + x


class Indexed(Base):
    def forward(self, x):
        x = x * 1
        y = self.a(x)
        x[:, 0] = 0
        return self.act(y) + x


class Augmented(Base):  # another name sees the sum
    def forward(self, x):
        h = x * 2
        k = h
        h += self.a(x)
        return h + k


class Flagged(Base):
    def forward(self, x):
        g = self.a(x)
        return F.silu(g, inplace=True) * self.b(x) + g


class Harmless(Base):
    def forward(self, x):
        h = F.relu(self.a(x), inplace=True)
        h += self.b(x)
        return self.norm(h)


@pytest.mark.parametrize("kind", [Later, Indexed, Augmented, Flagged, Harmless])
@pytest.mark.parametrize("concat", [False, True])
def test_changes_in_place(kind, concat):
    model = kind().eval()
    result = optimize(model, concat_linear=concat)
    with torch.no_grad():
        same(model, result, X)
    if not concat:
        assert ("forward" in result.__dict__) is (kind is Harmless)


class Counts(Base):
    def forward(self, x):
        self.calls += 1
        return self.hidden(x) + self.calls


class CountsInPlace(Base):
    def forward(self, x):
        self.calls.add_(1)
        return self.hidden(x) + self.calls


class Collects(Base):
    def forward(self, x):
        self.seen.append(self.hidden(x))
        return self.seen[-1]


@pytest.mark.parametrize("kind", [Counts, CountsInPlace, Collects])
@pytest.mark.parametrize("norm", [False, True])
def test_side_effects_happen_at_calls_only(kind, norm):
    model = kind().eval()
    if norm:  # makes the folding pass trace too
        model = nn.Sequential(model, nn.BatchNorm1d(5)).eval()
    result = optimize(model)
    part = result[0] if norm else result
    assert part.calls == 0 and part.seen == []
    with torch.no_grad():
        same(model, result, X)
    assert part.calls == (0 if kind is Collects else 2)
    assert len(part.seen) == (2 if kind is Collects else 0)


def test_no_random_numbers_are_used_up_or_frozen():
    class Noisy(Base):
        def forward(self, x):
            return self.hidden(x) + float(torch.rand(()))

    model = Noisy().eval()
    before = torch.get_rng_state()
    result = optimize(model)
    assert torch.equal(before, torch.get_rng_state())
    for seed in (1, 2):
        torch.manual_seed(seed)
        want = model(X)
        torch.manual_seed(seed)
        torch.testing.assert_close(result(X), want, rtol=1e-4, atol=1e-4)


def test_timing_uses_up_no_random_numbers(monkeypatch):
    timed = []

    def fastest(runs):
        timed.extend(run().shape for run in runs.values())
        return "stock", "a and b"

    monkeypatch.setattr(prepack, "fastest", fastest)
    monkeypatch.setattr(prepack, "_measured", {})
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Linear(6, 5)).eval()
    before = torch.get_rng_state()
    optimize(model, auto_kernel_selection=True, sample_input=torch.ones(1, 3, 8, 8))
    assert torch.equal(before, torch.get_rng_state())
    assert len(timed) >= 4


class Config:
    def __init__(self):
        self.double = True


class Configured(Base):
    def __init__(self):
        super().__init__()
        self.config = Config()

    def forward(self, x):
        h = self.hidden(x) * self.scale
        h = h + self._more(h)
        return h * 2 if self.config.double else h

    def _more(self, h):
        return h if self.flag else -h


@pytest.mark.parametrize(
    "copied", [lambda m: m, copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))]
)
def test_attributes_that_change_later(copied):
    model = Configured().eval()
    result = copied(optimize(model))
    assert "forward" in result.__dict__
    with torch.no_grad():
        same(model, result, X)
        for change in (
            lambda m: setattr(m, "scale", 5.0),
            lambda m: setattr(m, "flag", False),
            lambda m: setattr(m.config, "double", False),
        ):
            change(model)
            change(result)
            same(model, result, X)


class GradMode(Base):
    def forward(self, x):
        return self.hidden(x) * (1 if torch.is_grad_enabled() else 2)


class NoGrad(Base):
    def forward(self, x):
        with torch.no_grad():
            return self.hidden(x)


@pytest.mark.parametrize("kind", [GradMode, NoGrad])
def test_gradient_mode(kind):
    model = kind().eval()
    result = optimize(model)
    same(model, result, X)
    assert result(X).requires_grad == model(X).requires_grad
    with torch.no_grad():
        same(model, result, X)

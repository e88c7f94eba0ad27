# SPDX-License-Identifier: Apache-2.0
"""``optimize(graph_mode=True)``: what captures a model, when, and that results stay those of the model."""

import copy
import gc
import threading
import weakref

import pytest
import torch
from torch import nn

from ipex_core import config, explain, optimize, restore
from ipex_core.errors import FallbackError

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


class Net(nn.Module):
    """Keywords, a switch, and a dictionary as result."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x, scale=1.0, *, extra=None, twice=False):
        y = torch.relu(self.a(x)) * scale
        if extra is not None:
            y = y + extra
        if twice:
            y = self.b(y)
        return {"y": self.b(y), "n": None}


class Breaks(Net):
    """Dynamo cannot capture this, a trace can."""

    def forward(self, x, **kwargs):
        torch._dynamo.graph_break()
        return super().forward(x, **kwargs)


class Branches(Breaks):
    """Neither can."""

    def forward(self, x, **kwargs):
        y = super().forward(x, **kwargs)
        return {"y": y["y"].neg() if x.sum().item() > 0 else y["y"]}


class Counts(Breaks):
    """Changes a buffer, which a program that was frozen would not."""

    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x, **kwargs):
        self.calls += 1
        return super().forward(x, **kwargs)


class Result(nn.Module):
    """The tensor of the result, for an outer trace."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, x):
        return self.model(x)["y"]


def record(model):
    return next(r for r in explain(model).for_module("") if r.step == "graph_mode")


def make(kind):
    torch.manual_seed(0)
    torch._dynamo.reset()
    model = kind().eval()
    return model, optimize(model, graph_mode=True)


def agree(fast, model, *args, **kwargs):
    with torch.no_grad():
        got, wanted = fast(*args, **kwargs), model(*args, **kwargs)
    assert got.keys() == wanted.keys()
    torch.testing.assert_close(got["y"], wanted["y"], rtol=1e-4, atol=1e-5)


CASES = [(Net, "torch.compile"), (Breaks, "TorchScript"), (Branches, ""), (Counts, "")]


@pytest.mark.parametrize(("kind", "how"), CASES, ids=lambda v: getattr(v, "__name__", ""))
def test_what_captures(kind, how):
    model, fast = make(kind)
    assert "not called yet" in record(fast).text
    agree(fast, model, torch.randn(2, 16))
    found = record(fast)
    assert found.kernel.startswith(how)
    assert found.done is bool(how)
    if kind is not Net:
        assert "torch.compile: " in found.text
    if not how:
        assert "torch.jit.trace: " in found.text and "SystemError" not in found.text
    # Other shapes, keywords, both signs.
    agree(fast, model, -torch.rand(5, 16))
    if kind is not Net:  # each compiles again
        agree(fast, model, torch.rand(5, 16), extra=torch.ones(16))
        agree(fast, model, x=torch.rand(5, 16))
    agree(fast, model, torch.rand(5, 16), twice=True)
    if kind is Counts:
        assert fast.calls == model.calls == 5
    restore(fast)
    assert fast._compiled_call_impl is None


def test_wrong_inputs_decide_nothing():
    model, fast = make(Net)
    with torch.no_grad(), pytest.raises(RuntimeError, match="shape"):
        fast(torch.randn(2, 15))
    assert "not called yet" in record(fast).text
    agree(fast, model, torch.randn(2, 16))
    assert record(fast).kernel.startswith("torch.compile")


@pytest.mark.parametrize("kind", [Net, Breaks])
def test_gradients_run_eagerly(kind):
    model, fast = make(kind)
    x = torch.randn(2, 16, requires_grad=True)
    fast(x)["y"].sum().backward()
    got = x.grad.clone()
    x.grad = None
    model(x)["y"].sum().backward()
    torch.testing.assert_close(got, x.grad)
    assert "not called yet" in record(fast).text
    assert any("gradients run eagerly" in note for note in explain(fast).notes)


def test_changed_weights_are_seen():
    model, fast = make(Breaks)
    x = torch.randn(2, 16)
    agree(fast, model, x)
    other = {k: torch.randn_like(v) for k, v in model.state_dict().items()}
    for m in (model, fast):
        m.load_state_dict(other)
    agree(fast, model, x)
    assert record(fast).kernel == "TorchScript"


@pytest.mark.parametrize("kind", [Net, Breaks, Branches])
def test_threads(kind):
    model, fast = make(kind)
    failures = []
    barrier = threading.Barrier(4)

    def work(seed):
        try:
            generator = torch.Generator().manual_seed(seed)
            barrier.wait(60)
            for i in range(6):
                agree(fast, model, torch.randn(2 + (seed + i) % 2, 16, generator=generator))
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(n,), daemon=True) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert not failures and not any(thread.is_alive() for thread in threads)


def test_other_lengths_do_not_compile_again():
    model, fast = make(Net)
    torch._dynamo.utils.counters.clear()
    for length in range(2, 14):
        agree(fast, model, torch.randn(length, 16))
    assert record(fast).kernel.startswith("torch.compile")
    assert 1 <= torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 2


@pytest.mark.parametrize("kind", [Net, Breaks])
def test_kinds_of_inputs_are_not_kept_without_limit(kind, monkeypatch):
    monkeypatch.setattr("ipex_core.optimization.graph_mode.MAX_KINDS", 4)
    monkeypatch.setattr("ipex_core.optimization.graph_mode.MAX_TRACES", 2)
    model, fast = make(kind)
    for _ in range(2):
        for length in range(2, 9):
            agree(fast, model, torch.randn(length, 16))
    runs = fast._compiled_call_impl._runs
    assert len(runs) == 4
    traces = [run for run in runs.values() if type(run).__name__ == "function"]
    assert kind is Net or len(traces) == 2


def test_under_an_outer_trace_and_compile():
    model, fast = make(Net)
    x = torch.randn(2, 16)
    with torch.no_grad():
        agree(torch.compile(fast, backend="eager"), model, x)
        traced = torch.jit.trace(Result(fast).eval(), x)
        torch.testing.assert_close(traced(x), model(x)["y"], rtol=1e-4, atol=1e-5)


def test_strict_mode_forbids_to_run_eagerly():
    _, fast = make(Branches)
    with (
        torch.no_grad(),
        config.override(strict=True),
        pytest.raises(FallbackError, match="captured"),
    ):
        fast(torch.randn(2, 16))


def test_copies_and_memory():
    model, fast = make(Net)
    x = torch.randn(2, 16)
    agree(fast, model, x)
    agree(copy.deepcopy(fast), model, x)
    _, fresh = make(Breaks)
    with torch.no_grad():
        fresh(x)
    gone = weakref.ref(fresh)
    del fresh
    gc.collect()
    assert gone() is None

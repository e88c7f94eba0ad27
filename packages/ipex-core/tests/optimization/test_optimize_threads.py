# SPDX-License-Identifier: Apache-2.0
"""Optimizing a model is nobody else's business: no state of the process changes, not even for a while."""

from __future__ import annotations

import math
import threading
import warnings

import pytest
import torch
from torch import fx, nn
from torch.nn import functional as F

from ipex_core.optimization import optimize
from ipex_core.recording import record
from ipex_core.util import quiet, raised
from ipex_core.util.symbolic import Tracer

pytestmark = pytest.mark.usefixtures("small_weights_are_packed")

ORIGINALS = (nn.Module.__call__, nn.Module.__getattr__, math.sqrt)


def scores(q, k):
    return q @ k.transpose(-2, -1) / math.sqrt(q.size(-1))


class Attention(nn.Module):
    """Attention in the words of transformers' models, with a size in a function of ``math``."""

    def __init__(self, width=32):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(width, width) for _ in range(3))
        self.out = nn.Linear(width, width)
        self.norm = nn.LayerNorm(width)

    def attend(self, q, k, v):
        return torch.softmax(scores(q, k), -1) @ v

    def forward(self, hidden):
        return self.norm(
            hidden + self.out(self.attend(self.q(hidden), self.k(hidden), self.v(hidden)))
        )


class Convolutions(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.bn = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)

    def forward(self, x):
        return torch.relu(self.bn(self.conv(x)))


class Spy(Attention):
    """Looks around while its forward is traced."""

    def forward(self, hidden):
        LOOK()
        warnings.warn("of the forward", stacklevel=1)
        return super().forward(hidden)


class Look:
    """What a forward finds; an object, since functions of a forward run as copies with another ``math``."""

    def __init__(self):
        self.found = []

    def __call__(self):
        self.found.append((nn.Module.__call__, nn.Module.__getattr__, math.sqrt))
        text = "of another thread"
        other = threading.Thread(target=lambda: warnings.warn(text, stacklevel=1))
        other.start()
        other.join()


LOOK = Look()


def test_nothing_is_patched_while_a_model_is_traced():
    LOOK.found.clear()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        optimize(nn.Sequential(Spy(), nn.Unflatten(1, (1, 5)), nn.BatchNorm2d(1)).eval())
    assert len(LOOK.found) >= 2, "it was traced by both passes that trace"
    assert all(seen == ORIGINALS for seen in LOOK.found)
    texts = [str(one.message) for one in caught]
    assert texts.count("of another thread") == len(LOOK.found)
    assert "of the forward" not in texts, "a trace is not a call"


def test_other_threads_are_served_while_models_are_optimized():
    torch.manual_seed(0)
    image, hidden = torch.randn(1, 3, 8, 8), torch.randn(2, 5, 32)
    stock = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 8)).eval()
    served = [(stock, hidden), (Attention().eval(), hidden), (Convolutions().eval(), image)]
    served.append((optimize(Attention().eval()), hidden))
    stop, wrong, patched = threading.Event(), [], []

    def serve(model, x, expected):
        while not stop.is_set():
            try:
                with torch.no_grad():
                    torch.testing.assert_close(model(x), expected, rtol=1e-4, atol=1e-4)
            except Exception as error:
                wrong.append(error)
            if (nn.Module.__call__, nn.Module.__getattr__, math.sqrt) != ORIGINALS:
                patched.append(model)

    def optimizer():
        try:
            for _ in range(8):
                model = nn.Sequential(Convolutions(), nn.Flatten(2), nn.Linear(36, 32), Attention())
                made = optimize(model.eval())
                with torch.no_grad():
                    torch.testing.assert_close(made(image), model(image), rtol=1e-4, atol=1e-4)
        except Exception as error:
            wrong.append(error)

    with torch.no_grad():
        threads = [threading.Thread(target=serve, args=(m, x, m(x))) for m, x in served]
    workers = [threading.Thread(target=optimizer) for _ in range(2)]
    for thread in (*threads, *workers):
        thread.start()
    for thread in workers:
        thread.join()
    stop.set()
    for thread in threads:
        thread.join()
    assert not wrong and not patched, (wrong[:1], len(wrong), len(patched))
    assert (nn.Module.__call__, nn.Module.__getattr__, math.sqrt) == ORIGINALS


# --------------------------------------------------------------------------------------------------------------------
# The tracer records what that of torch.fx does


@fx.wrap
def marked(x):
    return x if x.sum() > 0 else -x


class Parameters(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(32, 32)
        self.weight, self.tied = nn.Parameter(torch.ones(32)), self.fc.weight
        self.register_buffer("offset", torch.ones(32))
        self.constant = torch.full((32,), 2.0)
        self.inner = nn.Sequential(nn.Linear(32, 32), nn.ReLU())

    def forward(self, x, scale=None):
        y = self.inner(self.fc(x * self.weight)) + self.offset
        return marked(F.linear(y, self.tied)) @ self.fc.weight + self.constant


class Closure(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(32, 32)

    def decorated(function):
        def forward(self, x):
            return function(self, x) * math.floor(x.size(0))

        return forward

    @decorated
    def forward(self, x):
        return self.fc(x) / math.sqrt(x.size(-1))


class Nested(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = Attention(), Attention()
        self.second.out = self.first.out

    def forward(self, x):
        return self.second(self.first(x)) + self.first.q(x)


class Annotated(nn.Module):
    def forward(self, x: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
        return x + rest[0]


def lines(graph):
    numbers = {node: i for i, node in enumerate(graph.nodes)}
    return [
        (n.op, n.target, n.type, fx.node.map_arg((n.args, n.kwargs), numbers.get))
        for n in graph.nodes
    ]


MODELS = (Attention, Convolutions, Parameters, Closure, Nested, Annotated)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("buffers", [False, True])
def test_the_graph_is_that_of_torch_fx(model, buffers):
    model = model().eval()
    ours, theirs = Tracer(), fx.Tracer()
    ours.proxy_buffer_attributes = theirs.proxy_buffer_attributes = buffers
    before = {module: dict(module.__dict__) for module in model.modules()}
    graph = ours.trace(model)
    assert before == {module: module.__dict__ for module in model.modules()}
    assert lines(graph) == lines(theirs.trace(model))
    if not isinstance(model, (Convolutions, Annotated)):
        x = torch.randn(2, 5, 32)
        torch.testing.assert_close(fx.GraphModule(model, graph)(x), model(x))


class Fails(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x):
        return self.fc(x) if self.fc.weight.sum() > 0 else x


def test_a_failed_trace_leaves_nothing_behind():
    model = Fails()
    before = {module: dict(module.__dict__) for module in model.modules()}
    with pytest.raises(fx.proxy.TraceError):
        Tracer().trace(model)
    assert before == {module: module.__dict__ for module in model.modules()}


def test_a_compiled_module_is_not_looked_into():
    model = nn.Sequential(Attention())
    model[0].compile(backend="eager")
    with pytest.raises(RuntimeError, match="compiled"):
        Tracer().trace(model)
    with pytest.raises(RuntimeError, match="compiled"):
        Tracer().trace(nn.Sequential(torch.compile(Attention(), backend="eager")))


class Outside(nn.Module):
    def __init__(self, other, container):
        super().__init__()
        self.__dict__["other"] = container(other)

    def forward(self, x):
        found = self.other
        found = found["x"] if isinstance(found, dict) else found
        return (found[0] if isinstance(found, list) else found)(x)


@pytest.mark.parametrize("container", [lambda m: m, lambda m: [m], lambda m: {"x": m}])
def test_a_module_outside_of_the_tree_ends_the_trace(container):
    other = nn.Sequential(nn.Linear(4, 4))
    model = Outside(other, container)
    with pytest.raises(NameError, match="submodule"):
        Tracer().trace(model)
    assert model(torch.zeros(1, 4)).shape == (1, 4)


def test_only_modules_are_traced():
    with pytest.raises(TypeError, match="expected a module"):
        Tracer().trace(lambda x: x)


# --------------------------------------------------------------------------------------------------------------------
# Traces of torch.fx through optimized models


class Kernels(nn.Module):
    def __init__(self):
        super().__init__()
        self.bag = nn.EmbeddingBag(10, 32, mode="mean")
        self.lstm, self.attention = nn.LSTM(32, 32), nn.MultiheadAttention(32, 2)
        self.rest = nn.Sequential(
            nn.LayerNorm(32), nn.RMSNorm(32), nn.GELU(), nn.Dropout(), nn.Softmax(-1)
        )
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)
        self.group = nn.GroupNorm(2, 32)

    def forward(self, ids):
        x = self.rest(self.lstm(self.bag(ids))[0])
        x = self.attention(x, x, x, need_weights=False)[0]
        return self.group(x + self.down(torch.relu(self.up(x))))


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@pytest.mark.parametrize(
    ("model", "x"),
    [
        (Attention(), torch.randn(2, 5, 32)),
        (Convolutions(), torch.randn(1, 3, 8, 8)),
        (Kernels(), torch.randint(0, 10, (3, 4))),
        (nn.Sequential(Attention(), nn.Linear(32, 8), nn.BatchNorm1d(5)), torch.randn(2, 5, 32)),
        (nn.Linear(32, 8), torch.randn(2, 32)),
        (nn.EmbeddingBag(10, 8), torch.randint(0, 10, (3, 4))),
    ],
    ids=["attention", "convolutions", "kernels", "nested", "linear", "bag"],
)
def test_torch_fx_traces_an_optimized_model(model, x, dtype):
    made = optimize(model.eval(), dtype=dtype)
    traced = fx.symbolic_trace(made)
    kinds = [type(part) for part in traced.modules()]
    if not isinstance(model, (nn.Linear, nn.EmbeddingBag)):
        assert any(kind.__module__.startswith("ipex_core.nn") for kind in kinds), "kernels stay"
    with torch.no_grad():
        tolerance = 1e-5 if dtype is None else 2e-2
        torch.testing.assert_close(traced(x), made(x), rtol=tolerance, atol=tolerance)


# --------------------------------------------------------------------------------------------------------------------
# Warnings


class Kind(UserWarning):
    pass


def test_warnings_of_one_thread():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with quiet(Kind):
            warnings.warn("hidden", Kind, stacklevel=1)
            warnings.warn("shown 1", stacklevel=1)
            other = threading.Thread(target=warnings.warn, args=("shown 2", Kind))
            other.start()
            other.join()
        with quiet(), raised(Kind):
            warnings.warn("hidden", stacklevel=1)
            with pytest.raises(Kind):
                warnings.warn("raised", Kind, stacklevel=1)
        warnings.warn("shown 3", Kind, stacklevel=1)
    assert [str(one.message) for one in caught] == ["shown 1", "shown 2", "shown 3"]


def test_warnings_of_one_thread_by_their_text():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with quiet(Kind, text="hid.*n"):
            warnings.warn("hidden", Kind, stacklevel=1)
            warnings.warn("shown 1", Kind, stacklevel=1)
            warnings.warn("hidden of another class", stacklevel=1)
            other = threading.Thread(target=warnings.warn, args=("hidden by nobody", Kind))
            other.start()
            other.join()
        warnings.warn("hidden no more", Kind, stacklevel=1)
    texts = ["shown 1", "hidden of another class", "hidden by nobody", "hidden no more"]
    assert [str(one.message) for one in caught] == texts


class Warns(nn.Module):
    """What `ipex.export` hides of torch, said by the model's own thread and by another one."""

    def forward(self, x):
        def say():
            warnings.warn("The tensor attribute self.a._flat_weights changed", stacklevel=1)

        say()
        other = threading.Thread(target=say, name="other")
        other.start()
        other.join()
        return x + 1


def test_export_hides_warnings_of_its_own_thread_only():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        record("export", Warns(), (torch.ones(2),), {}, None)
    texts = [str(one.message) for one in caught]
    assert sum("_flat_weights" in text for text in texts) == 1


def test_lost_filters_are_told():
    with pytest.raises(RuntimeError, match="filters"), warnings.catch_warnings(), raised(Kind):
        warnings.simplefilter("ignore")

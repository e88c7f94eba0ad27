# SPDX-License-Identifier: Apache-2.0
"""Linear layers in the graph passes of the compile backend."""

from __future__ import annotations

import math

import pytest
import torch
from compile_checks import (
    DTYPES,
    attention_inputs,
    fired,
    fuse,
    llama_norm,
    randn,
    reasons,
    rotary,
    stock,
)
from torch import nn
from torch.nn import functional as F

from ipex_core.fusion.aten import linear
from ipex_core.fusion.aten.passes import PATTERNS
from ipex_core.ops.linear import weight_rows

ipex = torch.ops.ipex


def weight(n, k, dtype):
    return randn(n, k, dtype=dtype, scale=k**-0.5)


ACTIVATIONS = {
    "relu": F.relu,
    "silu": F.silu,
    "swish": lambda x: x * torch.sigmoid(x),
    "gelu": F.gelu,
    "gelu_python": lambda x: x * 0.5 * (1.0 + torch.erf(x / math.sqrt(2.0))),
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "gelu_new": lambda x: (
        0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))))
    ),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_linear_and_activation(name, dtype):
    x, w, b = randn(2, 5, 32, dtype=dtype), weight(48, 32, dtype), randn(48, dtype=dtype)
    report, gm = fuse(
        lambda x, w, b: ACTIVATIONS[name](F.linear(x, w, b)), x, w, b, constants=(1, 2)
    )
    assert fired(report) == {"linear": 1, "post_op": 1}
    left = {str(n.target) for n in gm.graph.nodes if n.op == "call_function"}
    assert left <= {
        "ipex.linear.default",
        "ipex.pack_linear_weight.default",
        "aten.permute.default",
        "aten.t.default",
        "aten.clone.default",
    }


@pytest.mark.parametrize("dtype", DTYPES)
def test_linear_and_what_follows(dtype):
    x, y = randn(2, 5, 32, dtype=dtype), randn(2, 5, 48, dtype=dtype)
    w, b = weight(48, 32, dtype), randn(48, dtype=dtype)

    def function(x, w, b, y):
        first = F.silu(F.linear(x, w, b)) * y + y
        return first + y * 2, y + F.linear(x, w)

    report, _ = fuse(function, x, w, b, y, constants=(1, 2))
    assert fired(report) == {"linear": 2, "post_op": 5}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("name", ["silu", "gelu", "gelu_tanh"])
def test_gated_mlp(name, bias, dtype):
    x, gate, up = randn(2, 3, 32, dtype=dtype), weight(72, 32, dtype), weight(72, 32, dtype)
    biases = (randn(72, dtype=dtype), randn(72, dtype=dtype)) if bias else (None, None)

    def function(x, gate, up, *biases):
        a, b = biases or (None, None)
        return ACTIVATIONS[name](F.linear(x, gate, a)) * F.linear(x, up, b)

    given = [b for b in biases if b is not None]
    report, _ = fuse(function, x, gate, up, *given, constants=range(1, 3 + len(given)))
    assert fired(report) == {"linear": 2, "gated": 1}
    report, gm = fuse(function, x, gate, up, *given)
    assert fired(report) == {"gated": 1} and "not frozen" in reasons(report)
    assert any("ipex." in str(n.target) and "_mul" in str(n.target) for n in gm.graph.nodes)


def test_layers_under_autocast_read_one_tensor():
    """Each layer converts its input, and what is returned twice stays two tensors."""

    def function(x, gate, up):
        low = [t.bfloat16() for t in (x, x, gate, up)]
        y = F.silu(F.linear(low[0], low[2])) * F.linear(low[1], low[3])
        return y, x.half(), x.half().view(-1)

    inputs = randn(4, 64), *(weight(64, 64, torch.float32) for _ in range(2))
    report, gm = fuse(function, *inputs, constants=(1, 2))
    assert fired(report) == {"linear": 2, "gated": 1}
    _, first, second = gm(*inputs)
    assert first.data_ptr() != second.data_ptr()


def test_gate_of_other_inputs_or_with_other_users():
    x, y, gate, up = (
        randn(4, 32),
        randn(4, 32),
        weight(40, 32, torch.float32),
        weight(40, 32, torch.float32),
    )
    report, _ = fuse(
        lambda x, gate, up, y: F.silu(F.linear(x, gate)) * F.linear(y, up),
        *(x, gate, up, y),
        constants=(1, 2),
    )
    assert fired(report) == {"linear": 2, "post_op": 2}  # as activation and factor

    def shared(x, gate, up):
        left = F.silu(F.linear(x, gate))
        return left * F.linear(x, up), left

    report, _ = fuse(shared, x, gate, up, constants=(1, 2))
    assert "gated" not in fired(report) and "has another user" in reasons(report)
    report, _ = fuse(lambda x: F.silu(x + 1) * (x - 1), x)
    assert not fired(report) and "elementwise" in reasons(report)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("swap", [False, True])
def test_gated_mlp_of_one_layer(swap, bias, dtype):
    x, both = randn(2, 3, 32, dtype=dtype), weight(144, 32, dtype)
    given = [randn(144, dtype=dtype)] if bias else []

    def phi3(x, both, *bias):
        halves = F.linear(x, both, *bias).chunk(2, dim=-1)
        return halves[not swap] * F.silu(halves[swap])

    def sliced(x, both, *bias):
        h = F.linear(x, both, *bias)
        gate, up = (h[..., 72:], h[..., :-72]) if swap else (h[..., :72], h[..., 72:])
        return F.silu(gate) * up

    for function in (phi3, sliced):
        inputs = (x, both, *given)
        report, _ = fuse(function, *inputs, constants=range(1, len(inputs)))
        assert fired(report) == {"linear": 1, "gated": 1}
        report, _ = fuse(function, *inputs, mode="symbolic")  # weights of any size
        assert not fired(report)


def test_halves_that_are_no_gated_mlp():
    x, both = randn(4, 32), weight(80, 32, torch.float32)

    def used(x, w):
        a, b = F.linear(x, w).chunk(2, -1)
        return F.silu(a) * b, b

    def one(x, w):
        a, _ = F.linear(x, w).chunk(2, -1)
        return F.silu(a) * a

    def uneven(x, w):
        h = F.linear(x, w)
        return F.silu(h[:, :40]) * h[:, 39:79]

    def strided(x, w):
        h = F.linear(x, w)
        return F.silu(h[:, ::2]) * h[:, 1::2]

    def rows(x, w):
        a, b = F.linear(x, w).chunk(2, 0)
        return F.silu(a) * b

    for function in (used, one, uneven, strided, rows):
        report, _ = fuse(function, x, both, constants=(1,))
        assert "gated" not in fired(report), function


def test_linear_that_must_stay():
    x, w = randn(4, 32), weight(48, 32, torch.float32)
    report, _ = fuse(lambda x, w: F.linear(x, w), x, w)
    assert not fired(report) and "not frozen" in reasons(report)
    report, _ = fuse(lambda a, b: (a + 1) @ (b + 1).t(), x, w)
    assert not report.fusions  # a product of activations
    report, _ = fuse(
        lambda x, w, b: torch.addmm(b, x, w.t(), beta=2), x, w, randn(48), constants=(1, 2)
    )
    assert not fired(report) and "alpha or beta" in reasons(report)
    report, _ = fuse(lambda x, w: F.linear(x, w), x.double(), w.double(), constants=(1,))
    assert not fired(report)
    report, _ = fuse(lambda x, w: F.linear(x, w), x, w, constants=(1,), always=False)
    assert not fired(report) and "fewer than" in reasons(report)
    report, _ = fuse(lambda x, w: F.linear(x, w), x, w, constants=(1,), kernels=lambda op: False)
    assert not fired(report) and "no kernel package" in reasons(report)


@pytest.mark.parametrize("faster", ["ipex", "stock"])
def test_float32_is_measured_where_no_table_holds(faster, monkeypatch):
    timed = []

    def fastest(runs, seconds, *rest):
        first, second = (run() for run in runs.values())
        torch.testing.assert_close(first, second, rtol=1e-4, atol=1e-3)
        timed.append(first.shape)
        return faster, "a and b"

    monkeypatch.setattr(linear, "fastest", fastest)
    monkeypatch.setattr(linear, "_known", {})
    monkeypatch.setattr(linear, "_table_holds", lambda: False)
    inputs = randn(3, 512), weight(256, 512, torch.float32), randn(256)
    for _ in range(2):
        report, _ = fuse(F.linear, *inputs, constants=(1, 2), always=False)
        assert fired(report) == ({"linear": 1} if faster == "ipex" else {})
        assert faster == "ipex" or "measured: a and b" in reasons(report)
    assert timed == [(3, 256)]
    report, _ = fuse(F.linear, *inputs, constants=(1, 2))
    assert fired(report) == {"linear": 1}
    low = [t.bfloat16() for t in inputs]
    report, _ = fuse(F.linear, *low, constants=(1, 2), always=False)
    assert fired(report) == {"linear": 1} and len(timed) == 1


@pytest.mark.parametrize("kind", ["gelu", "relu", "silu"])
def test_an_activation_behind_a_layer_is_measured_with_it(kind, monkeypatch):
    timed = []

    def measured(dtype, n, k, rows, biased, activation):
        timed.append(activation)

    def fastest(runs, seconds, *rest):
        autograd = torch._C.DispatchKey.AutogradFunctionality  # compiled graphs run below it
        assert torch._C._dispatch_tls_is_dispatch_key_excluded(autograd)
        first, second = (run() for run in runs.values())
        torch.testing.assert_close(first, second, rtol=1e-4, atol=1e-3)
        return "ipex", "a and b"

    inputs = randn(2, 3, 512), weight(256, 512, torch.float32), randn(256)
    monkeypatch.setattr(linear, "fastest", fastest)
    monkeypatch.setattr(linear, "_known", {})
    monkeypatch.setattr(linear, "_table_holds", lambda: False)
    assert linear.measured_linear(torch.float32, 256, 512, 6, True, kind) is None
    monkeypatch.setattr(linear, "measured_linear", measured)
    activation = getattr(F, kind)
    report, _ = fuse(lambda *a: activation(F.linear(*a)), *inputs, constants=(1, 2), always=False)
    assert fired(report) == {"linear": 1, "post_op": 1} and timed == [kind]
    timed.clear()  # something else needs what lies between

    def both(*args):
        y = F.linear(*args)
        return activation(y), y

    fuse(both, *inputs, constants=(1, 2), always=False)
    assert timed == ["none"]


@pytest.mark.parametrize("faster", ["ipex", "stock"])
@pytest.mark.parametrize("gate", ["none", "gelu"])
def test_packed_layers_are_measured_too(gate, faster, monkeypatch):
    """Those of `ipex.optimize`; where Inductor is faster, they are plain again."""
    monkeypatch.setattr(linear, "fastest", lambda runs, *rest: (faster, "a and b"))
    monkeypatch.setattr(linear, "_known", {})
    monkeypatch.setattr(linear, "_table_holds", lambda: False)
    n = 40
    rows = n if gate == "none" else weight_rows(n, gate)
    x, r = randn(2, 3, 512), randn(2, 3, n)
    packed, bias = ipex.pack_linear_weight(weight(rows, 512, torch.float32)), randn(rows)

    def layer(x, packed, bias, r):
        post = "silu" if gate == "none" else "none"
        return ipex.linear(x, packed, n, bias, r, post, r, r, gate)

    def targets(x, **options):
        report, gm = fuse(layer, x, packed, bias, r, **options)
        return report, [node.target for node in gm.graph.nodes]

    before = torch.get_rng_state()
    report, found = targets(x, constants=(1, 2), always=False)
    assert torch.equal(before, torch.get_rng_state())
    assert (ipex.linear.default in found) == (faster == "ipex")
    assert (torch.ops.aten.addmm.default in found) == (faster == "stock")
    assert ("measured: a and b" in reasons(report)) == (faster == "stock")
    for options in ({"always": False}, {"constants": (1, 2)}):  # no constant; measured speed aside
        assert ipex.linear.default in targets(x, **options)[1]


def test_weights_as_gpt2_stores_them():
    x, w, b = randn(2, 3, 32), weight(32, 48, torch.float32), randn(48)
    report, _ = fuse(
        lambda x, w, b: torch.addmm(b, x.view(-1, 32), w).view(2, 3, 48), x, w, b, constants=(1, 2)
    )
    assert fired(report) == {"linear": 1}


def test_post_ops_that_do_not_fit():
    x, w = randn(4, 32), weight(48, 32, torch.float32)
    report, _ = fuse(lambda x, w, y: F.linear(x, w) + y, x, w, randn(48), constants=(1,))
    assert fired(report) == {"linear": 1} and "the addend is float32[48]" in reasons(report)
    report, _ = fuse(lambda x, w: F.relu(F.linear(x, w) * 2), x, w, constants=(1,))
    assert fired(report) == {"linear": 1}

    def shared(x, w):
        y = F.linear(x, w)
        return F.relu(y), y

    report, _ = fuse(shared, x, w, constants=(1,))
    assert fired(report) == {"linear": 1} and "has another user" in reasons(report)
    report, _ = fuse(lambda x, w: (lambda y: y + y)(F.linear(x, w)), x, w, constants=(1,))
    assert fired(report) == {"linear": 1}
    report, _ = fuse(lambda x, w, y: F.relu(F.linear(x, w) + y), x, w, randn(4, 48), constants=(1,))
    assert fired(report) == {"linear": 1, "post_op": 1}  # the activation comes after the addition


#: Patterns that the passes over a CPU graph do not have: two come later, one is of xpu.
LATER = ("convolution", "winograd", "elementwise")


@pytest.mark.parametrize("name", [p for p in PATTERNS if p not in LATER])
def test_each_pattern_can_be_disabled(name):
    class Layer(nn.Module):
        def forward(self, x, gate, up, down, codes, scales, w, q, k, v, cos, sin, ids, ends):
            x = torch.ops.aten._weight_int8pack_mm(x.view(12, 64), codes, scales).view(2, 6, 64)
            q, k = rotary(q, k, cos, sin)
            x = x + stock(q, k, v, None).transpose(1, 2).reshape(2, 6, 64)
            y = F.layer_norm(llama_norm(x + 1, w) + x, (64,), w)
            y = F.linear(F.silu(F.linear(y, gate)) * F.linear(y, up), down) + x
            z = F.linear(y, gate).sin() + F.linear(y, up).cos()
            bags = [F.embedding_bag(ids, table, ends, mode="sum") for table in (gate, up)]
            weights, chosen = z.view(12, 96).softmax(-1).topk(2)
            return z.sin(), torch.cat(bags), weights, chosen

    q, k, v, _ = attention_inputs(torch.float32)
    weights = [weight(*s, torch.float32) for s in ((96, 64), (96, 64), (64, 96))]
    tables = (randn(1, 6, 16), randn(1, 6, 16))
    quantized = (torch.randint(-99, 99, (64, 64), dtype=torch.int8), torch.rand(64) * 1e-3)
    bags = (torch.arange(9), torch.tensor([0, 4]))
    inputs = (randn(2, 6, 64), *weights, *quantized, torch.rand(64), q, k, v, *tables, *bags)
    constants = range(1, 6)
    report, _ = fuse(Layer(), *inputs, constants=constants, disabled=[name])
    assert report.count() and name not in fired(report)
    assert name in fired(fuse(Layer(), *inputs, constants=constants)[0])


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_follows_quantized_layers(dtype):
    x, y = randn(3, 64, dtype=dtype), randn(3, 32, dtype=dtype)
    codes, scales = torch.randint(-99, 99, (32, 64), dtype=torch.int8), torch.rand(32) * 1e-2
    ipex = torch.ops.ipex
    woq = ipex.pack_woq_weight(codes, scales[:, None], None, "int8", 64)
    int8 = ipex.pack_int8_weight(codes)

    def function(x, y, woq, int8, scales):
        first = F.silu(ipex.woq_linear(x, woq, 32)) * y
        return first, F.gelu(ipex.int8_linear(x, int8, 32, scales)) + y

    report, _ = fuse(function, x, y, woq, int8, scales)
    assert fired(report) == {"post_op": 4}

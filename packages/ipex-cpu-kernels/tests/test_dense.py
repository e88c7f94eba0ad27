# SPDX-License-Identifier: Apache-2.0
"""Dense products: what follows them, gates, and wrong arguments."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch.nn import functional

import ipex_core  # noqa: F401
from ipex_core._packed import deinterleave_gate_up, interleave_gate_up
from ipex_core._spec import specs
from ipex_core.errors import OpArgumentError

ops = torch.ops.ipex
X = torch.ones(3, 8)
PACKED = ops.pack_linear_weight(torch.ones(5, 8))
GATED = ops.pack_linear_weight(torch.ones(64, 8))
Y = torch.ones(3, 5)


@pytest.fixture(autouse=True)
def no_gradients():
    with torch.no_grad():
        yield


BAD = [
    ("linear", (X, PACKED, 5, None, None, "none", Y[:2]), "mul must have shape \\[3, 5\\]"),
    ("linear", (X, PACKED, 5, None, None, "none", Y.half()), "mul must have the dtype"),
    ("linear", (X, PACKED, 5, None, None, "none", None, Y[:, :4]), "residual2 must have shape"),
    ("linear", (X, PACKED, 5, None, None, "none", None, None, "relu"), "gate must be one of"),
    ("linear", (X, PACKED, 5, None, None, "none", None, None, "silu"), "packed_weight must be"),
    (
        "linear",
        (X, GATED, 5, None, None, "relu", None, None, "silu"),
        "activation must be none where there is a gate, got relu",
    ),
    (
        "linear",
        (X, GATED, 5, torch.ones(5), None, "none", None, None, "silu"),
        "bias must be 1-D of size of the interleaved weight = 64, got \\[5\\]",
    ),
]


@pytest.mark.parametrize(
    ("op", "args", "text"), BAD, ids=[f"{b[0]}-{i}" for i, b in enumerate(BAD)]
)
def test_wrong_arguments(op, args, text):
    """The kernel and the check in Python say the same."""
    with pytest.raises(RuntimeError, match=text) as native:
        specs()[op].op(*args)
    with pytest.raises(OpArgumentError, match=text) as python:
        specs()[op].check(*args)
        specs()[op].reference(*args)
    assert str(native.value).splitlines()[0] == str(python.value)


@pytest.mark.parametrize("rows", [1, 5, 70])
def test_every_combination_of_what_follows(level, rows):
    k, n = 70, 72
    torch.manual_seed(0)
    x, weight, bias = torch.randn(rows, k), torch.randn(n, k) / 8, torch.randn(n)
    packed = ops.pack_linear_weight(weight)
    others = [torch.randn(rows, n) for _ in range(3)]
    y = functional.linear(x, weight, bias)
    for use in itertools.product((False, True), repeat=3):
        mul, add, add2 = (o if u else None for o, u in zip(others, use, strict=True))
        want = functional.silu(y)
        want = want if mul is None else want * mul
        want = want if add is None else want + add
        want = want if add2 is None else want + add2
        got = ops.linear(x, packed, n, bias, add, "silu", mul, add2)
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


def test_gate_and_up_are_interleaved_and_come_back():
    for shape in ((1,), (40,), (32, 3), (65, 2)):
        gate, up = torch.randn(shape), torch.randn(shape)
        both = interleave_gate_up(gate, up)
        assert both.shape[0] == -(-shape[0] // 32) * 64
        again = deinterleave_gate_up(both, shape[0])
        assert torch.equal(again[0], gate)
        assert torch.equal(again[1], up)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gate_is_the_product_of_two_layers(level, dtype):
    torch.manual_seed(1)
    x = torch.randn(7, 96).to(dtype)
    gate, up = (torch.randn(100, 96).div(10).to(dtype) for _ in range(2))
    packed = ops.pack_linear_weight(interleave_gate_up(gate, up))
    got = ops.linear(x, packed, 100, None, None, "none", None, None, "silu")
    wide = [functional.linear(x.double(), w.double()) for w in (gate, up)]
    want = (functional.silu(wide[0]) * wide[1]).to(dtype)
    tolerance = 1e-4 if dtype is torch.float32 else 2e-2
    torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)


def test_gradient_through_a_gate():
    torch.manual_seed(2)
    x = torch.randn(3, 16, requires_grad=True)
    gate, up = torch.randn(20, 16), torch.randn(20, 16)
    packed = ops.pack_linear_weight(interleave_gate_up(gate, up))
    with torch.enable_grad():
        ops.linear(x, packed, 20, None, None, "none", None, None, "gelu").sum().backward()
        got, x.grad = x.grad, None
        (functional.gelu(x @ gate.T) * (x @ up.T)).sum().backward()
    torch.testing.assert_close(got, x.grad, rtol=1e-4, atol=1e-4)

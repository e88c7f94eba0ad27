# SPDX-License-Identifier: Apache-2.0
"""The 8-bit integer family: quantisation of activations and linear layers on int8 weights."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import ipex_core  # noqa: F401
from ipex_core._spec import specs
from ipex_core.errors import OpArgumentError

ops = torch.ops.ipex
X = torch.randn(3, 8)
SCALE = torch.tensor(0.5)
ZERO = torch.tensor(3, dtype=torch.int32)


def bad_calls():
    token, tensor = "quantize_per_token", "quantize_per_tensor"
    yield token, (X.int(),), "x must have dtype float32, bfloat16, float16, got int32"
    yield token, (torch.tensor(1.0),), "x must have at least 1 dimension"
    yield tensor, (X.double(),), "x must have dtype"
    yield tensor, (X, SCALE.double()), "scale must have dtype float32, got float64"
    yield tensor, (X, torch.ones(2)), "scale must have one element, got \\[2\\]"
    yield tensor, (X, None, ZERO, False), "zero must be None without scale"
    yield tensor, (X, SCALE, ZERO, True), "zero must be None for symmetric codes"
    yield tensor, (X, SCALE, ZERO.long(), False), "zero must have dtype int32, got int64"
    yield tensor, (X, SCALE, ZERO.repeat(2), False), "zero must have one element"
    yield tensor, (X, SCALE, ZERO * 100, False), "zero must be in \\[0, 255\\], got 300"
    yield tensor, (X, SCALE, -ZERO, False), "zero must be in \\[0, 255\\], got -3"
    for value in (0.0, -1.0, 1e-38, float("inf"), float("nan")):
        yield tensor, (X, torch.tensor(value)), "scale must be finite and at least 2"


CALLS = list(bad_calls())
IDS = [f"{op}-{i}" for i, (op, _, _) in enumerate(CALLS)]


@pytest.mark.parametrize(("op", "args", "text"), CALLS, ids=IDS)
def test_bad_input(op, args, text):
    """Kernel and Python check raise the same text."""
    with pytest.raises(RuntimeError, match=text) as native:
        getattr(ops, op)(*args)
    with pytest.raises(OpArgumentError, match=text) as python:
        specs()[op].check(*args)
        specs()[op].reference(*args)  # values of tensors are seen by the reference only
    assert str(native.value) == str(python.value)
    assert str(native.value).startswith(f"{op}: ")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_codes_are_close_to_the_values(dtype, level):
    x = torch.randn(50, 333).to(dtype)
    for symmetric in (True, False):
        for op in (ops.quantize_per_token, ops.quantize_per_tensor):
            q, scale, zero = (
                op(x, symmetric) if op is ops.quantize_per_token else op(x, None, None, symmetric)
            )
            error = (q.float() - zero) * scale - x.float()
            assert (error.abs() <= 0.5001 * scale + 1e-6).all()


def test_static_codes_saturate(level):
    x = torch.tensor([-1e30, -129.0, -128.0, 0.5, 1.5, 127.0, 128.0, 1e30, float("inf")] * 9)
    q, scale, _ = ops.quantize_per_tensor(x, torch.tensor(1.0))
    assert q[:9].tolist() == [-128, -128, -128, 0, 2, 127, 127, 127, 127]
    assert torch.equal(q, q[:9].repeat(9))
    assert scale == 1.0
    u, _, zero = ops.quantize_per_tensor(x, torch.tensor(1.0), ZERO, False)
    assert u[:9].tolist() == [0, 0, 0, 3, 5, 130, 131, 255, 255]
    assert zero == 3
    bad = torch.full((40,), float("nan"))
    assert (ops.quantize_per_tensor(bad, torch.tensor(1.0), ZERO, False)[0] == 3).all()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("symmetric", [True, False])
def test_values_that_are_not_finite_reach_the_scale(value, symmetric, level):
    for place in (0, 37, 99):
        x = torch.randn(4, 100)
        x[2, place] = value
        q, scale, zero = ops.quantize_per_token(x, symmetric)
        assert scale.isfinite().flatten().tolist() == [True, True, False, True]
        assert ((q.float() - zero) * scale)[2].isnan().all()
        q, scale, zero = ops.quantize_per_tensor(x, None, None, symmetric)
        assert ((q.float() - zero) * scale).isnan().all()


@settings(max_examples=40, deadline=None)
@given(
    shape=st.lists(st.integers(0, 70), min_size=1, max_size=3),
    exponent=st.integers(-140, 120),
    symmetric=st.booleans(),
)
def test_any_shape_and_magnitude(shape, exponent, symmetric):
    x = torch.randn(shape) * 2.0**exponent
    for op, args in (
        ("quantize_per_token", (x, symmetric)),
        ("quantize_per_tensor", (x, None, None, symmetric)),
    ):
        for got, want in zip(getattr(ops, op)(*args), specs()[op].reference(*args), strict=True):
            assert torch.equal(got, want)

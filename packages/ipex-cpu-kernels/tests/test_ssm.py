# SPDX-License-Identifier: Apache-2.0
"""The state space family: bad input, sequences in pieces, the scan against its single steps."""

from __future__ import annotations

import pytest
import refusals
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import ipex_core  # noqa: F401
from ipex_core.errors import OpArgumentError
from ipex_core.library.kernels import specs
from ipex_core.nn import functional

ops = torch.ops.ipex
U = torch.randn(2, 6, 5)
A = -torch.rand(6, 4)
B = torch.randn(2, 4, 5)
STATE = torch.randn(2, 6, 4)
ROW = torch.randn(2, 6)
BN = torch.randn(2, 4)
TAPS = torch.randn(6, 4)
HEADS = torch.randn(2, 3, 6, 4)


def bad_calls():
    scan, update = "selective_scan_fn", "selective_state_update"
    conv, step = "causal_conv1d_fn", "causal_conv1d_update"
    yield conv, (U[0], TAPS), "x must be 3-D \\[B, D, L\\], got 2-D"
    yield conv, (U.long(), TAPS), "x must have dtype"
    yield (
        conv,
        (U, TAPS.half()),
        "weight must have the dtype of x = float32 or float32, got float16",
    )
    yield (
        conv,
        (U, TAPS[:5]),
        "weight must have shape \\[6, W\\] with W from 1 to 64, got \\[5, 4\\]",
    )
    yield conv, (U, TAPS[:, :0]), "weight must have shape"
    yield conv, (U, torch.ones(6, 65)), "weight must have shape"
    yield conv, (U, TAPS, TAPS), "bias must have shape \\[6\\]"
    yield conv, (U, TAPS, None, STATE), "initial_states must have shape \\[2, 6, 3\\]"
    yield conv, (U, TAPS, None, STATE[..., :3].half()), "initial_states must have the dtype of x"
    yield conv, (U, TAPS, None, None, "gelu"), "activation must be 'none' or 'silu', got 'gelu'"
    yield step, (U[0, 0], STATE, TAPS), "x must be 2-D \\[B, D\\] or 3-D \\[B, D, T\\], got 1-D"
    yield step, (ROW, STATE, TAPS[0]), "weight must have shape"
    yield step, (ROW, STATE[..., :2], TAPS), "conv_state must have .* with S at least 3"
    yield step, (ROW, STATE[:1], TAPS), "conv_state must have shape \\[2, 6, S\\]"
    yield step, (ROW, STATE.half(), TAPS), "conv_state must have the dtype of x"
    yield step, (ROW, STATE[:, :1].expand(2, 6, 4), TAPS), "conv_state must have no broadcast"
    yield step, (ROW, STATE[..., :0], TAPS[:, :1]), "conv_state must have .* with S at least 1"
    yield step, (ROW, STATE, TAPS, None, "swish"), "activation must be"
    lengths = torch.tensor([3, -1])
    yield step, (ROW, STATE, TAPS, None, "none", lengths), "must not be negative, got -1"
    yield step, (U, STATE, TAPS, None, "none", lengths.int()), "must not be negative, got -1"
    yield step, (ROW, STATE, TAPS, None, "none", lengths.float()), "have dtype int32 or int64"
    yield (
        step,
        (ROW, STATE, TAPS, None, "none", lengths[:1]),
        "cache_seqlens must have shape \\[2\\]",
    )
    yield scan, (U[0], U, A, B, B), "u must be 3-D \\[B, D, L\\], got 2-D"
    yield scan, (U.double(), U, A, B, B), "u must have dtype"
    yield scan, (U, U[:1], A, B, B), "delta must have the shape of u"
    yield scan, (U, U.half(), A, B, B), "delta must have the dtype of u"
    yield scan, (U, U, A[:5], B, B), "A must have shape \\[6, N\\], got \\[5, 4\\]"
    yield scan, (U, U, A[:, :0], B[:, :0], B[:, :0]), "A must have shape"
    yield scan, (U, U, A.to(torch.complex64), B, B), "A must have the dtype of u = float32 or"
    yield scan, (U, U, A, B[:, :3], B), "B must have shape \\[6, 4\\], \\[2, 4, 5\\] or"
    yield scan, (U, U, A, B, B[..., :4]), "C must have shape"
    yield scan, (U, U, A, B, B[:, None].expand(2, 4, 4, 5)), "C must have .* where G divides 6"
    yield scan, (U, U, A, B, B[:, None][:, :0]), "C must have shape"
    yield scan, (U, U, A, B, B, A), "D must have shape \\[6\\], got \\[6, 4\\]"
    yield scan, (U, U, A, B, B, None, B), "z must have the shape of u"
    yield scan, (U, U, A, B, B, None, None, A[0]), "delta_bias must have shape \\[6\\]"
    yield (
        scan,
        (U, U, A, B, B, None, None, None, False, STATE[:1]),
        "initial_state must have shape \\[2, 6, 4\\]",
    )
    yield (
        scan,
        (U, U, A, B, B, None, None, None, False, STATE.half()),
        "initial_state must have dtype float32, got float16",
    )
    yield update, (STATE[0], ROW, ROW, A, BN, BN), "state must be 3-D \\[B, D, N\\] or 4-D"
    yield update, (STATE, ROW.int(), ROW, A, BN, BN), "x must have dtype"
    yield update, (STATE.half(), ROW, ROW, A, BN, BN), "state must have the dtype of x"
    yield update, (STATE[..., :0], ROW, ROW, A, BN, BN), "state must have a last dimension"
    yield (
        update,
        (STATE[:1].expand(2, 6, 4), ROW, ROW, A, BN, BN),
        "state must have no broadcast dimension, got strides \\[0, 4, 1\\]",
    )
    yield update, (STATE, U, ROW, A, BN, BN), "x must have shape \\[2, 6\\]"
    yield update, (STATE, ROW, ROW[:, :5], A, BN, BN), "dt must have shape \\[2, 6\\]"
    yield update, (STATE, ROW, ROW, A.t(), BN, BN), "A must have shape \\[6, 4\\]"
    yield update, (STATE, ROW, ROW, A, BN[:1], BN), "B must have shape \\[2, 4\\] or \\[2, G, 4\\]"
    yield update, (STATE, ROW, ROW, A, BN, BN[:, None].expand(2, 2, 4)), "C must have shape"
    yield update, (STATE, ROW, ROW, A, BN, BN, A), "D must have shape \\[6\\]"
    yield update, (STATE, ROW, ROW, A, BN, BN, None, U), "z must have shape \\[2, 6\\]"
    yield update, (STATE, ROW, ROW, A, BN, BN, None, None, A), "dt_bias must have shape"
    yield update, (HEADS, ROW, ROW, A, BN, BN), "x must have shape \\[2, 3, 6\\]"
    yield (
        update,
        (HEADS, HEADS[..., 0], HEADS[..., 0], A.expand(3, 6, 4), BN[:, None].expand(2, 2, 4), BN),
        "B must have .* where G divides 3",
    )


@refusals.each(bad_calls())
def test_bad_input(op, args, text):
    refusals.assert_refused(op, args, text)


def scan_inputs(batch, dim, length, size, dtype=torch.float32):
    torch.manual_seed(batch * 1000 + dim * 100 + length * 10 + size)
    return {
        "u": torch.randn(batch, dim, length).to(dtype),
        "delta": torch.randn(batch, dim, length).to(dtype),
        "A": -torch.rand(dim, size) * 4,
        "B": torch.randn(batch, size, length).to(dtype),
        "C": torch.randn(batch, size, length).to(dtype),
        "D": torch.randn(dim),
        "z": torch.randn(batch, dim, length).to(dtype),
        "delta_bias": torch.randn(dim),
        "delta_softplus": True,
    }


def piece(inputs, begin, end):
    """The steps [begin, end) of the arguments of a scan."""
    return {
        name: value[..., begin:end] if name in ("u", "delta", "B", "C", "z") else value
        for name, value in inputs.items()
    }


@settings(max_examples=25, deadline=None)
@given(
    dim=st.integers(1, 40),
    size=st.sampled_from([1, 3, 8, 16, 21, 64]),
    lengths=st.lists(st.integers(0, 70), min_size=1, max_size=4),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_scan_in_pieces_equals_the_whole(dim, size, lengths, dtype):
    inputs = scan_inputs(1, dim, sum(lengths), size, dtype)
    want, want_state = ops.selective_scan_fn(**inputs)
    state, outputs, begin = None, [], 0
    for length in lengths:
        part = piece(inputs, begin, begin + length)
        y, state = ops.selective_scan_fn(**part, initial_state=state)
        outputs.append(y)
        begin += length
    assert torch.equal(torch.cat(outputs, -1), want)
    assert torch.equal(state, want_state)


@pytest.mark.parametrize("size", [5, 16, 64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_scan_equals_single_steps(dtype, size, level):
    inputs = scan_inputs(2, 37, 9, size, dtype)
    want, want_state = ops.selective_scan_fn(**inputs)
    state = torch.zeros(2, 37, size)
    rename = {"u": "x", "delta": "dt", "delta_bias": "dt_bias", "delta_softplus": "dt_softplus"}
    for i in range(9):
        step = {
            rename.get(k, k): v[..., 0] if k in ("u", "delta", "B", "C", "z") else v
            for k, v in piece(inputs, i, i + 1).items()
        }
        y = ops.selective_state_update(state, **step)
        tolerance = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}[dtype]
        torch.testing.assert_close(y, want[..., i], rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(state, want_state, rtol=1e-4, atol=1e-5)


def test_layout_follows_the_input():
    inputs = scan_inputs(2, 24, 10, 16)
    want, _ = ops.selective_scan_fn(**inputs)
    assert want.is_contiguous()
    last = {
        k: v.mT.contiguous().mT if k in ("u", "delta", "B", "C", "z") else v
        for k, v in inputs.items()
    }
    got, _ = ops.selective_scan_fn(**last)
    assert got.mT.is_contiguous()
    assert torch.equal(got, want)


def test_long_scan_stays_accurate(level):
    """Errors of the exponential must not add up over thousands of steps."""
    inputs = scan_inputs(1, 16, 4000, 4)
    inputs["A"] = inputs["A"] * 1e-3  # a memory of thousands of steps
    _, got = ops.selective_scan_fn(**inputs)
    wide = {k: v.double() if isinstance(v, torch.Tensor) else v for k, v in inputs.items()}
    _, want = specs()["selective_scan_fn"].reference(**wide)
    torch.testing.assert_close(got.double(), want, rtol=1e-4, atol=1e-4)


@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_state_update_fuzz(data):
    """Any sizes, heads and groups; the state may be a slice of a larger cache."""
    batch, groups, per_group = (data.draw(st.integers(1, 3)) for _ in range(3))
    heads, dim, size = (
        groups * per_group,
        data.draw(st.integers(1, 70)),
        data.draw(st.integers(1, 40)),
    )
    cache = torch.randn(batch + 2, heads, dim, size)
    slots = cache[1:-1]
    args = (
        torch.randn(batch, heads, dim),
        torch.rand(batch, heads, 1).expand(batch, heads, dim),
        -torch.rand(heads, 1, 1).expand(heads, dim, size)
        if data.draw(st.booleans())
        else -torch.rand(heads, dim, size),
        torch.randn(batch, groups, size),
        torch.randn(batch, groups, size),
    )
    want_state, outside = slots.clone(), (cache[0].clone(), cache[-1].clone())
    want = specs()["selective_state_update"].reference(want_state, *args)
    got = ops.selective_state_update(slots, *args)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(slots, want_state, rtol=1e-4, atol=1e-4)
    assert torch.equal(cache[0], outside[0])
    assert torch.equal(cache[-1], outside[1])


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_convolution_in_pieces_equals_the_whole(data):
    """Prefill in pieces, then steps on a state or a circular buffer, give the outputs of one long sequence."""
    dim, width = data.draw(st.integers(1, 40)), data.draw(st.integers(1, 6))
    dtype = data.draw(st.sampled_from([torch.float32, torch.bfloat16]))
    pieces = data.draw(st.lists(st.integers(0, 30), min_size=1, max_size=4))
    rounds = data.draw(
        st.lists(st.integers(0, 6), min_size=1, max_size=4)
    )  # 0: a step without dimension
    circular = data.draw(st.booleans())
    size = data.draw(st.integers(max(1, width - 1), width + 4))
    total = sum(pieces) + sum(max(1, n) for n in rounds)
    x = torch.randn(2, dim, total).to(dtype)
    if data.draw(st.booleans()):
        x = x.mT.contiguous().mT
    weight, bias = torch.randn(dim, width).to(dtype), torch.randn(dim).to(dtype)
    want, want_last = ops.causal_conv1d_fn(x, weight, bias)

    outputs, states, done = [], None, 0
    for length in pieces:
        y, states = ops.causal_conv1d_fn(x[..., done : done + length], weight, bias, states)
        outputs.append(y)
        done += length
    buffer = torch.zeros(2, dim, size, dtype=dtype)
    for i in range(width - 1):
        place = (done - width + 1 + i) % size if circular else size - width + 1 + i
        buffer[..., place] = states[..., i]
    for length in rounds:
        new = x[..., done] if length == 0 else x[..., done : done + length]
        lengths = torch.full((2,), done, dtype=torch.int32) if circular else None
        y = ops.causal_conv1d_update(new, buffer, weight, bias, "silu", lengths)
        outputs.append(y.unsqueeze(-1) if length == 0 else y)
        done += max(1, length)
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(torch.cat(outputs, -1), want, rtol=tolerance, atol=tolerance)
    for i in range(width - 1):
        place = (done - width + 1 + i) % size if circular else size - width + 1 + i
        assert torch.equal(buffer[..., place], want_last[..., i])


def test_functions_of_models():
    """The signatures of `ipex.llm.modules.MambaMixer`."""
    x, weight, bias = torch.randn(2, 6, 9), torch.randn(6, 4), torch.randn(6)
    y = functional.causal_conv1d_fn(x, weight, bias)
    out = torch.empty(2, 6, 3)
    again, last = functional.causal_conv1d_fn(
        x, weight, bias, return_final_states=True, final_states_out=out, activation="swish"
    )
    assert torch.equal(y, again)
    assert last is out
    assert torch.equal(last, x[..., -3:])
    _, last = functional.causal_conv1d_fn(x, weight, bias, None, True, activation=None)
    assert torch.equal(last, x[..., -3:])
    with pytest.raises(OpArgumentError, match="activation must be None, 'silu' or 'swish'"):
        functional.causal_conv1d_fn(x, weight, activation="gelu")
    with pytest.raises(OpArgumentError, match="final_states_out must be None"):
        functional.causal_conv1d_fn(x, weight, final_states_out=out)
    with pytest.raises(OpArgumentError, match="final_states_out must have shape"):
        functional.causal_conv1d_fn(x, weight, None, None, True, out[:1])

    state = x[..., 5:8].clone()
    step = functional.causal_conv1d_update(x[..., 8], state, weight, bias, "silu")
    torch.testing.assert_close(step, y[..., 8])
    assert torch.equal(state, x[..., 6:9])

    inputs = scan_inputs(2, 6, 9, 4)
    y, state = functional.selective_scan_fn(**inputs, return_last_state=True)
    assert torch.equal(functional.selective_scan_fn(**inputs), y)
    fresh = torch.zeros(2, 6, 4)
    one = functional.selective_state_update(
        fresh,
        *(inputs[k][..., 0] if k != "A" else inputs[k] for k in ("u", "delta", "A", "B", "C")),
    )
    assert one.shape == (2, 6)
    assert fresh.abs().sum() > 0
    assert state.shape == (2, 6, 4)

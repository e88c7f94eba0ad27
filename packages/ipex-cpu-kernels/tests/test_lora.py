# SPDX-License-Identifier: Apache-2.0
"""Multi-LoRA: bad input, any indices and segments, the two factors one after the other."""

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
X = torch.randn(5, 12)
LOW = torch.randn(5, 4)
DOWN = torch.randn(3, 4, 12)
UP = torch.randn(3, 12, 4)
IDS = torch.tensor([0, 2, -1, 1, 0])
LENGTHS = torch.tensor([3, 2])
TWO = torch.tensor([2, -1])


def t(*values, dtype=torch.int64):
    return torch.tensor(values, dtype=dtype)


def bad_calls():
    shrink, expand, part = "bgmv_shrink", "bgmv_expand", "bgmv_expand_slice"
    yield shrink, (LOW, X, DOWN.double(), IDS), "weights must have dtype"
    yield shrink, (LOW, X, DOWN[0], IDS), "weights must have shape \\[adapters, outputs, inputs\\]"
    yield shrink, (LOW, X, DOWN[:, None].expand(3, 2, 4, 12), IDS), "weights must have shape"
    yield shrink, (LOW, X.half(), DOWN, IDS), "input must have the dtype of weights = float32"
    yield (
        shrink,
        (LOW, X[:, :11], DOWN, IDS),
        "input must have shape \\[rows, 12\\], got \\[5, 11\\]",
    )
    yield shrink, (LOW.bfloat16(), X, DOWN, IDS), "out must have the dtype of weights"
    yield shrink, (LOW[:4], X, DOWN, IDS), "out must have shape \\[5, outputs\\], got \\[4, 4\\]"
    yield shrink, (LOW[:, :3], X, DOWN, IDS), "out must have at least the 4 columns of weights"
    yield shrink, (LOW[:1].expand(5, 4), X, DOWN, IDS), "out must have no broadcast dimension"
    yield shrink, (LOW, X, DOWN, IDS.short()), "indices must have dtype int32 or int64, got int16"
    yield shrink, (LOW, X, DOWN, IDS[None]), "indices must be 1-D"
    yield shrink, (LOW, X, DOWN, IDS[:4]), "indices must have shape \\[5\\], got \\[4\\]"
    for bad in (3, -2, 2**62, -(2**62)):
        ids = IDS.clone()
        ids[3] = bad
        yield shrink, (LOW, X, DOWN, ids), f"indices must be in \\[-1, 3\\), got {bad}"
        yield expand, (X, LOW, UP, ids), f"indices must be in \\[-1, 3\\), got {bad}"
        yield part, (X, LOW, UP, ids, 0, 3), "indices must be in"
        yield "sgmv_shrink", (LOW, X, DOWN, t(0, bad), LENGTHS), "indices must be in"
    yield part, (X, LOW, UP, IDS, 0, 13), "slice_size must be in \\[0, 12\\], the rows .* got 13"
    yield part, (X, LOW, UP, IDS, 0, -1), "slice_size must be in"
    yield part, (X, LOW, UP, IDS, 5, 8), "slice_offset must be in \\[0, 4\\] for 8 of 12 columns"
    yield part, (X, LOW, UP, IDS, -1, 8), "slice_offset must be in"
    yield part, (X, LOW, UP, IDS, 2**62, 8), "slice_offset must be in"
    yield part, (LOW, LOW, UP, IDS, 0, 8), "slice_offset must be in \\[0, -4\\]"
    shrink, expand, part = "sgmv_shrink", "sgmv_expand", "sgmv_expand_slice"
    yield shrink, (LOW, X, DOWN, TWO, LENGTHS[:1]), "seq_lens must have shape \\[2\\]"
    yield shrink, (LOW, X, DOWN, TWO, LENGTHS.float()), "seq_lens must have dtype int32 or int64"
    yield (
        shrink,
        (LOW, X, DOWN, TWO, t(3, 3)),
        "seq_lens must stay within the 5 rows of input, got 3",
    )
    yield expand, (X, LOW, UP, TWO, t(-1, 3)), "seq_lens must not be negative, got -1"
    yield expand, (X, LOW, UP, TWO, t(2, 2**63 - 1)), "seq_lens must stay within"
    yield expand, (X, LOW, UP, TWO, LENGTHS, True, t(0)), "seq_starts must have shape \\[2\\]"
    yield expand, (X, LOW, UP, TWO, LENGTHS, True, t(0, 2)), "without overlap, got 2 after row 3"
    yield expand, (X, LOW, UP, TWO, LENGTHS, True, t(-1, 3)), "without overlap, got -1 after row 0"
    yield expand, (X, LOW, UP, TWO, LENGTHS, True, t(0, 4)), "seq_lens must stay .* from row 4"
    yield expand, (X, LOW, UP, TWO, t(0, 0), True, t(6, 6)), "seq_lens must stay .* from row 6"
    yield part, (X, LOW, UP, TWO, LENGTHS, 9, 8), "slice_offset must be in"


@refusals.each(bad_calls())
def test_bad_input(op, args, text):
    refusals.assert_refused(op, args, text)


@settings(max_examples=80, deadline=None)
@given(data=st.data())
def test_any_integers_are_computed_or_refused(data):
    """Whatever the indices, lengths and starts: the result of the reference, or its error."""
    rows, adapters = data.draw(st.integers(0, 12)), data.draw(st.integers(0, 3))
    rank, features = data.draw(st.integers(1, 20)), data.draw(st.integers(1, 40))
    number = st.integers(-2, adapters)
    sequences = data.draw(st.integers(0, 4))
    weights = torch.randn(adapters, rank, features)
    input = torch.randn(rows, features)
    kind = data.draw(st.sampled_from(["bgmv", "sgmv", "starts"]))
    size = rows if kind == "bgmv" else sequences
    args = [data.draw(st.lists(number, min_size=size, max_size=size))]
    if kind != "bgmv":
        args.append(data.draw(st.lists(st.integers(-1, 6), min_size=size, max_size=size)))
    if kind == "starts":
        args.append(data.draw(st.lists(st.integers(-1, 14), min_size=size, max_size=size)))
    dtype = data.draw(st.sampled_from([torch.int32, torch.int64]))
    tensors = [torch.tensor(a, dtype=dtype) for a in args]
    if kind == "starts":
        tensors.insert(2, 0.5)
    name = "bgmv_shrink" if kind == "bgmv" else "sgmv_shrink"
    got, want = torch.ones(rows, rank), torch.ones(rows, rank)
    try:
        specs()[name].reference(want, input, weights, *tensors)
    except OpArgumentError as error:
        with pytest.raises(RuntimeError) as caught:
            getattr(ops, name)(got, input, weights, *tensors)
        assert str(caught.value) == str(error)
        assert torch.equal(got, torch.ones(rows, rank))
        return
    getattr(ops, name)(got, input, weights, *tensors)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rank", [4, 16, 33])
def test_both_factors(dtype, rank, level):
    """Shrink and expand give ``x A^T B^T`` of each row's adapter; the sequence forms give the same."""
    x = torch.randn(20, 200).to(dtype)
    a, b = torch.randn(3, rank, 200).to(dtype) / 14, torch.randn(3, 70, rank).to(dtype)
    lengths, numbers = t(7, 1, 9, 3), t(2, -1, 0, 2)
    rows = torch.repeat_interleave(numbers, lengths)
    starts = lengths.cumsum(0) - lengths
    y = torch.randn(20, 70).to(dtype)
    want = y.double()
    for i, number in enumerate(rows.tolist()):
        if number >= 0:
            want[i] += x[i].double() @ a[number].double().t() @ b[number].double().t() * 0.5
    low, out = torch.zeros(20, rank), y.clone()
    functional.bgmv_shrink(x, a, low, rows, 0.5)
    functional.bgmv_expand(low, b, out, rows)
    tolerance = {torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 4e-3}[dtype]
    torch.testing.assert_close(out.double(), want, rtol=tolerance, atol=tolerance)

    low2, out2 = torch.zeros(20, rank), y.clone()
    functional.sgmv_shrink(x, a, low2, starts, lengths, numbers, 4, 9, 0.5)
    functional.sgmv_expand(low2, b, out2, starts, lengths, numbers, 4, 9, add_inputs=True)
    assert torch.equal(low, low2)
    assert torch.equal(out, out2)

    halves = y.clone()
    for offset in (0, 35):
        part = b[:, offset : offset + 35]
        functional.sgmv_expand_slice(
            low, part, halves, starts, lengths, numbers, 4, 9, offset, 35, add_inputs=True
        )
    assert torch.equal(halves, out)
    again = y.clone()
    for offset in (0, 35):
        functional.bgmv_expand_slice(low, b[:, offset : offset + 35], again, rows, offset, 35)
    assert torch.equal(again, out)


def test_rows_without_an_adapter_are_left_alone(level):
    out = torch.full((5, 4), 7.0)
    ops.bgmv_shrink(out, X, DOWN, IDS)
    assert torch.equal(out[2], torch.full((4,), 7.0))
    assert not torch.equal(out[1], torch.full((4,), 7.0))
    out = torch.full((5, 12), 7.0)
    ops.bgmv_expand(out, LOW, UP, IDS, False)
    assert torch.equal(out[2], torch.full((12,), 7.0))


def test_columns_beside_the_slice_are_left_alone(level):
    out = torch.zeros(5, 40)
    ops.bgmv_expand_slice(out, LOW, UP, t(0, 0, 0, 0, 0), 9, 11, True)
    assert not out[:, :9].any()
    assert not out[:, 20:].any()
    assert out[:, 9:20].all()


def test_the_rows_of_others_do_not_matter():
    """A row's result has the same bits in any batch."""
    x, rows = torch.randn(33, 300), torch.randint(-1, 3, (33,))
    a = torch.randn(3, 16, 300)
    whole = torch.zeros(33, 16)
    ops.bgmv_shrink(whole, x, a, rows)
    for i in range(33):
        alone = torch.zeros(1, 16)
        ops.bgmv_shrink(alone, x[i : i + 1], a, rows[i : i + 1])
        assert torch.equal(alone[0], whole[i])

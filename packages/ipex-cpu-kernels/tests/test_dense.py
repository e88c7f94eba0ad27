# SPDX-License-Identifier: Apache-2.0
"""Dense products: what follows them, gates, and wrong arguments."""

from __future__ import annotations

import itertools

import pytest
import refusals
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional

import ipex_core  # noqa: F401
from ipex_core.woq import deinterleave_gate_up, interleave_gate_up

pytestmark = pytest.mark.usefixtures("no_gradients")

ops = torch.ops.ipex
X = torch.ones(3, 8)
PACKED = ops.pack_linear_weight(torch.ones(5, 8))
GATED = ops.pack_linear_weight(torch.ones(64, 8))
Y = torch.ones(3, 5)


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
STACK = torch.stack([PACKED, PACKED])
ENDS = torch.tensor([0, 1, 3])
BAD += [
    ("grouped_linear", (X[0], ENDS, STACK, 5), "x must be 2-D, got \\[8\\]"),
    ("grouped_linear", (X.int(), ENDS, STACK, 5), "x must have dtype"),
    ("grouped_linear", (X, ENDS.float(), STACK, 5), "offsets must have dtype int32, int64"),
    ("grouped_linear", (X, ENDS[:0], STACK, 5), "offsets must be 1-D and not empty"),
    ("grouped_linear", (X, ENDS[None], STACK, 5), "offsets must be 1-D and not empty"),
    ("grouped_linear", (X, ENDS + 1, STACK, 5), "offsets must start with 0, got 1"),
    ("grouped_linear", (X, torch.tensor([0, -1, 3]), STACK, 5), "not decrease, got -1 after 0"),
    ("grouped_linear", (X, torch.tensor([0, 9, 3]), STACK, 5), "not decrease, got 3 after 9"),
    (
        "grouped_linear",
        (X, torch.tensor([0, 1, 2]), STACK, 5),
        "end with x.shape\\[0\\] = 3, got 2",
    ),
    (
        "grouped_linear",
        (X, torch.tensor([0, 1, 4]), STACK, 5),
        "end with x.shape\\[0\\] = 3, got 4",
    ),
    ("grouped_linear", (X, ENDS, STACK, 0), "out_features must be positive"),
    ("grouped_linear", (X, ENDS, STACK[:1], 5), "packed_weight must be 2 float32 weights"),
    ("grouped_linear", (X, ENDS, STACK[:, :-1], 5), "packed_weight must be"),
    (
        "grouped_linear",
        (X, ENDS, STACK, 6),
        "got the header of a float32 weight of shape \\[5, 8\\] in row 0",
    ),
    ("grouped_linear", (X, ENDS, STACK, 5, torch.ones(5)), "bias must have shape \\[2, 5\\]"),
    ("grouped_linear", (X, ENDS, STACK, 5, torch.ones(2, 5).half()), "bias must have the dtype"),
    ("grouped_linear", (X, ENDS, STACK, 5, None, Y[:2]), "residual must have shape \\[3, 5\\]"),
    ("grouped_linear", (X, ENDS, STACK, 5, None, None, "no"), "activation must be one of"),
]
A, B = torch.ones(2, 3, 8), torch.ones(2, 8, 5)
BAD += [
    ("bmm", (X, B), "a must have at least 3 dimension"),
    ("bmm", (A[None], B), "a must be 3-D, got \\[1, 2, 3, 8\\]"),
    ("bmm", (A.int(), B), "a must have dtype"),
    ("bmm", (A, B.half()), "b must have the dtype of a = float32, got float16"),
    ("bmm", (A, B[:1]), "b must have shape \\[2, 8, N\\], got \\[1, 8, 5\\]"),
    ("bmm", (A, B.mT), "b must have shape \\[2, 8, N\\]"),
    ("bmm", (A, B[0]), "b must have shape"),
    ("bmm", (A, B, torch.ones(2, 3, 4)), "add must have shape \\[2, 3, 5\\]"),
    ("bmm", (A, B, torch.ones(2, 3, 5).half()), "add must have the dtype of a"),
    ("bmm", (A, B, None, 1.0, 4), "out_features must be b.shape\\[2\\] = 5 or 0, got 4"),
    ("bmm", (A, STACK), "out_features must be positive where b is packed, got 0"),
    ("bmm", (A, STACK[:1], None, 1.0, 5), "b must be 2 float32 weights"),
    (
        "bmm",
        (A, STACK, None, 1.0, 6),
        "got the header of a float32 weight of shape \\[5, 8\\] in row 0",
    ),
]


@refusals.each(BAD)
def test_bad_input(op, args, text):
    refusals.assert_refused(op, args, text)


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


def test_groups_are_linear_layers(level):
    """Also with groups of very unequal size, in which rows, panels or both make several tasks."""
    torch.manual_seed(3)
    for counts, k, n in (((1, 300, 0, 2), 48, 70), ((0, 64, 65, 1), 40, 300), ((500,), 8, 33)):
        weights = torch.randn(len(counts), n, k) / k**0.5
        packed = torch.stack([ops.pack_linear_weight(w) for w in weights])
        ends = torch.tensor([0, *itertools.accumulate(counts)])
        x = torch.randn(sum(counts), k)
        want = [functional.linear(p, w) for p, w in zip(x.split(counts), weights, strict=True)]
        got = ops.grouped_linear(x, ends, packed, n)
        torch.testing.assert_close(got, torch.cat(want), rtol=1e-4, atol=1e-4)


@given(
    offsets=st.lists(st.integers(-3, 9), min_size=1, max_size=6),
    rows=st.integers(0, 8),
    wide=st.booleans(),
)
@settings(max_examples=150, deadline=None)
def test_any_offsets_give_a_result_or_an_error(offsets, rows, wide):
    x = torch.randn(rows, 8)
    packed = PACKED.expand(len(offsets) - 1, -1).contiguous()
    ends = torch.tensor(offsets, dtype=torch.int64 if wide else torch.int32)
    valid = offsets[0] == 0 and offsets[-1] == rows and sorted(offsets) == offsets
    if valid:
        got = ops.grouped_linear(x, ends, packed, 5)
        torch.testing.assert_close(got, x.sum(1, keepdim=True).expand(-1, 5))
    else:
        with pytest.raises(RuntimeError, match="offsets must"):
            ops.grouped_linear(x, ends, packed, 5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5])
def test_products_with_few_rows(level, dtype, rows):
    """Both layouts of the second factor, sizes around the vectors, also in a wider matrix."""
    torch.manual_seed(4)
    tolerance = {torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 4e-3}[dtype]
    for batch, k, n in (
        (2, 1, 1),
        (2, 70, 1),
        (3, 7, 15),
        (1, 33, 47),
        (2, 515, 300),
        (1, 19, 1100),
        (2, 64, 129),
        (2, 0, 9),
    ):
        a = torch.randn(rows, batch, k).to(dtype).transpose(0, 1)
        add = torch.randn(batch, rows, n).to(dtype)
        b = (torch.randn(batch, k + 1, n + 3) / max(k, 1) ** 0.5).to(dtype)[:, 1:, 2:-1]
        want = (0.5 * (a.double() @ b.double()) + add).to(dtype)
        for factor in (b, b.mT.contiguous().mT):
            got = ops.bmm(a, factor, add, 0.5)
            torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)
    assert ops.bmm(a[:0], b[:0]).shape == (0, rows, 9)
    assert ops.bmm(a, b[:, :, :0]).shape == (2, rows, 0)


# Below AVX-512 rows become float: 11 and 23 rows are too few, 97 are more than a step, and of 3,500 columns
# not all fit; an odd number of columns needs a zero behind each row.
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("columns", [1, 63, 65, 1800, 3501])
@pytest.mark.parametrize("rows", [11, 12, 23, 24, 97, 200])
def test_products_of_16_bit_rows(level, rows, columns, dtype):
    x, weight, bias, residual = (
        torch.randn(*shape).to(dtype)
        for shape in ((rows, columns + 3), (71, columns), (71,), (rows, 71))
    )
    x = x[:, :columns]  # rows that do not lie side by side
    packed = ops.pack_linear_weight(weight)
    result = ops.linear(x, packed, 71, bias, residual, "relu")
    sums = (x.double() @ weight.double().T + bias.double()).relu() + residual.double()
    torch.testing.assert_close(result.double(), sums, rtol=2**-7, atol=2e-2)


@pytest.mark.parametrize("rows", [1, 4, 40])
@pytest.mark.parametrize("transposed", [False, True])
def test_products_have_the_same_bits_for_any_number_of_threads(level, rows, transposed):
    torch.manual_seed(5)
    a, b = torch.randn(3, rows, 300), torch.randn(3, 300, 600)
    a[1, 0, 7], b[2, 4, 5] = float("nan"), float("inf")
    b = b.mT.contiguous().mT if transposed else b
    before, results = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            results.append(ops.bmm(a, b))
    finally:
        torch.set_num_threads(before)
    for result in results:
        torch.testing.assert_close(result, results[0], rtol=0, atol=0, equal_nan=True)
    assert results[0][1, 0].isnan().all()
    assert not results[0][2, :, 5].isfinite().any()
    assert results[0][2, :, :5].isfinite().all()

# SPDX-License-Identifier: Apache-2.0
"""The 8-bit integer family: quantization of activations and linear layers on int8 weights."""

from __future__ import annotations

import pytest
import refusals
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import ipex_core  # noqa: F401
from ipex_core.errors import OpArgumentError
from ipex_core.library.kernels import specs
from ipex_core.ops.woq_linear import ACT_QUANT_MODES
from ipex_core.ops.woq_weight import woq_weight
from ipex_core.packing import int8 as _packed_int8
from ipex_core.packing import woq

ops = torch.ops.ipex
X = torch.randn(3, 8)
SCALE = torch.tensor(0.5)
ZERO = torch.tensor(3, dtype=torch.int32)
W = torch.randint(-128, 128, (5, 8), dtype=torch.int8)
PACKED = ops.pack_int8_weight(W)
SCALES = torch.rand(5) + 0.1
CODES = torch.randint(-128, 128, (3, 8), dtype=torch.int8)


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

    yield "pack_int8_weight", (W.float(),), "weight must have dtype int8, got float32"
    yield "pack_int8_weight", (W[0],), "weight must be 2-D, not empty and of at most 65536 columns"
    yield "pack_int8_weight", (W[:0],), "weight must be 2-D, not empty"
    yield "pack_int8_weight", (W[:, :1].expand(5, 65537),), "got \\[5, 65537\\]"
    yield "unpack_int8_weight", (PACKED, 0, 8), "out_features must be positive, got 0"
    yield "unpack_int8_weight", (PACKED, 5, -1), "in_features must be positive, got -1"
    yield "unpack_int8_weight", (PACKED, 5, 9), "packed must be a weight of shape \\[5, 9\\]"
    yield (
        "unpack_int8_weight",
        (torch.zeros_like(PACKED), 5, 8),
        "got a tensor without the header of a packed weight",
    )
    linear = "int8_linear"
    good = (PACKED, 5, SCALES)
    yield linear, (X.double(), *good), "x must have dtype float32, bfloat16, float16, int8, uint8"
    yield linear, (torch.tensor(1.0), *good), "x must have at least 1 dimension"
    yield linear, (X, PACKED, 0, SCALES), "out_features must be positive, got 0"
    yield linear, (X, PACKED, 6, SCALE), "got the header of a quantized weight of shape \\[5, 8\\]"
    yield linear, (X[:, :4], *good), "packed_weight must be a weight of shape \\[5, 4\\]"
    yield linear, (X, ops.pack_linear_weight(torch.ones(5, 8)), 5, SCALES), "packed_weight must be"
    yield linear, (X, PACKED, 5, SCALES.double()), "weight_scale must have dtype float32"
    yield linear, (X, PACKED, 5, SCALES[:4]), "weight_scale must have one element or one for each"
    yield linear, (CODES, *good), "x_scale must be given for x of dtype int8, got None"
    yield linear, (CODES, *good, SCALES), "x_scale must have one element or one for each row of x"
    yield linear, (X, *good, SCALES[:3]), "x_scale must have one element, got \\[3\\]"
    yield linear, (X, *good, SCALE * 0), "x_scale must be finite and at least 2"
    yield linear, (X, *good, None, ZERO), "x_zero must be None without x_scale"
    yield linear, (X, *good, SCALE, ZERO), "x_zero must be None for symmetric codes"
    yield linear, (CODES, *good, SCALE, ZERO.long()), "x_zero must have dtype int32"
    yield linear, (CODES, *good, SCALE, ZERO.repeat(3)), "x_zero must have as many elements as"
    yield linear, (CODES, *good, SCALE, ZERO * 50), "x_zero must be in \\[-128, 127\\]"
    codes = (CODES.view(torch.uint8), *good, SCALE)
    yield linear, (*codes, -ZERO), "x_zero must be in \\[0, 255\\]"
    yield linear, (X, *good, None, None, SCALES[:4]), "bias must be 1-D of size out_features = 5"
    yield linear, (X, *good, None, None, SCALES.half()), "bias must have the dtype of the result"
    yield linear, (X, *good, None, None, None, X), "residual must have shape \\[3, 5\\]"
    rest = (None, None, None, None)
    yield linear, (X, *good, *rest, "tanh"), "activation must be one of"
    yield linear, (X, *good, *rest, "relu", None, None, "silu"), "activation must be none where"
    modes = (*rest, "none", None, None, "none")
    yield linear, (X, *good, *modes, "per_row"), "act_quant must be per_token or per_tensor"
    to = (*modes, "per_token", True)
    yield linear, (X, *good, *to, torch.int32), "dtype must be float32, bfloat16, float16, int8"
    yield linear, (X, *good, *to, torch.int8), "output_scale must be finite and at least 2"
    yield linear, (X, *good, *to, torch.int8, 1.0, 128), "output_zero must be in \\[-128, 127\\]"
    yield linear, (X, *good, *to, torch.uint8, 1.0, -1), "output_zero must be in \\[0, 255\\]"


@refusals.each(bad_calls())
def test_bad_input(op, args, text):
    refusals.assert_refused(op, args, text)


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


@pytest.mark.parametrize(("n", "k"), [(1, 1), (33, 7), (70, 4099)])
def test_packing_is_exact_and_the_same_in_python(n, k):
    weight = torch.randint(-128, 128, (n, k), dtype=torch.int8)
    packed = ops.pack_int8_weight(weight)
    assert torch.equal(packed, _packed_int8.pack(weight))
    assert torch.equal(ops.unpack_int8_weight(packed, n, k), weight)


@pytest.mark.parametrize("k", [1, 2, 3, 4, 63, 64, 65, 127, 2049])
@pytest.mark.parametrize(("code", "value"), [(-128, -128), (127, -128), (-128, 127), (255, -128)])
def test_extreme_codes_are_exact(k, code, value, level):
    """No sum of two or four products saturates on the way."""
    dtype = torch.uint8 if code > 127 else torch.int8
    x = torch.full((7, k), code, dtype=dtype)
    packed = ops.pack_int8_weight(torch.full((40, k), value, dtype=torch.int8))
    y = ops.int8_linear(x, packed, 40, torch.tensor(1.0), torch.tensor(1.0))
    assert (y == float(code * value * k)).all()


def test_deepest_sums_do_not_overflow(level):
    packed = ops.pack_int8_weight(torch.full((1, 65536), -128, dtype=torch.int8))
    x = torch.full((2, 65536), 255, dtype=torch.uint8)
    y = ops.int8_linear(x, packed, 1, torch.tensor(1.0), torch.tensor(1.0))
    assert (y == -255.0 * 128 * 65536).all()


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("rows", [1, 5, 30, 200])
def test_threads_do_not_change_the_bits(rows, threads):
    packed, scale = ops.pack_int8_weight(W.repeat(40, 50)), SCALES.repeat(40)
    x = torch.randn(rows, 400)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        want = ops.int8_linear(x, packed, 200, scale)
        torch.set_num_threads(threads)
        assert torch.equal(ops.int8_linear(x, packed, 200, scale), want)
    finally:
        torch.set_num_threads(before)


def test_row_with_nan_does_not_reach_other_rows(level):
    x = torch.randn(40, 8)
    x[7, 3], x[9, 1] = float("nan"), float("inf")
    y = ops.int8_linear(x, PACKED, 5, SCALES)
    assert y[[7, 9]].isnan().all()
    y[[7, 9]] = 0
    assert y.isfinite().all()
    assert ops.int8_linear(x, PACKED, 5, SCALES, act_quant="per_tensor").isnan().all()


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_arguments_give_the_reference_or_its_error(data):
    draw = data.draw
    m, k, n = (draw(st.integers(low, 70)) for low in (0, 1, 1))
    dtypes = [torch.float32, torch.bfloat16, torch.int8, torch.uint8]
    x = (torch.randn(m, k) * 50).to(draw(st.sampled_from(dtypes)))
    weight = torch.randint(-128, 128, (n, k), dtype=torch.int8)
    weight_scale = torch.rand(draw(st.sampled_from([1, n, n + 1]))) / k
    counts = st.sampled_from([None, 1, m, m + 1])
    rows, zeros = draw(counts), draw(counts)
    args = (
        x,
        ops.pack_int8_weight(weight),
        n,
        weight_scale,
        None if rows is None else torch.rand(rows) + 0.01,
        None if zeros is None else torch.randint(-10, 100, (zeros,), dtype=torch.int32),
    )
    options = {
        "bias": torch.randn(n) if draw(st.booleans()) else None,
        "activation": draw(st.sampled_from(["none", "relu", "silu"])),
        "act_quant": draw(st.sampled_from(["per_token", "per_tensor"])),
        "symmetric": draw(st.booleans()),
        "dtype": draw(st.sampled_from([None, torch.float32, torch.int8])),
        "output_scale": 0.05,
    }
    spec = specs()["int8_linear"]
    try:
        spec.check(spec.bind(*args, **options))
        want = spec.reference(*args, **options)
    except OpArgumentError as error:
        with pytest.raises(RuntimeError) as caught:
            ops.int8_linear(*args, **options)
        assert str(caught.value) == str(error)
        return
    got = ops.int8_linear(*args, **options)
    rtol, atol = spec.tolerance[got.dtype]
    torch.testing.assert_close(got.double(), want.double(), rtol=rtol, atol=atol)


WEIGHTS = [
    ("int4", 32, False, {}),
    ("int4", 64, True, {"act_order": True}),
    ("int4", -1, False, {}),
    ("int8", 40, False, {}),
    ("int8", -1, True, {}),
    ("nf4", 32, True, {}),
    ("fp4", -1, True, {}),
]


@pytest.mark.parametrize("mode", ACT_QUANT_MODES[1:])
def test_woq_linear_int8_is_the_reference(mode, level):
    """Every format with every way to share scales, few and many rows, K not a multiple of a block."""
    spec = specs()["woq_linear"]
    for format, group, symmetric, options in WEIGHTS:
        for m, k, n in ((1, 75, 33), (6, 320, 100), (33, 203, 65)):
            parts = (format, group, symmetric, torch.float32)
            packed = woq_weight(n, k, *parts, order="vnni", **options)
            rest = (None, None, "none", None, None, "none", "int8", mode)
            args = (torch.randn(m, k) + 0.3, packed, n, *rest)
            torch.testing.assert_close(
                ops.woq_linear(*args), spec.reference(*args), rtol=1e-4, atol=1e-4
            )


@pytest.mark.parametrize("rows", [1, 40])
@pytest.mark.parametrize(("format", "k"), [("int4", 20000), ("int8", 9000), ("int8", 33000)])
def test_woq_linear_int8_with_deep_groups(format, k, rows, level):
    """Chunks longer than what is laid out at a time; extreme codes."""
    weight = torch.full((32, k), -7.0 if format == "int4" else -127.0)
    qweight, scales, zeros = woq.quantize(weight, format, -1, True, torch.float32)
    layout = woq.layout_of(qweight, scales, zeros, format, k, -1, None, "vnni")
    packed = woq.pack(qweight, scales, zeros, layout, None)
    for mode in ("per_batch", "per_batch_sym"):
        rest = (None, None, "none", None, None, "none", "int8", mode)
        y = ops.woq_linear(torch.ones(rows, k), packed, 32, *rest)
        want = torch.full_like(y, weight[0, 0].item() * k)
        torch.testing.assert_close(y, want, rtol=1e-4, atol=1e-4)

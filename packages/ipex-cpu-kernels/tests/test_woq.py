# SPDX-License-Identifier: Apache-2.0
"""Quantized weights: exact packing in every format, all tiers of woq_linear, wrong arguments."""

from __future__ import annotations

import itertools

import pytest
import refusals
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import ipex_core  # noqa: F401
from ipex_core.errors import OpArgumentError
from ipex_core.library.kernels import specs
from ipex_core.ops.woq_weight import woq_parts, woq_weight
from ipex_core.packing import woq as _woq
from ipex_core.woq import interleave_gate_up

ops = torch.ops.ipex
FORMATS = list(_woq.FORMATS)
SCALES = list(_woq.SCALE_DTYPES)


def bits(x):
    return x.reshape(-1).view(torch.uint8)


def layout_of(parts, order="dot"):
    qweight, scales, zeros, format, k, group, g_idx = parts
    return _woq.layout_of(qweight, scales, zeros, format, k, group, g_idx, order)


def variants():
    for format, (n, k), group, order in itertools.product(
        FORMATS, ((1, 1), (16, 8), (33, 41), (70, 200)), (-1, 16, 56), ("dot", "vnni")
    ):
        if order == "dot" or not format.startswith("fp8"):
            yield format, n, k, group, order


@pytest.mark.parametrize("act_order", [False, True])
def test_round_trip_is_exact(act_order):
    for i, (format, n, k, group, order) in enumerate(variants()):
        symmetric = format not in ("int8", "int4") or i % 2 == 0
        scale_dtype = SCALES[i % len(SCALES)]
        parts = woq_parts(n, k, format, group, symmetric, scale_dtype, act_order=act_order, seed=i)
        qweight, scales, zeros, _, _, _, g_idx = parts
        packed = ops.pack_woq_weight(*parts, order)
        at = layout_of(parts, order)
        assert torch.equal(packed, _woq.pack(qweight, scales, zeros, at, g_idx)), (format, n, k)
        back = ops.unpack_woq_weight(
            *(packed, n, k, format, group, scale_dtype),
            *(at.zeros, False, act_order, order),
        )
        assert torch.equal(bits(back[0]), bits(qweight)), (format, n, k)
        assert torch.equal(bits(back[1]), bits(scales))
        assert back[2].numel() == 0 if zeros is None else torch.equal(back[2], zeros)
        assert back[3].numel() == 0 if g_idx is None else torch.equal(back[3], g_idx)


@pytest.mark.parametrize("format", FORMATS)
def test_every_code_is_decoded(format, level):
    """All codes of a format, those for NaN and infinity included, through both decoders of the kernel."""
    dtype = _woq.QWEIGHT_DTYPES[format]
    codes = torch.arange(256, dtype=torch.int32).to(torch.uint8)
    qweight = codes.repeat(32, 1).view(dtype)
    k = 512 if _woq.is_nibble(format) else 256
    parts = (qweight, torch.full((32, 1), 0.5), None, format, k)
    for order in ("dot", "vnni")[: 1 if format.startswith("fp8") else 2]:
        packed = ops.pack_woq_weight(*parts, -1, None, order)
        got = ops.dequantize_woq_weight(packed, 32, k, torch.float32)
        want = _woq.dequantize(packed, _woq.read_layout(packed))
        torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)
    packed = ops.pack_woq_weight(*parts)
    eye = torch.eye(k)
    want = want.nan_to_num(0.0, 0.0, 0.0) if format.startswith("fp8") else want
    finite = qweight.clone().view(torch.uint8)
    if format.startswith("fp8"):  # a product with 0 must not turn the others into NaN
        finite[want == 0] = 0
    packed = ops.pack_woq_weight(finite.view(dtype), *parts[1:])
    for m in (1, 40):
        rows = torch.cat([ops.woq_linear(eye[i : i + m], packed, 32) for i in range(0, k, m)])
        torch.testing.assert_close(rows, want.t().contiguous())


CASES = [
    ("int8", -1, True, torch.float32, {}),
    ("int8", 64, False, torch.bfloat16, {}),
    ("int4", 32, True, torch.bfloat16, {}),
    ("int4", 128, False, torch.float16, {"act_order": True}),
    ("int4", -1, True, torch.float32, {}),
    ("nf4", 64, True, torch.float32, {}),
    ("fp4", 32, True, torch.float8_e8m0fnu, {}),
    ("fp8_e4m3", 128, True, torch.float32, {"blocks": True}),
    ("fp8_e5m2", -1, True, torch.float32, {}),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c[0]}-{c[1]}")
def test_all_tiers(case, dtype, level):
    format, group, symmetric, scale_dtype, options = case
    n, k = 131, 296
    packed = woq_weight(n, k, format, group, symmetric, scale_dtype, **options)
    weight = _woq.dequantize(packed, _woq.read_layout(packed), torch.float64)
    rtol, atol = specs()["woq_linear"].tolerance[dtype]
    x = torch.randn(70, k, generator=torch.Generator().manual_seed(1)).to(dtype)
    for m in (1, 2, 4, 5, 16, 31, 32, 70):
        got = ops.woq_linear(x[:m], packed, n)
        want = (x[:m].double() @ weight.t()).to(dtype)
        torch.testing.assert_close(got, want, rtol=rtol, atol=atol)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c[0]}-{c[1]}")
def test_few_rows_of_whole_tiles(case, dtype, level):
    """K and groups that tiles take whole, more steps of them than are decoded ahead, an odd number of panels."""
    format, group, symmetric, scale_dtype, options = case
    n, k = 163, 640
    packed = woq_weight(n, k, format, group, symmetric, scale_dtype, **options)
    weight = _woq.dequantize(packed, _woq.read_layout(packed), torch.float64)
    rtol, atol = specs()["woq_linear"].tolerance[dtype]
    x = torch.randn(33, k, generator=torch.Generator().manual_seed(1)).to(dtype)
    for m in (1, 2, 3, 4, 5, 8, 15, 16, 17, 32):
        got = ops.woq_linear(x[:m], packed, n)
        want = (x[:m].double() @ weight.t()).to(dtype)
        torch.testing.assert_close(got, want, rtol=rtol, atol=atol)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c[0]}-{c[1]}")
def test_rows_that_share_codes(case, dtype, level, threads):
    """Pieces of K with a tail, every number of rows of a tile, blocks of rows, a view and bytes at odd addresses."""
    format, group, symmetric, scale_dtype, options = case
    n, k = 71, 1100
    packed = woq_weight(n, k, format, group, symmetric, scale_dtype, **options)
    room = torch.zeros(packed.numel() + 5, dtype=torch.uint8)
    moved = room[5:]
    moved.copy_(packed)
    weight = _woq.dequantize(packed, _woq.read_layout(packed), torch.float64)
    rtol, atol = specs()["woq_linear"].tolerance[dtype]
    x = torch.randn(200, k + 3, generator=torch.Generator().manual_seed(1)).to(dtype)[:, 3:]
    want = (x.double() @ weight.t()).to(dtype)
    for m in (*range(1, 14), 31, 32, 33, 37, 95, 97, 200):
        for one in (packed, moved):
            got = ops.woq_linear(x[:m], one, n)
            torch.testing.assert_close(got, want[:m], rtol=rtol, atol=atol)


@pytest.mark.parametrize("m", [1, 2, 5])
@pytest.mark.parametrize("group", [-1, 32, 64, 256])
@pytest.mark.parametrize("format", ["nf4", "fp4", "int4", "int8"])
def test_one_large_activation(format, group, m, level):
    """Activations of a chunk share a scale: what they lose is small beside what the largest one adds."""
    n, k = 40, 1024
    parts = woq_parts(n, k, format, group)
    packed = ops.pack_woq_weight(*parts)
    weight = _woq.dequantize(packed, _woq.read_layout(packed), torch.float64)
    x = torch.randn(m, k, generator=torch.Generator().manual_seed(5))
    x[:, ::300] *= 1000
    x = x.bfloat16()
    got = ops.woq_linear(x, packed, n).double()
    error = (got - x.double() @ weight.t()).abs()
    size = x.double().abs() @ weight.abs().t()
    # Weights and results are rounded to 8 bits in the worst case, the products of scales a little.
    limit = 2.0**-8 + 2.0**-11
    assert bool((error <= limit * size).all()), float((error / size).max())


@pytest.mark.parametrize("format", ["fp8_e4m3", "fp8_e5m2"])
@pytest.mark.parametrize("share", [0.0, 0.001, 1.0])
def test_subnormal_codes_of_few_rows(format, share, level):
    """Decoding is quicker where there is none; the others must be exact beside them."""
    n, k = 64, 512
    generator = torch.Generator().manual_seed(2)
    size = torch.randn(n, k, generator=generator).abs() + 1
    tiny = torch.rand(n, k, generator=generator) < share
    least = 2.0**-9 if format == "fp8_e4m3" else 2.0**-16
    size[tiny] = least * torch.randint(0, 4, (n, k), generator=generator)[tiny]
    sign = torch.where(torch.rand(n, k, generator=generator) < 0.5, -1.0, 1.0)
    codes = (size * sign).to(_woq.QWEIGHT_DTYPES[format])
    packed = ops.pack_woq_weight(codes, torch.ones(n, 1), None, format, k)
    for dtype, m in itertools.product((torch.float32, torch.bfloat16), (1, 3, 16)):
        x = torch.randn(m, k, generator=generator).to(dtype)
        want = x.double() @ codes.double().t()
        torch.testing.assert_close(
            ops.woq_linear(x, packed, n).double(), want, rtol=1e-2, atol=5e-3 * float(want.std())
        )


@pytest.mark.parametrize("m", [1, 6, 33])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_bad_values_reach_their_row_only(m, value, level):
    for dtype, (format, group, symmetric, scale_dtype, options) in itertools.product(
        (torch.float32, torch.bfloat16, torch.float16), CASES
    ):
        packed = woq_weight(40, 256, format, group, symmetric, scale_dtype, **options)
        x = torch.randn(m, 256).to(dtype)
        x[m // 2, 77] = value
        spec = specs()["woq_linear"]
        got, want = ops.woq_linear(x, packed, 40), spec.reference(x, packed, 40)
        assert torch.equal(got.isnan(), want.isnan()), (format, dtype)
        assert torch.equal(got.isinf(), want.isinf()), (format, dtype)


@pytest.mark.parametrize("m", [1, 5, 40])
def test_gate_and_operands(m, level):
    torch.manual_seed(0)
    n, k = 50, 96
    gate, up = (torch.randn(n, k, generator=torch.Generator().manual_seed(i)) for i in (1, 2))
    both = interleave_gate_up(gate, up)
    qweight, scales, zeros = _woq.quantize(both, "int4", 32, False)
    packed = ops.pack_woq_weight(qweight, scales, zeros, "int4", k, 32)
    x, add = torch.randn(m, k), torch.randn(m, n)
    args = (x, packed, n, None, add, "none", add, None, "gelu_tanh")
    got, want = ops.woq_linear(*args), specs()["woq_linear"].reference(*args)
    # Terms of up to several hundred, of which little may be left.
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-3)


def test_gradient_of_x():
    packed = woq_weight(40, 64, "int4", 32)
    weight = _woq.dequantize(packed, _woq.read_layout(packed))
    x = torch.randn(3, 64, requires_grad=True)
    ops.woq_linear(x, packed, 40).sum().backward()
    torch.testing.assert_close(x.grad, weight.sum(0).expand(3, 64))


X = torch.ones(3, 40)
PARTS = woq_parts(33, 40, "int4", 16, False)
Q, S, Z = PARTS[:3]
PACKED = ops.pack_woq_weight(*PARTS)
E4M3 = torch.zeros(3, 256).to(torch.float8_e4m3fn)


def bad_calls():
    pack = "pack_woq_weight"
    yield pack, (Q, S, Z, "int3", 40, 16), "format must be one of int8, int4"
    yield pack, (Q, S, Z, "int4", 40, 16, None, "row"), "order must be one of dot, vnni, got row"
    yield pack, (E4M3, S, None, "fp8_e4m3", 256, -1, None, "vnni"), "order must be dot for format"
    yield pack, (Q, S, Z, "int4", 0, 16), "in_features must be positive, got 0"
    for group in (0, 8, 20, 264, -2):
        yield pack, (Q, S, Z, "int4", 40, group), "group_size must be -1, in_features = 40 or"
    yield pack, (Q.char(), S, Z, "int4", 40, 16), "qweight must have dtype uint8, got int8"
    yield pack, (Q, S, Z, "int4", 42, 16), "qweight must have shape \\[N, 21\\] with N > 0"
    yield pack, (Q[:0], S, Z, "int4", 40, 16), "qweight must have shape"
    yield pack, (Q[0], S, Z, "int4", 40, 16), "qweight must have shape"
    yield pack, (Q, S.double(), Z, "int4", 40, 16), "scales must have dtype"
    yield pack, (Q, S[:, :2], Z, "int4", 40, 16), "scales must have shape \\[33, 3\\], got"
    yield pack, (Q, S.t(), Z, "int4", 40, 16), "scales must have shape"
    yield pack, (E4M3, S[:1, :1], None, "fp8_e4m3", 256, 128), "or \\[1, 2\\], got \\[1, 1\\]"
    yield pack, (Q, S, Z.int(), "int4", 40, 16), "zeros must have dtype int8 or float32, got int32"
    yield pack, (Q, S, Z.float(), "int4", 40, 16, None, "vnni"), "zeros must have dtype int8, got"
    yield pack, (Q, S, Z[:5], "int4", 40, 16), "zeros must have shape"
    yield pack, (Q, S, Z, "nf4", 40, 16), "zeros must be None for format nf4"
    yield pack, (Q, S, Z, "int4", 40, 16, torch.zeros(40)), "g_idx must have dtype int32"
    yield pack, (Q, S, Z, "int4", 40, 16, torch.zeros(9).int()), "g_idx must have shape \\[40\\]"
    yield pack, (Q, S, Z, "int4", 40, 16, torch.zeros(40).int()), "g_idx must give each of the 3"
    yield pack, (Q, S, Z, "int4", 40, 16, torch.arange(40).int() - 1), "g_idx must give each"
    unpack = "unpack_woq_weight"
    good = (PACKED, 33, 40, "int4", 16, torch.float32, "int8")
    yield unpack, (*good[:3], "int9", *good[4:]), "format must be one of"
    yield unpack, (*good[:4], 17, *good[5:]), "group_size must be"
    yield unpack, (*good[:5], torch.int32, "int8"), "scale_dtype must be"
    yield unpack, (*good[:6], "uint8"), "zeros must be one of none, int8, float32, got uint8"
    yield unpack, (PACKED, 0, *good[2:]), "out_features must be positive"
    yield unpack, (PACKED[1:], *good[1:]), "packed must be packed with these arguments"
    yield unpack, (torch.zeros_like(PACKED), *good[1:]), "packed must be a weight of shape"
    yield unpack, (PACKED, 34, *good[2:]), "packed must be a weight of shape \\[34, 40\\]"
    yield unpack, (*good[:3], "nf4", 16, torch.float32, "int8"), "with these arguments, got"
    yield "dequantize_woq_weight", (PACKED, 33, 40, torch.float64), "dtype must be"
    yield "dequantize_woq_weight", (PACKED, 32, 40, torch.float32), "packed must be a weight"
    linear = "woq_linear"
    yield linear, (X.double(), PACKED, 33), "x must have dtype"
    yield linear, (X, PACKED, 0), "out_features must be positive"
    yield linear, (X, PACKED, 32), "packed_weight must be a weight of shape \\[32, 40\\]"
    yield linear, (X[:, 1:], PACKED, 33), "packed_weight must be a weight of shape \\[33, 39\\]"
    yield linear, (X, PACKED.char(), 33), "packed_weight must be a weight"
    yield linear, (X, PACKED[:70], 33), "packed_weight must be a weight"
    strided = torch.stack([PACKED, PACKED], 1)[:, 0]
    yield linear, (X, strided, 33), "packed_weight must be a weight"
    yield linear, (X, PACKED, 33, X[0]), "bias must be 1-D"
    yield linear, (X, PACKED, 33, None, X), "residual must have shape \\[3, 33\\]"
    yield linear, (X, PACKED, 33, None, None, "tanh"), "activation must be one of"
    tail = (None, None, "none", None, None, "none")
    yield linear, (X, PACKED, 33, *tail, "int4"), "lowp_mode must be one of none, fp16, bf16, int8"
    yield linear, (X, PACKED, 33, *tail, "bf16", "per_row"), "act_quant_mode must be one of none"
    yield linear, (X, PACKED, 33, *tail, "bf16", "per_batch"), "act_quant_mode must be none for"
    yield linear, (X, PACKED, 33, *tail, "int8"), "act_quant_mode must be given for"
    yield linear, (X, PACKED, 33, *tail, "int8", "per_batch"), "with order vnni for lowp_mode int8"


@refusals.each(bad_calls())
def test_bad_input(op, args, text):
    refusals.assert_refused(op, args, text)


def test_packed_weight_with_a_wrong_permutation():
    packed = woq_weight(32, 64, "int4", 32, act_order=True).clone()
    packed[64:68] = torch.tensor([0, 0, 1, 0], dtype=torch.uint8)
    with pytest.raises(RuntimeError, match="permutation"):
        ops.woq_linear(torch.ones(1, 64), packed, 32)


@settings(max_examples=60, deadline=None)
@given(
    place=st.integers(0, 63),
    value=st.integers(0, 255),
    m=st.sampled_from([1, 3, 9, 33]),
)
def test_damaged_headers_raise_or_compute(place, value, m):
    """Whatever a header says, nothing behind the tensor is read."""
    packed = woq_weight(33, 40, "int4", 16, False).clone()
    packed[place] = value
    try:
        y = ops.woq_linear(torch.ones(m, 40), packed, 33)
        assert y.shape == (m, 33)
    except RuntimeError as error:
        assert str(error).startswith("woq_linear: ")


@settings(max_examples=60, deadline=None)
@given(
    format=st.sampled_from(FORMATS),
    n=st.integers(1, 80),
    k=st.integers(1, 150),
    m=st.sampled_from([0, 1, 2, 7, 8, 9, 33]),
    group=st.sampled_from([-1, 16, 24, 64]),
    symmetric=st.booleans(),
    act_order=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
)
def test_any_shape(format, n, k, m, group, symmetric, act_order, dtype):
    symmetric = symmetric or format not in ("int8", "int4")
    packed = woq_weight(n, k, format, group, symmetric, act_order=act_order)
    x = torch.randn(m, k, generator=torch.Generator().manual_seed(n)).to(dtype)
    spec = specs()["woq_linear"]
    want = spec.reference(x.double(), packed, n).to(dtype)
    rtol, atol = spec.tolerance[dtype]
    torch.testing.assert_close(ops.woq_linear(x, packed, n), want, rtol=rtol, atol=atol)


def test_float_weight_there_and_back():
    from ipex_core import woq

    weight = torch.randn(48, 100)
    for format in FORMATS:
        packed = woq.pack_weight(weight, format, 32)
        assert woq.describe(packed).format == format
        qweight, scales, zeros, g_idx = woq.unpack(packed)
        want, want_scales, _ = woq.quantize(weight, format, 32)
        assert torch.equal(bits(qweight), bits(want))
        assert torch.equal(scales, want_scales)
        assert zeros is None
        assert g_idx is None
    with pytest.raises(OpArgumentError, match="packed must be packed by pack_woq_weight"):
        woq.describe(torch.zeros(64, dtype=torch.uint8))


@pytest.mark.parametrize("format", ["int8", "int4"])
@pytest.mark.parametrize("symmetric", [True, False])
def test_quantization_error_is_half_a_step(format, symmetric):
    weight = torch.randn(16, 64, generator=torch.Generator().manual_seed(0))
    parts = _woq.quantize(weight, format, 32, symmetric)
    packed = ops.pack_woq_weight(*parts, format, 64, 32)
    back = ops.dequantize_woq_weight(packed, 16, 64, torch.float32)
    step = parts[1].repeat_interleave(32, dim=1)
    assert ((back - weight).abs() <= 0.51 * step).all()


@pytest.mark.parametrize("format", ["int8", "int4"])
def test_float32_loses_nothing_to_zero_points(format, level):
    """Activations of one sign: what zero points take off is much larger than the result."""
    n, k = 32, 4096
    for group, rows in ((-1, 1), (-1, 16), (128, 4)):
        parts = woq_parts(n, k, format, group, False)
        packed = ops.pack_woq_weight(*parts)
        x = torch.rand(rows, k)
        got = ops.woq_linear(x, packed, n)
        weight = _woq.dequantize(packed, _woq.read_layout(packed), torch.float64)
        want = x.double() @ weight.T
        error = (got - want).abs().max() / want.abs().max()
        assert error < 1e-5, (group, rows, float(error))

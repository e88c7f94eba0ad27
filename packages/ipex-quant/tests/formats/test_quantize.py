# SPDX-License-Identifier: Apache-2.0
"""Codes, scales and zero points, compared with formulas written out in numpy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ipex_core.errors import OpArgumentError
from ipex_quant import (
    WoqWeightDtype,
    dequantize_per_block,
    dequantize_per_channel,
    quantize_per_block,
    quantize_per_channel,
)
from ipex_quant.weight.primitives import is_4bit, quantize_in_parts

D = WoqWeightDtype

NF4 = (
    *(-1.0, -0.6961928, -0.52507305, -0.3949175, -0.28444138, -0.18477343, -0.09105004, 0.0),
    *(0.0795803, 0.1609302, 0.2461123, 0.33791524, 0.44070983, 0.562617, 0.72295684, 1.0),
)
NF4_FROM = (
    *(-1.01, -0.8481, -0.6106, -0.4600, -0.3397, -0.2346, -0.1379, -0.0455),
    *(0.0398, 0.1203, 0.2035, 0.2920, 0.3893, 0.5017, 0.6428, 0.8615),
)


def by_hand(row: Any, dtype: D, symmetric: bool) -> tuple[Any, Any, Any, Any]:
    """Return codes, scale, zero point and float values of one group."""
    f = np.float32
    low, high = min(row.min(), f(0)), max(row.max(), f(0))
    largest = max(high, -low)
    eps = np.finfo(f).eps
    if dtype is D.NF4:
        scale = max(largest, eps)
        code = np.array([max(i for i in range(16) if v / scale >= f(NF4_FROM[i])) for v in row])
        return code, scale, None, np.array(NF4, dtype=f)[code] * scale
    bits = 8 if dtype is D.INT8 else 4
    if symmetric:
        scale = max(largest / f(2 ** (bits - 1) - 1), eps)
        shift = 0 if bits == 8 else 8
        least, most = (-128, 127) if bits == 8 else (0, 15)
        code = np.clip(np.rint(row / scale) + shift, least, most)
        return code, scale, None, (code - shift).astype(f) * scale
    scale = max((high - low) / f(2**bits - 1), eps)
    zero = -np.rint(low / scale) - (128 if bits == 8 else 0)
    least, most = (-128, 127) if bits == 8 else (0, 15)
    code = np.clip(np.rint(row / scale) + zero, least, most)
    return code, scale, zero, (code - zero).astype(f) * scale


def unpacked(codes: torch.Tensor, k: int, four: bool) -> Any:
    array = codes.numpy()
    if not four:
        return array
    both = np.stack((array & 15, array >> 4), axis=-1).reshape(array.shape[0], -1)
    return both[:, :k]


@pytest.mark.parametrize("shift", [0.0, 0.7, -3.0])
@pytest.mark.parametrize("group", [-1, 1, 7, 16, 32, 200])
@pytest.mark.parametrize(
    ("dtype", "symmetric"),
    [(D.INT8, True), (D.INT8, False), (D.INT4, True), (D.INT4, False), (D.NF4, True)],
)
def test_numbers(dtype: D, symmetric: bool, group: int, shift: float) -> None:
    torch.manual_seed(0)
    n, k = 5, 39
    weight = torch.randn(n, k) + shift
    weight[1] = 0
    codes, scales, zeros = quantize_per_block(weight, dtype, group, sym_quant=symmetric)
    back = dequantize_per_block(codes, scales, zeros, dtype, group, [n, k])
    size = k if group == -1 else min(group, k)
    groups = -(-k // size)
    assert list(scales.shape) == [n, groups]
    assert (zeros is None) == symmetric
    found = unpacked(codes, k, is_4bit(dtype))
    assert codes.dtype == (torch.uint8 if is_4bit(dtype) else torch.int8)
    for i in range(n):
        for g in range(groups):
            part = slice(g * size, min((g + 1) * size, k))
            code, scale, zero, value = by_hand(weight[i, part].numpy(), dtype, symmetric)
            np.testing.assert_array_equal(found[i, part], code)
            assert scales[i, g].item() == scale
            assert zeros is None or zeros[i, g].item() == zero
            # The table of this file has fewer digits.
            rtol = 1e-6 if dtype is D.NF4 else 0
            np.testing.assert_allclose(back[i, part].numpy(), value, rtol=rtol, atol=0)


@pytest.mark.parametrize("dtype", [D.INT8, D.INT4, D.NF4, D.FP8, D.FP4])
@pytest.mark.parametrize("k", [1, 8, 33])
def test_per_channel_is_one_block(dtype: D, k: int) -> None:
    weight = torch.randn(4, k)
    codes, scales, zeros = quantize_per_channel(weight, dtype)
    assert list(scales.shape) == [4]
    one = quantize_per_block(weight, dtype, -1)
    assert torch.equal(codes.view(torch.uint8), one[0].view(torch.uint8))
    assert torch.equal(scales, one[1].flatten())
    back = dequantize_per_channel(codes, scales, zeros, dtype, (4, k))
    assert torch.equal(back, dequantize_per_block(*one, dtype, -1, (4, k)))
    step = {D.INT8: 1.01, D.INT4: 1.01, D.NF4: 0.16, D.FP8: 16.1, D.FP4: 1.01}[dtype]
    assert ((back - weight).abs() <= step * scales[:, None]).all()


def test_odd_k_fills_with_zero() -> None:
    codes, _, _ = quantize_per_channel(torch.ones(2, 3), D.INT4, sym_quant=True)
    assert codes.tolist() == [[0xFF, 0x0F]] * 2


def test_mxfp4() -> None:
    weight = torch.randn(3, 70)
    codes, scales, zeros = quantize_per_block(weight, D.MXFP4, 32)
    assert scales.dtype == torch.float8_e8m0fnu and zeros is None
    back = dequantize_per_block(codes, scales, None, D.MXFP4, 32)
    assert ((back - weight).abs() <= 2.01 * scales.float().repeat_interleave(32, 1)[:, :70]).all()


def test_nf4_via_int8() -> None:
    codes = torch.arange(16, dtype=torch.uint8)[None]
    packed = codes[:, 0::2] | (codes[:, 1::2] << 4)
    back = dequantize_per_channel(packed, torch.ones(1), None, D.NF4, dequant_nf4_via_int8=True)
    assert (back * 127).round().flatten().tolist() == [round(v * 127) for v in NF4]
    plain = dequantize_per_channel(packed, torch.ones(1), None, D.NF4)
    np.testing.assert_allclose(plain.flatten().numpy(), NF4, rtol=1e-6)


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("dtype", [D.INT8, D.INT4])
def test_given_parameters(dtype: D, symmetric: bool) -> None:
    weight = torch.randn(4, 40)
    codes, scales, zeros = quantize_per_block(weight, dtype, 16, sym_quant=symmetric)
    again = quantize_per_block(weight, dtype, 16, scales, zeros, symmetric)
    assert torch.equal(again[0], codes) and torch.equal(again[1], scales)
    wider = quantize_per_block(weight, dtype, 16, scales * 2, zeros, symmetric)
    back = dequantize_per_block(*wider, dtype, 16)
    ok = (weight / scales.repeat_interleave(16, 1)[:, :40]).abs() <= (127 if dtype is D.INT8 else 7)
    assert ((back - weight).abs()[ok] <= scales.max() * 1.01).all()


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_round_trip_is_stable(data: st.DataObject) -> None:
    """What was dequantized quantizes to the same values with the same parameters."""
    dtype = data.draw(st.sampled_from([D.INT8, D.INT4, D.NF4, D.FP8, D.FP4]))
    symmetric = data.draw(st.booleans()) or dtype not in (D.INT8, D.INT4)
    n, k = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 50))
    group = data.draw(st.sampled_from([-1, 1, 2, 8, 16, 32, 64]))
    values = st.floats(-1e4, 1e4, width=32)
    rows = data.draw(st.lists(values, min_size=n * k, max_size=n * k))
    weight = torch.tensor(rows).view(n, k)
    codes, scales, zeros = quantize_per_block(weight, dtype, group, sym_quant=symmetric)
    back = dequantize_per_block(codes, scales, zeros, dtype, group, [n, k])
    assert back.isfinite().all()
    again = quantize_per_block(back, dtype, group, scales, zeros, symmetric)
    second = dequantize_per_block(*again, dtype, group, [n, k])
    torch.testing.assert_close(second, back, rtol=1e-6, atol=0)


@pytest.mark.parametrize("form", ["int8", "int4", "fp8_e4m3"])
def test_in_parts(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.randn(11, 48)
    whole = quantize_in_parts(weight, form, 16, True, torch.bfloat16)
    monkeypatch.setattr("ipex_quant.weight.primitives._PART", 100)
    parts = quantize_in_parts(weight, form, 16, True, torch.bfloat16)
    for a, b in zip(whole, parts, strict=True):
        assert (a is None) == (b is None)
        assert a is None or torch.equal(a.float(), b.float())  # type: ignore[union-attr]


W = torch.randn(4, 32)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: quantize_per_channel(W[0], D.INT8), "t must be 2-D"),
        (lambda: quantize_per_channel(W.int(), D.INT8), "t must be floating point"),
        (lambda: quantize_per_channel(W, 17), "weight_dtype must"),
        (lambda: quantize_per_channel(W, D.MXFP4), "quantized per block"),
        (lambda: quantize_per_block(W, D.INT8, 0), "group_size must be -1 or positive"),
        (lambda: quantize_per_block(W, D.MXFP4, 16), "group_size must be 32"),
        (
            lambda: quantize_per_block(W, D.INT8, 16, torch.ones(4, 3), None, True),
            r"scales must have shape \[4, 2\], got \[4, 3\]",
        ),
        (lambda: quantize_per_block(W, D.INT8, 16, torch.ones(4, 2)), "zero_points must be given"),
        (
            lambda: quantize_per_block(W, D.INT8, 16, None, torch.ones(4, 2)),
            "zero_points must come with",
        ),
        (lambda: dequantize_per_channel(W, torch.ones(4), None, D.INT8), "qt must have dtype"),
        (
            lambda: dequantize_per_channel(W.to(torch.int8), torch.ones(5), None, D.INT8),
            "scales must have shape",
        ),
        (
            lambda: dequantize_per_channel(W.to(torch.uint8), torch.ones(4), None, D.INT4, [4, 62]),
            r"weight_shape must be \[4, 64\] or \[4, 63\]",
        ),
        (
            lambda: dequantize_per_channel(W.to(torch.uint8), torch.ones(4), torch.ones(4), D.NF4),
            "zps must be None for NF4",
        ),
    ],
)
def test_bad_arguments(call: Any, message: str) -> None:
    with pytest.raises(OpArgumentError, match=message):
        call()

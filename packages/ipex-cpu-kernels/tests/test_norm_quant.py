# SPDX-License-Identifier: Apache-2.0
"""Normalizations in place and with quantization: wrong arguments, and equality with the ops in a row."""

from __future__ import annotations

import pytest
import refusals
import torch

import ipex_core  # noqa: F401

ops = torch.ops.ipex
X, R, W = torch.ones(3, 8), torch.ones(3, 8), torch.ones(8)
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def bad_calls():
    for op in ("add_rms_norm_", "add_layer_norm_", "add_rms_norm_quant_", "add_layer_norm_quant_"):
        bias = () if "rms" in op else (None,)
        yield op, (X.double(), R, W, *bias), "x must have dtype"
        yield op, (X, R[:2], W, *bias), "residual must have the shape"
        yield op, (X, R.half(), W, *bias), "residual must have the dtype"
        yield op, (X, R[:1].expand(3, 8), W, *bias), "residual must not be expanded"
        yield op, (X, R, W[:7], *bias), "weight must be 1-D"
    for op, rest in (
        ("rms_norm_quant", (W, 1e-6, 0.0)),
        ("layer_norm_quant", (W, None, 1e-6)),
        ("add_rms_norm_quant_", (W, 1e-6, 0.0)),
        ("add_layer_norm_quant_", (W, W, 1e-6)),
    ):
        args = (X, R, *rest) if op.startswith("add") else (X, *rest)
        yield op, (*args, torch.ones(2)), "scale must have one element"
        yield op, (*args, torch.ones(1).half()), "scale must have dtype float32"
        for bad in (0.0, -1.0, float("nan"), float("inf")):
            yield op, (*args, torch.tensor(bad)), "scale must be finite"
    yield "layer_norm_quant", (X, W, W[:3]), "bias must be 1-D"
    yield "gelu_quick", (X.double(),), "x must have dtype"
    yield "silu_and_mul", (torch.ones(3, 7),), "x must have a last dimension of even size, got 7"
    yield "silu_and_mul", (torch.ones(()),), "x must have at least 1"
    yield "gelu_and_mul", (X, "sigmoid"), "approximate must be"


@refusals.each(bad_calls())
def test_bad_input(op, args, text):
    refusals.assert_refused(op, args, text)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("norm", ["rms_norm", "layer_norm"])
def test_equals_the_ops_in_a_row(norm, static, dtype, level):
    """Bit for bit: fusing changes where numbers are kept, not what they are."""
    x, r = (torch.randn(5, 200).to(dtype) for _ in range(2))
    params = [torch.randn(200).to(dtype) for _ in range(1 if norm == "rms_norm" else 2)]
    scale = torch.tensor(0.02) if static else None

    def quantized(y):
        if static:
            return ops.quantize_per_tensor(y, scale)[:2]
        return ops.quantize_per_token(y)[:2]

    got = getattr(ops, f"{norm}_quant")(x, *params, scale=scale)
    for g, w in zip(got, quantized(getattr(ops, norm)(x, *params)), strict=True):
        assert torch.equal(g, w)

    y, total = getattr(ops, f"add_{norm}")(x, r, *params)
    in_place, in_place_quant = r.clone(), r.clone()
    assert torch.equal(getattr(ops, f"add_{norm}_")(x, in_place, *params), y)
    got = getattr(ops, f"add_{norm}_quant_")(x, in_place_quant, *params, scale=scale)
    for g, w in zip(got, quantized(y), strict=True):
        assert torch.equal(g, w)
    assert torch.equal(in_place, total)
    assert torch.equal(in_place_quant, total)


@pytest.mark.parametrize("norm", ["rms_norm", "layer_norm"])
def test_heads_of_a_fused_projection(norm, level):
    """Query and key norms read the heads where they are, whatever the strides."""
    rest = () if norm == "rms_norm" else (None,)
    weight = torch.randn(32)
    fused = torch.randn(2, 6, 12, 32)
    views = [
        fused[:, :, :8],
        fused[:, 2:4, 3:5],
        fused[:, :, 7],
        fused[1, :, :4],
        fused[:, 3:4, :4],
        fused.transpose(1, 2),
        fused[:, ::2, ::3],
        fused.transpose(0, 3)[:, :, :, :1].expand(32, 6, 12, 32),
        fused[:, :1].expand(2, 5, 12, 32),
    ]
    for view in views:
        w = weight[: view.shape[-1]]
        want = getattr(ops, norm)(view.contiguous(), w, *rest)
        assert torch.equal(getattr(ops, norm)(view, w, *rest), want)

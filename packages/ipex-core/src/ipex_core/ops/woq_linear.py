# SPDX-License-Identifier: Apache-2.0
"""Linear layer on a packed quantized weight, with the low-precision modes and the fused operands of `linear`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ipex_core.library.checks import (
    PRODUCT_TOLERANCE,
    acc,
    check_device,
    check_one_of,
    check_tensor,
    randn,
    strided,
)
from ipex_core.library.kernels import register_op
from ipex_core.library.spec import Arguments, Sample
from ipex_core.ops.linear import (
    apply_epilogue,
    check_activation,
    check_operands,
    weight_rows,
)
from ipex_core.ops.quantize import choose, codes
from ipex_core.ops.woq_weight import stock_args, stock_woq_linear, woq_bench, woq_weight
from ipex_core.packing import woq
from ipex_core.packing.woq import Layout, check_woq_packed

LOWP_MODES = ("none", "fp16", "bf16", "int8")
ACT_QUANT_MODES = (
    "none",
    *("per_tensor", "per_ic_block", "per_batch", "per_batch_ic_block"),
    *("per_tensor_sym", "per_ic_block_sym", "per_batch_sym", "per_batch_ic_block_sym"),
)
_LOWP = {"fp16": torch.float16, "bf16": torch.bfloat16}


def act_block(layout: Layout) -> int:
    """Return how many input features the activations of ``*_ic_block`` modes share a scale over."""
    return layout.group if layout.groups > 1 else min(128, layout.k)


def _quantized(x: Tensor, mode: str, block: int) -> Tensor:
    """Return ``[M, K]`` activations in packed order of K, rounded to 8 bits as the mode says."""
    symmetric = mode.endswith("_sym")
    kind = mode.removesuffix("_sym")
    m, k = x.shape
    if not x.numel():
        return x
    blocks = -(-k // block) if kind.endswith("ic_block") else 1
    width = block if blocks > 1 else k
    # The padding of the last block takes part in no range: each range includes 0 anyway.
    grouped = functional.pad(x, (0, blocks * width - k)).view(m, blocks, width)
    if kind in ("per_batch", "per_batch_ic_block"):
        scale, zero = choose(grouped, symmetric, -1)
    else:
        flat = grouped.transpose(0, 1).reshape(blocks, -1)
        scale, zero = choose(flat, symmetric, -1)
        scale, zero = scale.unsqueeze(0), zero.unsqueeze(0)
    back = (codes(grouped, scale, zero, symmetric).int() - zero).to(x.dtype) * scale.to(x.dtype)
    return back.view(m, -1)[:, :k]


def _weight(packed: Tensor, layout: Layout, lowp_mode: str, dtype: torch.dtype) -> Tensor:
    """Return the ``[N, K]`` weight the mode computes with, in the order of the input features."""
    if lowp_mode in _LOWP:
        return woq.dequantize(packed, layout).to(_LOWP[lowp_mode]).to(dtype)
    if lowp_mode == "int8" and layout.format == "nf4":
        return woq.dequantize(packed, layout, dtype, rounded=True)
    return woq.dequantize(packed, layout, dtype)


def _woq_linear(
    x: Tensor,
    packed_weight: Tensor,
    out_features: int,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    activation: str = "none",
    mul: Tensor | None = None,
    residual2: Tensor | None = None,
    gate: str = "none",
    lowp_mode: str = "none",
    act_quant_mode: str = "none",
) -> Tensor:
    """Compute ``activation(x @ weight.T + bias) * mul + residual + residual2`` with a packed quantized weight.

    What the product is computed in:

    - ``lowp_mode="none"``: the dtype of ``x``. Products are accumulated in float32; a kernel may round the float
      weight to that dtype.
    - ``"fp16"``, ``"bf16"``: float weight and activations are rounded to that dtype first.
    - ``"int8"``: activations are rounded to 8 bits at each call, and integers are multiplied. The scale of the
      activations is shared as ``act_quant_mode`` says: ``"per_tensor"``, ``"per_ic_block"`` (all rows, a block of
      input features), ``"per_batch"`` (a row), ``"per_batch_ic_block"`` (a row and a block), with the suffix
      ``"_sym"`` without zero point. A block is a group of the weight, or 128 features where it has one group. The
      values of nf4 are rounded to multiples of 1/127. Takes weights packed with ``order="vnni"``; the other modes
      take ``order="dot"``.

    Args:
        x: ``[..., K]``, float32, bfloat16 or float16.
        packed_weight: Result of `pack_woq_weight` for a ``[N, K]`` weight, or with a gate ``[2 * N', K]`` with N' = N
            rounded up to a multiple of 32, see `ipex_core.woq.interleave_gate_up`.
        out_features: The number of output features, N.
        bias: One number for each row of the weight, in the dtype of ``x`` or float32, or None.
        residual: ``[..., N]`` in the dtype of ``x``, or None.
        activation: ``"none"``, ``"relu"``, ``"gelu"`` (erf), ``"gelu_tanh"`` or ``"silu"``.
        mul: ``[..., N]`` in the dtype of ``x``, or None.
        residual2: ``[..., N]`` in the dtype of ``x``, or None.
        gate: ``"none"``, ``"silu"``, ``"gelu"`` or ``"gelu_tanh"``; not together with an activation.
        lowp_mode: ``"none"``, ``"fp16"``, ``"bf16"`` or ``"int8"``.
        act_quant_mode: How activations share a scale; ``"none"`` in every mode but ``"int8"``.

    Returns:
        A contiguous ``[..., N]`` tensor in the dtype of ``x``.
    """
    op = "woq_linear"
    n = weight_rows(out_features, gate)
    layout = check_woq_packed(op, "packed_weight", packed_weight, n, x.shape[-1])
    assert layout is not None
    wide = acc(x)
    weight = _weight(packed_weight, layout, lowp_mode, wide.dtype)
    if lowp_mode in _LOWP:
        wide = wide.to(_LOWP[lowp_mode]).to(wide.dtype)
    elif lowp_mode == "int8":
        order = woq.permutation(packed_weight, layout)
        rows = wide.reshape(-1, layout.k)[:, order]
        wide = _quantized(rows, act_quant_mode, act_block(layout)).reshape(wide.shape)
        weight = weight[:, order]
    y = functional.linear(wide, weight)
    y = apply_epilogue(y, out_features, bias, activation, mul, residual, residual2, gate)
    return y.to(x.dtype)


def _check(a: Arguments) -> None:
    check_tensor(a.op, "x", a.x)
    check_device(a.op, "packed_weight", a.packed_weight, a.x)
    a.require(a.out_features > 0, "out_features", "be positive")
    check_activation(a.op, a.activation, a.gate)
    check_one_of(a.op, "lowp_mode", a.lowp_mode, LOWP_MODES)
    check_one_of(a.op, "act_quant_mode", a.act_quant_mode, ACT_QUANT_MODES)
    a.require(
        (a.act_quant_mode != "none") == (a.lowp_mode == "int8"),
        "act_quant_mode",
        "be given for lowp_mode int8"
        if a.lowp_mode == "int8"
        else f"be none for lowp_mode {a.lowp_mode}",
    )
    n = weight_rows(a.out_features, a.gate)
    layout = check_woq_packed(a.op, "packed_weight", a.packed_weight, n, a.x.shape[-1])
    order = "vnni" if a.lowp_mode == "int8" else "dot"
    fits = layout is None or layout.order == order
    text = f"be packed with order {order} for lowp_mode {a.lowp_mode}"
    a.require(fits, "packed_weight", text, "" if layout is None else layout.order)
    fits = layout is None or order == "dot" or layout.groups == 1 or layout.group <= 65536
    text = "have groups of at most 65536 features for lowp_mode int8"
    a.require(fits, "packed_weight", text, "" if layout is None else layout.group)
    check_operands(a)


#: id, rows, N, K, arguments of `woq_weight` behind the format
_CASES: tuple[tuple[str, int, int, int, tuple[Any, ...], dict[str, Any]], ...] = (
    ("int8", 1, 40, 70, ("int8",), {}),
    ("int8-asym-g32", 4, 64, 96, ("int8", 32, False, torch.bfloat16), {}),
    ("int4-g32", 1, 97, 160, ("int4", 32, True, torch.bfloat16), {}),
    ("int4-asym-act_order", 2, 130, 200, ("int4", 64, False), {"act_order": True}),
    ("int4-float_zeros", 5, 33, 75, ("int4", 24, False), {"float_zeros": True}),
    ("int4", 31, 64, 258, ("int4",), {}),
    ("int4-g128", 70, 160, 512, ("int4", 128, False, torch.float16), {}),
    ("nf4", 3, 50, 128, ("nf4", 64), {}),
    ("nf4-large", 33, 70, 130, ("nf4", 64), {}),
    ("mxfp4", 1, 48, 100, ("fp4", 32, True, torch.float8_e8m0fnu), {}),
    ("fp8_e4m3-blocks", 2, 150, 260, ("fp8_e4m3", 128), {"blocks": True}),
    ("fp8_e4m3", 16, 32, 67, ("fp8_e4m3", 32), {}),
    ("fp8_e5m2", 1, 33, 64, ("fp8_e5m2", -1, True, torch.bfloat16), {}),
)

#: The same and how activations are rounded to 8 bits.
_INT8_CASES: tuple[tuple[str, int, int, int, tuple[Any, ...], dict[str, Any], str], ...] = (
    ("int4-g32", 1, 97, 160, ("int4", 32, True, torch.bfloat16), {}, "per_batch_sym"),
    ("int4-asym", 4, 64, 258, ("int4", 64, False), {"act_order": True}, "per_batch_ic_block"),
    ("int4", 2, 40, 300, ("int4",), {}, "per_ic_block"),
    ("int8", 7, 66, 70, ("int8",), {}, "per_tensor"),
    ("int8-asym", 40, 33, 96, ("int8", 32, False), {}, "per_ic_block_sym"),
    ("nf4", 3, 50, 128, ("nf4", 64), {}, "per_batch_ic_block_sym"),
    ("mxfp4", 35, 48, 100, ("fp4", 32, True, torch.float8_e8m0fnu), {}, "per_batch"),
    ("int4-large", 70, 97, 258, ("int4",), {}, "per_tensor_sym"),
)


def _int8_samples(dtype: torch.dtype) -> Iterator[Sample]:
    for name, m, n, k, args, options, mode in _INT8_CASES:
        x = randn(m, k, dtype=dtype, seed=3)
        if mode == "per_batch":
            x[0, 5] = float("nan")
        packed = woq_weight(n, k, *args, order="vnni", **options)
        rest = (None, None, "none", None, None, "none", "int8", mode)
        yield Sample((x, packed, n, *rest), id=f"{name}-{m}x{k}x{n}-{mode}")
    x = randn(5, 64, dtype=dtype, seed=4)
    packed = woq_weight(64, 64, "int4", 32, order="vnni")
    bias = randn(64, dtype=torch.float32, seed=5)
    gated = ("none", None, None, "silu", "int8", "per_batch")
    yield Sample((x, packed, 20, bias, None, *gated), id="int8-gate")


def _samples(dtype: torch.dtype) -> Iterator[Sample]:
    yield from _float_samples(dtype)
    yield from _int8_samples(dtype)


def _float_samples(dtype: torch.dtype) -> Iterator[Sample]:
    for name, m, n, k, args, options in _CASES:
        x = randn(m, k, dtype=dtype, seed=3)
        yield Sample((x, woq_weight(n, k, *args, **options), n), id=f"{name}-{m}x{k}x{n}")
    x = randn(2, 3, 64, dtype=dtype, seed=4)
    packed = woq_weight(64, 64, "int4", 32, powers=True)
    bias = randn(64, dtype=torch.float32, seed=5)
    wide = [randn(2, 3, 64, dtype=dtype, seed=6 + i) for i in range(3)]
    yield Sample((x, packed, 64, bias.to(dtype), wide[0], "gelu", wide[1], wide[2]), id="all")
    gate_bias = randn(64, dtype=torch.float32, seed=9)
    gated = (x[..., :1, :], packed, 20, gate_bias, None, "none", None, None, "silu")
    yield Sample(gated, id="gate")
    for mode in ("bf16", "fp16"):  # scales are powers of two: the rounded weight is the exact one
        rest = (bias, None, "relu", None, None, "none", mode)
        yield Sample((x, packed, 64, *rest), id=mode)
        yield Sample((randn(40, 64, dtype=dtype, seed=4), packed, 64, *rest), id=f"{mode}-40")
    yield Sample((strided(randn(3, 64, dtype=dtype)), packed, 64), id="noncontiguous")
    yield Sample((randn(0, 64, dtype=dtype), packed, 64), id="no_rows")
    special = randn(3, 64, dtype=dtype, seed=7)
    special[0, 3], special[1, 5] = float("nan"), float("inf")
    yield Sample((special, packed, 64), id="special_values")


register_op(
    reference=_woq_linear,
    check=_check,
    fake=lambda a: a.x.new_empty(*a.x.shape[:-1], a.out_features),
    autocast="lower_precision",
    samples=_samples,
    stock=stock_woq_linear,
    stock_args=stock_args,
    tolerance=PRODUCT_TOLERANCE,
    bench=woq_bench,
    summary="Linear layer on a packed quantized weight (int8, int4, nf4, fp4, fp8)",
)

# SPDX-License-Identifier: Apache-2.0
"""Linear layer of 8-bit integers: packed int8 weights, activations that are quantized already or on the way in."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import torch

from ipex_core.library.arguments import Arguments
from ipex_core.library.checks import check_device, check_tensor, dtype_name, randn, strided
from ipex_core.library.kernels import register
from ipex_core.library.spec import FLOATS, BenchCase, OpSpec, Sample, check
from ipex_core.ops.int8.pack_int8_weight import int8_randn
from ipex_core.ops.int8.quantize import check_scale, choose, codes
from ipex_core.ops.linear.epilogue import (
    ACTIVATIONS,
    apply_epilogue,
    check_activation,
    check_operands,
    weight_rows,
)
from ipex_core.packing import int8 as _packed_int8

Tensor = torch.Tensor

_CODES = (torch.int8, torch.uint8)
_OP = "int8_linear"


def _linear(
    x: Tensor,
    packed_weight: Tensor,
    out_features: int,
    weight_scale: Tensor,
    x_scale: Tensor | None = None,
    x_zero: Tensor | None = None,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    activation: str = "none",
    mul: Tensor | None = None,
    residual2: Tensor | None = None,
    gate: str = "none",
    act_quant: str = "per_token",
    symmetric: bool = True,
    dtype: torch.dtype | None = None,
    output_scale: float = 0.0,
    output_zero: int = 0,
) -> Tensor:
    """Compute ``activation(dequantize(x) @ (weight * weight_scale).T + bias) * mul + residual + residual2``.

    The product is one of 8-bit integers, with exact int32 sums; it is scaled in float32, and the result is rounded
    once. ``x`` is int8 or uint8 codes with their scale and zero point, or float and then quantized first: with the
    given scale (static), or with the scale of its range (dynamic) as `quantize_per_token` or `quantize_per_tensor` do.

    Args:
        x: ``[..., K]``, float32, bfloat16, float16, int8 or uint8.
        packed_weight: Result of `pack_int8_weight` for an ``[N, K]`` weight, or with a gate for ``[2 * N', K]`` as
            `linear` has it.
        out_features: The number of output features, N.
        weight_scale: float32, one element or one for each row of the weight.
        x_scale: float32. For codes one element, or one for each row of ``x``; for float ``x`` one element, or None to
            compute it from the range.
        x_zero: int32 with as many elements as ``x_scale``, in [0, 255] (int8 codes: [-128, 127]), or None for 0. With
            float ``x`` only if the codes are not symmetric.
        bias: float32 or in the dtype of the result, one for each row of the weight, or None.
        residual: ``[..., N]`` in the dtype of the result (float32 for an int8 or uint8 result), or None.
        activation: ``"none"``, ``"relu"``, ``"gelu"`` (erf), ``"gelu_tanh"`` or ``"silu"``.
        mul: Like ``residual``.
        residual2: Like ``residual``.
        gate: ``"none"``, ``"silu"``, ``"gelu"`` or ``"gelu_tanh"``; not together with an activation.
        act_quant: ``"per_token"`` or ``"per_tensor"``: the range of float ``x`` without ``x_scale``.
        symmetric: Whether float ``x`` gets int8 codes without a zero point; otherwise uint8 codes.
        dtype: The dtype of the result; None for the dtype of float ``x``, or float32.
        output_scale: Scale of an int8 or uint8 result, finite and at least 2^-120.
        output_zero: Its zero point, a number of its dtype.

    Returns:
        A contiguous ``[..., N]`` tensor.
    """
    n = weight_rows(out_features, gate)
    _packed_int8.check_header(_OP, "packed_weight", packed_weight, n, x.shape[-1])
    _check_values(x, x_scale, x_zero)
    if x.dtype in _CODES:
        assert x_scale is not None
        scale, zero, q = x_scale, x_zero, x
    else:
        if x_scale is None:
            scale, zero = choose(x, symmetric, -1 if act_quant == "per_token" else None)
        else:
            scale, zero = x_scale, x_zero
        by_zero = torch.zeros((), dtype=torch.int32, device=x.device) if zero is None else zero
        q = codes(x, scale, by_zero, symmetric)
    value = q.double()
    if zero is not None:
        value = value - _rows(zero, x).double()
    weight = _packed_int8.unpack(packed_weight, n, x.shape[-1]).double()
    y = (value @ weight.T) * (_rows(scale, x).double() * weight_scale.double())
    y = apply_epilogue(y, out_features, bias, activation, mul, residual, residual2, gate)
    result = _result_dtype(x, dtype)
    if result in _CODES:
        step = torch.tensor(output_scale, dtype=torch.float32, device=x.device)
        shift = torch.tensor(output_zero, dtype=torch.int32, device=x.device)
        return codes(y, step, shift, result == torch.int8)
    return y.to(result)


def _rows(value: Tensor, x: Tensor) -> Tensor:
    """Return a scale or zero point so that it broadcasts to the rows of ``x``."""
    return value.reshape(()) if value.numel() == 1 else value.reshape(*x.shape[:-1], 1)


def _result_dtype(x: Tensor, dtype: torch.dtype | None) -> torch.dtype:
    if dtype is not None:
        return dtype
    return torch.float32 if x.dtype in _CODES else x.dtype


def _check_values(x: Tensor, x_scale: Tensor | None, x_zero: Tensor | None) -> None:
    """Check what only the data tell."""
    if x_scale is None:
        return
    if x.dtype not in _CODES:
        check_scale(_OP, "x_scale", x_scale)
    if x_zero is not None:
        low = -128 if x.dtype == torch.int8 else 0
        wrong = x_zero[(x_zero < low) | (x_zero > low + 255)]
        for value in wrong[:1].tolist():
            check(False, _OP, "x_zero", f"be in [{low}, {low + 255}]", value)


def _check(a: Arguments) -> None:
    check_tensor(_OP, "x", a.x, (*FLOATS, *_CODES))
    check(a.out_features > 0, _OP, "out_features", "be positive", a.out_features)
    check_activation(_OP, a.activation, a.gate)
    n = weight_rows(a.out_features, a.gate)
    check_device(_OP, "packed_weight", a.packed_weight, a.x)
    _packed_int8.check_packed(_OP, "packed_weight", a.packed_weight, n, a.x.shape[-1])
    check_device(_OP, "weight_scale", a.weight_scale, a.x)
    check_tensor(_OP, "weight_scale", a.weight_scale, (torch.float32,), min_dim=0)
    check(
        a.weight_scale.numel() == 1 or (a.weight_scale.dim() == 1 and a.weight_scale.shape[0] == n),
        _OP,
        "weight_scale",
        f"have one element or one for each row of the weight = {n}",
        list(a.weight_scale.shape),
    )
    check(
        a.act_quant in ("per_token", "per_tensor"),
        _OP,
        "act_quant",
        "be per_token or per_tensor",
        a.act_quant,
    )
    _check_activations(a.x, a.x_scale, a.x_zero, a.symmetric)
    result = _result_dtype(a.x, a.dtype)
    check(
        result in (*FLOATS, *_CODES),
        _OP,
        "dtype",
        "be float32, bfloat16, float16, int8 or uint8",
        dtype_name(result),
    )
    if result in _CODES:
        check_scale(_OP, "output_scale", a.output_scale)
        low = -128 if result == torch.int8 else 0
        usable = low <= a.output_zero <= low + 255
        check(usable, _OP, "output_zero", f"be in [{low}, {low + 255}]", a.output_zero)
        result = torch.float32
    check_operands(
        _OP,
        a.x,
        a.out_features,
        a.bias,
        a.mul,
        a.residual,
        a.residual2,
        a.gate,
        dtype=result,
        of="the result",
    )


def _check_activations(
    x: Tensor, x_scale: Tensor | None, x_zero: Tensor | None, symmetric: bool
) -> None:
    is_codes = x.dtype in _CODES
    if is_codes:
        expected = f"be given for x of dtype {dtype_name(x.dtype)}"
        check(x_scale is not None, _OP, "x_scale", expected, None)
    if x_scale is not None:
        rows = math.prod(x.shape[:-1])
        check_device(_OP, "x_scale", x_scale, x)
        check_tensor(_OP, "x_scale", x_scale, (torch.float32,), min_dim=0)
        expected = f" or one for each row of x = {rows}" if is_codes else ""
        check(
            x_scale.numel() == 1 or (is_codes and x_scale.numel() == rows),
            _OP,
            "x_scale",
            f"have one element{expected}",
            list(x_scale.shape),
        )
    if x_zero is None:
        return
    check(x_scale is not None, _OP, "x_zero", "be None without x_scale", "a tensor")
    assert x_scale is not None
    check(is_codes or not symmetric, _OP, "x_zero", "be None for symmetric codes", "a tensor")
    check_device(_OP, "x_zero", x_zero, x)
    check_tensor(_OP, "x_zero", x_zero, (torch.int32,), min_dim=0)
    check(
        x_zero.numel() == x_scale.numel(),
        _OP,
        "x_zero",
        f"have as many elements as x_scale = {x_scale.numel()}",
        list(x_zero.shape),
    )


def _fake(a: Arguments) -> Tensor:
    return a.x.new_empty(*a.x.shape[:-1], a.out_features, dtype=_result_dtype(a.x, a.dtype))


def _weight(n: int, k: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Return a packed weight and scales that give products of about 1."""
    scale = randn(n, seed=seed).abs().add(0.5) * (k**-0.5 / 74)
    return _packed_int8.pack(int8_randn(n, k, seed=seed)), scale


def _samples(dtype: torch.dtype) -> Iterator[Sample]:
    sizes = ((1, 1, 1), (1, 64, 32), (2, 33, 65), (5, 200, 96), (13, 258, 64), (33, 130, 130))
    for m, k, n in sizes:
        x = randn(m, k, dtype=dtype, seed=1)
        yield Sample((x, _weight(n, k)[0], n, _weight(n, k)[1]), id=f"{m}x{k}x{n}")
    m, k, n = 9, 81, 72
    x = randn(m, k, dtype=dtype, seed=1)
    packed, scale = _weight(n, k)
    bias, residual, mul = randn(n, seed=2), *(randn(m, n, dtype=dtype, seed=s) for s in (3, 4))
    one, zero = torch.tensor(0.03), torch.tensor([120], dtype=torch.int32)

    def call(value: Tensor, *rest: object, name: str, **options: object) -> Sample:
        return Sample((value, packed, n, scale, *rest), options, id=name)

    for activation in ACTIVATIONS[1:]:
        yield call(x, None, None, bias.to(dtype), residual, activation, name=activation)
    yield call(x, None, None, bias, None, "none", mul, residual, name="mul-add")
    yield call(x, name="asymmetric", symmetric=False)
    yield call(x, name="per_tensor", act_quant="per_tensor")
    yield call(x, one, zero, bias, name="static-asymmetric", symmetric=False)
    yield call(x[:, :k], one, name="static")
    row_scale = randn(m, 1, seed=5).abs() * 0.02
    row_zero = torch.arange(m, dtype=torch.int32) * 20
    signed, unsigned = int8_randn(m, k, seed=6), int8_randn(m, k, seed=7).view(torch.uint8)
    yield call(signed, row_scale, None, bias, name="int8", dtype=dtype)
    yield call(signed, one, zero, bias, residual, name="int8-zero", dtype=dtype)
    yield call(unsigned, row_scale, row_zero, bias, residual, name="uint8-rows", dtype=dtype)
    even_packed, even_scale = _weight(n, 80)
    yield Sample((unsigned[:, :80], even_packed, n, even_scale, one), id="uint8-in-place")
    for out, shift in ((torch.int8, -5), (torch.uint8, 100)):
        options = {"dtype": out, "output_scale": 0.02, "output_zero": shift}
        yield Sample((x, packed, n, scale, None, None, bias), options, id=f"to-{dtype_name(out)}")
    both, both_scale = _weight(192, k, seed=3)
    yield Sample((x, both, 72, both_scale), {"gate": "silu"}, id="gate")
    yield call(strided(x), None, None, None, strided(residual), name="noncontiguous")
    yield call(randn(0, k, dtype=dtype), name="no_rows")
    special = x.clone()
    special[0, 3] = float("nan")
    special[1, 5] = float("inf")
    special[2] = 0.0
    yield call(special, None, None, bias, name="special_values")


def _case(dtype: torch.dtype, m: int, k: int, n: int, kind: str) -> tuple[object, ...]:
    packed = torch.ops.ipex.pack_int8_weight(int8_randn(n, k, seed=8))  # on huge pages
    scale = torch.full((n,), k**-0.5 / 74)
    if kind == "codes":  # what a quantized layer before gives
        return int8_randn(m, k, seed=9).view(torch.uint8), packed, n, scale, torch.tensor(0.03)
    # Numbers whose codes are exact, so that the result equals stock on float activations.
    x = int8_randn(m, k, seed=9).clamp(min=-127)
    x[:, 0] = 127
    return (x / 64).to(dtype), packed, n, scale


_SHAPES = (
    *((m, 4096, 4096) for m in (1, 4, 32, 128, 512)),
    (2048, 1024, 1024),
    (128, 768, 3072),
)


def _bench() -> Iterator[BenchCase]:
    for (m, k, n), kind in itertools.product(_SHAPES, ("dynamic", "codes")):
        out = (lambda dtype: 4) if kind == "codes" else (lambda dtype: dtype.itemsize)
        into = (lambda dtype: 1) if kind == "codes" else (lambda dtype: dtype.itemsize)
        yield BenchCase(
            f"{m}x{k}x{n}-{kind}",
            lambda dtype, m=m, k=k, n=n, kind=kind: _case(dtype, m, k, n, kind),
            lambda dtype, m=m, k=k, n=n, i=into, o=out: m * k * i(dtype) + n * k + m * n * o(dtype),
            flops=2 * m * k * n,
            rotate=m <= 32,
            unit=torch.int8,
        )


def _stock_args(
    x: Tensor, packed: Tensor, n: int, scale: Tensor, x_scale: Tensor | None = None
) -> tuple[object, ...]:
    weight = _packed_int8.unpack(packed, n, x.shape[-1])
    if x.dtype in _CODES:
        prepacked = torch.ops.onednn.qlinear_prepack(weight, None)
        zeros = torch.zeros(n, dtype=torch.int64)
        return x, prepacked, scale, x_scale, zeros
    return x, weight, scale.to(x.dtype), None, None


def _stock(
    x: Tensor, weight: Tensor, scale: Tensor, x_scale: Tensor | None, zeros: Tensor | None
) -> Tensor:
    """Stock: oneDNN's quantized linear for codes, the op for int8 weights for float activations."""
    if x_scale is None:
        return torch._weight_int8pack_mm(x, weight, scale)
    return torch.ops.onednn.qlinear_pointwise(
        x, x_scale.item(), 0, weight, scale, zeros, None, 1.0, 0, torch.float32, "none", [], ""
    )


register(
    OpSpec(
        name="int8_linear",
        schema=(
            "(Tensor x, Tensor packed_weight, int out_features, Tensor weight_scale,"
            " Tensor? x_scale=None, Tensor? x_zero=None, Tensor? bias=None, Tensor? residual=None,"
            ' str activation="none", Tensor? mul=None, Tensor? residual2=None, str gate="none",'
            ' str act_quant="per_token", bool symmetric=True, ScalarType? dtype=None,'
            " float output_scale=0.0, int output_zero=0) -> Tensor"
        ),
        reference=_linear,
        check=_check,
        fake=_fake,
        samples=_samples,
        stock=_stock,
        stock_args=_stock_args,
        backward=None,
        lift=False,
        tolerance={
            torch.float32: (1e-4, 1e-4),
            torch.bfloat16: (1.6e-2, 1e-2),
            torch.float16: (2e-3, 2e-3),
            torch.int8: (0.0, 1.0),
            torch.uint8: (0.0, 1.0),
        },
        bench=_bench,
        summary="Linear layer on int8 weights with 8-bit activations, static or dynamic",
    )
)

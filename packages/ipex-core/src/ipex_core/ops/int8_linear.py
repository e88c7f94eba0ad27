# SPDX-License-Identifier: Apache-2.0
"""Products of 8-bit integers: packed weights, linear layers, and products of two activations."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator

import torch
from torch import Tensor

from ipex_core.library.checks import (
    SUM_TOLERANCE,
    check_device,
    check_kind,
    check_tensor,
    dtype_name,
    randn,
    read_once,
    strided,
)
from ipex_core.library.kernels import register_op
from ipex_core.library.spec import FLOATS, Arguments, BenchCase, Sample, check
from ipex_core.ops.linear import (
    ACTIVATIONS,
    apply_epilogue,
    check_activation,
    check_operands,
    weight_rows,
)
from ipex_core.ops.quantize import check_scale, choose, codes
from ipex_core.packing import int8 as _packed_int8


def int8_randn(*shape: int, seed: int = 0) -> Tensor:
    """Return reproducible int8 numbers, the extremes among them."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-128, 128, shape, generator=generator, dtype=torch.int8)


def _pack_int8_weight(weight: Tensor) -> Tensor:
    """Pack an int8 weight for `int8_linear`.

    Args:
        weight: ``[N, K]``, int8, K at most 65536 (so that int32 sums are exact).

    Returns:
        A 1-D uint8 tensor; `unpack_int8_weight` gives the weight back exactly. The format, 64 bytes of header, the
        sums of the rows of the weight and panels of 32 output features, is the same at every ISA level.
    """
    return _packed_int8.pack(weight)


def _pack_check(a: Arguments) -> None:
    check_tensor(a.op, "weight", a.weight, (torch.int8,), min_dim=0)
    a.require(
        a.weight.dim() == 2
        and 0 not in a.weight.shape
        and a.weight.shape[1] <= _packed_int8.MAX_DEPTH,
        "weight",
        f"be 2-D, not empty and of at most {_packed_int8.MAX_DEPTH} columns",
        list(a.weight.shape),
    )


def _pack_fake(a: Arguments) -> Tensor:
    size = _packed_int8.packed_bytes(a.weight.shape[0], a.weight.shape[1])
    return a.weight.new_empty(size, dtype=torch.uint8)


def _pack_samples(dtype: torch.dtype) -> Iterator[Sample]:
    for n, k in ((1, 1), (32, 64), (33, 65), (50, 7), (200, 130)):
        yield Sample((int8_randn(n, k, seed=61),), id=f"{n}x{k}")
    yield Sample((int8_randn(40, 24, seed=62).t(),), id="transposed")


def _unpack_int8_weight(packed: Tensor, out_features: int, in_features: int) -> Tensor:
    """Return the plain weight of a packed one.

    Args:
        packed: Result of `pack_int8_weight`.
        out_features: The number of output features, N.
        in_features: The number of input features, K.

    Returns:
        A contiguous int8 ``[N, K]`` tensor.
    """
    _packed_int8.check_header("unpack_int8_weight", "packed", packed, out_features, in_features)
    return _packed_int8.unpack(packed, out_features, in_features)


def _unpack_check(a: Arguments) -> None:
    a.require(a.out_features > 0, "out_features", "be positive")
    a.require(a.in_features > 0, "in_features", "be positive")
    _packed_int8.check_packed(a.op, "packed", a.packed, a.out_features, a.in_features)


def _unpack_samples(dtype: torch.dtype) -> Iterator[Sample]:
    for sample in _pack_samples(dtype):
        weight = sample.args[0]
        yield Sample((_packed_int8.pack(weight), *weight.shape), id=sample.id)


register_op(
    reference=_pack_int8_weight,
    check=_pack_check,
    fake=_pack_fake,
    samples=_pack_samples,
    dtypes=(torch.int8,),
    backward=None,
    lift=False,
    summary="Pack an int8 weight for `int8_linear`",
)
register_op(
    reference=_unpack_int8_weight,
    check=_unpack_check,
    fake=lambda a: a.packed.new_empty(a.out_features, a.in_features, dtype=torch.int8),
    samples=_unpack_samples,
    dtypes=(torch.uint8,),
    backward=None,
    lift=False,
    summary="Give back the weight of a packed int8 one",
)


# --- linear -----------------------------------------------------------------------------------------------------------


_CODES = (torch.int8, torch.uint8)
_OP = "int8_linear"


def _int8_linear(
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
    check_values(x, x_scale, x_zero)
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
    result = result_dtype(x, dtype)
    if result in _CODES:
        step = torch.tensor(output_scale, dtype=torch.float32, device=x.device)
        shift = torch.tensor(output_zero, dtype=torch.int32, device=x.device)
        return codes(y, step, shift, result == torch.int8)
    return y.to(result)


def _rows(value: Tensor, x: Tensor) -> Tensor:
    """Return a scale or zero point so that it broadcasts to the rows of ``x``."""
    return value.reshape(()) if value.numel() == 1 else value.reshape(*x.shape[:-1], 1)


def result_dtype(x: Tensor, dtype: torch.dtype | None) -> torch.dtype:
    if dtype is not None:
        return dtype
    return torch.float32 if x.dtype in _CODES else x.dtype


def check_values(x: Tensor, x_scale: Tensor | None, x_zero: Tensor | None) -> None:
    """Check what only the data tell."""
    if x_scale is None:
        return
    if x.dtype not in _CODES:
        read_once(x_scale, _check_scale)
    if x_zero is not None:
        low = -128 if x.dtype == torch.int8 else 0
        for value in read_once(x_zero, _OUTSIDE[low]):
            check(False, _OP, "x_zero", f"be in [{low}, {low + 255}]", value)


def _check_scale(scale: Tensor) -> None:
    check_scale(_OP, "x_scale", scale)


def _outside(low: int, zero: Tensor) -> list[int]:
    """Return the first zero point that is out of range, if there is one."""
    zero = zero.cpu()
    found: list[int] = zero[(zero < low) | (zero > low + 255)][:1].tolist()
    return found


#: By the smallest code.
_OUTSIDE = {low: functools.partial(_outside, low) for low in (-128, 0)}


def _check(a: Arguments) -> None:
    check_tensor(_OP, "x", a.x, (*FLOATS, *_CODES))
    a.require(a.out_features > 0, "out_features", "be positive")
    check_activation(a.op, a.activation, a.gate)
    n = weight_rows(a.out_features, a.gate)
    check_device(_OP, "packed_weight", a.packed_weight, a.x)
    _packed_int8.check_packed(_OP, "packed_weight", a.packed_weight, n, a.x.shape[-1])
    check_device(_OP, "weight_scale", a.weight_scale, a.x)
    check_tensor(_OP, "weight_scale", a.weight_scale, (torch.float32,), min_dim=0)
    a.require(
        a.weight_scale.numel() == 1 or (a.weight_scale.dim() == 1 and a.weight_scale.shape[0] == n),
        "weight_scale",
        f"have one element or one for each row of the weight = {n}",
        list(a.weight_scale.shape),
    )
    a.require(a.act_quant in ("per_token", "per_tensor"), "act_quant", "be per_token or per_tensor")
    _check_activations(a)
    result = result_dtype(a.x, a.dtype)
    fits = result in (*FLOATS, *_CODES)
    a.require(fits, "dtype", "be float32, bfloat16, float16, int8 or uint8", dtype_name(result))
    if result in _CODES:
        check_scale(_OP, "output_scale", a.output_scale)
        low = -128 if result == torch.int8 else 0
        usable = low <= a.output_zero <= low + 255
        a.require(usable, "output_zero", f"be in [{low}, {low + 255}]")
        result = torch.float32
    check_operands(a, dtype=result, of="the result")


def _check_activations(a: Arguments) -> None:
    scale, zero = a.x_scale, a.x_zero
    is_codes = a.x.dtype in _CODES
    if is_codes:
        a.require(scale is not None, "x_scale", f"be given for x of dtype {dtype_name(a.x.dtype)}")
    if scale is not None:
        rows = math.prod(a.x.shape[:-1])
        check_device(a.op, "x_scale", scale, a.x)
        check_tensor(a.op, "x_scale", scale, (torch.float32,), min_dim=0)
        fits = scale.numel() == 1 or (is_codes and scale.numel() == rows)
        expected = f" or one for each row of x = {rows}" if is_codes else ""
        a.require(fits, "x_scale", f"have one element{expected}", list(scale.shape))
    if zero is None:
        return
    a.require(scale is not None, "x_zero", "be None without x_scale", "a tensor")
    a.require(is_codes or not a.symmetric, "x_zero", "be None for symmetric codes", "a tensor")
    check_device(a.op, "x_zero", zero, a.x)
    check_tensor(a.op, "x_zero", zero, (torch.int32,), min_dim=0)
    expected = f"have as many elements as x_scale = {scale.numel()}"
    a.require(zero.numel() == scale.numel(), "x_zero", expected, list(zero.shape))


def _fake(a: Arguments) -> Tensor:
    return a.x.new_empty(*a.x.shape[:-1], a.out_features, dtype=result_dtype(a.x, a.dtype))


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


register_op(
    reference=_int8_linear,
    check=_check,
    fake=_fake,
    samples=_samples,
    stock=_stock,
    stock_args=_stock_args,
    backward=None,
    lift=False,
    tolerance={
        **SUM_TOLERANCE,
        torch.int8: (0.0, 1.0),
        torch.uint8: (0.0, 1.0),
    },
    bench=_bench,
    summary="Linear layer on int8 weights with 8-bit activations, static or dynamic",
)


# --- products of two activations --------------------------------------------------------------------------------------


OP = "int8_matmul"
#: Rows of b: more could leave the range of int32 sums.
MOST_DEPTH = 32768
_MOST_DIMS = 16


def _dequantized(x: Tensor, scale: float, zero: int) -> Tensor:
    """Return the codes of ``x`` less the zero point, in float64."""
    step = torch.tensor(scale, dtype=torch.float32, device=x.device)
    shift = torch.tensor(zero, dtype=torch.int32, device=x.device)
    return codes(x, step, shift, symmetric=False).double() - zero


def _matmul(
    a: Tensor, b: Tensor, a_scale: float, a_zero: int, b_scale: float, b_zero: int
) -> Tensor:
    """Compute ``a @ b`` on uint8 codes of both factors.

    A factor is replaced by ``(code - zero) * scale`` with ``code = round(x / scale) + zero`` in 0..255, as
    `quantize_per_tensor` has it. The integers are multiplied and summed exactly; the result is rounded once.

    Args:
        a: ``[..., M, K]``, float32, bfloat16 or float16; K at most 32768.
        b: ``[..., K, N]`` of the same dtype; leading sizes broadcast. Leading strides may be any, so heads need no
            copy; a transposed ``[..., N, K]`` is read in place.
        a_scale: Scale of ``a``, finite and at least 2^-120.
        a_zero: Its zero point, 0..255.
        b_scale: Scale of ``b``.
        b_zero: Its zero point.

    Returns:
        A contiguous ``[..., M, N]`` tensor in the dtype of ``a``.

    Raises:
        RuntimeError: An argument is not as described.
    """
    scale = torch.tensor(a_scale, dtype=torch.float32) * torch.tensor(b_scale, dtype=torch.float32)
    product = _dequantized(a, a_scale, a_zero) @ _dequantized(b, b_scale, b_zero)
    return (product * scale.double().to(a.device)).to(a.dtype)


def _matmul_check(a: Arguments) -> None:
    check_tensor(OP, "a", a.a, min_dim=2)
    check_kind(OP, "b", a.b, a.a, "a")
    both = zip(reversed(a.a.shape[:-2]), reversed(a.b.shape[:-2]), strict=False)
    fits = a.b.dim() >= 2 and a.b.shape[-2] == a.a.shape[-1]
    fits = fits and all(x in (y, 1) or y == 1 for x, y in both)
    text = (
        f"have a.shape[-1] rows and leading sizes that broadcast with a of shape {list(a.a.shape)}"
    )
    a.require(fits, "b", text, list(a.b.shape))
    fits = max(a.a.dim(), a.b.dim()) <= _MOST_DIMS
    a.require(fits, "a", f"have at most {_MOST_DIMS} dimensions", a.a.dim())
    depth = a.a.shape[-1]
    a.require(depth <= MOST_DEPTH, "a", f"have at most {MOST_DEPTH} columns", depth)
    for name, scale, zero in (("a", a.a_scale, a.a_zero), ("b", a.b_scale, a.b_zero)):
        check_scale(OP, f"{name}_scale", scale)
        a.require(0 <= zero <= 255, f"{name}_zero", "be in [0, 255]", zero)


def _matmul_fake(a: Arguments) -> Tensor:
    lead = torch.broadcast_shapes(a.a.shape[:-2], a.b.shape[:-2])
    return a.a.new_empty(*lead, a.a.shape[-2], a.b.shape[-1])


_HEADS = 12  # of the benchmark
_SCALES = (0.03, 120, 0.025, 140)


def _matmul_samples(dtype: torch.dtype) -> Iterator[Sample]:
    for shape in (
        (2, 3, 5, 7),
        (1, 1, 1, 1),
        (3, 1, 65, 40),
        (2, 33, 32, 64),
        (1, 70, 100, 130),
        (1, 300, 17, 33),
        (1, 26, 513, 1100),
    ):
        batch, m, k, n = shape
        name = "x".join(map(str, shape))
        a, b = randn(batch, m, k, dtype=dtype, seed=1), randn(batch, k, n, dtype=dtype, seed=2)
        yield Sample((a, b, *_SCALES), id=name)
        yield Sample((a, b.mT.contiguous().mT, *_SCALES), id=f"{name}-transposed")
    heads = [randn(2, 9, 3, 40, dtype=dtype, seed=s).transpose(1, 2) for s in (3, 4)]
    yield Sample((heads[0], heads[1].mT, *_SCALES), id="heads")
    a, b = randn(20, 30, dtype=dtype, seed=5), randn(30, 50, dtype=dtype, seed=6)
    yield Sample((a, b, 0.02, 0, 0.02, 255), id="one-sided")
    shared = b.expand(4, 30, 50)
    yield Sample((a.expand(4, 20, 30), shared, *_SCALES), id="expanded")
    several = randn(3, 1, 7, 30, dtype=dtype, seed=7)
    yield Sample((several, randn(2, 30, 9, dtype=dtype, seed=8), *_SCALES), id="broadcast")
    yield Sample((several, b, *_SCALES), id="one_matrix")
    yield Sample((strided(a), strided(b), *_SCALES), id="noncontiguous")
    yield Sample((a[:0], b, *_SCALES), id="no_rows")
    yield Sample((a[:, :0], b[:0], *_SCALES), id="no_sums")
    full = torch.full((2, 4096), 9.0, dtype=dtype)
    yield Sample((full, full.T, 0.03, 0, 0.03, 0), id="largest_codes")
    yield Sample((full, -full.T, 0.03, 255, 0.03, 255), id="opposite_codes")
    a = a.clone()
    a[1, 2], a[2, 3], a[3, 4] = float("nan"), float("inf"), -float("inf")
    yield Sample((a, b, *_SCALES), id="special_values")


def _matmul_bench() -> Iterator[BenchCase]:
    for batch, length, size in ((1, 128, 64), (8, 128, 64), (1, 512, 64)):
        for name, m, k, n in (("scores", length, size, length), ("values", length, length, size)):

            def make(
                dtype: torch.dtype, batch: int = batch, m: int = m, k: int = k, n: int = n
            ) -> tuple[object, ...]:
                # Numbers whose codes are exact, so that the result equals stock.
                step = 2.0**-5
                a = (int8_randn(batch, _HEADS, m, k, seed=1) * step).to(dtype)
                b = (int8_randn(batch, _HEADS, n, k, seed=2) * step).to(dtype).mT
                return a, b if k < n else b.contiguous(), step, 128, step, 128

            moved = batch * _HEADS * (m * k + k * n + m * n)
            yield BenchCase(
                f"{name}-{batch}x{_HEADS}x{m}x{k}x{n}",
                make,
                lambda dtype, moved=moved: moved * dtype.itemsize,
                flops=2 * batch * _HEADS * m * k * n,
                unit=torch.int8,
            )


register_op(
    name=OP,
    reference=_matmul,
    check=_matmul_check,
    fake=_matmul_fake,
    samples=_matmul_samples,
    stock=lambda a, b, a_scale, a_zero, b_scale, b_zero: torch.matmul(a, b),
    backward=None,
    autocast="lower_precision",
    lift=False,
    bench=_matmul_bench,
    summary="Product of two activations on 8-bit integers",
)

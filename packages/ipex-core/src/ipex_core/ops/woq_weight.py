# SPDX-License-Identifier: Apache-2.0
"""Packing of weight-only quantized weights, what a packed one was made of, and samples for the ops on them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ipex_core.library.checks import (
    check_device,
    check_dtype_in,
    check_one_of,
    check_shape,
    dtype_name,
    randn,
)
from ipex_core.library.kernels import register_op
from ipex_core.library.spec import FLOATS, Arguments, BenchCase, Sample, check
from ipex_core.packing import woq
from ipex_core.packing.woq import Layout, check_woq_packed


def woq_parts(
    n: int,
    k: int,
    format: str,
    group_size: int = -1,
    symmetric: bool = True,
    scale_dtype: torch.dtype = torch.float32,
    *,
    act_order: bool = False,
    blocks: bool = False,
    powers: bool = False,
    float_zeros: bool = False,
    seed: int = 0,
) -> tuple[Tensor, Tensor, Tensor | None, str, int, int, Tensor | None]:
    """Return arguments of `pack_woq_weight` but for the order, from random numbers.

    ``powers``: scales are powers of two, so that 4-bit weights are exact in every float dtype.
    """
    weight = randn(n, k, seed=seed + 1, scale=k**-0.5)
    qweight, scales, zeros = woq.quantize(weight, format, group_size, symmetric, scale_dtype)
    if powers:
        scales = torch.exp2(torch.floor(torch.log2(scales.float()))).to(scale_dtype)
    if blocks:
        scales = randn(-(-n // 128), -(-k // 128), seed=seed + 2).abs().add(0.1).to(scale_dtype)
        scales = (scales.float() * 2.0**-12).to(scale_dtype)
    if zeros is not None and float_zeros:
        zeros = zeros.float() + 0.25
    g_idx = None
    if act_order:
        group = k if group_size == -1 else group_size
        generator = torch.Generator().manual_seed(seed)
        g_idx = (torch.arange(k) // group)[torch.randperm(k, generator=generator)].int()
    return qweight, scales, zeros, format, k, group_size, g_idx


def woq_weight(n: int, k: int, *args: Any, order: str = "dot", **options: Any) -> Tensor:
    """Return a packed random weight; the arguments are as for `woq_parts`."""
    qweight, scales, zeros, format, _, group_size, g_idx = woq_parts(n, k, *args, **options)
    layout = woq.layout_of(qweight, scales, zeros, format, k, group_size, g_idx, order)
    return woq.pack(qweight, scales, zeros, layout, g_idx)


# --- benchmark --------------------------------------------------------------------------------------------------------


def stock_args(x: Tensor, packed_weight: Tensor, out_features: int, *_: Any) -> tuple[Any, ...]:
    """Return the weight as stock torch takes it; without an op of its own a plain one in the dtype of ``x``."""
    layout = woq.read_layout(packed_weight)
    assert layout is not None
    qweight, scales, zeros, _g_idx = woq.unpack(packed_weight, layout)
    if layout.format == "int4" and layout.groups > 1 and not layout.permuted:
        codes = woq.codes_of(qweight, "int4", layout.k).int()
        packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes, 1)
        # torch's weight is (code - 8) * scale + offset.
        wide = scales.float()
        offset = (8 - zeros.float()) * wide if zeros.numel() else torch.zeros_like(wide)
        pairs = torch.stack((wide, offset), dim=-1).transpose(0, 1).contiguous().to(x.dtype)
        return "int4", x, packed, layout.group, pairs
    if layout.format == "int8" and layout.groups == 1 and layout.zeros == "none":
        return "int8", x, qweight, 0, scales.view(-1).to(x.dtype)
    return "plain", x, woq.dequantize(packed_weight, layout).to(x.dtype), 0, scales


def stock_woq_linear(kind: str, x: Tensor, weight: Tensor, group: int, scales: Tensor) -> Tensor:
    """Stock baseline, on what `stock_args` made."""
    if kind == "int4":
        return torch._weight_int4pack_mm_for_cpu(x, weight, group, scales)
    if kind == "int8":
        return torch._weight_int8pack_mm(x, weight, scales)
    return functional.linear(x, weight)


#: Format, group size, whether there are zero points, dtype of the scales.
_FORMATS: dict[str, tuple[str, int, bool, torch.dtype]] = {
    "int4": ("int4", 128, False, torch.bfloat16),
    "int4-asym": ("int4", 128, True, torch.bfloat16),
    "int8": ("int8", -1, False, torch.float32),
    "nf4": ("nf4", 64, False, torch.bfloat16),
    "mxfp4": ("fp4", 32, False, torch.float8_e8m0fnu),
    "fp8": ("fp8_e4m3", -1, False, torch.float32),
}
_ROWS = {
    "int4": (1, 4, 16, 128, 512, 2048),
    "int8": (1, 4, 16, 128, 512),
}


def _weight(
    n: int, k: int, format: str, group: int, asymmetric: bool, dtype: torch.dtype
) -> Tensor:
    """Return a packed weight of random codes: pages of equal content can be read faster than memory."""
    columns = k // 2 if woq.is_nibble(format) else k
    qweight = torch.randint(0, 256, (n, columns), dtype=torch.uint8)
    if format == "fp8_e4m3":
        qweight &= 0xBF  # no NaN, and numbers below 2
    groups = -(-k // group) if group > 0 else 1
    scales = torch.full((n, groups), 2.0**-10).to(dtype)
    zeros = torch.randint(0, 16, (n, groups), dtype=torch.int8) if asymmetric else None
    codes = qweight.view(woq.QWEIGHT_DTYPES[format])
    packed: Tensor = torch.ops.ipex.pack_woq_weight(codes, scales, zeros, format, k, group)
    return packed


def woq_bench() -> Iterator[BenchCase]:
    """Yield 4096 x 4096 weights of each format, which come from memory, as in a model's step, and a small one."""
    for name, args in _FORMATS.items():
        for m in _ROWS.get(name, (1,)):
            yield _case(name, args, m, 4096)
    yield _case("int4-asym", _FORMATS["int4-asym"], 4, 512)


def _case(name: str, args: tuple[str, int, bool, torch.dtype], m: int, n: int) -> BenchCase:
    # The packed bytes of 32 rows: strips are independent of each other.
    size = _weight(32, n, *args).numel() * (n // 32)
    return BenchCase(
        f"{name}-{m}x{n}x{n}",
        lambda dtype: (randn(m, n, dtype=dtype), _weight(n, n, *args), n),
        lambda dtype: size + m * 2 * n * dtype.itemsize,
        flops=2 * m * n * n if m > 1 else 0,
        rotate=n == 4096 and m < 128,
    )


# --- packing ----------------------------------------------------------------------------------------------------------


_SCALE_NAMES = "float32, bfloat16, float16, float8_e8m0fnu or uint8"


def check_group_size(a: Arguments) -> int:
    """Check a group size and return the number of elements that share a scale."""
    size, k = a.group_size, a.in_features
    fits = size in (-1, k) or (16 <= size <= 256 and size % 8 == 0)
    a.require(fits, "group_size", f"be -1, in_features = {k} or a multiple of 8 from 16 to 256")
    return k if size == -1 else min(size, k)


def check_names(a: Arguments) -> None:
    """Check the names of a format and an order."""
    check_one_of(a.op, "format", a.format, woq.FORMATS)
    check_one_of(a.op, "order", a.order, woq.ORDERS)
    fits = a.order == "dot" or not a.format.startswith("fp8")
    a.require(fits, "order", f"be dot for format {a.format}")


def _pack_woq_weight(
    qweight: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    format: str,
    in_features: int,
    group_size: int = -1,
    g_idx: Tensor | None = None,
    order: str = "dot",
) -> Tensor:
    """Pack the codes, scales and zero points of a quantized ``[N, K]`` weight for `woq_linear`.

    A weight is ``scale * (code - zero)`` (int8, int4; without zero points the zero of int4 is 8, of int8 0),
    ``scale * table[code]`` (nf4, fp4) or ``scale * code`` (fp8). MXFP4 is fp4 with groups of 32 and e8m0 scales.

    Args:
        qweight: The codes. int8: int8 ``[N, K]``; int4, nf4, fp4: uint8 ``[N, ceil(K / 2)]``, the even column in the
            low nibble; fp8_e4m3, fp8_e5m2: ``[N, K]`` in torch's dtype of that name.
        scales: ``[N, G]`` with G = ceil(K / group), float32, bfloat16, float16, or powers of two as float8_e8m0fnu or
            their bytes as uint8; for fp8 also one for each block of 128 x 128, ``[ceil(N / 128), ceil(K / 128)]``.
        zeros: ``[N, G]`` zero points, int8 or float32, or None. Only for int8 and int4; order vnni takes int8 ones.
        format: ``"int8"``, ``"int4"``, ``"nf4"``, ``"fp4"``, ``"fp8_e4m3"`` or ``"fp8_e5m2"``.
        in_features: K.
        group_size: Elements of K that share a scale: -1 (all), K, or a multiple of 8 from 16 to 256. The last group
            may be shorter.
        g_idx: int32 ``[K]``, the group of each input feature (act-order), or None where they follow each other. Each
            group must have ``group_size`` features, the last one the rest.
        order: ``"dot"`` for the modes of `woq_linear` with float activations, ``"vnni"`` for ``lowp_mode="int8"``,
            which fp8 weights do not have.

    Returns:
        A 1-D uint8 tensor, the same at every ISA level; `unpack_woq_weight` gives everything back exactly, and
        `dequantize_woq_weight` the float weight.
    """
    layout = woq.layout_of(qweight, scales, zeros, format, in_features, group_size, g_idx, order)
    _check_g_idx_values("pack_woq_weight", g_idx, layout)
    return woq.pack(qweight, scales, zeros, layout, g_idx)


def _check_g_idx_values(op: str, g_idx: Tensor | None, layout: Layout) -> None:
    if g_idx is None:
        return
    counts = torch.arange(layout.k, device=g_idx.device) // layout.group
    if torch.equal(g_idx.sort().values.long(), counts):
        return
    # Look for the first entry to name.
    free = [min(layout.group, layout.k - i * layout.group) for i in range(layout.groups)]
    wanted = f"give each of the {layout.groups} groups {layout.group} input features, the last one the rest"
    for i, group in enumerate(g_idx.tolist()):
        known = 0 <= group < layout.groups
        got = f"{'one more for group' if known else 'group'} {group} at index {i}"
        check(known and free[group] > 0, op, "g_idx", wanted, got)
        free[group] -= 1


def _pack_check(a: Arguments) -> None:
    check_names(a)
    a.require(a.in_features > 0, "in_features", "be positive")
    group = check_group_size(a)
    dtype = woq.QWEIGHT_DTYPES[a.format]
    check_dtype_in(a.op, "qweight", a.qweight, dtype)
    columns = -(-a.in_features // 2) if woq.is_nibble(a.format) else a.in_features
    fits = a.qweight.dim() == 2 and a.qweight.shape[0] > 0 and a.qweight.shape[1] == columns
    a.require(fits, "qweight", f"have shape [N, {columns}] with N > 0", list(a.qweight.shape))
    n, groups = a.qweight.shape[0], -(-a.in_features // group)
    for name, value in (("scales", a.scales), ("zeros", a.zeros), ("g_idx", a.g_idx)):
        if value is not None:
            check_device(a.op, name, value, a.qweight, "qweight")
    fits = woq.stored_scale_dtype(a.scales) in woq.SCALE_DTYPES
    a.require(fits, "scales", f"have dtype {_SCALE_NAMES}", dtype_name(a.scales.dtype))
    by_block = a.format.startswith("fp8") and a.group_size == 128
    block_shape = [-(-n // 128), groups]
    expected = f"have shape [{n}, {groups}]" + (f" or {block_shape}" if by_block else "")
    fits = list(a.scales.shape) == [n, groups] or (by_block and list(a.scales.shape) == block_shape)
    a.require(fits, "scales", expected, list(a.scales.shape))
    if a.zeros is not None:
        _check_zeros(a, [n, groups])
    if a.g_idx is not None:
        check_dtype_in(a.op, "g_idx", a.g_idx, torch.int32)
        check_shape(a.op, "g_idx", a.g_idx, [a.in_features])


def _check_zeros(a: Arguments, shape: list[int]) -> None:
    known = a.format in ("int8", "int4")
    a.require(known, "zeros", f"be None for format {a.format}", "a tensor")
    kinds = "int8" if a.order == "vnni" else "int8 or float32"
    dtype = a.zeros.dtype
    fits = dtype == torch.int8 or (a.order == "dot" and dtype == torch.float32)
    a.require(fits, "zeros", f"have dtype {kinds}", dtype_name(dtype))
    check_shape(a.op, "zeros", a.zeros, shape)


def _pack_fake(a: Arguments) -> Tensor:
    layout = woq.layout_of(
        a.qweight, a.scales, a.zeros, a.format, a.in_features, a.group_size, a.g_idx, a.order
    )
    return a.qweight.new_empty(layout.bytes, dtype=torch.uint8)


_BF16, _F16, _E8M0 = torch.bfloat16, torch.float16, torch.float8_e8m0fnu


def _parts() -> Iterator[tuple[str, tuple[object, ...]]]:
    """Yield arguments of `pack_woq_weight`: each format, odd sizes, groups, orders."""
    yield "int8", (*woq_parts(33, 37, "int8"), "dot")
    yield "int8-asym-g32", (*woq_parts(70, 100, "int8", 32, False, _BF16), "dot")
    yield "int8-vnni", (*woq_parts(16, 64, "int8", 16, False), "vnni")
    yield "int4", (*woq_parts(1, 1, "int4"), "dot")
    yield "int4-g32-f16", (*woq_parts(50, 129, "int4", 32, True, _F16), "dot")
    yield "int4-asym-act_order", (*woq_parts(64, 200, "int4", 64, False, act_order=True), "dot")
    yield "int4-float_zeros", (*woq_parts(32, 72, "int4", 24, False, float_zeros=True), "dot")
    yield "int4-vnni", (*woq_parts(40, 75, "int4", 16, False, act_order=True), "vnni")
    yield "nf4", (*woq_parts(35, 130, "nf4", 64, True, _BF16), "dot")
    yield "nf4-vnni", (*woq_parts(35, 60, "nf4", 16), "vnni")
    yield "mxfp4", (*woq_parts(48, 96, "fp4", 32, True, _E8M0), "dot")
    yield "fp4-vnni", (*woq_parts(17, 40, "fp4", 16), "vnni")
    yield "fp8_e4m3", (*woq_parts(31, 67, "fp8_e4m3"), "dot")
    yield "fp8_e4m3-blocks", (*woq_parts(150, 260, "fp8_e4m3", 128, blocks=True), "dot")
    yield "fp8_e5m2", (*woq_parts(33, 40, "fp8_e5m2", 16, True, _BF16), "dot")


def pack_samples(dtype: torch.dtype) -> Iterator[Sample]:
    """Yield packings; what is packed does not depend on ``dtype``."""
    for name, args in _parts():
        yield Sample(args, id=name)
    qweight, *others = woq_parts(24, 40, "int8")
    yield Sample((qweight.t().contiguous().t(), *others), id="transposed")


register_op(
    reference=_pack_woq_weight,
    check=_pack_check,
    fake=_pack_fake,
    samples=pack_samples,
    dtypes=(torch.float32,),
    backward=None,
    lift=False,
    summary="Pack a quantized linear weight for `woq_linear`",
)


# --- unpacking --------------------------------------------------------------------------------------------------------


def _unpack_woq_weight(
    packed: Tensor,
    out_features: int,
    in_features: int,
    format: str,
    group_size: int,
    scale_dtype: torch.dtype,
    zeros: str = "none",
    block_scales: bool = False,
    g_idx: bool = False,
    order: str = "dot",
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return what a packed quantized weight was made of, bit for bit.

    The arguments repeat how it was packed, so that the shapes of the results are known without reading it;
    `ipex_core.woq.unpack` reads them from the tensor.

    Args:
        packed: Result of `pack_woq_weight`.
        out_features: N.
        in_features: K.
        format: As it was packed.
        group_size: As it was packed.
        scale_dtype: The dtype of the scales; uint8 or float8_e8m0fnu for powers of two.
        zeros: ``"none"``, ``"int8"`` or ``"float32"``, the dtype of the zero points.
        block_scales: Whether there is a scale for each block of 128 x 128.
        g_idx: Whether it was packed with ``g_idx``.
        order: As it was packed.

    Returns:
        ``(qweight, scales, zeros, g_idx)`` as `pack_woq_weight` took them; absent ones are empty. The nibble behind an
        odd K is 0.
    """
    wanted = _layout(
        *(out_features, in_features, format, group_size, scale_dtype),
        *(zeros, block_scales, g_idx, order),
    )
    op = "unpack_woq_weight"
    found = check_woq_packed(op, "packed", packed, out_features, in_features)
    assert found is not None
    same = dataclasses.replace(found, special=False) == wanted
    check(same, op, "packed", "be packed with these arguments", "a tensor with another header")
    qweight, scales, zero_points, groups = woq.unpack(packed, wanted)
    return qweight, scales.view(scale_dtype), zero_points, groups


def _layout(
    out_features: int,
    in_features: int,
    format: str,
    group_size: int,
    scale_dtype: torch.dtype,
    zeros: str,
    block_scales: bool,
    g_idx: bool,
    order: str,
) -> Layout:
    group = in_features if group_size == -1 else min(group_size, in_features)
    stored = torch.float8_e8m0fnu if scale_dtype == torch.uint8 else scale_dtype
    return Layout(
        format, out_features, in_features, group, stored, zeros, order, g_idx, block_scales
    )


def _unpack_check(a: Arguments) -> None:
    check_names(a)
    a.require(a.out_features > 0, "out_features", "be positive")
    a.require(a.in_features > 0, "in_features", "be positive")
    check_group_size(a)
    fits = a.scale_dtype in (torch.uint8, *woq.SCALE_DTYPES)
    text = "be float32, bfloat16, float16, float8_e8m0fnu or uint8"
    a.require(fits, "scale_dtype", text, dtype_name(a.scale_dtype))
    check_one_of(a.op, "zeros", a.zeros, woq.ZEROS)
    layout = _layout(
        *(a.out_features, a.in_features, a.format, a.group_size, a.scale_dtype),
        *(a.zeros, a.block_scales, a.g_idx, a.order),
    )
    a.require(
        a.packed.dtype == torch.uint8 and a.packed.dim() == 1 and a.packed.shape[0] == layout.bytes,
        "packed",
        f"be packed with these arguments ({layout.bytes} bytes)",
        f"{dtype_name(a.packed.dtype)} {list(a.packed.shape)}",
    )


def _unpack_fake(a: Arguments) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    layout = _layout(
        *(a.out_features, a.in_features, a.format, a.group_size, a.scale_dtype),
        *(a.zeros, a.block_scales, a.g_idx, a.order),
    )
    zero_dtype = torch.float32 if a.zeros == "float32" else torch.int8
    zero_shape = [0] if a.zeros == "none" else [a.out_features, layout.groups]
    return (
        a.packed.new_empty(layout.qweight_shape, dtype=woq.QWEIGHT_DTYPES[a.format]),
        a.packed.new_empty(layout.scale_shape, dtype=a.scale_dtype),
        a.packed.new_empty(zero_shape, dtype=zero_dtype),
        a.packed.new_empty([a.in_features if a.g_idx else 0], dtype=torch.int32),
    )


def _packed_samples(dtype: torch.dtype) -> Iterator[tuple[str, Tensor, Layout]]:
    for sample in pack_samples(dtype):
        qweight, scales, zeros, format, k, group, g_idx, order = (*sample.args, "dot")[:8]
        layout = woq.layout_of(qweight, scales, zeros, format, k, group, g_idx, order)
        yield sample.id, woq.pack(qweight, scales, zeros, layout, g_idx), layout


def _unpack_samples(dtype: torch.dtype) -> Iterator[Sample]:
    for name, packed, at in _packed_samples(dtype):
        yield Sample(
            (
                *(packed, at.n, at.k, at.format, at.group, at.scale_dtype),
                *(at.zeros, at.block_scales, at.permuted, at.order),
            ),
            id=name,
        )


def _dequantize_woq_weight(
    packed: Tensor, out_features: int, in_features: int, dtype: torch.dtype
) -> Tensor:
    """Return the float weight of a packed quantized one, in the order of the input features.

    Args:
        packed: Result of `pack_woq_weight`.
        out_features: N.
        in_features: K.
        dtype: float32, bfloat16 or float16; values are computed in float32 and rounded once.

    Returns:
        A contiguous ``[N, K]`` tensor.
    """
    layout = check_woq_packed("dequantize_woq_weight", "packed", packed, out_features, in_features)
    assert layout is not None
    return woq.dequantize(packed, layout).to(dtype)


def _dequantize_check(a: Arguments) -> None:
    a.require(a.dtype in FLOATS, "dtype", "be float32, bfloat16 or float16", dtype_name(a.dtype))
    a.require(a.out_features > 0, "out_features", "be positive")
    a.require(a.in_features > 0, "in_features", "be positive")
    check_woq_packed(a.op, "packed", a.packed, a.out_features, a.in_features)


def _dequantize_samples(dtype: torch.dtype) -> Iterator[Sample]:
    for name, packed, layout in _packed_samples(dtype):
        yield Sample((packed, layout.n, layout.k, dtype), id=name)


register_op(
    reference=_unpack_woq_weight,
    check=_unpack_check,
    fake=_unpack_fake,
    samples=_unpack_samples,
    dtypes=(torch.float32,),
    backward=None,
    lift=False,
    summary="Give back the codes, scales and zero points of a packed weight, bit for bit",
)
register_op(
    reference=_dequantize_woq_weight,
    check=_dequantize_check,
    fake=lambda a: a.packed.new_empty(a.out_features, a.in_features, dtype=a.dtype),
    samples=_dequantize_samples,
    backward=None,
    lift=False,
    tolerance={
        torch.float32: (1e-6, 1e-9),
        torch.bfloat16: (8e-3, 1e-9),
        torch.float16: (1e-3, 1e-7),
    },
    summary="The float weight of a packed quantized one",
)

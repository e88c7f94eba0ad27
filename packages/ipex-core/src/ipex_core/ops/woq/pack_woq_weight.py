# SPDX-License-Identifier: Apache-2.0
"""Packing of quantized linear weights."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ipex_core.library.arguments import Arguments
from ipex_core.library.checks import (
    check_device,
    check_dtype_in,
    check_one_of,
    check_shape,
    dtype_name,
)
from ipex_core.library.kernels import register
from ipex_core.library.spec import OpSpec, Sample, check
from ipex_core.ops.woq.samples import woq_parts
from ipex_core.packing import woq
from ipex_core.packing.woq import Layout

__all__ = ["check_group_size", "check_names", "pack_samples"]

Tensor = torch.Tensor

_SCALE_NAMES = "float32, bfloat16, float16, float8_e8m0fnu or uint8"


def check_group_size(op: str, group_size: int, in_features: int) -> int:
    """Check a group size and return the number of elements that share a scale."""
    check(
        group_size in (-1, in_features) or (16 <= group_size <= 256 and group_size % 8 == 0),
        op,
        "group_size",
        f"be -1, in_features = {in_features} or a multiple of 8 from 16 to 256",
        group_size,
    )
    return in_features if group_size == -1 else min(group_size, in_features)


def check_names(op: str, format: str, order: str) -> None:
    """Check the names of a format and an order."""
    check_one_of(op, "format", format, woq.FORMATS)
    check_one_of(op, "order", order, woq.ORDERS)
    check(
        order == "dot" or not format.startswith("fp8"),
        op,
        "order",
        f"be dot for format {format}",
        order,
    )


def _pack(
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
    check_names(a.op, a.format, a.order)
    a.require(a.in_features > 0, "in_features", "be positive")
    group = check_group_size(a.op, a.group_size, a.in_features)
    dtype = woq.QWEIGHT_DTYPES[a.format]
    check_dtype_in(a.op, "qweight", a.qweight, dtype)
    columns = -(-a.in_features // 2) if woq.is_nibble(a.format) else a.in_features
    a.require(
        a.qweight.dim() == 2 and a.qweight.shape[0] > 0 and a.qweight.shape[1] == columns,
        "qweight",
        f"have shape [N, {columns}] with N > 0",
        list(a.qweight.shape),
    )
    n, groups = a.qweight.shape[0], -(-a.in_features // group)
    for name, value in (("scales", a.scales), ("zeros", a.zeros), ("g_idx", a.g_idx)):
        if value is not None:
            check_device(a.op, name, value, a.qweight, "qweight")
    a.require(
        woq.stored_scale_dtype(a.scales) in woq.SCALE_DTYPES,
        "scales",
        f"have dtype {_SCALE_NAMES}",
        dtype_name(a.scales.dtype),
    )
    by_block = a.format.startswith("fp8") and a.group_size == 128
    block_shape = [-(-n // 128), groups]
    expected = f"have shape [{n}, {groups}]" + (f" or {block_shape}" if by_block else "")
    a.require(
        list(a.scales.shape) == [n, groups] or (by_block and list(a.scales.shape) == block_shape),
        "scales",
        expected,
        list(a.scales.shape),
    )
    if a.zeros is not None:
        _check_zeros(a.zeros, a.format, a.order, [n, groups])
    if a.g_idx is not None:
        check_dtype_in(a.op, "g_idx", a.g_idx, torch.int32)
        check_shape(a.op, "g_idx", a.g_idx, [a.in_features])


def _check_zeros(zeros: Tensor, format: str, order: str, shape: list[int]) -> None:
    op = "pack_woq_weight"
    check(format in ("int8", "int4"), op, "zeros", f"be None for format {format}", "a tensor")
    kinds = "int8" if order == "vnni" else "int8 or float32"
    check(
        zeros.dtype == torch.int8 or (order == "dot" and zeros.dtype == torch.float32),
        op,
        "zeros",
        f"have dtype {kinds}",
        dtype_name(zeros.dtype),
    )
    check_shape(op, "zeros", zeros, shape)


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


register(
    OpSpec(
        name="pack_woq_weight",
        schema=(
            "(Tensor qweight, Tensor scales, Tensor? zeros, str format, int in_features,"
            ' int group_size=-1, Tensor? g_idx=None, str order="dot") -> Tensor'
        ),
        reference=_pack,
        check=_pack_check,
        fake=_pack_fake,
        samples=pack_samples,
        dtypes=(torch.float32,),
        backward=None,
        lift=False,
        summary="Pack a quantized linear weight for `woq_linear`",
    )
)

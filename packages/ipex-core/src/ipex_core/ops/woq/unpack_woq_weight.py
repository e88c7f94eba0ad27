# SPDX-License-Identifier: Apache-2.0
"""What a packed quantized weight was made of, and its float values."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import torch

from ipex_core.library.arguments import Arguments
from ipex_core.library.checks import check_one_of, dtype_name
from ipex_core.library.kernels import register
from ipex_core.library.spec import FLOATS, OpSpec, Sample, check
from ipex_core.ops.woq.pack_woq_weight import check_group_size, check_names, pack_samples
from ipex_core.packing import woq
from ipex_core.packing.woq import Layout, check_woq_packed

Tensor = torch.Tensor


def _unpack(
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
    check_names(a.op, a.format, a.order)
    a.require(a.out_features > 0, "out_features", "be positive")
    a.require(a.in_features > 0, "in_features", "be positive")
    check_group_size(a.op, a.group_size, a.in_features)
    a.require(
        a.scale_dtype in (torch.uint8, *woq.SCALE_DTYPES),
        "scale_dtype",
        "be float32, bfloat16, float16, float8_e8m0fnu or uint8",
        dtype_name(a.scale_dtype),
    )
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


def _dequantize(packed: Tensor, out_features: int, in_features: int, dtype: torch.dtype) -> Tensor:
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


def _dequantize_fake(a: Arguments) -> Tensor:
    return a.packed.new_empty(a.out_features, a.in_features, dtype=a.dtype)


def _dequantize_samples(dtype: torch.dtype) -> Iterator[Sample]:
    for name, packed, layout in _packed_samples(dtype):
        yield Sample((packed, layout.n, layout.k, dtype), id=name)


register(
    OpSpec(
        name="unpack_woq_weight",
        schema=(
            "(Tensor packed, int out_features, int in_features, str format, int group_size,"
            ' ScalarType scale_dtype, str zeros="none", bool block_scales=False, bool g_idx=False,'
            ' str order="dot") -> (Tensor, Tensor, Tensor, Tensor)'
        ),
        reference=_unpack,
        check=_unpack_check,
        fake=_unpack_fake,
        samples=_unpack_samples,
        dtypes=(torch.float32,),
        backward=None,
        lift=False,
        summary="Give back the codes, scales and zero points of a packed weight, bit for bit",
    )
)
register(
    OpSpec(
        name="dequantize_woq_weight",
        schema="(Tensor packed, int out_features, int in_features, ScalarType dtype) -> Tensor",
        reference=_dequantize,
        check=_dequantize_check,
        fake=_dequantize_fake,
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
)

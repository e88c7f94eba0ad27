# SPDX-License-Identifier: Apache-2.0
"""Packing of the weights of a mixture of experts and the way back."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ipex_core.library.arguments import Arguments
from ipex_core.library.checks import check_tensor, dtype_name, randn
from ipex_core.library.kernels import register
from ipex_core.library.spec import FLOATS, OpSpec, Sample, check
from ipex_core.packing import experts as _experts
from ipex_core.packing import woq
from ipex_core.packing.dense import FORMATS, bytes_text, header_text, read_header

Tensor = torch.Tensor


def check_experts(
    op: str,
    name: str,
    packed: Tensor,
    out_features: int,
    in_features: int,
    dtype: torch.dtype,
    gated: bool,
) -> None:
    """Check that a tensor has the shape of packed ``[E, out_features, in_features]`` weights."""
    size = _experts.packed_shape(1, out_features, in_features, dtype, gated)[1]
    check(
        packed.dtype == torch.uint8
        and packed.dim() == 2
        and packed.shape[0] > 0
        and packed.shape[1] == size
        and packed.is_contiguous(),
        op,
        name,
        f"be {dtype_name(dtype)} weights of shape [E, {out_features}, {in_features}] packed by"
        f" pack_moe_weight (E rows of {size} bytes)",
        bytes_text(packed),
    )


def has_data(tensor: Tensor) -> bool:
    """Return whether the values can be looked at: not in a trace."""
    return type(tensor) is torch.Tensor and not tensor.is_meta


def is_quantized(packed: Tensor) -> bool:
    """Return whether a tensor with data holds packed quantized experts."""
    if packed.dim() != 2 or packed.dtype != torch.uint8 or packed.shape[0] == 0:
        return False
    return packed.shape[1] >= 64 and woq.FORMATS.get(_format_name(packed)) is not None


def _format_name(packed: Tensor) -> str:
    header = read_header(packed[0])
    names = {number: name for name, number in woq.FORMATS.items()}
    return "" if header is None else names.get(header[0], "")


def check_quantized_expert(
    op: str, name: str, packed: Tensor, index: int, out_features: int, in_features: int, gated: bool
) -> woq.Layout:
    """Check expert ``index`` of packed quantized weights and return its layout."""
    rows = 2 * _experts.padded(out_features // 2) if gated else out_features
    good = packed.dtype == torch.uint8 and packed.dim() == 2 and packed.is_contiguous()
    layout = woq.read_layout(packed[index]) if good and packed.shape[0] > 0 else None
    check(
        layout is not None and (layout.n, layout.k, layout.order) == (rows, in_features, "dot"),
        op,
        name,
        f"be quantized weights of shape [E, {out_features}, {in_features}] packed with order dot",
        "others",
    )
    assert layout is not None
    return layout


def check_expert_header(
    op: str,
    name: str,
    packed: Tensor,
    out_features: int,
    in_features: int,
    dtype: torch.dtype,
    gated: bool,
) -> None:
    """Check the header of one expert, ``packed`` being its row."""
    rows = 2 * _experts.padded(out_features // 2) if gated else out_features
    check(
        read_header(packed) == (FORMATS[dtype], rows, in_features),
        op,
        name,
        f"be {dtype_name(dtype)} weights of shape [E, {out_features}, {in_features}] packed by"
        " pack_moe_weight",
        header_text(packed),
    )


def _pack(weight: Tensor, gated: bool = False) -> Tensor:
    """Pack the weights of all experts for `fused_experts`.

    Args:
        weight: ``[E, N, K]``, float32, bfloat16 or float16: the same linear layer of E experts.
        gated: Whether the rows are two halves, N = 2 I: first the gate, then the up projection. They are interleaved
            in blocks of 32, so that one pass gives both values of a feature.

    Returns:
        A uint8 tensor ``[E, bytes]``; row e is expert e in the format of `pack_linear_weight`.
        `unpack_moe_weight` gives the weights back exactly.
    """
    return _experts.pack(weight, gated)


def _check_shape(op: str, gated: bool, out_features: int, name: str) -> None:
    check(not gated or out_features % 2 == 0, op, name, "be even if gated", out_features)


def _pack_check(a: Arguments) -> None:
    check_tensor(a.op, "weight", a.weight)
    a.require(
        a.weight.dim() == 3 and 0 not in a.weight.shape,
        "weight",
        "be 3-D and not empty",
        list(a.weight.shape),
    )
    _check_shape(a.op, a.gated, a.weight.shape[1], "weight.shape[1]")


def _pack_fake(a: Arguments) -> Tensor:
    experts, n, k = a.weight.shape
    return a.weight.new_empty(
        _experts.packed_shape(experts, n, k, a.weight.dtype, a.gated), dtype=torch.uint8
    )


def _weights(dtype: torch.dtype) -> Iterator[tuple[str, Tensor, bool]]:
    yield "1x1x1", randn(1, 1, 1, dtype=dtype, seed=61), False
    yield "3x33x65", randn(3, 33, 65, dtype=dtype, seed=61), False
    yield "gated_2x64x16", randn(2, 64, 16, dtype=dtype, seed=62), True
    yield "gated_2x128x33", randn(2, 128, 33, dtype=dtype, seed=62), True
    yield "gated_padded", randn(5, 2 * 41, 7, dtype=dtype, seed=63), True
    yield "transposed", randn(3, 24, 40, dtype=dtype, seed=64).transpose(1, 2), True
    special = randn(2, 4, 5, dtype=dtype, seed=65)
    special[0, 0, 0], special[1, 1, 1], special[1, 2, 2] = float("nan"), float("inf"), -0.0
    yield "special_values", special, True


def _pack_samples(dtype: torch.dtype) -> Iterator[Sample]:
    for name, weight, gated in _weights(dtype):
        yield Sample((weight, gated), id=name)


def _unpack(
    packed: Tensor, out_features: int, in_features: int, dtype: torch.dtype, gated: bool = False
) -> Tensor:
    """Return the plain weights of packed experts, bit for bit.

    Args:
        packed: Result of `pack_moe_weight`.
        out_features: The number of output features, N.
        in_features: The number of input features, K.
        dtype: The dtype of the weights that were packed.
        gated: As given to `pack_moe_weight`.

    Returns:
        A contiguous ``[E, N, K]`` tensor.
    """
    for one in packed:
        check_expert_header(
            "unpack_moe_weight", "packed", one, out_features, in_features, dtype, gated
        )
    return _experts.unpack(packed, out_features, in_features, dtype, gated)


def _unpack_check(a: Arguments) -> None:
    a.require(a.dtype in FLOATS, "dtype", "be float32, bfloat16 or float16", dtype_name(a.dtype))
    a.require(a.out_features > 0, "out_features", "be positive")
    a.require(a.in_features > 0, "in_features", "be positive")
    _check_shape(a.op, a.gated, a.out_features, "out_features")
    check_experts(a.op, "packed", a.packed, a.out_features, a.in_features, a.dtype, a.gated)


def _unpack_fake(a: Arguments) -> Tensor:
    return a.packed.new_empty(a.packed.shape[0], a.out_features, a.in_features, dtype=a.dtype)


def _unpack_samples(dtype: torch.dtype) -> Iterator[Sample]:
    for name, weight, gated in _weights(dtype):
        packed = _experts.pack(weight, gated)
        yield Sample((packed, *weight.shape[1:], dtype, gated), id=name)


def _stack(packed: list[Tensor]) -> Tensor:
    """Put the packed weights of single experts together, for `fused_experts`.

    Args:
        packed: E results of `pack_woq_weight` (or of `pack_linear_weight`) of one size.

    Returns:
        A uint8 tensor ``[E, bytes]`` in memory that is fast to read.
    """
    return torch.stack(packed)


def _stack_check(a: Arguments) -> None:
    a.require(len(a.packed) > 0, "packed", "hold at least one tensor", len(a.packed))
    for one in a.packed:
        same = one.dtype == torch.uint8 and one.dim() == 1 and one.shape == a.packed[0].shape
        a.require(
            same and one.shape[0] > 0,
            "packed",
            "hold packed weights of one size",
            f"{dtype_name(one.dtype)} {list(one.shape)}",
        )


def _stack_fake(a: Arguments) -> Tensor:
    return a.packed[0].new_empty(len(a.packed), a.packed[0].shape[0])


def _stack_samples(dtype: torch.dtype) -> Iterator[Sample]:
    for count, size in ((1, 64), (3, 128), (5, 1 << 15), (2, 100)):
        parts = [(torch.arange(size) * (i + 3) % 251).to(torch.uint8) for i in range(count)]
        yield Sample((parts,), id=f"{count}x{size}")


register(
    OpSpec(
        name="pack_moe_stack",
        schema="(Tensor[] packed) -> Tensor",
        reference=_stack,
        check=_stack_check,
        fake=_stack_fake,
        samples=_stack_samples,
        backward=None,
        lift=False,
        summary="Put the packed weights of single experts together for `fused_experts`",
    )
)
register(
    OpSpec(
        name="pack_moe_weight",
        schema="(Tensor weight, bool gated=False) -> Tensor",
        reference=_pack,
        check=_pack_check,
        fake=_pack_fake,
        samples=_pack_samples,
        backward=None,
        lift=False,
        summary="Pack the weights of all experts for `fused_experts`",
    )
)
register(
    OpSpec(
        name="unpack_moe_weight",
        schema=(
            "(Tensor packed, int out_features, int in_features, ScalarType dtype,"
            " bool gated=False) -> Tensor"
        ),
        reference=_unpack,
        check=_unpack_check,
        fake=_unpack_fake,
        samples=_unpack_samples,
        backward=None,
        lift=False,
        summary="Give back the weights of packed experts, bit for bit",
    )
)

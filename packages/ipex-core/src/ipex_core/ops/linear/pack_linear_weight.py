# SPDX-License-Identifier: Apache-2.0
"""Packing of linear weights and the way back."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ipex_core.library.arguments import Arguments
from ipex_core.library.checks import check_tensor, dtype_name, randn
from ipex_core.library.kernels import register
from ipex_core.library.spec import FLOATS, OpSpec, Sample
from ipex_core.packing import dense
from ipex_core.packing.dense import check_packed

Tensor = torch.Tensor


def _pack(weight: Tensor) -> Tensor:
    """Pack a linear weight for `linear`.

    Args:
        weight: ``[N, K]``, float32, bfloat16 or float16.

    Returns:
        A 1-D uint8 tensor; `unpack_linear_weight` gives the weight back exactly. The format, 64 bytes of header and
        panels of 32 output features, is the same at every ISA level.
    """
    return dense.pack(weight)


def _pack_check(a: Arguments) -> None:
    check_tensor(a.op, "weight", a.weight)
    a.require(
        a.weight.dim() == 2 and 0 not in a.weight.shape,
        "weight",
        "be 2-D and not empty",
        list(a.weight.shape),
    )


def _pack_fake(a: Arguments) -> Tensor:
    size = dense.packed_bytes(a.weight.shape[0], a.weight.shape[1], a.weight.dtype)
    return a.weight.new_empty(size, dtype=torch.uint8)


def _pack_samples(dtype: torch.dtype) -> Iterator[Sample]:
    for n, k in ((1, 1), (32, 64), (33, 65), (50, 7), (200, 129)):
        yield Sample((randn(n, k, dtype=dtype, seed=61),), id=f"{n}x{k}")
    yield Sample((randn(40, 24, dtype=dtype, seed=62).t(),), id="transposed")
    special = randn(3, 5, dtype=dtype, seed=63)
    special[0, 0], special[1, 1], special[2, 2] = float("nan"), float("inf"), -0.0
    yield Sample((special,), id="special_values")


def _unpack(packed: Tensor, out_features: int, in_features: int, dtype: torch.dtype) -> Tensor:
    """Return the plain weight of a packed one, bit for bit.

    Args:
        packed: Result of `pack_linear_weight`.
        out_features: The number of output features, N.
        in_features: The number of input features, K.
        dtype: The dtype of the weight that was packed.

    Returns:
        A contiguous ``[N, K]`` tensor.
    """
    dense.check_header("unpack_linear_weight", "packed", packed, out_features, in_features, dtype)
    return dense.unpack(packed, out_features, in_features, dtype)


def _unpack_check(a: Arguments) -> None:
    a.require(a.dtype in FLOATS, "dtype", "be float32, bfloat16 or float16", dtype_name(a.dtype))
    a.require(a.out_features > 0, "out_features", "be positive")
    a.require(a.in_features > 0, "in_features", "be positive")
    check_packed(a.op, "packed", a.packed, a.out_features, a.in_features, a.dtype)


def _unpack_fake(a: Arguments) -> Tensor:
    return a.packed.new_empty(a.out_features, a.in_features, dtype=a.dtype)


def _unpack_samples(dtype: torch.dtype) -> Iterator[Sample]:
    for sample in _pack_samples(dtype):
        weight = sample.args[0]
        yield Sample((dense.pack(weight), *weight.shape, dtype), id=sample.id)


register(
    OpSpec(
        name="pack_linear_weight",
        schema="(Tensor weight) -> Tensor",
        reference=_pack,
        check=_pack_check,
        fake=_pack_fake,
        samples=_pack_samples,
        backward=None,
        lift=False,
        summary="Pack a linear weight for `linear`",
    )
)
register(
    OpSpec(
        name="unpack_linear_weight",
        schema="(Tensor packed, int out_features, int in_features, ScalarType dtype) -> Tensor",
        reference=_unpack,
        check=_unpack_check,
        fake=_unpack_fake,
        samples=_unpack_samples,
        backward=None,
        lift=False,
        summary="Give back the weight of a packed one, bit for bit",
    )
)

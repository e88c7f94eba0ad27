# SPDX-License-Identifier: Apache-2.0
"""Packing of int8 weights for integer products and the way back."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ipex_core.library.arguments import Arguments
from ipex_core.library.checks import check_tensor
from ipex_core.library.kernels import register
from ipex_core.library.spec import OpSpec, Sample
from ipex_core.packing import int8 as _packed_int8

Tensor = torch.Tensor


def int8_randn(*shape: int, seed: int = 0) -> Tensor:
    """Return reproducible int8 numbers, the extremes among them."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-128, 128, shape, generator=generator, dtype=torch.int8)


def _pack(weight: Tensor) -> Tensor:
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


def _unpack(packed: Tensor, out_features: int, in_features: int) -> Tensor:
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


def _unpack_fake(a: Arguments) -> Tensor:
    return a.packed.new_empty(a.out_features, a.in_features, dtype=torch.int8)


def _unpack_samples(dtype: torch.dtype) -> Iterator[Sample]:
    for sample in _pack_samples(dtype):
        weight = sample.args[0]
        yield Sample((_packed_int8.pack(weight), *weight.shape), id=sample.id)


register(
    OpSpec(
        name="pack_int8_weight",
        schema="(Tensor weight) -> Tensor",
        reference=_pack,
        check=_pack_check,
        fake=_pack_fake,
        samples=_pack_samples,
        dtypes=(torch.int8,),
        backward=None,
        lift=False,
        summary="Pack an int8 weight for `int8_linear`",
    )
)
register(
    OpSpec(
        name="unpack_int8_weight",
        schema="(Tensor packed, int out_features, int in_features) -> Tensor",
        reference=_unpack,
        check=_unpack_check,
        fake=_unpack_fake,
        samples=_unpack_samples,
        dtypes=(torch.uint8,),
        backward=None,
        lift=False,
        summary="Give back the weight of a packed int8 one",
    )
)

# SPDX-License-Identifier: Apache-2.0
"""Activations of a gated MLP whose gate and up projections lie in one tensor."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.nn import functional

from ipex_core.library.arguments import Arguments
from ipex_core.library.checks import acc, check_tensor, randn, row_samples
from ipex_core.library.kernels import register
from ipex_core.library.spec import BenchCase, OpSpec, Sample, check
from ipex_core.ops.activation.gelu import APPROXIMATE, check_approximate

Tensor = torch.Tensor


def _silu_and_mul(x: Tensor) -> Tensor:
    """Multiply ``silu`` of the first half of each row by the second half.

    Args:
        x: ``[..., 2 * d]``, float32, bfloat16 or float16: gate, then up.

    Returns:
        A contiguous tensor ``[..., d]``; computed in float32 and rounded once. See `silu_mul` for two tensors.
    """
    gate, up = acc(x).chunk(2, -1) if x.shape[-1] else (acc(x), acc(x))
    return (functional.silu(gate) * up).to(x.dtype)


def _gelu_and_mul(x: Tensor, approximate: str = "none") -> Tensor:
    """Multiply ``gelu`` of the first half of each row by the second half.

    Args:
        x: ``[..., 2 * d]``, float32, bfloat16 or float16: gate, then up.
        approximate: ``"none"`` (erf) or ``"tanh"``.

    Returns:
        A contiguous tensor ``[..., d]``; computed in float32 and rounded once. See `gelu_mul` for two tensors.
    """
    gate, up = acc(x).chunk(2, -1) if x.shape[-1] else (acc(x), acc(x))
    return (functional.gelu(gate, approximate=approximate) * up).to(x.dtype)


def _check_even(op: str, x: Tensor) -> None:
    check_tensor(op, "x", x)
    columns = x.shape[-1]
    check(columns % 2 == 0, op, "x", "have a last dimension of even size", columns)


def _silu_check(a: Arguments) -> None:
    _check_even(a.op, a.x)


def _gelu_check(a: Arguments) -> None:
    _check_even(a.op, a.x)
    check_approximate(a.op, a.approximate)


def _fake(a: Arguments) -> Tensor:
    return a.x.new_empty((*a.x.shape[:-1], a.x.shape[-1] // 2))


def _inputs(dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    for name, x in row_samples(dtype):
        if x.shape[-1] % 2 == 0 and x.numel() < 2**15:
            yield name, x
    yield "odd_half", randn(3, 66, dtype=dtype, seed=33)


def _silu_samples(dtype: torch.dtype) -> Iterator[Sample]:
    for name, x in _inputs(dtype):
        yield Sample((x,), id=name)


def _gelu_samples(dtype: torch.dtype) -> Iterator[Sample]:
    for approximate in APPROXIMATE:
        for name, x in _inputs(dtype):
            yield Sample((x, approximate), id=f"{approximate}-{name}")


def _stock_silu(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, -1)
    return functional.silu(gate) * up


def _stock_gelu(x: Tensor, approximate: str = "none") -> Tensor:
    gate, up = x.chunk(2, -1)
    return functional.gelu(gate, approximate=approximate) * up


def _bench() -> Iterator[BenchCase]:
    for rows, columns in ((1, 11008), (512, 4096)):
        yield BenchCase(
            f"{rows}x{columns}",
            lambda dtype, r=rows, c=columns: (randn(r, 2 * c, dtype=dtype),),
            lambda dtype, n=3 * rows * columns: n * dtype.itemsize,
        )


register(
    OpSpec(
        name="silu_and_mul",
        schema="(Tensor x) -> Tensor",
        reference=_silu_and_mul,
        check=_silu_check,
        fake=_fake,
        samples=_silu_samples,
        stock=_stock_silu,
        bench=_bench,
        summary="SiLU of the first half times the second half",
    )
)
register(
    OpSpec(
        name="gelu_and_mul",
        schema='(Tensor x, str approximate="none") -> Tensor',
        reference=_gelu_and_mul,
        check=_gelu_check,
        fake=_fake,
        samples=_gelu_samples,
        stock=_stock_gelu,
        bench=_bench,
        summary="GELU of the first half times the second half",
    )
)

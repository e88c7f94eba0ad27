# SPDX-License-Identifier: Apache-2.0
"""GELU, alone and as the gate of a gated MLP."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.nn import functional

from ipex_core.library.arguments import Arguments
from ipex_core.library.checks import (
    acc,
    check_like,
    check_tensor,
    fake_like,
    randn,
    row_bench,
    row_samples,
    strided,
)
from ipex_core.library.kernels import register
from ipex_core.library.spec import BenchCase, OpSpec, Sample, check

Tensor = torch.Tensor

APPROXIMATE = ("none", "tanh")


def _gelu(x: Tensor, approximate: str = "none") -> Tensor:
    """Gaussian error linear unit, ``x * Phi(x)``.

    Args:
        x: Any shape, float32, bfloat16 or float16.
        approximate: ``"none"`` for the exact form with erf, ``"tanh"`` for the tanh approximation.

    Returns:
        A contiguous tensor like ``x``; computed in float32 and rounded once.

    Source: Hendrycks and Gimpel, "Gaussian Error Linear Units", 2016.
    """
    return functional.gelu(acc(x), approximate=approximate).to(x.dtype)


def _gelu_mul(gate: Tensor, up: Tensor, approximate: str = "none") -> Tensor:
    """Multiply ``gelu(gate)`` by ``up``, the activation of a gated MLP.

    Args:
        gate: Any shape, float32, bfloat16 or float16.
        up: Like ``gate``.
        approximate: ``"none"`` (erf) or ``"tanh"``.

    Returns:
        A contiguous tensor like ``gate``; computed in float32 and rounded once.
    """
    return (functional.gelu(acc(gate), approximate=approximate) * acc(up)).to(gate.dtype)


def check_approximate(op: str, approximate: str) -> None:
    """Check the name of the GELU variant."""
    check(approximate in APPROXIMATE, op, "approximate", "be 'none' or 'tanh'", repr(approximate))


def _check(a: Arguments) -> None:
    check_tensor(a.op, "x", a.x, min_dim=0)
    check_approximate(a.op, a.approximate)


def _mul_check(a: Arguments) -> None:
    check_tensor(a.op, "gate", a.gate, min_dim=0)
    check_like(a.op, "up", a.up, a.gate, of="gate")
    check_approximate(a.op, a.approximate)


def _fake(a: Arguments) -> Tensor:
    return fake_like(a.x)


def _mul_fake(a: Arguments) -> Tensor:
    return fake_like(a.gate)


def _samples(dtype: torch.dtype) -> Iterator[Sample]:
    for approximate in APPROXIMATE:
        for name, x in row_samples(dtype):
            yield Sample((x, approximate), id=f"{approximate}-{name}")
        dense = torch.linspace(-12, 12, 4001).to(dtype)
        yield Sample((dense, approximate), id=f"{approximate}-dense")
        yield Sample((randn(dtype=dtype), approximate), id=f"{approximate}-0d")


def _mul_samples(dtype: torch.dtype) -> Iterator[Sample]:
    for approximate in APPROXIMATE:
        for name, gate in row_samples(dtype):
            up = randn(*gate.shape, dtype=dtype, seed=31)
            yield Sample((gate, up, approximate), id=f"{approximate}-{name}")
        gate = randn(4, 30, dtype=dtype, seed=32)
        yield Sample((gate, strided(gate), approximate), id=f"{approximate}-strided_up")


def _stock_mul(gate: Tensor, up: Tensor, approximate: str = "none") -> Tensor:
    return functional.gelu(gate, approximate=approximate) * up


_SHAPES = ((1, 11008), (512, 4096), (4096, 1536))


def _bench() -> Iterator[BenchCase]:
    for approximate in APPROXIMATE:
        yield from row_bench(
            lambda r, c, dtype, a=approximate: (randn(r, c, dtype=dtype), a),
            moves=2,
            shapes=_SHAPES,
            prefix=f"{approximate}-",
        )


def _mul_bench() -> Iterator[BenchCase]:
    for approximate in APPROXIMATE:
        yield from row_bench(
            lambda r, c, dtype, a=approximate: (
                randn(r, c, dtype=dtype),
                randn(r, c, dtype=dtype, seed=1),
                a,
            ),
            moves=3,
            shapes=_SHAPES,
            prefix=f"{approximate}-",
        )


register(
    OpSpec(
        name="gelu",
        schema='(Tensor x, str approximate="none") -> Tensor',
        reference=_gelu,
        check=_check,
        fake=_fake,
        samples=_samples,
        stock=lambda x, approximate="none": functional.gelu(x, approximate=approximate),
        bench=_bench,
        summary="Gaussian error linear unit, exact or tanh form",
    )
)
register(
    OpSpec(
        name="gelu_mul",
        schema='(Tensor gate, Tensor up, str approximate="none") -> Tensor',
        reference=_gelu_mul,
        check=_mul_check,
        fake=_mul_fake,
        autocast="widest_type",
        samples=_mul_samples,
        stock=_stock_mul,
        bench=_mul_bench,
        summary="GELU of the gate times up",
    )
)

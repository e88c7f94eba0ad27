# SPDX-License-Identifier: Apache-2.0
"""Gated activations: of two tensors, and of the halves of one."""

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
from ipex_core.ops.activation.gelu import APPROXIMATE, check_approximate

Tensor = torch.Tensor


def _silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    """Multiply ``silu(gate) = gate * sigmoid(gate)`` by ``up``, the activation of a gated MLP.

    Args:
        gate: Any shape, float32, bfloat16 or float16.
        up: Like ``gate``.

    Returns:
        A contiguous tensor like ``gate``; computed in float32 and rounded once.

    Source: Shazeer, "GLU Variants Improve Transformer", 2020 (SwiGLU).
    """
    return (functional.silu(acc(gate)) * acc(up)).to(gate.dtype)


def _check(a: Arguments) -> None:
    check_tensor(a.op, "gate", a.gate, min_dim=0)
    check_like(a.op, "up", a.up, a.gate, of="gate")


def _pair_fake(a: Arguments) -> Tensor:
    return fake_like(a.gate)


def _samples(dtype: torch.dtype) -> Iterator[Sample]:
    for name, gate in row_samples(dtype):
        yield Sample((gate, randn(*gate.shape, dtype=dtype, seed=41)), id=name)
    gate = randn(4, 30, dtype=dtype, seed=42)
    yield Sample((gate, strided(gate)), id="strided_up")
    dense = torch.linspace(-100, 100, 4001).to(dtype)
    yield Sample((dense, torch.ones_like(dense)), id="dense")


def _pair_bench() -> Iterator[BenchCase]:
    return row_bench(
        lambda r, c, dtype: (randn(r, c, dtype=dtype), randn(r, c, dtype=dtype, seed=1)),
        moves=3,
        shapes=((1, 11008), (512, 4096), (4096, 1536)),
    )


register(
    OpSpec(
        name="silu_mul",
        schema="(Tensor gate, Tensor up) -> Tensor",
        reference=_silu_mul,
        check=_check,
        fake=_pair_fake,
        autocast="widest_type",
        samples=_samples,
        stock=lambda gate, up: functional.silu(gate) * up,
        bench=_pair_bench,
        summary="SiLU of the gate times up",
    )
)


# --- gate and up in one tensor ----------------------------------------------------------------------------------------


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

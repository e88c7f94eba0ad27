# SPDX-License-Identifier: Apache-2.0
"""SiLU as the gate of a gated MLP."""

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
from ipex_core.library.spec import BenchCase, OpSpec, Sample

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


def _fake(a: Arguments) -> Tensor:
    return fake_like(a.gate)


def _samples(dtype: torch.dtype) -> Iterator[Sample]:
    for name, gate in row_samples(dtype):
        yield Sample((gate, randn(*gate.shape, dtype=dtype, seed=41)), id=name)
    gate = randn(4, 30, dtype=dtype, seed=42)
    yield Sample((gate, strided(gate)), id="strided_up")
    dense = torch.linspace(-100, 100, 4001).to(dtype)
    yield Sample((dense, torch.ones_like(dense)), id="dense")


def _bench() -> Iterator[BenchCase]:
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
        fake=_fake,
        autocast="widest_type",
        samples=_samples,
        stock=lambda gate, up: functional.silu(gate) * up,
        bench=_bench,
        summary="SiLU of the gate times up",
    )
)

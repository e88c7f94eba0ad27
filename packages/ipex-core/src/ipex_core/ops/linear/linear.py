# SPDX-License-Identifier: Apache-2.0
"""Dense linear layer on packed weights, with fused bias, activation and residual addition."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.nn import functional

from ipex_core.library.arguments import Arguments
from ipex_core.library.checks import (
    acc,
    check_device,
    check_tensor,
    randn,
    strided,
)
from ipex_core.library.kernels import register
from ipex_core.library.spec import BenchCase, OpSpec, Sample
from ipex_core.ops.linear.epilogue import (
    ACTIVATIONS,
    GATES,
    activate,
    apply_epilogue,
    check_activation,
    check_operands,
    weight_rows,
)
from ipex_core.packing import dense
from ipex_core.packing.dense import check_packed, interleave_gate_up

__all__ = ["activate", "stored_dtype"]

Tensor = torch.Tensor


def stored_dtype(x: Tensor, packed_weight: Tensor) -> torch.dtype:
    """Return the dtype of a packed weight: the dtype of ``x`` unless the reference is run in float64."""
    if x.dtype != torch.float64:
        return x.dtype
    header = dense.read_header(packed_weight)
    assert header is not None
    return next(d for d, f in dense.FORMATS.items() if f == header[0])


def _linear(
    x: Tensor,
    packed_weight: Tensor,
    out_features: int,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    activation: str = "none",
    mul: Tensor | None = None,
    residual2: Tensor | None = None,
    gate: str = "none",
) -> Tensor:
    """Compute ``activation(x @ weight.T + bias) * mul + residual + residual2`` with a packed weight.

    With a gate, the rows of the weight alternate between rows of gate_proj and rows of up_proj, see
    `ipex_core.woq.interleave_gate_up`, and ``gate(x @ gate.T + bias_g) * (x @ up.T + bias_u)`` takes the place of the
    activation.
    Products are accumulated in float32 and the result is rounded once.

    Args:
        x: ``[..., K]``, float32, bfloat16 or float16.
        packed_weight: Result of `pack_linear_weight` for a weight in the dtype of ``x``: ``[N, K]``, or with a gate
            ``[2 * N', K]`` with N' = N rounded up to a multiple of 32.
        out_features: The number of output features, N.
        bias: One number for each row of the weight, in the dtype of ``x`` or float32, or None.
        residual: ``[..., N]`` in the dtype of ``x``, or None.
        activation: ``"none"``, ``"relu"``, ``"gelu"`` (erf), ``"gelu_tanh"`` or ``"silu"``.
        mul: ``[..., N]`` in the dtype of ``x``, or None.
        residual2: ``[..., N]`` in the dtype of ``x``, or None.
        gate: ``"none"``, ``"silu"``, ``"gelu"`` or ``"gelu_tanh"``; not together with an activation.

    Returns:
        A contiguous ``[..., N]`` tensor in the dtype of ``x``.
    """
    stored = stored_dtype(x, packed_weight)
    n = weight_rows(out_features, gate)
    dense.check_header("linear", "packed_weight", packed_weight, n, x.shape[-1], stored)
    weight = dense.unpack(packed_weight, n, x.shape[-1], stored)
    wide = acc(x)
    y = functional.linear(wide, weight.to(wide.dtype))
    y = apply_epilogue(y, out_features, bias, activation, mul, residual, residual2, gate)
    return y.to(x.dtype)


def _check(a: Arguments) -> None:
    check_tensor(a.op, "x", a.x)
    check_device(a.op, "packed_weight", a.packed_weight, a.x)
    a.require(a.out_features > 0, "out_features", "be positive")
    check_activation(a.op, a.activation, a.gate)
    n = weight_rows(a.out_features, a.gate)
    check_packed(a.op, "packed_weight", a.packed_weight, n, a.x.shape[-1], a.x.dtype)
    check_operands(a.op, a.x, a.out_features, a.bias, a.mul, a.residual, a.residual2, a.gate)


def _fake(a: Arguments) -> Tensor:
    return a.x.new_empty(*a.x.shape[:-1], a.out_features)


def _case(
    dtype: torch.dtype, m: int, k: int, n: int, seed: int = 0
) -> tuple[Tensor, Tensor, int, Tensor, Tensor]:
    x = randn(m, k, dtype=dtype, seed=seed)
    weight = randn(n, k, dtype=dtype, seed=seed + 1, scale=max(k, 1) ** -0.5)
    bias = randn(n, dtype=dtype, seed=seed + 2)
    residual = randn(m, n, dtype=dtype, seed=seed + 3)
    return x, dense.pack(weight), n, bias, residual


def gated(
    dtype: torch.dtype, m: int, k: int, n: int, gate: str, residual: Tensor | None = None
) -> Sample:
    """Return a sample with a gate."""
    parts = [randn(n, k, dtype=dtype, seed=seed, scale=k**-0.5) for seed in (11, 12)]
    bias = interleave_gate_up(randn(n, dtype=dtype, seed=13), randn(n, dtype=dtype, seed=14))
    packed = dense.pack(interleave_gate_up(*parts))
    args = (randn(m, k, dtype=dtype, seed=10), packed, n, bias, residual, "none", None, None, gate)
    return Sample(args, id=f"gate-{gate}-{m}x{k}x{n}")


def _samples(dtype: torch.dtype) -> Iterator[Sample]:
    sizes = (
        (1, 1, 1),
        (1, 64, 32),
        (1, 100, 50),
        (2, 33, 65),
        (3, 128, 96),
        (4, 17, 33),
        (5, 384, 128),
        (7, 31, 200),
        (13, 258, 64),
        (16, 64, 160),
        (32, 96, 48),
        (33, 512, 130),
        (70, 384, 384),
        (30, 2100, 40),
    )
    for m, k, n in sizes:
        x, packed, n, bias, _ = _case(dtype, m, k, n)
        yield Sample((x, packed, n, bias), id=f"{m}x{k}x{n}")
    x, packed, n, bias, residual = _case(dtype, 9, 80, 72, seed=5)
    yield Sample((x, packed, n), id="no_bias")
    yield Sample((x, packed, n, bias.float()), id="float32_bias")
    for activation in ACTIVATIONS:
        yield Sample((x, packed, n, bias, None, activation), id=activation)
        yield Sample((x, packed, n, bias, residual, activation), id=f"{activation}-residual")
    mul, residual2 = (randn(9, 72, dtype=dtype, seed=seed) for seed in (6, 7))
    yield Sample((x, packed, n, bias, None, "silu", mul), id="silu-mul")
    yield Sample(
        (x, packed, n, bias, residual, "gelu", strided(mul), residual2), id="gelu-mul-add-add"
    )
    yield Sample((x, packed, n, None, residual, "none", None, residual2), id="add-add")
    for gate in GATES[1:]:
        yield gated(dtype, 9, 80, 72, gate, residual)
    yield gated(dtype, 1, 64, 32, "silu")
    yield gated(dtype, 40, 70, 200, "silu")
    x3 = randn(2, 3, 80, dtype=dtype, seed=9)
    yield Sample((x3, packed, n, bias), id="3d")
    yield Sample((randn(80, dtype=dtype, seed=9), packed, n, bias), id="1d")
    yield Sample((strided(x), packed, n, bias, strided(residual)), id="noncontiguous")
    yield Sample((randn(9, 160, dtype=dtype)[:, 40:120], packed, n, bias), id="rows_strided")
    yield Sample((randn(0, 80, dtype=dtype), packed, n, bias), id="no_rows")
    special = x.clone()
    special[0, 3] = float("nan")
    special[1, 5] = float("inf")
    yield Sample((special, packed, n, bias, None, "silu"), id="special_values")


_SHAPES = (
    *((m, 4096, 4096) for m in (1, 2, 4, 8, 16, 32, 128)),
    (512, 4096, 4096),
    (2048, 2048, 2048),
    *((m, 384, 1536) for m in (1, 16, 128, 4096)),
    (128, 1536, 384),
)


def _bench() -> Iterator[BenchCase]:
    for m, k, n in _SHAPES:
        yield BenchCase(
            f"{m}x{k}x{n}",
            lambda dtype, m=m, k=k, n=n: _case(dtype, m, k, n)[:4],
            lambda dtype, m=m, k=k, n=n: (m * k + n * k + m * n) * dtype.itemsize,
            flops=2 * m * k * n,
            rotate=m <= 32,
        )


def stock_args(
    x: Tensor, packed_weight: Tensor, out_features: int, bias: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return the arguments of stock ``linear`` for the arguments of the op."""
    return x, dense.unpack(packed_weight, out_features, x.shape[-1], x.dtype), bias


register(
    OpSpec(
        name="linear",
        schema=(
            "(Tensor x, Tensor packed_weight, int out_features, Tensor? bias=None,"
            ' Tensor? residual=None, str activation="none", Tensor? mul=None, Tensor? residual2=None,'
            ' str gate="none") -> Tensor'
        ),
        reference=_linear,
        check=_check,
        fake=_fake,
        samples=_samples,
        stock=functional.linear,
        stock_args=stock_args,
        tolerance={
            torch.float32: (1e-4, 1e-4),
            torch.bfloat16: (1.6e-2, 2e-2),
            torch.float16: (4e-3, 4e-3),
        },
        bench=_bench,
        summary="Linear layer on a packed weight with bias, activation and residual",
    )
)

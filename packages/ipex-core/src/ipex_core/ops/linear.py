# SPDX-License-Identifier: Apache-2.0
"""Dense linear layer on packed weights, with fused bias, activation and residual addition."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.nn import functional

from ipex_core import _packed
from ipex_core._packed import check_packed
from ipex_core._spec import BenchCase, OpSpec, Sample, check, register
from ipex_core.ops._common import (
    acc,
    check_device,
    check_dtype,
    check_tensor,
    check_vector,
    randn,
    strided,
)

Tensor = torch.Tensor

ACTIVATIONS = ("none", "relu", "gelu", "gelu_tanh", "silu")


def activate(y: Tensor, activation: str) -> Tensor:
    """Apply one of `ACTIVATIONS`."""
    if activation == "relu":
        return functional.relu(y)
    if activation == "gelu":
        return functional.gelu(y)
    if activation == "gelu_tanh":
        return functional.gelu(y, approximate="tanh")
    if activation == "silu":
        return functional.silu(y)
    return y


def _linear(
    x: Tensor,
    packed_weight: Tensor,
    out_features: int,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    activation: str = "none",
) -> Tensor:
    """Compute ``activation(x @ weight.T + bias) + residual`` with a packed weight.

    Products are accumulated in float32 and the result is rounded once.

    Args:
        x: ``[..., K]``, float32, bfloat16 or float16.
        packed_weight: Result of `pack_linear_weight` for a ``[N, K]`` weight in the dtype of ``x``.
        out_features: The number of output features, N.
        bias: ``[N]`` in the dtype of ``x`` or float32, or None.
        residual: ``[..., N]`` in the dtype of ``x``, or None.
        activation: ``"none"``, ``"relu"``, ``"gelu"`` (erf), ``"gelu_tanh"`` or ``"silu"``.

    Returns:
        A contiguous ``[..., N]`` tensor in the dtype of ``x``.
    """
    stored = x.dtype
    if (
        stored == torch.float64
    ):  # the check of a kernel in higher precision; the weight keeps its dtype
        header = _packed.read_header(packed_weight)
        assert header is not None
        stored = next(d for d, f in _packed.FORMATS.items() if f == header[0])
    _packed.check_header(
        "linear", "packed_weight", packed_weight, out_features, x.shape[-1], stored
    )
    weight = _packed.unpack(packed_weight, out_features, x.shape[-1], stored)
    wide = acc(x)
    y = functional.linear(
        wide, weight.to(wide.dtype), None if bias is None else bias.to(wide.dtype)
    )
    y = activate(y, activation)
    if residual is not None:
        y = y + acc(residual)
    return y.to(x.dtype)


def _check(
    x: Tensor,
    packed_weight: Tensor,
    out_features: int,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    activation: str = "none",
) -> None:
    op = "linear"
    check_tensor(op, "x", x)
    check_device(op, "packed_weight", packed_weight, x)
    check(out_features > 0, op, "out_features", "be positive", out_features)
    check_packed(op, "packed_weight", packed_weight, out_features, x.shape[-1], x.dtype)
    check_vector(op, "bias", bias, x, out_features)
    if residual is not None:
        shape = [*x.shape[:-1], out_features]
        check_device(op, "residual", residual, x)
        check_dtype(op, "residual", residual, x)
        check(
            list(residual.shape) == shape,
            op,
            "residual",
            f"have shape {shape}",
            list(residual.shape),
        )
    check(
        activation in ACTIVATIONS,
        op,
        "activation",
        f"be one of {', '.join(ACTIVATIONS)}",
        activation,
    )


def _fake(
    x: Tensor,
    packed_weight: Tensor,
    out_features: int,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    activation: str = "none",
) -> Tensor:
    return x.new_empty(*x.shape[:-1], out_features)


def _case(
    dtype: torch.dtype, m: int, k: int, n: int, seed: int = 0
) -> tuple[Tensor, Tensor, int, Tensor, Tensor]:
    x = randn(m, k, dtype=dtype, seed=seed)
    weight = randn(n, k, dtype=dtype, seed=seed + 1, scale=max(k, 1) ** -0.5)
    bias = randn(n, dtype=dtype, seed=seed + 2)
    residual = randn(m, n, dtype=dtype, seed=seed + 3)
    return x, _packed.pack(weight), n, bias, residual


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
    """Return the arguments of stock ``linear`` for those of the op."""
    return x, _packed.unpack(packed_weight, out_features, x.shape[-1], x.dtype), bias


register(
    OpSpec(
        name="linear",
        schema=(
            "(Tensor x, Tensor packed_weight, int out_features, Tensor? bias=None,"
            ' Tensor? residual=None, str activation="none") -> Tensor'
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

# SPDX-License-Identifier: Apache-2.0
"""Activations: GELU with erf, tanh and the sigmoid form, its derivative, and gated activations."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.nn import functional

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
from ipex_core.library.kernels import register_op
from ipex_core.library.spec import Arguments, BenchCase, Sample, check

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


def _bench_of(
    tensors: int, forms: tuple[str, ...] = (), shapes: tuple[tuple[int, int], ...] = _SHAPES
) -> Callable[[], Iterator[BenchCase]]:
    """Return the benchmark of an op on some matrices, for each of the forms of GELU where there are several."""

    def bench() -> Iterator[BenchCase]:
        for form in forms or ("",):
            yield from row_bench(
                lambda r, c, dtype, more=(form,) * bool(form): (
                    *(randn(r, c, dtype=dtype, seed=i) for i in range(tensors)),
                    *more,
                ),
                moves=tensors + 1,
                shapes=shapes,
                prefix=f"{form}-" if form else "",
            )

    return bench


register_op(
    reference=_gelu,
    check=_check,
    fake=lambda a: fake_like(a.x),
    samples=_samples,
    stock=lambda x, approximate="none": functional.gelu(x, approximate=approximate),
    bench=_bench_of(1, APPROXIMATE),
    summary="Gaussian error linear unit, exact or tanh form",
)
register_op(
    reference=_gelu_mul,
    check=_mul_check,
    fake=lambda a: fake_like(a.gate),
    autocast="widest_type",
    samples=_mul_samples,
    stock=_stock_mul,
    bench=_bench_of(2, APPROXIMATE),
    summary="GELU of the gate times up",
)


# --- the sigmoid approximation ----------------------------------------------------------------------------------------


def _gelu_quick(x: Tensor) -> Tensor:
    """Approximate GELU by ``x * sigmoid(1.702 x)``, as CLIP and Qwen-VL do.

    Args:
        x: Any shape, float32, bfloat16 or float16.

    Returns:
        A contiguous tensor like ``x``; computed in float32 and rounded once.

    Source: Hendrycks and Gimpel, "Gaussian Error Linear Units", 2016, section 2.
    """
    y = acc(x)
    return (y * torch.sigmoid(1.702 * y)).to(x.dtype)


def _quick_samples(dtype: torch.dtype) -> Iterator[Sample]:
    for name, x in row_samples(dtype):
        yield Sample((x,), id=name)
    yield Sample((torch.linspace(-60, 60, 4001).to(dtype),), id="dense")


register_op(
    reference=_gelu_quick,
    check=lambda a: check_tensor(a.op, "x", a.x, min_dim=0),
    fake=lambda a: fake_like(a.x),
    samples=_quick_samples,
    stock=lambda x: x * torch.sigmoid(1.702 * x),
    bench=_bench_of(1),
    summary="GELU by a sigmoid",
)


# --- derivative -------------------------------------------------------------------------------------------------------


OP = "gelu_backward"


def _gelu_backward(grad: Tensor, x: Tensor, approximate: str = "none") -> tuple[Tensor, Tensor]:
    """Gradient of `gelu`, and its sum over all rows.

    Args:
        grad: ``[..., C]``, float32, bfloat16 or float16: gradient of ``gelu(x)``.
        x: Like ``grad``.
        approximate: ``"none"`` (erf) or ``"tanh"``.

    Returns:
        The gradient of ``x``, contiguous and like ``grad``, and float32 ``[C]``: its sum over the rows, which is the
        gradient of the bias of a linear layer before.
    """
    d = torch.ops.aten.gelu_backward(acc(grad), acc(x), approximate=approximate)
    columns = d.flatten(0, -2).sum(0) if d.dim() > 1 else d
    return d.to(grad.dtype), columns if grad.dtype == torch.float64 else columns.float()


def _backward_check(a: Arguments) -> None:
    check_tensor(OP, "grad", a.grad)
    check_like(OP, "x", a.x, a.grad, of="grad")
    check_approximate(OP, a.approximate)


def _backward_fake(a: Arguments) -> tuple[Tensor, Tensor]:
    columns = torch.empty(a.grad.shape[-1], dtype=torch.float32, device=a.grad.device)
    return fake_like(a.grad), columns


def _backward_samples(dtype: torch.dtype) -> Iterator[Sample]:
    for approximate in APPROXIMATE:
        for name, x in row_samples(dtype):
            grad = randn(*x.shape, dtype=dtype, seed=33)
            yield Sample((grad, x, approximate), id=f"{approximate}-{name}")
        dense = torch.linspace(-12, 12, 4001).to(dtype)
        yield Sample((torch.ones_like(dense), dense, approximate), id=f"{approximate}-dense")


def _stock(grad: Tensor, x: Tensor, approximate: str = "none") -> tuple[Tensor, Tensor]:
    d = torch.ops.aten.gelu_backward(grad, x, approximate=approximate)
    return d, d.sum(0)


register_op(
    reference=_gelu_backward,
    check=_backward_check,
    fake=_backward_fake,
    samples=_backward_samples,
    stock=_stock,
    backward=None,
    tolerance={
        # Of sums over 300 rows of the short polynomials for 16-bit types, too.
        torch.float32: (2e-3, 4e-3),
        torch.bfloat16: (1.6e-2, 1e-2),
        torch.float16: (2e-3, 2e-3),
    },
    bench=_bench_of(2, shapes=((256, 3072), (1024, 3072), (4096, 3072))),
    summary="Gradient of GELU and its column sums",
)


# --- gated activations ------------------------------------------------------------------------------------------------


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


def _gated_check(a: Arguments) -> None:
    check_tensor(a.op, "gate", a.gate, min_dim=0)
    check_like(a.op, "up", a.up, a.gate, of="gate")


def _gated_samples(dtype: torch.dtype) -> Iterator[Sample]:
    for name, gate in row_samples(dtype):
        yield Sample((gate, randn(*gate.shape, dtype=dtype, seed=41)), id=name)
    gate = randn(4, 30, dtype=dtype, seed=42)
    yield Sample((gate, strided(gate)), id="strided_up")
    dense = torch.linspace(-100, 100, 4001).to(dtype)
    yield Sample((dense, torch.ones_like(dense)), id="dense")


register_op(
    reference=_silu_mul,
    check=_gated_check,
    fake=lambda a: fake_like(a.gate),
    autocast="widest_type",
    samples=_gated_samples,
    stock=lambda gate, up: functional.silu(gate) * up,
    bench=_bench_of(2),
    summary="SiLU of the gate times up",
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


def _gelu_check(a: Arguments) -> None:
    _check_even(a.op, a.x)
    check_approximate(a.op, a.approximate)


def _gated_fake(a: Arguments) -> Tensor:
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


def _gated_bench() -> Iterator[BenchCase]:
    for rows, columns in ((1, 11008), (512, 4096)):
        yield BenchCase(
            f"{rows}x{columns}",
            lambda dtype, r=rows, c=columns: (randn(r, 2 * c, dtype=dtype),),
            lambda dtype, n=3 * rows * columns: n * dtype.itemsize,
        )


register_op(
    reference=_silu_and_mul,
    check=lambda a: _check_even(a.op, a.x),
    fake=_gated_fake,
    samples=_silu_samples,
    stock=_stock_silu,
    bench=_gated_bench,
    summary="SiLU of the first half times the second half",
)
register_op(
    reference=_gelu_and_mul,
    check=_gelu_check,
    fake=_gated_fake,
    samples=_gelu_samples,
    stock=_stock_gelu,
    bench=_gated_bench,
    summary="GELU of the first half times the second half",
)

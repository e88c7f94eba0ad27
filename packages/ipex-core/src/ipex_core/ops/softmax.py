# SPDX-License-Identifier: Apache-2.0
"""Softmax over the last dimension, dropout whose elements follow from a seed, and the gradient of both."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ipex_core.library.checks import (
    acc,
    check_broadcastable,
    check_device,
    check_dtype_in,
    check_kind,
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

_LOW = 0xFFFFFFFF


def _signed(value: int) -> int:
    """Return the int64 number of the same 64 bits."""
    return value - (1 << 64) if value >> 63 else value


_GOLD = _signed(0x9E3779B97F4A7C15)


def _shifted(x: Tensor, bits: int) -> Tensor:
    """Return 64-bit numbers shifted to the right with zeros from the left."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _mix(z: Tensor) -> Tensor:
    """Return 64 mixed bits: the finisher of SplitMix64 (Steele, Lea and Flood, 2014)."""
    z = (z ^ _shifted(z, 30)) * _signed(0xBF58476D1CE4E5B9)
    z = (z ^ _shifted(z, 27)) * _signed(0x94D049BB133111EB)
    return z ^ _shifted(z, 31)


def _keep(rows: int, columns: int, p: float, seed: Tensor, stream: int) -> Tensor:
    """Return ``[rows, columns]``: which elements stay."""
    device = seed.device
    key = _mix(seed.reshape(()) + _signed((_GOLD * (stream + 1)) % (1 << 64)))
    row = torch.arange(1, rows + 1, device=device)
    keys = _mix(key + row * _GOLD)[:, None]
    # Two rounds of the 32-bit hash with the least bias of Wellons' "hash prospector" (2018).
    x = torch.arange(columns, device=device)[None] ^ (keys & _LOW)
    x = x ^ (x >> 16)
    x = (x * 0x7FEB352D + _shifted(keys, 32)) & _LOW
    x = x ^ (x >> 15)
    x = (x * 0x846CA68B) & _LOW
    x = x ^ (x >> 16)
    return x >= int(p * (1 << 32))


def drop(x: Tensor, p: float, seed: Tensor, stream: int) -> Tensor:
    """Return ``x`` with dropped elements 0 and the others divided by ``1 - p``."""
    if p == 0.0 or x.numel() == 0:
        return x
    keep = _keep(x.numel() // x.shape[-1], x.shape[-1], p, seed, stream).view(x.shape)
    return torch.where(keep, x * (1.0 / (1.0 - p)), torch.zeros((), dtype=x.dtype, device=x.device))


def check_drop(op: str, p: float, seed: Tensor, stream: int, x: Tensor, of: str = "x") -> None:
    """Check the arguments of ops with dropout."""
    check(0.0 <= p < 1.0, op, "p", "be in [0, 1)", f"{p:g}")
    check_device(op, "seed", seed, x, of)
    check_dtype_in(op, "seed", seed, torch.int64)
    check(seed.numel() == 1, op, "seed", "have one element", seed.numel())
    check(0 <= stream < 1 << 31, op, "stream", "be in [0, 2^31)", stream)


# --- softmax ----------------------------------------------------------------------------------------------------------


def _softmax(x: Tensor, mask: Tensor | None = None, scale: float = 1.0) -> Tensor:
    """Softmax of ``x * scale + mask`` over the last dimension.

    A row whose values are all ``-inf`` gives NaN, as in PyTorch.

    Args:
        x: ``[..., C]``, float32, bfloat16 or float16.
        mask: Additive, in the dtype of ``x`` or float32, broadcastable to ``x``, or None.
        scale: Factor on ``x``.

    Returns:
        A contiguous tensor like ``x``; computed in float32 and rounded once.
    """
    scores = acc(x) * scale
    if mask is not None:
        scores = scores + acc(mask)
    return torch.softmax(scores, -1).to(x.dtype)


def _check(a: Arguments) -> None:
    check_tensor(a.op, "x", a.x)
    if a.mask is None:
        return
    check_kind(a.op, "mask", a.mask, a.x, or_float32=True)
    check_broadcastable(a.op, "mask", a.mask, a.x.shape, "x")


def _samples(dtype: torch.dtype) -> Iterator[Sample]:
    for name, x in row_samples(dtype):
        yield Sample((x,), id=name)
    x = randn(2, 3, 5, 33, dtype=dtype, seed=51, scale=3.0)
    minimum = torch.finfo(dtype).min
    full = torch.where(randn(2, 3, 5, 33, seed=52) > 0.5, minimum, 0.0).to(dtype)
    yield Sample((x, full, 0.125), id="mask_full")
    yield Sample((x, full[:, :1, :1], 0.125), id="mask_per_batch")
    yield Sample((x, full[:, :1].float(), 2.0), id="mask_float32")
    yield Sample((x, full[0, 0, 0]), id="mask_1d")
    yield Sample((x, full[..., :1].contiguous()), id="mask_per_row")
    yield Sample((x, strided(full[0, 0])), id="mask_noncontiguous")
    blocked = torch.zeros(2, 1, 5, 33, dtype=dtype)
    blocked[0, 0, 2] = -float("inf")
    blocked[1, 0, :, 20:] = -float("inf")
    yield Sample((x, blocked, 0.5), id="mask_minus_inf_row")


def _stock(x: Tensor, mask: Tensor | None = None, scale: float = 1.0) -> Tensor:
    if scale != 1.0:
        x = x * scale
    if mask is not None:
        x = x + mask
    return torch.softmax(x, -1)


def _bench() -> Iterator[BenchCase]:
    yield from row_bench(
        lambda r, c, dtype: (randn(r, c, dtype=dtype),),
        moves=2,
        shapes=((32, 128), (512, 4096), (49152, 128)),
    )
    yield BenchCase(
        "mask-8x12x128x128",
        lambda dtype: (
            randn(8, 12, 128, 128, dtype=dtype),
            torch.zeros(8, 1, 1, 128, dtype=dtype),
            0.125,
        ),
        lambda dtype: 2 * 8 * 12 * 128 * 128 * dtype.itemsize,
    )


register_op(
    reference=_softmax,
    check=_check,
    fake=lambda a: fake_like(a.x),
    samples=_samples,
    stock=_stock,
    tolerance={
        torch.float32: (1e-5, 1e-6),
        torch.bfloat16: (1.6e-2, 1e-3),
        torch.float16: (2e-3, 1e-4),
    },
    bench=_bench,
    summary="Softmax over the last dimension with scale and additive mask",
)


# --- dropout ----------------------------------------------------------------------------------------------------------


def _dropout(x: Tensor, p: float, seed: Tensor, stream: int = 0) -> Tensor:
    """Set each element to 0 with probability ``p`` and divide the others by ``1 - p``.

    Which elements follows from ``seed``, ``stream`` and their row and column: the same call gives the same result, and
    the gradient is this op on the gradient, without a stored mask.

    Args:
        x: ``[..., C]``, float32, bfloat16 or float16.
        p: Probability, in [0, 1).
        seed: One int64 number in a tensor.
        stream: Tells calls with one seed apart, 0 to 2^31 - 1.

    Returns:
        A contiguous tensor like ``x``.

    Source: Srivastava et al., "Dropout", 2014.
    """
    return drop(acc(x), p, seed, stream).to(x.dtype)


def _dropout_backward(
    grads: tuple[Tensor, ...], x: Tensor, p: float, seed: Tensor, stream: int = 0
) -> tuple[Tensor | None, ...]:
    return torch.ops.ipex.dropout(grads[0], p, seed, stream), None, None, None


def _dropout_check(a: Arguments) -> None:
    check_tensor(a.op, "x", a.x)
    check_drop(a.op, a.p, a.seed, a.stream, a.x)


def _dropout_samples(dtype: torch.dtype) -> Iterator[Sample]:
    for number, (name, x) in enumerate(row_samples(dtype)):
        # Every other one has the highest bit, which a signed shift would copy.
        seed = torch.tensor(-number if number % 2 else 1 << (3 * number))
        yield Sample((x, 0.1 * (number % 10), seed, number), id=name)


def _dropout_stock(x: Tensor, p: float, seed: Tensor, stream: int = 0) -> Tensor:
    return torch.nn.functional.dropout(x, p)


def _dropout_bench() -> Iterator[BenchCase]:
    return row_bench(
        lambda r, c, dtype: (randn(r, c, dtype=dtype), 0.1, torch.tensor(1)),
        moves=2,
        shapes=((1024, 768), (12288, 128)),
    )


register_op(
    reference=_dropout,
    check=_dropout_check,
    fake=lambda a: fake_like(a.x),
    samples=_dropout_samples,
    stock=_dropout_stock,
    backward=_dropout_backward,
    bench=_dropout_bench,
    summary="Dropout whose elements follow from a seed",
)


# --- gradient of softmax and dropout ----------------------------------------------------------------------------------


OP = "softmax_dropout_backward"


def _backward_backward(
    grad: Tensor, probs: Tensor, scale: float, p: float, seed: Tensor, stream: int = 0
) -> tuple[Tensor, Tensor]:
    """Gradient of ``dropout(probs, p, seed, stream)`` with ``probs = softmax(x, scale=scale)``, and that dropout again.

    Args:
        grad: ``[..., C]``, float32, bfloat16 or float16: gradient of the dropped probabilities.
        probs: Like ``grad``, the result of `softmax`.
        scale: Factor on ``x`` in the softmax.
        p: As in the forward call of `dropout`.
        seed: As in the forward call.
        stream: As in the forward call.

    Returns:
        The gradient of ``x`` and the dropped probabilities, both contiguous and like ``grad``.
    """
    dropped = drop(acc(probs), p, seed, stream)
    g = drop(acc(grad), p, seed, stream)
    total = (dropped * acc(grad)).sum(-1, keepdim=True)
    return (scale * acc(probs) * (g - total)).to(grad.dtype), dropped.to(grad.dtype)


def _backward_check(a: Arguments) -> None:
    check_tensor(OP, "grad", a.grad)
    check_like(OP, "probs", a.probs, a.grad, of="grad")
    check_drop(OP, a.p, a.seed, a.stream, a.grad, "grad")


def _backward_samples(dtype: torch.dtype) -> Iterator[Sample]:
    for number, (name, x) in enumerate(row_samples(dtype)):
        probs = torch.softmax(randn(*x.shape, seed=44), -1).to(dtype)
        drop_args = (0.3 * (number % 3), torch.tensor(number), number)
        yield Sample((x, probs, 0.125, *drop_args), id=name)


def _backward_stock(grad: Tensor, probs: Tensor, scale: float, p: float, *rest: Any) -> Any:
    keep = torch.empty_like(grad, dtype=torch.bool).bernoulli_(1 - p)
    factor = 1 / (1 - p)
    g = torch.ops.aten.native_dropout_backward(grad, keep, factor)
    d = torch.ops.aten._softmax_backward_data(g, probs, -1, grad.dtype)
    return d * scale, torch.ops.aten.native_dropout_backward(probs, keep, factor)


def _backward_bench() -> Iterator[BenchCase]:
    return row_bench(
        lambda r, c, dtype: (
            randn(r, c, dtype=dtype),
            torch.softmax(randn(r, c), -1).to(dtype),
            0.125,
            0.1,
            torch.tensor(1),
        ),
        moves=4,
        shapes=((12288, 128), (6144, 512)),
    )


register_op(
    name=OP,
    reference=_backward_backward,
    check=_backward_check,
    fake=lambda a: (fake_like(a.grad), fake_like(a.grad)),
    samples=_backward_samples,
    stock=_backward_stock,
    backward=None,
    tolerance={
        torch.float32: (1e-5, 1e-5),
        torch.bfloat16: (1.6e-2, 1e-2),
        torch.float16: (2e-3, 2e-3),
    },
    bench=_backward_bench,
    summary="Gradient of softmax followed by dropout",
)

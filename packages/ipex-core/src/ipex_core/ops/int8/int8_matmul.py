# SPDX-License-Identifier: Apache-2.0
"""Products of two activations on 8-bit integers: both are quantized on the way in, with scales that are known."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ipex_core.library.arguments import Arguments
from ipex_core.library.checks import check_device, check_dtype, check_tensor, randn, strided
from ipex_core.library.kernels import register
from ipex_core.library.spec import BenchCase, OpSpec, Sample, check
from ipex_core.ops.int8.pack_int8_weight import int8_randn
from ipex_core.ops.int8.quantize import check_scale, codes

Tensor = torch.Tensor

OP = "int8_matmul"
#: Rows of b: more could leave the range of int32 sums.
MOST_DEPTH = 32768
_MOST_DIMS = 16


def _dequantized(x: Tensor, scale: float, zero: int) -> Tensor:
    """Return the codes of ``x`` less the zero point, in float64."""
    step = torch.tensor(scale, dtype=torch.float32, device=x.device)
    shift = torch.tensor(zero, dtype=torch.int32, device=x.device)
    return codes(x, step, shift, symmetric=False).double() - zero


def _matmul(
    a: Tensor, b: Tensor, a_scale: float, a_zero: int, b_scale: float, b_zero: int
) -> Tensor:
    """Compute ``a @ b`` on uint8 codes of both factors.

    A factor is replaced by ``(code - zero) * scale`` with ``code = round(x / scale) + zero`` in 0..255, as
    `quantize_per_tensor` has it. The integers are multiplied and summed exactly; the result is rounded once.

    Args:
        a: ``[..., M, K]``, float32, bfloat16 or float16; K at most 32768.
        b: ``[..., K, N]`` of the same dtype; leading sizes broadcast. Leading strides may be any, so heads need no
            copy; a transposed ``[..., N, K]`` is read in place.
        a_scale: Scale of ``a``, finite and at least 2^-120.
        a_zero: Its zero point, 0..255.
        b_scale: Scale of ``b``.
        b_zero: Its zero point.

    Returns:
        A contiguous ``[..., M, N]`` tensor in the dtype of ``a``.

    Raises:
        RuntimeError: An argument is not as described.
    """
    scale = torch.tensor(a_scale, dtype=torch.float32) * torch.tensor(b_scale, dtype=torch.float32)
    product = _dequantized(a, a_scale, a_zero) @ _dequantized(b, b_scale, b_zero)
    return (product * scale.double().to(a.device)).to(a.dtype)


def _check(a: Arguments) -> None:
    check_tensor(OP, "a", a.a, min_dim=2)
    check_device(OP, "b", a.b, a.a, "a")
    check_dtype(OP, "b", a.b, a.a, "a")
    both = zip(reversed(a.a.shape[:-2]), reversed(a.b.shape[:-2]), strict=False)
    fits = a.b.dim() >= 2 and a.b.shape[-2] == a.a.shape[-1]
    fits = fits and all(x in (y, 1) or y == 1 for x, y in both)
    text = (
        f"have a.shape[-1] rows and leading sizes that broadcast with a of shape {list(a.a.shape)}"
    )
    check(fits, OP, "b", text, list(a.b.shape))
    check(
        max(a.a.dim(), a.b.dim()) <= _MOST_DIMS,
        OP,
        "a",
        f"have at most {_MOST_DIMS} dimensions",
        a.a.dim(),
    )
    depth = a.a.shape[-1]
    check(depth <= MOST_DEPTH, OP, "a", f"have at most {MOST_DEPTH} columns", depth)
    for name, scale, zero in (("a", a.a_scale, a.a_zero), ("b", a.b_scale, a.b_zero)):
        check_scale(OP, f"{name}_scale", scale)
        check(0 <= zero <= 255, OP, f"{name}_zero", "be in [0, 255]", zero)


def _fake(a: Arguments) -> Tensor:
    lead = torch.broadcast_shapes(a.a.shape[:-2], a.b.shape[:-2])
    return a.a.new_empty(*lead, a.a.shape[-2], a.b.shape[-1])


_HEADS = 12  # of the benchmark
_SCALES = (0.03, 120, 0.025, 140)


def _samples(dtype: torch.dtype) -> Iterator[Sample]:
    for shape in (
        (2, 3, 5, 7),
        (1, 1, 1, 1),
        (3, 1, 65, 40),
        (2, 33, 32, 64),
        (1, 70, 100, 130),
        (1, 300, 17, 33),
        (1, 26, 513, 1100),
    ):
        batch, m, k, n = shape
        name = "x".join(map(str, shape))
        a, b = randn(batch, m, k, dtype=dtype, seed=1), randn(batch, k, n, dtype=dtype, seed=2)
        yield Sample((a, b, *_SCALES), id=name)
        yield Sample((a, b.mT.contiguous().mT, *_SCALES), id=f"{name}-transposed")
    heads = [randn(2, 9, 3, 40, dtype=dtype, seed=s).transpose(1, 2) for s in (3, 4)]
    yield Sample((heads[0], heads[1].mT, *_SCALES), id="heads")
    a, b = randn(20, 30, dtype=dtype, seed=5), randn(30, 50, dtype=dtype, seed=6)
    yield Sample((a, b, 0.02, 0, 0.02, 255), id="one-sided")
    shared = b.expand(4, 30, 50)
    yield Sample((a.expand(4, 20, 30), shared, *_SCALES), id="expanded")
    several = randn(3, 1, 7, 30, dtype=dtype, seed=7)
    yield Sample((several, randn(2, 30, 9, dtype=dtype, seed=8), *_SCALES), id="broadcast")
    yield Sample((several, b, *_SCALES), id="one_matrix")
    yield Sample((strided(a), strided(b), *_SCALES), id="noncontiguous")
    yield Sample((a[:0], b, *_SCALES), id="no_rows")
    yield Sample((a[:, :0], b[:0], *_SCALES), id="no_sums")
    full = torch.full((2, 4096), 9.0, dtype=dtype)
    yield Sample((full, full.T, 0.03, 0, 0.03, 0), id="largest_codes")
    yield Sample((full, -full.T, 0.03, 255, 0.03, 255), id="opposite_codes")
    a = a.clone()
    a[1, 2], a[2, 3], a[3, 4] = float("nan"), float("inf"), -float("inf")
    yield Sample((a, b, *_SCALES), id="special_values")


def _stock(
    a: Tensor, b: Tensor, a_scale: float, a_zero: int, b_scale: float, b_zero: int
) -> Tensor:
    return torch.matmul(a, b)


def _bench() -> Iterator[BenchCase]:
    for batch, length, size in ((1, 128, 64), (8, 128, 64), (1, 512, 64)):
        for name, m, k, n in (("scores", length, size, length), ("values", length, length, size)):

            def make(
                dtype: torch.dtype, batch: int = batch, m: int = m, k: int = k, n: int = n
            ) -> tuple[object, ...]:
                # Numbers whose codes are exact, so that the result equals stock.
                step = 2.0**-5
                a = (int8_randn(batch, _HEADS, m, k, seed=1) * step).to(dtype)
                b = (int8_randn(batch, _HEADS, n, k, seed=2) * step).to(dtype).mT
                return a, b if k < n else b.contiguous(), step, 128, step, 128

            moved = batch * _HEADS * (m * k + k * n + m * n)
            yield BenchCase(
                f"{name}-{batch}x{_HEADS}x{m}x{k}x{n}",
                make,
                lambda dtype, moved=moved: moved * dtype.itemsize,
                flops=2 * batch * _HEADS * m * k * n,
                unit=torch.int8,
            )


register(
    OpSpec(
        name=OP,
        schema=(
            "(Tensor a, Tensor b, float a_scale, int a_zero, float b_scale, int b_zero) -> Tensor"
        ),
        reference=_matmul,
        check=_check,
        fake=_fake,
        samples=_samples,
        stock=_stock,
        backward=None,
        autocast="lower_precision",
        lift=False,
        bench=_bench,
        summary="Product of two activations on 8-bit integers",
    )
)

# SPDX-License-Identifier: Apache-2.0
"""Batches of matrix products, scaled and added to."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ipex_core.library.arguments import Arguments
from ipex_core.library.checks import (
    acc,
    check_device,
    check_dtype,
    check_shape,
    check_tensor,
    randn,
    strided,
)
from ipex_core.library.kernels import register
from ipex_core.library.spec import BenchCase, OpSpec, Sample, check
from ipex_core.ops.linear.grouped_linear import check_packed_rows, unpack_rows
from ipex_core.ops.linear.linear import stored_dtype
from ipex_core.packing import dense

Tensor = torch.Tensor
OP = "bmm"


def _bmm(
    a: Tensor, b: Tensor, add: Tensor | None = None, alpha: float = 1.0, out_features: int = 0
) -> Tensor:
    """Compute ``alpha * (a @ b) + add`` for each matrix of a batch.

    Products are accumulated in float32 and the result is rounded once.

    Args:
        a: ``[B, M, K]``, float32, bfloat16 or float16.
        b: ``[B, K, N]`` in the dtype of ``a``; a transposed ``[B, N, K]`` is read in place. Or packed, for factors
            that are used again and again: uint8 ``[B, bytes]``, each row the result of `pack_linear_weight` for the
            ``[N, K]`` transpose of a factor.
        add: ``[B, M, N]`` in the dtype of ``a``, or None.
        alpha: Factor of the products.
        out_features: N where ``b`` is packed; else N or 0.

    Returns:
        A contiguous ``[B, M, N]`` tensor in the dtype of ``a``.
    """
    wide = acc(a)
    if b.dtype == torch.uint8:
        stored = a.dtype if b.shape[0] == 0 else stored_dtype(a, b[0])
        weights = unpack_rows(OP, "b", b, out_features, a.shape[2], stored)
        parts = [m @ w.to(wide.dtype).t() for m, w in zip(wide, weights, strict=True)]
        y = torch.stack(parts) if parts else wide.new_empty(0, a.shape[1], out_features)
    else:
        y = torch.bmm(wide, b.to(wide.dtype))
    y = y * alpha
    if add is not None:
        y = y + acc(add)
    return y.to(a.dtype)


def _check(a: Arguments) -> None:
    check_tensor(OP, "a", a.a, min_dim=3)
    check(a.a.dim() == 3, OP, "a", "be 3-D", list(a.a.shape))
    batch, m, k = a.a.shape
    check_device(OP, "b", a.b, a.a, "a")
    if a.b.dtype == torch.uint8:
        check(
            a.out_features > 0, OP, "out_features", "be positive where b is packed", a.out_features
        )
        check_packed_rows(OP, "b", a.b, batch, a.out_features, k, a.a.dtype)
        n = a.out_features
    else:
        check_dtype(OP, "b", a.b, a.a, "a")
        fits = a.b.dim() == 3 and list(a.b.shape[:2]) == [batch, k]
        check(fits, OP, "b", f"have shape [{batch}, {k}, N]", list(a.b.shape))
        n = a.b.shape[2]
        check(
            a.out_features in (0, n),
            OP,
            "out_features",
            f"be b.shape[2] = {n} or 0",
            a.out_features,
        )
    if a.add is not None:
        check_device(OP, "add", a.add, a.a, "a")
        check_dtype(OP, "add", a.add, a.a, "a")
        shape = [batch, m, n]
        check_shape(OP, "add", a.add, shape)


def _fake(a: Arguments) -> Tensor:
    n = a.out_features if a.b.dtype == torch.uint8 else a.b.shape[2]
    return a.a.new_empty(a.a.shape[0], a.a.shape[1], n)


def _factors(dtype: torch.dtype, batch: int, m: int, k: int, n: int) -> tuple[Tensor, Tensor]:
    a = randn(batch, m, k, dtype=dtype, seed=1)
    return a, randn(batch, k, n, dtype=dtype, seed=2, scale=max(k, 1) ** -0.5)


def _pack(b: Tensor) -> Tensor:
    return torch.stack([dense.pack(one.t()) for one in b])


def _samples(dtype: torch.dtype) -> Iterator[Sample]:
    for shape in (
        (1, 1, 1, 1),
        (2, 3, 5, 7),
        (3, 1, 65, 40),
        (4, 33, 32, 64),
        (2, 70, 100, 130),
        (1, 300, 17, 33),
    ):
        name = "x".join(map(str, shape))
        a, b = _factors(dtype, *shape)
        yield Sample((a, b), id=name)
        yield Sample((a, b.mT.contiguous().mT), id=f"{name}-transposed")
        yield Sample((a, _pack(b), None, 1.0, shape[3]), id=f"{name}-packed")
    a, b = _factors(dtype, 3, 9, 40, 50)
    add = randn(3, 9, 50, dtype=dtype, seed=3)
    yield Sample((a, b, add, 0.25), id="add")
    yield Sample((a, _pack(b), add, -2.0, 50), id="packed-add")
    heads = randn(9, 3, 40, dtype=dtype, seed=4).transpose(0, 1)
    yield Sample((heads, b, strided(add)), id="heads")
    # One product by columns, as gradients of weights are, and one with many rows.
    a1, b1 = _factors(dtype, 1, 70, 45, 40)
    add1 = randn(1, 1, 40, dtype=dtype, seed=5).expand(1, 70, 40)
    yield Sample((a1.mT.contiguous().mT, b1, add1, 0.5), id="one-by_columns")
    yield Sample(_factors(dtype, 1, 1030, 19, 35), id="one-many_rows")
    yield Sample((strided(a), strided(b), None, 1.0, 50), id="noncontiguous")
    yield Sample((a[:, :0], b), id="no_rows")
    yield Sample((a[:, :, :0], b[:, :0], add), id="no_sums")
    yield Sample((a[:0], b[:0]), id="no_batch")
    a = a.clone()
    a[0, 1, 2], a[1, 2, 3] = float("nan"), float("inf")
    yield Sample((a, b), id="special_values")


def _bench() -> Iterator[BenchCase]:
    for shape in (
        (16, 1, 512, 128),
        (32, 1, 128, 1024),
        (32, 4, 128, 128),
        (32, 128, 128, 128),
        (16, 512, 64, 512),
        (8, 512, 512, 512),
    ):
        batch, m, k, n = shape
        for name, transposed in (("", False), ("-transposed", True)):

            def make(
                dtype: torch.dtype,
                shape: tuple[int, int, int, int] = shape,
                transposed: bool = transposed,
            ) -> tuple[Tensor, Tensor]:
                a, b = _factors(dtype, *shape)
                return a, b.mT.contiguous().mT if transposed else b

            moved = batch * (m * k + k * n + m * n)
            yield BenchCase(
                "x".join(map(str, shape)) + name,
                make,
                lambda dtype, moved=moved: moved * dtype.itemsize,
                flops=2 * batch * m * k * n,
            )


register(
    OpSpec(
        name=OP,
        schema=(
            "(Tensor a, Tensor b, Tensor? add=None, float alpha=1.0, int out_features=0) -> Tensor"
        ),
        reference=_bmm,
        check=_check,
        fake=_fake,
        autocast="lower_precision_unless_packed",
        samples=_samples,
        stock=torch.bmm,
        tolerance={
            torch.float32: (1e-4, 1e-4),
            torch.bfloat16: (1.6e-2, 2e-2),
            torch.float16: (4e-3, 4e-3),
        },
        bench=_bench,
        summary="Batch of matrix products, scaled, with a sum; second factor plain or packed",
    )
)

# SPDX-License-Identifier: Apache-2.0
"""Checks, fakes and sample tensors shared by the op modules."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch

from ipex_core._spec import FLOATS, Sample, check

__all__ = [
    "acc",
    "check_like",
    "check_tensor",
    "check_vector",
    "fake_like",
    "randn",
    "strided",
]


def acc(x: torch.Tensor) -> torch.Tensor:
    """Return ``x`` in the type references compute in: float64 stays, everything else becomes float32."""
    return x if x.dtype == torch.float64 else x.float()


def check_tensor(
    op: str, name: str, x: torch.Tensor, dtypes: Sequence[torch.dtype] = FLOATS, min_dim: int = 1
) -> None:
    """Check the dtype and the number of dimensions of a leading argument."""
    names = ", ".join(str(d).removeprefix("torch.") for d in dtypes)
    check(x.dtype in dtypes, op, name, f"have dtype {names}", str(x.dtype).removeprefix("torch."))
    check(x.dim() >= min_dim, op, name, f"have at least {min_dim} dimension(s)", f"{x.dim()}-D")


def check_like(op: str, name: str, value: torch.Tensor, x: torch.Tensor) -> None:
    """Check that ``value`` has the device, dtype and shape of ``x``."""
    check(value.device == x.device, op, name, f"be on the device of x = {x.device}", value.device)
    check(value.dtype == x.dtype, op, name, f"have the dtype of x = {_dtype(x)}", _dtype(value))
    check(value.shape == x.shape, op, name, f"have the shape of x = {list(x.shape)}", list(value.shape))


def check_vector(op: str, name: str, value: torch.Tensor | None, x: torch.Tensor) -> None:
    """Check an optional per-feature vector: 1-D of size ``x.shape[-1]``, in the dtype of ``x`` or float32."""
    if value is None:
        return
    check(value.device == x.device, op, name, f"be on the device of x = {x.device}", value.device)
    check(
        value.dtype in (x.dtype, torch.float32),
        op,
        name,
        f"have the dtype of x = {_dtype(x)} or float32",
        _dtype(value),
    )
    size = x.shape[-1]
    check(
        value.dim() == 1 and value.shape[0] == size,
        op,
        name,
        f"be 1-D of size x.shape[-1] = {size}",
        list(value.shape),
    )


def _dtype(x: torch.Tensor) -> str:
    return str(x.dtype).removeprefix("torch.")


def fake_like(x: torch.Tensor) -> torch.Tensor:
    """Return a new contiguous tensor like ``x``; what every element-wise kernel allocates."""
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def randn(
    *shape: int, dtype: torch.dtype = torch.float32, seed: int = 0, scale: float = 1.0
) -> torch.Tensor:
    """Return reproducible normal numbers, drawn in float32 and then rounded to ``dtype``."""
    generator = torch.Generator().manual_seed(seed * 7919 + math.prod(shape) + 1)
    return (torch.randn(shape, generator=generator) * scale).to(dtype)


def strided(x: torch.Tensor) -> torch.Tensor:
    """Return a tensor with the values of ``x`` whose last dimension is not contiguous."""
    wide = torch.zeros(*x.shape[:-1], x.shape[-1] * 2, dtype=x.dtype)
    view = wide[..., ::2]
    view.copy_(x)
    return view


#: Shapes every row-wise op is checked on: one row and many, sizes around the vector widths, empty.
ROW_SHAPES: tuple[tuple[int, ...], ...] = (
    (1, 1),
    (3, 7),
    (5, 16),
    (2, 3, 33),
    (129, 64),
    (4, 129),
    (7, 1024),
    (2, 4096),
    (300, 384),
)


def row_samples(dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield ``(id, x)`` for row-wise ops: the shapes above, non-contiguous, empty and extreme values."""
    for shape in ROW_SHAPES:
        yield "x".join(map(str, shape)), randn(*shape, dtype=dtype, seed=1)
    yield "1d", randn(40, dtype=dtype, seed=2)
    yield "noncontiguous", strided(randn(6, 50, dtype=dtype, seed=3))
    yield "transposed", randn(24, 5, dtype=dtype, seed=4).t()
    yield "rows_strided", randn(9, 96, dtype=dtype, seed=5)[:, 8:72]
    yield "no_rows", randn(0, 8, dtype=dtype)
    yield "no_columns", randn(3, 0, dtype=dtype)
    special = randn(6, 40, dtype=dtype, seed=6)
    special[0, 3] = float("nan")
    special[1, 5] = float("inf")
    special[2, 7] = -float("inf")
    special[3] = 0.0
    special[4] *= 1e-3
    yield "special_values", special
    yield "large", randn(4, 70, dtype=dtype, seed=7, scale=100.0)


__all__ += ["ROW_SHAPES", "Sample", "row_samples"]

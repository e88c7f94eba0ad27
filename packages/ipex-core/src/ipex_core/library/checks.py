# SPDX-License-Identifier: Apache-2.0
"""Checks, fakes and sample tensors shared by the op modules."""

from __future__ import annotations

import contextlib
import functools
import math
import threading
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, TypeVar

import torch
from torch.utils.weak import TensorWeakRef

from ipex_core.library.spec import FLOATS, BenchCase, check, dtype_name

__all__ = [
    "PRODUCT_TOLERANCE",
    "ROW_SHAPES",
    "SUM_TOLERANCE",
    "acc",
    "check_broadcastable",
    "check_contiguous",
    "check_device",
    "check_dtype",
    "check_dtype_in",
    "check_kind",
    "check_like",
    "check_not_expanded",
    "check_once",
    "check_one_of",
    "check_score_scale",
    "check_shape",
    "check_tensor",
    "check_vector",
    "dtype_name",
    "fake_like",
    "randn",
    "read_once",
    "row_bench",
    "row_samples",
    "strided",
]

T = TypeVar("T")

#: `OpSpec.tolerance` of products of matrices, whose sums are long.
PRODUCT_TOLERANCE = {
    torch.float32: (1e-4, 1e-4),
    torch.bfloat16: (1.6e-2, 2e-2),
    torch.float16: (4e-3, 4e-3),
}
#: `OpSpec.tolerance` of ops that sum in another order than their reference, over a row or less.
SUM_TOLERANCE = {
    torch.float32: (1e-4, 1e-4),
    torch.bfloat16: (1.6e-2, 1e-2),
    torch.float16: (2e-3, 2e-3),
}


def acc(x: torch.Tensor) -> torch.Tensor:
    """Return ``x`` in the type references compute in: float64 stays, everything else becomes float32."""
    return x if x.dtype == torch.float64 else x.float()


def check_tensor(
    op: str, name: str, x: torch.Tensor, dtypes: Sequence[torch.dtype] = FLOATS, min_dim: int = 1
) -> None:
    """Check the dtype and the number of dimensions of a leading argument."""
    check_dtype_in(op, name, x, *dtypes)
    check(x.dim() >= min_dim, op, name, f"have at least {min_dim} dimension(s)", f"{x.dim()}-D")


def check_device(op: str, name: str, value: torch.Tensor, x: torch.Tensor, of: str = "x") -> None:
    """Check that ``value`` lies on the device of ``x``, which the message calls ``of``."""
    if value.device != x.device:
        check(False, op, name, f"be on the device of {of} = {x.device}", value.device)


def check_dtype(
    op: str,
    name: str,
    value: torch.Tensor,
    x: torch.Tensor,
    of: str = "x",
    *,
    or_float32: bool = False,
) -> None:
    """Check that ``value`` has the dtype of ``x``, or float32 where that is allowed."""
    if value.dtype == x.dtype or (or_float32 and value.dtype == torch.float32):
        return
    expected = f"have the dtype of {of} = {dtype_name(x.dtype)}"
    expected += " or float32" if or_float32 else ""
    check(False, op, name, expected, dtype_name(value.dtype))


def check_kind(
    op: str,
    name: str,
    value: torch.Tensor,
    x: torch.Tensor,
    of: str = "x",
    *,
    or_float32: bool = False,
) -> None:
    """Check that ``value`` has the device and the dtype of ``x``, or float32 where that is allowed."""
    check_device(op, name, value, x, of)
    check_dtype(op, name, value, x, of, or_float32=or_float32)


def check_dtype_in(op: str, name: str, value: torch.Tensor, *dtypes: torch.dtype) -> None:
    """Check that ``value`` has one of these dtypes."""
    if value.dtype not in dtypes:
        names = ", ".join(dtype_name(dtype) for dtype in dtypes)
        check(False, op, name, f"have dtype {names}", dtype_name(value.dtype))


def check_shape(op: str, name: str, value: torch.Tensor, shape: Sequence[int]) -> None:
    """Check that ``value`` has this shape."""
    shape = list(shape)
    check(list(value.shape) == shape, op, name, f"have shape {shape}", list(value.shape))


def check_contiguous(op: str, name: str, value: torch.Tensor) -> None:
    """Check that the elements of ``value`` lie in memory in their order, without gaps."""
    check(value.is_contiguous(), op, name, "be contiguous", f"strides {list(value.stride())}")


def check_one_of(op: str, name: str, value: Any, choices: Collection[str]) -> None:
    """Check that ``value`` is one of the names that an argument can have."""
    check(value in choices, op, name, f"be one of {', '.join(choices)}", value)


def check_like(op: str, name: str, value: torch.Tensor, x: torch.Tensor, of: str = "x") -> None:
    """Check that ``value`` has the device, dtype and shape of ``x``."""
    check_kind(op, name, value, x, of)
    if value.shape != x.shape:
        expected = f"have the shape of {of} = {list(x.shape)}"
        check(False, op, name, expected, list(value.shape))


def check_not_expanded(op: str, name: str, x: torch.Tensor) -> None:
    """Check that no two elements of a tensor that is written to share memory by a stride of 0."""
    for dim, (size, stride) in enumerate(zip(x.shape, x.stride(), strict=True)):
        if stride == 0 and size > 1:
            check(False, op, name, "not be expanded", f"stride 0 in dimension {dim}")


def check_score_scale(op: str, name: str, scale: float) -> None:
    """Check a factor on scores: masks are minus infinity, which a negative factor would turn round."""
    fine = 0.0 <= scale < math.inf
    check(fine, op, name, "be a finite number, 0 or more", f"{scale:g}")


def check_vector(op: str, name: str, value: torch.Tensor | None, x: torch.Tensor) -> None:
    """Check an optional vector in the dtype of ``x`` or float32: 1-D, one value per feature of ``x``."""
    if value is None:
        return
    check_kind(op, name, value, x, or_float32=True)
    size = x.shape[-1]
    fits = value.dim() == 1 and value.shape[0] == size
    check(fits, op, name, f"be 1-D of size x.shape[-1] = {size}", list(value.shape))


def check_broadcastable(
    op: str, name: str, value: torch.Tensor, shape: Sequence[int], of: str
) -> None:
    """Check that ``value`` broadcasts to ``shape`` and not beyond it."""
    check(
        value.dim() <= len(shape)
        and all(
            have in (1, want)
            for have, want in zip(reversed(value.shape), reversed(shape), strict=False)
        ),
        op,
        name,
        f"be broadcastable to {of} of shape {list(shape)}",
        list(value.shape),
    )


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


def row_bench(
    make: Callable[[int, int, torch.dtype], tuple[Any, ...]],
    *,
    moves: int,
    shapes: Sequence[tuple[int, int]] = ((1, 4096), (32, 4096), (512, 4096), (4096, 384)),
    prefix: str = "",
) -> Iterator[BenchCase]:
    """Yield the benchmark of an op on ``[rows, columns]``.

    Args:
        make: ``(rows, columns, dtype)`` -> arguments of the op.
        moves: How many matrices of that shape are read or written.
        shapes: Rows and columns; the default is an LLM's and an encoder's.
        prefix: Put before the shape in the name of the case.
    """
    for rows, columns in shapes:
        yield BenchCase(
            f"{prefix}{rows}x{columns}",
            lambda dtype, r=rows, c=columns: make(r, c, dtype),
            lambda dtype, n=rows * columns: moves * n * dtype.itemsize,
        )


_checked = threading.local()


@contextlib.contextmanager
def arguments_were_checked() -> Iterator[None]:
    """Let ops that ask `are_checked` not check their arguments in this thread: a call with like ones was checked."""
    before, _checked.done = are_checked(), True
    try:
        yield
    finally:
        _checked.done = before


def are_checked() -> bool:
    """Return whether arguments of ops were checked already; see `arguments_were_checked`."""
    return getattr(_checked, "done", False)


#: Number of a tensor -> the tensor, and by what reads it its state and what was read. Faster than torch's weak keys.
_known: dict[int, tuple[weakref.ref[torch.Tensor], dict[Any, Any]]] = {}


def _facts(x: torch.Tensor) -> dict[Any, Any]:
    number = id(x)
    found = _known.get(number)
    if found is None or found[0]() is not x:
        found = _known[number] = weakref.ref(x, functools.partial(_forget, _known, number)), {}
    return found[1]


def _forget(known: dict[int, Any], number: int, tensor: weakref.ref[torch.Tensor]) -> None:
    # Given the dictionary, since at the end of the process the names of this module are gone.
    if number in known and known[number][0] is tensor:
        del known[number]


def read_once(x: torch.Tensor, read: Callable[[torch.Tensor], T]) -> T:
    """Return ``read(x)``; of a tensor on a device the result of an earlier call, if it was not written to since then.

    The layers of a model share lengths and tables of blocks, and calls share weights: each is read once, and not at
    each call of an op. Tensors that were made in inference mode, whose writes torch does not count, are always read.

    Args:
        x: The tensor.
        read: A function that is the same object at each call; its result must not be changed.

    Returns:
        What ``read`` returned.

    Example:
        >>> read_once(torch.tensor([1, 2]), torch.Tensor.tolist)
        [1, 2]
    """
    if x.device.type == "cpu" or x.is_inference():
        return read(x)
    state = _state(x)
    of_tensor = _facts(x)
    known = of_tensor.get(read)
    if known is None or known[0] != state:
        known = of_tensor[read] = state, read(x)
    result: T = known[1]
    return result


def check_once(
    tensors: tuple[torch.Tensor, ...], others: tuple[object, ...], check_values: Callable[[], None]
) -> None:
    """Call ``check_values`` unless it passed for these tensors on a device, which were not written to since then.

    What `read_once` says of lengths and tables holds for checks of them, too.

    Args:
        tensors: One or more, whose values are checked.
        others: What else the check depends on.
        check_values: Raises where something is wrong.

    Example:
        >>> check_once((torch.tensor([1, 2]),), (2,), lambda: None)
    """
    if any(x.device.type == "cpu" or x.is_inference() for x in tensors):
        return check_values()
    state = others, *map(_state, tensors)
    of_tensor = _facts(tensors[0])
    known, same = of_tensor.get(check_once, (None, ()))
    if known != state or any(ref() is not x for ref, x in zip(same, tensors, strict=True)):
        check_values()
        of_tensor[check_once] = state, tuple(map(TensorWeakRef, tensors))
    return None


def _state(x: torch.Tensor) -> tuple[object, ...]:
    """Return what changes when ``x`` is written to."""
    return x._version, x.data_ptr(), x.shape, x.stride()

# SPDX-License-Identifier: Apache-2.0
"""Built-ins on integers: element-wise functions, and lookups along a dimension."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch

from ipex_core.library.spec import check, dtype_name
from ipex_core.program.tensors import check_dim

_DTYPES = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool)
_NAMES = ", ".join(map(dtype_name, _DTYPES))

#: The functions by name, with the number of their operands; all of int64 values.
INTEGER_FUNCTIONS: Mapping[str, tuple[int, Callable[..., torch.Tensor]]] = MappingProxyType(
    {
        "add": (2, torch.add),
        "sub": (2, torch.sub),
        "mul": (2, torch.mul),
        "neg": (1, torch.neg),
        "abs": (1, torch.abs),
        "floor_divide": (2, torch.floor_divide),
        "remainder": (2, torch.remainder),
        "minimum": (2, torch.minimum),
        "maximum": (2, torch.maximum),
        "bitwise_and": (2, torch.bitwise_and),
        "bitwise_or": (2, torch.bitwise_or),
        "bitwise_xor": (2, torch.bitwise_xor),
        "bitwise_not": (1, torch.bitwise_not),
        "eq": (2, torch.eq),
        "ne": (2, torch.ne),
        "lt": (2, torch.lt),
        "le": (2, torch.le),
        "gt": (2, torch.gt),
        "ge": (2, torch.ge),
        "where": (3, lambda a, b, c: torch.where(a != 0, b, c)),
    }
)


def check_integer(inputs: Sequence[Any], function: str, dtype: torch.dtype) -> None:
    """Check what does not depend on the tensors."""
    names = ", ".join(INTEGER_FUNCTIONS)
    known = function in INTEGER_FUNCTIONS
    check(known, "integer", "function", f"be one of {names}", function)
    count = INTEGER_FUNCTIONS[function][0]
    check(len(inputs) == count, "integer", "inputs", f"have {count} tensor(s)", len(inputs))
    check(dtype in _DTYPES, "integer", "dtype", f"have dtype {_NAMES}", dtype_name(dtype))


def integer(inputs: list[torch.Tensor], function: str, dtype: torch.dtype) -> torch.Tensor:
    """Return a function of tensors of integers or bool, broadcast, in ``dtype``, contiguous.

    It is computed in int64; numbers that are too large for int64 or ``dtype`` wrap, and true is what is not 0. A
    divisor of 0 is an error.
    """
    check_integer(inputs, function, dtype)
    shape: list[int] = []
    for i, one in enumerate(inputs):
        check(
            one.dtype in _DTYPES, "integer", "inputs", f"have dtype {_NAMES}", dtype_name(one.dtype)
        )
        pairs = zip(reversed(one.shape), reversed(shape), strict=False)
        wanted = f"broadcast with the inputs before it of shape {shape}"
        fits = all(m in (n, 1) or n == 1 for m, n in pairs)
        check(fits, "integer", f"input {i}", wanted, list(one.shape))
        shape = list(torch.broadcast_shapes(one.shape, shape))
    if function in ("floor_divide", "remainder") and 0 not in shape:
        check(bool((inputs[1] != 0).all()), "integer", "the divisor", "not be 0", 0)
    y = INTEGER_FUNCTIONS[function][1](*(one.long() for one in inputs))
    return y.expand(shape).to(dtype).contiguous()


def _check_index(op: str, index: torch.Tensor, low: int, limit: int) -> None:
    known = index.dtype in (torch.int32, torch.int64)
    check(known, op, "index", "be int32 or int64", index.dtype)
    if index.numel():
        least, most = (int(bound) for bound in torch.aminmax(index))
        bad = least if least < low else most
        check(low <= bad < limit, op, "index", f"be in [{low}, {limit})", bad)


def take(x: torch.Tensor, dim: int, index: torch.Tensor) -> torch.Tensor:
    """Return ``x`` at the places ``index``, of any shape, along ``dim``; negative ones count from the end."""
    check_dim("take", "dim", dim, x.dim())
    dim %= x.dim()
    _check_index("take", index, -x.shape[dim], x.shape[dim])
    where = (slice(None),) * dim + (index.long(),)
    return x[where].contiguous()


def gather(x: torch.Tensor, dim: int, index: torch.Tensor) -> torch.Tensor:
    """Return the elements of ``x`` at places ``index`` along ``dim``, one for each of ``index``; see `torch.gather`."""
    check_dim("gather", "dim", dim, x.dim())
    dim %= x.dim()
    sizes, given = list(x.shape), list(index.shape)
    fits = len(sizes) == len(given)
    fits = fits and all(
        d == dim or n <= m for d, (n, m) in enumerate(zip(given, sizes, strict=True))
    )
    wanted = f"be at most as large as x of shape {sizes} except in dimension {dim}"
    check(fits, "gather", "index", wanted, given)
    _check_index("gather", index, 0, sizes[dim])
    return x.gather(dim, index.long())

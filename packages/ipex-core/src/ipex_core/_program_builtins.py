# SPDX-License-Identifier: Apache-2.0
"""Instructions of a program that are no ops of ipex: views, lookups and a little arithmetic.

Each is written down as an op is, by a schema and a reference in plain PyTorch; the native interpreter has its own
versions. They have no entry in ``torch.ops.ipex``: stock PyTorch has an op for each.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch

from ipex_core._spec import check

__all__ = ["BUILTINS", "Builtin"]


@dataclasses.dataclass(frozen=True, slots=True)
class Builtin:
    """One built-in instruction.

    Attributes:
        schema: As in `OpSpec`.
        reference: The instruction in plain PyTorch.
        view: Whether the result may share the memory of the first argument.
    """

    schema: str
    reference: Callable[..., Any]
    view: bool = False


def _check_ids(op: str, argument: str, ids: torch.Tensor, rows: int) -> None:
    check(ids.dtype in (torch.int32, torch.int64), op, argument, "be int32 or int64", ids.dtype)
    if ids.numel():
        low, high = (int(bound) for bound in torch.aminmax(ids))
        bad = low if low < 0 else high
        check(0 <= bad < rows, op, argument, f"be in [0, {rows})", bad)


def embedding(weight: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Return the rows ``ids`` [...] of ``weight`` [V, H] as [..., H]; ids outside [0, V) are an error."""
    check(weight.dim() == 2, "embedding", "weight", "be 2-D", f"{weight.dim()}-D")
    _check_ids("embedding", "ids", ids, weight.shape[0])
    return torch.nn.functional.embedding(ids, weight)


def select_rows(x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Return the rows ``index`` [R] of ``x`` [N, ...] as [R, ...]; an index outside [0, N) is an error."""
    check(x.dim() >= 1, "select_rows", "x", "have at least 1 dimension(s)", f"{x.dim()}-D")
    check(index.dim() == 1, "select_rows", "index", "be 1-D", f"{index.dim()}-D")
    _check_ids("select_rows", "index", index, x.shape[0])
    return x.index_select(0, index)


def reshape(x: torch.Tensor, sizes: list[int]) -> torch.Tensor:
    """Return ``x`` in another shape: 0 keeps the size at that place, one -1 is inferred. A view where possible."""
    kept = all(size != 0 for size in sizes[x.dim() :])
    check(kept, "reshape", "sizes", f"have 0 only below {x.dim()} (the dimensions of x)", sizes)
    return x.reshape([x.shape[i] if size == 0 else size for i, size in enumerate(sizes)])


def narrow(x: torch.Tensor, dim: int, start: int, length: int) -> torch.Tensor:
    """Return ``x[..., start : start + length, ...]`` along ``dim``, a view."""
    check(-x.dim() <= dim < x.dim(), "narrow", "dim", f"be a dimension of x ({x.dim()}-D)", dim)
    size = x.shape[dim]
    fits = start >= 0 and length >= 0 and start + length <= size
    check(fits, "narrow", "start, length", f"lie in [0, {size}]", f"{start}, {length}")
    return x.narrow(dim, start, length)


def transpose(x: torch.Tensor, a: int, b: int) -> torch.Tensor:
    """Return ``x`` with the dimensions ``a`` and ``b`` swapped, a view."""
    for name, dim in (("a", a), ("b", b)):
        check(
            -x.dim() <= dim < x.dim(), "transpose", name, f"be a dimension of x ({x.dim()}-D)", dim
        )
    return x.transpose(a, b)


def cast(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return ``x`` in ``dtype``; ``x`` itself if it has that dtype."""
    return x.to(dtype)


def copy_(dst: torch.Tensor, src: torch.Tensor) -> None:
    """Write ``src``, broadcast and converted, into ``dst``."""
    dst.copy_(src)


#: The built-ins by name. Those that end in ``_scalar`` are what ``add`` and ``mul`` become for a Python number.
BUILTINS: Mapping[str, Builtin] = MappingProxyType(
    {
        "embedding": Builtin("(Tensor weight, Tensor ids) -> Tensor", embedding),
        "select_rows": Builtin("(Tensor x, Tensor index) -> Tensor", select_rows),
        "reshape": Builtin("(Tensor x, int[] sizes) -> Tensor", reshape, view=True),
        "narrow": Builtin(
            "(Tensor x, int dim, int start, int length) -> Tensor", narrow, view=True
        ),
        "transpose": Builtin("(Tensor x, int a, int b) -> Tensor", transpose, view=True),
        "cast": Builtin("(Tensor x, ScalarType dtype) -> Tensor", cast, view=True),
        "add": Builtin("(Tensor a, Tensor b) -> Tensor", torch.add),
        "add_scalar": Builtin("(Tensor a, float b) -> Tensor", torch.add),
        "mul": Builtin("(Tensor a, Tensor b) -> Tensor", torch.mul),
        "mul_scalar": Builtin("(Tensor a, float b) -> Tensor", torch.mul),
        "tanh": Builtin("(Tensor x) -> Tensor", torch.tanh),
        "empty_like": Builtin("(Tensor x) -> Tensor", torch.empty_like),
        "copy_": Builtin("(Tensor(a!) dst, Tensor src) -> ()", copy_),
    }
)

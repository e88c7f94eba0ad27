# SPDX-License-Identifier: Apache-2.0
"""The table of measured choices between our kernel, oneDNN and the stock op: ``measured.tsv``.

``tools/policy_table.py`` writes it from the results of ``ipex bench corpus`` in ``docs/data``. A row is a shape, for
one ISA level and for one or several threads, with the times of the sides and the side to take. A shape that was not
measured takes the side of the nearest one. Where that is far away, or nothing was measured at the level, the table
says nothing.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

FILE = Path(__file__).with_name("measured.tsv")
SIDES = ("ipex", "onednn", "stock")
_BY_LETTER = {name[0]: name for name in SIDES}

#: Sum of the logarithms of the ratios of sizes up to which two shapes are alike.
_NEAR = math.log(4)
#: Choices that are kept; a program whose shapes always change must not fill the memory.
_MOST_KEPT = 4096

_Sizes = tuple[int, ...]
_Key = tuple[str, torch.dtype]


class Row(NamedTuple):
    """One measured shape.

    Attributes:
        level: ISA level.
        threads: ``"1"`` or ``"many"``.
        op: Name of the op, with its kind after a colon where kinds differ: ``"gelu:tanh"``.
        dtype: Name of the dtype.
        sizes: What the op is chosen by; see `ipex_core.kernels.policy`.
        side: One of `SIDES`.
        stock, onednn, ipex: Microseconds of the sides; None where a side is missing.
    """

    level: str
    threads: str
    op: str
    dtype: str
    sizes: _Sizes
    side: str
    stock: float
    onednn: float | None
    ipex: float | None


# Plain globals and no functools.cache: Dynamo warns about caches in what it traces.
_forced: dict[str, str] = {}
_table: dict[_Key, dict[str, list[tuple[_Sizes, str]]]] | None = None
_kept: dict[tuple[str, torch.dtype, int, _Sizes], str | None] = {}
_stays: dict[tuple[str, torch.dtype, int, _Sizes, int], bool] = {}


def rows(file: Path = FILE) -> Iterator[Row]:
    """Yield the rows of a table."""
    for line in file.read_text(encoding="utf-8").splitlines():
        if line.startswith("#") or not line:
            continue
        fields = line.split("\t")
        if len(fields) == 4:  # what the rows below it have in common
            level, threads, op, dtype = fields
            continue
        sizes, chosen, *times = fields
        stock, onednn, ipex = (None if time == "-" else float(time) for time in times)
        assert stock is not None
        numbers = tuple(map(int, sizes.split(",")))
        yield Row(level, threads, op, dtype, numbers, _BY_LETTER[chosen], stock, onednn, ipex)


def side(op: str, dtype: torch.dtype, sizes: Sequence[int]) -> str | None:
    """Return the side that was the fastest at the nearest measured shape; None if none was measured nearby.

    Args:
        op: As in `Row`.
        dtype: Of the operands.
        sizes: As many as the op has in the table.
    """
    if torch.compiler.is_compiling():
        return None  # sizes may be symbols, and Dynamo would guard what is kept
    if op in _forced:
        return _forced[op]
    if _table is None:
        _load()
    assert _table is not None
    if (op, dtype) not in _table:
        return None
    if any(type(size) is not int for size in sizes):
        return None  # symbols of a trace
    key = (op, dtype, torch.get_num_threads(), tuple(sizes))
    if key not in _kept:
        if len(_kept) >= _MOST_KEPT:
            _kept.clear()
        _kept[key] = _nearest(*key)
    return _kept[key]


def stays_stock(op: str, x: torch.Tensor, columns: int = 0) -> bool:
    """Return whether the stock op is to run a layer; quick, for the beginning of a forward.

    A small layer takes as long as the Python code around it, so this comes before all else that a layer looks at.

    Args:
        op: ``"layer_norm"``, ``"rms_norm"`` or ``"softmax"``, whose sizes are rows and columns, ``"gelu:none"`` or
            ``"gelu:tanh"``, whose size is the number of elements, or ``"bmm"``, whose sizes are the ones of `x` and the
            columns of the other operand.
        x: The input of any type; what is no plain tensor does not stay.
        columns: Of the other operand of ``"bmm"``.
    """
    if type(x) is not torch.Tensor or x.is_nested or torch.compiler.is_compiling():
        return False
    key = (op, x.dtype, torch.get_num_threads(), x.shape, columns)
    known = _stays.get(key)
    if known is None or _forced:
        count, last = x.numel(), x.shape[-1] if x.dim() else 0
        if type(last) is not int or last == 0 or type(columns) is not int:  # a symbol, in a trace
            return False
        sizes: _Sizes = (count,) if op.startswith("gelu") else (count // last, last)
        if op == "bmm":
            sizes = (*x.shape, columns)
        known = side(op, x.dtype, sizes) == "stock"
        if not _forced:
            if len(_stays) >= _MOST_KEPT:
                _stays.clear()
            _stays[key] = known
    return known


def is_forced(op: str) -> bool:
    """Return whether one side is taken whatever was measured."""
    return op in _forced


@contextlib.contextmanager
def forced(op: str, chosen: str) -> Iterator[None]:
    """Take one side for an op, whatever was measured: to measure it. For one thread at a time."""
    before = _forced.get(op)
    _forced[op] = chosen
    try:
        yield
    finally:
        if before is None:
            del _forced[op]
        else:
            _forced[op] = before


def _load() -> None:
    global _table
    from ipex_core.kernels.providers import cpu_level

    found: dict[_Key, dict[str, list[tuple[_Sizes, str]]]] = {}
    level = cpu_level()
    for row in rows() if level is not None else ():
        if row.level == level:
            by_threads = found.setdefault((row.op, getattr(torch, row.dtype)), {})
            by_threads.setdefault(row.threads, []).append((row.sizes, row.side))
    _table = found


def _nearest(op: str, dtype: torch.dtype, threads: int, sizes: _Sizes) -> str | None:
    assert _table is not None
    nearest, found = _NEAR, None
    for measured, chosen in _table[op, dtype].get("1" if threads == 1 else "many", ()):
        pairs = zip(measured, sizes, strict=True)
        distance = sum(abs(math.log(max(a, 1) / max(b, 1))) for a, b in pairs)
        if distance <= nearest:
            nearest, found = distance, chosen
    return found

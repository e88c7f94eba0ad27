# SPDX-License-Identifier: Apache-2.0
"""The steps of optimizers for lists of parameters: ``sgd_fused_steps`` for many ``sgd_fused_step``, and so on.

Each tensor of the step for one parameter is a list here, whose name ends in "s"; an empty one stands for tensors that
are not there. The numbers are those of all parameters. With many small parameters most of the time of a step is the way
to its kernel.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from typing import Any

import torch

from ipex_core._spec import BenchCase, OpSpec, Sample, check, register
from ipex_core.ops import (
    adagrad_fused_step,
    adam_fused_step,
    lamb_fused_step,
    lars_fused_step,
    sgd_fused_step,
)

Tensor = torch.Tensor
#: Parameters of a list that is timed.
_MANY = 16


def _listed(single: OpSpec) -> OpSpec:
    name = single.name + "s"
    head, _, result = single.schema.rpartition(" -> ")
    arguments = head.strip("()").split(", ")
    tensors = [a for a in arguments if a.startswith("Tensor")]
    names = [a.split()[-1] + "s" for a in tensors]
    optional = ["? " in a for a in tensors]
    count = len(tensors)
    lists = [
        re.sub(r"(Tensor(?:\(\w!\))?)\?? (\w+)", r"\1[] \2s", a) if i < count else a
        for i, a in enumerate(arguments)
    ]

    def rows(args: tuple[Any, ...]) -> Iterator[tuple[Any, ...]]:
        columns = [values or [None] * len(args[0]) for values in args[:count]]
        return zip(*columns, strict=True)

    def reference(*args: Any) -> None:
        for row in rows(args):
            single.reference(*row, *args[count:])

    def check_lists(*args: Any) -> None:
        expected = len(args[0])
        for label, values, may_lack in zip(names, args, optional, strict=False):
            enough = len(values) == expected or (may_lack and not values)
            check(enough, name, label, f"hold {expected} tensor(s)", len(values))
        for row in rows(args):
            single.check(*row, *args[count:])

    def turned(several: list[tuple[Any, ...]]) -> tuple[Any, ...]:
        """Return the arguments for several calls of the single step, with the numbers of the first."""
        columns = zip(*(args[:count] for args in several), strict=True)
        return (*([v for v in column if v is not None] for column in columns), *several[0][count:])

    def samples(dtype: torch.dtype) -> Iterator[Sample]:
        forms: dict[tuple[Any, ...], list[Sample]] = {}
        for sample in single.samples(dtype):
            args = sample.args[:count]
            form = (args[0].dtype, *(a is None for a in args))
            forms.setdefault(form, []).append(sample)
        for several in forms.values():
            for i in range(0, len(several), 3):
                part = several[i : i + 3]
                yield Sample(turned([s.args for s in part]), id=f"{part[0].id}+{len(part) - 1}")
        numbers = next(iter(single.samples(dtype))).args[count:]
        yield Sample((*([] for _ in range(count)), *numbers), id="none")

    def stock(*args: Any) -> None:
        assert single.stock is not None
        for row in rows(args):
            single.stock(*row, *args[count:])

    def bench() -> Iterator[BenchCase]:
        assert single.bench is not None
        case = next(iter(single.bench()))
        yield BenchCase(
            f"{_MANY}x{case.id}",
            lambda dtype: turned([case.make(dtype) for _ in range(_MANY)]),
            lambda dtype: _MANY * case.bytes(dtype),
        )

    return dataclasses.replace(
        single,
        name=name,
        schema=f"({', '.join(lists)}) -> {result}",
        reference=reference,
        check=check_lists,
        samples=samples,
        stock=single.stock and stock,
        bench=single.bench and bench,
        summary=f"{single.name} for lists of parameters",
    )


for _module in (
    adagrad_fused_step,
    adam_fused_step,
    lamb_fused_step,
    lars_fused_step,
    sgd_fused_step,
):
    register(_listed(_module.SPEC))

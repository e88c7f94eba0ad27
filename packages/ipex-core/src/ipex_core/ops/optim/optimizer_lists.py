# SPDX-License-Identifier: Apache-2.0
"""The steps of optimizers for lists of parameters: ``sgd_fused_steps`` for many ``sgd_fused_step``, and so on.

Each tensor of the step for one parameter is a list here, whose name ends in "s"; an empty one stands for tensors that
are not there. The numbers hold for all parameters. With many small parameters most of the time of a step is the way
to its kernel.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from typing import Any

import torch

from ipex_core.library.arguments import Arguments
from ipex_core.library.kernels import register
from ipex_core.library.spec import BenchCase, OpSpec, Sample
from ipex_core.ops.optim import (
    adagrad_fused_step,
    adam_fused_step,
    lamb_fused_step,
    lars_fused_step,
    sgd_fused_step,
)

Tensor = torch.Tensor
#: Parameters of a list that is timed.
_MANY = 16


class _Listed:
    """The op for lists of parameters, made from the op for one."""

    def __init__(self, single: OpSpec) -> None:
        self.single = single
        self.name = single.name + "s"
        head, _, self.result = single.schema.rpartition(" -> ")
        self.arguments = head.strip("()").split(", ")
        tensors = [a for a in self.arguments if a.startswith("Tensor")]
        self.names = [a.split()[-1] + "s" for a in tensors]
        self.optional = ["? " in a for a in tensors]
        #: Tensors come first, then numbers.
        self.count = len(tensors)
        numbers = self.arguments[self.count :]
        self.numbers = [a.partition("=")[0].split()[-1] for a in numbers]

    def spec(self) -> OpSpec:
        single = self.single
        return dataclasses.replace(
            single,
            name=self.name,
            schema=self.schema(),
            reference=self.reference,
            check=self.check,
            samples=self.samples,
            stock=single.stock and self.stock,
            bench=single.bench and self.bench,
            summary=f"{single.name} for lists of parameters",
        )

    def schema(self) -> str:
        tensors, numbers = self.arguments[: self.count], self.arguments[self.count :]
        lists = [re.sub(r"(Tensor(?:\(\w!\))?)\?? (\w+)", r"\1[] \2s", a) for a in tensors]
        return f"({', '.join((*lists, *numbers))}) -> {self.result}"

    def rows(self, args: tuple[Any, ...]) -> Iterator[tuple[Any, ...]]:
        """Yield the arguments of the op for one parameter, for each."""
        columns = [values or [None] * len(args[0]) for values in args[: self.count]]
        for tensors in zip(*columns, strict=True):
            yield (*tensors, *args[self.count :])

    def joined(self, several: list[tuple[Any, ...]]) -> tuple[Any, ...]:
        """Return the arguments for several calls of the op for one, with the numbers of the first."""
        columns = zip(*(args[: self.count] for args in several), strict=True)
        lists = ([v for v in column if v is not None] for column in columns)
        return (*lists, *several[0][self.count :])

    def reference(self, *args: Any) -> None:
        for row in self.rows(args):
            self.single.reference(*row)

    def check(self, a: Arguments) -> None:
        values = tuple(vars(a)[name] for name in (*self.names, *self.numbers))
        expected = len(values[0])
        for label, tensors, may_lack in zip(self.names, values, self.optional, strict=False):
            enough = len(tensors) == expected or (may_lack and not tensors)
            a.require(enough, label, f"hold {expected} tensor(s)", len(tensors))
        for row in self.rows(values):
            self.single.check(self.single.bind(*row))

    def samples(self, dtype: torch.dtype) -> Iterator[Sample]:
        forms: dict[tuple[Any, ...], list[Sample]] = {}
        for sample in self.single.samples(dtype):
            args = sample.args[: self.count]
            form = (args[0].dtype, *(a is None for a in args))
            forms.setdefault(form, []).append(sample)
        for several in forms.values():
            for i in range(0, len(several), 3):
                part = several[i : i + 3]
                args = self.joined([s.args for s in part])
                yield Sample(args, id=f"{part[0].id}+{len(part) - 1}")
        numbers = next(iter(self.single.samples(dtype))).args[self.count :]
        yield Sample((*([] for _ in range(self.count)), *numbers), id="none")

    def stock(self, *args: Any) -> None:
        assert self.single.stock is not None
        for row in self.rows(args):
            self.single.stock(*row)

    def bench(self) -> Iterator[BenchCase]:
        assert self.single.bench is not None
        case = next(iter(self.single.bench()))
        yield BenchCase(
            f"{_MANY}x{case.id}",
            lambda dtype: self.joined([case.make(dtype) for _ in range(_MANY)]),
            lambda dtype: _MANY * case.bytes(dtype),
        )


for _module in (
    adagrad_fused_step,
    adam_fused_step,
    lamb_fused_step,
    lars_fused_step,
    sgd_fused_step,
):
    register(_Listed(_module.SPEC).spec())

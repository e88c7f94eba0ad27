# SPDX-License-Identifier: Apache-2.0
"""What a precompiled model is made of, and running its plan: programs, and calls of torch between them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ipex_core.fusion.aten.linear import packed_by_torch
from ipex_core.library.spec import CHANNELS_LAST
from ipex_core.precompiled.graph import Input
from ipex_core.precompiled.lower import CHOSEN, Call, Plan, Run, Size, Slot
from ipex_core.precompiled.writes import Writing


@dataclasses.dataclass(frozen=True)
class Parts:
    """All of a precompiled model that a file holds.

    Attributes:
        name: Class of the model.
        plan: What runs.
        inputs: The leaves of the arguments.
        in_spec: Form of ``(args, kwargs)``.
        out_spec: Form of the results.
        ranges: Symbol of a size that varies -> its least and largest value.
        conditions: Texts of expressions that must hold for sizes that vary.
        memory: The most bytes that intermediate results take at a time, as programs and op by op.
    """

    name: str
    plan: Plan
    inputs: tuple[Input, ...]
    in_spec: Any
    out_spec: Any
    ranges: Mapping[str, tuple[int, int | None]]
    conditions: tuple[str, ...]
    memory: tuple[int, int]


class _PackedLinear:
    """A linear layer of torch on a weight that is packed at the first call, for its number of rows."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._weight, self._bias = weight, bias
        self._made: tuple[int, Callable[[Tensor], Tensor]] | None = None

    def __call__(self, x: Tensor) -> Tensor:
        threads, made = torch.get_num_threads(), self._made
        if made is None or made[0] != threads:  # the form of MKL depends on it
            rows, mkl = x.numel() // x.shape[-1], bool(torch._C.has_mkl)
            made = threads, packed_by_torch(self._weight, self._bias, rows, mkl)
            self._made = made
        return made[1](x)


def with_packed_linears(plan: Plan) -> Plan:
    """Return a plan to run, whose linear layers of torch have weights in the form that is fast here.

    Such a form holds for one process, so that neither plans nor files have it.
    """

    def packed(step: Run | Call) -> Run | Call:
        if not isinstance(step, Call) or step.op is not CHOSEN:
            return step
        x, *slots = (*step.args, *(value for _, value in step.kwargs), None)[:3]
        weight, bias = (plan.constants.get(s.index) if s is not None else None for s in slots)
        if weight is None or weight.dtype != torch.float32 or (bias is None) != (slots[1] is None):
            return step
        return dataclasses.replace(step, op=_PackedLinear(weight, bias), args=(x,), kwargs=())

    return dataclasses.replace(plan, steps=tuple(map(packed, plan.steps)))


def first_values(plan: Plan) -> list[Any]:
    """Return what the slots of a plan hold before a run."""
    values: list[Any] = [None] * plan.slots
    for index, constant in plan.constants.items():
        values[index] = constant
    return values


def run_plan(
    plan: Plan, first: list[Any], tensors: Sequence[Tensor], numbers: Sequence[int]
) -> list[Any]:
    """Run a plan.

    Args:
        plan: What runs.
        first: What its slots hold before a run, of `first_values`.
        tensors: One for each input.
        numbers: The values of the expressions of sizes.

    Returns:
        One value for each leaf of the results.
    """
    values = first.copy()
    for index, tensor in zip(plan.inputs, tensors, strict=True):
        values[index] = tensor
    for step in plan.steps:
        if isinstance(step, Run):
            given = [
                values[one.index] if isinstance(one, Slot) else numbers[one.index]
                for one in step.inputs
            ]
            found: Sequence[Any] = step.program.run(*given)
        else:
            found = _called(step, values, numbers)
        for index, value in zip(step.results, found, strict=True):
            if index >= 0:
                values[index] = value
        for index in step.frees:
            values[index] = None
    results = []
    for i, one in enumerate(plan.outputs):
        if isinstance(one, Slot):
            value = values[one.index]
            results.append(value.clone() if i in plan.copied else value)
        else:
            results.append(numbers[one.index] if isinstance(one, Size) else one)
    return results


#: Ops of torch that read views as they are; another layout of the codes of images would cost more than these do.
_ANY_STRIDES = frozenset(
    {
        torch.ops.aten.maximum.default,
        torch.ops.aten.constant_pad_nd.default,
        torch.ops.aten.sum.dim_IntList,
    }
)


def _called(step: Call, values: list[Any], numbers: Sequence[int]) -> Sequence[Any]:
    any_strides = isinstance(step.op, Writing) or step.op in _ANY_STRIDES

    def given(value: Any) -> Any:
        if isinstance(value, Slot):
            return values[value.index] if any_strides else _laid_out(values[value.index])
        if isinstance(value, Size):
            return numbers[value.index]
        return [given(one) for one in value] if isinstance(value, tuple) else value

    found = step.op(*map(given, step.args), **{key: given(v) for key, v in step.kwargs})
    return found if isinstance(found, (list, tuple)) else (found,)


def _laid_out(value: Any) -> Any:
    """Return a tensor in a layout that each op of torch takes; programs have more, as of 1-D convolutions."""
    if not isinstance(value, Tensor) or value.is_contiguous():
        return value
    last = CHANNELS_LAST.get(value.dim())
    if (last is not None and value.is_contiguous(memory_format=last)) or 0 in value.stride():
        return value
    return value.contiguous()

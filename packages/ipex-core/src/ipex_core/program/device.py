# SPDX-License-Identifier: Apache-2.0
"""Runs a program on a device other than the CPU: its instructions one after the other, as ops of the device.

A device computes while the host starts what comes next, and to call some hundred ops in the usual way takes the host
longer than the step of a decoder takes the device. So arguments are checked at the first run with inputs of some
shapes, and calls go past torch's layers for derivatives, which programs do not have.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from ipex_core.library.checks import arguments_were_checked
from ipex_core.program.instruction import Instruction, Register

if TYPE_CHECKING:
    from ipex_core.program.run import Program

__all__ = ["DeviceRun"]


def _reshape(x: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
    return x.reshape([x.shape[i] if size == 0 else size for i, size in enumerate(sizes)])


def _select_rows(x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    return x.index_select(0, index)


#: Built-ins whose references spend more time on checks than on the call.
_UNCHECKED: Mapping[str, Callable[..., Any]] = {
    "add": torch.add,
    "add_scalar": torch.add,
    "cast": torch.Tensor.to,
    "mul": torch.mul,
    "mul_scalar": torch.mul,
    "narrow": torch.narrow,
    "reshape": _reshape,
    "select_rows": _select_rows,
    "transpose": torch.transpose,
}

#: A call: its function, its arguments, which of them are registers (place, number, whether a tensor), which are lists
#: with registers in them, where results go, and what is freed.
_Call = tuple[
    Callable[..., Any],
    list[Any],
    list[tuple[int, int, bool]],
    list[int],
    tuple[int, ...],
    tuple[int, ...],
]


class DeviceRun:
    """The calls of a program on a device.

    Args:
        program: The program; its constants are on the device.
        functions: What each of its instructions calls.
    """

    def __init__(self, program: Program, functions: Sequence[Callable[..., Any]]) -> None:
        self._program = program
        pairs = zip(program.instructions, functions, strict=True)
        self._calls = [self._prepared(one, _UNCHECKED.get(one.op, call)) for one, call in pairs]
        #: Shapes, strides and dtypes of inputs that a checked run was done with.
        self._known: set[tuple[Any, ...]] = set()

    @staticmethod
    def _prepared(one: Instruction, function: Callable[..., Any]) -> _Call:
        places = [
            (i, a.index, a.kind == "tensor") for i, a in enumerate(one.args) if type(a) is Register
        ]
        lists = [i for i, a in enumerate(one.args) if type(a) is tuple]
        return function, list(one.args), places, lists, one.results, one.frees

    def run(self, inputs: Sequence[Any]) -> tuple[torch.Tensor, ...]:
        """Run the program with inputs of the right number and kinds."""
        program = self._program
        shapes = tuple(
            (one.shape, one.stride(), one.dtype) for one in inputs if type(one) is torch.Tensor
        )
        if shapes not in self._known:
            outputs = program.run_reference(*inputs)
            if len(self._known) >= 256:  # each length of a prompt has its own
                self._known.clear()
            self._known.add(shapes)
            return outputs
        with torch.no_grad(), torch._C._AutoDispatchBelowAutograd(), arguments_were_checked():
            return self._run(inputs)

    def _run(self, inputs: Sequence[Any]) -> tuple[torch.Tensor, ...]:
        program = self._program
        tensors: list[Any] = [None] * program.registers
        ints: list[int] = []
        for index, tensor in program.constants.items():
            tensors[index] = tensor
        for register, value in zip(program.registers_of_inputs, inputs, strict=True):
            if register.kind == "tensor":
                tensors[register.index] = value
            else:
                ints.append(value)

        def of(values: tuple[Any, ...]) -> list[Any]:
            return [
                (tensors if one.kind == "tensor" else ints)[one.index]
                if type(one) is Register
                else of(one)
                if type(one) is tuple
                else one
                for one in values
            ]

        for number, (function, template, places, lists, results, frees) in enumerate(self._calls):
            args = template.copy()
            for place, index, is_tensor in places:
                args[place] = tensors[index] if is_tensor else ints[index]
            for place in lists:
                args[place] = of(args[place])
            try:
                output = function(*args)
            except Exception as cause:
                raise program.failure(cause, number) from cause
            if len(results) == 1:
                tensors[results[0]] = output
            else:
                for index, result in zip(results, output or (), strict=False):
                    tensors[index] = result
            for index in frees:
                tensors[index] = None
        return tuple(tensors[index] for index in program.outputs)

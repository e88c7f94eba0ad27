# SPDX-License-Identifier: Apache-2.0
"""Plans as one program, where who knows the ops between its programs writes them as instructions.

Between two programs a plan calls an op of torch: the threads of the first come to rest, Python runs, and the threads of
the second start. An op of another library may consist of instructions, with inputs that its library knows at each run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ipex_core.precompiled.lower import Call, Plan, Run, Size, Slot
from ipex_core.program import Program, ProgramBuilder, Register

#: Takes the tensors and numbers of `run_plan` and returns what that returns, or None to leave the run to it.
Runner = Callable[[Sequence[Any], Sequence[int]], list[Any] | None]

#: Name of an op, ``namespace::name.overload`` -> makes what runs a plan that calls it.
RUNNERS: dict[str, Callable[[Plan], Runner]] = {}


class NotWholeError(Exception):
    """A plan that cannot be one program, with the reason."""


def runner_of(plan: Plan) -> Runner | None:
    """Return what runs a plan as a whole, if one of its calls has such."""
    return next((RUNNERS[name](plan) for name in plan.calls if name in RUNNERS), None)


class WholePlan:
    """Writes a plan into one program.

    Args:
        plan: The plan.

    Attributes:
        builder: Where instructions for calls are written.
        given: What each input of the program is: a `Slot` or a `Size` of the plan, or what `input` was told.
    """

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.builder = ProgramBuilder()
        self.given: list[Any] = []
        self._tensors: dict[int, Register] = {}
        self._sizes: dict[int, Register] = {}

    def input(self, what: Any, kind: str = "tensor") -> Register:
        """Return a new input, a tensor or (``kind="int"``) a number."""
        declare = self.builder.input if kind == "tensor" else self.builder.input_int
        register = declare(f"input {len(self.given)}")
        self.given.append(what)
        return register

    def tensor(self, slot: Slot) -> Register:
        """Return the register of a slot.

        Raises:
            NotWholeError: No step before has written it.
        """
        index = slot.index
        if index not in self._tensors:
            if index in self.plan.constants:
                self._tensors[index] = self.builder.constant(self.plan.constants[index])
            elif index in self.plan.inputs:
                self._tensors[index] = self.input(slot)
            else:
                raise NotWholeError(
                    f"a whole plan must have tensors of programs, got none in slot {index}: run its steps"
                )
        return self._tensors[index]

    def size(self, size: Size) -> Register:
        """Return the register of a number."""
        if size.index not in self._sizes:
            self._sizes[size.index] = self.input(size, "int")
        return self._sizes[size.index]

    def write(self, call: Callable[[Call], Sequence[Register | None]]) -> Program:
        """Write all steps.

        Args:
            call: Writes a call with `builder`; returns a register, or None where nothing reads it, for each result.

        Returns:
            The program. Its results are the tensors among the results of the plan, in their order.

        Raises:
            NotWholeError: A step cannot be written.
        """
        for step in self.plan.steps:
            found = self._replay(step) if isinstance(step, Run) else call(step)
            for index, register in zip(step.results, found, strict=True):
                if index >= 0 and register is not None:
                    self._tensors[index] = register
        if self.plan.copied:
            raise NotWholeError(
                "a whole plan must have results that it computes, got a constant: run its steps"
            )
        return self.builder.build(
            [self.tensor(one) for one in self.plan.outputs if isinstance(one, Slot)]
        )

    def _replay(self, step: Run) -> list[Register]:
        """Write the instructions of a program; return its results."""
        program = step.program
        known: dict[tuple[str, int], Register] = {
            (register.kind, register.index): self.tensor(one)
            if isinstance(one, Slot)
            else self.size(one)
            for register, one in zip(program.registers_of_inputs, step.inputs, strict=True)
        }
        for index, tensor in program.constants.items():
            known["tensor", index] = self.builder.constant(tensor)

        def moved(value: Any) -> Any:
            if isinstance(value, Register):
                return known[value.kind, value.index]
            return tuple(map(moved, value)) if isinstance(value, tuple) else value

        for one in program.instructions:
            found = self.builder.call(one.op, *map(moved, one.args))
            results = found if isinstance(found, tuple) else (found,)
            known.update(
                {("tensor", i): r for i, r in zip(one.results, results, strict=bool(one.results))}
            )
        return [known["tensor", index] for index in program.outputs]

    def results(self, found: Sequence[Any], numbers: Sequence[int]) -> list[Any]:
        """Return the results of the plan from what the program has given."""
        tensors = iter(found)
        return [
            next(tensors)
            if isinstance(one, Slot)
            else numbers[one.index]
            if isinstance(one, Size)
            else one
            for one in self.plan.outputs
        ]

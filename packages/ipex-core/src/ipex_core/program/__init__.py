# SPDX-License-Identifier: Apache-2.0
"""Programs: straight-line lists of op calls on registers, built once and run with one call.

A decoder runs some two hundred ops for each token. Called one by one from Python they cost several microseconds each
before any work is done; a `Program` hands the whole list to the kernel package, which runs it without Python and
without torch's dispatcher in between. Where no kernel package is loaded, the same list runs through
``torch.ops.ipex``.

Example:
    >>> import torch
    >>> from ipex_core.program import ProgramBuilder
    >>> b = ProgramBuilder()
    >>> x = b.input("x")
    >>> w = b.constant(torch.ones(4))
    >>> y = b.call("rms_norm", x, w, eps=0.0)
    >>> program = b.build(outputs=[b.call("mul", y, 2.0)])
    >>> program.run(torch.full((1, 4), 3.0))
    (tensor([[2., 2., 2., 2.]]),)
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
from collections.abc import Sequence
from typing import Any, Literal

import torch

from ipex_core.errors import UnknownOpError
from ipex_core.library.kernels import specs
from ipex_core.library.spec import schema_of
from ipex_core.program.builtins import BUILTINS
from ipex_core.program.run import Instruction, Program, Register, without_owner

__all__ = ["Instruction", "Program", "ProgramBuilder", "Register"]

#: Instructions whose second argument may be a number as well as a tensor.
_SCALAR_FORMS = ("add", "mul")


@dataclasses.dataclass(frozen=True, slots=True)
class _Parameter:
    name: str
    type: str
    optional: bool
    has_default: bool
    default: Any


@dataclasses.dataclass(frozen=True, slots=True)
class _Signature:
    parameters: tuple[_Parameter, ...]
    results: int


@functools.cache
def _signature(name: str) -> _Signature:
    """Return the parameters and the number of results of an instruction, from its schema."""
    if name in BUILTINS:
        text = BUILTINS[name].schema or schema_of(BUILTINS[name].reference)
        schema = torch._C.parse_schema(f"ipex::{name}{text}")
    else:
        schema = specs()[name].op.default._schema
    parameters = []
    for argument in schema.arguments:
        kind = str(argument.real_type)
        optional = kind.startswith("Optional[")
        parameters.append(
            _Parameter(
                argument.name,
                kind.removeprefix("Optional[").removesuffix("]") if optional else kind,
                optional,
                argument.has_default_value(),
                argument.default_value,
            )
        )
    return _Signature(tuple(parameters), len(schema.returns))


class ProgramBuilder:
    """Collects the inputs, constants and instructions of a `Program`.

    Mistakes are reported where they are made: an unknown op or argument, an argument of the wrong kind and a register
    of another builder are errors of `call`, not of the first run.
    """

    def __init__(self) -> None:
        self._inputs: list[Register] = []
        self._constants: dict[int, torch.Tensor] = {}
        self._known: dict[int, Register] = {}
        self._instructions: list[Instruction] = []
        self._roots: list[int] = []  # of each register: the register whose memory it may share
        self._counts = {"tensor": 0, "int": 0}

    def input(self, name: str) -> Register:
        """Declare a tensor that is bound at each run; inputs are bound in the order of their declaration.

        Raises:
            ValueError: The name is empty or taken.
        """
        return self._input(name, "tensor")

    def input_int(self, name: str) -> Register:
        """Declare an integer that is bound at each run. It can be given for any ``int`` argument.

        Raises:
            ValueError: The name is empty or taken.
        """
        return self._input(name, "int")

    def _input(self, name: str, kind: Literal["tensor", "int"]) -> Register:
        taken = [register.name for register in self._inputs]
        if not name or name in taken:
            raise ValueError(f"ProgramBuilder.input: name must be new and not empty, got {name!r}")
        register = self._register(kind, name)
        self._inputs.append(register)
        return register

    def constant(self, tensor: torch.Tensor) -> Register:
        """Return the register of a tensor that the program keeps: a weight, or a cache it writes to.

        The program holds the tensor itself, not a copy: later in-place changes are seen. The same tensor gets the same
        register.

        Raises:
            TypeError: The argument is not a tensor.
        """
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(
                f"ProgramBuilder.constant: tensor must be a Tensor, got {type(tensor).__name__}"
            )
        known = self._known.get(id(tensor))
        if known is None:
            known = self._register("tensor", f"constant {len(self._constants)}")
            self._constants[known.index] = tensor
            self._known[id(tensor)] = known
        return known

    def _register(self, kind: Literal["tensor", "int"], name: str = "") -> Register:
        index = self._counts[kind]
        self._counts[kind] = index + 1
        if kind == "tensor":
            self._roots.append(index)
        return Register(index, kind, name, self)

    def call(self, name: str, /, *args: Any, **kwargs: Any) -> Any:
        """Append an instruction.

        Args:
            name: An op of ``torch.ops.ipex`` or a built-in: ``embedding(weight, ids)``,
                ``select_rows(x, index)``, ``reshape(x, sizes)`` (0 keeps a size, -1 is inferred),
                ``narrow(x, dim, start, length)``, ``transpose(x, a, b)``, ``cast(x, dtype)``, ``add(a, b)``,
                ``mul(a, b)`` (``b`` a register or a number), ``tanh(x)``, ``clamp(a, low, high)``,
                ``empty_like(x)``, ``copy_(dst, src)``,
                ``plain_linear(x, weight, out_features, ...)``, ``permute(x, dims)``, ``expand(x, sizes)``,
                ``unsqueeze(x, dim)``, ``squeeze(x, dim)``, ``slice(x, dim, start, end, step)``,
                ``select(x, dim, index)``, ``contiguous(x)``, ``channels_last(x)``,
                ``pointwise(inputs, code, constants, dtype)``, ``cat(tensors, dim)``,
                ``pad(x, padding, value)``, ``max_pool2d(...)``, ``avg_pool2d(...)``,
                ``group_norm(x, groups, weight, bias, eps)``, ``mean(x, dims, keepdim)``, ``sum``, ``amax``.
            args: Arguments as in the op's schema: registers for tensors, registers of `input_int` or
                numbers for integers, ``None`` where the schema allows it.
            kwargs: Arguments by name; missing ones get the schema's default.

        Returns:
            The register of the result, a tuple of registers, or None, as the op returns.

        Raises:
            UnknownOpError: There is no such op.
            TypeError: An argument is missing, unknown, given twice, or of the wrong kind.
            ValueError: A register belongs to another builder.
            OpArgumentError: A built-in refuses what is known of its arguments.
        """
        if name in _SCALAR_FORMS:
            other = args[1] if len(args) > 1 else kwargs.get("b")
            if isinstance(other, (int, float)):
                name += "_scalar"
        if name not in BUILTINS and name not in specs():
            close = difflib.get_close_matches(name, [*BUILTINS, *specs()], 3)
            hint = f"; did you mean {', '.join(close)}?" if close else ""
            raise UnknownOpError(f"ProgramBuilder.call: no op is named {name!r}{hint}")
        signature = _signature(name)
        values = self._bind(name, signature, args, kwargs)
        builtin = BUILTINS.get(name)
        if builtin is not None and builtin.check is not None:
            builtin.check(*values)
        results = tuple(self._register("tensor") for _ in range(signature.results))
        if builtin is not None and builtin.view:
            self._roots[results[0].index] = self._roots[values[builtin.shares].index]
        self._instructions.append(Instruction(name, values, tuple(r.index for r in results)))
        if not results:
            return None
        return results[0] if len(results) == 1 else results

    def _bind(
        self, op: str, signature: _Signature, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, ...]:
        parameters = signature.parameters
        if len(args) > len(parameters):
            raise TypeError(f"{op}: takes {len(parameters)} arguments, got {len(args)}")
        names = [parameter.name for parameter in parameters]
        for name in kwargs:
            if name not in names:
                raise TypeError(
                    f"{op}: has no argument {name!r}; its arguments: {', '.join(names)}"
                )
            if names.index(name) < len(args):
                raise TypeError(
                    f"{op}: argument {name!r} must be given once, got it by position and by name"
                )
        values = []
        for i, parameter in enumerate(parameters):
            if i < len(args):
                value = args[i]
            elif parameter.name in kwargs:
                value = kwargs[parameter.name]
            elif parameter.has_default:
                value = parameter.default
            else:
                raise TypeError(f"{op}: argument {parameter.name!r} must be given")
            values.append(self._checked(op, parameter, value))
        return tuple(values)

    def _checked(self, op: str, parameter: _Parameter, value: Any) -> Any:
        """Return ``value`` in the form an instruction holds, or raise."""
        if value is None and parameter.optional:
            return None
        if parameter.type.startswith("List["):
            if not isinstance(value, Sequence) or isinstance(value, str):
                raise self._wrong(op, parameter, value)
            element = dataclasses.replace(parameter, type=parameter.type[5:-1], optional=False)
            return tuple(self._checked(op, element, one) for one in value)
        if isinstance(value, Register):
            if value.owner is not self:
                raise ValueError(
                    f"{op}: {parameter.name} must be a register of this builder, got one of another"
                )
            if value.kind != {"Tensor": "tensor", "int": "int"}.get(parameter.type):
                raise self._wrong(op, parameter, value)
            return value
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        match parameter.type:
            case "int" if number and isinstance(value, int):
                return value
            case "float" if number:
                return float(value)
            case "bool" if isinstance(value, bool):
                return value
            case "str" if isinstance(value, str):
                return value
            case "ScalarType" if isinstance(value, torch.dtype):
                return value
        raise self._wrong(op, parameter, value)

    @staticmethod
    def _wrong(op: str, parameter: _Parameter, value: Any) -> TypeError:
        wanted = {
            "Tensor": "a tensor register",
            "int": "an int or a register of input_int",
            "float": "a number",
            "ScalarType": "a torch.dtype",
            "List[int]": "a list of ints",
            "List[float]": "a list of numbers",
            "List[Tensor]": "a list of tensor registers",
        }.get(parameter.type, f"a {parameter.type}")
        got = f"a register of kind {value.kind}" if isinstance(value, Register) else repr(value)
        if isinstance(value, torch.Tensor):
            got = "a tensor: use constant() or input()"
        allowed = " or None" if parameter.optional else ""
        return TypeError(f"{op}: {parameter.name} must be {wanted}{allowed}, got {got}")

    def build(self, outputs: Sequence[Register]) -> Program:
        """Return the program that returns ``outputs``, which may be any of its tensor registers.

        The builder can go on: a program is not changed by later calls.

        Raises:
            TypeError: An output is not a tensor register.
            ValueError: An output belongs to another builder.
        """
        parameter = _Parameter("outputs", "List[Tensor]", False, False, None)
        kept = self._checked("ProgramBuilder.build", parameter, outputs)
        return Program(
            inputs=tuple(map(without_owner, self._inputs)),
            constants={index: tensor.detach() for index, tensor in self._constants.items()},
            instructions=tuple(self._with_frees({register.index for register in kept})),
            outputs=tuple(register.index for register in kept),
            registers=self._counts["tensor"],
        )

    def _with_frees(self, outputs: set[int]) -> list[Instruction]:
        """Return the instructions, each with the registers that nothing reads after it.

        A register whose memory views share lives as long as the last of them; then nothing refers to its memory any
        more, and the interpreter may give it to a later result.
        """
        roots = self._roots
        last: dict[int, int] = {}
        kept = {roots[index] for index in outputs} | outputs
        results: set[int] = set()
        for number, instruction in enumerate(self._instructions):
            for index in (*instruction.reads(), *instruction.results):
                last[index] = last[roots[index]] = number
            results.update(instruction.results)
        frees: list[list[int]] = [[] for _ in self._instructions]
        for index in sorted(results - kept, reverse=True):  # views before what they look at
            frees[last[index]].append(index)
        return [
            dataclasses.replace(
                instruction,
                args=without_owner(instruction.args),
                frees=tuple(frees[number]),
                recycles=tuple(i for i in frees[number] if roots[i] == i),
            )
            for number, instruction in enumerate(self._instructions)
        ]

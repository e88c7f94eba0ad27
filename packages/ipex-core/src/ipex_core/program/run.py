# SPDX-License-Identifier: Apache-2.0
"""The program itself: what it holds, and its two interpreters. See `ipex_core.program`."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import struct
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

import torch
from torch.library import fallthrough_kernel
from torch.utils._python_dispatch import _disable_current_modes

from ipex_core.errors import OpArgumentError
from ipex_core.kernels import providers
from ipex_core.library.checks import arguments_were_checked
from ipex_core.library.kernels import LIBRARY, define, specs
from ipex_core.program.builtins import BUILTINS

# The three ops are defined here and not by an `OpSpec`. What a spec demands of an op makes no sense for them: they have
# no samples, as a handle means nothing in another process; no reference, as `Program.run_reference` is that; no fake
# kernel, as the outputs may come from any ops; no derivative. A kernel package registers them or does not.
define("program_create(Tensor code, Tensor text, Tensor[] constants) -> int")
define("program_run(int handle, Tensor[] tensors, int[] integers) -> Tensor[]")
define("program_free(int handle) -> ()")
# Without a kernel of its own each call would go through autograd's check of every tensor in the lists.
for _name in ("program_create", "program_run"):
    LIBRARY.impl(_name, fallthrough_kernel, "Autograd")

_run = torch.ops.ipex.program_run.default

#: Version of the encoding; the native decoder compares it.
_VERSION = 1

# Kinds of arguments, as the native decoder numbers them.
_NONE, _TENSOR, _INT, _FLOAT, _BOOL, _STRING, _DTYPE, _LIST = range(8)


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Register:
    """The place of a value in a program: a tensor, or an integer input. Made by a `ProgramBuilder`."""

    index: int
    kind: Literal["tensor", "int"]
    name: str = ""
    owner: object = dataclasses.field(default=None, repr=False)

    def __str__(self) -> str:
        return f"%{self.index}" if self.kind == "tensor" else f"${self.name}"


@dataclasses.dataclass(frozen=True, slots=True)
class Instruction:
    """One op call.

    Attributes:
        op: Name of an op of ``torch.ops.ipex`` or of a built-in.
        args: One value per parameter of the schema: a `Register`, a number, a string, a dtype, None, or a tuple of
            them.
        results: Tensor registers that get the results.
        frees: Tensor registers that nothing reads afterwards.
        recycles: Those of ``frees`` whose memory nothing can refer to any more.
    """

    op: str
    args: tuple[Any, ...]
    results: tuple[int, ...]
    frees: tuple[int, ...] = ()
    recycles: tuple[int, ...] = ()

    def reads(self) -> Iterator[int]:
        """Yield the tensor registers among the arguments."""
        for value in self.args:
            for one in value if isinstance(value, tuple) else (value,):
                if isinstance(one, Register) and one.kind == "tensor":
                    yield one.index

    def __str__(self) -> str:
        def text(value: Any) -> str:
            if isinstance(value, tuple):
                return f"[{', '.join(map(text, value))}]"
            return str(value) if isinstance(value, Register) else repr(value)

        left = ", ".join(f"%{index}" for index in self.results)
        call = f"{self.op}({', '.join(map(text, self.args))})"
        return f"{left} = {call}" if left else call


#: What `Program._interpret` reads: a function, its arguments, the places among them that have registers with these
#: registers, and the registers of results and of what nothing reads afterwards.
_Call = tuple[
    Callable[..., Any], list[Any], list[tuple[int, Any]], tuple[int, ...], tuple[int, ...]
]


class Program:
    """A list of op calls that runs as one; made by `ProgramBuilder.build`.

    A program has no derivative and ignores autocast: what it computes is fixed when it is built. It can be run by
    several threads at once, as long as they do not write to the same caches.

    Attributes:
        instructions: The op calls, in order.
        constants: The tensors that the program keeps, by register.
        outputs: The registers that `run` returns.
        registers: Number of tensor registers.
        registers_of_inputs: The registers of the inputs, in the order of `run`.
    """

    def __init__(
        self,
        *,
        inputs: tuple[Register, ...],
        constants: Mapping[int, torch.Tensor],
        instructions: tuple[Instruction, ...],
        outputs: tuple[int, ...],
        registers: int,
    ) -> None:
        self.instructions = instructions
        self.constants = dict(constants)
        self.outputs = outputs
        self.registers = registers
        self.registers_of_inputs = inputs
        self._tensors = [i for i, r in enumerate(inputs) if r.kind == "tensor"]
        self._ints = [i for i, r in enumerate(inputs) if r.kind == "int"]
        self._native = NativeProgram()
        devices = {tensor.device.type for tensor in self.constants.values()}
        self._on_device = not devices <= {"cpu", "meta"}
        #: Shapes, strides and dtypes of inputs that a checked run on a device was done with.
        self._known_shapes: set[tuple[Any, ...]] = set()

    def __reduce__(self) -> tuple[Any, ...]:
        # A copy makes its own native program: a handle belongs to one object of one process.
        parts = (
            self.registers_of_inputs,
            self.constants,
            self.instructions,
            self.outputs,
            self.registers,
        )
        return _rebuild, parts

    @property
    def inputs(self) -> tuple[str, ...]:
        """The names of the inputs in the order of `run`."""
        return tuple(register.name for register in self.registers_of_inputs)

    @property
    def native(self) -> bool:
        """Whether `run` uses the interpreter of a kernel package. Loads the kernel packages."""
        return self._native.handle(self) is not None

    def __repr__(self) -> str:
        return (
            f"Program({len(self.instructions)} instructions, inputs: {', '.join(self.inputs)},"
            f" {len(self.constants)} constants, {len(self.outputs)} outputs)"
        )

    def __str__(self) -> str:
        lines = [repr(self)]
        lines += [f"  {number}: {one}" for number, one in enumerate(self.instructions)]
        return "\n".join(lines)

    def on(self, device: torch.device) -> Program:
        """Return the program with its constants on a device; off the CPU its instructions run one by one."""
        return Program(
            inputs=self.registers_of_inputs,
            constants={index: tensor.to(device) for index, tensor in self.constants.items()},
            instructions=self.instructions,
            outputs=self.outputs,
            registers=self.registers,
        )

    def run(self, *inputs: Any) -> tuple[torch.Tensor, ...]:
        """Run the program and return its outputs.

        Args:
            inputs: One value per input, in the order of their declaration.

        Raises:
            TypeError: The number of inputs or the kind of one is wrong.
            RuntimeError: An instruction failed; the message names it. Results of earlier instructions are lost, but
                what they wrote to caches stays.
        """
        # A compiler sees the ops of the program, not one call that it knows nothing of.
        compiling = torch.compiler.is_compiling()
        if self._on_device and not compiling:
            return self._run_on_device(inputs)
        handle = None if compiling else self._native.handle(self)
        if handle is None:
            return self.run_reference(*inputs)
        if len(inputs) != len(self.registers_of_inputs):
            self._check_inputs(inputs)
        tensors = [inputs[i] for i in self._tensors]
        try:
            return tuple(self._native.run(handle, tensors, [inputs[i] for i in self._ints]))
        except (RuntimeError, TypeError):
            self._check_inputs(inputs)  # says what is wrong better than torch does
            raise

    def _check_inputs(self, inputs: tuple[Any, ...]) -> None:
        if len(inputs) != len(self.registers_of_inputs):
            names = ", ".join(self.inputs)
            raise TypeError(
                f"Program.run: takes {len(self.registers_of_inputs)} inputs ({names}), got {len(inputs)}"
            )
        for register, value in zip(self.registers_of_inputs, inputs, strict=True):
            kind, wanted = (
                (torch.Tensor, "a Tensor") if register.kind == "tensor" else (int, "an int")
            )
            if not isinstance(value, kind) or isinstance(value, bool):
                raise TypeError(
                    f"Program.run: {register.name} must be {wanted}, got {type(value).__name__}"
                )

    def run_reference(self, *inputs: Any) -> tuple[torch.Tensor, ...]:
        """Run the program as a sequence of calls of ``torch.ops.ipex`` and of stock PyTorch; else like `run`."""
        self._check_inputs(inputs)
        with torch.no_grad(), _without_autocast():
            return self._interpret(inputs, self._calls)

    def _run_on_device(self, inputs: tuple[Any, ...]) -> tuple[torch.Tensor, ...]:
        """Run the program on another device than the CPU.

        A device computes while the host starts what comes next, and to call some hundred ops in the usual way takes
        the host longer than the step of a decoder takes the device. So arguments are checked at the first run with
        inputs of some shapes, and calls go past torch's layers for derivatives, which programs do not have.
        """
        shapes = tuple(
            (one.shape, one.stride(), one.dtype) for one in inputs if type(one) is torch.Tensor
        )
        if shapes not in self._known_shapes:
            outputs = self.run_reference(*inputs)
            if len(self._known_shapes) >= 256:  # each length of a prompt has its own
                self._known_shapes.clear()
            self._known_shapes.add(shapes)
            return outputs
        self._check_inputs(inputs)
        below = torch._C._AutoDispatchBelowAutograd
        with torch.no_grad(), _without_autocast(), below(), arguments_were_checked():
            return self._interpret(inputs, self._unchecked_calls)

    def _interpret(self, inputs: tuple[Any, ...], calls: list[_Call]) -> tuple[torch.Tensor, ...]:
        """Call the instructions one by one; integers have their registers behind the registers of tensors."""
        values: list[Any] = [None] * (self.registers + len(self._ints))
        for index, tensor in self.constants.items():
            values[index] = tensor
        for register, value in zip(self.registers_of_inputs, inputs, strict=True):
            values[self._place(register)] = value
        for number, (function, args, places, results, frees) in enumerate(calls):
            args = args.copy()
            for place, found in places:
                if type(found) is int:
                    args[place] = values[found]
                else:
                    args[place] = [values[one] if known else one for known, one in found]
            try:
                output = function(*args)
            except Exception as cause:
                raise self._failure(cause, number) from cause
            if len(results) == 1:
                values[results[0]] = output
            else:
                for index, result in zip(results, output or (), strict=False):
                    values[index] = result
            for index in frees:
                values[index] = None
        return tuple(values[index] for index in self.outputs)

    def _place(self, register: Register) -> int:
        """Return where `_interpret` keeps the value of a register."""
        return register.index if register.kind == "tensor" else self.registers + register.index

    def _compiled(self, others: Mapping[str, Callable[..., Any]]) -> list[_Call]:
        """Return the instructions as `_interpret` takes them; ``others`` has functions in place of their own."""
        calls: list[_Call] = []
        for one in self.instructions:
            args = [list(value) if type(value) is tuple else value for value in one.args]
            places: list[tuple[int, Any]] = []
            for number, value in enumerate(args):
                if type(value) is Register:
                    places.append((number, self._place(value)))
                elif type(value) is list and any(type(x) is Register for x in value):
                    registers = [type(x) is Register for x in value]
                    found = [self._place(x) if type(x) is Register else x for x in value]
                    places.append((number, list(zip(registers, found, strict=True))))
            function = others.get(one.op) or _function(one.op)
            calls.append((function, args, places, one.results, one.frees))
        return calls

    @functools.cached_property
    def _calls(self) -> list[_Call]:
        return self._compiled({})

    @functools.cached_property
    def _unchecked_calls(self) -> list[_Call]:
        return self._compiled(_UNCHECKED)

    def _failure(self, cause: Exception, number: int) -> Exception:
        """Return the error of an instruction: of the cause's class where that can be told apart, with its place."""
        kind = OpArgumentError if isinstance(cause, OpArgumentError) else RuntimeError
        return kind(f"program: instruction {number} ({self.instructions[number].op}): {cause}")


def _function(name: str) -> Callable[..., Any]:
    builtin = BUILTINS.get(name)
    function: Callable[..., Any] = (
        builtin.reference if builtin is not None else specs()[name].op.default
    )
    return function


def _without_autocast() -> contextlib.AbstractContextManager[Any]:
    stack = contextlib.ExitStack()
    for device in ("cpu", "xpu"):
        if torch.is_autocast_enabled(device):
            stack.enter_context(torch.autocast(device, enabled=False))
    return stack


def without_owner(value: Any) -> Any:
    """Return an argument without the builder in its registers, which would keep everything it knows alive."""
    if isinstance(value, Register):
        return Register(value.index, value.kind, value.name)
    return tuple(map(without_owner, value)) if isinstance(value, tuple) else value


def _rebuild(
    inputs: tuple[Register, ...],
    constants: dict[int, torch.Tensor],
    instructions: tuple[Instruction, ...],
    outputs: tuple[int, ...],
    registers: int,
) -> Program:
    return Program(
        inputs=inputs,
        constants=constants,
        instructions=instructions,
        outputs=outputs,
        registers=registers,
    )


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


# --- the native form -------------------------------------------------------------------------------------------------


class NativeProgram:
    """The native form of one `Program`, made at its first run and freed with this object."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known = False
        self._handle: int | None = None

    def handle(self, program: Program) -> int | None:
        """Return the handle of the native program, or None where there is no native interpreter for it.

        Raises:
            RuntimeError: The native interpreter refuses the program: the kernel package is not of this version.
        """
        if not self._known:
            with self._lock:
                if not self._known:
                    self._handle = self._make(program)
                    self._known = True
        return self._handle

    def _make(self, program: Program) -> int | None:
        if not _is_supported(program):
            return None
        code, text = encode(program)
        handle = torch.ops.ipex.program_create(
            torch.tensor(code, dtype=torch.int64),
            torch.tensor(list(text), dtype=torch.uint8),
            list(program.constants.values()),
        )
        # Not at the end of the process: memory is given back anyway, and torch may be half gone.
        weakref.finalize(self, _free, handle).atexit = False
        return int(handle)

    @staticmethod
    def run(handle: int, tensors: list[torch.Tensor], ints: list[int]) -> list[torch.Tensor]:
        """Run the native program."""
        if torch.is_grad_enabled():
            with torch.no_grad():
                return _run(handle, tensors, ints)  # type: ignore[no-any-return]
        return _run(handle, tensors, ints)  # type: ignore[no-any-return]


def _free(handle: int) -> None:
    """Free a native program. Garbage may be collected in the middle of a trace, whose modes must not see this call."""
    with torch._C.DisableTorchFunction(), _disable_current_modes():
        torch.ops.ipex.program_free(handle)


def _is_supported(program: Program) -> bool:
    """Return whether a kernel package runs programs and has a kernel for each instruction of this one."""
    provider = providers.provider_for("cpu")
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    if provider is None or not has_kernel("ipex::program_run", "CompositeExplicitAutograd"):
        return False
    if any(tensor.device.type != "cpu" for tensor in program.constants.values()):
        return False
    return all(
        BUILTINS[one.op].native if one.op in BUILTINS else one.op in provider.ops
        for one in program.instructions
    )


def encode(program: Program) -> tuple[list[int], bytes]:
    """Return a program as the native decoder reads it: words of 64 bits, and the text that they point into."""
    return _Encoder().encode(program)


class _Encoder:
    """Writes a program as a list of words, with all its strings in one text."""

    def __init__(self) -> None:
        self._words: list[int] = []
        self._text = bytearray()
        self._strings: dict[str, tuple[int, int]] = {}

    def encode(self, program: Program) -> tuple[list[int], bytes]:
        """Return the words, of 64 bits, and the text."""
        words = self._words
        words += [_VERSION, program.registers]
        self._list([r.index for r in program.registers_of_inputs if r.kind == "tensor"])
        words.append(sum(register.kind == "int" for register in program.registers_of_inputs))
        self._list(list(program.constants))
        self._list(list(program.outputs))
        words.append(len(program.instructions))
        for one in program.instructions:
            self._string(one.op)
            words.append(len(one.args))
            for value in one.args:
                self._argument(value)
            self._list(list(one.results))
            self._list([2 * index + (index in one.recycles) for index in one.frees])
        return words, bytes(self._text)

    def _list(self, values: list[int]) -> None:
        self._words += [len(values), *values]

    def _string(self, text: str) -> None:
        if text not in self._strings:
            raw = text.encode()
            self._strings[text] = (len(self._text), len(raw))
            self._text += raw
        self._words += self._strings[text]

    def _argument(self, value: Any) -> None:
        words = self._words
        if value is None:
            words.append(_NONE)
        elif isinstance(value, bool):
            words += [_BOOL, int(value)]
        elif isinstance(value, int):
            words += [_INT, 0, value]
        elif isinstance(value, float):
            words += [_FLOAT, *struct.unpack("q", struct.pack("d", value))]
        elif isinstance(value, str):
            words.append(_STRING)
            self._string(value)
        elif isinstance(value, torch.dtype):
            words.append(_DTYPE)
            self._string(str(value).removeprefix("torch."))
        elif isinstance(value, tuple):
            words += [_LIST, len(value)]
            for element in value:
                self._argument(element)
        else:
            register: Register = value
            if register.kind == "tensor":
                words += [_TENSOR, register.index]
            else:
                words += [_INT, 1, register.index]

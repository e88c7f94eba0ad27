# SPDX-License-Identifier: Apache-2.0
"""The native side of a program: the ops that run it and the encoding in which it is handed over.

The three ops are defined here and not by an `OpSpec`. What a spec demands of an op makes no sense for them: they have
no samples, as a handle means nothing in another process; no reference, as `Program.run_reference` is that; no fake
kernel, as the shapes of the outputs are those of any ops; no derivative. A kernel package registers them or does not.
"""

from __future__ import annotations

import struct
import threading
import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch.library import fallthrough_kernel
from torch.utils._python_dispatch import _disable_current_modes

from ipex_core.kernels import providers
from ipex_core.library.spec import _LIBRARY, define
from ipex_core.program.builtins import BUILTINS

if TYPE_CHECKING:
    from ipex_core.program.run import Program, Register

__all__ = ["NativeProgram"]

define("program_create(Tensor code, Tensor text, Tensor[] constants) -> int")
define("program_run(int handle, Tensor[] tensors, int[] integers) -> Tensor[]")
define("program_free(int handle) -> ()")
# Without a kernel of its own each call would go through autograd's check of every tensor in the lists.
for _name in ("program_create", "program_run"):
    _LIBRARY.impl(_name, fallthrough_kernel, "Autograd")

_run = torch.ops.ipex.program_run.default

#: Version of the encoding; the native decoder compares it.
_VERSION = 1

# Kinds of arguments, as the native decoder numbers them.
_NONE, _TENSOR, _INT, _FLOAT, _BOOL, _STRING, _DTYPE, _LIST = range(8)


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
        code, text = _Encoder().encode(program)
        handle = torch.ops.ipex.program_create(code, text, list(program.constants.values()))
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
    return all(one.op in BUILTINS or one.op in provider.ops for one in program.instructions)


class _Encoder:
    """Writes a program as a list of words, with all its strings in one text."""

    def __init__(self) -> None:
        self._words: list[int] = []
        self._text = bytearray()
        self._strings: dict[str, tuple[int, int]] = {}

    def encode(self, program: Program) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the words (int64) and the text (uint8), both 1-D."""
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
        text = torch.tensor(list(self._text), dtype=torch.uint8)
        return torch.tensor(words, dtype=torch.int64), text

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

# SPDX-License-Identifier: Apache-2.0
"""What a program consists of: instructions on registers."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any, Literal

__all__ = ["Instruction", "Register", "without_owner"]


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


def without_owner(value: Any) -> Any:
    """Return an argument without the builder in its registers, which would keep everything it knows alive."""
    if isinstance(value, Register):
        return Register(value.index, value.kind, value.name)
    return tuple(map(without_owner, value)) if isinstance(value, tuple) else value

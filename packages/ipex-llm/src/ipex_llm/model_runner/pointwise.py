# SPDX-License-Identifier: Apache-2.0
"""Chains of element-wise functions in programs, by the names of the functions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ipex_core.program import ProgramBuilder, Register
from ipex_core.program.pointwise import POINTWISE


def pointwise(
    b: ProgramBuilder,
    inputs: Sequence[Register],
    constants: Sequence[float],
    steps: Sequence[tuple[Any, ...]],
    dtype: torch.dtype,
) -> Register:
    """Write a chain of functions that reads and writes memory once, with all arithmetic in float32.

    Args:
        b: Of the program.
        inputs: Values 0 to n; they broadcast.
        constants: The values behind the inputs.
        steps: ``(name, operand, ...)``, each a further value; operands are numbers of values.
        dtype: Of the result, which is the last value.
    """
    code: list[int] = []
    for name, *operands in steps:
        code += [POINTWISE.index(name), *operands, *[-1] * (3 - len(operands))]
    result: Register = b.call("pointwise", list(inputs), code, list(constants), dtype)
    return result

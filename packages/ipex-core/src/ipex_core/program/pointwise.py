# SPDX-License-Identifier: Apache-2.0
"""The built-in ``pointwise``: a chain of element-wise functions that reads and writes memory once."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch

from ipex_core.library.checks import check_dtype_in, dtype_name
from ipex_core.library.spec import FLOATS, check
from ipex_core.ops.conv import channels_last as is_channels_last

_DTYPES = (*FLOATS, torch.bool)


def _truth(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Return ``function`` with 0 and 1 in float32 for false and true."""
    return lambda *values: function(*values).float()


#: The functions by name, with the number of their operands; all of float32 values. The place of a name is its code.
POINTWISE_FUNCTIONS: Mapping[str, tuple[int, Callable[..., torch.Tensor]]] = MappingProxyType(
    {
        "add": (2, torch.add),
        "sub": (2, torch.sub),
        "mul": (2, torch.mul),
        "div": (2, torch.div),
        "neg": (1, torch.neg),
        "abs": (1, torch.abs),
        "exp": (1, torch.exp),
        "log": (1, torch.log),
        "sqrt": (1, torch.sqrt),
        "rsqrt": (1, torch.rsqrt),
        "reciprocal": (1, torch.reciprocal),
        "tanh": (1, torch.tanh),
        "sigmoid": (1, torch.sigmoid),
        "erf": (1, torch.erf),
        "relu": (1, torch.relu),
        "gelu": (1, torch.nn.functional.gelu),
        "gelu_tanh": (1, lambda a: torch.nn.functional.gelu(a, approximate="tanh")),
        "silu": (1, torch.nn.functional.silu),
        "sin": (1, torch.sin),
        "cos": (1, torch.cos),
        "floor": (1, torch.floor),
        "ceil": (1, torch.ceil),
        "round": (1, torch.round),
        "trunc": (1, torch.trunc),
        "maximum": (2, torch.maximum),
        "minimum": (2, torch.minimum),
        "pow": (2, torch.pow),
        "eq": (2, _truth(torch.eq)),
        "ne": (2, _truth(torch.ne)),
        "lt": (2, _truth(torch.lt)),
        "le": (2, _truth(torch.le)),
        "gt": (2, _truth(torch.gt)),
        "ge": (2, _truth(torch.ge)),
        "logical_and": (2, _truth(torch.logical_and)),
        "logical_or": (2, _truth(torch.logical_or)),
        "logical_not": (1, _truth(torch.logical_not)),
        "where": (3, lambda a, b, c: torch.where(a != 0, b, c)),
        "round_bfloat16": (1, lambda a: a.bfloat16().float()),
        "round_float16": (1, lambda a: a.half().float()),
        "log1p": (1, torch.log1p),
        "expm1": (1, torch.expm1),
    }
)

#: The names by code.
POINTWISE = tuple(POINTWISE_FUNCTIONS)


def check_pointwise(
    inputs: Sequence[Any], code: Sequence[Any], constants: Sequence[float], dtype: torch.dtype
) -> None:
    """Check what does not depend on the tensors."""
    op = "pointwise"
    check(len(inputs) > 0, op, "inputs", "have at least 1 tensor(s)", 0)
    names = ", ".join(dtype_name(one) for one in _DTYPES)
    check(dtype in _DTYPES, op, "dtype", f"be one of {names}", dtype_name(dtype))
    fits = len(code) > 0 and len(code) % 4 == 0
    check(fits, op, "code", "have four numbers for each of its instructions", len(code))
    if not all(isinstance(one, int) for one in code):
        return  # integers of a run
    known = len(inputs) + len(constants)
    for number in range(len(code) // 4):
        opcode, *operands = code[4 * number : 4 * number + 4]
        place = f"code of instruction {number}"
        check(0 <= opcode < len(POINTWISE), op, place, f"be in [0, {len(POINTWISE)})", opcode)
        taken = POINTWISE_FUNCTIONS[POINTWISE[opcode]][0]
        for i, operand in enumerate(operands):
            value = f"operand {i} of instruction {number}"
            if i < taken:
                fits = 0 <= operand < known + number
                check(fits, op, value, f"be in [0, {known + number})", operand)
            else:
                check(operand == -1, op, value, "be -1", operand)


def pointwise(
    inputs: list[torch.Tensor], code: list[int], constants: list[float], dtype: torch.dtype
) -> torch.Tensor:
    """Return the result of the last of a chain of element-wise functions, in ``dtype``.

    Values are numbered: the inputs, then the constants, then one for each instruction. ``code`` has four numbers for
    each instruction: the place of its function in `POINTWISE` and its operands, or -1 where it has fewer than three.
    The inputs broadcast; they are float32, bfloat16, float16 or bool (0 and 1). All arithmetic is in float32; false
    and true are 0 and 1. The result is rounded once, to float32, bfloat16, float16 or (true where it is not 0) bool.
    It is stored with its channels side by side if it is 4-D and so is every input of its shape, else contiguous.
    """
    check_pointwise(inputs, code, constants, dtype)
    shape: list[int] = []
    for i, one in enumerate(inputs):
        check_dtype_in("pointwise", f"input {i}", one, *_DTYPES)
        pairs = zip(reversed(one.shape), reversed(shape), strict=False)
        wanted = f"broadcast with the inputs before it of shape {shape}"
        fits = all(m in (n, 1) or n == 1 for m, n in pairs)
        check(fits, "pointwise", f"input {i}", wanted, list(one.shape))
        shape = list(torch.broadcast_shapes(one.shape, shape))
    values = [one.float() for one in inputs]
    values += [torch.tensor(one, dtype=torch.float32) for one in constants]
    for at in range(0, len(code), 4):
        count, function = POINTWISE_FUNCTIONS[POINTWISE[code[at]]]
        values.append(function(*(values[i] for i in code[at + 1 : at + 1 + count])))
    full = [one for one in inputs if list(one.shape) == shape]
    format = torch.contiguous_format
    if len(shape) == 4 and full and all(map(is_channels_last, full)):
        format = torch.channels_last
    result = values[-1].expand(shape)
    return (result != 0 if dtype == torch.bool else result.to(dtype)).contiguous(
        memory_format=format
    )

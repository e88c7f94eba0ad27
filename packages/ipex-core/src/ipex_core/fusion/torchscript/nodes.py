# SPDX-License-Identifier: Apache-2.0
"""What the rewriter asks about nodes of a TorchScript graph."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch

__all__ = [
    "behind_cast",
    "constant",
    "is_constant",
    "is_tensor",
    "key_of",
    "mean_square",
    "only_use",
    "scalar",
    "weight",
]

# torch declares the classes of graphs without their methods.
Node = Any
Value = Any

FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def is_constant(value: Value) -> bool:
    """Return whether a value is known before the program runs."""
    return bool(value.node().kind() == "prim::Constant")


def constant(value: Value) -> Any:
    """Return the value of a constant (also of a list of constants); None where it is not one, or is None."""
    node = value.node()
    if node.kind() == "prim::ListConstruct":
        return [constant(v) for v in node.inputs()]
    return value.toIValue() if is_constant(value) else None


def weight(value: Value, dim: int) -> torch.Tensor | None:
    """Return the tensor of a constant of a floating dtype and ``dim`` dimensions on the CPU."""
    tensor = constant(value)
    plain = (
        isinstance(tensor, torch.Tensor)
        and tensor.dtype in FLOATS
        and tensor.device.type == "cpu"
        and tensor.layout == torch.strided
        and tensor.dim() == dim
    )
    return tensor if plain else None


def key_of(tensor: torch.Tensor) -> Hashable:
    """Return what tells a constant from others; a matrix and its transpose share their memory."""
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype


def scalar(value: Value) -> float | None:
    """Return a number that is a constant, also one in a tensor without dimensions."""
    found = constant(value)
    if isinstance(found, torch.Tensor) and found.dim() == 0 and found.dtype != torch.bool:
        return float(found.item())
    if isinstance(found, (int, float)) and not isinstance(found, bool):
        return float(found)
    return None


def is_tensor(value: Value) -> bool:
    """Return whether a value is known to be a tensor."""
    return str(value.type()).startswith(("Tensor", "Float(", "BFloat16(", "Half("))


def only_use(value: Value, user: Node) -> bool:
    """Return whether one node uses a value, once, in the block where it is made."""
    uses = value.uses()
    if len(uses) != 1 or uses[0].user != user:
        return False
    return bool(value.node().owningBlock() == user.owningBlock())


def behind_cast(value: Value) -> Value:
    """Return what a cast reads, or the value itself."""
    node = value.node()
    return (
        node.inputsAt(0) if node.kind() in ("aten::to", "aten::type_as", "aten::float") else value
    )


def mean_square(root: Value, x: Value) -> float | None:
    """Return eps if a value is ``rsqrt(mean(x ** 2, -1, keepdim) + eps)``."""
    if root.node().kind() != "aten::rsqrt":
        return None
    add = root.node().inputsAt(0).node()
    if add.kind() != "aten::add" or constant(add.inputsAt(2)) != 1:
        return None
    eps, mean = scalar(add.inputsAt(1)), add.inputsAt(0).node()
    if eps is None or mean.kind() != "aten::mean" or mean.inputsSize() != 4:
        return None
    if constant(mean.inputsAt(1)) != [-1] or constant(mean.inputsAt(2)) is not True:
        return None
    power = mean.inputsAt(0).node()
    square = power.kind() == "aten::square" or (
        power.kind() == "aten::pow" and scalar(power.inputsAt(1)) == 2.0
    )
    return eps if square and power.inputsAt(0) == x else None

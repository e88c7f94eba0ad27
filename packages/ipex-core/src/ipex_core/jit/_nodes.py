# SPDX-License-Identifier: Apache-2.0
"""What the rewriter asks about nodes of a TorchScript graph."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["constant", "is_constant", "is_tensor", "only_use", "scalar", "weight"]

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

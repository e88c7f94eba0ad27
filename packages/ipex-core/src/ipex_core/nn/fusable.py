# SPDX-License-Identifier: Apache-2.0
"""What a linear layer offers so that the operations after it run in the same op."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import nn

from ipex_core.ops.linear.linear import activate

__all__ = ["FusableLinear", "finish", "fits", "is_fusable"]

Tensor = torch.Tensor


class FusableLinear(Protocol):
    """A linear layer, dense or quantized, that can finish its result before it is stored.

    It is recognized by its attributes, not by its class: a module that has both ``packed_weight`` and ``fused`` is one.
    `OptimizedLinear` is one, and so is any layer with a packed quantized weight that wants to take part.

    Attributes:
        in_features: Size of the last dimension of the input.
        out_features: Size of the last dimension of the result.
    """

    in_features: int
    out_features: int

    @property
    def packed_weight(self) -> Tensor | None:
        """The packed weight as its op (``linear``, ``woq_linear``) takes it; None while no weight is packed."""
        ...

    def fused(
        self,
        x: Tensor,
        post: str = "none",
        residual: Tensor | None = None,
        mul: Tensor | None = None,
        residual2: Tensor | None = None,
    ) -> Tensor:
        """Compute ``post(x @ weight.T + bias) * mul + residual + residual2``.

        It must accept operands of other dtypes and of shapes that are broadcast, and be differentiable where its
        parameters are; it decides itself what runs in one op.

        Args:
            x: ``[..., in_features]``.
            post: ``"none"``, ``"relu"``, ``"gelu"``, ``"gelu_tanh"`` or ``"silu"``.
            residual: ``[..., out_features]``, or None.
            mul: Likewise.
            residual2: Likewise.

        Returns:
            ``[..., out_features]``.
        """
        ...


def is_fusable(module: nn.Module) -> bool:
    """Return whether a module is a `FusableLinear`."""
    kind = type(module)
    return hasattr(kind, "fused") and (
        hasattr(kind, "packed_weight") or hasattr(module, "packed_weight")
    )


def fits(operand: Tensor | None, x: Tensor, out_features: int) -> bool:
    """Return whether the ops can take what the result of a linear layer is multiplied by or added to."""
    if operand is None:
        return True
    shape = operand.shape
    return (
        operand.dtype is x.dtype
        and len(shape) == x.dim()
        and shape[-1] == out_features
        and shape[:-1] == x.shape[:-1]
    )


def finish(
    y: Tensor,
    post: str = "none",
    residual: Tensor | None = None,
    mul: Tensor | None = None,
    residual2: Tensor | None = None,
) -> Tensor:
    """Return ``post(y) * mul + residual + residual2``, with stock ops."""
    y = activate(y, post)
    if mul is not None:
        y = y * mul
    if residual is not None:
        y = y + residual
    return y if residual2 is None else y + residual2

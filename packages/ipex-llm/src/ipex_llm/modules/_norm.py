# SPDX-License-Identifier: Apache-2.0
"""Norms with a weight of their own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from ipex_core.library.spec import check
from ipex_llm import functional
from ipex_llm.modules.utils import IPEXRuntimeCustomOps

__all__ = ["FastLayerNorm", "RMSNorm", "as_parameter"]

Tensor = torch.Tensor


def as_parameter(value: Tensor) -> nn.Parameter:
    """Return a parameter: the given one, or a new one without gradient on the same memory."""
    if isinstance(value, nn.Parameter):
        return value
    return nn.Parameter(value.detach(), requires_grad=False)


class RMSNorm(nn.Module):
    """Root mean square norm over the last dimension, computed in float32.

    Args:
        hidden_size: Size of the last dimension.
        eps: Added to the mean square.
        weight: ``[hidden_size]``; a parameter is shared, not copied. None: ones.

    Raises:
        OpArgumentError: ``weight`` has another shape.

    Example:
        >>> with torch.no_grad():
        ...     RMSNorm(2, 0.0)(torch.tensor([3.0, 4.0]))
        tensor([0.8485, 1.1314])
    """

    runtime_ops = IPEXRuntimeCustomOps()

    def __init__(self, hidden_size: int, eps: float = 1e-6, weight: Tensor | None = None) -> None:
        super().__init__()
        if weight is not None:
            fits = list(weight.shape) == [hidden_size]
            check(fits, "RMSNorm", "weight", f"have shape [{hidden_size}]", list(weight.shape))
        self.hidden_size = hidden_size
        self.eps = self.variance_epsilon = eps
        self.weight = (
            nn.Parameter(torch.ones(hidden_size)) if weight is None else as_parameter(weight)
        )

    @classmethod
    def apply_function(cls, hidden_states: Tensor, weight: Tensor | None, eps: float) -> Tensor:
        """Call `ipex_llm.functional.rms_norm`."""
        return functional.rms_norm(hidden_states, weight, eps)

    def forward(self, x: Tensor) -> Tensor:
        """Normalize ``[..., hidden_size]``."""
        return functional.rms_norm(x, self.weight, self.eps)

    def extra_repr(self) -> str:
        """Return size and eps."""
        return f"{self.hidden_size}, eps={self.eps}"


class FastLayerNorm(nn.Module):
    """Layer norm over the last dimensions, computed in float32.

    Args:
        normalized_shape: The last dimensions.
        eps: Added to the variance.
        weight: ``normalized_shape``; a parameter is shared, not copied. None for ones.
        bias: Likewise; None for zeros.

    Raises:
        OpArgumentError: ``weight`` or ``bias`` has another shape.
    """

    runtime_ops = IPEXRuntimeCustomOps()

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float,
        weight: Tensor | None,
        bias: Tensor | None = None,
    ) -> None:
        super().__init__()
        shape = [normalized_shape] if isinstance(normalized_shape, int) else list(normalized_shape)
        for name, value in (("weight", weight), ("bias", bias)):
            if value is not None:
                fits = list(value.shape) == shape
                check(fits, "FastLayerNorm", name, f"have shape {shape}", list(value.shape))
        self.normalized_shape = tuple(shape)
        self.eps = eps
        self.weight = None if weight is None else as_parameter(weight)
        self.bias = None if bias is None else as_parameter(bias)

    @classmethod
    def apply_function(
        cls,
        hidden_states: Tensor,
        normalized_shape: int | Sequence[int],
        weight: Tensor | None,
        bias: Tensor | None,
        eps: float,
    ) -> Tensor:
        """Call `ipex_llm.functional.fast_layer_norm`."""
        return functional.fast_layer_norm(hidden_states, normalized_shape, weight, bias, eps)

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Normalize ``[..., *normalized_shape]``."""
        arguments: Any = (self.normalized_shape, self.weight, self.bias, self.eps)
        return functional.fast_layer_norm(hidden_states, *arguments)

    def extra_repr(self) -> str:
        """Return shape and eps."""
        return f"{self.normalized_shape}, eps={self.eps}"

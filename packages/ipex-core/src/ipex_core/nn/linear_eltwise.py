# SPDX-License-Identifier: Apache-2.0
"""A linear layer and the activation behind it: IPEX's `IPEXLinearEltwise`."""

from __future__ import annotations

import torch
from torch import nn

from ipex_core.nn.linear import OptimizedLinear

__all__ = ["IPEXLinearEltwise"]


class IPEXLinearEltwise(nn.Module):
    """``relu`` or ``sigmoid`` of a linear layer; ``relu`` is computed in the op of a layer from `ipex.optimize`.

    Args:
        ipex_linear_module: The layer; one that `ipex.optimize` has not prepared works too.
        eltwise: ``"relu"`` or ``"sigmoid"``.

    Raises:
        TypeError: ``ipex_linear_module`` is not a linear layer.
        ValueError: ``eltwise`` is something else.
    """

    def __init__(self, ipex_linear_module: nn.Linear, eltwise: str = "relu") -> None:
        super().__init__()
        if not isinstance(ipex_linear_module, nn.Linear):
            raise TypeError(
                "IPEXLinearEltwise: ipex_linear_module must be a linear layer,"
                f" got {type(ipex_linear_module).__name__}"
            )
        if eltwise not in ("relu", "sigmoid"):
            raise ValueError(
                f"IPEXLinearEltwise: eltwise must be 'relu' or 'sigmoid', got {eltwise!r}"
            )
        self.m = ipex_linear_module
        self.eltwise = eltwise

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return ``eltwise(linear(x))`` for ``x [..., in_features]``; differentiable."""
        if self.eltwise == "sigmoid":
            return torch.sigmoid(self.m(x))
        if isinstance(self.m, OptimizedLinear):
            return self.m.fused(x, "relu")
        return torch.relu(self.m(x))

    def extra_repr(self) -> str:
        """Return the name of the activation."""
        return f"eltwise={self.eltwise!r}"

# SPDX-License-Identifier: Apache-2.0
"""Batch normalization with fixed statistics, as detection models use it."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

__all__ = ["FrozenBatchNorm2d"]

Tensor = torch.Tensor


class FrozenBatchNorm2d(nn.Module):
    """`torch.nn.BatchNorm2d` whose statistics and parameters are constants.

    All four vectors are buffers, so that nothing trains them; the input gets its gradient. In a model that is cast to
    bfloat16 or float16 the buffers may stay float32.

    Args:
        num_features: Channels of the input.
        eps: Added to the variance.
    """

    weight: Tensor
    bias: Tensor
    running_mean: Tensor
    running_var: Tensor

    def __init__(self, num_features: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.num_features = num_features
        self.eps = eps
        self.register_buffer("weight", torch.ones(num_features))
        self.register_buffer("bias", torch.zeros(num_features))
        self.register_buffer("running_mean", torch.zeros(num_features))
        self.register_buffer("running_var", torch.ones(num_features))

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any
    ) -> None:
        # A checkpoint of nn.BatchNorm2d has a counter that means nothing here.
        state_dict.pop(prefix + "num_batches_tracked", None)
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)

    def forward(self, x: Tensor) -> Tensor:
        """Normalize ``x [N, C, H, W]``, float32, bfloat16 or float16; the result has its dtype and memory format."""
        return torch.ops.ipex.frozen_batch_norm(  # type: ignore[no-any-return]
            x, self.weight, self.bias, self.running_mean, self.running_var, self.eps
        )

    def extra_repr(self) -> str:
        """Return the size and eps."""
        return f"{self.num_features}, eps={self.eps}"

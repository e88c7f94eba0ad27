# SPDX-License-Identifier: Apache-2.0
"""Norms that multiply by the channel scales of SmoothQuant."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from ipex_quant.int8.boundary import Scaled, plain
from ipex_quant.util.modules import WholeModule

__all__ = ["SmoothNorm"]

Tensor = torch.Tensor


class SmoothNorm(nn.Module, WholeModule):
    """A layer norm or RMS norm whose weight has the channel scales of the layers that read it in it.

    Those layers get the product; any other reader gets what the norm gave before.

    Attributes:
        weight: The weight of the norm times the channel scales.
        bias: Its bias times the channel scales, or None.
        factor: float32, the channel scales.
    """

    weight: Tensor
    bias: Tensor | None
    factor: Tensor

    def __init__(
        self, name: str, rms: bool, eps: float | None, weight: Tensor, bias: Any, factor: Tensor
    ) -> None:
        super().__init__()
        self.name, self.rms, self.eps = name, rms, eps
        self.register_buffer("weight", weight)
        self.register_buffer("bias", bias)
        self.register_buffer("factor", factor)

    @classmethod
    def of(cls, name: str, norm: Any, factor: Tensor) -> SmoothNorm:
        """Return the form of a norm with channel scales."""
        bias = getattr(norm, "bias", None)
        step = factor.to(norm.weight.dtype)
        weight = norm.weight.detach() * step
        shifted = None if bias is None else bias.detach() * step
        made = cls(name, isinstance(norm, nn.RMSNorm), norm.eps, weight, shifted, factor.clone())
        return made.eval()

    def saved(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Return what a file needs to make this module again."""
        tensors = {"weight": self.weight, "bias": self.bias, "factor": self.factor}
        about = {"name": self.name, "rms": self.rms, "eps": self.eps}
        return about, {k: v for k, v in tensors.items() if v is not None}

    @classmethod
    def from_saved(cls, about: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> SmoothNorm:
        """Return the module that `saved` described."""
        bias = tensors.get("bias")
        parts = tensors["weight"].clone(), None if bias is None else bias.clone()
        made = cls(str(about["name"]), bool(about["rms"]), about["eps"], *parts, tensors["factor"])
        return made.eval()

    def forward(self, x: Any) -> Any:
        """Return the product, for the layers that know it."""
        x = plain(x)
        shape = self.weight.shape
        if self.rms:
            y = nn.functional.rms_norm(x, shape, self.weight, self.eps)
        else:
            y = nn.functional.layer_norm(x, shape, self.weight, self.bias, self.eps or 0.0)
        return Scaled(y, self.factor, self.name)

    def extra_repr(self) -> str:
        """Return the sizes."""
        return f"{tuple(self.weight.shape)}, eps={self.eps}, channel scales"

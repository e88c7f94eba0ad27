# SPDX-License-Identifier: Apache-2.0
"""Modules with the names, attributes and results of DeepSpeed's, for models that it has divided."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

__all__ = ["divided_in_two"]


class LinearAllreduce(nn.Module):
    """As DeepSpeed's."""

    def __init__(self, linear: nn.Linear, first: int, last: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(linear.weight.detach()[:, first:last].clone())
        self.bias = None if linear.bias is None else nn.Parameter(linear.bias.detach())
        self.mp_group = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x @ self.weight.T
        torch.distributed.all_reduce(y)
        return y if self.bias is None else y + self.bias


class LmHeadLinearAllreduce(LinearAllreduce):
    """As DeepSpeed's: takes its part of the input itself."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        half = x.shape[-1] // 2
        return super().forward(x.narrow(-1, half * torch.distributed.get_rank(), half))


class LinearLayer(nn.Module):
    """As DeepSpeed's."""

    def __init__(self, linear: nn.Linear, first: int, last: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(linear.weight.detach()[first:last].clone())
        self.bias = None if linear.bias is None else nn.Parameter(linear.bias.detach()[first:last])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.weight, self.bias)


def divided_in_two(model: Any, rank: int) -> nn.Module:
    """Return a Llama with the half of one of two ranks in its modules."""

    def half(kind: type, owner: nn.Module, name: str, side: int) -> None:
        linear = getattr(owner, name)
        size = linear.weight.shape[side] // 2
        setattr(owner, name, kind(linear, rank * size, rank * size + size))

    model.eval()  # before: DeepSpeed's modules are in training mode, too
    for layer in model.model.layers:
        for name in ("q_proj", "k_proj", "v_proj"):
            half(LinearLayer, layer.self_attn, name, 0)
        half(LinearAllreduce, layer.self_attn, "o_proj", 1)
        half(LinearLayer, layer.mlp, "gate_proj", 0)
        half(LinearLayer, layer.mlp, "up_proj", 0)
        half(LinearAllreduce, layer.mlp, "down_proj", 1)
    half(LmHeadLinearAllreduce, model, "lm_head", 1)
    return model  # type: ignore[no-any-return]

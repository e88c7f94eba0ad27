# SPDX-License-Identifier: Apache-2.0
"""What the tests of training share: a small network, its data, optimizers."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ipex_core.optim import Lamb, Lars

Tensor = torch.Tensor

OPTIMIZERS: dict[str, Any] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, weight_decay=1e-3, nesterov=True),
    "sgd_plain": lambda p: torch.optim.SGD(p, lr=0.05),
    "sgd_dampening": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.5, dampening=0.2),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.02, lr_decay=1e-2, weight_decay=1e-3),
    "adam": lambda p: torch.optim.Adam(p, lr=3e-3, weight_decay=1e-3),
    "adam_amsgrad": lambda p: torch.optim.Adam(p, lr=3e-3, amsgrad=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=3e-3, weight_decay=0.1),
    "lamb": lambda p: Lamb(p, lr=1e-2, weight_decay=1e-2),
    "lars": lambda p: Lars(p, lr=1.0, momentum=0.9, eeta=1e-2, weight_decay=1e-3),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=1e-3),  # no fused step
}


def net(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(8 * 36, 16),
        nn.LayerNorm(16),
        nn.Linear(16, 4),
    ).train()


def batches(count: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    centers = torch.randn(4, 3, 6, 6, generator=generator)
    result = []
    for _ in range(count):
        y = torch.randint(0, 4, (16,), generator=generator)
        result.append((centers[y] + 0.7 * torch.randn(16, 3, 6, 6, generator=generator), y))
    return result


def train(model: nn.Module, optimizer: Any, count: int = 20, dtype: Any = None) -> list[float]:
    losses = []
    for x, y in batches(count):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=dtype or torch.bfloat16, enabled=dtype is not None):
            loss = nn.functional.cross_entropy(model(x).float(), y)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses

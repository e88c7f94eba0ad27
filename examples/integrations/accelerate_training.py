# SPDX-License-Identifier: Apache-2.0
"""Training with accelerate: ipex prepares the model and its optimizer, accelerate the rest.

python accelerate_training.py                        # one process
accelerate launch --cpu --num_processes 2 accelerate_training.py
"""

from __future__ import annotations

import argparse

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import ipex


def main() -> None:
    """Train a small network to tell the sign of a sum."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=60)
    options = parser.parse_args()
    torch.manual_seed(0)
    x = torch.randn(1024, 16)
    data = DataLoader(
        TensorDataset(x, (x.sum(1) > 0).long()), batch_size=64, shuffle=True, drop_last=True
    )
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 2)).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    # ipex first: it may replace the step of the optimizer; accelerate then wraps what it gets.
    model, optimizer = ipex.optimize(model, optimizer=optimizer, inplace=True)
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    model, optimizer, data = accelerator.prepare(model, optimizer, data)

    losses: list[float] = []
    while len(losses) < options.steps:
        for inputs, labels in data:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(inputs), labels)
            accelerator.backward(loss)
            optimizer.step()
            losses.append(loss.item())
            if len(losses) == options.steps:
                break
    accelerator.print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}")


if __name__ == "__main__":
    main()

# SPDX-License-Identifier: Apache-2.0
"""Training and prediction with Lightning: ipex inside `configure_optimizers`.

python lightning_training.py
"""

from __future__ import annotations

import argparse
from typing import Any

import lightning
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import ipex


class Network(lightning.LightningModule):
    """A small network that tells the sign of a sum."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 2))
        self.losses: list[float] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return logits."""
        return self.net(x)

    def training_step(self, batch: Any, _: int) -> torch.Tensor:
        """Return the loss of a batch."""
        loss = nn.functional.cross_entropy(self(batch[0]), batch[1])
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return the optimizer; ipex fuses its step."""
        optimizer = torch.optim.AdamW(self.net.parameters(), lr=1e-2)
        self.net, optimizer = ipex.optimize(self.net.train(), optimizer=optimizer, inplace=True)
        return optimizer


def main() -> None:
    """Train, then predict with the model optimized for inference."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=4)
    options = parser.parse_args()
    torch.manual_seed(0)
    x = torch.randn(1024, 16)
    labels = (x.sum(1) > 0).long()
    data = DataLoader(TensorDataset(x, labels), batch_size=64)
    model = Network()
    trainer = lightning.Trainer(
        max_epochs=options.epochs,
        accelerator="cpu",
        precision="bf16-mixed",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, data)
    print(f"loss {model.losses[0]:.3f} -> {model.losses[-1]:.3f}")
    fast = ipex.optimize(model.net.eval(), dtype=torch.bfloat16)
    with torch.no_grad():
        right = (fast(x).argmax(1) == labels).float().mean()
    print(f"right: {right:.1%}")


if __name__ == "__main__":
    main()

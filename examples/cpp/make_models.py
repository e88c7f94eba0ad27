# SPDX-License-Identifier: Apache-2.0
"""Write one model in the two forms that C++ can run, an input and the output for it: python make_models.py FOLDER."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch import nn

import ipex


class Block(nn.Module):
    """A feed-forward block in front of which a kernel of ipex normalizes."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(width))
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return ``x`` plus what the layers make of it."""
        normal = torch.ops.ipex.rms_norm(x, self.scale.to(x.dtype))
        return x + self.down(nn.functional.gelu(self.up(normal)))


def main(folder: Path) -> None:
    """Write the files."""
    folder.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    model = ipex.optimize(Block(64).eval(), dtype=torch.bfloat16)
    x = torch.randn(6, 64, dtype=torch.bfloat16)
    with torch.no_grad():
        torch.save(x, folder / "input.pt")
        torch.save(model(x), folder / "output.pt")
        torch.jit.freeze(torch.jit.trace(model, x)).save(str(folder / "model.ts"))
    batch = torch.export.Dim("batch", min=1, max=4096)
    ipex.export(model, x, folder / "model.pt2", dynamic_shapes={"x": {0: batch}})


if __name__ == "__main__":
    main(Path(sys.argv[1]))

# SPDX-License-Identifier: Apache-2.0
"""Write models in the forms that C++ can run, with inputs and the outputs for them: python make_models.py FOLDER.

One model is written as TorchScript, as an AOTInductor package and as a precompiled file, another one as TorchScript
with INT8 layers.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch import nn

import ipex
from ipex.quantization import convert, default_static_qconfig_mapping, prepare


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


class Recommender(nn.Module):
    """A score for an image and a set of ids."""

    def __init__(self) -> None:
        super().__init__()
        self.image = nn.Sequential(
            nn.Conv2d(3, 16, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(16, 16, 3), nn.ReLU()
        )
        self.ids = nn.EmbeddingBag(100, 16, mode="sum")
        self.score = nn.Linear(16, 1)

    def forward(
        self, image: torch.Tensor, ids: torch.Tensor, offsets: torch.Tensor
    ) -> torch.Tensor:
        """Return one score for each image and its bag of ids."""
        return self.score(self.image(image).mean((2, 3)) + self.ids(ids, offsets))


def write_int8(folder: Path) -> None:
    """Write a statically quantized model with convolutions, an embedding bag and a linear layer."""
    batches = [
        (torch.randn(4, 3, 16, 16), torch.randint(100, (12,)), torch.tensor([0, 3, 5, 9]))
        for _ in range(4)
    ]
    prepared = prepare(
        Recommender().eval(), default_static_qconfig_mapping, example_inputs=batches[0]
    )
    with torch.no_grad():
        for batch in batches:
            prepared(*batch)
        model = convert(prepared)
        torch.save(batches[0], folder / "int8_input.pt")
        torch.save(model(*batches[0]), folder / "int8_output.pt")
        torch.jit.freeze(torch.jit.trace(model, batches[0])).save(str(folder / "int8.ts"))


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
    write_int8(folder)
    batch = torch.export.Dim("batch", min=1, max=4096)
    ipex.export(model, x, folder / "model.pt2", dynamic_shapes={"x": {0: batch}})
    precompiled = ipex.precompile(model, (x,), dynamic_shapes={"x": {0: batch}})
    precompiled.save(folder / "model.safetensors")


if __name__ == "__main__":
    main(Path(sys.argv[1]))

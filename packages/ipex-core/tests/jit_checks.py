# SPDX-License-Identifier: Apache-2.0
"""What the tests of TorchScript share."""

import io
import subprocess
import sys

import torch
from torch import nn
from torch.nn import functional as F

from ipex_core import jit

__all__ = [
    "CONV_POST",
    "IN_PLACE",
    "After",
    "Concat",
    "check",
    "check_elsewhere",
    "frozen",
    "saved",
]


def frozen(model, *inputs):
    with torch.no_grad():
        return torch.jit.freeze(torch.jit.trace(model.eval(), inputs))


def saved(program):
    buffer = io.BytesIO()
    torch.jit.save(program, buffer)
    return buffer.getvalue()


def check_elsewhere(program, x, y, folder, **tolerances):
    """Save a program and let a fresh process compare what it makes of x with y."""
    torch.jit.save(program, folder / "program.pt")
    torch.save((x, y, tolerances), folder / "tensors.pt")
    code = (
        "import sys, warnings; warnings.simplefilter('ignore'); import torch, ipex_core\n"
        "x, y, tolerances = torch.load(sys.argv[2])\n"
        "torch.testing.assert_close(torch.jit.load(sys.argv[1])(x), y, **tolerances)\n"
    )
    arguments = [str(folder / "program.pt"), str(folder / "tensors.pt")]
    subprocess.run([sys.executable, "-c", code, *arguments], check=True, timeout=120)


def check(model, *calls, tolerance=1e-4):
    """Fuse the trace of the first call; compare all calls, also those of a saved program."""
    program = frozen(model, *calls[0])
    before = str(program.graph)
    result = jit.fuse(program)
    assert str(program.graph) == before
    again = torch.jit.load(io.BytesIO(saved(result)))
    with torch.no_grad():
        for call in calls:
            wanted = model(*call)
            for run in (result, result, result, again):
                torch.testing.assert_close(run(*call), wanted, rtol=tolerance, atol=tolerance)
    return jit.fused(result)


class After(nn.Module):
    """A layer and what follows it."""

    def __init__(self, layer, after):
        super().__init__()
        self.layer, self.after = layer, after

    def forward(self, x, *rest):
        return self.after(self.layer(x), *rest)


CONV_POST = {
    "relu": F.relu,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "silu": F.silu,
    "hardswish": F.hardswish,
    "leaky_relu": lambda y: F.leaky_relu(y, 0.2),
    "hardtanh": lambda y: F.hardtanh(y, -0.5, 0.25),
    "gelu": F.gelu,
}
IN_PLACE = {
    "abs": torch.abs,
    "clamp": lambda y: torch.clamp(y, -0.2, 0.3),
    "elu": F.elu,
    "exp": torch.exp,
    "mish": F.mish,
    "square": torch.square,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
}


class Concat(nn.Module):
    """A block of a three-dimensional U-Net."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm3d(6)

    def forward(self, a, b):
        return F.relu(self.norm(torch.cat([a, b], 1)))

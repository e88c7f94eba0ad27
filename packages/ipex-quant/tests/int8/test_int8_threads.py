# SPDX-License-Identifier: Apache-2.0
"""Preparing and converting change no state of the process, not even for a while."""

from __future__ import annotations

import math

import pytest
import torch
from torch import fx, nn

import ipex_core
from ipex_core.nn.functional import interaction
from ipex_quant import convert, default_static_qconfig_mapping, prepare


class Look:
    """What a forward finds; an object, since functions of a forward may run as copies with another ``math``."""

    def __init__(self) -> None:
        self.found: list[tuple[object, ...]] = []

    def __call__(self, x: object) -> None:
        now = (nn.Module.__call__, nn.Module.__getattr__, math.sqrt)
        self.found.append((isinstance(x, fx.Proxy), now == ORIGINALS))


ORIGINALS = (nn.Module.__call__, nn.Module.__getattr__, math.sqrt)
LOOK = Look()


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        LOOK(x)
        y = x + torch.relu(self.down(torch.relu(self.up(x))))
        return interaction(x, y) / math.sqrt(x.size(-1))


def test_nothing_is_patched() -> None:
    x = torch.randn(4, 32)
    with torch.no_grad():
        model = nn.Sequential(Model()).eval()
        prepared = prepare(model, default_static_qconfig_mapping, example_inputs=(x,))
        prepared(x)
        quantized = convert(prepared)
        torch.testing.assert_close(quantized(x), model(x), rtol=0.1, atol=0.1)
    assert any(traced for traced, _ in LOOK.found), "the forward was traced"
    assert all(same for _, same in LOOK.found)


@pytest.mark.parametrize("dims", [1, 2, 3])
@torch.no_grad()
def test_any_number_of_threads_gives_the_same_strided_convolution(dims: int) -> None:
    """oneDNN copies what a window of one place sees to a buffer, which its threads wrote to at once."""
    torch.manual_seed(0)
    layer = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[dims - 1](24, 40, 1, stride=2)
    x = torch.randn(2, 24, *{1: (400,), 2: (28, 28), 3: (10, 9, 9)}[dims])
    model = nn.Sequential(layer, nn.ReLU()).eval()
    prepared = prepare(model, default_static_qconfig_mapping, example_inputs=x)
    prepared(x)
    quantized, before = convert(prepared), torch.get_num_threads()
    programs = [quantized] if dims == 3 else [quantized, ipex_core.precompile(quantized, x)]
    try:
        torch.set_num_threads(1)
        expected = quantized(x)
        torch.testing.assert_close(expected, model(x), rtol=0.05, atol=0.05)
        torch.set_num_threads(2)
        for program in programs:
            for _ in range(30):
                assert torch.equal(program(x), expected)
    finally:
        torch.set_num_threads(before)

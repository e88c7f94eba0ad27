# SPDX-License-Identifier: Apache-2.0
"""Preparing and converting change no state of the process, not even for a while."""

from __future__ import annotations

import math

import torch
from torch import fx, nn

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

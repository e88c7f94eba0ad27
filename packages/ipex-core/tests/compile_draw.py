# SPDX-License-Identifier: Apache-2.0
"""Random small programs around the patterns of the compile passes, and what only looks like them.

A program is one of the spellings of a pattern with other dtypes, dims, scalars and memory layouts drawn at random. Each
intermediate result goes through `Run.step`, where it may get another user, a copy, a view, a conversion or a mutation.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

Program = Callable[["Run"], Any]
WIDTH = 32
FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
EVENTS = ("output", "use", "clone", "view", "widen", "round", "write", "alias", "detach", "chunk")


class Draw:
    """All choices of one program; they depend on the seed alone."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.inputs: list[Callable[[], Tensor]] = []
        self.constants: list[int] = []
        self.dtype = self.pick(FLOATS[0], FLOATS[0], FLOATS[0], FLOATS[1], FLOATS[1], *FLOATS[2:])
        self.events = {
            self.random.randrange(1, 14): self.pick(*EVENTS)
            for _ in range(self.pick(0, 0, 0, 1, 1, 2))
        }

    def pick(self, *options: Any) -> Any:
        return self.random.choice(options)

    def mostly(self, option: Any, *others: Any, chance: float = 0.85) -> Any:
        """Return the first option, or with the remaining probability one of the others."""
        return option if self.random.random() < chance else self.pick(*others)

    def flag(self, chance: float = 0.5) -> bool:
        return self.random.random() < chance

    def other(self) -> torch.dtype:
        return self.mostly(self.dtype, *FLOATS, chance=0.92)

    def input(
        self,
        *shape: int,
        dtype: torch.dtype | None = None,
        constant: bool = False,
        scale: float = 1.0,
    ) -> int:
        """Declare an input in one of several memory layouts and return its position."""
        seed, dtype = self.random.randrange(1 << 30), dtype or self.dtype
        layouts = ("transposed", "strided", "offset", "expanded")
        layout = "plain" if constant else self.mostly("plain", *layouts, chance=0.6)

        def make() -> Tensor:
            generator = torch.Generator().manual_seed(seed)

            def randn(*sizes: int) -> Tensor:
                return (torch.randn(sizes, generator=generator) * scale).to(dtype)

            if layout == "transposed" and len(shape) > 1:
                return randn(*shape[:-2], shape[-1], shape[-2]).transpose(-1, -2)
            if layout == "strided" and shape:
                return randn(*shape[:-1], 2 * shape[-1])[..., ::2]
            if layout == "offset" and shape:
                return randn(shape[0] + 1, *shape[1:])[1:]
            if layout == "expanded" and len(shape) > 1:
                return randn(1, *shape[1:]).expand(shape)
            return randn(*shape)

        self.inputs.append(make)
        if constant:
            self.constants.append(len(self.inputs) - 1)
        return len(self.inputs) - 1

    def weight(self, *shape: int) -> int:
        return self.input(*shape, constant=self.flag(0.95), scale=shape[-1] ** -0.5)


class Run:
    """One execution of a program: its inputs, and the steps at which it does more than its pattern."""

    def __init__(self, events: dict[int, str], inputs: tuple[Tensor, ...]) -> None:
        self.events, self.inputs = events, inputs
        self.extra: list[Tensor] = []
        self.steps = 0

    def __getitem__(self, position: int) -> Tensor:
        return self.inputs[position]

    def step(self, x: Tensor) -> Tensor:
        self.steps += 1
        event = self.events.get(self.steps)
        if event == "output":
            self.extra.append(x)
        elif event == "use":
            self.extra.append((x * 2).sum(-1))
        elif event == "alias":
            self.extra.append(x[..., :1])
        elif event == "chunk":
            self.extra += x.chunk(2, -1)
        elif event == "clone":
            x = x.clone()
        elif event == "view":
            x = x.reshape(-1).reshape(x.shape)
        elif event == "widen":
            x = x.double().to(x.dtype)
        elif event == "round":
            x = x.to(torch.bfloat16).to(x.dtype)
        elif event == "detach":
            x = x.detach()
        elif event == "write":
            x = x * 1
            self.extra.append(x)
            x.mul_(0.5)
        return x


def assert_same(draw: Draw, got: Sequence[Tensor], expected: Sequence[Tensor], text: Any) -> None:
    """Compare what a program gave with what eager execution did, as closely as its dtypes allow."""
    for g, e in zip(got, expected, strict=True):
        assert g.dtype == e.dtype and g.shape == e.shape, (text, g.dtype, e.dtype, g.shape, e.shape)
        limit = 1e-3 if draw.dtype == torch.float32 == e.dtype else 8e-2
        scale = e[e.isfinite()].abs().max().item() if e.isfinite().any() else 0.0
        torch.testing.assert_close(
            g,
            e,
            rtol=limit,
            atol=limit * max(scale, 1.0),
            equal_nan=True,
            msg=lambda m: f"{m}\n{text}",
        )

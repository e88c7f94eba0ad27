# SPDX-License-Identifier: Apache-2.0
"""Timing of kernels that compute the same, by which `optimize` chooses one for a layer."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

__all__ = ["fastest", "numbers"]


def numbers(*size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return normally distributed numbers to time kernels on.

    They come from a generator of their own: what a program draws must not depend on whether something was timed.
    """
    generator = torch.Generator("cpu").manual_seed(0)
    return torch.randn(size, generator=generator, device="cpu").to(dtype)


def fastest(runs: dict[str, Callable[[], torch.Tensor]], seconds: float = 0.2) -> tuple[str, str]:
    """Time candidates in turns; return the fastest (the stock op unless beaten by 2 %) and their times as text.

    The least time of each counts: what else runs on the machine only adds to it.
    """
    times: dict[str, list[float]] = {name: [] for name in runs}
    deadline = time.perf_counter() + seconds
    for turn in range(30):
        for name, run in runs.items():  # taken in turns, so that noise meets all alike
            start = time.perf_counter()
            run()
            times[name].append(time.perf_counter() - start)
        if turn >= 4 and time.perf_counter() > deadline:
            break
    least = {name: min(values) * 1e6 for name, values in times.items()}
    best = min(least, key=lambda name: least[name])
    if least[best] > 0.98 * least["stock"]:
        best = "stock"
    return best, ", ".join(f"{name} {value:.0f} us" for name, value in least.items())

# SPDX-License-Identifier: Apache-2.0
"""Choice between kernels by timing them, for ``auto_kernel_selection``."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

__all__ = ["fastest"]


def fastest(runs: dict[str, Callable[[], torch.Tensor]]) -> tuple[str, str]:
    """Time candidates in turns; return the fastest (the stock op unless beaten by 2 %) and the medians as text."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    deadline = time.perf_counter() + 0.2
    for turn in range(30):
        for name, run in runs.items():  # taken in turns, so that noise meets all alike
            start = time.perf_counter()
            run()
            times[name].append(time.perf_counter() - start)
        if turn >= 4 and time.perf_counter() > deadline:
            break
    medians = {name: statistics.median(values[1:]) * 1e6 for name, values in times.items()}
    best = min(medians, key=lambda name: medians[name])
    if medians[best] > 0.98 * medians["stock"]:
        best = "stock"
    return best, ", ".join(f"{name} {value:.0f} us" for name, value in medians.items())

# SPDX-License-Identifier: Apache-2.0
"""The picture of a search: each objective over the trials, and the best so far."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ipex_runtime.hypertune._record import Record

__all__ = ["plot"]


def plot(record: Record, objectives: Sequence[dict[str, Any]], path: Path) -> None:
    """Write a PNG file with one diagram for each objective; failed trials are crosses on the axis.

    Raises:
        ImportError: matplotlib is not installed.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 3.2 * len(objectives)), layout="constrained")
    FigureCanvasAgg(figure)
    numbers = range(1, len(record.trials) + 1)
    for i, objective in enumerate(objectives):
        axes = figure.add_subplot(len(objectives), 1, i + 1)
        done = [(n, t.values[i]) for n, t in zip(numbers, record.trials, strict=True) if t.values]
        failed = [n for n, t in zip(numbers, record.trials, strict=True) if not t.values]
        choose = max if objective["higher_is_better"] else min
        best = [choose(value for _, value in done[: k + 1]) for k in range(len(done))]
        axes.plot([n for n, _ in done], [v for _, v in done], "o", label="trial")
        axes.step([n for n, _ in done], best, where="post", label="best so far")
        if failed:
            bottom = axes.get_ylim()[0]
            axes.plot(failed, [bottom] * len(failed), "x", color="tab:red", label="no result")
        axes.set_xlabel("trial")
        axes.set_ylabel(objective["name"])
        axes.legend()
    figure.savefig(path, dpi=120)

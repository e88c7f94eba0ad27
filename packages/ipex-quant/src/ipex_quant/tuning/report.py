# SPDX-License-Identifier: Apache-2.0
"""Results of `autotune`: a file from which it can go on, a table, JSON and a chart of accuracy against speed-up."""

from __future__ import annotations

import dataclasses
import json
import logging
import math
import sys
import zlib
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ipex_core.errors import OpArgumentError
from ipex_core.util import write_whole
from ipex_quant.tuning.space import Trial

_VERSION = 1


@dataclasses.dataclass(frozen=True)
class Result:
    """What came out of one trial.

    Attributes:
        trial: What was tried.
        accuracy: What ``eval_func`` gave, or the mean cosine of the outputs; NaN if it was NaN.
        speedup: How many times faster than the float model.
        met: Whether the accuracy is enough.
    """

    trial: Trial
    accuracy: float
    speedup: float
    met: bool


def fingerprint(model: nn.Module, **settings: Any) -> dict[str, Any]:
    """Return what must not change between two runs: the weights and the settings."""
    total = 0
    for name, tensor in model.state_dict().items():
        total = zlib.crc32(name.encode(), total)
        if isinstance(tensor, torch.Tensor):
            data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
            total = zlib.crc32(data.numpy().data, total)
    return json.loads(json.dumps({"weights": total, **settings}))


class State:
    """Results by trial, the accuracy of the float model, and the error that each layer makes."""

    def __init__(self, path: Path | None, settings: dict[str, Any]) -> None:
        """Read a file if it exists.

        Raises:
            OpArgumentError: The file is damaged or of another model or other settings; the text names the difference.
        """
        self.path, self.settings = path, settings
        self.baseline: float | None = None
        self.noise: dict[str, float] = {}
        self.results: dict[str, tuple[float, float]] = {}
        if path is None or not path.exists():
            return
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
            known, version = dict(data["settings"]), data["version"]
            baseline, noise = data["baseline"], data["noise"]
            results = {
                r["trial"]: (
                    math.nan if r["accuracy"] is None else float(r["accuracy"]),
                    r["speedup"],
                )
                for r in data["results"]
            }
            self.baseline = None if baseline is None else float(baseline)
            self.noise = {str(k): float(v) for k, v in noise.items()}
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise OpArgumentError(
                f"autotune: state_file must be one that autotune wrote, got {path}: {error!r}"
            ) from error
        others = sorted(k for k in {*known, *settings} if known.get(k) != settings.get(k))
        if others or version != _VERSION:
            raise OpArgumentError(
                f"autotune: state_file must be of the same search, got {path} with other"
                f" {', '.join(others) or 'version'}"
            )
        self.results = results

    def save(self) -> None:
        """Replace the file, completely or not at all."""
        if self.path is None:
            return
        results = [
            {"trial": key, "accuracy": None if math.isnan(a) else a, "speedup": s}
            for key, (a, s) in self.results.items()
        ]
        data = {
            "version": _VERSION,
            "settings": self.settings,
            "baseline": self.baseline,
            "noise": self.noise,
            "results": results,
        }
        write_whole(self.path, json.dumps(data, indent=1) + "\n")


# --- what is shown ----------------------------------------------------------------------------------------------------


log = logging.getLogger("ipex")


@dataclasses.dataclass(frozen=True)
class Tuning:
    """The outcome of a search; ``print`` shows it as a table.

    Attributes:
        baseline: Accuracy of the float model.
        least: Accuracy that was wanted.
        best: What was chosen.
        results: All that was tried, in order.
        complete: Whether the search ended before the time did.
    """

    baseline: float
    least: float
    best: Result
    results: tuple[Result, ...]
    complete: bool

    @property
    def met(self) -> bool:
        """Whether the accuracy of the chosen model is enough."""
        return self.best.met

    def __str__(self) -> str:
        """Return the table."""
        rows = [("", "configuration", "accuracy", "enough", "speed-up")]
        rows.append(("", "float", f"{self.baseline:.5g}", "", "1"))
        for it in self.results:
            mark = "*" if it is self.best else ""
            enough = "yes" if it.met else "no"
            rows.append((mark, it.trial.name, f"{it.accuracy:.5g}", enough, f"{it.speedup:.2f}"))
        widths = [max(len(row[i]) for row in rows) for i in range(5)]
        lines = [
            f"{a:<{widths[0]}} {b:<{widths[1]}}  {c:>{widths[2]}}  {d:<{widths[3]}}  {e:>{widths[4]}}"
            for a, b, c, d, e in rows
        ]
        notes = [f"wanted: accuracy of {self.least:.7g} or more"]
        notes += [] if self.met else ["no configuration has it; * is the most accurate"]
        notes += [] if self.complete else ["the time was up before the search ended"]
        return "\n".join([*lines, *notes])

    def write(self, folder: Path) -> None:
        """Write ``tuning.txt``, ``tuning.json`` and, with matplotlib, ``tuning.png``."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "tuning.txt").write_text(f"{self}\n", encoding="utf-8")
        text = json.dumps(self._data(), indent=1)
        (folder / "tuning.json").write_text(f"{text}\n", encoding="utf-8")
        try:
            from matplotlib.figure import Figure
        except ImportError:
            log.warning("autotune: no chart without matplotlib: pip install 'ipex[plot]'")
            return
        figure = Figure(figsize=(7, 4.5), layout="constrained")
        axes = figure.add_subplot()
        axes.axhline(self.least, color="0.6", linestyle="--", linewidth=1)
        for it in self.results:
            color = "tab:green" if it.met else "tab:red"
            axes.plot(it.speedup, it.accuracy, "*" if it is self.best else "o", color=color)
            axes.annotate(it.trial.name, (it.speedup, it.accuracy), fontsize=7)
        axes.plot(1.0, self.baseline, "s", color="black")
        axes.annotate("float", (1.0, self.baseline), fontsize=7)
        axes.set_xlabel("speed-up over the float model")
        axes.set_ylabel("accuracy")
        figure.savefig(folder / "tuning.png", dpi=150)

    def _data(self) -> dict[str, Any]:
        def row(it: Result) -> dict[str, Any]:
            accuracy = None if math.isnan(it.accuracy) else it.accuracy
            values = {"accuracy": accuracy, "speedup": it.speedup, "met": it.met}
            return {"configuration": dataclasses.asdict(it.trial), **values}

        return {
            "baseline": self.baseline,
            "least": self.least,
            "met": self.met,
            "complete": self.complete,
            "best": row(self.best),
            "results": [row(it) for it in self.results],
        }


class Progress:
    """A line on a terminal with what is tried and the share of the time used, log lines elsewhere."""

    def __init__(self, shown: bool, budget: float) -> None:
        """Start nothing yet; ``budget`` in seconds, 0 for no limit."""
        self.budget, self.count = budget, 0
        self._bar: Any = None
        self._task: Any = None
        if shown and sys.stderr.isatty():
            try:
                from rich.console import Console
                from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
                from rich.progress import Progress as Bar
            except ImportError:
                return
            columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
            self._bar = Bar(*columns, console=Console(stderr=True), transient=True)
            self._task = self._bar.add_task("autotune", total=budget or None)
            self._bar.start()

    def trial(self, trial: Trial, seconds: float) -> None:
        """Tell what begins, ``seconds`` after the start."""
        self.count += 1
        text = f"autotune, trial {self.count}: {trial.name}"
        if self._bar is not None:
            self._bar.update(self._task, description=text, completed=min(seconds, self.budget))
        else:
            log.info("%s, after %.0f s", text, seconds)

    def stop(self) -> None:
        """Take the bar away."""
        if self._bar is not None:
            self._bar.stop()

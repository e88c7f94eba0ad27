# SPDX-License-Identifier: Apache-2.0
"""What the training examples share: options, a progress bar, checkpoints that survive a crash, a loss curve."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

DTYPES = {"float32": None, "bfloat16": torch.bfloat16}


def parser(text: str | None) -> argparse.ArgumentParser:
    """Return a parser with the options of all examples."""
    result = argparse.ArgumentParser(
        description=text, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    result.add_argument(
        "--steps", type=positive, default=200, help="steps in all, also of a resumed run"
    )
    result.add_argument("--batch", type=positive, default=64, help="samples in a step")
    result.add_argument("--dtype", choices=list(DTYPES), default="bfloat16", help="of the weights")
    result.add_argument(
        "--out", type=Path, default=Path("out"), help="folder of checkpoint and curve"
    )
    result.add_argument("--save-every", type=positive, default=50, help="steps between checkpoints")
    result.add_argument("--fresh", action="store_true", help="do not resume from the checkpoint")
    result.add_argument("--seed", type=int, default=0)
    return result


def positive(text: str) -> int:
    """Return a number of at least 1."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be 1 or more, got {number}")
    return number


def save_atomically(state: Any, path: Path) -> None:
    """Write a file such that, whenever the process ends, the old file or the new one is there, whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(name, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise


class Session:
    """One training run.

    Args:
        options: From `parser`.
        parts: What the checkpoint holds: objects with ``state_dict`` and ``load_state_dict``.
        name: Of the files in the output folder.
        main: Whether this process shows and writes anything; one of several does.
    """

    def __init__(
        self, options: argparse.Namespace, parts: dict[str, Any], name: str, *, main: bool = True
    ) -> None:
        self.options, self.parts, self.main = options, parts, main
        self.checkpoint = options.out / f"{name}.pt"
        self.curve = options.out / f"{name}.png"
        self.console = Console(quiet=not main)
        self.losses: list[float] = []
        if self.checkpoint.exists() and not options.fresh:
            state = torch.load(self.checkpoint, weights_only=True)
            for key, part in parts.items():
                part.load_state_dict(state["parts"][key])
            self.losses = state["losses"]
            torch.set_rng_state(state["random"])  # dropout goes on as it would have
            self.console.print(f"resumed {self.checkpoint} after step {len(self.losses)}")

    def save(self) -> None:
        """Write the checkpoint."""
        state = {key: part.state_dict() for key, part in self.parts.items()}  # in all processes
        if self.main:
            whole = {"parts": state, "losses": self.losses, "random": torch.get_rng_state()}
            save_atomically(whole, self.checkpoint)

    def run(self, step: Callable[[int], float]) -> list[float]:
        """Call ``step(number)`` for what is left of the steps; return the losses of all of them.

        ``step`` takes its data by its number, so a resumed run sees what an uninterrupted one would see.
        """
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("loss {task.fields[loss]:.4f}"),
        )
        steps, first = self.options.steps, len(self.losses)
        with Progress(*columns, console=self.console, disable=not self.main) as progress:
            bar = progress.add_task("training", total=steps, completed=first, loss=float("nan"))
            for number in range(first, steps):
                self.losses.append(step(number))
                progress.update(bar, advance=1, loss=self.losses[-1])
                if (number + 1) % self.options.save_every == 0 or number + 1 == steps:
                    self.save()
        if self.main:
            self.plot()
        return self.losses

    def plot(self) -> None:
        """Draw the losses and their average over twenty steps."""
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot

        figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
        axes.plot(range(1, len(self.losses) + 1), self.losses, alpha=0.4, label="step")
        window = min(20, len(self.losses))
        if window:
            means = torch.tensor(self.losses).unfold(0, window, 1).mean(1).tolist()
            axes.plot(range(window, len(self.losses) + 1), means, label=f"mean of {window}")
        axes.set(xlabel="step", ylabel="loss", title=self.curve.stem)
        axes.legend()
        self.curve.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(self.curve, dpi=120)
        pyplot.close(figure)
        self.console.print(f"wrote {self.checkpoint} and {self.curve}")

    def report(self, **numbers: Any) -> None:
        """Show results as one line of JSON."""
        if self.main:
            rounded = {k: round(v, 5) if isinstance(v, float) else v for k, v in numbers.items()}
            print(json.dumps(rounded), flush=True)

# SPDX-License-Identifier: Apache-2.0
"""The configurations of a search, and its history: ``record.csv``, from which it is resumed, and a picture."""

from __future__ import annotations

import ast
import contextlib
import csv
import dataclasses
import fcntl
import itertools
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ipex_runtime.hypertune._yaml import ConfigurationError
from ipex_runtime.hypertune.conf import DEFAULTS
from ipex_runtime.launch.cpu_info import CPUPoolList
from ipex_runtime.launch.launcher_base import find_library, search_paths

LIBRARIES = {"tc": "tcmalloc", "je": "jemalloc"}


class Space:
    """All combinations of the values of parameters.

    Args:
        values: For each parameter its values.
        out: Gets a line about what is left out.

    Raises:
        ConfigurationError: No combination is possible.
    """

    def __init__(self, values: Mapping[str, Sequence[Any]], out: Callable[[str], None]) -> None:
        self.values = {
            name: self._installed(name, list(items), out) for name, items in values.items()
        }
        self.names = list(self.values)
        self._pool = CPUPoolList().pool_all
        self._size = sum(1 for _ in self) if self.product() <= 1_000_000 else self.product()
        if self._size == 0:
            raise ConfigurationError(
                "hypertune: hyperparams.launcher must leave a combination that this machine has cores for "
                f"({len(self._pool)} CPUs), got {dict(values)}"
            )
        left_out = self.product() - self._size
        if left_out:
            out(
                f"{left_out} of {self.product()} combinations need more cores than there are: left out"
            )

    @staticmethod
    def _installed(name: str, values: list[Any], out: Callable[[str], None]) -> list[Any]:
        folders = search_paths()
        if name == "malloc":
            missing = [
                v for v in values if v in LIBRARIES and not find_library(LIBRARIES[v], folders)
            ]
            if missing and len(missing) < len(values):
                out(
                    f"malloc: {', '.join(missing)} left out, not installed (ipexrun --explain tells how)"
                )
                return [v for v in values if v not in missing]
            if missing:
                raise ConfigurationError(
                    f"hypertune: hyperparams.launcher.malloc must have an installed allocator or pt, got {values}"
                )
        if name == "disable_iomp" and len(values) == 2 and not find_library("iomp5", folders):
            out("disable_iomp: False left out, Intel's OpenMP runtime is not installed")
            return [True]
        return values

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for combination in itertools.product(*self.values.values()):
            cfg = dict(zip(self.names, combination, strict=True))
            if self.possible(cfg):
                yield cfg

    def product(self) -> int:
        """Return the number of combinations, possible or not."""
        return math.prod(len(values) for values in self.values.values())

    def size(self) -> int:
        """Return the number of possible combinations."""
        return self._size

    def possible(self, cfg: Mapping[str, Any]) -> bool:
        """Return whether there are enough cores for a combination."""
        full = DEFAULTS | dict(cfg)
        first = min(c.node for c in self._pool)
        pool = [c for c in self._pool if full["use_all_nodes"] or c.node == first]
        cores = len(pool) if full["use_logical_cores"] else len({c.core for c in pool})
        return max(1, full["ncores_per_instance"]) * max(1, full["ninstances"]) <= cores


# --- history ----------------------------------------------------------------------------------------------------------


#: Columns after the parameters and the objectives.
STATUS, SECONDS = "status", "seconds"


@dataclasses.dataclass
class Trial:
    """One run.

    Attributes:
        configuration: Value of each parameter that is tuned.
        values: The objectives; empty if it has none.
        status: ``"done"``, or why there are no values.
        seconds: How long it took.
    """

    configuration: dict[str, Any]
    values: list[float]
    status: str
    seconds: float


class Record:
    """The trials of a search, in a file.

    Args:
        folder: Where ``record.csv`` is.
        parameters: Names of the parameters.
        resume: Take over the trials of an earlier search; otherwise its file becomes ``record.csv.bak``.

    Raises:
        ConfigurationError: The folder cannot be written, or the file to resume is of another search.
    """

    def __init__(
        self, folder: str | os.PathLike[str], parameters: Sequence[str], resume: bool
    ) -> None:
        self.path = Path(folder) / "record.csv"
        self.parameters = list(parameters)
        self.objectives: list[str] = []
        self.trials: list[Trial] = []
        if self.path.exists():
            if resume:
                self._read()
            else:
                os.replace(self.path, self.path.with_suffix(".csv.bak"))

    def add(self, trial: Trial, objectives: Sequence[str]) -> None:
        """Append a trial and write the file, whole and at once: a reader sees a complete file."""
        if trial.values:
            self.objectives = list(objectives)
        self.trials.append(trial)
        temporary = self.path.with_suffix(f".csv.{os.getpid()}")
        with temporary.open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            writer.writerow([*self.parameters, *self.objectives, STATUS, SECONDS])
            for t in self.trials:
                values: list[Any] = [*t.values] or [""] * len(self.objectives)
                configuration = [t.configuration[name] for name in self.parameters]
                writer.writerow([*configuration, *values, t.status, f"{t.seconds:.3f}"])
        os.replace(temporary, self.path)

    def find(self, configuration: dict[str, Any]) -> Trial | None:
        """Return the trial of a configuration, if there was one."""
        return next((t for t in self.trials if t.configuration == configuration), None)

    def _read(self) -> None:
        with self.path.open(newline="", encoding="utf-8") as file:
            rows = list(csv.reader(file))
        head = rows[0] if rows else []
        count = len(self.parameters)
        if head[:count] != self.parameters or head[-2:] != [STATUS, SECONDS]:
            raise ConfigurationError(
                f"hypertune: --resume needs a record.csv of the same parameters {self.parameters}, got {self.path} "
                f"with {head}"
            )
        self.objectives = head[count:-2]
        for number, row in enumerate(rows[1:], 2):
            try:
                configuration = dict(zip(self.parameters, map(_value, row), strict=False))
                values = [float(text) for text in row[count:-2] if text != ""]
                trial = Trial(configuration, values, row[-2], float(row[-1]))
            except (ValueError, IndexError) as error:
                raise ConfigurationError(
                    f"hypertune: {self.path}, line {number}: must be a trial, got {error}"
                ) from error
            if len(row) != len(head) or len(values) not in (0, len(self.objectives)):
                raise ConfigurationError(
                    f"hypertune: {self.path}, line {number}: must be a trial of {len(head)} values, got {row}"
                )
            self.trials.append(trial)


def _value(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


@contextlib.contextmanager
def locked(folder: str | os.PathLike[str]) -> Iterator[None]:
    """Keep other searches out of a folder.

    Raises:
        ConfigurationError: Another search runs there, or the folder cannot be written.
    """
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        file = (Path(folder) / ".hypertune.lock").open("w")
    except OSError as error:
        raise ConfigurationError(
            f"hypertune: output_dir must be a folder that can be written, got {os.fspath(folder)!r}: {error.strerror}"
        ) from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise ConfigurationError(
                f"hypertune: output_dir must not be in use by another search, got {os.fspath(folder)!r}"
            ) from error
        yield


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

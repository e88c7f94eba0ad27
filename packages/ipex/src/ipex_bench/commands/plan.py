# SPDX-License-Identifier: Apache-2.0
"""The options of ``ipex bench models|llm|train``, checked: what to measure, and the files around it."""

from __future__ import annotations

import dataclasses
import importlib.util
import math
import os
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import typer
from rich.console import Console

from ipex_bench import peers, report
from ipex_bench.result import Run
from ipex_bench.run import Plan
from ipex_bench.shapes import SIZES
from ipex_bench.shapes import names as workloads
from ipex_core.util import write_whole
from ipex_core.util.console import figure_class, writable, written

__all__ = ["Files", "arguments_of", "choice", "deadline", "make_plan", "native"]

_DTYPES = {
    "fp32": "float32",
    "float32": "float32",
    "bf16": "bfloat16",
    "bfloat16": "bfloat16",
    "int8": "int8",
    "int4": "int4",
}
_ALLOWED = {
    "ops": ("float32", "bfloat16", "int8"),
    "models": ("float32", "bfloat16", "int8"),
    "llm": ("float32", "bfloat16", "int8", "int4"),
    "train": ("float32", "bfloat16"),
}


def make_plan(
    kind: str,
    *,
    names: Sequence[str] | None,
    engines: str,
    dtype: str,
    threads: int,
    env: Sequence[str] | None,
    minutes: float | None,
    **numbers: Any,
) -> Plan:
    """Return what to measure.

    Args:
        kind: The kind of workloads.
        names: Workloads; none for all of the kind.
        engines: Names, separated by commas, or ``"all"``.
        dtype: ``"auto"`` or a precision that the kind knows.
        threads: 0 for torch's number.
        env: ``ENGINE=PYTHON`` each.
        minutes: Time of all cases, from now on; None: as long as it takes.
        numbers: The other fields of `Plan`.

    Raises:
        typer.BadParameter: An option has a value that there is not, or a package is missing.
    """
    choice("--size", numbers["size"], SIZES)
    for name in names or ():
        choice("NAMES", name, workloads(kind))
    chosen, pythons = _engines(engines), _pythons(env or ())
    _needs(kind)
    import torch

    return Plan(
        kind=kind,
        names=tuple(names or workloads(kind)),
        engines=chosen,
        dtype=_precision(kind, dtype),
        rest=native(),
        threads=threads or torch.get_num_threads(),
        pythons=pythons,
        until=deadline(minutes),
        **numbers,
    )


def deadline(minutes: float | None) -> float:
    """Return the time of `time.monotonic` at which so many minutes are over."""
    return math.inf if minutes is None else time.monotonic() + 60 * minutes


def choice(option: str, value: str, allowed: tuple[str, ...]) -> None:
    """Refuse a value that an option does not have."""
    if value not in allowed:
        raise typer.BadParameter(
            f"must be one of {', '.join(allowed)}, got {value!r}", param_hint=option
        )


def _engines(text: str) -> tuple[str, ...]:
    wanted = [part.strip().replace("-", "_") for part in text.split(",") if part.strip()]
    for name in wanted:
        choice("--engines", name, ("all", *peers.NAMES))
    if not wanted or "all" in wanted:
        return peers.NAMES
    return tuple(name for name in peers.NAMES if name in wanted or name == peers.BASELINE)


def _pythons(pairs: Sequence[str]) -> dict[str, str]:
    found = {}
    for pair in pairs:
        engine, _, python = pair.partition("=")
        engine = engine.strip().replace("-", "_")
        choice("--env", engine, peers.NAMES)
        path = shutil.which(os.path.expanduser(python)) if python else None
        if path is None:
            raise typer.BadParameter(
                f"must be ENGINE=PYTHON with a program that exists, got {pair!r}",
                param_hint="--env",
            )
        found[engine] = path
    return found


def _needs(kind: str) -> None:
    wanted = ["numpy"] if kind == "ops" else ["numpy", "transformers"]
    missing = [name for name in wanted if importlib.util.find_spec(name) is None]
    if missing:
        raise typer.BadParameter(
            f"needs {' and '.join(missing)}: pip install {' '.join(missing)}", param_hint=kind
        )


def _precision(kind: str, text: str) -> str:
    if text == "auto":
        return native()
    choice("--dtype", text, (*_DTYPES, "auto"))
    choice("--dtype", _DTYPES[text], _ALLOWED[kind])
    return _DTYPES[text]


def native() -> str:
    """Return bfloat16 where the processor multiplies in it, else float32."""
    import torch

    from ipex_core.amp import native_reason

    return "float32" if native_reason(torch.bfloat16) else "bfloat16"


@dataclasses.dataclass(frozen=True, slots=True)
class Files:
    """The files of a run, each optional; `check` before the work, `write` after it.

    Attributes:
        json: For the results.
        markdown: For the tables.
        plot: For the chart.
        add: Results of an earlier part, which are shown and written with the new ones.
        compare: Results of an earlier run to compare with.
    """

    json: Path | None = None
    markdown: Path | None = None
    plot: Path | None = None
    add: Path | None = None
    compare: Path | None = None

    def check(self) -> None:
        """Find out, before minutes of work, what cannot be written.

        Raises:
            typer.BadParameter: A file, or matplotlib is missing.
        """
        for option, path in (
            ("--json", self.json),
            ("--markdown", self.markdown),
            ("--plot", self.plot),
        ):
            if path is not None:
                writable(path, option)
        if self.plot is not None:
            figure_class(self.plot)

    def read(self, option: str, kind: str) -> Run | None:
        """Return the results of ``--add`` or ``--compare``, if there are any.

        Raises:
            typer.BadParameter: They are of no run, or of another kind.
        """
        path: Path | None = getattr(self, option)
        if path is None:
            return None
        try:
            found = Run.read(path)
        except ValueError as error:
            raise typer.BadParameter(str(error), param_hint=f"--{option}") from None
        if found.kind != kind:
            raise typer.BadParameter(
                f"{path} must have results of 'ipex bench {kind}', got results of 'ipex bench {found.kind}'",
                param_hint=f"--{option}",
            )
        return found

    def keep(self, result: Run, console: Console) -> None:
        """Write the results so far, if they are wanted; that they cannot be written does not end the work."""
        written(self.json, lambda path: write_whole(path, result.to_json()), console, say=False)

    def write(self, result: Run, console: Console) -> bool:
        """Write what is wanted, and say so; return whether all of it could be written."""
        plot = self.plot if result.rows else None
        done = (
            written(self.json, lambda path: write_whole(path, result.to_json()), console),
            written(
                self.markdown, lambda path: write_whole(path, report.markdown(result)), console
            ),
            written(plot, lambda path: report.write_plot(path, result, figure_class()), console),
        )
        return all(done)


#: Options whose files do not decide the numbers.
_FILES = ("--json", "--markdown", "--plot", "--add", "--compare")


def arguments_of(kind: str) -> list[str]:
    """Return the arguments of this process that decide the numbers, without files and paths of this machine."""
    arguments = sys.argv[1:]
    start = arguments.index("bench") + 1 if "bench" in arguments else len(arguments)
    if arguments[start : start + 1] == [kind]:  # `ops` may be left out
        start += 1
    found: list[str] = []
    rest = iter(arguments[start:])
    for one in rest:
        name, equals, value = one.partition("=")
        if name == "--env":
            engine = (value if equals else next(rest, "")).partition("=")[0]
            found += [f"--env={engine}=PYTHON"] if equals else ["--env", f"{engine}=PYTHON"]
        elif name not in _FILES:
            found.append(one)
        elif not equals:
            next(rest, "")
    return found

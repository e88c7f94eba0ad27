# SPDX-License-Identifier: Apache-2.0
"""``ipex bench corpus``: whether what a user gets is slower anywhere than stock PyTorch or oneDNN."""

from __future__ import annotations

import math
import random
import shlex
import statistics
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from ipex_bench.commands.peers import arguments_of
from ipex_core.util import write_whole
from ipex_core.util.console import make_console, warn_if_busy, writable, written

if TYPE_CHECKING:
    from ipex_bench.corpus import Case, Measured


_DTYPES = {"bf16": "bfloat16", "fp32": "float32", "bfloat16": "bfloat16", "float32": "float32"}


def bench_corpus(
    ops: Annotated[
        list[str] | None, typer.Argument(help="Ops to measure; none for all.", show_default=False)
    ] = None,
    case: Annotated[str, typer.Option(help="Only cases whose sizes or origin contain this.")] = "",
    dtype: Annotated[str, typer.Option(help="Only these, separated by commas: bf16, fp32.")] = "",
    threads: Annotated[
        str,
        typer.Option(help="Only cases of these, separated by commas: 1, all (torch's number)."),
    ] = "1,all",
    seconds: Annotated[float, typer.Option(min=0.001, help="Time per case.")] = 0.15,
    minutes: Annotated[
        float | None,
        typer.Option(min=0.01, help="Time of all; which cases it reaches is drawn evenly."),
    ] = None,
    kernels: Annotated[
        bool,
        typer.Option("--kernels", help="Also time our kernels where another side is chosen."),
    ] = False,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write the results here.")
    ] = None,
) -> None:
    """Measure cases of real models against the stock op and oneDNN on prepacked weights, in turns.

    "Ours" is what a user gets: a layer after ipex.optimize, or a function of ipex, with the choices in force. A case
    that is below 0.97 beyond its spread is measured again, longer; if it stays there, the run fails.

    Exit codes: 0; 1 if a case is slower or fails, or a file cannot be written; 2 for bad arguments.
    """
    import torch

    from ipex_bench import corpus
    from ipex_core.benchmark import busy, machine

    if json_file is not None:
        writable(json_file, "--json")
    counts = _listed("--threads", threads, {"1": "1", "all": "all"}) or ["1", "all"]
    try:
        todo = corpus.cases(
            ops or (),
            containing=case,
            dtypes=_listed("--dtype", dtype, _DTYPES),
            threads=counts,
        )
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="OPS") from None
    if not todo:
        raise typer.BadParameter(
            f"no case fits the options, got --case {case!r} and --dtype {dtype!r}: leave one out"
        )
    console, before, others = make_console(), torch.get_num_threads(), busy()
    facts = machine()
    # Drawn, so that a run that ends early has seen some of each op; sorted again in the end.
    places = {one: place for place, one in enumerate(todo)}
    random.Random(0).shuffle(todo)
    found: dict[Case, Measured] = {}
    failed: list[str] = []
    begin = time.monotonic()
    try:
        for part, count in enumerate(counts, 1):
            torch.set_num_threads(1 if count == "1" else before)
            until = math.inf if minutes is None else begin + 60 * minutes * part / len(counts)
            for one in todo:
                if one.threads == count and time.monotonic() < until:
                    _measure(one, seconds, kernels, console, found, failed)
    finally:
        torch.set_num_threads(before)
    results = [found[one] for one in sorted(found, key=places.__getitem__)]
    left = len(todo) - len(results) - len(failed)
    if results:
        console.print(_table(results))
    if left:
        console.print(f"[yellow]not measured:[/] {left} cases: the time was up")
    warn_if_busy(console, others)
    for line in failed:
        console.print(f"[red]failed:[/] {line}", highlight=False, soft_wrap=True)
    slower = [result for result in results if result.slower]
    for result in slower:
        console.print(f"[red]slower:[/] {_words(result)}", highlight=False, soft_wrap=True)
    command = shlex.join(["ipex", "bench", "corpus", *arguments_of("corpus")])
    complete = written(
        json_file,
        lambda path: write_whole(path, corpus.text(results, facts, command)),
        console,
    )
    if slower or failed or not results or not complete:
        raise typer.Exit(1)


def _listed(option: str, text: str, known: dict[str, str]) -> list[str]:
    names = [part.strip() for part in text.split(",") if part.strip()]
    for name in names:
        if name not in known:
            raise typer.BadParameter(
                f"must be of {', '.join(known)}, got {name!r}", param_hint=option
            )
    return [known[name] for name in names]


def _measure(
    case: Case,
    seconds: float,
    kernels: bool,
    console: Console,
    found: dict[Case, Measured],
    failed: list[str],
) -> None:
    """Measure a case, and once more where it seems to be slower."""
    from ipex_bench import corpus

    try:
        result = corpus.measure(case, seconds=seconds, kernels=kernels)
        if result.slower:  # a busy moment must not fail a run
            again = corpus.measure(case, seconds=3 * seconds, kernels=kernels)
            result = max(result, again, key=lambda one: one.worst)
    except Exception as error:  # a case that does not fit the memory, say
        line = (str(error).strip().splitlines() or [""])[0]
        name = f"{case.op} {case.sizes} {case.dtype}"
        failed.append(f"{name}: {type(error).__name__}: {line[:300]}")
        return
    found[case] = result


def _words(result: Measured) -> str:
    text = f"{result.op} {result.sizes} {result.dtype}, {result.threads} thread(s):"
    for name, pair in (("stock", result.ratio), ("oneDNN", result.onednn)):
        if pair is not None:
            text += f" {pair[0]:.2f} ({pair[1]:.2f}-{pair[2]:.2f}) of {name}"
    return text


def _table(results: list[Measured]) -> Table:
    table = Table(title="times as fast as stock PyTorch, by op", box=SIMPLE_HEAD)
    for name in ("op", "dtype", "threads", "cases", "median", "least", "slower"):
        table.add_column(name, justify="left" if name in ("op", "dtype") else "right")
    groups: dict[tuple[str, str, int], list[Measured]] = {}
    for result in results:
        groups.setdefault((result.op, result.dtype, result.threads), []).append(result)
    for (op, dtype, threads), group in groups.items():
        ratios = [result.ratio[0] for result in group]
        count = sum(result.slower for result in group)
        table.add_row(
            *(op, dtype, str(threads), str(len(group))),
            *(f"{statistics.median(ratios):.2f}", f"{min(ratios):.2f}", str(count)),
        )
    return table

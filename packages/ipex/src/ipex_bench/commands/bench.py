# SPDX-License-Identifier: Apache-2.0
"""Measure against stock PyTorch, other engines, and what the machine can do.

Without a command: ops.
"""

from __future__ import annotations

import json
import math
import os
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
import typer.core
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from ipex_bench.commands import peers as bench_peers
from ipex_bench.commands.corpus import bench_corpus
from ipex_bench.commands.peers import Files, arguments_of, choice, deadline, native
from ipex_bench.report import SHORT, read_results, results_json, results_table, write_results_plot
from ipex_bench.shapes import SIZES
from ipex_core.util import write_whole
from ipex_core.util.console import make_console, warn_if_busy, written

if TYPE_CHECKING:
    from ipex_core.benchmark import Result


class _Kinds(typer.core.TyperGroup):
    """`ops` is the default: `ipex bench` and `ipex bench rms_norm` are `ipex bench ops ...`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if not args or (args[0] not in self.commands and args[0] != "--help"):
            args = ["ops", *args]
        return super().parse_args(ctx, args)


app = typer.Typer(cls=_Kinds, add_completion=False, help=__doc__)

#: A ratio that is lower than the one of the earlier run by more than this share counts as a regression.
TOLERANCE = 0.15

_LONG = {short: long for long, short in SHORT.items()}


@app.command("ops")
def bench(
    ctx: typer.Context,
    ops: Annotated[
        list[str] | None,
        typer.Argument(help="Ops to measure; 'ops' or none for all.", show_default=False),
    ] = None,
    dtype: Annotated[
        str,
        typer.Option(
            help="Element types, separated by commas: float32, bfloat16, float16. auto: float32, and bfloat16 where the"
            " processor multiplies in it."
        ),
    ] = "auto",
    case: Annotated[str, typer.Option(help="Only shapes whose name contains this.")] = "",
    threads: Annotated[
        str, typer.Option(help="Numbers of threads, separated by commas (default: torch's).")
    ] = "",
    levels: Annotated[
        str,
        typer.Option(
            help="ISA levels to force, separated by commas, or 'all' (default: the best)."
        ),
    ] = "",
    seconds: Annotated[
        float | None,
        typer.Option(
            min=0.001,
            help="Time per measurement; default 0.4, 4 with --peers, 0.05 with --size tiny.",
            show_default=False,
        ),
    ] = None,
    minutes: Annotated[
        float | None,
        typer.Option(
            min=0.01, help="Time of all; shapes that it does not reach are counted at the end."
        ),
    ] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write the results here.")
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(help="Write a chart here (needs matplotlib).")
    ] = None,
    compare: Annotated[
        Path | None,
        typer.Option(
            exists=True, dir_okay=False, help="Earlier --json file; exit 1 if a ratio fell."
        ),
    ] = None,
    peers: Annotated[
        bool,
        typer.Option(
            help="Instead: a few modules (linear, mlp, ...) on every engine, as 'ipex bench models'."
        ),
    ] = False,
    engines: Annotated[str, typer.Option(help="With --peers: as of 'ipex bench models'.")] = "all",
    size: Annotated[
        str,
        typer.Option(
            help="tiny, small or full; without --peers, tiny is the smallest shape of each op, others are all."
        ),
    ] = "small",
    env: Annotated[
        list[str] | None, typer.Option(help="With --peers: as of 'ipex bench models'.")
    ] = None,
    markdown: Annotated[
        Path | None, typer.Option(help="With --peers: write the tables as Markdown here.")
    ] = None,
    add: Annotated[
        Path | None,
        typer.Option(exists=True, dir_okay=False, help="With --peers: as of 'ipex bench models'."),
    ] = None,
    turn: Annotated[float, typer.Option(min=0, help="With --peers: time of a turn.")] = 0.04,
    rounds: Annotated[int, typer.Option(min=2, help="With --peers: least number.")] = 7,
    timeout: Annotated[float, typer.Option(min=1, help="With --peers: seconds to prepare.")] = 300,
    turn_timeout: Annotated[
        float, typer.Option(min=1, help="With --peers: seconds that a turn may take.")
    ] = 60,
) -> None:
    """Measure ops against the stock op of torch, in pairs, at the shapes of their specs.

    The ratio is the median over rounds in which both ran once; above 1 ipex is faster. "limit" is the share of what the
    machine did in the same rounds: copying or reading that many bytes, or multiplying matrices in that dtype.

    Exit codes: 0; 1 if an op fails, --compare finds a ratio more than 15 % lower or a file cannot be written; 2 for bad
    arguments.
    """
    names = [name for name in ops or () if name != "ops"]
    _only_with(ctx, peers)
    files = Files(json_file, markdown, plot, add, compare)
    if peers:
        counts = _parse_threads(threads)
        if len(counts) > 1:
            raise typer.BadParameter(
                f"must be one number with --peers, got {threads!r}", param_hint="--threads"
            )
        bench_peers.bench_kind(
            "ops",
            files,
            names=names or None,
            engines=engines,
            dtype=dtype,
            size=size,
            threads=counts[0],
            seconds=4 if seconds is None else seconds,
            turn=turn,
            rounds=rounds,
            timeout=timeout,
            turn_timeout=turn_timeout,
            minutes=minutes,
            env=env,
        )
        return
    choice("--size", size, SIZES)
    if seconds is None:
        seconds = 0.05 if size == "tiny" else 0.4
    request: dict[str, Any] = {
        "ops": names,
        "dtypes": _parse_dtypes(dtype),
        "case": case,
        "smallest": size == "tiny",
        "seconds": seconds,
        "until": deadline(minutes),
    }
    _check_ops(names)
    _bench_ops(request, _parse_threads(threads), _parse_levels(levels), files)


def _bench_ops(
    request: dict[str, Any], thread_counts: list[int], levels: list[str], files: Files
) -> None:
    """Measure, show, write and compare."""
    from ipex_core.benchmark import busy

    console = make_console()
    earlier = read_results(files.compare) if files.compare is not None else []
    files.check()
    others = busy()
    failed: list[str] = []
    results = [
        result
        for level in levels
        for count in thread_counts
        for result in _run({**request, "threads": count}, level, console, failed)
    ]
    for line in failed:
        console.print(f"[red]failed:[/] {line}", highlight=False, soft_wrap=True)
    if not results and failed:
        raise typer.Exit(1)
    if not results:
        raise typer.BadParameter(
            f"nothing to measure: no shape of {', '.join(request['ops']) or 'the ops'} fits the options,"
            f" got --case {request['case']} and dtypes {request['dtypes']}: leave one of them out"
        )
    console.print(results_table(results, console.width))
    warn_if_busy(console, others)
    for row in (r for r in results if r.slower):
        console.print(
            f"[yellow]slower than stock:[/] {row.op} {row.case} {row.dtype} {row.ratio:.2f}x"
        )

    regressed = find_regressions(earlier, results)
    if regressed:
        # Measure what looks worse a second time, longer: a busy moment must not fail a build.
        results = [_confirm(r, request, console) if r.key in regressed else r for r in results]
        regressed = find_regressions(earlier, results)
    command = shlex.join(["ipex", "bench", "ops", *arguments_of("ops")])
    complete = (
        written(
            files.json, lambda path: write_whole(path, results_json(results, command)), console
        ),
        written(files.plot, lambda path: write_results_plot(path, results), console),
    )
    for key, (before, now) in regressed.items():
        console.print(f"[red]regression:[/] {' '.join(map(str, key))}: {before:.2f}x -> {now:.2f}x")
    if files.compare is not None and not regressed:
        if {r.key for r in earlier} & {r.key for r in results}:
            console.print(f"no ratio is more than {TOLERANCE:.0%} below {files.compare}")
        else:
            console.print(
                f"[yellow]nothing compared:[/] {files.compare} has no such shape, dtype, level and threads"
            )
    if regressed or failed or not all(complete):
        raise typer.Exit(1)


# -- options ----------------------------------------------------------------------------------------------------------

_PEERS_ALONE = ("engines", "env", "markdown", "add", "turn", "rounds", "timeout", "turn_timeout")
_OPS_ALONE = ("case", "levels")


def _only_with(ctx: typer.Context, peers: bool) -> None:
    """Refuse options that would have no effect."""
    for name in _OPS_ALONE if peers else _PEERS_ALONE:
        source = ctx.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            raise typer.BadParameter(
                f"has no effect with{'' if peers else 'out'} --peers",
                param_hint="--" + name.replace("_", "-"),
            )


def _parse_dtypes(text: str) -> list[str]:
    if text == "auto":
        return list(dict.fromkeys([native(), "float32"]))
    names = [_LONG.get(part.strip(), part.strip()) for part in text.split(",") if part.strip()]
    for name in names:
        choice("--dtype", name, (*SHORT, "auto"))
    return names


def _parse_threads(text: str) -> list[int]:
    try:
        counts = [int(part) for part in text.split(",") if part.strip()]
    except ValueError:
        counts = [0]
    if any(count < 1 for count in counts):
        raise typer.BadParameter(f"must be positive numbers, got {text!r}", param_hint="--threads")
    return counts or [0]  # 0: as torch has it


def _parse_levels(text: str) -> list[str]:
    if not text:
        return [""]
    from ipex_core.kernels.providers import provider_for

    provider = provider_for("cpu")
    available = list(provider.isa_available) if provider is not None else []
    if provider is not None:
        available = [level for level in available if level in provider.isa_built]
    if text == "all":
        return available or [""]
    wanted = [part.strip() for part in text.split(",") if part.strip()]
    for level in wanted:
        if level not in available:
            raise typer.BadParameter(
                f"{level!r} is not among the levels this machine can run: {', '.join(available) or 'none'}",
                param_hint="--levels",
            )
    return wanted


def _check_ops(names: list[str]) -> None:
    from ipex_core.benchmark import select
    from ipex_core.errors import UnknownOpError

    try:
        select(names)
    except UnknownOpError as error:
        kinds = ", ".join(["ops", *bench_peers.COMMANDS])
        raise typer.BadParameter(
            f"must be a kind of benchmark ({kinds}) or an op, got {error}", param_hint="OPS"
        ) from None


# -- running ----------------------------------------------------------------------------------------------------------


def _run(request: dict[str, Any], level: str, console: Console, failed: list[str]) -> list[Result]:
    """Measure and return the results; what fails is added to the last argument and does not end the others."""
    if not level:
        return _measure(request, console, failed)
    # The level is chosen once, when the kernels are loaded: another one needs another process.
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder) / "results.json"
        code = "import sys; from ipex_bench.commands.bench import child; child(*sys.argv[1:])"
        console.print(f"level {level}")
        subprocess.run(
            [sys.executable, "-c", code, json.dumps(request), str(answer)],
            env={**os.environ, "IPEX_CPU_ISA": level},
            check=True,
        )
        failed += json.loads(answer.read_text(encoding="utf-8"))["failed"]
        return read_results(answer)


def child(request: str, answer: str) -> None:
    """Measure in this process and write the results to a file; what `_run` starts for a forced level."""
    failed: list[str] = []
    results = _measure(json.loads(request), make_console(), failed)
    data = {**json.loads(results_json(results, "")), "failed": failed}
    Path(answer).write_text(json.dumps(data), encoding="utf-8")


def _measure(request: dict[str, Any], console: Console, failed: list[str]) -> list[Result]:
    import torch

    from ipex_core.benchmark import chosen, measure

    before = torch.get_num_threads()
    if request["threads"]:
        torch.set_num_threads(request["threads"])
    todo = list(
        chosen(
            request["ops"],
            dtypes=[getattr(torch, name) for name in request["dtypes"]],
            cases=request["case"],
            smallest=request["smallest"],
        )
    )
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    try:
        with Progress(*columns, console=console, transient=True) as progress:
            task = progress.add_task("", total=len(todo))
            results = []
            for index, (spec, case, dtype) in enumerate(todo):
                if index and time.monotonic() >= request["until"]:
                    left = len(todo) - index
                    console.print(f"[yellow]not measured:[/] {left} shapes: the time was up")
                    break
                what = f"{spec.name} {case.id} {dtype}"
                progress.update(task, description=f"{spec.name} {case.id}")
                if not console.is_terminal:
                    console.print(f"{what} ...", highlight=False)
                try:
                    results.append(measure(spec, case, dtype, seconds=request["seconds"]))
                except Exception as error:  # a shape that does not fit the memory, say
                    text = (str(error).strip().splitlines() or [""])[0]
                    failed.append(f"{what}: {type(error).__name__}: {text[:300]}")
                progress.advance(task)
    finally:
        torch.set_num_threads(before)
    return results


def _confirm(result: Result, request: dict[str, Any], console: Console) -> Result:
    again = {
        **request,
        "ops": [result.op],
        "dtypes": [result.dtype],
        "case": result.case,
        "smallest": False,
        "threads": result.threads,
        "seconds": 3 * request["seconds"],
        "until": math.inf,
    }
    from ipex_core.benchmark import active_level

    level = "" if result.level == active_level() else result.level
    found = [r for r in _run(again, level, console, []) if r.key == result.key]
    return max([result, *found], key=lambda r: r.ratio)


def find_regressions(
    earlier: Iterable[Result], now: Iterable[Result]
) -> dict[tuple[Any, ...], tuple[float, float]]:
    """Return key -> (earlier ratio, ratio now) for what became slower against stock by more than the tolerance."""
    before = {r.key: r.ratio for r in earlier}
    return {
        r.key: (before[r.key], r.ratio)
        for r in now
        if r.key in before and r.ratio < before[r.key] * (1 - TOLERANCE)
    }


for _kind, _command in bench_peers.COMMANDS.items():
    app.command(_kind)(_command)
app.command("corpus")(bench_corpus)


if __name__ == "__main__":
    app()

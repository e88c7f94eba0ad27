# SPDX-License-Identifier: Apache-2.0
"""A run, or the results of ``ipex bench ops``, as a table of the terminal, as Markdown or JSON and as a chart."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ipex_core.util.console import PLAIN_WIDTH, figure_class

from . import peers
from .result import Row, Run

if TYPE_CHECKING:
    from ipex_core.benchmark import Result


#: How tables call element types.
SHORT = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}


def title(run: Run) -> str:
    """Return the head of the table."""
    threads = run.rows[0].threads if run.rows else run.machine.get("threads", "?")
    return f"ipex bench {run.kind}, {SHORT.get(run.dtype, run.dtype)}, {threads} thread(s)"


def matrix(run: Run) -> tuple[list[str], list[str], dict[tuple[str, str], Row]]:
    """Return the cases, the engines that have a number at any, and the rows by both."""
    cases = list(dict.fromkeys(row.case for row in run.rows))
    have = {row.engine for row in run.rows}
    engines = [name for name in peers.NAMES if name in have]
    return cases, engines, {(row.case, row.engine): row for row in run.rows}


def show(run: Run, console: Console) -> None:
    """Print the table: a column for each engine, or, where the terminal is too narrow, a line."""
    cases, engines, cells = matrix(run)
    if cases:
        table = _by_case(run, cases, engines, cells)
        unlimited = console.options.update_width(10_000)
        wide = console.measure(table, options=unlimited).maximum <= console.width
        console.print(table if wide else _by_engine(run, console.width))
    for line in absences(run):
        console.print(f"[dim]{escape(line)}[/]", highlight=False)


def _by_case(
    run: Run, cases: list[str], engines: list[str], cells: dict[tuple[str, str], Row]
) -> Table:
    table = Table(title=title(run), box=SIMPLE_HEAD, caption=_CAPTION)
    table.add_column("case", no_wrap=True)
    for engine in engines:
        table.add_column(peers.load(engine).title, justify="right", no_wrap=True)
    for case in cases:
        found = [cells.get((case, engine)) for engine in engines]
        table.add_row(case, *("-" if row is None else _cell(row) for row in found))
        table.add_section()
    return table


def _cell(row: Row) -> str:
    first = f"{milliseconds(row.ms)} ms {SHORT.get(row.precision, row.precision)}"
    last = f"{row.share}, {row.peak_mb:.0f} MB"
    if row.engine == peers.BASELINE:
        return f"{first}\n1\n\n{last}"
    color = "green" if row.low > 1 else "yellow" if row.high < 1 else "default"
    return f"{first}\n[{color}]{row.ratio:.2f}x[/]\n{row.low:.2f}-{row.high:.2f}\n{last}"


_CAPTION = (
    "times as fast as stock eager and 95 % confidence interval; share of the limit of memory or arithmetic;"
    " peak memory"
)


def _by_engine(run: Run, width: int) -> Table:
    table = Table(title=title(run), box=SIMPLE_HEAD, caption=_CAPTION)
    table.add_column("case, engine", overflow="fold")
    # Where there is no room for all columns, those that matter least are left out.
    shown = [name for name, least in _COLUMNS.items() if width >= least]
    for name in shown:
        table.add_column(name, justify="right", no_wrap=True)
    last = ""
    for row in run.rows:
        if row.case != last:
            table.add_section()
            table.add_row(f"[bold]{escape(row.case)}[/]", *[""] * len(shown))
        last = row.case
        cells = {
            "ms": milliseconds(row.ms),
            "ratio": f"{row.ratio:.2f}x",
            "95 %": f"{row.low:.2f}-{row.high:.2f}",
            "limit": row.share,
            "MB": f"{row.peak_mb:.0f}",
        }
        precision = SHORT.get(row.precision, row.precision)
        engine = peers.load(row.engine).title
        table.add_row(f" {engine} {precision}", *(cells[name] for name in shown))
    return table


#: The columns of the narrow table, and the width of the terminal from which on they are shown.
_COLUMNS = {"ms": 0, "ratio": 0, "95 %": 64, "limit": 76, "MB": 84}


def absences(run: Run) -> list[str]:
    """Return a line about each engine that has no number, with its reason."""
    grouped: dict[tuple[str, str], list[str]] = {}
    for one in run.absent:
        grouped.setdefault((one.engine, one.reason), []).append(one.case)
    return [
        f"{peers.load(engine).title}: {reason}" + (f" [{', '.join(cases)}]" if any(cases) else "")
        for (engine, reason), cases in grouped.items()
    ]


def milliseconds(value: float) -> str:
    """Return a time with three digits or more."""
    return f"{value:.3f}" if value < 10 else f"{value:.1f}" if value < 1000 else f"{value:,.0f}"


# -- Markdown ---------------------------------------------------------------------------------------------------------


def markdown(run: Run) -> str:
    """Return the run as Markdown: the table with a column for each engine, the details, the engines without numbers."""
    cases, engines, cells = matrix(run)
    titles = [peers.load(engine).title for engine in engines]
    facts = run.machine
    where = [str(facts[key]) for key in ("cpu", "system") if facts.get(key)]
    versions = [f"{peers.load(e).title} {v}" for e, v in run.versions.items() if v]
    lines = [f"### {title(run)}", "", ", ".join([*where, *versions]) + ".", ""]
    if run.command:
        lines += ["```bash", run.command, "```", ""]
    if cases:
        lines += _markdown_row(["Case", *titles]), "|---" * (len(titles) + 1) + "|"
    for case in cases:
        found = [cells.get((case, engine)) for engine in engines]
        lines.append(_markdown_row([case, *("-" if r is None else _short(r) for r in found)]))
    lines += ["", _DETAILS, ""] if cases else []
    heads = ["Case", "Engine", "Precision", "ms", "Ratio", "95 %", "Of the limit"]
    heads += ["Peak MB", "Exactness", "Ready after s", "Note"]
    if cases:
        lines += [_markdown_row(heads), "|---" * len(heads) + "|"]
    for row in run.rows:
        lines.append(
            _markdown_row(
                [
                    row.case,
                    peers.load(row.engine).title,
                    row.precision,
                    milliseconds(row.ms),
                    f"{row.ratio:.2f}",
                    f"{row.low:.2f}-{row.high:.2f}",
                    "-" if row.limit == "call" else f"{row.limit_percent:.0f} % ({row.limit})",
                    f"{row.peak_mb:.0f}",
                    f"{row.exactness:.5f}",
                    f"{row.prepare_s:.1f}",
                    row.note,
                ]
            )
        )
    missing = absences(run)
    if missing:
        lines += ["", "Without a number:", "", *(f"- {_plain(line)}" for line in missing)]
    return "\n".join(lines) + "\n"


_DETAILS = (
    "Milliseconds and, in bold, times as fast as stock eager in the same rounds. Below: the 95 % confidence interval"
    " of that ratio, the share of what memory or arithmetic of the machine gave in the same rounds, the peak memory of"
    " the process, the least cosine to the answer of float32 (for training: the largest relative difference of the"
    " losses), and the time until the first answer."
)


def _short(row: Row) -> str:
    text = f"{milliseconds(row.ms)} {SHORT.get(row.precision, row.precision)}"
    return text if row.engine == peers.BASELINE else f"{text} **{row.ratio:.2f}**"


def _markdown_row(cells: list[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _plain(text: str) -> str:
    """Return text of other programs without what Markdown would take for its own."""
    return text.replace("<", "\\<").replace("|", "\\|").replace("`", "'").replace("*", "\\*")


# -- chart ------------------------------------------------------------------------------------------------------------


def write_plot(path: Path, run: Run, figure_class: Any) -> None:
    """Draw the ratios with their intervals: a group of bars for each case.

    Args:
        path: The picture.
        run: What to draw; must have rows.
        figure_class: ``matplotlib.figure.Figure``.
    """
    cases, engines, cells = matrix(run)
    shown = [e for e in engines if e != peers.BASELINE] or engines
    high = 0.8 / len(shown)
    figure = figure_class(
        figsize=(9, 1.6 + 0.26 * len(cases) * (len(shown) + 1)), layout="constrained"
    )
    axes = figure.subplots()
    for number, engine in enumerate(shown):
        rows = [(place, cells.get((case, engine))) for place, case in enumerate(cases)]
        drawn = [(place, row) for place, row in rows if row is not None]
        axes.barh(
            [place + (number - len(shown) / 2 + 0.5) * high for place, _ in drawn],
            [row.ratio - 1 for _, row in drawn],
            high,
            left=1.0,  # as much slower is as far from here as as much faster
            xerr=[
                [max(row.ratio - row.low, 0) for _, row in drawn],
                [max(row.high - row.ratio, 0) for _, row in drawn],
            ],
            label=peers.load(engine).title,
            color=_COLORS[engine],
            error_kw={"elinewidth": 0.8},
        )
    axes.set_yticks(range(len(cases)), cases, fontsize=8)
    axes.invert_yaxis()
    ratio_axis(axes, [end for row in cells.values() for end in (row.low, row.high)])
    axes.set_xlabel("times as fast as stock eager (median of paired rounds; line: 95 % interval)")
    axes.set_title(title(run), fontsize=10)
    axes.legend(fontsize=7, loc="best")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)


def ratio_axis(axes: Any, ends: list[float]) -> None:
    """Draw 1 and make the axis of ratios logarithmic, so that a large one leaves the others readable.

    Args:
        axes: Of matplotlib; its bars begin at 1.
        ends: What has to fit.
    """
    axes.axvline(1.0, color="black", linewidth=0.8)
    axes.set_xscale("log", base=2)
    axes.set_xlim(min(0.5, *ends) / 1.1, max(2.0, *ends) * 1.1)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")


_COLORS = {
    "stock_eager": "#999999",
    "stock_compile": "#666666",
    "torchao": "#c9a227",
    "ipex_eager": "#2a7f9e",
    "ipex_compile": "#124559",
    "ipex28": "#7fb3c8",
    "openvino": "#8e44ad",
    "onnxruntime": "#c0392b",
    "llama_cpp": "#d35400",
    "zentorch": "#27ae60",
}


# -- The results of ``ipex bench ops`` as a table of the terminal, as JSON and as a chart -----------------------------


def results_table(results: list[Result], width: int = PLAIN_WIDTH) -> Table:
    """Return the table that the command prints; on a narrow terminal without the columns that matter least."""
    table = Table(title="ipex against stock torch (ratio above 1: ipex is faster)", box=SIMPLE_HEAD)
    several_levels = len({r.level for r in results}) > 1
    several_threads = len({r.threads for r in results}) > 1
    table.add_column("op", overflow="fold")
    table.add_column("case", overflow="fold")
    table.add_column("dtype", no_wrap=True)
    if several_threads:
        table.add_column("threads", justify="right")
    if several_levels:
        table.add_column("level")
    rates, spread = width >= 125, width >= 100
    for name, shown in (
        ("stock us", True),
        ("ipex us", True),
        ("ratio", True),
        ("p10-p90", spread),
        ("GB/s", rates),
        ("GFLOP/s", rates),
        ("% of limit", True),
    ):
        if shown:
            table.add_column(name, justify="right", no_wrap=True)
    last = ""
    for r in results:
        if last and r.op != last:
            table.add_section()
        last = r.op
        color = "yellow" if r.slower else "green" if r.ratio_low > 1.0 else "default"
        limit = "call" if r.limit_percent is None else f"{r.limit_percent:.0f} {r.limit[:3]}"
        table.add_row(
            r.op,
            r.case,
            SHORT.get(r.dtype, r.dtype),
            *([str(r.threads)] if several_threads else []),
            *([r.level] if several_levels else []),
            f"{r.stock_us:,.1f}",
            f"{r.ipex_us:,.1f}",
            f"[{color}]{r.ratio:.2f}x[/]",
            *([f"{r.ratio_low:.2f}-{r.ratio_high:.2f}"] if spread else []),
            *(
                [f"{r.gb_per_s:.1f}", f"{r.gflop_per_s:.0f}" if r.gflop_per_s else ""]
                if rates
                else []
            ),
            limit,
        )
    first = results[0]
    table.caption = (
        f"{first.threads} thread(s), level {first.level}; mem/com: memory or compute bound"
    )
    return table


def results_json(results: list[Result], command: str) -> str:
    """Return the results, what was called, and what machine they are from."""
    from ipex_core.benchmark import machine

    rows = [dataclasses.asdict(result) for result in results]
    return json.dumps({"machine": machine(), "command": command, "results": rows}, indent=2) + "\n"


def read_results(path: Path) -> list[Result]:
    from ipex_core.benchmark import Result

    try:
        return [Result(**row) for row in json.loads(path.read_text())["results"]]
    except (ValueError, KeyError, TypeError) as error:
        raise typer.BadParameter(
            f"{path} must be a result file of 'ipex bench ops', got {error!r}"
        ) from None


def write_results_plot(path: Path, results: list[Result]) -> None:
    """Draw the ratios as bars with their spread."""
    figure = figure_class()(figsize=(9, 1.2 + 0.22 * len(results)), layout="constrained")
    axes = figure.subplots()
    places = range(len(results))
    low = [max(r.ratio - r.ratio_low, 0) for r in results]
    high = [max(r.ratio_high - r.ratio, 0) for r in results]
    axes.barh(
        list(places),
        [r.ratio - 1 for r in results],
        left=1.0,
        xerr=[low, high],
        color=["#c0392b" if r.slower else "#2a7f9e" for r in results],
        error_kw={"elinewidth": 0.8},
    )
    axes.set_yticks(list(places), [f"{r.op} {r.case} {r.dtype}" for r in results], fontsize=7)
    axes.invert_yaxis()
    ratio_axis(axes, [end for r in results for end in (r.ratio_low, r.ratio_high)])
    axes.set_xlabel("times as fast as stock torch (median; line: p10-p90)")
    axes.set_title(
        f"ipex bench, {results[0].threads} thread(s), level {results[0].level}", fontsize=10
    )
    axes.margins(y=0.01)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)

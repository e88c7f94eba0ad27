# SPDX-License-Identifier: Apache-2.0
"""The results of ``ipex bench ops`` as a table of the terminal, as JSON and as a chart."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING

import typer
from rich.box import SIMPLE_HEAD
from rich.table import Table

from ipex_bench.report import SHORT, ratio_axis
from ipex_core.util.console import PLAIN_WIDTH, figure_class

if TYPE_CHECKING:
    from ipex_core.benchmark import Result

__all__ = ["read_results", "results_json", "results_table", "write_plot"]


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


def write_plot(path: Path, results: list[Result]) -> None:
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

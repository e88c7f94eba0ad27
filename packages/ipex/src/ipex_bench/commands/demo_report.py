# SPDX-License-Identifier: Apache-2.0
"""What `ipex demo` shows and writes: tables, JSON, chart."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table
from rich.text import Text

from ipex_core.benchmark import Ratio, ratio

Hits = Sequence[tuple[str, str, Sequence[tuple[float, Any]]]]


@dataclasses.dataclass
class Outcome:
    """What was measured of one candidate; times in seconds per batch size, one per round."""

    name: str
    stock: str
    seconds: dict[int, list[float]] = dataclasses.field(default_factory=dict)
    cosine_min: float = math.nan
    cosine_mean: float = math.nan
    compared: int = 0
    peak_mb: float = math.nan
    base_mb: float = math.nan
    prepare_s: float = math.nan
    error: str = ""
    left_out: bool = False


@dataclasses.dataclass
class Row:
    """One row of the table: medians in milliseconds and ratios to the stock row, per batch size."""

    name: str
    stock: str
    ms: dict[int, float]
    ratios: dict[int, Ratio]
    cosine_min: float
    cosine_mean: float
    peak_mb: float
    prepare_s: float
    error: str
    left_out: bool


def rows(outcomes: Iterable[Outcome], sizes: Sequence[int]) -> list[Row]:
    """Return the rows of the table."""
    by_name = {o.name: o for o in outcomes}
    found = []
    for o in by_name.values():
        stock = by_name.get(o.stock)
        done = [n for n in sizes if n in o.seconds]
        found.append(
            Row(
                name=o.name,
                stock=o.stock,
                ms={n: statistics.median(o.seconds[n]) * 1e3 for n in done},
                ratios={
                    n: ratio(stock.seconds[n], o.seconds[n])
                    for n in done
                    if stock and n in stock.seconds
                },
                cosine_min=o.cosine_min,
                cosine_mean=o.cosine_mean,
                peak_mb=o.peak_mb,
                prepare_s=o.prepare_s,
                error=o.error,
                left_out=o.left_out,
            )
        )
    return found


def search_text(hits: Hits) -> Text:
    """Return the three best sentences for each query."""
    text = Text()
    for query, _, found in hits:
        text.append(f"\n{query}\n", style="bold")
        for score, sentence in found:
            text.append(f"  {score:.3f}", style="cyan")
            text.append(f"  {sentence.text} ")
            text.append(f"({sentence.topic})\n", style="dim")
    return text


def results_table(found: Sequence[Row], sizes: Sequence[int], result: dict[str, Any]) -> Table:
    """Return the comparison; it fits into 80 columns with two batch sizes."""
    machine = result["machine"]
    table = Table(
        title=(
            f"{result['model']}, {result['text']['tokens_per_passage']} tokens, {machine['cpu']},"
            f" {machine['threads']} thread(s), level {machine['level']}, torch {machine['torch']}"
        ),
        title_justify="left",
        caption_justify="left",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        pad_edge=False,
    )
    table.add_column("candidate", no_wrap=True)
    for n in sizes:
        table.add_column(f"batch\n{n}, ms", justify="right", no_wrap=True)
        table.add_column("x stock\np10-p90", justify="right", no_wrap=True)
    table.add_column("least\ncosine", justify="right", no_wrap=True)
    memory = not all(math.isnan(row.peak_mb) for row in found)
    if memory:
        table.add_column("peak\nMB", justify="right", no_wrap=True)
    for index, row in enumerate(found):
        cells: list[str] = []
        for n in sizes:
            cells += [
                f"{row.ms[n]:.1f}" if n in row.ms else "-",
                _ratio_text(row.ratios.get(n), bool(row.stock)),
            ]
        cosine = "-" if math.isnan(row.cosine_min) else _floor(row.cosine_min)
        name = f"[red]{row.name}: failed[/]" if row.error else row.name
        table.add_row(name, *cells, cosine, *([_number(row.peak_mb, 0)] if memory else []))
        if index + 1 < len(found) and bool(found[index + 1].stock) != bool(row.stock):
            table.add_section()
    pairs = ", ".join(f"{r.name} / {r.stock}" for r in found if r.stock)
    table.caption = (
        "x stock: how many times as fast, paired by round, median and 10-90 %; yellow: slower.\n"
        f"Pairs: {pairs}.\n"
        "Cosine: to the embeddings of stock eager fp32."
        + (" Peak: of a process with this candidate alone." if memory else "")
    )
    return table


def slower(value: Ratio) -> bool:
    """Whether it is slower than stock, by the median and not only in single rounds."""
    return value.median < 0.99 and value.high < 1.02


def _ratio_text(value: Ratio | None, has_stock: bool) -> str:
    if value is None:
        return "-" if has_stock else ""
    color = "yellow" if slower(value) else "green" if value.low > 1 else "default"
    return f"[{color}]{value.median:.2f}x[/]\n{value.low:.2f}-{value.high:.2f}"


def _number(value: float, digits: int) -> str:
    return "-" if math.isnan(value) else f"{value:,.{digits}f}"


def _floor(cosine: float) -> str:
    # Rounded down: a cosine must not look better than it is.
    return f"{math.floor(cosine * 1e5 + 1e-6) / 1e5:.5f}"


def files(folder: Path) -> list[Path]:
    """Return the files of a run that exist."""
    return [p for p in (folder / "demo.json", folder / "demo.png") if p.exists()]


def write(
    folder: Path,
    found: Sequence[Row],
    outcomes: Iterable[Outcome],
    sizes: Sequence[int],
    hits: Hits,
    result: dict[str, Any],
) -> None:
    """Write demo.json, with every single timing, and the chart if matplotlib is there."""
    folder.mkdir(parents=True, exist_ok=True)
    for old in files(folder):
        old.unlink()
    data = {
        **result,
        "results": [dataclasses.asdict(o) for o in outcomes],
        "search": [
            {
                "query": query,
                "topic": topic,
                "hits": [{"score": v, "topic": s.topic, "sentence": s.text} for v, s in best],
            }
            for query, topic, best in hits
        ],
        "tables": [_document(found, sizes, result)],
    }
    (folder / "demo.json").write_text(
        json.dumps(_without_nan(data), indent=1) + "\n", encoding="utf-8"
    )
    with contextlib.suppress(ImportError):  # matplotlib is an extra
        _chart(folder / "demo.png", found, sizes, result)


def _without_nan(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(k): _without_nan(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_without_nan(v) for v in value]
    return None if isinstance(value, float) and math.isnan(value) else value


def _document(found: Sequence[Row], sizes: Sequence[int], result: dict[str, Any]) -> dict[str, Any]:
    """Return the table in the form that the documentation includes."""
    machine = result["machine"]
    columns = [
        "Candidate",
        *(c for n in sizes for c in (f"Batch {n}, ms", "Times stock (10-90 %)")),
    ]
    lines = []
    for row in found:
        cells: list[str] = [f"`{row.name}`"]
        for n in sizes:
            value = row.ratios.get(n)
            cells.append(f"{row.ms[n]:.1f}" if n in row.ms else "-")
            cells.append(
                f"**{value.median:.2f}** ({value.low:.2f}-{value.high:.2f})" if value else ""
            )
        cosine = "-" if math.isnan(row.cosine_min) else _floor(row.cosine_min)
        lines.append([*cells, cosine, _number(row.peak_mb, 0)])
    return {
        "title": f"{result['model']}, {result['text']['tokens_per_passage']} tokens",
        "machine": (
            f"{machine['cpu']}, {machine['threads']} threads, level {machine['level']},"
            f" torch {machine['torch']}"
        ),
        "command": "ipex demo",
        "note": "",
        "columns": [*columns, "Least cosine to fp32", "Peak memory, MB"],
        "rows": lines,
    }


def _chart(path: Path, found: Sequence[Row], sizes: Sequence[int], result: dict[str, Any]) -> None:
    """Draw the latencies as bars; raises ImportError without matplotlib."""
    from matplotlib.figure import Figure

    shown = [row for row in found if row.ms]
    figure = Figure(figsize=(5.2 * len(sizes), 0.9 + 0.45 * len(shown)), layout="constrained")
    all_axes = figure.subplots(1, len(sizes), squeeze=False)[0]
    for axes, n in zip(all_axes, sizes, strict=True):
        here = [row for row in shown if n in row.ms]
        bars = axes.barh(
            [row.name for row in here],
            [row.ms[n] for row in here],
            color=["#2a7f9e" if row.stock else "#a9b3b9" for row in here],
        )
        labels = [
            f" {row.ms[n]:.1f}" + (f"  ({row.ratios[n].median:.2f}x)" if n in row.ratios else "")
            for row in here
        ]
        axes.bar_label(bars, labels=labels, fontsize=8)
        axes.invert_yaxis()
        axes.margins(x=0.3)
        axes.set_title(f"batch {n}", fontsize=10)
        axes.set_xlabel("median latency, ms (lower is better)")
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(labelleft=axes is all_axes[0])
    machine = result["machine"]
    figure.suptitle(
        f"{result['model']}: {machine['cpu']}, {machine['threads']} thread(s), torch {machine['torch']}",
        fontsize=10,
    )
    figure.savefig(path, dpi=130)

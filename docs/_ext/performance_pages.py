# SPDX-License-Identifier: Apache-2.0
"""The tables and charts of measured performance, from the files in ``docs/data/``.

Each file is what a measuring command wrote (``ipex bench --json``, ``ipex demo``), unchanged except for keys that say
what it is: ``title``, ``command``, ``note``. A file with ``tables`` holds finished tables::

    {"tables": [{"title": "...", "command": "...", "note": "...", "machine": "...",
                 "columns": ["Model", "Ratio"], "rows": [["resnet", 1.4]]}]}

Files of the folder itself stay: the text of the page is about them. What ``nox -s bench -- --publish`` wrote is in
``nightly/`` and has a part of the page to itself, which names its machine and time; nothing else refers to it.
"""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import corpus_pages
import readme_figures
from ipex_bench import peers
from performance_charts import NARROW, Bar, chart
from performance_chooser import parts

__all__ = ["pages", "tables"]

NOTHING = "No measurements are recorded in this tree yet. The commands above produce them.\n"
NO_NIGHT = "This tree has none: `nox -s bench -- --publish` records one.\n"

#: The kinds of `nox -s bench`, in the order of the page.
NIGHTLY = ("models", "llm", "train", "peers", "ops")
#: The kinds of work of the summary of all engines, and how its first column is called.
SUMMARIES = {
    "models": "Model",
    "llm": "Language model",
    "train": "Training step",
    "ops": "Operation",
}


def pages(folder: Path) -> dict[str, str]:
    """Return the parts that ``index.md``, ``performance.md`` and ``measured.md`` include."""
    recorded = _read(sorted(folder.glob("*.json")))
    corpora = [name for name, data in recorded.items() if data.get("kind") == "corpus"]
    for name in corpora:
        del recorded[name]
    night = [folder / "nightly" / f"{kind}.json" for kind in NIGHTLY]
    return {
        "parts/landing.md": landing(),
        **parts(recorded),
        "parts/engines.md": summary(recorded.values()),
        "parts/corpus.md": corpus_pages.page(folder / f"{name}.json" for name in corpora),
        "parts/performance.md": _rendered(recorded) or NOTHING,
        "parts/nightly.md": _rendered(_read(path for path in night if path.exists())) or NO_NIGHT,
    }


def _read(files: Iterable[Path]) -> dict[str, Mapping[str, Any]]:
    return {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in files}


def _rendered(recorded: Mapping[str, Mapping[str, Any]]) -> str:
    return "\n".join(
        render(table) for name, data in recorded.items() for table in tables(data, name)
    )


#: The machines of README.md, and what they are.
LANDING = {
    "Zen 4": "AMD Zen 4, two cores of a virtual machine",
    "AMX": "Intel Xeon with AMX, eight threads",
}


def landing() -> str:
    """Return the charts of README.md side by side, one for each machine; they take the colors of the page."""
    lines = ["::::{grid} 1 1 2 2", ":gutter: 2", ""]
    for machine, name in LANDING.items():
        text = "Times as fast as stock PyTorch eager in bfloat16; line: 95 % interval."
        picture = chart(readme_figures.groups(machine), text, NARROW)
        lines += [":::{grid-item}", f"**{name}**", "", picture, ":::", ""]
    return "\n".join([*lines, "::::", ""])


def summary(recorded: Iterable[Mapping[str, Any]]) -> str:
    """Return a table for each kind of work: the ratios of all engines, a row for each case and machine."""
    found: dict[str, list[Mapping[str, Any]]] = {}
    for data in recorded:
        if "absent" in data:
            found.setdefault(data["kind"], []).append(data)
    lines: list[str] = []
    for kind, name in SUMMARIES.items():
        rows = [(data, row) for data in found.get(kind, ()) for row in data["rows"]]
        if not rows:
            continue
        used = {row["engine"] for _, row in rows} - {peers.BASELINE}
        engines = [engine for engine in peers.NAMES if engine in used]
        columns = [name, "Machine", "Precision", f"{title(peers.BASELINE)}, ms"]
        columns += map(title, engines)
        lines += ["| " + " | ".join(columns) + " |", "|---" * len(columns) + "|"]
        for case in sorted({row["case"] for _, row in rows}):
            for data in found[kind]:
                cells = {row["engine"]: row for row in data["rows"] if row["case"] == case}
                if cells:
                    lines.append("| " + " | ".join(summary_row(data, case, cells, engines)) + " |")
        lines.append("")
    return "\n".join(lines) or NOTHING


def summary_row(
    data: Mapping[str, Any],
    case: str,
    cells: Mapping[str, Mapping[str, Any]],
    engines: Iterable[str],
) -> list[str]:
    """Return the cells of a case: the greatest ratio is bold, and those whose interval reaches its own."""
    others = [row for engine, row in cells.items() if engine != peers.BASELINE]
    best = max(others, key=lambda row: row["ratio"], default=None)
    facts = data["machine"]
    cpu = re.sub(r"\(R\)| Processor.*|,.*", "", facts["cpu"])
    found = [case, f"{cpu}, `{facts['level']}`, {facts['threads']} threads", data["dtype"]]
    found.append(f"{cells[peers.BASELINE]['ms']:.3g}" if peers.BASELINE in cells else "-")
    for engine in engines:
        row = cells.get(engine)
        if row is None or best is None:
            found.append("-")
            continue
        ratio = f"{row['ratio']:.2f}"
        ratio = f"**{ratio}**" if row["high"] >= best["low"] else ratio
        found.append(f"{ratio} ({row['low']:.2f}-{row['high']:.2f})")
    return found


def tables(data: Mapping[str, Any], name: str) -> list[dict[str, Any]]:
    """Return the tables of one file, as dictionaries with title, machine, command, note, columns and rows."""
    if "tables" in data:
        return list(data["tables"])
    if "absent" in data:
        return [engine_table(data)]
    results = data.get("results") or []
    if not results or "op" not in results[0]:
        raise ValueError(f"docs/data/{name}.json: neither tables nor the results of ipex bench")
    return [bench_table(data, name)]


def bench_table(data: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return the table of a result file of ``ipex bench``."""
    rows = [
        [
            f"`{r['op']}`",
            r["case"],
            r["dtype"],
            r["threads"],
            r["level"],
            microseconds(r["stock_us"]),
            microseconds(r["ipex_us"]),
            f"**{r['ratio']:.2f}**",
            f"{r['ratio_low']:.2f}-{r['ratio_high']:.2f}",
            "-" if r["limit_percent"] is None else f"{r['limit_percent']:.0f} % ({r['limit']})",
        ]
        for r in data["results"]
    ]
    return {
        "title": data.get("title", f"Ops against stock PyTorch ({name})"),
        "machine": machine(data.get("machine", {})),
        "command": data.get("command", "ipex bench"),
        "note": data.get("note", ""),
        "columns": [
            *("Op", "Shape", "Dtype", "Threads", "Level", "Stock µs", "ipex µs"),
            *("Ratio", "10-90 %", "Of the limit"),
        ],
        "rows": rows,
        "chart": ops_chart(data["results"]),
    }


def ops_chart(results: Sequence[Mapping[str, Any]]) -> str:
    """Return a chart with a bar for each op: the median over its shapes, and the least and greatest of them."""
    ratios: dict[str, list[float]] = {}
    for r in results:
        ratios.setdefault(r["op"], []).append(r["ratio"])
    bars = [
        Bar(op, statistics.median(found), min(found), max(found), ours=True)
        for op, found in ratios.items()
    ]
    text = "Times as fast as stock PyTorch: the median over the shapes of an op; line: least and greatest."
    return chart([("", bars)], text)


def engine_table(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return the table of a result file of ``ipex bench models``, ``llm``, ``train`` or ``ops --peers``."""
    rows = data["rows"]
    engines = list(dict.fromkeys(row["engine"] for row in rows))
    cells = {(row["case"], row["engine"]): row for row in rows}
    versions = ", ".join(f"{title(name)} {text}" for name, text in data["versions"].items())
    cases = list(dict.fromkeys(row["case"] for row in rows))
    missing = dict.fromkeys(f"{title(one['engine'])}: {one['reason']}" for one in data["absent"])
    narrow = "" if data.get("schema", 1) > 1 else ", a bootstrap, too narrow for few rounds"
    note = (
        "Milliseconds; in bold, times as fast as stock eager in the same rounds with the 95 % confidence interval"
        f"{narrow}; the share of what memory or arithmetic of the machine gave in the same rounds; peak memory of the"
        f" process. Versions: {versions}."
    )
    if missing:
        note += f" Without a number: {'; '.join(missing)}."
    return {
        "title": data.get("title", f"`ipex bench {data['kind']}`, {data['dtype']}"),
        "machine": machine(data["machine"]),
        "command": data.get("command", ""),
        "note": f"{note} {data.get('note', '')}".strip(),
        "columns": ["Case", *map(title, engines)],
        "rows": [
            [case, *(engine_cell(cells.get((case, engine))) for engine in engines)]
            for case in cases
        ],
        "chart": engine_chart(rows, cases),
    }


def engine_chart(rows: Sequence[Mapping[str, Any]], cases: Sequence[str]) -> str:
    """Return a chart with a group of bars for each case."""
    groups: dict[str, list[Bar]] = {case: [] for case in cases}
    for r in rows:
        if r["engine"] != peers.BASELINE:
            ours = r["engine"].startswith("ipex_")
            bar = Bar(title(r["engine"]), r["ratio"], r["low"], r["high"], ours)
            groups[r["case"]].append(bar)
    return chart(
        list(groups.items()),
        "Times as fast as stock eager in the same rounds; line: 95 % interval.",
    )


def title(engine: str) -> str:
    """Return how the tables call an engine."""
    return peers.load(engine).title


def engine_cell(row: Mapping[str, Any] | None) -> str:
    """Return what an engine did at a case."""
    if row is None:
        return "-"
    time = f"{row['ms']:.4g}" if row["ms"] < 10 else f"{row['ms']:.1f}"
    ratio = f" **{row['ratio']:.2f}** ({row['low']:.2f}-{row['high']:.2f})"
    share = "" if row["limit"] == "call" else f" {row['limit_percent']:.0f} % {row['limit']},"
    return (
        f"{time} {row['precision']}{'' if row['engine'] == peers.BASELINE else ratio},"
        f"{share} {row['peak_mb']:.0f} MB"
    )


def machine(facts: Mapping[str, Any]) -> str:
    """Return the machine in one line."""
    parts = [str(facts[key]) for key in ("cpu", "system") if facts.get(key)]
    if facts.get("cpus"):
        parts.insert(1, f"{facts['cpus']} CPUs")
    parts += [f"{key} {facts[key]}" for key in ("torch", "python") if facts.get(key)]
    if facts.get("threads"):
        parts.append(f"{facts['threads']} threads")
    if facts.get("time"):
        parts.append(f"measured {facts['time'][:10]}")
    if (facts.get("busy") or 0) > 0.1:
        parts.append(f"other programs took {facts['busy']:.0%} of the CPUs when it began")
    return ", ".join(parts)


def render(table: Mapping[str, Any]) -> str:
    """Return one table as Markdown."""
    columns = list(table["columns"])
    lines = [f"### {table['title']}", ""]
    if table.get("machine"):
        lines += [f"{table['machine']}.", ""]
    if table.get("command"):
        lines += ["```bash", table["command"], "```", ""]
    if table.get("chart"):
        lines += [table["chart"], ""]
    lines += [
        "| " + " | ".join(columns) + " |",
        "|---" * len(columns) + "|",
        *("| " + " | ".join(map(cell, row)) + " |" for row in table["rows"]),
        "",
    ]
    if table.get("note"):
        lines += [table["note"], ""]
    return "\n".join(lines)


def microseconds(value: float) -> str:
    """Return a time with a precision that suits its size."""
    return f"{value:.1f}" if value < 1000 else f"{value:,.0f}"


def cell(value: object) -> str:
    """Return a value as it is printed; numbers with three digits."""
    return f"{value:.3g}" if isinstance(value, float) else str(value)

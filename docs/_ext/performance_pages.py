# SPDX-License-Identifier: Apache-2.0
"""The tables of measured performance, from the files in ``docs/data/``.

Each file is what a measuring command wrote (``ipex bench --json``, ``ipex demo``), unchanged except for keys that say
what it is: ``title``, ``command``, ``note``. A file with ``tables`` holds finished tables::

    {"tables": [{"title": "...", "command": "...", "note": "...", "machine": "...",
                 "columns": ["Model", "Ratio"], "rows": [["resnet", 1.4]]}]}
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ipex._bench import peers

__all__ = ["pages", "tables"]

NOTHING = "No measurements are recorded in this tree yet. The commands above produce them.\n"


def pages(folder: Path) -> dict[str, str]:
    """Return the part that ``performance.md`` includes."""
    parts = [
        render(table)
        for path in sorted(folder.glob("*.json"))
        for table in tables(json.loads(path.read_text(encoding="utf-8")), path.stem)
    ]
    return {"parts/performance.md": "\n".join(parts) or NOTHING}


def tables(data: Mapping[str, Any], name: str) -> list[dict[str, Any]]:
    """Return the tables of one file, as dictionaries with title, machine, command, note, columns and rows."""
    if "tables" in data:
        return list(data["tables"])
    if "absent" in data:
        return engine_tables(data)
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
    }


def engine_tables(data: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the table of a result file of ``ipex bench models``, ``llm``, ``train`` or ``ops --peers``."""
    rows = data["rows"]
    engines = list(dict.fromkeys(row["engine"] for row in rows))
    cells = {(row["case"], row["engine"]): row for row in rows}
    versions = ", ".join(f"{title(name)} {text}" for name, text in data["versions"].items())
    missing = dict.fromkeys(f"{title(one['engine'])}: {one['reason']}" for one in data["absent"])
    note = (
        "Milliseconds; in bold, times as fast as stock eager in the same rounds with the 95 % confidence interval; the"
        " share of what memory or arithmetic of the machine gave in the same rounds; peak memory of the process."
        f" Versions: {versions}."
    )
    if missing:
        note += f" Without a number: {'; '.join(missing)}."
    return [
        {
            "title": data.get("title", f"`ipex bench {data['kind']}`, {data['dtype']}"),
            "machine": machine(data["machine"]),
            "command": data.get("command", ""),
            "note": f"{note} {data.get('note', '')}".strip(),
            "columns": ["Case", *map(title, engines)],
            "rows": [
                [case, *(engine_cell(cells.get((case, engine))) for engine in engines)]
                for case in dict.fromkeys(row["case"] for row in rows)
            ],
        }
    ]


def title(engine: str) -> str:
    """Return how the tables call an engine."""
    return peers.load(engine).title


def engine_cell(row: Mapping[str, Any] | None) -> str:
    """Return what an engine did at a case."""
    if row is None:
        return "-"
    time = f"{row['ms']:.4g}" if row["ms"] < 10 else f"{row['ms']:.1f}"
    ratio = f" **{row['ratio']:.2f}** ({row['low']:.2f}-{row['high']:.2f})"
    return (
        f"{time} {row['precision']}{'' if row['engine'] == 'stock_eager' else ratio},"
        f" {row['limit_percent']:.0f} % {row['limit']}, {row['peak_mb']:.0f} MB"
    )


def machine(facts: Mapping[str, Any]) -> str:
    """Return the machine in one line."""
    parts = [str(facts[key]) for key in ("cpu", "system") if facts.get(key)]
    if facts.get("cpus"):
        parts.insert(1, f"{facts['cpus']} CPUs")
    parts += [f"{key} {facts[key]}" for key in ("torch", "python") if facts.get(key)]
    return ", ".join(parts)


def render(table: Mapping[str, Any]) -> str:
    """Return one table as Markdown."""
    columns = list(table["columns"])
    lines = [f"### {table['title']}", ""]
    if table.get("machine"):
        lines += [f"{table['machine']}.", ""]
    if table.get("command"):
        lines += ["```bash", table["command"], "```", ""]
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

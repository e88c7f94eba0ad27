# SPDX-License-Identifier: Apache-2.0
"""The tables of measured performance, from ``docs/data/performance.json``.

The file holds what was measured, with the machine and the command, and nothing that is computed from it::

    {"tables": [{"title": "...", "machine": "...", "command": "...", "note": "...",
                 "columns": ["Op", "ratio"], "rows": [["rms_norm", 4.2]]}]}
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

__all__ = ["pages", "table"]

NOTHING = "No measurements are recorded in this tree yet. The commands above produce them.\n"


def pages(data: Path) -> dict[str, str]:
    """Return the part that ``performance.md`` includes."""
    if not data.exists():
        return {"parts/performance.md": NOTHING}
    tables = json.loads(data.read_text(encoding="utf-8"))["tables"]
    return {"parts/performance.md": "\n".join(table(entry) for entry in tables)}


def table(entry: dict[str, Any]) -> str:
    """Return one table as Markdown."""
    lines = [f"### {entry['title']}", ""]
    if entry.get("machine"):
        lines += [entry["machine"], ""]
    lines += [
        "| " + " | ".join(entry["columns"]) + " |",
        "|---" + "|---:" * (len(entry["columns"]) - 1) + "|",
        *("| " + " | ".join(map(cell, row)) + " |" for row in entry["rows"]),
        "",
    ]
    if entry.get("command"):
        lines += ["```bash", entry["command"], "```", ""]
    if entry.get("note"):
        lines += [entry["note"], ""]
    return "\n".join(lines)


def cell(value: object) -> str:
    """Return a value as it is printed: numbers with three digits that matter."""
    if isinstance(value, float):
        return f"{value:.3g}" if abs(value) < 100 else f"{value:.0f}"
    return str(value)

# SPDX-License-Identifier: Apache-2.0
"""The table of model families, from the file that the tests of ipex-llm check row by row."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

__all__ = ["pages"]

SOURCE = Path(__file__).parents[2] / "packages" / "ipex-llm" / "tests" / "model_families.json"

#: Written by ``nox -s families -- --all``.
ALL = Path(__file__).parents[1] / "data" / "model_families.tsv"

DEPTHS = {1: "1, layer by layer", 2: "2, some layers", 3: "3, whole stack"}


def pages() -> dict[str, str]:
    """Return the parts that ``model_families.md`` includes."""
    data = json.loads(SOURCE.read_text(encoding="utf-8"))
    return {
        "parts/model_families.md": table(data["families"], data["more"]),
        "parts/model_families_why.md": reasons(data["families"]),
        "parts/model_families_all.md": every(ALL.read_text(encoding="utf-8")),
    }


def table(rows: Sequence[dict[str, Any]], more: Sequence[str]) -> str:
    """Return the table of all families."""
    lines = [
        "| Family | Tested with | Class | Depth | dtypes | Loop of `generate` |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        kind = f"`{row['class']}`" if row["class"] else "code of the checkpoint"
        dtypes = [
            "float32",
            "bfloat16",
            *(["float16"] if row["name"] in more else []),
            "int8 weights",
        ]
        older = ""
        if "depth_transformers_4" in row:
            older = f" ({row['depth_transformers_4']} with transformers 4)"
        cells = (
            row["family"],
            row["variant"],
            kind,
            DEPTHS[row["depth"]] + older,
            ", ".join(dtypes),
            "ours" if row["loop"] == "own" else "transformers",
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def reasons(rows: Sequence[dict[str, Any]]) -> str:
    """Return why families do not reach depth 3, those with one reason together."""
    found: dict[str, list[str]] = {}
    for row in rows:
        if "why" in row:
            name = f"{row['family']} ({row['variant']})"
            found.setdefault(row["why"], []).append(name)
    return "".join(f"- {', '.join(names)}: {why}\n" for why, names in found.items())


def every(text: str) -> str:
    """Return the table of all classes, from the lines of ``tools/model_families.py``."""
    heads, *rows = (line.split("\t") for line in text.splitlines())
    values = [dict(zip(heads, row, strict=True)) for row in rows]
    lines = [
        "| Name | Class | Depth | Difference at depth 3 | 2 | 1 | Why |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in values:
        why = (
            row["why"]
            .replace("|", "\\|")
            .replace("<", "&lt;")
            .replace("*", "\\*")
            .replace("_", "\\_")
        )
        name, kind = f"`{row['name']}`", f"`{row['class']}`"
        numbers = (row[f"depth {depth}"] for depth in (3, 2, 1))
        lines.append(f"| {' | '.join((name, kind, row['reached'], *numbers, why))} |")
    ran = [row for row in values if row["reached"] != "not run"]
    counts = ", ".join(f"{sum(r['reached'] == d for r in ran)} reach depth {d}" for d in "321")
    return (
        f"Of {len(values)} classes {len(ran)} run from their default configuration: {counts}.\n\n"
        + "\n".join(lines)
        + "\n"
    )

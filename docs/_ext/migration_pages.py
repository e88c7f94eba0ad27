# SPDX-License-Identifier: Apache-2.0
"""The tables of names of Intel Extension for PyTorch, from the file that the facade follows."""

from __future__ import annotations

from ipex_cli import migration_table
from ipex_cli.migration_table import STATES, Row

__all__ = ["pages"]

#: First words of names -> title of the section, in this order; the rest of the first group is the top level.
SECTIONS = {
    "": "Top level",
    "frontend": "Front end, launcher and helpers",
    "llm": "Language models",
    "quantization": "Quantization",
    "nn": "Layers",
    "optim": "Optimizers",
    "cpu": "CPU: runtime, launcher, fast BERT",
    "distributed": "Distributed",
    "_C": "The native module",
    "xpu": "XPU",
    "torch": "Ops",
}
#: Those that stand with others; all other first words stand with the front end.
TOGETHER = {
    "transformers": "llm",
    "_isa_help": "_C",
}


def pages() -> dict[str, str]:
    """Return the page by file name."""
    groups: dict[str, list[Row]] = {key: [] for key in SECTIONS}
    for row in migration_table.rows().values():
        first = row.name.split(".")[0] if "." in row.name else ""
        groups[first if first in groups else TOGETHER.get(first, "frontend")].append(row)
    lines = [
        "# Every name of IPEX",
        "",
        "Generated from the table that `ipex` follows when an old name is imported; a test resolves every row. Names",
        "stand below `intel_extension_for_pytorch`; `*` is every other name of a module. What is not offered raises",
        "`NotImplementedError` with the text of its row. On the command line: `ipex migrate NAME`.",
        "",
        count(),
        "",
    ]
    for key, rows in groups.items():
        lines += [f"## {SECTIONS[key]}", "", "| IPEX | State | Here |", "|---|---|---|"]
        lines += [cells(row) for row in rows]
        lines.append("")
    return {"migration_names.md": "\n".join(lines)}


def count() -> str:
    """Return how many rows there are of each state."""
    states = [row.state for row in migration_table.rows().values()]
    parts = [f"{states.count(s)} {text}" for s, text in STATES.items() if states.count(s)]
    return f"{len(states)} rows: {', '.join(parts)}."


def cells(row: Row) -> str:
    """Return a row of a table."""
    if row.state == "absent":
        here = row.here
    elif row.state == "xpu":
        here = f"Without it: {row.here}"
    elif row.here in (f"ipex.{row.name}", row.name):
        here = ""
    else:
        here = f"`{row.here}`"
    text = ". ".join(part for part in (here, row.note) if part)
    return f"| `{row.name}` | {STATES[row.state]} | {text} |"

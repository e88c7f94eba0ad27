# SPDX-License-Identifier: Apache-2.0
"""Every public name of Intel Extension for PyTorch, and what has become of it: ``_data/migration.tsv``.

The table is data for three readers: the page "Migration" and the command ``ipex migrate`` show it, and the import of an
old name follows it (`ipex.compat.migration`). The file is read at the first question.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

#: The import name of Intel Extension for PyTorch.
OLD_NAME = "intel_extension_for_pytorch"

#: What a row can say, and how it is shown.
STATES: Mapping[str, str] = {
    "same": "same",
    "differs": "differs",
    "absent": "not offered",
    "xpu": "with ipex[xpu]",
    "new": "new here",
}


class Row(NamedTuple):
    """One name.

    Attributes:
        name: Dotted, below ``intel_extension_for_pytorch``; ``*`` at its end stands for all names of a module. Ops are
            written as ``torch.ops.torch_ipex.nms``.
        state: A key of `STATES`.
        here: Where it is here: a dotted name; for "absent" a text, what to use instead; for "xpu" the same for those
            who do not install the package that has it.
        note: The difference; empty without a difference.
    """

    name: str
    state: str
    here: str
    note: str


@functools.cache
def rows() -> Mapping[str, Row]:
    """Return all rows by name, in the order of the file."""
    text = (Path(__file__).parent / "_data" / "migration.tsv").read_text("utf-8")
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    found = [Row(*f"{line}\t".split("\t")[:4]) for line in lines]
    return {row.name: row for row in found}


def find(name: str) -> Row | None:
    """Return the row of a dotted name, or of the pattern that covers it."""
    table = rows()
    if name in table:
        return table[name]
    parts = name.split(".")
    for end in range(len(parts) - 1, 0, -1):
        row = table.get(".".join([*parts[:end], "*"]))
        if row is not None:
            return row
    return None


def search(text: str) -> list[Row]:
    """Return the rows for a name as scripts write it (``ipex.optimize``), else those whose names contain the text."""
    name = text
    for prefix in ("intel_extension_for_pytorch.", "ipex."):
        name = name.removeprefix(prefix)
    row = find(name)
    # A short name may stand for several.
    ends = [r for r in rows().values() if r.name.endswith(f".{name}")]
    if row is not None:
        return [row] if name != text else [row, *(r for r in ends if r is not row)]
    return ends or [r for r in rows().values() if name.lower() in r.name.lower()]

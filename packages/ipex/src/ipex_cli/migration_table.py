# SPDX-License-Identifier: Apache-2.0
"""Every public name of Intel Extension for PyTorch, and what has become of it: ``_data/migration.tsv``.

The table is data for three readers: the page "Migration" and the command ``ipex migrate`` show it, and the import of an
old name follows it (`ipex.compat.migration`). The file is read at the first question.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import importlib.metadata
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

__all__ = ["OLD_NAME", "STATES", "Row", "find", "rows", "search", "write_metadata_wheel"]

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


# -- A wheel without code that answers for the distribution ``intel_extension_for_pytorch`` ---------------------------


def write_metadata_wheel(folder: Path) -> Path:
    """Write the wheel for the torch that is installed.

    Args:
        folder: Where to; made if it is not there.

    Returns:
        The path of the wheel, whose version is ``<major>.<minor>.0+ipex<version of ipex>``.

    Raises:
        PackageNotFoundError: torch is not installed.
    """
    ours = importlib.metadata.version("ipex")
    major, minor, *_ = importlib.metadata.version("torch").split(".")
    version = f"{major}.{minor}.0+ipex{ours}"
    info = f"{OLD_NAME}-{version}.dist-info"
    files = {
        f"{info}/METADATA": (
            f"Metadata-Version: 2.1\nName: {OLD_NAME}\nVersion: {version}\n"
            "Summary: Says that ipex offers this module; has no code.\nLicense: Apache-2.0\n"
            f"Requires-Dist: ipex=={ours}\n"
        ),
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: ipex\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = "".join(f"{path},{_digest(text)},{len(text)}\n" for path, text in files.items())
    files[f"{info}/RECORD"] = f"{record}{info}/RECORD,,\n"
    folder.mkdir(parents=True, exist_ok=True)
    wheel = folder / f"{OLD_NAME}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for path, text in files.items():
            archive.writestr(zipfile.ZipInfo(path), text)  # (of 1980: the same bytes each time)
    return wheel


def _digest(text: str) -> str:
    digest = hashlib.sha256(text.encode()).digest()
    return f"sha256={base64.urlsafe_b64encode(digest).rstrip(b'=').decode()}"

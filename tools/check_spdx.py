# SPDX-License-Identifier: Apache-2.0
"""Fail when a source file does not start with the licence line.

The line has to be among the first three, so that a ``#!`` line or a build file's first comment may come before it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

__all__ = ["main", "missing"]

LINE = "SPDX-License-Identifier: Apache-2.0"
SUFFIXES = {".py", ".pyi", ".h", ".cpp", ".c", ".cmake", ".in", ".sh"}
NAMES = {"CMakeLists.txt"}
SKIPPED_FOLDERS = {"build", "dist", "generated", "_build", "__pycache__"}


def sources(root: Path) -> Iterator[Path]:
    """Yield the files under ``root`` that must carry the line."""
    for path in sorted(root.rglob("*")):
        inside = path.relative_to(root)
        hidden = any(part.startswith(".") for part in inside.parts[:-1])
        if hidden or SKIPPED_FOLDERS.intersection(inside.parts):
            continue
        if path.is_file() and (path.suffix in SUFFIXES or path.name in NAMES):
            yield path


def missing(root: Path) -> list[str]:
    """Return the files under ``root`` without the licence line, relative to it."""
    return [
        path.relative_to(root).as_posix()
        for path in sources(root)
        # An empty file (a marker such as an empty conftest) has nothing to license.
        if (text := path.read_text(encoding="utf-8")).strip()
        and not any(LINE in line for line in text.splitlines()[:3])
    ]


def main() -> int:
    """Print the offenders; return 1 if there are any."""
    root = Path(__file__).resolve().parent.parent
    offenders = missing(root)
    for name in offenders:
        print(f"{name}: the line '{LINE}' is missing at the top")
    if not offenders:
        print("check_spdx: ok")
    return 1 if offenders else 0


if __name__ == "__main__":
    sys.exit(main())

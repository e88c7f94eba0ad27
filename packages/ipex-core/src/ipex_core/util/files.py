# SPDX-License-Identifier: Apache-2.0
"""Files that appear when they are complete."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["write_whole"]


def write_whole(path: Path, text: str) -> None:
    """Write a file completely or not at all: what was there before is not lost to a full disk.

    Raises:
        OSError: It cannot be written.
    """
    path = path.resolve()
    if path.exists() and not path.is_file():  # a pipe, say
        path.write_text(text, encoding="utf-8")
        return
    part = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        part.write_text(text, encoding="utf-8")
        part.replace(path)
    except PermissionError:  # of the folder; the file itself may be writable
        path.write_text(text, encoding="utf-8")
    finally:
        part.unlink(missing_ok=True)

# SPDX-License-Identifier: Apache-2.0
"""Where the commands print to."""

from __future__ import annotations

import os
from pathlib import Path

import typer
from rich.console import Console

__all__ = ["PLAIN_WIDTH", "make_console", "writable"]

#: Columns of a log or a file; rich assumes 80, in which no table of numbers fits.
PLAIN_WIDTH = 140


def make_console() -> Console:
    """Return a console for standard output; what is not a terminal is wide enough for every table."""
    console = Console()
    if not console.is_terminal and not os.environ.get("COLUMNS"):
        return Console(width=PLAIN_WIDTH)
    return console


def writable(path: Path, option: str) -> None:
    """Check, before minutes of work, that a file can be written later; creates its folder.

    Raises:
        typer.BadParameter: It cannot.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_dir():
            raise IsADirectoryError(f"{path} is a folder")
        existed = path.exists()
        with path.open("a", encoding="utf-8"):
            pass
        if not existed:
            path.unlink()
    except OSError as error:
        reason = error.strerror or str(error)
        raise typer.BadParameter(f"cannot write {path}: {reason}", param_hint=option) from None

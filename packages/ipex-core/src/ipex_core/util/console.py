# SPDX-License-Identifier: Apache-2.0
"""What commands print: tables, warnings."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

#: Columns of a log or a file; rich assumes 80, in which no table of numbers fits.
PLAIN_WIDTH = 140


def make_console(stderr: bool = False) -> Console:
    """Return a console; what is not a terminal is wide enough for every table."""
    from rich.console import Console

    console = Console(stderr=stderr)
    if not console.is_terminal and not os.environ.get("COLUMNS"):
        return Console(stderr=stderr, width=PLAIN_WIDTH)
    return console


def warn_if_busy(console: Console, share: float | None) -> None:
    """Say that timings mean little, if other processes took more than a tenth of the CPUs; see `benchmark.busy`."""
    if (share or 0) > 0.1:
        console.print(
            f"[yellow]Other processes took {share:.0%} of the CPUs when this started:[/] repeat it on an idle machine."
        )


def writable(path: Path, option: str) -> None:
    """Check, before minutes of work, that a file can be written later; creates its folder.

    Raises:
        typer.BadParameter: It cannot.
    """
    import typer

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


def written(
    path: Path | None, write: Callable[[Path], object], console: Console, say: bool = True
) -> bool:
    """Write a file, if it is wanted, and say so; return False, and say why, if it cannot be written."""
    if path is None:
        return True
    try:
        write(path)
    except OSError as error:
        console.print(f"[red]cannot write {path}:[/] {error.strerror or error}", soft_wrap=True)
        return False
    if say:
        console.print(f"wrote {path}")
    return True


def figure_class(path: Path | None = None) -> Any:
    """Return matplotlib's class of figures, for the option ``--plot``; with the file, if it shall be checked.

    Raises:
        typer.BadParameter: matplotlib is not installed, or does not know the ending of the file.
    """
    import typer

    try:
        from matplotlib.backend_bases import FigureCanvasBase
        from matplotlib.figure import Figure
    except ImportError:
        raise typer.BadParameter(
            "needs matplotlib: pip install 'ipex[plot]'", param_hint="--plot"
        ) from None
    known = FigureCanvasBase.get_supported_filetypes()
    ending = "png" if path is None else path.suffix[1:].lower() or "png"
    if ending not in known:
        raise typer.BadParameter(
            f"must end with one of {', '.join(sorted(known))}, got {path}", param_hint="--plot"
        )
    return Figure

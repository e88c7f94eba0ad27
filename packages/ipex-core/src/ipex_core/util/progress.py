# SPDX-License-Identifier: Apache-2.0
"""Progress of long work: a bar on a terminal, log lines elsewhere, nothing when it is quick."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

__all__ = ["progress"]

log = logging.getLogger("ipex")
_T = TypeVar("_T")
_QUIET_SECONDS = 2.0


def progress(items: Sequence[_T]) -> Iterator[_T]:
    """Yield the items and tell how far it is, once it has taken more than two seconds."""
    start = shown = time.monotonic()
    bar: Any = None
    task: Any = None
    try:
        for done, item in enumerate(items):
            now = time.monotonic()
            if bar is not None:
                bar.update(task, completed=done)
            elif now - start > _QUIET_SECONDS:
                bar = _bar()
                if bar is not None:
                    task = bar.add_task("optimizing", total=len(items), completed=done)
                    bar.start()
                elif now - shown > _QUIET_SECONDS:
                    shown = now
                    left = (now - start) / done * (len(items) - done) if done else 0.0
                    log.info("optimizing: %d of %d layers, %.0f s left", done, len(items), left)
            yield item
    finally:
        if bar is not None:
            bar.stop()


def _bar() -> Any:
    if not sys.stderr.isatty():
        return None
    try:
        from rich.console import Console
        from rich.progress import Progress
    except ImportError:
        return None
    return Progress(console=Console(stderr=True), transient=True)

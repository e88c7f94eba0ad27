# SPDX-License-Identifier: Apache-2.0
"""Files, memory, warnings, progress and other helpers that know nothing of ops."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import logging
import os
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, ParamSpec, TypeVar


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


def return_free_memory() -> None:
    """Give freed memory back to the system, where the allocator (glibc's) would keep it.

    Code that replaces the weights of a model one by one frees blocks between blocks that live on; without this the
    process keeps both the old and the new ones until it ends.
    """
    trim = _trim()
    if trim is not None:
        trim(0)


@functools.cache
def _trim() -> Callable[[int], Any] | None:
    try:
        return ctypes.CDLL(None).malloc_trim
    except (OSError, AttributeError, TypeError):  # another C library
        return None


_P = ParamSpec("_P")
_T = TypeVar("_T")


def also_named(**names: str) -> Callable[[Callable[_P, _T]], Callable[_P, _T]]:
    """Let a function accept keyword arguments under second names, given as ``second="first"``."""

    def decorate(function: Callable[_P, _T]) -> Callable[_P, _T]:
        @functools.wraps(function)
        def call(*args: _P.args, **kwargs: _P.kwargs) -> _T:
            for second, first in names.items():
                if second in kwargs:
                    if first in kwargs:
                        name = function.__name__
                        raise TypeError(f"{name}: {second} must not be given beside {first}")
                    kwargs[first] = kwargs.pop(second)
            return function(*args, **kwargs)

        return call

    return decorate


# --- warnings ---------------------------------------------------------------------------------------------------------

# For one thread: `warnings.catch_warnings` exchanges the filters of the whole process. Warnings of other threads get
# lost meanwhile, and two threads that overlap can leave the filters of the one that ended first.


class _OfThread(type):
    """Classes of warnings of which those are subclasses that the current thread has named."""

    def __init__(cls, *args: Any) -> None:
        super().__init__(*args)
        cls.local = threading.local()

    def __subclasscheck__(cls, kind: type) -> bool:
        return issubclass(kind, getattr(cls.local, "kinds", ()))


class _Ignored(Warning, metaclass=_OfThread):
    pass


class _Raised(Warning, metaclass=_OfThread):
    pass


@functools.cache
def _ignored_texts(text: str) -> Any:
    """Return the class that stands for warnings of a text."""
    return _OfThread(f"_Ignored_{text}", (Warning,), {})


@contextlib.contextmanager
def _filtered(
    action: Any, marker: Any, kinds: tuple[type[Warning], ...], text: str = ""
) -> Iterator[None]:
    before = getattr(marker.local, "kinds", ())
    marker.local.kinds = (*before, *kinds)
    # In front of all others, and never taken away: it holds for no other thread. Public functions only ask for a class.
    warnings.filterwarnings(action, text, marker)
    try:
        yield
    finally:
        marker.local.kinds = before


@contextlib.contextmanager
def quiet(*kinds: type[Warning], text: str = "") -> Iterator[None]:
    """Ignore warnings of the current thread.

    Args:
        kinds: Which ones; all by default.
        text: A pattern that their text begins with; any text by default.
    """
    marker = _ignored_texts(text) if text else _Ignored
    with _filtered("ignore", marker, kinds or (Warning,), text):
        yield


@contextlib.contextmanager
def raised(*kinds: type[Warning]) -> Iterator[None]:
    """Turn warnings of the current thread into exceptions.

    Raises:
        RuntimeError: Another thread has exchanged the filters meanwhile, so that warnings may have got lost.
    """
    with _filtered("error", _Raised, kinds):
        yield
        if warnings.filters[0][2] is not _Raised:
            raise RuntimeError(
                "raised: warnings.filters must not change before the block ends, got a change by another thread"
            )


# --- progress ---------------------------------------------------------------------------------------------------------


log = logging.getLogger("ipex")
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

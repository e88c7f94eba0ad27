# SPDX-License-Identifier: Apache-2.0
"""Files, console, memory and other helpers that know nothing of ops."""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

__all__ = [
    "also_named",
    "return_free_memory",
    "write_whole",
]


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

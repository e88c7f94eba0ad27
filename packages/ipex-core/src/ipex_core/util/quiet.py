# SPDX-License-Identifier: Apache-2.0
"""Warnings that one thread does not show.

`warnings.catch_warnings` exchanges the filters of the whole process: warnings of other threads get lost meanwhile, and
two threads that overlap can leave the filters of the one that ended first.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import warnings
from collections.abc import Iterator
from typing import Any

__all__ = ["quiet", "raised"]


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

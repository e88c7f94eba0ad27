# SPDX-License-Identifier: Apache-2.0
"""Folders that are written beside their place, and take it in one step that a kill cannot divide."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path

_AT_FDCWD, _RENAME_EXCHANGE = -100, 2
#: What tells that the system or the file system cannot exchange two names.
_UNKNOWN = {errno.ENOSYS, errno.EINVAL, errno.ENOTSUP, errno.EPERM}


@contextlib.contextmanager
def replacing(target: Path) -> Iterator[Path]:
    """Give a new folder beside ``target``, which takes its place when the block ends without an error.

    At each moment there is a complete folder under the name ``target``, if there was one before. What earlier processes
    left beside it when they were killed is removed.

    Args:
        target: An absolute path; nothing, or a folder that is replaced.

    Raises:
        OSError: A folder cannot be made or renamed.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    _clean(target)
    work = target.with_name(f".{target.name}.{os.getpid()}.{secrets.token_hex(4)}.partial")
    work.mkdir()
    try:
        with _locked(work):
            yield work
            if not _appear(work, target) and not _exchange(work, target):
                _rename_twice(work, target)
    finally:
        # Complete: what stood there before. After an error: what was written.
        shutil.rmtree(work, ignore_errors=True)


def _appear(work: Path, target: Path) -> bool:
    """Give a folder its name; return False if another folder has it."""
    if target.exists():
        return False
    try:
        work.rename(target)
    except OSError as error:  # it has come meanwhile
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
        return False
    return True


def _exchange(one: Path, other: Path) -> bool:
    """Exchange two names in one step; return False where the system does not know how."""
    try:
        function = ctypes.CDLL(None, use_errno=True).renameat2
    except (OSError, AttributeError, TypeError):
        return False
    names = os.fsencode(one), os.fsencode(other)
    if function(_AT_FDCWD, names[0], _AT_FDCWD, names[1], _RENAME_EXCHANGE) == 0:
        return True
    number = ctypes.get_errno()
    if number in _UNKNOWN:
        return False
    raise OSError(number, os.strerror(number), str(other))


def _rename_twice(work: Path, target: Path) -> None:
    """Put a folder in the place of another one where that takes two steps; `_clean` finishes what a kill divides."""
    old = work.with_suffix(".old")
    target.rename(old)
    try:
        work.rename(target)
    except OSError:
        old.rename(target)
        raise
    shutil.rmtree(old, ignore_errors=True)


def _clean(target: Path) -> None:
    """Remove what killed processes left beside a folder, and bring back a folder that has lost its name."""
    pattern = re.compile(rf"\.{re.escape(target.name)}\.(\d+)\.([0-9a-f]+\.)?(partial|old)")
    for place in sorted(target.parent.iterdir()):
        match = pattern.fullmatch(place.name)
        if match is None or _alive(int(match[1])) or place.is_symlink() or not place.is_dir():
            continue
        with _locked(place) as free:
            if not free:  # by a process of another machine
                continue
            if match[3] == "old" and not target.exists():
                place.rename(target)
            else:
                shutil.rmtree(place, ignore_errors=True)


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (OSError, OverflowError):
        return True
    return True


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[bool]:
    """Lock a folder, where the system can; yield False if another process has."""
    try:
        import fcntl
    except ImportError:
        yield True
        return
    number = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
            free = True
        except BlockingIOError:
            free = False
        except OSError:  # a file system without locks
            free = True
        yield free
    finally:
        os.close(number)

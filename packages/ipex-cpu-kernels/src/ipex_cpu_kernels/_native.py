# SPDX-License-Identifier: Apache-2.0
"""Typed face of the C functions of ``libipex_cpu.so``."""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path

import torch


def _find_library() -> Path:
    # An editable installation has two places: the sources and the built files.
    folders = sys.modules[__package__].__path__
    places = [Path(place) / "lib" / "libipex_cpu.so" for place in folders]
    return next((place for place in places if place.is_file()), places[0])


def _check_files(library: Path) -> None:
    """Check that the libraries are there and whole, before the first of them is loaded.

    Loading registers the kernels with torch for good. A module of an ISA level that turns out to be damaged after
    that would make each op raise, where it should run its reference.

    Raises:
        ImportError: A file is missing or damaged.
    """
    modules = sorted(library.parent.glob(f"{library.stem}_*.so"))
    advice = "pip install --force-reinstall ipex-cpu-kernels"
    if not library.is_file() or not modules:
        what = f"{library.stem}_<level>.so" if library.is_file() else library.name
        raise ImportError(
            f"ipex-cpu-kernels needs {what} in {library.parent}, which is missing: {advice}"
        )
    for path in (library, *modules):
        if not _is_whole(path):
            raise ImportError(
                f"{path} must be a whole library, got a damaged one of {path.stat().st_size} bytes: {advice}"
            )


def _is_whole(path: Path) -> bool:
    with path.open("rb") as file:
        header = file.read(64)
    if len(header) < 64 or header[:4] != b"\x7fELF":
        return False
    # The section headers are the last thing in the file.
    offset = int.from_bytes(header[40:48], "little")
    size, count = (int.from_bytes(header[i : i + 2], "little") for i in (58, 60))
    return path.stat().st_size >= offset + size * count


class NativeError(RuntimeError):
    """A native function reported an error."""


class Native:
    """The loaded library."""

    def __init__(self, path: Path) -> None:
        _check_files(path)
        # Not torch.ops.load_library alone: it gives no handle. Both name the same file, so it is loaded once.
        torch.ops.load_library(str(path))
        self._library = ctypes.CDLL(str(path))
        self._level = ""
        for name in ("levels_built", "levels_available", "level", "ops", "features"):
            self._declare(name, [])
        for name in ("why_unavailable", "set_level", "kernels"):
            self._declare(name, [ctypes.c_char_p])
        self._declare("define", [ctypes.c_char_p, ctypes.c_char_p])

    def _declare(self, name: str, arguments: list[type]) -> None:
        function = getattr(self._library, f"ipex_cpu_{name}")
        function.restype = ctypes.c_char_p
        function.argtypes = arguments

    def _text(self, name: str, *arguments: str) -> str:
        raw: bytes = getattr(self._library, f"ipex_cpu_{name}")(*(a.encode() for a in arguments))
        text = raw.decode()
        if text.startswith("!"):
            raise NativeError(text[1:])
        return text

    def kernel_api(self) -> int:
        """Return the contract version the library was built for."""
        return int(self._library.ipex_cpu_kernel_api())

    def levels_built(self) -> tuple[str, ...]:
        """Return the levels in this build, lowest first."""
        return tuple(self._text("levels_built").split(","))

    def levels_available(self) -> tuple[str, ...]:
        """Return the levels this machine can run, lowest first."""
        return tuple(self._text("levels_available").split(","))

    def level(self) -> str:
        """Return the active level."""
        if not self._level:  # asked at each call of some layers
            self._level = self._text("level")
        return self._level

    def set_level(self, level: str) -> None:
        """Make ``level`` the active one; "" means the best. Raises `NativeError` if that is impossible."""
        self._level = ""
        self._text("set_level", level)

    def why_unavailable(self, level: str) -> str:
        """Return why a level cannot be used here, or ""."""
        return self._text("why_unavailable", level)

    def ops(self) -> tuple[str, ...]:
        """Return the names of the ops with kernels."""
        return tuple(sorted(set(self._text("ops").split(","))))

    def features(self) -> dict[str, str]:
        """Return each CPU feature with the reason why it cannot be used, "" if it can."""
        found = {}
        for line in self._text("features").splitlines():
            name, _, reason = line.removeprefix("-").partition(": ")
            found[name] = reason
        return found

    def kernels(self, op: str) -> list[tuple[str, str, tuple[str, ...]]]:
        """Return ``(symbol, current level, available levels)`` of an op's kernels."""
        rows = [line.split(" ") for line in self._text("kernels", op).splitlines()]
        return [(row[1], row[2], tuple(row[3].split(","))) for row in rows]

    def define(self, library: str, name: str) -> bool:
        """Register an op of another library with torch, and return whether it is known."""
        return bool(self._text("define", library, name))

    def enable_huge_pages(self, enabled: bool) -> None:
        """Let the arena of packed weights use huge pages or not."""
        self._library.ipex_cpu_enable_huge_pages(int(enabled))

    def arena_bytes(self) -> int:
        """Return the bytes the arena of packed weights has mapped."""
        self._library.ipex_cpu_arena_bytes.restype = ctypes.c_int64
        return int(self._library.ipex_cpu_arena_bytes())


def load() -> Native:
    """Load the library; a second call returns the same one."""
    global _loaded
    if _loaded is None:
        _loaded = Native(_find_library())
    return _loaded


_loaded: Native | None = None

# SPDX-License-Identifier: Apache-2.0
"""Which headers of the CPU kernels may include which: the folders of ``csrc/include/ipex`` are a rule, not a habit.

``ipex/*.h`` is installed for C and C++ programs. ``ipex/kernel`` is for what is compiled once per ISA level, and has no
torch. ``ipex/glue`` is for what is compiled once, with the stable ABI of torch.
"""

from __future__ import annotations

import functools
import re
from pathlib import Path

import pytest

CSRC = Path(__file__).resolve().parent.parent / "packages/ipex-cpu-kernels/csrc"
HEADERS = CSRC / "include" / "ipex"
#: As in CMakeLists.txt.
FOLDERS = (CSRC / "include", CSRC / "ops", CSRC)


@functools.cache
def includes(path: Path) -> frozenset[Path | str]:
    """Return what a file includes, and what that includes: files of ours, and ``torch`` for torch's."""
    text = path.read_text(encoding="utf-8")
    # What a header includes only where it exists, it does not need.
    text = re.sub(r"^#if __has_include.*?^#endif", "", text, flags=re.MULTILINE | re.DOTALL)
    found: set[Path | str] = {"torch"} if re.search(r"#include <(torch|ATen|c10)/", text) else set()
    for name in re.findall(r'^ *# *include "([^"]+)"', text, re.MULTILINE):
        places = [folder / name for folder in (path.parent, *FOLDERS)]
        header = next((place.resolve() for place in places if place.exists()), None)
        if header is not None and header != path:  # generated: isa_levels.inc
            found |= {header, *includes(header)}
    return frozenset(found)


def folder(path: Path | str) -> str:
    """Return the group of a header."""
    if isinstance(path, str):
        return path
    if not path.is_relative_to(HEADERS):
        return "other"
    return path.relative_to(HEADERS).parts[0] if path.parent != HEADERS else "installed"


def of(group: str) -> list[Path]:
    """Return the headers of a group."""
    return [path for path in sorted(HEADERS.rglob("*.h")) if folder(path) == group]


@pytest.mark.parametrize("path", of("installed"), ids=lambda path: path.stem)
def test_installed_headers_include_each_other_only(path: Path) -> None:
    assert {folder(other) for other in includes(path)} <= {"installed"}


@pytest.mark.parametrize("path", of("kernel"), ids=lambda path: path.stem)
def test_headers_of_kernels_need_no_torch(path: Path) -> None:
    assert {folder(other) for other in includes(path)} <= {"installed", "kernel"}


@pytest.mark.parametrize("path", of("glue"), ids=lambda path: path.stem)
def test_headers_of_the_glue_need_torch(path: Path) -> None:
    assert "torch" in includes(path), "without torch it belongs to ipex/kernel"


def test_sources_keep_apart() -> None:
    """A kernel reaches no torch. The glue reaches no vectors: they are compiled with the flags of a level."""
    kernels, glue = sorted(CSRC.glob("ops/*/*.dispatch.cpp")), sorted(CSRC.glob("ops/*/*.op.cpp"))
    assert len(kernels) > 30 and len(glue) > 30
    assert [
        path.name for path in kernels if {"torch", "glue"} & set(map(folder, includes(path)))
    ] == []
    vectors = HEADERS / "kernel" / "isa.h"
    assert [path.name for path in glue if vectors in includes(path)] == []


def test_a_scratch_area_belongs_to_one_op() -> None:
    """Two ops with one area could run inside each other and overwrite it; only `kTiles` is for all products."""
    text = (CSRC / "runtime" / "scratch.h").read_text(encoding="utf-8")
    areas = re.findall(r"^  (k\w+),", text[text.index("enum class Area") :], re.MULTILINE)
    owners: dict[str, set[str]] = {area: set() for area in areas}
    for path in sorted(CSRC.rglob("*.*")):
        for area in re.findall(r"\bScratch<([^>]*)>::get", path.read_text(encoding="utf-8")):
            assert area.startswith("Area::k"), f"{path.name}: Scratch<{area}>"
            owners[area.removeprefix("Area::")].add(path.parent.name)
    assert owners.pop("kTiles") == {"glue"}  # gemm_scratch()
    assert {area: names for area, names in owners.items() if len(names) != 1} == {}

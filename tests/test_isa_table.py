# SPDX-License-Identifier: Apache-2.0
"""One list of ISA levels: what is generated from it, and the pages that show it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import generate_isa

ROOT = Path(__file__).resolve().parent.parent
#: Page -> heading of its table of levels.
PAGES = {"hardware.md": "| Level | Needs |", "architecture.md": "| Level | Adds |"}


def test_the_python_side_is_up_to_date() -> None:
    stale = "the table of ISA levels has changed: python tools/generate_isa.py"
    assert generate_isa.FILE.read_text(encoding="utf-8") == generate_isa.text(), stale


def test_a_stale_file_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(generate_isa, "ROOT", tmp_path)
    monkeypatch.setattr(generate_isa, "FILE", tmp_path / "isa_levels.py")
    assert generate_isa.main(["--check"]) == 1
    assert generate_isa.main([]) == 0
    assert generate_isa.main(["--check"]) == 0
    with generate_isa.FILE.open("a") as file:
        file.write("#\n")
    assert generate_isa.main(["--check"]) == 1
    told = "isa_levels.py is out of date: python tools/generate_isa.py"
    assert capsys.readouterr().err.count(told) == 2


@pytest.mark.parametrize(
    ("table", "message"),
    [("", "expected rows such as"), ('"a|0|"\n"b|kB|-mb"', 'needs kB, .*add a row such as "kB|')],
)
def test_a_table_that_lacks_something(table: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        generate_isa.levels(table)


def test_the_bits_are_those_of_the_library() -> None:
    header = ROOT / "packages/ipex-cpu-kernels/csrc/runtime/cpu_features.h"
    known = re.findall(r"^  (k\w+) = 1u << \d", header.read_text(encoding="utf-8"), re.MULTILINE)
    used = {bit for level in generate_isa.levels().values() for bit in level.bits}
    assert known and set(known) == used


@pytest.mark.parametrize("page", PAGES)
def test_pages_show_the_table(page: str) -> None:
    """Each level has a row, in the order of the table, which names what no lower row has named."""
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    rows = text[text.index(PAGES[page]) :].split("\n\n")[0].splitlines()[2:]
    shown = [row.split("|")[1].strip(" `") for row in rows]
    assert shown == [*generate_isa.levels()]
    named: set[str] = set()
    for row, level in zip(rows, generate_isa.levels().values(), strict=True):
        words = set(re.findall(r"\w+", row.split("|")[2].lower()))
        for feature in {f for names in level.bits.values() for f in names} - named:
            # avx512_bf16 is written "BF16" below rows with AVX-512, and avx512bw "BW".
            short = (
                feature.removeprefix("avx512").removeprefix("amx").removeprefix("avx").strip("_")
            )
            assert {feature, short} & words, f"{page}: the row of {level.name} lacks {feature}"
            named.add(feature)


def test_the_readme_of_the_kernels_names_all_levels() -> None:
    text = (ROOT / "packages/ipex-cpu-kernels/README.md").read_text(encoding="utf-8")
    assert [level for level in generate_isa.levels() if f"`{level}`" not in text] == []

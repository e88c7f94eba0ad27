# SPDX-License-Identifier: Apache-2.0
"""The check of licence lines passes here and finds what it should."""

from __future__ import annotations

from pathlib import Path

import check_spdx

ROOT = Path(__file__).resolve().parent.parent


def test_this_tree() -> None:
    assert check_spdx.missing(ROOT) == []


def test_finds_a_file_without_the_line(tmp_path: Path) -> None:
    (tmp_path / "good.py").write_text(f"# {check_spdx.LINE}\n")
    (tmp_path / "script.py").write_text(f"#!/usr/bin/env python3\n# {check_spdx.LINE}\n")
    (tmp_path / "empty.py").write_text("")
    (tmp_path / "bad.cpp").write_text("int main() {}\n")
    (tmp_path / "build").mkdir()
    (tmp_path / "build" / "made.cpp").write_text("int x;\n")
    assert check_spdx.missing(tmp_path) == ["bad.cpp"]

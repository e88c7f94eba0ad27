# SPDX-License-Identifier: Apache-2.0
"""The list of slow tests: each of its lines is about a test that exists, and what it names is left out."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
LINES = [
    line.split()
    for line in (ROOT / "tests/data/slow_tests.txt").read_text("utf-8").splitlines()
    if line and not line.startswith("#")
]


@pytest.mark.parametrize("line", LINES, ids=lambda line: line[0].partition("tests/")[2])
def test_each_line_names_a_test(line: list[str]) -> None:
    file, _, test = line[0].partition("::")
    name, _, case = test.partition("[")
    assert re.search(rf"^def {name}\(", (ROOT / file).read_text("utf-8"), re.MULTILINE)
    assert not (case and line[1:]), "a case has no cases"


@pytest.mark.parametrize(("markers", "found"), [("slow", 2), ("not slow", 1), ("", 3)])
def test_cases_that_are_named_stay(tmp_path: Path, markers: str, found: int) -> None:
    """In a checkout of one test with three cases."""
    (tmp_path / "conftest.py").write_text((ROOT / "conftest.py").read_text("utf-8"))
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = slow\n")
    (tmp_path / "tests/data").mkdir(parents=True)
    (tmp_path / "tests/data/slow_tests.txt").write_text(
        "# Long ones.\ntests/test_a.py::test_a  two\n"
    )
    (tmp_path / "tests/test_a.py").write_text(
        "import pytest\n@pytest.mark.parametrize('n', ['one', 'two', 'three'])\ndef test_a(n): pass\n"
    )
    command = (sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", markers)
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{found} passed" in done.stdout

# SPDX-License-Identifier: Apache-2.0
"""The vector layer against double precision: csrc/tests/vec_math_test.cpp, compiled with the flags of each level."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
COMPILER = os.environ.get("CXX") or shutil.which("g++")


def flags(level: str) -> list[str]:
    """Return a level's compiler flags from the one file that lists them."""
    text = (ROOT / "cmake" / "IsaLevels.cmake").read_text()
    variables = {}
    for name, value in re.findall(r'^set\((_IPEX_\w+) "(.*)"\)', text, re.MULTILINE):
        variables[name] = re.sub(r"\$\{(\w+)\}", lambda m: variables[m[1]], value)
    row = re.search(rf'^\s*"{level}\|[^|]*\|(.*)"', text, re.MULTILINE)
    assert row is not None, level
    return re.sub(r"\$\{(\w+)\}", lambda m: variables[m[1]], row[1]).split()


@pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")
def test_vector_layer(level, tmp_path):
    program = tmp_path / "vec_math_test"
    subprocess.run(
        [
            COMPILER,
            "-std=c++20",
            "-O2",
            "-Wall",
            "-Wextra",
            "-Werror",
            *flags(level),
            f"-I{ROOT / 'csrc' / 'include'}",
            str(ROOT / "csrc" / "tests" / "vec_math_test.cpp"),
            "-o",
            str(program),
        ],
        check=True,
        timeout=300,
    )
    result = subprocess.run(
        [str(program)], capture_output=True, text=True, check=False, timeout=300
    )
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-2000:]

# SPDX-License-Identifier: Apache-2.0
"""Threads and memory of a program run: files in csrc/tests, plain and with the thread sanitizer."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
COMPILER = os.environ.get("CXX") or shutil.which("g++")


@pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")
@pytest.mark.parametrize("options", [(), ("-fsanitize=thread",)], ids=["plain", "thread-sanitizer"])
@pytest.mark.parametrize("name", ["team", "block_cache"])
def test_runtime(name, options, tmp_path):
    program = tmp_path / f"{name}_test"
    csrc = ROOT / "csrc"
    built = subprocess.run(
        [
            *(COMPILER, "-std=c++20", "-O1", "-g", "-Wall", "-Wextra", "-Werror", "-pthread"),
            *options,
            f"-I{csrc}",
            str(csrc / "runtime" / f"{name}.cpp"),
            str(csrc / "tests" / f"{name}_test.cpp"),
            *("-o", str(program)),
        ],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    if options and re.search("cannot find .*tsan", built.stderr):  # the linker, not a warning
        pytest.skip("the compiler has no thread sanitizer")
    assert built.returncode == 0, built.stderr[-2000:]
    # The sanitizer cannot map its memory where addresses are random over many bits.
    fixed = ["setarch", "-R"] if options and shutil.which("setarch") else []
    done = subprocess.run(
        [*fixed, str(program)],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
        env={**os.environ, "TSAN_OPTIONS": "allocator_may_return_null=1"},  # as it does without
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]

# SPDX-License-Identifier: Apache-2.0
"""What the tests of the launcher share: running it, and a script that tells where it runs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

COMMAND = [sys.executable, "-m", "ipex_runtime.launch"]
SECONDS = 60
CPUS = sorted(os.sched_getaffinity(0))
TWO = pytest.mark.skipif(len(CPUS) < 2, reason="two instances need two CPUs")

#: One write, so that the lines of two instances cannot mix.
SHOW = """
import os, sys
found = sorted(os.sched_getaffinity(0)), os.environ["OMP_NUM_THREADS"], sys.argv[1:], __name__
sys.stdout.write(" ".join(map(str, found)) + "\\n")
"""


def write(folder: Path, text: str, name: str = "script.py") -> str:
    """Write a script and return its path."""
    path = folder / name
    path.write_text(text)
    return str(path)


def launch(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the launcher to its end, without the OpenMP settings of this process."""
    base = {k: v for k, v in os.environ.items() if not k.startswith(("OMP_", "KMP_"))}
    return subprocess.run(
        [*COMMAND, *arguments],
        capture_output=True,
        text=True,
        timeout=SECONDS,
        env=base | environment,
        check=False,
    )

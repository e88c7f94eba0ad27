# SPDX-License-Identifier: Apache-2.0
"""A short run of tests/fuzz: the corpus, and some changed inputs that are the same at each run."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

FUZZ = Path(__file__).parent / "fuzz" / "fuzz.py"


def test_changed_inputs_end_in_documented_errors() -> None:
    command = [sys.executable, str(FUZZ), "--count", "40", "--seed", "1"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]


def test_a_finding_is_found(tmp_path: Path) -> None:
    """With a target that raises, one that ends the process, and one that never returns, at known inputs."""
    code = f"""
import collections, os, sys, types
from pathlib import Path

# In place of what takes seconds to import, in each of the processes.
targets = sys.modules["targets"] = types.ModuleType("targets")
targets.Target = collections.namedtuple("Target", "run change seeds needs", defaults=[()])
targets.CORPUS = Path({str(tmp_path)!r}) / "corpus"
torch = sys.modules["torch"] = types.ModuleType("torch")
torch.set_num_threads = int

sys.path.insert(0, {str(FUZZ.parent)!r})
import fuzz

def ends(data, folder):
    os._exit(3)

def fails(data, folder):
    raise IndexError("a mistake")

def hangs(data, folder):
    if data == b"x":
        sum(range(10**15))  # as native code does, it asks for no signals

def other(rng, data):
    return b"other"

def same(rng, data):
    return data

def one():
    return [b"x"]

targets.TARGETS = {{
    "a": targets.Target(fails, same, one),
    "b": targets.Target(ends, same, one),
    "c": targets.Target(hangs, other, one),
}}
fuzz.SECONDS = 4
fuzz.__file__ = __file__  # what it starts is this file
fuzz.REPORTS = Path({str(tmp_path)!r}) / "found"
sys.exit(fuzz.main())
"""
    script = tmp_path / "script.py"
    script.write_text(code)
    done = subprocess.run(
        [sys.executable, str(script), "--count", "1"],
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert done.returncode == 1, done.stderr
    # One seed, one changed input; the changed one of the last target is none.
    assert done.stdout.count("\nIndexError: a mistake") == 2
    assert done.stdout.count("the process ended with 3") == 2
    assert done.stdout.count("the process ended with 1: Timeout") == 1
    assert len(list((tmp_path / "found").iterdir())) == 5

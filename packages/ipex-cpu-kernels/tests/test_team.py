# SPDX-License-Identifier: Apache-2.0
"""Threads and memory of a program run: files in csrc/tests, plain and with the thread sanitizer."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
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


#: Eight threads on one CPU: the last of them comes late to a loop, so that helpers take the places of torch's.
CROWDED = """
import os, threading, time
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
import torch
from ipex_core.program import ProgramBuilder

def threads():
    return len(os.listdir("/proc/self/task"))

def program(layers):
    b = ProgramBuilder()
    x, weight = b.input("x"), b.constant(packed)
    y = x
    for _ in range(layers):
        y = b.call("add", y, b.call("linear", b.call("rms_norm", y, None), weight, 1024))
    return b.build([y])

packed = torch.ops.ipex.pack_linear_weight(torch.randn(1024, 1024) / 32)
x = torch.randn(256, 1024)
step, steps = program(1), program(6)
torch.set_num_threads(1)
want = step.run(x)[0], steps.run(x)[0]
torch.set_num_threads(8)

def run(count):
    for _ in range(count):
        assert torch.equal(step.run(x)[0], want[0]) and torch.equal(steps.run(x)[0], want[1])

torch.ones(1 << 22).add_(1)
before = threads()  # with torch's
run(3)
assert threads() == before + 7, (before, threads())
{rest}
print("fine")
"""

AFTER = {
    "threads that end": """
for _ in range(2):
    callers = [threading.Thread(target=run, args=(3,)) for _ in range(2)]
    [caller.start() for caller in callers]
    [caller.join() for caller in callers]
for _ in range(1000):  # helpers end after their caller
    if threads() <= before + 7:
        break
    time.sleep(0.01)
assert threads() <= before + 7, (before, threads())
run(1)
""",
    "another number": """
torch.set_num_threads(3)
run(3)
torch.set_num_threads(8)
run(3)
""",
    "fork": """
child = os.fork()
if child == 0:
    run(1)
    caller = threading.Thread(target=run, args=(2,))
    caller.start()
    caller.join()
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
run(1)
""",
}


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="the system has no affinity")
@pytest.mark.parametrize("after", AFTER)
def test_helpers_take_the_places_of_threads_that_are_late(after):
    script = CROWDED.replace("{rest}", AFTER[after])
    environ = {k: v for k, v in os.environ.items() if not k.startswith(("OMP_", "GOMP_"))}
    command = [sys.executable, "-c", script]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=300, env=environ
    )
    assert (done.returncode, done.stdout) == (0, "fine\n"), done.stderr[-3000:]

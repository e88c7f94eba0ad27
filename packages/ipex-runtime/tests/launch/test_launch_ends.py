# SPDX-License-Identifier: Apache-2.0
"""How instances of the launcher end: by themselves, by signals, with the launcher, with each other."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from launched import COMMAND, CPUS, SECONDS, TWO, launch, write


@pytest.mark.parametrize(
    ("end", "code", "message"),
    [
        ("sys.exit(5)", 5, "ended with exit code 5"),
        ("1 / 0", 1, "ended with exit code 1"),
        ("os.kill(os.getpid(), signal.SIGKILL)", 137, "killed by SIGKILL: memory may have run out"),
        ("os.kill(os.getpid(), signal.SIGSEGV)", 139, "killed by SIGSEGV: a crash in native code"),
        ("os.kill(os.getpid(), signal.SIGINT)", 130, "killed by SIGINT"),
    ],
)
def test_the_end_of_an_instance_is_told(end, code, message, tmp_path):
    text = f"import os, resource, signal, sys\nresource.setrlimit(resource.RLIMIT_CORE, (0, 0))\n{end}\n"
    found = launch(write(tmp_path, text))
    assert found.returncode == code
    assert f"instance 0 {'was ' if 'killed' in message else ''}{message}" in found.stderr


@TWO
def test_a_failure_stops_the_others_and_leaves_nothing(tmp_path):
    text = """
import os, subprocess, sys, time
worker = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
open(sys.argv[1] + os.environ["OMP_NUM_THREADS"] + "_" + str(os.getpid()), "w").write(str(worker.pid))
if min(os.sched_getaffinity(0)) == int(sys.argv[2]):
    while len(os.listdir(sys.argv[1])) < 2:
        time.sleep(0.05)
    sys.exit(3)
time.sleep(600)
"""
    marks = tmp_path / "marks"
    marks.mkdir()
    start = time.monotonic()
    found = launch("--cores-list", f"{CPUS[0]},{CPUS[1]}", "--use-logical-cores", "--ninstances", "2",
                   write(tmp_path, text), f"{marks}/", str(CPUS[0]))  # fmt: skip
    assert found.returncode == 3
    assert "instance 0 ended with exit code 3; stopping 1 other" in found.stderr
    assert time.monotonic() - start < SECONDS
    pids = [int(p.read_text()) for p in marks.iterdir()]
    assert len(pids) == 2
    for pid in pids:
        assert gone(pid)


def gone(pid: int) -> bool:
    """Return whether a process ends within ten seconds; one that nobody has waited for counts as ended."""
    end = time.monotonic() + 10
    while time.monotonic() < end:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return True
        if state == "Z":
            return True
        time.sleep(0.05)
    return False


def start(*arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*COMMAND, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


@pytest.mark.parametrize(
    ("body", "number", "code", "told"),
    [
        ("pass", signal.SIGTERM, 143, "ended by SIGTERM, as asked"),
        ("pass", signal.SIGINT, 130, "ended by SIGINT, as asked"),
        ("signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))", signal.SIGTERM, 7, "code 7"),
        ("signal.signal(signal.SIGUSR1, lambda *_: sys.exit(0))", signal.SIGUSR1, 0, ""),
        ("signal.signal(signal.SIGTERM, signal.SIG_IGN)", signal.SIGTERM, 137, "SIGKILL"),
    ],
)
def test_signals_reach_the_instances(body, number, code, told, tmp_path):
    text = f"import os, signal, sys, time\n{body}\nprint('ready', flush=True)\ntime.sleep(600)\n"
    process = start("--stop-timeout", "1", write(tmp_path, text))
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.send_signal(number)
    _, errors = process.communicate(timeout=SECONDS)
    assert process.returncode == code, errors
    assert told in errors
    assert "Traceback" not in errors or "KeyboardInterrupt" in errors


def test_a_killed_launcher_takes_its_instances_along(tmp_path):
    text = "import os, time\nprint(os.getpid(), flush=True)\ntime.sleep(600)\n"
    process = start(write(tmp_path, text))
    assert process.stdout is not None
    pid = int(process.stdout.readline())
    process.kill()
    process.communicate(timeout=SECONDS)
    assert gone(pid)


def test_a_background_process_does_not_keep_the_launcher_waiting(tmp_path):
    text = "import subprocess, sys\nsubprocess.Popen([sys.executable, '-c', 'import time; time.sleep(8)'])\n"
    begin = time.monotonic()
    found = subprocess.Popen(
        [*COMMAND, "--log-dir", str(tmp_path / "logs"), write(tmp_path, text)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    assert found.wait(timeout=SECONDS) == 0
    assert time.monotonic() - begin < 7


def test_failures_of_starting_one_end_the_others(tmp_path):
    from ipex_runtime.launch._instance import Instance
    from ipex_runtime.launch._supervise import run

    first = Instance(0, "first", [sys.executable, "-c", "import time; time.sleep(600)"], os.environ)
    second = Instance(1, "second", [str(tmp_path / "nothing")], os.environ)
    with pytest.raises(OSError, match="nothing"):
        run([first, second])
    assert first.returncode == -signal.SIGKILL

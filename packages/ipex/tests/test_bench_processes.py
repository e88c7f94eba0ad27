# SPDX-License-Identifier: Apache-2.0
"""The processes of `ipex bench` on several engines: one that hangs or dies, a run that is ended."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from bench_runs import run, task_in

from ipex_bench import worker
from ipex_bench.process import EngineError, Worker
from ipex_bench.result import Run
from ipex_bench.run import Plan, _rounds
from ipex_bench.run import run as bench

pytest.importorskip("numpy")


def test_a_process_that_dies_or_hangs_is_an_error_with_a_reason(tmp_path):
    task = task_in(tmp_path, "ops", "linear")
    with Worker(task, "stock_eager", timeout=30) as process:
        process._process.kill()
        with pytest.raises(EngineError, match="ended with"):
            process.ask(do="make")
        with pytest.raises(EngineError, match="was ended"):
            process.ask(do="make")
    with Worker(task, "stock_eager") as process:
        with pytest.raises(EngineError, match=r"no answer within 0\.01 s"):
            process.ask(do="make", timeout=0.01)
        assert process._process.returncode == -signal.SIGKILL  # it takes no time from the others


#: An interpreter whose engine starts a process of its own and then hangs or dies, as the last argument says.
FAULTY = """#!{python}
import json, os, subprocess, sys, time
{first}
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], stdout=2)
open({pids!r}, "a").write(f"{{os.getpid()}} {{child.pid}} ")
answers = {{"version": "1", "precision": "float32", "note": "", "prepare_s": 0, "exactness": 1}}
print("Welcome to this environment", flush=True)
for line in sys.stdin:
    request = json.loads(line)
    if request["do"] == {when!r}:
        {what}
    os.write(1, b"\\xff noise, 1, [2]\\n{{}}\\n{{\\"id\\": 0}}\\n3\\n")
    print(json.dumps({{**answers, "id": request["id"]}}), flush=True)
"""


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def stand_in(folder: Path, name: str, when: str, what: str, first: str = "") -> Path:
    """Write a program that does this when it is asked for that; its processes are in a file beside it."""
    python = folder / name
    pids = str(python.with_suffix(".pids"))
    text = FAULTY.format(python=sys.executable, pids=pids, when=when, what=what, first=first)
    python.write_text(text)
    python.chmod(0o755)
    return python


def pids_of(folder: Path) -> list[int]:
    return [int(pid) for file in folder.glob("*.pids") for pid in file.read_text().split()]


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_engines_that_hang_or_die_leave_the_others_alone(tmp_path, monkeypatch):
    faults = {
        "torchao": ("prepare", "time.sleep(600)", "failed: no answer within 1 s"),
        "openvino": ("time", "time.sleep(600)", "failed: no answer within 2 s"),
        "onnxruntime": (
            "time",
            "os.dup2(2, 1); time.sleep(600)",
            "failed: its process stopped answering",
        ),
        "ipex28": (
            "prepare",
            "os.write(1, b'{' * 100_000); time.sleep(600)",
            "failed: no answer within 1 s",
        ),
        "zentorch": ("time", "sys.exit(3)", "failed: its process ended with exit status 3"),
    }
    envs = []
    for engine, (when, what, _) in faults.items():
        envs += ["--env", f"{engine}={stand_in(tmp_path, engine, when, what)}"]
    ask = Worker.ask

    def shorter(self, *, timeout=None, **request):
        # The baseline needs its seconds to load; who hangs shall not have as many.
        hangs = self.engine in {"torchao", "ipex28"} and request["do"] == "prepare"
        return ask(self, timeout=1 if hangs else timeout, **request)

    monkeypatch.setattr(Worker, "ask", shorter)
    file = tmp_path / "run.json"
    done = run(
        *("ops", "softmax", "--peers", "--size", "tiny", "--seconds", "0.001", "--rounds", "2"),
        *("--dtype", "fp32", "--threads", "1", "--turn-timeout", "2", "--json", file),
        *("--engines", ",".join(faults), *envs),
    )
    assert done.exit_code == 0, done.output  # 1 is for engines of ipex
    found = Run.read(file)
    assert [row.engine for row in found.rows] == ["stock_eager"]
    reasons = {one.engine: one.reason for one in found.absent}
    assert reasons == {engine: reason for engine, (*_, reason) in faults.items()}
    assert len(pids_of(tmp_path)) == 2 * len(faults)
    assert not any(map(alive, pids_of(tmp_path)))


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_run_that_is_ended_leaves_no_process(number, tmp_path):
    # Its engine ends with it as the real ones do.
    here = str(Path(worker.__file__).parent)
    first = f"sys.path.insert(0, {here!r}); import worker; worker._end_with_parent()"
    python = stand_in(tmp_path, "engine", "prepare", "time.sleep(600)", first)
    pids = python.with_suffix(".pids")
    command = [
        *(sys.executable, "-m", "ipex", "bench", "ops", "softmax", "--peers", "--size", "tiny"),
        *("--engines", "openvino", "--env", f"openvino={python}", "--dtype", "fp32"),
        *("--threads", "1"),
    ]
    env = {**os.environ, "TMPDIR": str(tmp_path)}
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, env=env)
    try:
        deadline = time.monotonic() + 120
        while not pids.exists() and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.05)
        workers = pids_of(tmp_path)
        process.send_signal(number)
        assert process.wait(timeout=30) != 0
        # Of a killed run, what an engine has started may go on: only the engine itself is known to the system.
        watched = workers[:1] if number == signal.SIGKILL else workers
        while any(map(alive, watched)) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not any(map(alive, watched))
        if number != signal.SIGKILL:
            assert not list(tmp_path.glob("ipex-bench-*"))  # weights
    finally:
        process.kill()
        for pid in filter(alive, pids_of(tmp_path)):
            os.kill(pid, signal.SIGKILL)


def plan(**changed):
    given = {
        **{"kind": "ops", "names": ["linear"], "engines": ["stock_eager", "ipex_eager"]},
        **{"dtype": "float32", "rest": "float32", "size": "tiny", "threads": 1, "seconds": 60.0},
        **{"turn": 0.0, "rounds": 50, "timeout": 300.0, "turn_timeout": 60.0, "pythons": {}},
    }
    return Plan(**{**given, **changed})


def test_cases_that_the_time_does_not_reach_are_listed():
    found = Run("ops", "float32", {})
    bench(plan(until=time.monotonic() - 1), found, print)
    assert not found.rows
    reasons = {(one.engine, one.reason) for one in found.absent}
    assert reasons == {(e, "not measured: the time was up") for e in ("stock_eager", "ipex_eager")}


def test_cases_share_the_time_that_is_left():
    begin = time.monotonic()
    whole = plan(until=begin + 100)
    share = whole.share(4)
    assert 24 < share.until - begin < 26
    assert 60 < whole.to_prepare() <= 70 and 15 < share.to_prepare() < 18
    assert 60 < whole.to_prepare(2) <= 70 and 15 < whole.to_prepare(8) < 18  # two at a time
    assert plan().share(4).until == plan().until and plan().to_prepare() == 300
    assert plan(timeout=5, until=begin + 100).to_prepare() == 5


def test_rounds_end_with_the_time():
    class Answers:
        calls = 0

        def ask(self, **request):
            self.calls += 1
            return {"times": {"call": 1.0}}

    workers = {"limits": Answers(), "stock_eager": Answers()}
    times = _rounds(plan(until=time.monotonic() - 1), workers, {"stock_eager": {}})
    assert [len(one) for one in times.values()] == [2, 2]  # a ratio has two pairs at least
    times = _rounds(plan(until=time.monotonic() + 100, seconds=0.0), workers, {"stock_eager": {}})
    assert [len(one) for one in times.values()] == [50, 50]


def test_time_of_single_ops(monkeypatch):
    monkeypatch.setattr("ipex_bench.commands.bench.deadline", lambda minutes: time.monotonic())
    options = ("--size", "tiny", "--dtype", "fp32", "--minutes", "1")
    done = run("ops", "softmax", "rms_norm", *options)
    assert done.exit_code == 0 and "not measured: 1 shapes" in done.output, done.output
    done = run("ops", "softmax", "--minutes", "0")
    assert done.exit_code == 2 and "--minutes" in done.output

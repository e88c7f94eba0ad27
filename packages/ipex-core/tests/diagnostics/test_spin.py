# SPDX-License-Identifier: Apache-2.0
"""Programs that wait for CPU time are noticed, and a server then starts with a short spin."""

from __future__ import annotations

import dataclasses
import os
import sys

import pytest

from ipex_core.diagnostics import doctor as texts
from ipex_core.diagnostics.doctor import doctor
from ipex_core.kernels import machine
from ipex_core.kernels import machine as spin


def write(root, **files):
    for name, text in files.items():
        path = root / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


CPUS = "cpu  1 2\ncpu0 1 2\ncpu1 1 2\n"


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, None),
        ({"proc__loadavg": "2.00 1.0 1.0 3/80 9\n", "proc__stat": CPUS}, None),
        ({"proc__loadavg": "3.50 1.0 1.0 3/80 9\n", "proc__stat": CPUS}, "load is 3.5 on 2 CPUs"),
        ({"proc__pressure__cpu": "some avg10=24.9 avg60=80\n"}, None),
        ({"proc__pressure__cpu": "some avg10=61.00 avg60=0\n"}, "61 % of the last 10 s"),
    ],
)
def test_crowded(tmp_path, files, expected):
    write(tmp_path, **files)
    found = machine.crowded(tmp_path)
    assert found is None if expected is None else expected in found


@pytest.mark.parametrize(("throttled", "expected"), [(4, None), (60, "60 of 100 periods")])
def test_a_throttled_group(tmp_path, throttled, expected):
    write(tmp_path, proc__self__cgroup="0::/box\n")
    group = tmp_path / "sys/fs/cgroup/box"
    group.mkdir(parents=True)
    (group / "cpu.stat").write_text(f"usage_usec 5\nnr_periods 100\nnr_throttled {throttled}\n")
    found = machine.crowded(tmp_path)
    assert found is None if expected is None else expected in found


@pytest.mark.parametrize("variable", [None, "GOMP_SPINCOUNT", "OMP_WAIT_POLICY"])
@pytest.mark.parametrize("crowded", [None, "the load is 9 on 2 CPUs"])
@pytest.mark.parametrize("bounded", [False, True])
def test_a_server_starts_again(monkeypatch, variable, crowded, bounded):
    started = []
    for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"):
        monkeypatch.delenv(name, raising=False)
    if variable:
        monkeypatch.setenv(variable, "1")
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(sys, "orig_argv", ["python", "-m", "ipex", "llm", "serve"])
    monkeypatch.setattr(machine, "crowded", lambda: crowded)
    monkeypatch.setattr(machine, "loaded_libraries", lambda: ("/lib/libgomp.so.1",))
    monkeypatch.setattr(os, "execve", lambda *args: started.append(args))
    spin.restart_if_crowded(bounded)
    chosen = variable == "OMP_WAIT_POLICY" or (variable and not bounded)
    if chosen or not crowded:
        assert not started
    else:
        ((program, arguments, environment),) = started
        assert program == sys.executable and arguments[1:] == ["-m", "ipex", "llm", "serve"]
        assert environment["GOMP_SPINCOUNT"] == "3000"


@pytest.mark.parametrize("environment", [{}, {"OMP_WAIT_POLICY": "passive"}])
def test_doctor_says_it(tmp_path, environment):
    write(tmp_path, proc__loadavg="3.50 1.0 1.0 3/80 9\n", proc__stat=CPUS)
    report = doctor(tmp_path, environment)
    assert ("other programs", "the load is 3.5 on 2 CPUs") in texts.rows(report)
    report = dataclasses.replace(report, openmp=("/lib/libgomp.so.1",))
    said = any("GOMP_SPINCOUNT=3000" in line for line in texts.advice(report))
    assert said == (not environment)

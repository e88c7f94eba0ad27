# SPDX-License-Identifier: Apache-2.0
"""The launcher bounds how long threads spin, shortly beside other programs."""

from __future__ import annotations

from pathlib import Path

import pytest

from ipex_runtime.launch import launcher_base
from ipex_runtime.topology import sysfs


@pytest.mark.parametrize("crowded", [None, "the load is 9 on 2 CPUs"])
@pytest.mark.parametrize("variable", [None, "GOMP_SPINCOUNT", "OMP_WAIT_POLICY"])
def test_the_load_decides(monkeypatch: pytest.MonkeyPatch, crowded: str, variable: str) -> None:
    for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"):
        monkeypatch.delenv(name, raising=False)
    if variable:
        monkeypatch.setenv(variable, "7")
    monkeypatch.setattr(launcher_base, "crowded", lambda root: crowded)
    launcher = launcher_base.Launcher()
    launcher.set_omp_runtime("default")
    own = "3000" if crowded else "30000"
    expected = {None: own, "GOMP_SPINCOUNT": "7", "OMP_WAIT_POLICY": None}[variable]
    assert launcher.environ_set.get("GOMP_SPINCOUNT") == expected


def test_crowded(tmp_path: Path) -> None:
    assert sysfs.crowded(tmp_path) is None
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/stat").write_text("cpu  1\ncpu0 1\ncpu1 1\n")
    (tmp_path / "proc/loadavg").write_text("9.5 1 1 3/80 9\n")
    assert "load is 9.5 on 2 CPUs" in str(sysfs.crowded(tmp_path))
    (tmp_path / "proc/pressure").mkdir()
    (tmp_path / "proc/pressure/cpu").write_text("some avg10=3.00 avg60=0\n")
    assert sysfs.crowded(tmp_path) is None
    (tmp_path / "proc/self/cgroup").write_text("0::/\n")
    (tmp_path / "sys/fs/cgroup").mkdir(parents=True)
    (tmp_path / "sys/fs/cgroup/cgroup.controllers").write_text("cpu\n")
    (tmp_path / "sys/fs/cgroup/cpu.stat").write_text("nr_periods 10\nnr_throttled 5\n")
    assert "5 of 10 periods" in str(sysfs.crowded(tmp_path))

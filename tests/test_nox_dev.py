# SPDX-License-Identifier: Apache-2.0
"""The environment for daily work uses the Python files of native packages where they lie: tools/nox_dev.py."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture(scope="module")
def nox_dev() -> ModuleType:
    pytest.importorskip("nox")
    import nox_dev

    return nox_dev


def test_sources_take_the_place_of_installed_files(nox_dev: ModuleType, tmp_path: Path) -> None:
    source, site = tmp_path / "src", tmp_path / "site"
    for folder in (source / "p/sub", site / "p/sub"):
        folder.mkdir(parents=True)
    (source / "p/__init__.py").write_text("from . import young\nvalue = 'source'\n")
    (source / "p/young.py").write_text("")  # not in the wheel yet
    (source / "p/sub/__init__.py").write_text("")
    (site / "p/__init__.py").write_text("value = 'wheel'\n")
    (site / "p/sub/__init__.py").write_text("")
    (site / "p/lib.so").write_text("native")
    for _ in range(2):  # the session may run again
        nox_dev.link(source, site)
    code = "import p, os; print(p.value, os.path.exists(os.path.dirname(p.__file__) + '/lib.so'))"
    environment = os.environ | {"PYTHONPATH": str(site)}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["source", "True"]
    assert (site / "p/young.py").resolve() == source / "p/young.py"


class Stopped(Exception):
    pass


class Session:
    """What the session is told, up to its first error."""

    def __init__(self, *posargs: str) -> None:
        self.posargs, self.env = posargs, {}

    def error(self, text: str) -> None:
        raise Stopped(text)


def test_prebuilt_needs_wheels(nox_dev: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nox_dev, "prepare", lambda session: None)
    monkeypatch.setattr(nox_dev, "built", lambda: {"ipex-runtime": {}})
    with pytest.raises(Stopped, match="in dist/, got none of ipex-cpu-kernels: leave it out"):
        nox_dev.dev.func(Session("--prebuilt"))


def test_without_it_they_are_built(nox_dev: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    def build(session: Session, packages: tuple[str, ...], *tools: str, levels: str) -> None:
        raise Stopped(f"{packages} {levels}")

    monkeypatch.setattr(nox_dev, "prepare", lambda session: None)
    monkeypatch.setattr(nox_dev, "build", build)
    with pytest.raises(Stopped, match=r"'ipex-cpu-kernels', 'ipex-runtime'\) native"):
        nox_dev.dev.func(Session())

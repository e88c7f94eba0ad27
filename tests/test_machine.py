# SPDX-License-Identifier: Apache-2.0
"""What a machine lacks is told in one line, before minutes of work: tools/machine.py."""

from __future__ import annotations

import os
import platform
import sys
from pathlib import Path

import pytest

import machine


def test_this_machine_lacks_nothing(tmp_path: Path) -> None:
    assert machine.problems(tmp_path) == []
    assert machine.compiler_problem() == ""


@pytest.mark.parametrize("version", [(3, 9, 2), (3, 15, 0)])
def test_python(version: tuple[int, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "version_info", version)
    (line,) = machine.problems(tmp_path)
    assert "Python 3.10 to 3.14 is needed" in line
    assert f"nox runs with 3.{version[1]}" in line
    assert "python3.12 -m nox" in line


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("machine", "aarch64", ("x86-64 processor is needed", "aarch64", "install with pip")),
        ("libc_ver", ("", ""), ("glibc is needed", "musl", "Debian")),
    ],
)
def test_processor_and_c_library(
    name: str,
    value: object,
    words: tuple[str, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(platform, name, lambda: value)
    (line,) = machine.problems(tmp_path)
    assert all(word in line for word in words) and "\n" not in line


def test_other_systems(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    assert "Linux is needed" in machine.problems(tmp_path)[0]


def test_read_only_checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    (line,) = machine.problems(tmp_path)
    assert str(tmp_path) in line and "copy the checkout" in line


def compiler(folder: Path, macros: str) -> str:
    path = folder / "some-c++"
    path.write_text(f"#!/bin/sh\nprintf '{macros}'\n")
    path.chmod(0o755)
    return str(path)


@pytest.mark.parametrize(
    ("macros", "found"),
    [
        ("#define __GNUC__ 11\\n", "g++ 11"),
        ("#define __GNUC__ 4\\n#define __clang__ 1\\n", "clang"),
        ("", "of no version"),
    ],
)
def test_compilers_that_are_too_old(
    macros: str, found: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", compiler(tmp_path, macros))
    line = machine.compiler_problem()
    assert line.startswith("g++ 12 or newer is needed") and found in line and "CXX=" in line


def test_no_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    assert "there is no C++ compiler" in machine.compiler_problem()
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert "there is no no-such-compiler" in machine.compiler_problem()

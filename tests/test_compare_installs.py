# SPDX-License-Identifier: Apache-2.0
"""Two installs take turns at the same work: tools/compare_installs.py."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

import compare_installs


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    monkeypatch.setattr(sys, "argv", ["compare_installs.py", *arguments])
    compare_installs.main()


def test_an_install_against_itself(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    figures = tmp_path / "figures.json"
    options = ("--rounds", "3", "--milliseconds", "0.1", "--json", str(figures))
    run(monkeypatch, sys.executable, sys.executable, "* rms_norm", "model mlp bfloat16", *options)
    rows = json.loads(figures.read_text())
    kinds = ("eager rms_norm", "fake rms_norm", "grad rms_norm", "compiled rms_norm")
    assert [row["name"] for row in rows] == [*kinds, "model mlp bfloat16"]
    assert all(row["before_us"] > 0 and row["low"] <= row["ratio"] <= row["high"] for row in rows)
    printed = capsys.readouterr().out
    assert all(name in printed for name in kinds)
    assert "model: 1 rows, median" in printed


def test_work_that_fails_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Failing:
        def ask(self, *question: object) -> object:
            return "ValueError: no such model" if question[0] == "prepare" else None

    worker = Failing()
    row = compare_installs.compare("model x", worker, worker, rounds=1, milliseconds=1)
    assert row["ratio"] is None
    assert "not measured" in compare_installs.line(row)
    assert "ValueError: no such model" in compare_installs.line(row)


def test_two_pythons_are_needed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        run(monkeypatch, sys.executable)
    assert "expected two paths of Pythons" in capsys.readouterr().err


def test_work_is_known_by_name() -> None:
    kinds = {
        name.split()[0]
        for name in (*compare_installs.model_work(), *compare_installs.convert_work())
    }
    assert kinds == {"model", "convert"}

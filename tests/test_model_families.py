# SPDX-License-Identifier: Apache-2.0
"""`tools/model_families.py`: processes, the limit of time, and tables that are gone on with."""

from __future__ import annotations

import importlib.util
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="limits of Linux")

ROOT = Path(__file__).parents[1]
NAMES = ("fine", "slow", "dies", "last")


@pytest.fixture
def tool(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The module, whose models say how they end."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    spec = importlib.util.spec_from_file_location(
        "model_families", ROOT / "tools" / "model_families.py"
    )
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "model_families", module)
    spec.loader.exec_module(module)

    def examine(name: str, kind: str | None, count: int) -> Iterator[dict[str, str]]:
        row = dict.fromkeys(module.COLUMNS, "") | {"name": name, "class": kind or ""}
        row |= {"reached": "3", "depth 3": f"{count}e-07"}
        yield row
        if name == "slow":
            time.sleep(60)
        if name == "dies":
            os._exit(7)
        yield row | {"depth 1": "2e-07"}

    monkeypatch.setattr(module, "examine", examine)
    monkeypatch.setattr(module, "causal_models", lambda: {n: n.title() for n in NAMES})
    yield module


def test_a_sweep_goes_on_after_a_class_that_takes_too_long(tool: Any, tmp_path: Path) -> None:
    table = tmp_path / "table.tsv"
    began = time.monotonic()
    arguments = ["--all", "--jobs", "3", "--seconds", "1", "--patterns", "5"]
    assert tool.main([*arguments, "--write", str(table)]) == 0
    assert time.monotonic() - began < 30
    rows = tool.read(table)
    assert list(rows) == list(NAMES)  # their order is that of transformers
    assert rows["fine"]["depth 1"] == rows["last"]["depth 1"] == "2e-07"
    assert rows["slow"]["why"] == "time limit: more than 1 s"
    assert rows["slow"]["depth 3"] == "5e-07"  # what was known until then
    assert rows["dies"]["why"] == "its process ended with status 7"
    assert not list(tmp_path.glob("*.part"))


def test_a_sweep_is_resumed(tool: Any, tmp_path: Path) -> None:
    table = tmp_path / "table.tsv"
    assert tool.main(["last", "--patterns", "4", "--write", str(table)]) == 0
    assert list(tool.read(table)) == ["last"]
    assert tool.main(["fine", "last", "--patterns", "6", "--write", str(table), "--resume"]) == 0
    rows = tool.read(table)
    assert {name: row["depth 3"] for name, row in rows.items()} == {
        "fine": "6e-07",
        "last": "4e-07",
    }


def test_a_table_has_what_was_done_when_a_sweep_ends_early(tool: Any, tmp_path: Path) -> None:
    table = tmp_path / "table.tsv"
    real = tool.sweep

    def interrupted(*arguments: Any) -> Iterator[Any]:
        for index, found in enumerate(real(*arguments)):
            if index == 2:
                raise KeyboardInterrupt
            yield found

    tool.sweep = interrupted
    with pytest.raises(KeyboardInterrupt):
        tool.main(["fine", "last", "dies", "--write", str(table)])
    assert list(tool.read(table)) == ["fine", "last"]


def test_resume_needs_a_table(tool: Any, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        tool.main(["--all", "--resume"])
    assert "--resume must come with --write" in capsys.readouterr().err

# SPDX-License-Identifier: Apache-2.0
"""The performance page, from recorded measurements, and the session that records them every night."""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
import sys
import xml.etree.ElementTree
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parent.parent
DATA = ROOT / "docs" / "data"


@pytest.fixture(scope="module")
def pages() -> ModuleType:
    pytest.importorskip("ipex")
    sys.path.insert(0, str(ROOT / "docs" / "_ext"))
    try:
        import performance_pages
    finally:
        sys.path.pop(0)
    return performance_pages


def test_each_recorded_table_has_a_chart_that_is_well_formed(pages: ModuleType) -> None:
    text = pages.pages(DATA)["parts/performance.md"]
    engines = [path for path in DATA.glob("*.json") if "absent" in json.loads(path.read_text())]
    charts = re.findall(r"<figure.*?</figure>", text, re.DOTALL)
    assert engines and len(charts) >= len(engines)
    for chart in charts:
        assert "\n\n" not in chart  # Markdown would end the block there
        root = xml.etree.ElementTree.fromstring(chart)
        assert len(list(root.iter("rect"))) >= 1
        assert root.find("svg").attrib["aria-label"]


def test_bars_go_to_both_sides_of_one(pages: ModuleType) -> None:
    from performance_charts import LEFT, RIGHT, WIDTH, Bar, chart

    bars = [
        Bar("a<b", 2.0, 1.9, 2.1, ours=True),
        Bar("slow", 0.5, 0.4, 0.6, ours=False),
        Bar("far", 2.0, 1e-9, 1e9, ours=False),
    ]
    root = xml.etree.ElementTree.fromstring(chart([("", bars)], "what"))
    rects = [{k: float(r.attrib[k]) for k in ("x", "width")} for r in root.iter("rect")]
    fast, slow, _ = rects
    assert slow["x"] + slow["width"] == pytest.approx(fast["x"], abs=0.2)
    assert slow["width"] == pytest.approx(fast["width"], abs=0.2)
    lines = [float(line.attrib[k]) for line in root.iter("line") for k in ("x1", "x2")]
    assert LEFT <= min(lines) and max(lines) <= WIDTH - RIGHT
    assert chart([("head", [])], "what") == ""


def test_long_labels_are_not_cut_off(pages: ModuleType) -> None:
    from performance_charts import LETTER, Bar, chart

    label = "indirect_access_kv_cache_attention"
    root = xml.etree.ElementTree.fromstring(
        chart([("", [Bar(label, 2.0, 1.9, 2.1, True)])], "what")
    )
    (place,) = [float(t.attrib["x"]) for t in root.iter("text") if t.text == label]
    assert place >= LETTER * len(label)
    assert all(float(rect.attrib["x"]) > place for rect in root.iter("rect"))


def test_the_summary_has_each_case_and_marks_what_is_not_behind(
    pages: ModuleType, tmp_path: Path
) -> None:
    files = [path for path in DATA.glob("*.json") if "absent" in json.loads(path.read_text())]
    cases = [{row["case"] for row in json.loads(path.read_text())["rows"]} for path in files]
    text = pages.pages(DATA)["parts/engines.md"]
    names = set().union(*cases)
    lines = [
        line
        for line in text.splitlines()
        if line.split("|")[1:2] and line.split("|")[1].strip() in names
    ]
    assert len(lines) == sum(map(len, cases))
    numbers = {
        "stock_compile": (1.0, 0.9, 1.1),
        "ipex_eager": (1.5, 1.4, 1.6),
        "openvino": (1.6, 1.5, 1.7),
    }
    data = json.loads(files[0].read_text()) | {"kind": "models", "dtype": "float32"}
    shape = {**data["rows"][0], "case": "net batch 1"}
    data["rows"] = [{**shape, "engine": "stock_eager", "ms": 12.345}]
    data["rows"] += [
        {**shape, "engine": engine, "ratio": ratio, "low": low, "high": high}
        for engine, (ratio, low, high) in numbers.items()
    ]
    (tmp_path / "one.json").write_text(json.dumps(data))
    (line,) = [r for r in pages.pages(tmp_path)["parts/engines.md"].splitlines() if "net" in r]
    assert "float32 | 12.3 | 1.00 (0.90-1.10) | **1.50** (1.40-1.60) | **1.60** (1.50-1.70)" in line


def test_a_night_leaves_the_tables_of_the_text_alone(pages: ModuleType, tmp_path: Path) -> None:
    shutil.copy(DATA / "9-train.json", tmp_path)
    before = pages.pages(tmp_path)
    assert before["parts/nightly.md"] == pages.NO_NIGHT
    night = json.loads((tmp_path / "9-train.json").read_text())
    del night["title"]
    night["schema"], night["machine"]["cpu"], night["machine"]["busy"] = 2, "CPU of the night", 0.5
    (tmp_path / "nightly").mkdir()
    (tmp_path / "nightly" / "train.json").write_text(json.dumps(night))
    after = pages.pages(tmp_path)
    assert after["parts/performance.md"] == before["parts/performance.md"]
    text = after["parts/nightly.md"]
    assert "CPU of the night" in text and "measured 2026-" in text and night["command"] in text
    assert "other programs took 50% of the CPUs" in text and "bootstrap" not in text


@pytest.fixture(scope="module")
def sessions() -> ModuleType:
    return pytest.importorskip("nox") and importlib.import_module("nox_docs")


def test_of_all_options_ops_gets_those_that_it_has(sessions: ModuleType) -> None:
    options = "--size tiny --seconds 1 --env a=b --threads=2 --engines x --dtype fp32 --turn=1"
    assert sessions.of_ops(options.split()) == ["--size", "tiny", "--threads=2", "--dtype", "fp32"]
    assert sessions.of_ops([]) == []


def test_a_night_goes_on_after_a_kind_that_fails_and_publishes_the_others(
    sessions: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import nox

    commands: list[str] = []

    class Session:
        posargs = ("--size", "tiny", "--publish", "--turn", "0.02")

        def install(self, *what: str, **more: object) -> None:
            pass

        def run(self, *command: str, **more: object) -> None:
            assert more == {"success_codes": [0, 1]}
            where = command.index("--json")
            commands.append(" ".join(command[2:where]))
            if command[2] == "llm":
                raise nox.command.CommandFailed
            Path(command[where + 1]).write_text(command[2])

        def error(self, text: str) -> None:
            raise RuntimeError(text)

    for name in ("prepare", "install_wheels"):
        monkeypatch.setattr(sessions, name, lambda *_, **__: None)
    monkeypatch.setattr(sessions, "REPORTS", tmp_path / "reports")
    monkeypatch.setattr(sessions, "NIGHTLY", tmp_path / "data" / "nightly")
    (tmp_path / "reports").mkdir()
    (tmp_path / "reports" / "bench-llm.json").write_text("of an earlier night")
    with pytest.raises(RuntimeError, match="failed for llm"):
        sessions.bench.func(Session())
    more = "--size tiny --turn 0.02"
    minutes = sessions.BENCH_MINUTES
    assert sum(minutes.values()) <= 55 and sum(sessions.SHORT_MINUTES.values()) <= 9
    assert commands == [
        f"ops --minutes {minutes['ops']} --size tiny",
        f"ops --peers --minutes {minutes['peers']} {more}",
        *(f"{kind} --minutes {minutes[kind]} {more}" for kind in ("models", "llm", "train")),
    ]
    published = {path.name: path.read_text() for path in (tmp_path / "data/nightly").iterdir()}
    kinds = ("ops", "peers", "models", "train")
    assert published == {f"{k}.json": "ops" if k == "peers" else k for k in kinds}
    assert not (tmp_path / "reports" / "bench-llm.json").exists()

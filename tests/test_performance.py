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
from typing import Any

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


def measured(kinds: tuple[str, ...] = ("llm", "models", "train")) -> list[dict[str, Any]]:
    """Return the files of engines."""
    files = [json.loads(path.read_text()) for path in sorted(DATA.glob("*.json"))]
    return [data for data in files if data.get("kind") in kinds]


def test_the_chooser_has_every_model_and_machine_that_was_measured(pages: ModuleType) -> None:
    import performance_chooser as chooser

    cases = {case for subject in chooser.SUBJECTS for case in subject.cases}
    levels = {level for of_machine in chooser.MACHINES.values() for level in of_machine}
    assert {row["case"] for data in measured() for row in data["rows"]} <= cases
    assert {data["machine"]["level"] for data in measured()} <= levels
    text = pages.pages(DATA)["parts/chooser.md"]
    for data in measured():
        for row in data["rows"]:
            if row["engine"] != "stock_eager":
                assert f"{row['ratio']:.2f} ({row['low']:.2f}-{row['high']:.2f}) of" in text


def test_the_pictures_of_the_chooser_have_heads_that_fit_and_no_axis_behind_them(
    pages: ModuleType,
) -> None:
    from performance_charts import NARROW

    parts = pages.pages(DATA)
    names = ("landing", "overview", "chooser")
    for name in names:
        charts = re.findall(r"<figure.*?</figure>", parts[f"parts/{name}.md"], re.DOTALL)
        assert charts
        for chart in charts:
            root = xml.etree.ElementTree.fromstring(chart)
            texts = [(float(t.attrib["y"]), t) for t in root.iter("text")]
            heads = [(y, t.text or "") for y, t in texts if t.attrib.get("font-weight") == "bold"]
            axis = [line for line in root.iter("line") if line.attrib["x1"] == line.attrib["x2"]]
            assert heads and axis
            for y, head in heads:
                assert 7 * len(head) < NARROW, head
                assert not [
                    line
                    for line in axis
                    if float(line.attrib["y1"]) < y - 1 and y - 9 < float(line.attrib["y2"])
                ], head


def test_what_is_lost_is_listed(pages: ModuleType, tmp_path: Path) -> None:
    behind = pages.pages(DATA)["parts/behind.md"]
    lost = 0
    for data in measured():
        for case in {row["case"] for row in data["rows"]}:
            here = [r for r in data["rows"] if r["case"] == case and r["engine"] != "stock_eager"]
            ours = [row for row in here if row["engine"].startswith("ipex_")]
            best = max(ours, key=lambda row: row["ratio"])
            ahead = [r for r in here if r not in ours and r["low"] > best["high"]]
            if ahead:
                lost += 1
                first = max(ahead, key=lambda row: row["ratio"])
                number = f"{first['ratio']:.2f} ({first['low']:.2f}-{first['high']:.2f})"
                assert f"{pages.title(first['engine'])} {number} |" in behind
    assert lost and behind.count("\n") == lost + 2
    data = json.loads((DATA / "9-models-vnni-fp32.json").read_text())
    data["rows"] = [row for row in data["rows"] if row["engine"] != "openvino"]
    for row in data["rows"]:
        if row["engine"] == "ipex28":
            row.update(ratio=1.0, low=0.9, high=1.1)
    (tmp_path / "one.json").write_text(json.dumps(data))
    assert "No row" in pages.pages(tmp_path)["parts/behind.md"]


def calls() -> list[tuple[str, str, str, str]]:
    """Return kind, engine, precision and dtype of stock of all that a call is shown for."""
    found = {
        (data["kind"], row["engine"], row["precision"], stock["precision"])
        for data in measured()
        for row in data["rows"]
        if row["engine"] in ("ipex_eager", "ipex_compile")
        for stock in data["rows"]
        if stock["engine"] == "stock_eager" and stock["case"] == row["case"]
    }
    found -= {one for one in found if one[:2] == ("llm", "ipex_compile")}  # never the faster one
    found |= {("llm", "ipex_eager", f"{bits} (1.1b)", "bfloat16") for bits in ("int8", "int4")}
    found |= {("models", f"{what} INT8", "int8", "bfloat16") for what in ("static", "dynamic")}
    return sorted(found)


@pytest.mark.parametrize("what", calls(), ids=" ".join)
def test_the_code_of_a_row_runs(pages: ModuleType, what: tuple[str, str, str, str]) -> None:
    import torch

    import ipex
    from performance_chooser import call

    for package in ("ipex_llm", "ipex_quant"):
        pytest.importorskip(package)
    transformers = pytest.importorskip("transformers")
    code = call(*what)
    assert code is not None
    name, text = code
    kind, engine, _, stock = what
    dtype = getattr(torch, stock)
    names: dict[str, Any] = {"torch": torch, "ipex": ipex}
    if kind == "llm":
        sizes = {"hidden_size": 128, "intermediate_size": 256, "vocab_size": 64}
        heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "num_hidden_layers": 1}
        config = transformers.LlamaConfig(**sizes, **heads)
        names["model"] = transformers.LlamaForCausalLM(config).eval().to(dtype)
        exec(text, names)
        ids = torch.tensor([[1, 2, 3]])
        assert names["fast"].generate(ids, max_new_tokens=2, min_new_tokens=2).shape == (1, 5)
        assert ("quantization_config" in name) == ("int" in what[2])
        return
    layers = [torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 8)]
    names["model"] = model = torch.nn.Sequential(*layers).eval()
    x = torch.randn(4, 64)
    if kind == "models":
        names["batches"] = [x]
        expected = model(x)
        exec(text, names)
        compiled = engine == "ipex_compile"
        with torch.no_grad():
            y = names["fast"](x.to(dtype) if compiled else x)
        assert torch.nn.functional.cosine_similarity(y.float(), expected).min() > 0.99
        assert ("ipex.optimize(" in text) != compiled
        return
    names["tables"] = [torch.nn.EmbeddingBag(8, 64, mode="sum") for _ in range(2)]
    names["optimizer"] = torch.optim.SGD(model.parameters(), lr=0.1)
    exec(text, names)
    first, second = names["tables"]([torch.tensor([1, 2])] * 2, [torch.tensor([0, 1])] * 2)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype == torch.bfloat16):
        y = names["model"](x)
    (y.float().sum() + (first + second).float().sum()).backward()
    names["optimizer"].step()
    assert ("torch.compile" in text) == (engine == "ipex_compile")


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
    assert sum(minutes.values()) <= 44 and sum(sessions.SHORT_MINUTES.values()) <= 7
    assert commands == [
        f"ops --minutes {minutes['ops']} --size tiny",
        f"ops --peers --minutes {minutes['peers']} {more}",
        *(f"{kind} --minutes {minutes[kind]} {more}" for kind in ("models", "llm", "train")),
    ]
    published = {path.name: path.read_text() for path in (tmp_path / "data/nightly").iterdir()}
    kinds = ("ops", "peers", "models", "train")
    assert published == {f"{k}.json": "ops" if k == "peers" else k for k in kinds}
    assert not (tmp_path / "reports" / "bench-llm.json").exists()

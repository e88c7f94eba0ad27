# SPDX-License-Identifier: Apache-2.0
"""`ipex bench models|llm|train`: ratios and their intervals, limits, result files and their parts."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import json
import random
import sys
from pathlib import Path

import pytest
from bench_runs import row, run

from ipex_bench import shapes
from ipex_bench.commands import peers
from ipex_bench.commands.peers import arguments_of
from ipex_bench.result import Absent, Row, Run, interval, limit_percent, regressions, untold

pytest.importorskip("numpy")


def test_interval_holds_the_median_and_narrows_with_more_rounds():
    stock = [10.0, 11.0, 9.0, 30.0, 10.0]
    mine = [5.0, 5.0, 5.0, 5.0, 5.0]
    # Up to eight rounds nothing narrower than the range holds the median in 95 % of cases.
    assert interval(stock, mine) == (2.0, 1.8, 6.0)
    _, low_more, high_more = interval(stock * 20, mine * 20)
    assert 1.8 < low_more <= 2.0 <= high_more < 6.0
    # More rounds than a float has powers of two.
    assert interval(stock * 500, mine * 500) == (2.0, 2.0, 2.0)


@pytest.mark.parametrize("rounds", [6, 7, 9, 20])
def test_interval_holds_what_it_is_said_to_hold(rounds):
    chance = random.Random(0)
    hits = 0
    for _ in range(1000):
        low, high = interval(
            [chance.lognormvariate(0, 0.3) for _ in range(rounds)], [1.0] * rounds
        )[1:]
        hits += low <= 1.0 <= high  # the median of all
    assert hits >= 935  # 950, less two standard deviations


def test_limit_is_the_slower_of_memory_and_arithmetic():
    mega = 1 << 20
    limits = {"read": 1.0, "bytes": 100.0 * mega, "bfloat16": 1.0, "int8": 0.5}
    facts = {"weights": 50 * mega, "activations": 0}
    assert limit_percent(limits, 2.0, "bfloat16", 0, facts) == (50.0, "memory")
    share, bound = limit_percent(limits, 4.0, "bfloat16", 4 * 1024**3, facts)
    assert (share, bound) == (50.0, "compute")
    # int4 weights are multiplied as int8.
    assert limit_percent(limits, 1.0, "int4", 4 * 1024**3, facts)[0] == pytest.approx(100.0)
    # Some kilobytes from a cache are no share of the rate of memory.
    assert limit_percent(limits, 1e-6, "bfloat16", 1e6, {**facts, "weights": 1e3}) == (0.0, "call")


def test_regressions_need_intervals_apart_and_more_than_the_tolerance():
    def now(*rows: Row, absent: tuple[Absent, ...] = ()) -> Run:
        return Run("models", "bfloat16", {}, rows=list(rows), absent=list(absent))

    old = [row()]
    assert regressions(old, now(row(ratio=1.5, low=1.4, high=1.6)))
    assert not regressions(old, now(row(ratio=1.5, low=1.0, high=2.0)))  # noise
    assert not regressions(old, now(row(ratio=1.95, low=1.94, high=1.89)))  # small
    assert not regressions(old, now(row(ratio=3.0, low=2.9, high=3.1)))
    other = [row(engine="openvino")]
    assert not regressions(other, now(row(engine="openvino", ratio=0.1, low=0.1, high=0.1)))
    assert regressions(old, now(absent=(Absent("ipex_eager", "a", "failed: x"),)))
    assert not regressions(old, now())  # not asked for this time
    assert untold(old, now(absent=(Absent("ipex_eager", "a", "too disturbed"),)))
    assert not untold(old, now(absent=(Absent("ipex_eager", "a", "failed: x"),)))
    assert not untold(old, now()) and not untold(old, now(*old))


def test_a_run_survives_its_file(tmp_path):
    timed = row(times=(1.0, 1e-05, 2.5), stock=(2.0, 3.0, 4.0))
    first = Run(
        "llm", "int4", {"cpu": "x"}, {"torchao": "1"}, [timed], [Absent("zentorch", "", "no")], "c"
    )
    file = tmp_path / "run.json"
    file.write_text(first.to_json())
    assert Run.read(file) == first
    assert '"times": [ 1.0, 1e-05, 2.5 ],' in file.read_text()
    # One of an earlier version, without single times.
    old = json.loads(file.read_text())
    for key in ("times", "stock"):
        del old["rows"][0][key]
    file.write_text(json.dumps(old))
    assert Run.read(file).rows == [row()]
    file.write_text("{}")
    with pytest.raises(ValueError, match="must be a result file"):
        Run.read(file)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda data: data.update(machine=None), "machine is no object"),
        (lambda data: data["rows"][0].update(engine="nosuch"), "unknown engine 'nosuch'"),
        (lambda data: data["absent"][0].update(engine="nosuch"), "unknown engine 'nosuch'"),
        (lambda data: data["rows"][0].update(ms="1"), "ms is no number: '1'"),
        (lambda data: data["rows"][0].update(low=float("nan")), "low is no number: nan"),
        (lambda data: data["rows"][0].update(times=[1, None]), "times is no number"),
        (lambda data: data["rows"][0].update(case=3), "case is no text: 3"),
        (lambda data: data.update(rows=3), "must be a result file"),
        (lambda data: data.pop("absent"), "'absent'"),
    ],
)
@pytest.mark.parametrize("option", ["--add", "--compare"])
def test_a_damaged_file_is_refused_before_the_work(change, message, option, tmp_path):
    run_of = Run("ops", "float32", {}, rows=[row()], absent=[Absent("zentorch", "", "no")])
    data = json.loads(run_of.to_json())
    change(data)
    file = tmp_path / "old.json"
    file.write_text(json.dumps(data))
    done = run("ops", "linear", "--peers", option, file)
    assert done.exit_code == 2, done.output
    text = " ".join(done.output.replace("│", " ").split())
    assert message in text and "Traceback" not in text


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="the system has no /dev/full")
def test_a_full_disk_costs_one_file(tmp_path, monkeypatch):
    monkeypatch.setattr(peers, "run", lambda plan, found, say, keep: keep(found))
    markdown = tmp_path / "run.md"
    arguments = ("ops", "linear", "--peers", "--markdown", markdown)
    done = run(*arguments, "--json", "/dev/full")
    assert done.exit_code == 1
    assert "cannot write /dev/full: No space left" in done.output
    assert "### ipex bench ops" in markdown.read_text()
    assert run(*arguments, "--json", tmp_path / "run.json").exit_code == 0
    assert {path.name for path in tmp_path.iterdir()} == {"run.md", "run.json"}


def test_more_threads_than_cpus_are_told(monkeypatch):
    monkeypatch.setattr(peers, "run", lambda *_: None)
    cpus = peers.machine()["cpus"]
    for count in (cpus, cpus + 1):
        done = run("ops", "linear", "--peers", "--threads", count)
        assert (f"{count} threads on {cpus} CPUs" in done.output) == (count > cpus)


def test_the_command_in_a_file_is_what_decides_the_numbers(monkeypatch):
    def called(kind, text):
        monkeypatch.setattr(sys, "argv", ["ipex", *text.split()])
        return " ".join(arguments_of(kind))

    text = "--json a.json minilm --env ipex28=/home/me/python --threads 2 --add=b.json --plot c.png"
    assert called("models", f"bench models {text}") == "minilm --env ipex28=PYTHON --threads 2"
    assert called("ops", "bench linear --peers --env=a=b") == "linear --peers --env=a=PYTHON"
    assert called("ops", "bench ops ops --peers") == "ops --peers"
    assert called("models", "other") == ""


def test_a_part_replaces_what_it_measures_and_keeps_the_rest():
    machine = {"cpu": "x", "torch": "2"}
    first = Run(
        *("llm", "int4", machine, {"torchao": "1"}),
        rows=[row(case="a decode"), row(case="b decode", engine="openvino")],
        absent=[Absent("torchao", "", "not installed"), Absent("zentorch", "", "no")],
        command="one",
    )
    new = row(case="a decode", engine="torchao")
    part = Run(
        *("llm", "int4", machine, {"torchao": "2"}),
        rows=[row(case="b decode"), new],
        absent=[Absent("ipex_eager", "a", "failed: x")],
        command="two",
    )
    both = first.with_part(part)
    assert [(r.case, r.engine) for r in both.rows] == [
        *(("b decode", "ipex_eager"), ("b decode", "openvino"), ("a decode", "torchao"))
    ]
    assert both.absent == [Absent("zentorch", "", "no"), *part.absent]
    assert (both.versions, both.command) == ({"torchao": "2"}, "one\ntwo")
    others = ({**machine, "cpu": "y"}, {**machine, "threads": 3})
    for other in (Run("llm", "int8", machine), *(Run("llm", "int4", one) for one in others)):
        with pytest.raises(ValueError, match="must have the same"):
            first.with_part(other)


def test_minilm_without_its_weights_is_another_case(monkeypatch):
    monkeypatch.setattr(shapes.importlib.util, "find_spec", lambda name: None)
    assert [label for label, _ in shapes.cases("models", "minilm", "small")] == [
        *("minilm (random) batch 1", "minilm (random) batch 32")
    ]
    spec = importlib.machinery.ModuleSpec("x", None, origin="/x/__init__.py")
    monkeypatch.setattr(shapes.importlib.util, "find_spec", lambda name: spec)
    assert shapes.cases("models", "minilm", "full")[0][0] == "minilm batch 1"

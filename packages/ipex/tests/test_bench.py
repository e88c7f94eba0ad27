# SPDX-License-Identifier: Apache-2.0
"""The command `ipex bench`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from ipex_bench.commands import bench
from ipex_core import benchmark
from ipex_core.benchmark import Ratio, paired, quantile, ratio, run_bench
from ipex_core.errors import UnknownOpError
from ipex_core.kernels import providers
from ipex_core.library import BenchCase, kernels

OP = "silu_mul"


@pytest.fixture
def tiny(monkeypatch):
    """Give the op one small shape."""
    import dataclasses

    spec = kernels.specs()[OP]
    case = BenchCase(
        "4x64",
        lambda dtype: (torch.ones(4, 64, dtype=dtype), torch.ones(4, 64, dtype=dtype)),
        lambda dtype: 3 * 4 * 64 * dtype.itemsize,
    )
    large = BenchCase(
        "512x512",
        lambda dtype: (torch.ones(512, 512, dtype=dtype), torch.ones(512, 512, dtype=dtype)),
        lambda dtype: 3 * 512 * 512 * dtype.itemsize,
        flops=20_000_000,
    )
    monkeypatch.setitem(kernels._SPECS, OP, dataclasses.replace(spec, bench=lambda: [case, large]))


def run(*arguments):
    return CliRunner().invoke(bench.app, [OP, "--seconds", "0.01", *map(str, arguments)])


def test_paired_calls_everything_once_per_round():
    calls = []
    times = paired(
        {"a": lambda: calls.append("a"), "b": lambda: calls.append("b")},
        seconds=0,
        warmup=1,
        min_rounds=3,
    )
    assert "".join(calls) == "ab" + "abbaab"
    assert [len(times[name]) for name in "ab"] == [3, 3]


def test_ratio_is_the_median_of_paired_ratios():
    assert ratio([2.0, 4.0, 60.0], [1.0, 2.0, 10.0]) == Ratio(2.0, 2.0, 5.2)
    assert quantile([3.0, 1.0, 2.0], 0.5) == 2.0


def test_run_bench_rejects_an_unknown_op():
    with pytest.raises(UnknownOpError, match="unknown op 'nosuch'"):
        list(run_bench(["nosuch"]))


def test_table_json_and_plot(tiny, tmp_path):
    pytest.importorskip("matplotlib")
    result = run("--dtype", "fp32", "--json", tmp_path / "a.json", "--plot", tmp_path / "a.png")
    assert result.exit_code == 0, result.output
    assert "silu_mul" in result.output and "4x64" in result.output
    data = json.loads((tmp_path / "a.json").read_text())
    assert data["machine"]["torch"] == torch.__version__
    assert data["command"].startswith("ipex bench ops")
    small, large = data["results"]
    assert small["limit"] == "call" and small["limit_percent"] is None
    assert large["limit"] in {"memory", "compute"} and large["limit_percent"] > 0
    assert small["rounds"] >= 7 and small["ratio_low"] <= small["ratio"] <= small["ratio_high"]
    assert (tmp_path / "a.png").stat().st_size > 1000


def test_tiny_is_the_smallest_shape_and_auto_what_the_processor_multiplies(
    tiny, tmp_path, monkeypatch
):
    def measured(*arguments):
        file = tmp_path / "a.json"
        assert run(*arguments, "--json", file).exit_code == 0
        return [(r["case"], r["dtype"]) for r in json.loads(file.read_text())["results"]]

    monkeypatch.setattr("ipex_core.amp.native_reason", lambda dtype: "no instructions")
    assert measured("--size", "tiny") == [("4x64", "float32")]
    monkeypatch.setattr("ipex_core.amp.native_reason", lambda dtype: "")
    assert measured("--size", "tiny") == [("4x64", "bfloat16"), ("4x64", "float32")]
    assert measured("--dtype", "fp32") == [("4x64", "float32"), ("512x512", "float32")]


def test_compare_finds_a_regression(tiny, tmp_path):
    file = tmp_path / "before.json"
    assert run("--dtype", "fp32", "--case", "4x64", "--json", file).exit_code == 0
    data = json.loads(file.read_text())
    data["results"][0]["ratio"] = 0.001
    file.write_text(json.dumps(data))
    assert run("--dtype", "fp32", "--case", "4x64", "--compare", file).exit_code == 0
    data["results"][0]["ratio"] = 1000.0
    file.write_text(json.dumps(data))
    result = run("--dtype", "fp32", "--case", "4x64", "--compare", file)
    assert result.exit_code == 1
    assert "regression" in result.output
    data["results"][0]["threads"] = 1000
    file.write_text(json.dumps(data))
    result = run("--dtype", "fp32", "--case", "4x64", "--compare", file)
    assert result.exit_code == 0
    assert "nothing compared" in result.output and "below" not in result.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--dtype", "int8"], "must be one of float32"),
        (["--size", "huge"], "must be one of tiny, small, full"),
        (["--engines", "openvino"], "has no effect without --peers"),
        (["--threads", "0"], "positive"),
        (["--threads", "x"], "positive"),
        (["--levels", "mmx"], "mmx"),
        (["--case", "no such case"], "nothing to measure"),
        (["nosuch"], "must be a kind of benchmark (ops, models, llm, train) or an op"),
    ],
)
def test_bad_arguments_exit_with_2(tiny, arguments, message):
    result = run(*arguments)
    assert result.exit_code == 2
    assert message in " ".join(result.output.replace("│", " ").split())


def test_threads_are_restored(tiny):
    before = torch.get_num_threads()
    assert run("--threads", "1", "--dtype", "fp32", "--case", "4x64").exit_code == 0
    assert torch.get_num_threads() == before


@pytest.mark.parametrize("option", ["--json", "--plot"])
def test_a_file_that_cannot_be_written_is_told_before_the_work(option, tmp_path):
    (tmp_path / "file").touch()
    target = tmp_path / "file" / "below"
    done = run(OP, option, str(target))
    assert done.exit_code == 2
    assert "cannot write" in done.output
    assert "Traceback" not in done.output


@pytest.mark.parametrize("levels", [(), ("--levels", "default")])
def test_a_shape_that_fails_leaves_the_others(levels, tiny, tmp_path, monkeypatch):
    if levels:
        provider = providers.provider_for("cpu")
        if provider is None or "default" not in provider.isa_built:
            pytest.skip("no kernels of this level")

    def measured(spec, case, dtype, **more):
        if case.id == "4x64":
            raise MemoryError("no room\nfor it")
        return benchmark.measure_op(spec, case, dtype, **more)

    monkeypatch.setattr(benchmark, "measure_op", benchmark.measure, raising=False)
    monkeypatch.setattr(benchmark, "measure", measured)

    def here(arguments, env, check):  # the process of a level, in this one
        bench.child(*arguments[3:])

    monkeypatch.setattr(bench.subprocess, "run", here)
    file = tmp_path / "a.json"
    done = run("--dtype", "fp32", "--json", file, *levels)
    assert done.exit_code == 1, done.output
    assert "failed: silu_mul 4x64 torch.float32: MemoryError: no room" in done.output
    assert [r["case"] for r in json.loads(file.read_text())["results"]] == ["512x512"]
    done = run("--dtype", "fp32", "--case", "4x64", *levels)
    assert done.exit_code == 1 and "nothing to measure" not in done.output


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="the system has no /dev/full")
def test_a_full_disk_is_told(tiny):
    done = run("--dtype", "fp32", "--case", "4x64", "--json", "/dev/full")
    assert done.exit_code == 1
    assert "cannot write /dev/full: No space left" in done.output and "stock us" in done.output


def test_a_chart_of_an_unknown_kind_is_refused_before_the_work(tmp_path):
    pytest.importorskip("matplotlib")
    for kind in ((OP,), ("models", "minilm")):
        done = CliRunner().invoke(bench.app, [*kind, "--plot", str(tmp_path / "chart.doc")])
        assert done.exit_code == 2, done.output
        assert "must end with one of" in " ".join(done.output.replace("│", " ").split())


@pytest.mark.parametrize("width", [80, 110, 140])
def test_table_loses_no_number_on_a_narrow_terminal(tiny, width):
    import io

    from rich.console import Console

    results = list(run_bench([OP], dtypes=[torch.bfloat16], seconds=0.001))
    out = io.StringIO()
    Console(file=out, width=width).print(bench.results_table(results, width))
    assert "…" not in out.getvalue()
    assert f"{results[0].ratio:.2f}x" in out.getvalue()

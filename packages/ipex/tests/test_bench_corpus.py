# SPDX-License-Identifier: Apache-2.0
"""The command `ipex bench corpus` and its cases."""

from __future__ import annotations

import collections
import dataclasses

import pytest
import torch
from typer.testing import CliRunner

from ipex_bench import corpus
from ipex_bench.commands import bench
from ipex_core.kernels import measured

SMALL = [
    corpus.Case("linear", "rows=4 in=64 out=32 bias=1 act=gelu", "float32", "contiguous", "1", "a"),
    corpus.Case("layer_norm", "rows=4 columns=64", "float32", "contiguous", "1", "a"),
    corpus.Case("rms_norm", "rows=4 columns=64", "bfloat16", "contiguous", "1", "a"),
    corpus.Case("softmax", "rows=4 columns=64", "float32", "contiguous", "1", "a"),
    corpus.Case("gelu", "rows=4 columns=64 approximate=tanh", "float32", "contiguous", "1", "a"),
    corpus.Case(
        "attention",
        "batch=1 heads=4 kv_heads=2 queries=3 keys=8 size=16 causal=0",
        "float32",
        "heads",
        "1",
        "a",
    ),
    corpus.Case("bmm", "batch=2 m=5 k=8 n=6", "float32", "transposed", "1", "a"),
    corpus.Case(
        "convolution",
        "images=1 channels=4 height=8 out=8 window=3 stride=1 padding=1 groups=1",
        "float32",
        "channels_last",
        "1",
        "a",
    ),
    corpus.Case(
        "embedding_bag", "rows=50 size=8 bags=4 lookups=3 mode=mean", "float32", "-", "1", "a"
    ),
    corpus.Case(
        "embedding_update",
        "step=adagrad tables=2 rows=50 size=8 bags=4 lookups=3",
        "float32",
        "-",
        "1",
        "a",
    ),
    corpus.Case("optimizer", "step=adamw tensors=2x8x16+1x16x8", "float32", "-", "1", "a"),
]


def made(ratio, onednn=None):
    return corpus.Measured(
        "linear",
        "rows=4 in=64 out=32 bias=1 act=none",
        "float32",
        "contiguous",
        1,
        "avx2",
        "ipex",
        {"stock": 1.0, "ours": 2.0},
        ratio,
        onednn,
        7,
    )


def test_cases_are_many_different_and_all_have_an_origin():
    found = corpus.cases()
    assert len(found) >= 400
    keys = collections.Counter(dataclasses.astuple(case)[:5] for case in found)
    assert max(keys.values()) == 1
    assert all(case.origin and case.threads in ("1", "all") for case in found)
    assert {case.op for case in found} == set(corpus._MAKERS)
    origins = {part.split(" ")[0] for case in found for part in case.origin.split("; ")}
    assert len(origins) >= 30


def test_cases_are_selected():
    one = corpus.cases(["bmm"], containing="swin", dtypes=["float32"], threads=["1"])
    assert one and all(c.op == "bmm" and "swin" in c.origin and c.dtype == "float32" for c in one)
    with pytest.raises(ValueError, match=r"must be one of linear, .*, got 'nosuch'"):
        corpus.cases(["nosuch"])


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
@pytest.mark.parametrize("case", SMALL, ids=lambda case: case.op)
def test_all_sides_compute_the_same(case):
    torch.manual_seed(0)
    dtype = getattr(torch, case.dtype)
    functions, side = corpus._MAKERS[case.op](corpus.numbers(case.sizes), dtype, case.strides)
    assert side in ("", *measured.SIDES)
    if case.op in ("embedding_update", "optimizer"):
        for function in functions.values():
            function()
        return
    with torch.no_grad():
        results = {name: function().float() for name, function in functions.items()}
    for result in results.values():
        torch.testing.assert_close(result, results["stock"], rtol=2e-2, atol=2e-2)
    assert not measured._forced


def test_a_case_is_measured_and_its_file_is_read_again(tmp_path):
    result = corpus.measure(SMALL[0], seconds=0.001, kernels=True)
    assert result.rounds >= 7 and set(result.us) >= {"stock", "ours"}
    low, high = result.ratio[1:]
    assert low <= result.ratio[0] <= high
    file = tmp_path / "corpus.json"
    file.write_text(corpus.text([result, made((1.0, 0.9, 1.1))], {"cpu": "x"}, "ipex bench corpus"))
    machine, found = corpus.read(file)
    assert machine == {"cpu": "x"} and found == [result, made((1.0, 0.9, 1.1))]
    file.write_text('{"results": []}')
    with pytest.raises(ValueError, match="must be a result file of ipex bench corpus, got"):
        corpus.read(file)


def test_slower_is_beyond_the_spread():
    assert made((0.9, 0.8, 0.95)).slower
    assert not made((0.9, 0.8, 1.02)).slower
    assert not made((0.98, 0.97, 0.99)).slower
    assert made((1.5, 1.4, 1.6), onednn=(0.8, 0.7, 0.9)).slower


def test_amount_is_the_work_of_products_and_the_elements_of_others():
    assert corpus.amount("linear", "rows=4 in=64 out=32 bias=1 act=gelu") == 4 * 64 * 32
    assert corpus.amount("optimizer", "step=adamw tensors=2x8x16+1x16x8") == 3 * 128
    assert corpus.amount("gelu", "rows=4 columns=64 approximate=tanh") == 256


def run(*arguments):
    return CliRunner().invoke(bench.app, ["corpus", *map(str, arguments)])


def test_the_command_fails_for_a_slower_case(monkeypatch, tmp_path):
    ratios = {"linear": (0.9, 0.8, 0.95), "softmax": (1.2, 1.1, 1.3)}
    seen = []

    def measure(case, *, seconds, kernels):
        seen.append(case.op)
        if case.op == "bmm":
            raise RuntimeError("no room")
        return dataclasses.replace(made(ratios[case.op]), op=case.op)

    monkeypatch.setattr(corpus, "measure", measure)
    monkeypatch.setattr(corpus, "cases", lambda ops, **_: [c for c in SMALL if c.op in ops])
    fine = run("softmax", "--threads", "1", "--json", tmp_path / "a.json")
    assert fine.exit_code == 0, fine.output
    assert len(corpus.read(tmp_path / "a.json")[1]) == 1
    slow = run("linear", "softmax", "--threads", "1")
    assert slow.exit_code == 1 and "slower: linear rows=4" in slow.output
    assert seen.count("linear") == 2  # a second time, longer
    broken = run("bmm", "--threads", "1")
    assert broken.exit_code == 1 and "RuntimeError: no room" in broken.output


def test_the_command_refuses_what_it_does_not_know():
    result = run("linear", "--dtype", "int3")
    assert result.exit_code == 2 and "int3" in result.output
    assert run("nosuch").exit_code == 2

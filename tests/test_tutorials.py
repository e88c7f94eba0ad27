# SPDX-License-Identifier: Apache-2.0
"""The scripts of `docs/tutorials/`, run as their readers run them."""

from __future__ import annotations

import importlib.util
import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch

FOLDER = Path(__file__).resolve().parents[1] / "docs" / "tutorials"

pytest.importorskip("ipex")

#: Scripts that need more than ipex and its kernels.
NEEDS = {
    "int8_dynamic": ("ipex_quant",),
    "int8_smooth_quant": ("ipex_quant",),
    "int8_static": ("ipex_quant",),
    "llm_weight_only": ("ipex_llm", "ipex_quant", "transformers"),
    "runtime_extension": ("ipex_runtime",),
}
#: Scripts for a command -> module and arguments.
COMMANDS = {
    "launcher": ("cpu.launch", "--ninstances", "1", "--ncores-per-instance", "1"),
    "codeless": ("cpu.auto_ipex",),
    "hypertune": ("cpu.hypertune", "--conf-file", str(FOLDER / "hypertune.yaml")),
}
PLAIN = sorted(path.stem for path in FOLDER.glob("*.py") if path.stem not in COMMANDS)


def skip_without(*packages: str) -> None:
    for package in packages:
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed")


@pytest.mark.parametrize("name", PLAIN)
def test_script(
    name: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    skip_without(*NEEDS.get(name, ()))
    monkeypatch.chdir(tmp_path)  # some write files
    threads = torch.get_num_threads()
    try:
        runpy.run_path(str(FOLDER / f"{name}.py"), run_name="__main__")
    finally:
        torch.set_num_threads(threads)
    assert capsys.readouterr().out.strip()


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_script_of_a_command(name: str, tmp_path: Path) -> None:
    skip_without("ipex_runtime", *(["yaml"] if name == "hypertune" else []))
    module, *options = COMMANDS[name]
    command = [sys.executable, "-m", f"intel_extension_for_pytorch.{module}", *options]
    done = subprocess.run(
        [*command, str(FOLDER / f"{name}.py")],
        capture_output=True,
        text=True,
        timeout=240,
        cwd=tmp_path,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    word = {"launcher": "threads: 1", "codeless": "output: (4, 64)", "hypertune": "latency (ms)"}
    assert word[name] in done.stdout + done.stderr


def test_every_script_is_on_the_page() -> None:
    page = (FOLDER.parent / "tutorials.md").read_text(encoding="utf-8")
    for path in FOLDER.glob("*.*"):
        assert f"tutorials/{path.name}" in page
    for name in [*PLAIN, "launcher", "hypertune"]:
        text = (FOLDER / f"{name}.py").read_text(encoding="utf-8")
        assert "import intel_extension_for_pytorch as ipex" in text

# SPDX-License-Identifier: Apache-2.0
"""The code on the pages of the documentation: each page is followed in an empty folder, as a reader would.

Python, files and commands run in their order; what a page needs it has to say. Commands that take minutes or another
index must have the options that they are shown with.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from docs_code import NAMED, SHELLS, blocks, commands, files

ipex = pytest.importorskip("ipex")
ROOT = Path(__file__).resolve().parents[1]
PAGES = [
    ROOT / "README.md",
    *sorted(ROOT.glob("docs/*.md")),
    *sorted(ROOT.glob("docs/tools/*.md")),
    *sorted(ROOT.glob("packages/*/README.md")),
]


def page_names(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


#: Pages that need what is not installed with the other packages: who runs them.
NOT_HERE = {
    "docs/xpu.md": "packages/ipex-xpu-kernels/tests",
    "packages/ipex-xpu-kernels/README.md": "packages/ipex-xpu-kernels/tests",
    "docs/recipes.md": "test_recipes.py",
    "docs/vllm.md": "nox -s vllm",
    "docs/vllm_cluster.md": "nox -s vllm",
    "docs/containers.md": "nox -s images, which executes the steps of the Dockerfiles",
}
#: A script of the reader's own, which a page names and does not show.
SCRIPT = """print("@hypertune {'name': 'latency'}")\nprint(1.0)\n"""
TUNE = "hyperparams: {launcher: {hp: [ncores_per_instance], ncores_per_instance: [1]}}\n"
#: The commands of the packages, and what they are.
PROGRAMS = {
    "ipex": "-m ipex",
    "ipexrun": "-m ipex_runtime.launch",
    "torchrun": "-m torch.distributed.run",
    "python": "",
}


@pytest.mark.parametrize(
    "page", [p for p in PAGES if any(blocks(p)) and page_names(p) not in NOT_HERE], ids=page_names
)
def test_page(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A page does what it says in an empty folder: its files, Python and commands, with no name that it has not."""
    for package in ("ipex_llm", "ipex_quant", "ipex_runtime", "yaml"):
        pytest.importorskip(package)
    older = pytest.importorskip("transformers").__version__.startswith("4.")
    if older and "transformers" in page.read_text("utf-8"):
        pytest.skip(
            "the pages name arguments as transformers 5 does, which the oldest release refuses"
        )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    programs = tmp_path / "programs"
    programs.mkdir()
    for name, module in PROGRAMS.items():
        (programs / name).write_text(f'#!/bin/sh\nexec "{sys.executable}" {module} "$@"\n')
        (programs / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(programs), prepend=os.pathsep)
    own = {"script.py": SCRIPT, "train.py": SCRIPT, "tune.yaml": TUNE}
    for name, text in (own | files(page)).items():
        (tmp_path / name).write_text(text)
    torch.manual_seed(0)
    threads, names = torch.get_num_threads(), {"__name__": "__main__"}
    try:
        for block in blocks(page):
            if NAMED.match(block.text):
                continue
            if block.language == "python":
                code = compile("\n" * (block.line - 1) + block.text, str(page), "exec")
                with contextlib.redirect_stdout(None):
                    exec(code, names)
            elif block.language in SHELLS:
                run_commands(commands(block).splitlines())
    finally:
        torch.set_num_threads(threads)
        torch.set_grad_enabled(True)


def test_the_plan_of_a_page_is_what_it_prints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("ipex_llm")
    if pytest.importorskip("transformers").__version__.startswith("4."):
        pytest.skip("the page names arguments as transformers 5 does")
    monkeypatch.chdir(tmp_path)
    section = (ROOT / "docs/llm.md").read_text("utf-8").partition("## What would happen")[2]
    code, shown = section.split("```python\n")[1], section.split("```text\n")[1]
    run_commands(["ipex llm make-model ./tiny"])
    import transformers

    names = {"ipex": ipex, "torch": torch, "transformers": transformers, "path": "./tiny"}
    capsys.readouterr()
    exec(code.partition("```")[0], names)
    assert capsys.readouterr().out == shown.partition("```")[0]


def test_the_depth_of_a_family_is_what_the_page_prints(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("ipex_llm")
    pytest.importorskip("transformers")
    text = (ROOT / "docs/model_families.md").read_text("utf-8")
    ((code, shown),) = re.findall(r"```python\n(.*?)```\n\n```text\n(.*?)```", text, re.DOTALL)
    exec(code, {})
    assert capsys.readouterr().out == shown


def test_each_tab_of_the_first_page_prints_what_stands_below(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if pytest.importorskip("transformers").__version__.startswith("4."):
        pytest.skip("the page names arguments as transformers 5 does")
    pytest.importorskip("ipex_llm")
    monkeypatch.chdir(tmp_path)
    run_commands(["ipex llm make-model ./tiny"])
    text = (ROOT / "docs/index.md").read_text("utf-8")
    tabs = re.findall(r"^::::\{tab-item\} (.*?)^::::$", text, re.DOTALL | re.MULTILINE)
    cards = re.findall(r"^:::\{grid-item-card\} (.*)$", text, re.MULTILINE)
    assert [tab.partition("\n")[0] for tab in tabs] == cards
    for tab in tabs:
        ((code, shown),) = re.findall(r"```python\n(.*?)```\n\n```text\n(.*?)```", tab, re.DOTALL)
        capsys.readouterr()
        exec(compile(code, "docs/index.md", "exec"), {"__name__": "__main__"})
        assert capsys.readouterr().out == shown


def run_commands(lines: list[str]) -> None:
    """Run commands of a page: those of language models here, which saves a process each, then the others."""
    from ipex_cli.app import app

    for line in lines:
        if line.startswith("ipex llm "):
            words = shlex.split(line, comments=True)[1:]
            result = pytest.importorskip("typer.testing").CliRunner().invoke(app, words)
            assert result.exit_code == 0, f"{line}\n{result.output}"
    rest = "\n".join(line for line in lines if not line.startswith("ipex llm "))
    if not rest.strip() or (
        "cmake" in rest and not (shutil.which("cmake") and shutil.which("g++"))
    ):
        return
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", rest],
        capture_output=True,
        text=True,
        timeout=240,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, rest + done.stdout[-2000:] + done.stderr[-4000:]


def test_each_page_says_who_needs_it() -> None:
    """Below the title stands one line: "For users of ...: what the page gives." """
    whole = {"changelog.md", "contributing.md"}  # other files, included
    for page in PAGES:
        if "docs" in page.parts[-3:-1] and page.name not in whole:
            lines = page.read_text("utf-8").splitlines()
            found = (lines[0].startswith("# "), lines[1], lines[3])
            assert found == (True, "", ""), page
            assert re.fullmatch(r"For [^:]+: \S.*\.", lines[2]), f"{page}: {lines[2]}"


def test_each_page_for_users_begins_with_an_example() -> None:
    """Near the top of a page stands code or a command that `test_page`, or what `ELSEWHERE` names, runs."""
    whole = {"changelog.md", "contributing.md"}  # other files, included
    runnable = ("python", *SHELLS)
    for page in PAGES:
        text = page.read_text("utf-8")
        if "docs" not in page.parts[-3:-1] or page.name in whole or "\nFor contributors: " in text:
            continue
        first = next((b for b in blocks(page) if b.language in runnable), None)
        assert first is not None and first.text.strip(), f"{page}: no example"
        assert first.line <= 24, f"{page}:{first.line}: the first example is not near the top"


def test_every_block_is_of_a_known_kind() -> None:
    """What is not run is text, a table of contents, or a file of a format that is read here."""
    readers = {
        "toml": pytest.importorskip("tomllib").loads,  # Python 3.11
        "yaml": pytest.importorskip("yaml").safe_load,
    }
    known = {
        "python",
        "text",
        "cpp",
        "cmake",
        "{toctree}",
        "{testcleanup}",
        "{include}",
        "{eval-rst}",
    }
    for page in PAGES:
        for block in blocks(page):
            if block.language in readers:
                assert readers[block.language](block.text), f"{page}:{block.line}"
            else:
                assert block.language in known or block.language in SHELLS, f"{page}:{block.line}"
            if block.language in ("cpp", "cmake"):
                assert NAMED.match(block.text), f"{page}:{block.line}: is not part of a file"


#: Commands of packages that may not be installed.
OF_OTHERS = ("auto", "hypertune", "llm", "run", "topology")


def options_of(words: list[str]) -> set[str] | None:
    """Return the options of the command that words name; None if its package is not installed."""
    import typer.main

    from ipex_cli.app import app

    if words[0] == "ipexrun" or words[:2] == ["ipex", "run"]:
        if importlib.util.find_spec("ipex_runtime") is None:
            return None
        import argparse

        from ipex_runtime.launch import launch

        parser = launch.init_parser(argparse.ArgumentParser())
        return set(parser._option_string_actions)
    command: Any = typer.main.get_command(app)
    for word in words[1:]:
        inner = getattr(command, "get_command", None)
        if inner is None:
            break
        found = inner(None, word)
        if found is None and "ops" in getattr(command, "commands", ()):
            found = command.commands["ops"]  # the word may be left out
        if found is None:
            assert word in OF_OTHERS, f"there is no command {' '.join(words)}"
            return None
        command = found
    if getattr(command, "ignore_unknown_options", False):
        return None
    return {name for p in command.params for name in (*p.opts, *p.secondary_opts)} | {"--help"}


@pytest.mark.parametrize(
    "page", [p for p in PAGES if any(b.language in SHELLS for b in blocks(p))], ids=page_names
)
def test_options(page: Path) -> None:
    pytest.importorskip("typer")
    for block in blocks(page):
        if block.language not in SHELLS:
            continue
        for line in block.text.replace("\\\n", " ").splitlines():
            line = line.removeprefix("$ ")
            if not line.startswith(("ipex ", "ipexrun ")):
                continue
            words = shlex.split(line, comments=True)
            known = options_of(words)
            if known is None or words[1] in ("auto", "hypertune"):
                continue
            for word in words[1:]:
                if word.endswith(".py"):
                    break  # what follows belongs to the script
                if word.startswith("--"):
                    assert word.partition("=")[0] in known, line


@pytest.mark.parametrize(
    ("arguments", "status", "text"),
    [
        (["ipex.optimize"], 0, "differs"),
        (["get_smooth_quant_qconfig_mapping"], 0, "ipex.quantization"),
        (["frontend.auto_channels_last_flag"], 0, "not offered"),
        (["--json", "xpu.memory"], 0, '"torch.xpu.empty_cache"'),
        (["no_such_name"], 1, ""),
    ],
)
def test_migrate(arguments: list[str], status: int, text: str) -> None:
    testing = pytest.importorskip("typer.testing")
    from ipex_cli.app import app

    done = testing.CliRunner().invoke(app, ["migrate", *arguments])
    assert done.exit_code == status
    assert text in " ".join(done.stdout.split())

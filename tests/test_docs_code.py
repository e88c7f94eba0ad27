# SPDX-License-Identifier: Apache-2.0
"""The code on the pages of the documentation that is not run when they are built.

Blocks of Python run here if a small model and input are all they need; of the others every name of ipex must exist.
Commands must have the options that they are shown with.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import importlib.util
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

ipex = pytest.importorskip("ipex")
ROOT = Path(__file__).resolve().parents[1]
PAGES = [
    ROOT / "README.md",
    *sorted(ROOT.glob("docs/*.md")),
    *sorted(ROOT.glob("docs/tools/*.md")),
    *sorted(ROOT.glob("packages/*/README.md")),
]
#: Words of blocks that need more than this process: others, a device, minutes, or a download.
NOT_HERE = (
    "init_process_group",
    "xpu",
    "torch.compile",
    "aoti_load",
    "from_pretrained",
    "load_low_precision_checkpoint",
    "CPUPool([",
    'print("@',
)


def code(page: Path, *languages: str) -> Iterator[str]:
    text = page.read_text(encoding="utf-8")
    for language, block in re.findall(r"^```(\w+)\n(.*?)^```", text, re.DOTALL | re.MULTILINE):
        if language in languages:
            yield block


def names_used(tree: ast.AST) -> set[str]:
    """Return the names that code reads and does not set."""
    nodes = [node for node in ast.walk(tree) if isinstance(node, ast.Name)]
    stored = {node.id for node in nodes if isinstance(node.ctx, ast.Store)}
    for node in ast.walk(tree):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            stored.update((a.asname or a.name).partition(".")[0] for a in node.names)
        elif isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            stored.add(node.name)
        elif isinstance(node, ast.arg):
            stored.add(node.arg)
    used = {node.id for node in nodes if isinstance(node.ctx, ast.Load)}
    return used - stored - set(vars(builtins))


def dotted(node: ast.AST) -> str | None:
    """Return ``a.b.c`` for such an expression."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        left = dotted(node.value)
        return None if left is None else f"{left}.{node.attr}"
    return None


def have(name: str) -> bool:
    """Return whether the package behind a name of the facade is installed."""
    packages = {"llm": "ipex_llm", "quantization": "ipex_quant", "runtime": "ipex_runtime"}
    package = packages.get(name.split(".")[1]) if "." in name else None
    return importlib.util.find_spec(package or "ipex") is not None


def check_names(tree: ast.AST) -> None:
    from ipex import _migration

    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(("ipex", "intel")):
            first = (node.module or "").partition(".")[0]
            if importlib.util.find_spec(first) is None or not have(node.module or ""):
                continue
            for alias in node.names:
                assert _migration.resolve(f"{node.module}.{alias.name}") is not None
        name = dotted(node) if isinstance(node, ast.Attribute) else None
        if name is not None and name.startswith("ipex.") and have(name):
            if ".xpu." in name and importlib.util.find_spec("ipex_xpu_kernels") is None:
                continue
            assert _migration.resolve(name) is not None, name


def page_names(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("page", [p for p in PAGES if any(code(p, "python"))], ids=page_names)
def test_python(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(128, 128), torch.nn.ReLU(), torch.nn.Linear(128, 128)
    )
    names: dict[str, Any] = {
        "ipex": ipex,
        "torch": torch,
        "model": model.eval(),
        "x": torch.randn(4, 128),
        "y": torch.randn(4, 128),
        "batch": torch.randn(4, 128),
        "residual": torch.randn(4, 128),
        "weight": torch.randn(64, 128),
        "norm_weight": torch.ones(128),
    }
    threads = torch.get_num_threads()
    for block in code(page, "python"):
        tree = ast.parse(block)
        check_names(tree)
        missing = names_used(tree) - set(names)
        modules = {
            (node.module or "").partition(".")[0]
            for node in ast.walk(tree)
            if isinstance(node, ast.ImportFrom)
        }
        absent = [m for m in modules if m and importlib.util.find_spec(m) is None]
        if missing or absent or any(word in block for word in NOT_HERE):
            continue
        with contextlib.redirect_stdout(None), torch.no_grad():
            exec(compile(tree, page.name, "exec"), names)
    torch.set_num_threads(threads)


#: Commands of packages that may not be installed.
OF_OTHERS = ("auto", "hypertune", "llm", "run", "topology")


def options_of(words: list[str]) -> set[str] | None:
    """Return the options of the command that words name; None if its package is not installed."""
    import typer.main

    from ipex.cli import app

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
    "page", [p for p in PAGES if any(code(p, "bash", "console", "sh"))], ids=page_names
)
def test_commands(page: Path) -> None:
    pytest.importorskip("typer")
    for block in code(page, "bash", "console", "sh"):
        for line in block.replace("\\\n", " ").splitlines():
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
    from ipex.cli import app

    done = testing.CliRunner().invoke(app, ["migrate", *arguments])
    assert done.exit_code == status
    assert text in " ".join(done.stdout.split())

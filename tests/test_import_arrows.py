# SPDX-License-Identifier: Apache-2.0
"""Which package may import which: read from the sources, so that nothing has to be installed."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from check_versions import load_project
from house_rooms import ARROWS

ROOT = Path(__file__).resolve().parent.parent

# The wheel of the facade ships four import names, which belong together.
FACADE = {"ipex", "intel_extension_for_pytorch", "ipex_bench", "ipex_cli"}
ALLOWED = {wheel: set(allowed) for wheel, allowed in ARROWS.items()}
ALLOWED |= {name: ALLOWED["ipex"] | FACADE - {name} for name in FACADE}

#: Folders that a program imports to be extended by them, and that program: nothing else imports them.
PLUG_INS = {"packages/ipex-llm/src/ipex_llm/integrations/vllm": "vllm"}

MODULES = sorted(
    path for path in ROOT.glob("packages/*/src/*/") if path.is_dir() and path.name in ALLOWED
)


def imported(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Yield (top-level module, line) of each absolute import, `import_module("...")` included."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name.split(".")[0], node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            yield node.module.split(".")[0], node.lineno
        elif isinstance(node, ast.Call) and node.args:
            function = node.func
            name = (
                function.attr
                if isinstance(function, ast.Attribute)
                else getattr(function, "id", "")
            )
            argument = node.args[0]
            if (
                name in {"import_module", "__import__"}
                and isinstance(argument, ast.Constant)
                and isinstance(argument.value, str)
                and not argument.value.startswith(".")
            ):
                yield argument.value.split(".")[0], node.lineno


def imported_at_once(tree: ast.Module) -> Iterator[tuple[str, int]]:
    """Yield the imports that run when the module is imported, those under a condition left out."""
    for node in tree.body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield from imported(node)


def files(package: Path) -> list[Path]:
    return sorted(path for path in package.rglob("*.py"))


@pytest.mark.parametrize("package", MODULES, ids=lambda path: path.name)
def test_arrows(package: Path) -> None:
    forbidden = set(ALLOWED) - ALLOWED[package.name] - {package.name}
    found = [
        f"{path.relative_to(ROOT)}:{line}: imports {name}"
        for path in files(package)
        for name, line in imported(ast.parse(path.read_text(encoding="utf-8")))
        if name in forbidden
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize("package", MODULES, ids=lambda path: path.name)
def test_only_declared_dependencies_are_imported_at_once(package: Path) -> None:
    """An optional dependency is imported where it is used, never at the top of a module that others need."""
    project = load_project(package.parent.parent)
    core = load_project(ROOT / "packages/ipex-core")
    # torch comes with core, which every package but core itself depends on.
    requirements = [*project.dependencies, *core.dependencies]
    declared = {requirement.name.replace("-", "_") for requirement in requirements}
    allowed = {*sys.stdlib_module_names, *declared, *ALLOWED[package.name], package.name}
    found = [
        f"{path.relative_to(ROOT)}:{line}: imports {name}, not a dependency of {project.name}"
        for path in files(package)
        for name, line in imported_at_once(ast.parse(path.read_text(encoding="utf-8")))
        if name not in allowed and PLUG_INS.get(path.parent.relative_to(ROOT).as_posix()) != name
    ]
    assert not found, "\n".join(found)


def test_the_reader_sees_every_form() -> None:
    source = (
        "import ipex_llm.x\nfrom ipex_quant import y\nfrom . import z\n"
        "import importlib\ndef f():\n  importlib.import_module('ipex_runtime.w')\n"
    )
    names = {name for name, _ in imported(ast.parse(source))}
    assert names == {"ipex_llm", "ipex_quant", "ipex_runtime", "importlib"}


def test_every_package_is_covered() -> None:
    unknown = [path.name for path in ROOT.glob("packages/*/src/*/") if path.name not in ALLOWED]
    assert unknown in ([], ["__pycache__"]), f"packages without a row in ALLOWED: {unknown}"
    assert MODULES

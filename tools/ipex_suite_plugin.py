# SPDX-License-Identifier: Apache-2.0
"""pytest plugin of `tools/ipex_suite.py`: runs one file of IPEX's tests and writes each outcome at once.

A test file often imports private names of IPEX that few of its tests need. Each of them that is not offered here gets a
stand-in, in this process only: importing it works, and using it raises `PrivateName`, so that only the tests that need
it fail, with that reason.

Environment:
    IPEX_SUITE_RECORD: The file that outcomes are appended to, a line of JSON each. A test that has started and has no
        outcome crashed or hung.
    IPEX_SUITE_SKIP: A file with one test per line that must not run again.
"""

from __future__ import annotations

import ast
import importlib
import json
import os
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import pytest

ALIAS = "intel_extension_for_pytorch"
#: The longest text of a failure that is kept.
LONGEST = 600


class PrivateName(AttributeError):
    """A test used a private name of IPEX that is not offered here."""


class _StandInType(type):
    """The class of stand-ins: every use raises, except naming it as a base class."""

    def _refuse(cls) -> NoReturn:
        raise PrivateName(f"{cls.__dict__.get('ipex_name', cls.__name__)} is a private name")

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        cls._refuse()

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        cls._refuse()

    def __instancecheck__(cls, instance: Any) -> bool:
        cls._refuse()

    def __iter__(cls) -> Iterator[Any]:
        cls._refuse()


def stand_in(name: str) -> type:
    """Return a stand-in for a dotted name."""
    return _StandInType(name.rpartition(".")[2], (), {"ipex_name": name, "__module__": __name__})


def imports(tree: ast.Module) -> Iterator[tuple[str, str | None]]:
    """Yield what the top of a file imports from IPEX: a module, and the name in it or None for the module itself."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == ALIAS:
            yield from ((str(node.module), alias.name) for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from ((a.name, None) for a in node.names if a.name.startswith(f"{ALIAS}."))


def _module(name: str) -> Any:
    """Import a module, or make an empty one under its name."""
    try:
        return importlib.import_module(name)
    except (ImportError, AttributeError, NotImplementedError):
        parent, _, child = name.rpartition(".")
        module = types.ModuleType(name)
        module.__path__ = []  # modules below it can be made, too
        sys.modules[name] = module
        setattr(_module(parent), child, module)
        return module


def supply(path: Path) -> list[str]:
    """Make every import from IPEX in a file work; return the names that got a stand-in."""
    made = []
    for module_name, name in imports(ast.parse(path.read_text("utf-8"))):
        module = _module(module_name)
        if name is None or name == "*":
            continue
        try:
            getattr(module, name)
            continue
        except (ImportError, AttributeError, NotImplementedError):
            pass
        try:
            importlib.import_module(f"{module_name}.{name}")
        except (ImportError, AttributeError, NotImplementedError):
            dotted = f"{module_name}.{name}".removeprefix(f"{ALIAS}.")
            setattr(module, name, stand_in(dotted))
            made.append(dotted)
    return made


def _write(**record: Any) -> None:
    with open(os.environ["IPEX_SUITE_RECORD"], "a", encoding="utf-8") as file:
        file.write(json.dumps(record) + "\n")


def test_name(nodeid: str) -> str:
    """Return a test's name in the table: without the folder, ``test_mha.py::TestClass::test_name``."""
    path, *rest = nodeid.split("::")
    return "::".join([path.rpartition("/")[2], *rest])


def pytest_pycollect_makemodule(module_path: Path, parent: Any) -> None:
    """Supply stand-ins before pytest imports a file and the files beside it that it imports."""
    del parent
    supply(module_path)
    beside = {p.stem: p for p in module_path.parent.glob("*.py")}
    todo, seen = [module_path], {module_path}
    while todo:
        for node in ast.walk(ast.parse(todo.pop().read_text("utf-8"))):
            names = []
            if isinstance(node, ast.ImportFrom):
                names = [str(node.module)]
            elif isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            for name in names:
                other = beside.get(name)
                if other is not None and other not in seen:
                    seen.add(other)
                    todo.append(other)
                    supply(other)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave out tests that have an outcome already, or that stopped an earlier process."""
    done = set(Path(os.environ["IPEX_SUITE_SKIP"]).read_text("utf-8").splitlines())
    items[:] = [item for item in items if test_name(item.nodeid) not in done]


def pytest_collectreport(report: pytest.CollectReport) -> None:
    """Record a file that cannot be imported, as a test of the file's name."""
    if report.failed:
        text = str(report.longrepr).strip()
        _write(test=test_name(report.nodeid), outcome="failed", text=text[-LONGEST:])


def pytest_runtest_logstart(nodeid: str, location: Any) -> None:
    """Record that a test starts."""
    del location
    _write(test=test_name(nodeid), outcome="started", text="")


def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> None:
    """Record the outcome of a test, and of a subtest that failed."""
    if call.excinfo is None:
        if call.when == "call":
            _write(test=test_name(item.nodeid), outcome="passed", text="")
        return
    skipped = call.excinfo.errisinstance(pytest.skip.Exception) or call.excinfo.typename in (
        "SkipTest",
        "Skipped",
    )
    text = f"{call.excinfo.typename}: {call.excinfo.value}"[:LONGEST]
    if not skipped:
        own = [entry for entry in call.excinfo.traceback if Path(entry.path) == item.path]
        text += f" | {own[-1].statement}" if own else ""
    outcome = "skipped" if skipped else "failed"
    _write(test=test_name(item.nodeid), outcome=outcome, text=text)

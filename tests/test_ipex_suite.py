# SPDX-License-Identifier: Apache-2.0
"""`tools/ipex_suite.py`, on a small suite of our own, and the table that it writes."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[1]


def _load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "tools" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


suite = _load("ipex_suite")

FILE = """
import os, time, unittest
import intel_extension_for_pytorch as ipex
from helper import STILL
from intel_extension_for_pytorch.nowhere import gone, Base
import intel_extension_for_pytorch.some.where as where

class Sub(Base):
    pass

class Test(unittest.TestCase):
    def test_passes(self):
        self.assertTrue(callable(ipex.optimize) and STILL is not None)
    def test_uses_private(self):
        gone(1)
    def test_isinstance(self):
        isinstance(1, Sub.mro()[1])
    def test_skipped(self):
        raise unittest.SkipTest("no torchvision")
    def test_subtests(self):
        for i in range(3):
            with self.subTest(i=i):
                self.assertNotEqual(i, 1)
    def test_w_crashes(self):
        os.abort()
    def test_x_hangs(self):
        time.sleep(1000)
    def test_y_after(self):
        pass
"""


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> dict[str, tuple[str, str]]:
    """Outcomes of a small suite."""
    folder = tmp_path_factory.mktemp("suite") / "tests" / "cpu"
    folder.mkdir(parents=True)
    # A package of that name without torch, whose import takes seconds.
    alias = folder.parents[1] / "alias" / "intel_extension_for_pytorch"
    alias.mkdir(parents=True)
    (alias / "__init__.py").write_text("def optimize(): pass\n")
    (folder / "test_small.py").write_text(FILE)
    (folder / "helper.py").write_text("from intel_extension_for_pytorch.else_where import STILL\n")
    (folder / "test_broken.py").write_text("import intel_extension_for_pytorch\nimport no_such\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(alias.parent))
        result = suite.run_file(folder / "test_small.py", limit=3.0)
        return result | suite.run_file(folder / "test_broken.py", limit=3.0)


def test_outcomes(found):
    outcomes = {test.rpartition("::")[2]: outcome for test, (outcome, _) in found.items()}
    assert outcomes == {
        "test_passes": "passed",
        "test_uses_private": "failed",
        "test_isinstance": "failed",
        "test_skipped": "skipped",
        "test_subtests": "failed",
        "test_w_crashes": "crashed",
        "test_x_hangs": "timeout",
        "test_y_after": "passed",
        "test_broken.py": "failed",
    }
    rows = suite.merge({}, found)
    kinds = {test.rpartition("::")[2]: row.kind for test, row in rows.items()}
    assert kinds["test_uses_private"] == kinds["test_isinstance"] == "private"
    assert kinds["test_skipped"] == kinds["test_broken.py"] == "environment"
    assert kinds["test_w_crashes"] == kinds["test_x_hangs"] == "open" and not kinds["test_passes"]


def test_comparison_and_update(tmp_path):
    row = suite.Row
    old = {
        r.test: r
        for r in (
            row("a.py::t", "passed"),
            row("a.py::gone", "passed"),
            row("a.py::known", "failed", "open: our reason"),
            row("a.py::mended", "failed", "open: x"),
            row("b.py::other", "passed"),
        )
    }
    new = {
        "a.py::t": ("failed", "ValueError: x"),
        "a.py::known": ("failed", "another text"),
        "a.py::mended": ("passed", ""),
        "a.py::new": ("failed", "AssertionError: onednn_verbose"),
    }
    worse, better = suite.compare(old, new)
    assert [line.split(":: ")[0].split(": ")[0] for line in worse] == ["a.py::t", "a.py::gone"]
    assert [line.split(": ")[0] for line in better] == ["a.py::mended", "a.py::new"]
    rows = suite.merge(old, new)
    assert rows["a.py::known"].reason == "open: our reason" and "a.py::gone" not in rows
    assert rows["a.py::mended"] == row("a.py::mended", "passed") and "b.py::other" in rows
    assert rows["a.py::new"].kind == "log" and rows["a.py::t"].reason == "open: ValueError: x"
    part = suite.merge(old, new, whole=False)
    assert part["a.py::gone"] == old["a.py::gone"] and part["a.py::new"] == rows["a.py::new"]
    suite.write(rows, tmp_path / "table.tsv")
    assert suite.read(tmp_path / "table.tsv") == rows
    text = suite.rates(rows.values())
    assert "| of public API and ops: pass | 2 of 4 (50 %) |" in text
    assert "| all that run: pass | 2 of 5 (40 %) |" in text
    stock = {**rows, "c.py::t": row("c.py::t", "failed", "stock: x")}
    text = suite.rates(stock.values())
    assert "| of public API and ops: pass | 2 of 5 (40 %) |" in text
    assert "torch or transformers themselves: pass | 2 of 4 (50 %) |" in text
    text = suite.rates(rows.values())
    page = tmp_path / "page.md"
    page.write_text(f"before\n{suite.START}\nold\n{suite.END}\nafter\n")
    suite.put(text, page)
    assert page.read_text() == f"before\n{suite.START}\n{text}\n{suite.END}\nafter\n"
    page.write_text("no marks")
    with pytest.raises(ValueError, match="must have the lines"):
        suite.put(text, page)


def test_kind_of_a_statement_of_several_lines():
    text = "AssertionError: False is not true | self.assertTrue(\n    any(n.kind() == kind\n    for n in nodes))"
    assert suite.classify("failed", text).startswith("nodes: AssertionError")


def test_arguments(tmp_path, capsys):
    with pytest.raises(SystemExit):
        suite.main([str(tmp_path)])
    assert "must be a checkout of intel-extension-for-pytorch" in capsys.readouterr().err


def test_table_and_page():
    rows = suite.read()
    for row in rows.values():
        assert row.outcome in suite.OUTCOMES, row
        assert bool(row.reason) == (row.outcome != "passed"), row
        assert not row.reason or row.kind in suite.KINDS, row
    assert f"{suite.START}\n{suite.rates(rows.values())}\n{suite.END}" in suite.PAGE.read_text()


# -- the table of the suite and the migration table ------------------------------------------------------------------

#: How the reason of a test that is open begins -> the row of the migration table that tells of it.
OPEN = {
    "Conv1d stays contiguous": "enable_auto_channels_last",
    "packed experts in float32": "llm.modules.GatedMLPMOE",
    "state_dict of a cast model": "optimize",
    "groups of 4 input features": "nn.modules.WeightOnlyQuantizedLinear",
    "the bias is added in float32": "nn.modules.WeightOnlyQuantizedLinear",
}
#: Reasons that say nothing of what a name does: other names, graphs, logs, or something that is not installed.
ELSEWHERE = {"nodes", "private", "log", "environment", "stock"}


def _migration() -> dict[str, list[str]]:
    path = ROOT / "packages/ipex/src/ipex_cli/_data/migration.tsv"
    lines = path.read_text(encoding="utf-8").splitlines()
    rows = (line.split("\t") for line in lines if line and not line.startswith("#"))
    return {row[0]: row for row in rows}


def test_what_is_open_differs():
    """A test that fails for what our function does, not for how it was written, is told in the migration table."""
    migration, used = _migration(), set()
    for test, row in suite.read(suite.TABLE).items():
        if row.kind != "open":
            continue
        text = row.reason.partition(": ")[2]
        found = [start for start in OPEN if text.startswith(start)]
        assert found, f"{test}: no row of the migration table tells of it: {text}"
        used.add(found[0])
        assert migration[OPEN[found[0]]][1] in ("differs", "absent"), OPEN[found[0]]
    assert used == set(OPEN)


def test_names_that_are_the_same_pass():
    """Where tests have the name of an op or function that is "same", one passes, and no failure is open."""
    table = suite.read(suite.TABLE)
    tests = [(row, f"_{test.rpartition('::')[2].lower()}_") for test, row in table.items()]
    seen, wrong = set(), []
    for name, row in _migration().items():
        last = name.rpartition(".")[2]
        if row[1] != "same" or ("_" not in last and not name.startswith("torch.ops.")):
            continue
        found = [test for test, text in tests if f"_{last.lower()}_" in text]
        seen |= {last for _ in found}
        failed = [test for test in found if test.outcome != "passed"]
        if any(test.kind not in ELSEWHERE for test in failed):
            wrong.append(f"{name}: {[test.test for test in failed]}")
        if len(failed) == len(found) > 0 and not all(t.kind != "stock" for t in failed):
            wrong.append(f"{name}: no test passes")
    assert not wrong, "\n".join(wrong)
    assert {"rnnt_update_batch", "rmsnorm", "dequantize_nf4", "rpn_nms", "adagrad_step"} <= seen


def test_names_of_one_thing_have_one_state():
    """A name in another module is no way around what the table says of the first."""
    states: dict[tuple[str, str], set[str]] = {}
    for name, row in _migration().items():
        if row[1] in ("same", "differs") and not name.startswith("xpu."):
            states.setdefault((name.rpartition(".")[2], row[2]), set()).add(row[1])
    assert not [key for key, found in states.items() if len(found) > 1]

# SPDX-License-Identifier: Apache-2.0
"""What schemas and zizmor do not know of our workflows: that they run sessions which exist, on what we support."""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path
from typing import Any

import pytest

import generate_isa

ROOT = Path(__file__).resolve().parent.parent
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))
NOX = "$/.github/actions/nox"
#: Jobs that run no session: they publish what a job before them has made.
PUBLISH = {"docs.deploy", "release.attest", "release.publish", "release.announce"}


def jobs() -> dict[str, dict[str, Any]]:
    """Return all jobs, by workflow and name."""
    yaml = pytest.importorskip("yaml")
    return {
        f"{path.stem}.{name}": job
        for path in WORKFLOWS
        for name, job in yaml.safe_load(path.read_text(encoding="utf-8"))["jobs"].items()
    }


#: Where the sessions are.
SESSIONS = [ROOT / "noxfile.py", *sorted(ROOT.glob("tools/nox_*.py"))]


def sessions() -> set[str]:
    """Return the names of the sessions in noxfile.py and what it imports."""
    text = "\n".join(path.read_text(encoding="utf-8") for path in SESSIONS)
    return set(re.findall(r"@nox\.session\b(?:(?!\ndef ).)*?\ndef (\w+)\(", text, re.DOTALL))


def test_each_job_runs_one_session_that_exists() -> None:
    known = sessions()
    assert {"lint", "tests", "tests_isa", "torch", "nightly", "images", "release", "site"} <= known
    for name, job in jobs().items():
        ran = [step for step in job["steps"] if step.get("uses") == NOX]
        assert len(ran) == (0 if name in PUBLISH else 1), name
        for step in ran:
            assert step["with"]["session"].partition("(")[0] in known, name


def test_a_reader_meets_demo_and_tests_first() -> None:
    screen = (ROOT / "noxfile.py").read_text(encoding="utf-8").splitlines()[:45]
    assert {
        "def demo(session: nox.Session) -> None:",
        "def tests(session: nox.Session) -> None:",
    } <= set(screen)


@pytest.mark.parametrize("path", SESSIONS, ids=lambda path: path.name)
def test_sessions_need_only_nox(path: Path) -> None:
    """`pip install nox && nox -s demo` has to do: packaging comes with nox."""
    names = {"nox", "packaging", "machine", "generate_isa", *(session.stem for session in SESSIONS)}
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        modules = [node.module] if isinstance(node, ast.ImportFrom) else []
        modules += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        for module in modules:
            assert str(module).split(".")[0] in {*names, *sys.stdlib_module_names}, node.lineno


def test_rights_are_those_of_the_job() -> None:
    for name, job in jobs().items():
        rights = job["permissions"]
        writes = {right for right, value in rights.items() if value != "read"}
        assert not writes or name in PUBLISH, name
        for step in job["steps"]:
            if str(step.get("uses")).startswith("actions/checkout@"):
                assert step["with"]["persist-credentials"] is False, name
                assert not writes, f"{name}: what may write must not run code of a checkout"


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_actions_are_named_by_commit_and_version(path: Path) -> None:
    for line in re.findall(r"uses: (.*)", path.read_text(encoding="utf-8")):
        assert line == NOX or re.fullmatch(
            r"[\w.-]+/[\w.-]+@[0-9a-f]{40} # v\d+\.\d+(\.\d+)?", line
        )


def test_every_level_and_every_python() -> None:
    levels = generate_isa.levels()
    found = jobs()
    emulated = {
        kind: found[f"levels.{kind}"]["strategy"]["matrix"]["level"] for kind in ("qemu", "sde")
    }
    assert sorted(emulated["qemu"] + emulated["sde"]) == sorted(levels)
    text = (ROOT / "tools/nox_tests.py").read_text(encoding="utf-8")
    cpus = re.search(r"^QEMU_CPUS = \{(.*)\}", text, re.MULTILINE)
    assert cpus and re.findall(r'"(\w+)":', cpus[1]) == emulated["qemu"]
    for name in ("ci.tests", "ci.torch"):
        versions = found[name]["strategy"]["matrix"]["python"]
        assert versions[0] == "3.10" and versions[-1] == "3.14" and len(versions) == 5


def test_forms_ask_for_the_report() -> None:
    yaml = pytest.importorskip("yaml")
    forms = [p for p in (ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml") if p.name != "config.yml"]
    assert len(forms) == 3
    for path in forms:
        parts = yaml.safe_load(path.read_text(encoding="utf-8"))["body"]
        (report,) = (part for part in parts if part.get("id") == "report")
        assert "ipex doctor --report report.md" in report["attributes"]["description"]

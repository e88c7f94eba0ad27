# SPDX-License-Identifier: Apache-2.0
"""What the documents tell people to type exists."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import readme_figures

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / ".ci/run",
    *sorted(ROOT.glob("docs/*.md")),
    *sorted(ROOT.glob("packages/*/README.md")),
]


@pytest.fixture(scope="module")
def sessions() -> set[str]:
    pytest.importorskip("nox")
    command = [sys.executable, "-m", "nox", "-f", str(ROOT / "noxfile.py"), "--list"]
    listed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    names = re.findall(r"^[*-] (\S+?)(?:\(.*\))? ->", listed, re.MULTILINE)
    assert {"demo", "tests", "lint"} <= set(names)
    return set(names)


def commands(text: str) -> set[str]:
    """Return the session names in `nox -s a b` and `nox -s "c(d='e')"`."""
    found: set[str] = set()
    for rest in re.findall(r"nox -s ([^`\n;&#|)]*(?:\([^)]*\))?)", text):
        words = rest.split(" -- ")[0].replace('"', "").split()
        found.update(re.sub(r"\(.*", "", word) for word in words if not word.startswith(("-", "$")))
    return found - {"NAME"}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_sessions_exist(document: Path, sessions: set[str]) -> None:
    unknown = commands(document.read_text(encoding="utf-8")) - sessions
    assert not unknown, f"{document.name} names nox sessions that do not exist: {sorted(unknown)}"


def test_readme_has_the_two_commands() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert "pip install nox && nox -s demo" in text
    assert "pip install nox && nox -s tests" in text


def test_ci_runs_the_default_sessions() -> None:
    assert "-s lint typecheck tests docs" in (ROOT / ".ci/run").read_text(encoding="utf-8")


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_relative_links_lead_somewhere(document: Path) -> None:
    text = re.sub(r"```.*?```", "", document.read_text(encoding="utf-8"), flags=re.DOTALL)
    targets = re.findall(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)", text)
    generated = ("generated/",)
    broken = [
        target
        for target in targets
        if not target.startswith(generated) and not (document.parent / target).exists()
    ]
    assert not broken, f"{document.name}: broken links {broken}"


def test_every_package_is_in_the_readme() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    for folder in ROOT.glob("packages/*/pyproject.toml"):
        assert f"packages/{folder.parent.name}" in text


def test_every_extra_is_in_the_readme_of_ipex() -> None:
    text = (ROOT / "packages/ipex/README.md").read_text(encoding="utf-8")
    project = (ROOT / "packages/ipex/pyproject.toml").read_text(encoding="utf-8")
    (extras,) = re.findall(r"^\[project.optional-dependencies\]\n(.*?)\n\n", project, re.M | re.S)
    names = re.findall(r"^([a-z]+) =", extras, re.MULTILINE)
    first = "".join(re.findall(r"^\|(.*?)\|", text, re.MULTILINE))
    assert "all" in names
    assert [name for name in names if f"`{name}`" not in first] == []


def test_every_package_carries_the_licence() -> None:
    licence = (ROOT / "LICENSE").read_bytes()
    for project in ROOT.glob("packages/*/pyproject.toml"):
        copy = project.parent / "LICENSE"
        assert copy.exists() and copy.read_bytes() == licence, f"{copy} is not a copy of LICENSE"


def test_readme_example_prints_what_stands_below(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("ipex")
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    ((example, output),) = re.findall(r"```python\n(.*?)```\n\n```text\n(.*?)```", text, re.DOTALL)
    exec(compile(example, "README.md", "exec"), {})
    assert capsys.readouterr().out == output


def test_chart_and_table_are_what_the_data_says(monkeypatch: pytest.MonkeyPatch) -> None:
    assert readme_figures.main(["--check"]) == 0
    case = readme_figures.CASES[0]
    monkeypatch.setattr(readme_figures, "CASES", ((f"other {case[0]}", *case[1:]),))
    assert readme_figures.main(["--check"]) == 1


def test_the_table_shows_what_is_lost() -> None:
    """A row in which another engine is ahead stays in the table."""
    ahead = [
        max(found, key=lambda title: found[title]["ratio"])
        for _, found in (readme_figures.measured(*case[2:]) for case in readme_figures.CASES)
    ]
    assert {"ipex", "OpenVINO"} <= set(ahead)

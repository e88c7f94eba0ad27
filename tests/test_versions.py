# SPDX-License-Identifier: Apache-2.0
"""The version check passes on this tree and fails on each kind of mistake."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

import check_versions

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A copy of the files that the check reads."""
    patterns = (
        "packages/*/pyproject.toml",
        "packages/*/src/*/_version.py",
        "packages/*/src/*/kernels/providers.py",
        "packages/*/src/*/__init__.py",
        "packages/*/csrc/**/*.h",
        "CHANGELOG.md",
        "constraints.txt",
        ".pre-commit-config.yaml",
    )
    for pattern in patterns:
        for path in ROOT.glob(pattern):
            target = tmp_path / path.relative_to(ROOT)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, target)
    return tmp_path


def replace(path: Path, old: str, new: str) -> None:
    text = path.read_text(encoding="utf-8")
    assert old in text
    path.write_text(text.replace(old, new), encoding="utf-8")


def test_this_tree_is_consistent() -> None:
    assert check_versions.problems(ROOT) == []


def test_copy_is_consistent(tree: Path) -> None:
    assert check_versions.problems(tree) == []


def test_range_that_excludes_a_sibling(tree: Path) -> None:
    version = check_versions.load_project(tree / "packages/ipex-core").version
    replace(tree / "packages/ipex-core/src/ipex_core/_version.py", version, "7.0.0")
    found = check_versions.problems(tree)
    assert any("excludes ipex-core 7.0.0" in line and "ipex-cpu-kernels" in line for line in found)


def test_range_without_upper_end(tree: Path) -> None:
    pyproject = tree / "packages/ipex-cpu-kernels/pyproject.toml"
    text = pyproject.read_text(encoding="utf-8")
    pyproject.write_text(text.replace("dependencies = [", 'dependencies = ["ipex-core>=0.1", ', 1))
    assert any("has no upper end" in line for line in check_versions.problems(tree))


def test_range_of_a_build_time_requirement(tree: Path) -> None:
    replace(tree / "packages/ipex-xpu-kernels/pyproject.toml", "ipex-core~=0.2.0", "ipex-core~=7.0")
    found = check_versions.problems(tree)
    assert any("ipex-xpu-kernels: 'ipex-core~=7.0' excludes" in line for line in found)


def test_kernel_api_differs(tree: Path) -> None:
    plugins = tree / "packages/ipex-core/src/ipex_core/kernels/providers.py"
    text = plugins.read_text(encoding="utf-8")
    plugins.write_text(check_versions._PYTHON_API.sub("KERNEL_API = 999", text))
    found = [line for line in check_versions.problems(tree) if "ipex_core has 999" in line]
    assert any(".h:" in line for line in found)


def test_two_versions_of_one_package(tree: Path) -> None:
    (tree / "packages/ipex-core/src/other").mkdir()
    (tree / "packages/ipex-core/src/other/_version.py").write_text('__version__ = "9.9.9"\n')
    assert any("versions differ" in line for line in check_versions.problems(tree))


def test_changelog_section_missing(tree: Path) -> None:
    replace(tree / "CHANGELOG.md", "## ipex-core\n", "## something else\n")
    assert "CHANGELOG.md: no section '## ipex-core'" in check_versions.problems(tree)


def test_hook_pin_differs(tree: Path) -> None:
    replace(tree / "constraints.txt", "ruff==", "ruff==0.0.")
    assert any("ruff" in line for line in check_versions.problems(tree))

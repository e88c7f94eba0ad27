# SPDX-License-Identifier: Apache-2.0
"""What a tag releases, and which tags are refused."""

from __future__ import annotations

from pathlib import Path

import pytest

import release

ROOT = Path(__file__).resolve().parent.parent
CHANGELOG = """# Changelog

## ipex-core

### 0.2.0 (2027-01-31)

- Two.

### 0.1.0 (unreleased)

- One.

## ipex-llm

### 0.2.0 (2027-02-01)
"""


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A tree with one package, its files and a changelog."""
    folder = tmp_path / "packages/ipex-core"
    (folder / "src/ipex_core").mkdir(parents=True)
    (folder / "src/ipex_core/_version.py").write_text('__version__ = "0.2.0"\n')
    (folder / "pyproject.toml").write_text(
        '[build-system]\nrequires = ["hatchling"]\n[project]\nname = "ipex-core"\ndynamic = ["version"]\n'
    )
    (tmp_path / "CHANGELOG.md").write_text(CHANGELOG)
    (tmp_path / "dist").mkdir()
    for name in (
        "ipex_core-0.2.0-py3-none-any.whl",
        "ipex_core-0.2.0.tar.gz",
        "ipex_core-0.1.0-py3-none-any.whl",
    ):
        (tmp_path / "dist" / name).touch()
    return tmp_path


def test_files_and_notes(tree: Path) -> None:
    out = tree / "out"
    (out / "files").mkdir(parents=True)
    (out / "files" / "old.whl").touch()
    release.collect("ipex-core-0.2.0", tree / "dist", out, root=tree)
    names = sorted(path.name for path in (out / "files").iterdir())
    assert names == ["ipex_core-0.2.0-py3-none-any.whl", "ipex_core-0.2.0.tar.gz"]
    assert (out / "notes.md").read_text() == "- Two.\n"


def test_wheels_for_one_torch_are_not_for_an_index(tree: Path) -> None:
    name = "ipex_core-0.2.0+torch2.15-cp312-cp312-manylinux_2_34_x86_64.whl"
    (tree / "dist/xpu").mkdir()
    (tree / "dist/xpu" / name).touch()
    release.collect("ipex-core-0.2.0", tree / "dist", tree / "out", root=tree)
    assert (tree / "out/files" / name).exists()
    index = sorted(path.name for path in (tree / "out/index").iterdir())
    assert index == ["ipex_core-0.2.0-py3-none-any.whl", "ipex_core-0.2.0.tar.gz"]


@pytest.mark.parametrize(
    ("tag", "message"),
    [
        ("v0.2.0", "must be NAME-VERSION"),
        ("ipex-core-0.2.0/../x", "must be NAME-VERSION"),
        ("ipex-kernel-0.2.0", "the packages are ipex-core"),
        ("ipex-core-0.3.0", "must have this version"),
    ],
)
def test_tags_that_do_not_fit(tag: str, message: str, tree: Path) -> None:
    with pytest.raises(ValueError, match=message):
        release.collect(tag, tree / "dist", tree / "out", root=tree)
    assert not (tree / "out").exists()


def test_notes() -> None:
    assert release.notes_of(CHANGELOG, "ipex-core", "0.1.0", rehearsal=True) == "- One.\n"
    with pytest.raises(ValueError, match=r"must have a date .*got \(unreleased\)"):
        release.notes_of(CHANGELOG, "ipex-core", "0.1.0")
    for name, version in (("ipex-llm", "0.2.0"), ("ipex-core", "0.3.0"), ("ipex", "0.2.0")):
        with pytest.raises(ValueError, match=f"'## {name}' must have text under '### {version}"):
            release.notes_of(CHANGELOG, name, version)


def test_files_that_do_not_fit(tree: Path) -> None:
    (tree / "dist/ipex_core-0.2.0.tar.gz").unlink()
    with pytest.raises(ValueError, match=r"must have .*\.tar\.gz, got ipex_core-0\.2\.0-py3"):
        release.files_of(tree / "dist", "ipex-core", "0.2.0")
    for tag, works in {
        "manylinux1_x86_64.manylinux_2_5_x86_64": True,
        "manylinux_2_27_x86_64": True,
        "linux_x86_64": False,
    }.items():
        folder = tree / tag
        folder.mkdir()
        (folder / f"ipex_cpu_kernels-0.1.0-py3-none-{tag}.whl").touch()
        (folder / "ipex_cpu_kernels-0.1.0.tar.gz").touch()
        if works:
            assert len(release.files_of(folder, "ipex-cpu-kernels", "0.1.0")) == 2
        else:
            with pytest.raises(ValueError, match="manylinux"):
                release.files_of(folder, "ipex-cpu-kernels", "0.1.0")


def test_every_package_of_this_tree_can_be_rehearsed() -> None:
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    for path in ROOT.glob("packages/*/pyproject.toml"):
        name = path.parent.name
        version = release.load_project(path.parent).version
        assert release.parse_tag(f"{name}-{version}", ROOT) == (name, version)
        assert release.notes_of(changelog, name, version, rehearsal=True)

#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Collect what a tag releases: the files of one package and the text of its GitHub release.

    python tools/release.py ipex-core-0.2.0 [--rehearsal] [--dist dist] [--out dist/release]

A tag is ``NAME-VERSION``. It is refused when the tree has another version of that package, when ``CHANGELOG.md`` has no
text for it or calls it unreleased (a rehearsal may), and when a native wheel is not for manylinux. The folder
then has ``files/``, wheels and sdist, ``index/``, those of them that an index takes, and ``notes.md``, the section of
the changelog. An index takes no local versions: wheels for one release of torch (``0.2.0+torch2.15``) are left to the
GitHub release.
"""

from __future__ import annotations

import argparse
import re
import shutil
import sys
from pathlib import Path

from check_versions import load_project

__all__ = ["collect", "main", "notes_of", "parse_tag"]

ROOT = Path(__file__).resolve().parent.parent


def parse_tag(tag: str, root: Path) -> tuple[str, str]:
    """Return the package and the version that a tag names, if they are those of the tree.

    Raises:
        ValueError: The tag has another form, or names no package or another version.
    """
    found = re.fullmatch(r"(ipex(?:-[a-z]+)*)-(\d+(?:\.\d+)+(?:(?:a|b|rc|\.post)\d+)?)", tag)
    if found is None:
        raise ValueError(f"tag must be NAME-VERSION such as ipex-core-0.2.0, got {tag!r}")
    name, version = found[1], found[2]
    folder = root / "packages" / name
    if not folder.is_dir():
        names = ", ".join(sorted(path.name for path in (root / "packages").iterdir()))
        raise ValueError(f"tag {tag}: the packages are {names}, got {name!r}")
    written = load_project(folder).version
    if written != version:
        raise ValueError(
            f"tag {tag}: {name} must have this version in src/*/_version.py, got {written}"
        )
    return name, version


def notes_of(changelog: str, name: str, version: str, rehearsal: bool = False) -> str:
    """Return what the changelog says about a version of a package.

    Raises:
        ValueError: It says nothing, or that the version is not released.
    """
    section = re.search(rf"^## {re.escape(name)}\n(.*?)(?=^## |\Z)", changelog, re.M | re.S)
    part = section and re.search(
        rf"^### {re.escape(version)} \(([^)]*)\)\n(.*?)(?=^### |\Z)", section[1], re.M | re.S
    )
    if not part or not part[2].strip():
        raise ValueError(f"CHANGELOG.md: '## {name}' must have text under '### {version} (date)'")
    if not re.fullmatch(r"\d{4}-\d\d-\d\d", part[1]) and not rehearsal:
        raise ValueError(
            f"CHANGELOG.md: {name} {version} must have a date such as (2027-01-31), got ({part[1]})"
        )
    return part[2].strip() + "\n"


def files_of(dist: Path, name: str, version: str) -> list[Path]:
    """Return the wheels and the sdist of a package.

    Raises:
        ValueError: One is missing, or a native wheel is not for manylinux.
    """
    stem = f"{name.replace('-', '_')}-{version}"
    # Those of ipex-xpu-kernels for other releases of torch lie in a folder of their own.
    patterns = (f"{stem}-*.whl", f"{stem}+*.whl", f"xpu/{stem}+*.whl")
    wheels = sorted({p.name: p for pattern in patterns for p in dist.glob(pattern)}.values())
    sdists = sorted(dist.glob(f"{stem}.tar.gz"))
    if not wheels or not sdists:
        raise ValueError(
            f"{dist} must have {stem}-*.whl and {stem}.tar.gz, got"
            f" {', '.join(path.name for path in wheels + sdists) or 'neither'}; nox -s wheels wheels_xpu"
        )
    for wheel in wheels:
        if not re.search(r"-(none-any|(manylinux\w+_x86_64\.?)+)\.whl$", wheel.name):
            raise ValueError(
                f"{wheel.name}: the index takes manylinux wheels; build on Debian 12 with auditwheel and patchelf"
            )
    return wheels + sdists


def collect(tag: str, dist: Path, out: Path, root: Path = ROOT, rehearsal: bool = False) -> None:
    """Write what a tag releases into a folder, which is made anew.

    Raises:
        ValueError: The tag does not fit the tree, the changelog or the files.
    """
    name, version = parse_tag(tag, root)
    changelog = (root / "CHANGELOG.md").read_text(encoding="utf-8")
    notes = notes_of(changelog, name, version, rehearsal)
    files = files_of(dist, name, version)
    shutil.rmtree(out, ignore_errors=True)
    for folder in ("files", "index"):
        (out / folder).mkdir(parents=True)
    for path in files:
        shutil.copy(path, out / "files")
        if "+" not in path.name:
            shutil.copy(path, out / "index")
    (out / "notes.md").write_text(notes, encoding="utf-8")
    print(f"{out}: {', '.join(path.name for path in files)}; notes of {len(notes)} characters")


def main(argv: list[str] | None = None) -> int:
    """Run the command line; returns 1 for a tag that cannot be released."""
    parser = argparse.ArgumentParser(description="Collect the files and the notes of a release.")
    parser.add_argument("tag", help="NAME-VERSION")
    parser.add_argument("--rehearsal", action="store_true", help="the changelog needs no date")
    parser.add_argument("--dist", type=Path, default=ROOT / "dist")
    parser.add_argument("--out", type=Path, default=ROOT / "dist" / "release")
    options = parser.parse_args(argv)
    try:
        collect(options.tag, options.dist, options.out, rehearsal=options.rehearsal)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

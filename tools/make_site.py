#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Add a built documentation to a folder that any web server can serve as it is.

    python tools/make_site.py docs/_build/html public 0.1.0

``public/0.1.0/`` is the documentation, ``public/versions.json`` lists the versions, newest first, and each page
of the newest one has a page under ``public/latest/`` that leads to it, so that links stay. ``public/index.html`` leads
to the newest version. Versions that are there stay; one of the same number is replaced.
"""

from __future__ import annotations

import html
import json
import re
import shutil
import sys
from pathlib import Path

REDIRECT = """<!doctype html>
<meta charset="utf-8">
<title>ipex</title>
<link rel="canonical" href="{target}">
<meta http-equiv="refresh" content="0; url={target}">
<p>The documentation is at <a href="{target}">{target}</a>.</p>
"""
#: What Sphinx keeps for itself.
NOT_SERVED = shutil.ignore_patterns(".buildinfo*", ".doctrees", "objects.inv.txt")


def key(version: str) -> tuple[tuple[int, ...], bool, str]:
    """Return what versions are ordered by: numbers, and a release behind what came before it."""
    numbers = re.match(r"\d+(\.\d+)*", version)
    if numbers is None:
        raise ValueError(f"make_site: version must begin with a number, got {version!r}")
    rest = version[numbers.end() :]
    return tuple(map(int, numbers[0].split("."))), rest == "", rest


def redirect(page: Path, target: str) -> None:
    """Write a page that leads to another one."""
    page.parent.mkdir(parents=True, exist_ok=True)
    page.write_text(REDIRECT.format(target=html.escape(target)), encoding="utf-8")


def add(source: Path, site: Path, version: str) -> list[str]:
    """Add a documentation to a site and return all versions, newest first.

    Args:
        source: Folder with the HTML of one version.
        site: Folder of the site; made if it is not there.
        version: As ``0.1.0`` or ``0.2.0rc1``; also the name of its folder.

    Raises:
        ValueError: The version is none.
        FileNotFoundError: The source has no ``index.html``.
    """
    key(version)
    if re.fullmatch(r"[0-9A-Za-z.+-]+", version) is None:
        raise ValueError(f"make_site: version must be the name of a folder, got {version!r}")
    if not (source / "index.html").is_file():
        raise FileNotFoundError(f"make_site: {source} has no index.html: run nox -s docs first")
    shutil.rmtree(site / version, ignore_errors=True)
    shutil.copytree(source, site / version, ignore=NOT_SERVED)
    there = [path.parent.name for path in site.glob("[0-9]*/index.html")]
    versions = sorted(there, key=key, reverse=True)
    released = [name for name in versions if key(name)[1]]
    newest = (released or versions)[0]
    shutil.rmtree(site / "latest", ignore_errors=True)
    for page in sorted((site / newest).rglob("*.html")):
        name = page.relative_to(site / newest)
        redirect(site / "latest" / name, f"{'../' * len(name.parts)}{newest}/{name.as_posix()}")
    redirect(site / "index.html", f"{newest}/index.html")
    rows = [{"version": name, "url": f"{name}/", "latest": name == newest} for name in versions]
    (site / "versions.json").write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")
    return versions


if __name__ == "__main__":
    print("\n".join(add(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])))

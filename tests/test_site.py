# SPDX-License-Identifier: Apache-2.0
"""The static site: versions beside each other, and links that lead to the newest release."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from make_site import add


def documentation(folder: Path, text: str) -> Path:
    for name in ("index.html", "generated/ops/rms_norm.html"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    (folder / ".buildinfo").write_text("x")
    return folder


def target(page: Path) -> Path:
    link = re.search(r'url=([^"]+)"', page.read_text())
    assert link is not None
    return (page.parent / link[1]).resolve()


def test_versions_and_links(tmp_path: Path) -> None:
    site = tmp_path / "public"
    for version in ("0.9.0", "0.10.0", "0.11.0rc1"):
        versions = add(documentation(tmp_path / version, version), site, version)
    assert versions == ["0.11.0rc1", "0.10.0", "0.9.0"]
    rows = json.loads((site / "versions.json").read_text())
    assert [row["version"] for row in rows if row["latest"]] == ["0.10.0"]
    assert all((site / row["url"] / "index.html").is_file() for row in rows)
    for page in ("index.html", "latest/index.html", "latest/generated/ops/rms_norm.html"):
        assert target(site / page).read_text() == "0.10.0"
    assert not list(site.rglob(".buildinfo"))
    add(documentation(tmp_path / "new", "again"), site, "0.9.0")
    assert (site / "0.9.0" / "index.html").read_text() == "again"


def test_bad_arguments(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="has no index"):
        add(tmp_path, tmp_path / "public", "1.0")
    source = documentation(tmp_path / "html", "x")
    for version in ("main", "1.0/../..", "../1"):
        with pytest.raises(ValueError, match="version must"):
            add(source, tmp_path / "public", version)

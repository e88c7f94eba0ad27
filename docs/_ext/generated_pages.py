# SPDX-License-Identifier: Apache-2.0
"""Sphinx extension: pages that follow from the code.

Before anything is read it writes, under ``docs/generated/`` (not committed):

* a page per op, from its specification,
* a page per configuration variable, from the table of `ipex_core.config`,
* the reference of the public names, from ``ipex.__all__``,
* the options of the commands for language models,
* the names of IPEX, from the table of the facade,
* the table of measured performance, from the files in ``docs/data/``,
* the table of model families, from the file that the tests of ipex-llm check,
* the picture of the house and the table of its rooms, from the imports in the sources.

Each of them is a module beside this one; the last is in ``tools/``.
A file is only rewritten when its text changes, so that a rebuild is quick.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import api_pages
import command_pages
import config_pages
import family_pages
import house_picture
import migration_pages
import op_pages
import performance_pages

__all__ = ["setup"]


def write_all(app: Any) -> None:
    """Bring ``docs/generated/`` up to date and remove pages whose subject is gone."""
    root = Path(app.srcdir) / "generated"
    pages: dict[str, str] = {}
    for module in (
        op_pages,
        config_pages,
        api_pages,
        command_pages,
        family_pages,
        migration_pages,
        house_picture,
    ):
        pages.update(module.pages())
    pages.update(performance_pages.pages(Path(app.srcdir) / "data"))
    for name, text in pages.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")
    for path in root.rglob("*.md"):
        if path.relative_to(root).as_posix() not in pages:
            path.unlink()


def setup(app: Any) -> dict[str, Any]:
    """Connect to Sphinx."""
    app.connect("builder-inited", write_all)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}

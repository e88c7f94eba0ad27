# SPDX-License-Identifier: Apache-2.0
"""Where long names in tables and texts may go on in the next line: behind a dot or an underscore, not within a word."""

from __future__ import annotations

import re
from typing import Any

__all__ = ["breakable", "setup"]

#: A piece of inline code without blanks, as Sphinx writes it.
PIECE = re.compile(r'(<span class="pre">)([^<]{12,})(?=</span>)')
#: Not behind what a word begins with, and not within numbers.
PLACE = re.compile(r"(?<=[A-Za-z0-9])(?:\.(?=[A-Za-z_])|_(?=[A-Za-z0-9])|[,(=/](?=\w))")


def breakable(html: str) -> str:
    """Return a page whose long pieces of inline code have places for a line break.

    Example:
        >>> breakable('<span class="pre">ipex.op_info(name)</span>')
        '<span class="pre">ipex.<wbr>op_<wbr>info(<wbr>name)</span>'
    """
    return PIECE.sub(lambda piece: piece[1] + PLACE.sub(r"\g<0><wbr>", piece[2]), html)


def mark(app: Any, page: str, template: str, context: dict[str, Any], doctree: Any) -> None:
    """Mark a page when it is written: the index of the search keeps whole names."""
    if "body" in context:
        context["body"] = breakable(context["body"])


def setup(app: Any) -> dict[str, Any]:
    """Connect to Sphinx."""
    app.connect("html-page-context", mark)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}

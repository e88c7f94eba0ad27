# SPDX-License-Identifier: Apache-2.0
"""The ``ipex`` command. It starts without torch, so that it can show its help and say what is wrong with torch."""

from __future__ import annotations

__all__ = ["main"]


def main() -> None:
    """Run the command ``ipex``."""
    # Here, since `import ipex` reads the migration table in this package and must not load typer.
    from ipex_cli import app

    app.main()

# SPDX-License-Identifier: Apache-2.0
"""``ipexrun`` and ``python -m ipex_runtime.launch``."""

from __future__ import annotations

import sys

from ipex_runtime.launch.launch import main as run

__all__ = ["main"]


def main() -> None:
    """Run the command line of this process."""
    sys.exit(run())


if __name__ == "__main__":
    main()

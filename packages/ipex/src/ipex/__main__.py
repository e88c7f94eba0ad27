# SPDX-License-Identifier: Apache-2.0
"""``python -m ipex``: the ``ipex`` command."""

from __future__ import annotations

from ipex_cli.app import main

if __name__ == "__main__":
    main()

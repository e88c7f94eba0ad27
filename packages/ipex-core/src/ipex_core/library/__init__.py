# SPDX-License-Identifier: Apache-2.0
"""What defines an op: its specification, checks and derivatives, as `torch.library` has it for plain torch.

`docs/recipes.md` shows how to add an op.
"""

from __future__ import annotations

from ipex_core.library.checks import *  # noqa: F403
from ipex_core.library.spec import (
    BenchCase,
    OpSpec,
    Sample,
    check,
    define,
    register,
    schemas,
    specs,
)

__all__ = ["BenchCase", "OpSpec", "Sample", "check", "define", "register", "schemas", "specs"]

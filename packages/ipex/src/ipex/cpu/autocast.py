# SPDX-License-Identifier: Apache-2.0
"""Mixed precision under the names of Intel Extension for PyTorch; new code takes `ipex.amp`."""

from __future__ import annotations

import sys

from ipex.compat import migration
from ipex_core.amp import GradScaler, autocast

__all__ = ["GradScaler", "autocast"]


migration.teach(sys.modules[__name__], "cpu.autocast")

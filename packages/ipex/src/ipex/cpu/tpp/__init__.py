# SPDX-License-Identifier: Apache-2.0
"""The names of IPEX's ``cpu.tpp``: `fast_bert` and the optimizers that went with it."""

from __future__ import annotations

import sys

from ipex.compat import migration
from ipex.cpu.tpp import fused_bert
from ipex_core.optim import tpp as optim

__all__ = ["fused_bert", "optim"]


migration.teach(sys.modules[__name__], "cpu.tpp")

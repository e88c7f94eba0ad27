# SPDX-License-Identifier: Apache-2.0
"""`fast_bert` under its former module name."""

from __future__ import annotations

import sys

from ipex.compat import migration
from ipex_core.bert import fast_bert

__all__ = ["fast_bert"]


migration.teach(sys.modules[__name__], "cpu.tpp.fused_bert")

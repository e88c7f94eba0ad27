# SPDX-License-Identifier: Apache-2.0
"""`fast_bert` under its former module name."""

from __future__ import annotations

from ipex_core._fast_bert import fast_bert

__all__ = ["fast_bert"]

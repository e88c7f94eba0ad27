# SPDX-License-Identifier: Apache-2.0
"""Where the stock op is faster, so that it is chosen instead: measured, and shown by ``ipex.op_info``."""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["STOCK_WHEN"]

#: Op -> condition in words.
STOCK_WHEN: Mapping[str, str] = {}

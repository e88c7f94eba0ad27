# SPDX-License-Identifier: Apache-2.0
"""Where the stock op is faster, so that it is chosen instead: measured, and shown by ``ipex.op_info``.

The choice itself is made where a model is changed, by ``ipex.optimize`` and the compile backend of core. An op that is
called by its name runs its kernel.
"""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["STOCK_WHEN"]

#: Op -> condition in words.
STOCK_WHEN: Mapping[str, str] = {
    "attention": (
        "in models: fewer than 128 query rows in float32, fewer than 8 in bfloat16 and float16; with grouped heads,"
        " fewer than 4 query rows for each head of the key"
    ),
    "linear": (
        "in models: weights of fewer than 131072 elements in float32, of fewer than 6144 in bfloat16 and float16"
    ),
}

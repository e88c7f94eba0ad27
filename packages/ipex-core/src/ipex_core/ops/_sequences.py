# SPDX-License-Identifier: Apache-2.0
"""What the attention ops over packed sequences share: checks and a reference made of single sequences."""

from __future__ import annotations

import math

import torch

from ipex_core._spec import check
from ipex_core.ops._common import check_device, check_dtype

__all__ = ["check_options"]

Tensor = torch.Tensor


def check_options(
    op: str,
    query: Tensor,
    sequences: int,
    heads: int,
    alibi_slopes: Tensor | None,
    sinks: Tensor | None,
    softcap: float,
) -> None:
    """Check the optional arguments that every attention op has."""
    if alibi_slopes is not None:
        check_device(op, "alibi_slopes", alibi_slopes, query, "query")
        check_dtype(op, "alibi_slopes", alibi_slopes, query, "query", or_float32=True)
        shapes = ([heads], [sequences, heads])
        check(
            list(alibi_slopes.shape) in shapes,
            op,
            "alibi_slopes",
            f"have shape {shapes[0]} or {shapes[1]}",
            list(alibi_slopes.shape),
        )
    if sinks is not None:
        check_device(op, "sinks", sinks, query, "query")
        check_dtype(op, "sinks", sinks, query, "query", or_float32=True)
        check(list(sinks.shape) == [heads], op, "sinks", f"have shape [{heads}]", list(sinks.shape))
    check(math.isfinite(softcap), op, "softcap", "be a finite number", softcap)

# SPDX-License-Identifier: Apache-2.0
"""Checks that the prefill attention ops share."""

from __future__ import annotations

import itertools
import math

import torch

from ipex_core.library.checks import (
    check_device,
    check_dtype,
    check_like,
    check_not_expanded,
    check_shape,
    check_tensor,
)
from ipex_core.library.spec import check
from ipex_core.ops.kv_cache.checks import check_index_tensor

__all__ = ["check_offset_tensor", "check_offsets", "check_options", "check_rows"]

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
        check_shape(op, "sinks", sinks, [heads])
    check(math.isfinite(softcap), op, "softcap", "be a finite number", f"{softcap:g}")


def check_rows(op: str, query: Tensor, out: Tensor) -> None:
    """Check the packed queries ``[tokens, heads, head_size]`` and the output like them."""
    check_tensor(op, "query", query)
    text = "be 3-D [tokens, heads, head_size]"
    check(query.dim() == 3, op, "query", text, f"{query.dim()}-D")
    check_like(op, "out", out, query, "query")
    check_not_expanded(op, "out", out)
    stride = out.stride(2)
    check(
        stride == 1 or out.shape[2] <= 1,
        op,
        "out",
        "have a contiguous last dimension",
        f"stride {stride}",
    )


def check_offset_tensor(
    op: str, name: str, offsets: Tensor, query: Tensor, size: int | None = None
) -> None:
    """Check the type and size of offsets of sequences, ``[sequences + 1]``."""
    check_index_tensor(op, name, offsets, 1, query)
    have = offsets.shape[0]
    check(have >= 1, op, name, "have size sequences + 1", have)
    if size is not None:
        check(have == size, op, name, f"have size sequences + 1 = {size}", have)


def check_offsets(op: str, name: str, offsets: Tensor, limit: int) -> list[tuple[int, int]]:
    """Return begin and end of the sequences; check that they are in order and end within ``limit``.

    Reads data, so references call it and fakes do not.
    """
    values = offsets.tolist()
    least = 0
    for value in values:
        text = f"hold non-decreasing numbers in [0, {limit}]"
        check(least <= value <= limit, op, name, text, value)
        least = value
    return list(itertools.pairwise(values))

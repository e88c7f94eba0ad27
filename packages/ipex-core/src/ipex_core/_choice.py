# SPDX-License-Identifier: Apache-2.0
"""Where an own kernel is the better choice, for ops whose stock counterpart wins at some shapes."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

__all__ = [
    "prefer_ipex_attention",
    "prefer_ipex_norm",
    "prefer_ipex_rotary",
    "prefer_merged_bags",
    "prefer_merged_linears",
]


def prefer_ipex_attention(query: Sequence[int], key: Sequence[int], dtype: torch.dtype) -> bool:
    """Whether `torch.ops.ipex.attention` is expected to be at least as fast as the stock op.

    The kernel gains by working on many query rows at once. A row or two per head do not pay for that, and the stock
    op reads the keys and values just as fast. Grouped heads count as rows: the heads of a group share keys and
    values, which the stock op does not use. In 16 bit, where the stock op converts everything to float32 on most
    CPUs, few rows are enough; in float32 both do the same work and the gain is smaller (measured on AVX2 and
    AVX-512, 1 thread).

    Args:
        query: sizes ``[batch, heads, query length, head size]``.
        key: sizes of the key (and value) likewise.
        dtype: the element type of all three.
    """
    if dtype == torch.float32:
        return query[2] >= 128
    if query[1] != key[1]:
        return query[1] * query[2] >= 4 * key[1]
    return query[2] >= 8


def prefer_ipex_norm(shape: Sequence[int], dtype: torch.dtype) -> bool:
    """Whether our norms are expected to be at least as fast as the code Inductor generates.

    Calling an op costs some 4 us more than Inductor's own code, so the smallest norms stay with that. Measured on Zen
    4, 2 threads, beside other work, each as a compiled function; Inductor and ours in us, lowest tenth of the times,
    layer norm in float32 / bfloat16: 2 x 384 21 and 24 / 21 and 24, 32 x 384 26 and 31 / 25 and 27, 1024 x 384 155 and
    89 / 179 and 82, 1024 x 2048 798 and 525 / 754 and 387; 2 x 2048 54 and 58, 8 x 2048 32 and 32 in float32; 32 x 2048
    45 and 43 in bfloat16. Small RMS norms and norms behind an addition are alike.

    Args:
        shape: sizes of the input.
        dtype: its element type.
    """
    return math.prod(shape) >= 16384


def prefer_ipex_rotary(query: Sequence[int], dtype: torch.dtype) -> bool:
    """Whether our rotary embedding is expected to be at least as fast as the code Inductor generates.

    So far it is everywhere. Measured on Zen 4, 2 threads, bfloat16, 32 and 8 heads of 64, as a compiled function:
    128 tokens 100 us against 37 us, 2048 tokens 2120 against 480.

    Args:
        query: sizes ``[batch, heads, length, head size]``.
        dtype: its element type.
    """
    return True


def prefer_merged_linears(rows: int) -> bool:
    """Whether one call for linear layers that read the same tensor is expected to be at least as fast as one for each.

    With few rows calls and the time to wake threads count, which become one. With many the results, which lie in one
    another's way, have to pay for that; that has not been measured.

    Args:
        rows: rows of the input.
    """
    return rows <= 32


def prefer_merged_bags(bags: int) -> bool:
    """Whether one call for the embedding bags of several tables is expected to be at least as fast as one for each.

    Few bags cost less than the calls do. For many, the stock op sums the rows of one table faster than ours.

    Args:
        bags: bags of one table.
    """
    return bags <= 128

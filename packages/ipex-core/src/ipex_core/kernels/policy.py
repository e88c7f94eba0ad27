# SPDX-License-Identifier: Apache-2.0
"""Where an own kernel is the better choice, for ops whose stock counterpart wins at some shapes."""

from __future__ import annotations

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


def prefer_ipex_norm(rows: int | None, columns: int, dtype: torch.dtype) -> bool:
    """Whether our norms are expected to be at least as fast as the code Inductor generates.

    Calling an op costs some 4 us more than Inductor's own code, so small norms stay with that. Measured on Zen 4, each
    as a compiled function with any number of rows, on one thread in processor time, times faster than Inductor:

    | rows | 2 | 8 | 32 | 64 | 128 | 512 |
    |---|---|---|---|---|---|---|
    | layer norm of 768, float32 | 0.90 | 0.89 | 0.97 | 1.00 | 1.14 | 1.47 |
    | layer norm of 768, bfloat16 | 0.87 | 0.91 | 0.96 | 1.04 | 1.18 | 1.57 |
    | RMS norm of 2048, float32 | 0.90 | 0.92 | 0.99 | | 1.16 | |
    | RMS norm of 2048, bfloat16 | 0.86 | 0.94 | 1.06 | | 1.39 | |

    Short rows stay with it, too. 163840 numbers on one thread of a Xeon with AVX512-VNNI, as above:

    | columns | 32 | 64 | 96 | 128 | 192 | 768 |
    |---|---|---|---|---|---|---|
    | layer norm, float32 | 0.81 | 0.92 | 0.96 | 0.95 | 1.01 | 1.11 |
    | layer norm, bfloat16 | 0.75 | 0.85 | 0.88 | 0.90 | | |
    | RMS norm, float32 | 0.96 | 0.88 | 0.99 | 0.97 | | |
    | RMS norm, bfloat16 | 0.92 | 0.93 | 0.94 | 0.93 | | |

    Args:
        rows: how many rows, None for a number that varies and may become large.
        columns: length of a row.
        dtype: its element type.
    """
    return columns > 128 and (rows is None or rows * columns >= 49152)


def prefer_ipex_rotary(query: Sequence[int], dtype: torch.dtype) -> bool:
    """Whether our rotary embedding is expected to be at least as fast as the code Inductor generates.

    It is but for a few tokens, where calling it costs up to 3.5 us more. Measured on Zen 4, bfloat16, 32 and 8 heads
    of 64, as a compiled function, on one thread in processor time, times faster: 1 token 0.93, 4 tokens 0.95, 8 0.99,
    16 1.05, 32 1.16, 128 1.65. On 2 threads 128 tokens took 37 us instead of 100, 2048 tokens 480 instead of 2120.

    Args:
        query: sizes ``[batch, heads, length, head size]``.
        dtype: its element type.
    """
    return query[0] * query[2] >= 8


def prefer_merged_linears(rows: int) -> bool:
    """Whether one call for linear layers that read the same tensor is expected to be at least as fast as one for each.

    With few rows calls and the time to wake threads count, which become one. With many the results lie in one another's
    way. Measured on Zen 4, bfloat16, on one thread in processor time beside other work, times faster: three layers of
    768 x 768 with 1, 8, 32, 64 rows 1.10, 1.07, 1.03, 1.05. With more rows, and with layers of 2048 x (2048, 256, 256)
    from 32 rows on, no gain was found: 0.81 to 1.05, once 1.60, where runs differ by more than that.

    Args:
        rows: rows of the input.
    """
    return rows <= 32


def prefer_merged_bags(bags: int) -> bool:
    """Whether one call for the embedding bags of several tables is expected to be at least as fast as one for each.

    Few bags cost less than the calls do. For many, the stock op sums the rows of one table faster than ours. Measured
    on Zen 4, 26 tables of rows of 64 float32 numbers, one row to a bag, on one thread in processor time beside other
    work, times faster: 32 bags 2.36, 128 bags 1.71, 256 bags 1.42, 512 bags 1.21 in pairs but 0.98 in medians, 2048
    bags 0.75.

    Args:
        bags: bags of one table.
    """
    return bags <= 256

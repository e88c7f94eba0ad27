# SPDX-License-Identifier: Apache-2.0
"""Where an own kernel is the better choice, for ops whose stock counterpart wins at some shapes."""

from __future__ import annotations

from collections.abc import Sequence

import torch

__all__ = ["prefer_ipex_attention", "prefer_ipex_norm", "prefer_ipex_rotary"]


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

    Args:
        shape: sizes of the input.
        dtype: its element type.
    """
    return True


def prefer_ipex_rotary(query: Sequence[int], dtype: torch.dtype) -> bool:
    """Whether our rotary embedding is expected to be at least as fast as the code Inductor generates.

    Args:
        query: sizes ``[batch, heads, length, head size]``.
        dtype: its element type.
    """
    return True

# SPDX-License-Identifier: Apache-2.0
"""Where an own kernel is the better choice, for ops whose stock counterpart wins at some shapes."""

from __future__ import annotations

from collections.abc import Sequence

import torch

__all__ = [
    "prefer_ipex_attention",
    "prefer_ipex_norm",
    "prefer_ipex_rotary",
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

    So far they are everywhere. Measured on Zen 4, 2 threads, bfloat16, each as a compiled function of its own, which
    adds some 15 us to Inductor's time: RMS norm 128 x 384 52 us against 15 us, 4096 x 384 1390 against 160; addition
    and layer norm 42 against 18 and 600 against 235. Float32 has not been measured on a quiet machine.

    Args:
        shape: sizes of the input.
        dtype: its element type.
    """
    return True


def prefer_ipex_rotary(query: Sequence[int], dtype: torch.dtype) -> bool:
    """Whether our rotary embedding is expected to be at least as fast as the code Inductor generates.

    So far it is everywhere. Measured on Zen 4, 2 threads, bfloat16, 32 and 8 heads of 64, as a compiled function:
    128 tokens 100 us against 37 us, 2048 tokens 2120 against 480.

    Args:
        query: sizes ``[batch, heads, length, head size]``.
        dtype: its element type.
    """
    return True


def prefer_merged_linears(
    rows: int, sizes: Sequence[int], columns: int, dtype: torch.dtype
) -> bool:
    """Whether one call for linear layers that read the same tensor is expected to be at least as fast as one for each.

    Args:
        rows: rows of the input.
        sizes: output features of the layers.
        columns: their input features.
        dtype: the element type.
    """
    return True

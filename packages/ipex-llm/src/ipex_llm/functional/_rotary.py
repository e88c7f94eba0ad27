# SPDX-License-Identifier: Apache-2.0
"""Rotary position embeddings."""

from __future__ import annotations

import torch

from ipex_core.module_swap.base import call
from ipex_core.util import also_named

__all__ = ["rotary_embedding", "rotary_embedding_batched"]

Tensor = torch.Tensor
_OPS = torch.ops.ipex


def rotary_embedding(
    query: Tensor,
    key: Tensor,
    sin: Tensor,
    cos: Tensor,
    rotary_dim: int,
    rotary_half: bool,
    position_ids: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Rotate the heads of ``query`` and ``key`` by the angle of their position, in place.

    Args:
        query: ``[tokens, heads, head_dim]`` or ``[batch, positions, heads, head_dim]``, float32, bfloat16 or float16;
            overwritten.
        key: Like ``query`` with its own number of heads; overwritten.
        sin: ``[..., rotary_dim / 2]``, one value for each pair, or ``[..., rotary_dim]``, in the dtype of ``query`` or
            float32. The leading dimensions count the rows of the table. Values for both elements of a pair stand as
            ``cat([t, t], -1)``, for GPT-J's pairs also as ``repeat_interleave(t, 2, -1)``, which is what compiled code
            takes them for.
        cos: Like ``sin``.
        rotary_dim: How many of the first elements of a head are rotated.
        rotary_half: True: element ``i`` pairs with ``i + rotary_dim / 2`` (GPT-NeoX, Llama). False: ``2 i`` with
            ``2 i + 1`` (GPT-J).
        position_ids: int32 or int64: the row of the tables of each token, or of each position where all sequences
            agree. None: one row for each token, or for each position.

    Returns:
        ``(query, key)``, the same tensors.

    Raises:
        RuntimeError: An argument does not fit, or a position has no row; nothing has been written then. Also where a
            gradient is required: use ``torch.ops.ipex.rotary_embedding_functional``.

    Example:
        >>> q, k = torch.ones(1, 1, 2), torch.ones(1, 1, 2)
        >>> sin, cos = torch.ones(1, 1), torch.zeros(1, 1)  # a quarter turn
        >>> rotary_embedding(q, k, sin, cos, 2, True)[0] is q, q
        (True, tensor([[[-1.,  1.]]]))
    """
    if not rotary_half and not torch.compiler.is_compiling():
        sin, cos = _one_for_each_pair(sin, cos, rotary_dim)
    call(
        _OPS.rotary_embedding.default,
        *(query, key, sin, cos, rotary_dim, rotary_half, position_ids),
    )
    return query, key


def _one_for_each_pair(sin: Tensor, cos: Tensor, rotary_dim: int) -> tuple[Tensor, Tensor]:
    """Halve tables ``cat([t, t], -1)``: IPEX took only these, the op's own form of GPT-J repeats each value."""
    pairs = rotary_dim // 2
    for table in (sin, cos):
        if table.dim() == 0 or table.size(-1) != 2 * pairs or pairs < 2:
            return sin, cos
        if not torch.equal(table[..., :pairs], table[..., pairs:]):
            return sin, cos
    return sin[..., :pairs].contiguous(), cos[..., :pairs].contiguous()


@also_named(is_nexo_style="is_neox_style", head_size="head_dim")
def rotary_embedding_batched(
    positions: Tensor,
    query: Tensor,
    key: Tensor,
    head_dim: int,
    cos_sin_cache: Tensor,
    is_neox_style: bool,
    rotary_dim: int,
    offsets: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Rotate the heads of ``query`` and ``key`` in place, with cosines and sines in one table.

    Args:
        positions: ``[tokens]`` or ``[batch, positions]``, int32 or int64.
        query: ``positions.shape + [heads * head_dim]`` or ``+ [heads, head_dim]``, float32, bfloat16 or float16;
            overwritten.
        key: Like ``query`` with its own number of heads; overwritten.
        head_dim: Elements of a head.
        cos_sin_cache: ``[rows, rotary_dim]`` in the dtype of ``query`` or float32: the cosines of the pairs, then
            their sines.
        is_neox_style: True: element ``i`` pairs with ``i + rotary_dim / 2``. False: ``2 i`` with ``2 i + 1``.
        rotary_dim: How many of the first elements of a head are rotated.
        offsets: One per token, added to ``positions``: where the token's table starts, if several lie in one.

    Returns:
        ``(query, key)``, the same tensors.

    Raises:
        RuntimeError: An argument does not fit, or a position has no row; nothing has been written then.
    """
    call(
        _OPS.rotary_embedding_batched.default,
        *(positions, query, key, head_dim, cos_sin_cache, is_neox_style, rotary_dim, offsets),
    )
    return query, key

# SPDX-License-Identifier: Apache-2.0
"""Attention with an indirect-access KV cache under IPEX's contract: allocation, growth and the first token."""

from __future__ import annotations

import torch
from torch import Tensor

from ipex_core.library.spec import check
from ipex_core.ops.kv_cache import quantize

#: ``(length carrier, key cache, value cache, beam indices)``
LayerPast = tuple[Tensor, Tensor, Tensor, Tensor]

OP = "indirect_access_kv_cache_attention"


def indirect_access_kv_cache_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale_attn: float,
    layer_past: LayerPast | None = None,
    head_mask: Tensor | None = None,
    attention_mask: Tensor | None = None,
    alibi: Tensor | None = None,
    add_casual_mask: bool = True,
    seq_info: Tensor | None = None,
    text_max_length: int = 0,
) -> tuple[Tensor, None, LayerPast | None]:
    """Attend to new tokens and to the history in ``layer_past``, which is written in place.

    The first call (``layer_past`` None, or of length 0) allocates the caches. A prompt that comes once per batch item
    although ``layer_past`` promises more columns (its beam indices are ``[_, beams * batch]``) is stored once and
    shared by its beams. Caches that are full are replaced by twice as large ones. Reordering beams means writing the
    chosen columns into row ``length - 1`` of the beam indices, nothing else.

    Args:
        query: ``[batch, tokens, heads, head_size]``.
        key: ``[batch, tokens, kv_heads, head_size]``.
        value: Like ``key``.
        scale_attn: Divisor of the scores.
        layer_past: What the previous call returned, or None. Only the shape of the length carrier
            ``[1, length, length, 1]`` counts. A key cache of dtype float8_e5m2 or float8_e4m3fn asks for caches of
            this type. Beam indices may be ``[positions, sequences]``, without the two rows about prompts: then the
            history of a sequence is what they say at each position, also in the prompt.
        head_mask: Must be None.
        attention_mask: 4-D, boolean or additive, broadcastable to ``[batch, heads, tokens, length]``; None: attention
            among the new tokens, not causal, without a cache.
        alibi: Slopes ``[heads]``, or a bias that is added to the mask.
        add_casual_mask: Whether new tokens see only tokens before them.
        seq_info: Its first element is the length of the history, if given.
        text_max_length: Positions to allocate.

    Returns:
        ``(output [batch, heads, tokens, head_size], None, present)``; present is None without a mask.

    Raises:
        OpArgumentError: an argument has a wrong shape, dtype or value.
    """
    check(head_mask is None, OP, "head_mask", "be None", "a tensor")
    scale = 1.0 / float(scale_attn)
    tokens = query.shape[1]
    if attention_mask is None:
        return _whole(query, key, value, scale, None, False), None, None
    dim = attention_mask.dim()
    check(dim == 4, OP, "attention_mask", "be 4-D", f"{dim}-D")
    offset = _history(layer_past, seq_info)
    length = offset + tokens
    mask, slopes = _with_alibi(attention_mask, alibi, query)
    if offset == 0:
        caches = _allocate(key, layer_past, max(text_max_length, 1))
        _store_prompt(key, value, *caches)
        if slopes is not None:
            steps = torch.arange(length, device=query.device)
            mask = _added(mask, slopes[:, None, None] * (steps - steps[:, None]))
        out = _whole(query, key, value, scale, mask, add_casual_mask)
    else:
        assert layer_past is not None
        caches = _grown(layer_past[1], layer_past[2], _with_prompts(layer_past), length)
        out = torch.ops.ipex.indirect_access_kv_cache_attention(
            query, key, value, *caches, offset, scale, mask, slopes, add_casual_mask
        )
    carrier = torch.empty(1, length, length, 1, dtype=torch.int64, device=query.device)
    return out, None, (carrier, *caches)


def _whole(
    query: Tensor, key: Tensor, value: Tensor, scale: float, mask: Tensor | None, causal: bool
) -> Tensor:
    heads_first = (t.transpose(1, 2) for t in (query, key, value))
    return torch.ops.ipex.attention(*heads_first, mask, scale, causal)


def _history(layer_past: LayerPast | None, seq_info: Tensor | None) -> int:
    if layer_past is None:
        return 0
    if seq_info is not None:
        return int(seq_info.reshape(-1)[0])
    return layer_past[0].shape[-2]


def _with_alibi(mask: Tensor, alibi: Tensor | None, query: Tensor) -> tuple[Tensor, Tensor | None]:
    """Return the mask as kernels take it, and slopes."""
    if mask.dtype not in (torch.bool, torch.float32, query.dtype):
        mask = mask.bool() if not mask.is_floating_point() else mask.float()
    if alibi is None:
        return mask, None
    if alibi.dim() == 1:
        return mask, alibi.float()
    return _added(mask, alibi.float()), None


def _added(mask: Tensor, bias: Tensor) -> Tensor:
    if mask.dtype == torch.bool:
        return torch.where(mask, bias, -float("inf"))
    return mask.float() + bias


def _allocate(
    key: Tensor, layer_past: LayerPast | None, positions: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return caches and indices for sequences whose prompts are the batch of ``key``."""
    batch, tokens, kv_heads, size = key.shape
    sequences = batch if layer_past is None else layer_past[3].shape[-1]
    text = f"have beam indices for a multiple of the {batch} prompts"
    check(sequences > 0 and sequences % batch == 0, OP, "layer_past", text, sequences)
    if positions < tokens:
        positions += tokens
    dtype = key.dtype
    if layer_past is not None and layer_past[1].dtype in (
        torch.float8_e5m2,
        torch.float8_e4m3fn,
    ):
        dtype = layer_past[1].dtype
    # Rows that are not used yet are never read, so they are not cleared either.
    cache = [
        torch.empty(positions, sequences, kv_heads, size, dtype=dtype, device=key.device)
        for _ in range(2)
    ]
    beams = sequences // batch
    first = torch.arange(sequences, device=key.device) // beams * beams
    beam_idx = torch.empty(positions + 2, sequences, dtype=torch.int64, device=key.device)
    beam_idx[:tokens] = first
    beam_idx[tokens:] = torch.arange(sequences, device=key.device)
    # What kernels need to know of the prompts: their length and their number.
    beam_idx[positions, 0] = tokens
    beam_idx[positions + 1, 0] = batch
    return cache[0], cache[1], beam_idx


def _store_prompt(
    key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, beam_idx: Tensor
) -> None:
    batch, tokens = key.shape[:2]
    beams = beam_idx.shape[1] // batch
    for rows, cache in ((key, key_cache), (value, value_cache)):
        cache[:tokens, ::beams] = quantize(rows.transpose(0, 1), cache.dtype, 1.0)


def _with_prompts(layer_past: LayerPast) -> Tensor:
    """Return beam indices with the two rows about prompts; without them no sequences share a prompt."""
    _, key_cache, _, beam_idx = layer_past
    if beam_idx.shape[0] != key_cache.shape[0]:
        return beam_idx
    about = beam_idx.new_zeros(2, beam_idx.shape[1])
    about[1, 0] = beam_idx.shape[1]
    return torch.cat([beam_idx, about])


def _grown(
    key_cache: Tensor, value_cache: Tensor, beam_idx: Tensor, length: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the caches, or larger copies if ``length`` positions do not fit."""
    positions = key_cache.shape[0]
    if length <= positions:
        return key_cache, value_cache, beam_idx
    more = max(2 * positions, length) - positions

    def larger(rows: Tensor) -> Tensor:
        copy = rows.new_empty(positions + more, *rows.shape[1:])
        copy[:positions] = rows
        return copy

    own = torch.arange(beam_idx.shape[1], device=beam_idx.device).expand(more, -1)
    indices = torch.cat([beam_idx[:positions], own, beam_idx[positions:]])
    return larger(key_cache), larger(value_cache), indices

# SPDX-License-Identifier: Apache-2.0
"""Second names of attention over caches and of the ops that fill caches."""

from __future__ import annotations

import torch

from ipex.compat.torch_ops._alias_op import alias_op
from ipex_core.errors import OpArgumentError

Tensor = torch.Tensor
_OPS = torch.ops.ipex


@alias_op(
    "reshape_and_cache(Tensor key, Tensor value, Tensor(a!) key_cache, Tensor(b!) value_cache,"
    ' Tensor slot_mapping, str kv_cache_dtype="auto", float k_scale=1.0, float v_scale=1.0)'
    " -> (Tensor(a!), Tensor(b!))"
)
def _reshape_and_cache(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    kv_cache_dtype: str = "auto",
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> tuple[Tensor, Tensor]:
    slots = slot_mapping[: key.shape[0]]  # what is behind the last token is not read
    _OPS.reshape_and_cache(
        key, value, key_cache, value_cache, slots, kv_cache_dtype, k_scale, v_scale
    )
    return key_cache, value_cache


@alias_op(
    "single_query_cached_kv_attention(Tensor(a!) out, Tensor query, Tensor key_cache,"
    " Tensor value_cache, Tensor head_mapping, float scale, Tensor block_tables,"
    " Tensor context_lens, int block_size, SymInt max_context_len, Tensor? alibi_slopes,"
    " int window_size=-1, float k_scale=1.0, float v_scale=1.0, float softcap=-1.0) -> Tensor(a!)"
)
def _single_query_cached_kv_attention(
    out: Tensor,
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    head_mapping: Tensor,
    scale: float,
    block_tables: Tensor,
    context_lens: Tensor,
    block_size: int,
    max_context_len: int,
    alibi_slopes: Tensor | None,
    window_size: int = -1,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    softcap: float = -1.0,
) -> Tensor:
    _OPS.single_query_cached_kv_attention(
        out,
        query,
        key_cache,
        value_cache,
        head_mapping,
        scale,
        block_tables,
        context_lens,
        block_size,
        max_context_len,
        alibi_slopes,
        window_size,
        k_scale,
        v_scale,
        softcap,
    )
    return out


@alias_op(
    "flash_attn_varlen_func(Tensor(a!) out, Tensor query, Tensor key, Tensor value,"
    " Tensor cu_seqlens_q, Tensor cu_seqlens_kv, int max_seqlen_q, SymInt max_seqlen_kv,"
    " float softmax_scale, bool is_causal, Tensor block_table, Tensor? alibi_slopes,"
    ' int window_left=-1, int window_right=-1, str kv_cache_dtype="auto", float k_scale=1.0,'
    " float v_scale=1.0, float softcap=-1.0) -> Tensor(a!)"
)
def _flash_attn_varlen_func(out: Tensor, *args: object) -> Tensor:
    _OPS.flash_attn_varlen_func(out, *args)
    return out


@alias_op(
    "masked_multihead_self_attention(Tensor query, Tensor key, Tensor value,"
    " Tensor(a!) key_cache, Tensor(b!) value_cache, Tensor beam_idx, Tensor seq_info,"
    " float scale_attn, int max_positions, Tensor? head_mask, Tensor? attention_mask,"
    " bool? add_casual_mask=None) -> (Tensor, Tensor, Tensor, Tensor, Tensor)"
)
def _masked_multihead_self_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    beam_idx: Tensor,
    seq_info: Tensor,
    scale_attn: float,
    max_positions: int,
    head_mask: Tensor | None,
    attention_mask: Tensor | None,
    add_casual_mask: bool | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Attend to the cache and to the new tokens, which are written to it.

    ``seq_info`` is the length of the history. -1 stands for cross attention: the caches are then all keys and values,
    ``[batch, positions, kv_heads, head_size]``, and ``key`` and ``value`` are not read.
    """
    from ipex_core.nn.ipex_api.kv_cache import indirect_access_kv_cache_attention

    if int(seq_info.reshape(-1)[0]) == -1:
        heads_first = [t.to(query.dtype).transpose(1, 2) for t in (query, key_cache, value_cache)]
        output = _OPS.attention(*heads_first, attention_mask, 1.0 / scale_attn, False)
        same = (t.view_as(t) for t in (key_cache, value_cache, beam_idx))
        return output, query.new_empty(0), *same  # type: ignore[return-value]
    carrier = seq_info.new_empty(1, 0, 0, 1)  # seq_info tells the length
    output, _, present = indirect_access_kv_cache_attention(
        query,
        key,
        value,
        scale_attn,
        (carrier, key_cache, value_cache, beam_idx),
        head_mask,
        attention_mask,
        None,
        add_casual_mask is not False,
        seq_info,
        max_positions,
    )
    none = query.new_empty(0)
    if present is None:
        return output, none, key_cache, value_cache, beam_idx
    # New tensors: an op of torch does not return its arguments unmarked.
    caches = (
        new if new is not old else new.view_as(new)
        for new, old in zip(present[1:], (key_cache, value_cache, beam_idx), strict=True)
    )
    return output, none, *caches  # type: ignore[return-value]


@alias_op(
    "deepseekv2_mla(Tensor query, Tensor kv, Tensor k_pe, Tensor(a!) kv_cache, Tensor kv_b_weight,"
    " Tensor w_kc, Tensor w_vc, Tensor beam_idx, Tensor seq_info, float scale_attn,"
    " int max_positions, int v_head_dim, Tensor? head_mask, Tensor? attention_mask,"
    " Tensor? w_scale, bool? add_casual_mask=None) -> (Tensor, Tensor, Tensor, Tensor)"
)
def _deepseekv2_mla(
    query: Tensor,
    kv: Tensor,
    k_pe: Tensor,
    kv_cache: Tensor,
    kv_b_weight: Tensor,
    w_kc: Tensor,
    w_vc: Tensor,
    beam_idx: Tensor,
    seq_info: Tensor,
    scale_attn: float,
    max_positions: int,
    v_head_dim: int,
    head_mask: Tensor | None,
    attention_mask: Tensor | None,
    w_scale: Tensor | None,
    add_casual_mask: bool | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Attend to latent rows: one head of keys, ``[latent | rotary]``, whose first part is the value, too.

    ``query`` is ``[batch, tokens, heads, nope + rotary]``, ``kv`` ``[batch, tokens, rank]``, ``k_pe``
    ``[batch, tokens, 1, rotary]``. ``w_kc``, ``[heads, rank, nope]``, goes into the query, and ``w_vc``,
    ``[heads, v_head_dim, rank]``, into the result; ``kv_b_weight``, which is both of them, is not read.

    Returns:
        ``[batch, heads, tokens, v_head_dim]``, an empty tensor, the cache ``[positions, sequences, 1, rank + rotary]``
        and the beam indices.
    """
    op = "deepseekv2_mla"
    rank, rotary = kv.shape[-1], k_pe.shape[-1]
    heads, nope = query.shape[2], query.shape[3] - rotary
    for name, weight, shape in (
        ("w_kc", w_kc, [heads, rank, nope]),
        ("w_vc", w_vc, [heads, v_head_dim, rank]),
    ):
        if list(weight.shape) != shape:
            raise OpArgumentError(f"{op}: {name} must be {shape}, got {list(weight.shape)}")
    if w_scale is not None:
        raise OpArgumentError(f"{op}: w_scale must be None, got a tensor: scale the weights before")
    absorbed = torch.einsum("bthn,hrn->bthr", query[..., :nope], w_kc.to(query.dtype))
    row = torch.cat((kv.unsqueeze(2), k_pe.reshape(*kv.shape[:2], 1, rotary)), -1)
    # One cache for both: what is written as value is what is written as key.
    output, none, cache, _, beams = _masked_multihead_self_attention(
        torch.cat((absorbed, query[..., nope:]), -1),
        row,
        row,
        kv_cache,
        kv_cache,
        beam_idx,
        seq_info,
        scale_attn,
        max_positions,
        head_mask,
        attention_mask,
        add_casual_mask,
    )
    output = torch.einsum("bhtr,hvr->bhtv", output[..., :rank], w_vc.to(query.dtype))
    return output, none, cache, beams

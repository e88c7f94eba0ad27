# SPDX-License-Identifier: Apache-2.0
"""Second names of attention over caches and of the ops that fill caches."""

from __future__ import annotations

import torch

from ipex._torch_ipex._alias_op import alias_op

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
    from ipex_core.nn._kv_cache import indirect_access_kv_cache_attention

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

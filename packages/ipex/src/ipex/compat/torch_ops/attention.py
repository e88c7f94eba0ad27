# SPDX-License-Identifier: Apache-2.0
"""Second names of attention, of the ops that fill caches, and of the ops around attention in decoders."""

from __future__ import annotations

import torch
from torch import Tensor

from ipex.compat.torch_ops import alias_op
from ipex_core.errors import OpArgumentError

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


@alias_op("masked_multihead_self_attention", mutates=("key_cache", "value_cache"))
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


@alias_op("deepseekv2_mla", mutates=("kv_cache",))
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


# -- The ops around attention in decoders -----------------------------------------------------------------------------


@alias_op("prepare_4d_causal_attention_mask")
def _prepare_4d_causal_attention_mask(
    attention_mask: Tensor,
    inputs_embeds: Tensor,
    past_kv_len: Tensor,
    finfo_min: Tensor,
    sliding_window: int,
) -> Tensor:
    """Return the additive mask ``[batch, 1, positions, past + positions]`` in the dtype of ``inputs_embeds``.

    0 where a position sees a key: from ``sliding_window`` keys before it up to itself, less those whose entry in
    ``attention_mask``, ``[batch, keys]``, is not 1; ``finfo_min`` elsewhere.
    """
    batch, positions = inputs_embeds.shape[:2]
    if attention_mask.dim() != 2 or attention_mask.shape[0] != batch:
        raise OpArgumentError(
            "prepare_4d_causal_attention_mask: attention_mask must be 2-D [batch, keys] with the batch"
            f" of inputs_embeds, {batch}, got {list(attention_mask.shape)}"
        )
    past, dtype = int(past_kv_len), inputs_embeds.dtype
    length = past + positions
    # Absolute positions of the queries, against positions of the keys.
    queries = torch.arange(past, length, device=inputs_embeds.device).unsqueeze(1)
    keys = torch.arange(length, device=inputs_embeds.device)
    seen = (keys <= queries) & (keys >= queries - sliding_window)
    known = attention_mask[:, :length].to(dtype) == 1
    # Keys behind the end of the given mask are not padding.
    known = torch.nn.functional.pad(known, (0, length - known.shape[1]), value=True)
    seen = seen & known[:, None, None, :]
    return torch.where(seen, torch.zeros((), dtype=dtype), finfo_min.to(dtype))


@alias_op(
    "flash_attention(Tensor query, Tensor key, Tensor value, float dropout_p=0.0,"
    " bool is_causal=False, *, Tensor? attention_mask=None, float? scale=None)"
    " -> (Tensor, Tensor)"
)
def _flash_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    attention_mask: Tensor | None = None,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the attention, like ``query``, and the logarithms of the sums of the softmax."""
    if attention_mask is not None and attention_mask.dtype == torch.bool:
        # Torch's kernel takes only masks that are added.
        zeros = torch.zeros(attention_mask.shape, dtype=query.dtype)
        attention_mask = zeros.masked_fill(~attention_mask, -torch.inf)
    elif attention_mask is not None and query.dtype == torch.float64:
        # Torch reads a float32 mask as one of float64 below AVX-512.
        attention_mask = attention_mask.double()
    # No op of ours returns the logarithms; this one has a derivative, too.
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(  # type: ignore[no-any-return]
        query, key, value, dropout_p, is_causal, attn_mask=attention_mask, scale=scale
    )


@alias_op(
    "rotary_position_embedding(Tensor t_in, Tensor t_emb_pos, Tensor t_pos, int N, int H,"
    " int offset, int rotary_ndims) -> (Tensor, Tensor, Tensor)"
)
def _rotary_position_embedding(
    t_in: Tensor,
    t_emb_pos: Tensor,
    t_pos: Tensor,
    N: int,
    H: int,
    offset: int,
    rotary_ndims: int,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Rotate heads ``[batch, positions, N, H]``, or heads of a fused projection ``[batch, positions, features]``.

    Key and value are None where ``t_in`` has only ``N`` heads. ``t_emb_pos`` is ``[rows, rotary_ndims]``: sines, then
    cosines. One number in ``t_pos`` is the position of the first token.
    """
    op = "rotary_position_embedding"
    if offset not in (1, rotary_ndims // 2):
        raise OpArgumentError(
            f"{op}: offset must be 1 or rotary_ndims / 2 = {rotary_ndims // 2}, got {offset}"
        )
    fused = t_in.flatten(2)
    positions, features = fused.shape[1:]
    # No divmod: a symbolic size, as of a compiled graph, has none.
    kv_heads = (features - N * H) // (2 * H)
    if kv_heads < 0 or (features - N * H) % (2 * H) or (kv_heads and t_in.dim() != 3):
        raise OpArgumentError(
            f"{op}: t_in must be [batch, positions, {N} heads, {H}], or [batch, positions,"
            f" (heads + 2 * kv_heads) * {H}] with {N} heads, got {list(t_in.shape)}"
        )
    rows = t_pos
    if t_pos.numel() == 1:
        rows = t_pos.reshape(1, 1) + torch.arange(positions, device=t_pos.device)
    heads = fused.unflatten(2, (N + 2 * kv_heads, H))
    query = heads[:, :, :N]
    # The op rotates a query and a key; a query alone goes with one head of its own.
    key = heads[:, :, N : N + kv_heads] if kv_heads else query[:, :, :1]
    sin, cos = t_emb_pos.chunk(2, -1)
    query, key = _OPS.rotary_embedding_functional(
        query, key, sin, cos, rotary_ndims, offset != 1, rows
    )
    if not kv_heads:
        return query, None, None
    return query, key, heads[:, :, N + kv_heads :].clone(memory_format=torch.contiguous_format)


def _rotate_pairs(x: Tensor, rows: Tensor, rotary_dim: int) -> Tensor:
    """Rotate pairs of neighbors of ``[batch, positions, heads, rotary_dim]``; the halves of the result hold them.

    ``rows`` are sines, then cosines, each for every element of the result: tables with one angle per pair repeat it.
    """
    sin, cos = rows.unsqueeze(2).chunk(2, -1)
    half = rotary_dim // 2
    first, second = x[..., 0::2].float(), x[..., 1::2].float()
    low = first * cos[..., :half] - second * sin[..., :half]
    high = second * cos[..., half:rotary_dim] + first * sin[..., half:rotary_dim]
    return torch.cat((low, high), -1).to(x.dtype)


def _deepseek_rows(op: str, table: Tensor, positions: Tensor, rotary_dim: int) -> Tensor:
    """Return the rows of a table ``[rows, 2 * rotary_dim]`` of each token."""
    if table.dim() != 2 or table.shape[1] != 2 * rotary_dim:
        raise OpArgumentError(
            f"{op}: t_emb_pos must be [rows, 2 * rotary_ndims = {2 * rotary_dim}], sines before"
            f" cosines, got {list(table.shape)}"
        )
    return table[positions.long()]


def _deepseek_query(
    op: str, q: Tensor, rows: Tensor, heads: int, size: int, offset: int, rotary_dim: int
) -> Tensor:
    if q.flatten(2).shape[2] != heads * size or size - offset != rotary_dim:
        raise OpArgumentError(
            f"{op}: q must have N * H = {heads} * {size} features, H being offset + rotary_ndims ="
            f" {offset} + {rotary_dim}, got {list(q.shape)}"
        )
    q = q.flatten(2).unflatten(2, (heads, size))
    return torch.cat((q[..., :offset], _rotate_pairs(q[..., offset:], rows, rotary_dim)), -1)


@alias_op("rotary_position_embedding_deepseek")
def _rotary_position_embedding_deepseek(
    q: Tensor,
    kv: Tensor,
    k_pe: Tensor,
    t_emb_pos: Tensor,
    t_pos: Tensor,
    N: int,
    H: int,
    offset: int,
    rotary_ndims: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return query, key and value ``[batch, positions, N, H]`` of DeepSeek's attention, the value padded with zeros.

    ``q`` is ``[batch, positions, N * H]``, ``kv`` ``[batch, positions, N, offset + value size]``, ``k_pe``
    ``[batch, positions, 1, rotary_ndims]``.
    """
    op = "rotary_position_embedding_deepseek"
    rows = _deepseek_rows(op, t_emb_pos, t_pos, rotary_ndims)
    query = _deepseek_query(op, q, rows, N, H, offset, rotary_ndims)
    shared = _rotate_pairs(k_pe.reshape(*q.shape[:2], 1, rotary_ndims), rows, rotary_ndims)
    key = torch.cat((kv[..., :offset], shared.expand(-1, -1, N, -1)), -1)
    value = kv[..., offset:]
    return query, key, torch.nn.functional.pad(value, (0, H - value.shape[-1]))


@alias_op("rotary_position_embedding_deepseek_v2")
def _rotary_position_embedding_deepseek_v2(
    q: Tensor,
    k_pe: Tensor,
    t_emb_pos: Tensor,
    t_pos: Tensor,
    N: int,
    H: int,
    offset: int,
    rotary_ndims: int,
) -> tuple[Tensor, Tensor]:
    """Return the query ``[batch, positions, N, H]`` and ``k_pe`` rotated, ``[batch, positions, 1, rotary_ndims]``."""
    op = "rotary_position_embedding_deepseek_v2"
    rows = _deepseek_rows(op, t_emb_pos, t_pos, rotary_ndims)
    query = _deepseek_query(op, q, rows, N, H, offset, rotary_ndims)
    return query, _rotate_pairs(k_pe.reshape(*q.shape[:2], 1, rotary_ndims), rows, rotary_ndims)

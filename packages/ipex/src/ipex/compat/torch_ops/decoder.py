# SPDX-License-Identifier: Apache-2.0
"""Second names of the ops around attention in decoders: masks, rotary embeddings, attention over whole sequences."""

from __future__ import annotations

import torch

from ipex.compat.torch_ops._alias_op import alias_op
from ipex_core.errors import OpArgumentError

Tensor = torch.Tensor
_OPS = torch.ops.ipex


@alias_op(
    "prepare_4d_causal_attention_mask(Tensor attention_mask, Tensor inputs_embeds,"
    " Tensor past_kv_len, Tensor finfo_min, int sliding_window) -> Tensor"
)
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


@alias_op(
    "rotary_position_embedding_deepseek(Tensor q, Tensor kv, Tensor k_pe, Tensor t_emb_pos,"
    " Tensor t_pos, int N, int H, int offset, int rotary_ndims) -> (Tensor, Tensor, Tensor)"
)
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


@alias_op(
    "rotary_position_embedding_deepseek_v2(Tensor q, Tensor k_pe, Tensor t_emb_pos,"
    " Tensor t_pos, int N, int H, int offset, int rotary_ndims) -> (Tensor, Tensor)"
)
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

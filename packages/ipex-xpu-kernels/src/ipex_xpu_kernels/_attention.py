# SPDX-License-Identifier: Apache-2.0
"""The attention ops of ipex on the kernel of the device; what it does not have runs as the op is defined."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ipex_core.library.checks import check_once, read_once
from ipex_core.library.spec import FLOATS, check
from ipex_core.ops.attention import check_offsets, near_shape
from ipex_core.ops.kv_cache import QUANTIZED, check_block_tables, check_lengths, check_longest
from ipex_xpu_kernels._launch import DTYPES, dense, is_gpu, kernel, launch

Tensor = torch.Tensor


def _native() -> Any:
    from ipex_xpu_kernels import _device

    return _device.native()


def _float(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.float().contiguous()


def _additive(mask: Tensor | None, shape: tuple[int, ...]) -> Tensor | None:
    if mask is None:
        return None
    if mask.dtype == torch.bool:
        mask = torch.zeros_like(mask, dtype=torch.float32).masked_fill_(~mask, -float("inf"))
    return mask.float().expand(shape)


def _per_sequence(slopes: Tensor | None) -> int:
    """Return the step from the slopes of a sequence to the slopes of the next one, which may be the same."""
    return 0 if slopes is None or slopes.dim() < 2 else slopes.stride(0)


def _int32(values: list[int], like: Tensor) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=like.device)


def _run(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    *,
    scale: float,
    sequences: int,
    longest: int,
    mask: Tensor | None = None,
    slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    q_starts: Tensor | None = None,
    k_starts: Tensor | None = None,
    k_lengths: Tensor | None = None,
    table: Tensor | None = None,
    behind: int = -1,
    ahead: int = -1,
    softcap: float = 0.0,
    bottom_right: bool = True,
    factors: tuple[float, float, Tensor | None, Tensor | None] = (1.0, 1.0, None, None),
) -> None:
    """Start the kernel; ``factors``: of a quantized cache, of its keys and values and of their rows."""
    query, key, value = dense(query), dense(key), dense(value)
    tensors = query, key, value, out, mask, _float(slopes), _float(sinks)
    places = q_starts, k_starts, k_lengths, table
    scale = scale or query.shape[-1] ** -0.5
    kv_heads, rows = key.shape[1:3]
    group = query.shape[1] // max(kv_heads, 1)
    if k_starts is None and _splits(query, key, value, group * longest):
        _run_split(
            *(query, key, value, out, mask, tensors[5], tensors[6], q_starts, k_lengths, table),
            *(sequences, longest, behind, ahead, scale, softcap, bottom_right, factors),
        )
        return
    if key.dtype == query.dtype:
        _native().attention(
            *(*tensors, *places, sequences, longest, behind, ahead, scale, softcap, bottom_right)
        )
        return
    k_scale, v_scale, key_scales, value_scales = factors
    size = key.shape[3]
    if 0 in (out.numel(), sequences, kv_heads):
        return
    launch(
        *(kernel("attention_quantized", query.dtype, key.dtype), query),
        *((sequences, kv_heads, group * longest), (1, 1, _QUERIES)),
        *(*tensors, *places, group, query.shape[2], rows, size, value.shape[3]),
        *(*query.stride()[:3], *key.stride()[:3], *value.stride()[:3], *out.stride()[:3]),
        *((0, 0, 0, 0) if mask is None else mask.stride()),
        *(_per_sequence(tensors[5]), 0 if table is None else table.stride(0), rows, behind, ahead),
        *(float(scale * k_scale), float(softcap), bottom_right, float(v_scale)),
        *(key_scales, value_scales),
        *((0, 0, 0) if key_scales is None else key_scales.stride()),
        *((0, 0, 0) if value_scales is None else value_scales.stride()),
    )


#: Queries of a work-group of the kernel for quantized caches, and the largest head it has.
_QUERIES, _LARGEST = 16, 256
#: Of the kernel that splits the keys of a sequence: items of a work-group, the most queries that it is used for, the
#: keys that a split has at least, and the work-groups that keep a GPU busy.
_SPLIT_ITEMS, _SPLIT_MOST, _SPLIT_KEYS, _SPLIT_GROUPS = 128, 16, 128, 256


def _splits(query: Tensor, key: Tensor, value: Tensor, rows: int) -> bool:
    """Return whether the keys of a sequence are split among work-groups: few queries, on a GPU."""
    sizes = query.shape[-1], value.shape[-1]
    if not 0 < rows <= _SPLIT_MOST or 0 in key.shape or any(n % 8 or n > _LARGEST for n in sizes):
        return False
    for x in (key, value):  # which are read by eight numbers
        if x.data_ptr() % (8 * x.element_size()) or any(n % 8 for n in x.stride()[:-1]):
            return False
        if max(x.stride()) >= 2**31:
            return False
    return is_gpu(query)


def _split_kernel(query: Tensor, key: Tensor, value: Tensor, most: int) -> tuple[str, int]:
    """Return the name of the kernel that splits the keys, and the queries that a work-group of it has."""
    dtypes = f"{DTYPES[query.dtype]},{DTYPES[key.dtype]}"
    largest = max(query.shape[-1], value.shape[-1])
    if (
        largest <= 128
        and query.dtype != torch.float32
        and (key.dtype == query.dtype or (query.dtype, key.dtype) == (torch.bfloat16, torch.int8))
        and query.data_ptr() % 16 == 0
        and all(n % 8 == 0 for n in query.stride()[:-1])
        and _native().joint_pairs(query.device.index)
    ):
        own = 1 if most <= 8 else 2
        return f"attention_split_pairs<{dtypes},{64 if largest <= 64 else 128},{own}>", 8 * own
    rows = 4 if most <= 4 else 8
    return f"attention_split<{dtypes},{rows}>", rows


def _run_split(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    mask: Tensor | None,
    slopes: Tensor | None,
    sinks: Tensor | None,
    q_starts: Tensor | None,
    k_lengths: Tensor | None,
    table: Tensor | None,
    sequences: int,
    longest: int,
    behind: int,
    ahead: int,
    scale: float,
    softcap: float,
    bottom_right: bool,
    factors: tuple[float, float, Tensor | None, Tensor | None],
) -> None:
    if out.numel() == 0 or sequences == 0:
        return
    k_scale, v_scale, key_scales, value_scales = factors
    kv_heads, keys = key.shape[1:3]
    group = query.shape[1] // kv_heads
    most = group * longest
    size, value_size = query.shape[3], value.shape[3]
    reach = keys if table is None else table.shape[1] * keys
    name, rows_each = _split_kernel(query, key, value, most)
    blocks = -(-most // rows_each)
    # Enough groups for a GPU, of keys that are worth one.
    wanted = -(-_SPLIT_GROUPS // (sequences * kv_heads * blocks))
    splits = max(1, min(wanted, -(-reach // _SPLIT_KEYS), 64))
    rows = sequences * kv_heads * splits * most
    parts = query.new_empty(rows * value_size, dtype=torch.float32)
    stats = query.new_empty(rows * 2, dtype=torch.float32)
    launch(
        name,
        query,
        *((sequences, kv_heads, splits * blocks * _SPLIT_ITEMS), (1, 1, _SPLIT_ITEMS)),
        *(query, key, value, parts, stats, mask, slopes, q_starts, k_lengths, table),
        *(group, query.shape[2], keys, size, value_size, most, splits),
        *(*query.stride()[:3], *key.stride()[:3], *value.stride()[:3]),
        *((0, 0, 0, 0) if mask is None else mask.stride()),
        *(_per_sequence(slopes), 0 if table is None else table.stride(0), keys, behind, ahead),
        *(float(scale * k_scale), float(softcap), bottom_right),
        *(key_scales, value_scales),
        *((0, 0, 0) if key_scales is None else key_scales.stride()),
        *((0, 0, 0) if value_scales is None else value_scales.stride()),
    )
    launch(
        *(kernel("attention_join", query.dtype), query),
        *((sequences * kv_heads * most, value_size), (1, 64)),
        *(parts, stats, out, sinks, q_starts, group, query.shape[2], value_size, most, splits),
        *(kv_heads, *out.stride()[:3], float(v_scale)),
    )


def _supported(query: Tensor, key: Tensor, value: Tensor, *factors: Any) -> bool:
    """Return whether a kernel has these dtypes and sizes."""
    if key.dtype in QUANTIZED and value.dtype == key.dtype:
        return query.dtype in FLOATS and max(query.shape[-1], value.shape[-1]) <= _LARGEST
    plain = all(factor is None or factor == 1.0 for factor in factors)
    return plain and bool(_native().attention_supported(query, key, value))


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None = None,
    scale: float = 0.0,
    is_causal: bool = False,
    alibi_slopes: Tensor | None = None,
    window_left: int = -1,
    window_right: int = -1,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    bottom_right: bool = False,
) -> Tensor | None:
    if not _supported(query, key, value):
        return None
    batch, heads, length, size = query.shape
    out = query.new_empty(batch, length, heads, size).transpose(1, 2)
    _run(
        *(query, key, value, out),
        scale=scale,
        sequences=batch,
        longest=length,
        mask=_additive(mask, (batch, heads, length, key.shape[2])),
        slopes=alibi_slopes,
        sinks=sinks,
        behind=window_left,
        ahead=0 if is_causal else window_right,
        softcap=softcap,
        bottom_right=bottom_right,
    )
    return out


def _decode_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    lengths: Tensor | None = None,
    mask: Tensor | None = None,
    scale: float = 0.0,
    alibi_slopes: Tensor | None = None,
    window_size: int = -1,
    softcap: float = -1.0,
    sinks: Tensor | None = None,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    key_scales: Tensor | None = None,
    value_scales: Tensor | None = None,
) -> Tensor | None:
    if not _supported(query, key_cache, value_cache, k_scale, v_scale, key_scales, value_scales):
        return None
    batch, heads, queries, size = query.shape
    capacity = key_cache.shape[2]
    if lengths is not None:
        check_lengths("decode_attention", read_once(lengths, Tensor.tolist), capacity)
    out = query.new_empty(batch, queries, heads, size).transpose(1, 2)
    _run(
        *(query, key_cache, value_cache, out),
        scale=scale,
        sequences=batch,
        longest=queries,
        mask=_additive(mask, (batch, heads, queries, capacity)),
        slopes=alibi_slopes,
        sinks=sinks,
        k_lengths=None if lengths is None else lengths.int().contiguous(),
        behind=window_size - 1 if window_size > 0 else -1,
        ahead=0,
        softcap=softcap,
        factors=(k_scale, v_scale, key_scales, value_scales),
    )
    return out


def _single_query(
    output: Tensor,
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    head_mapping: Tensor | None,
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
    sinks: Tensor | None = None,
    key_scales: Tensor | None = None,
    value_scales: Tensor | None = None,
) -> bool:
    op = "single_query_cached_kv_attention"
    mapped = head_mapping is not None and head_mapping.shape[0] == query.shape[1]
    if mapped or output.stride(-1) != 1:
        return False  # the definition reads the mapping
    if near_shape(query, alibi_slopes):
        return False
    if not _supported(query, key_cache, value_cache, k_scale, v_scale, key_scales, value_scales):
        return False
    blocks = key_cache.shape[0]

    def check_values() -> None:
        lengths = read_once(context_lens, Tensor.tolist)
        check_block_tables(op, "context_lens", lengths, block_tables, block_size, blocks)
        check_longest(op, lengths, max_context_len)

    others = op, block_size, blocks, max_context_len
    check_once((context_lens, block_tables), others, check_values)
    _run(
        *(query.unsqueeze(2), key_cache, value_cache, output.unsqueeze(2)),
        scale=scale,
        sequences=query.shape[0],
        longest=1,
        slopes=alibi_slopes,
        sinks=sinks,
        k_lengths=context_lens.int().contiguous(),
        table=block_tables.int().contiguous(),
        behind=window_size - 1 if window_size > 0 else -1,
        ahead=0,
        softcap=softcap,
        factors=(k_scale, v_scale, key_scales, value_scales),
    )
    return True


def _packed(x: Tensor) -> Tensor:
    """View ``[tokens, heads, size]`` as one sequence ``[1, heads, tokens, size]``."""
    return x.transpose(0, 1).unsqueeze(0)


def _varlen_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    seqlen_q: Tensor,
    seqlen_k: Tensor,
    alibi_slopes: Tensor | None,
    max_seqlen_q: int,
    max_seqlen_k: int,
    pdropout: float,
    softmax_scale: float,
    zero_tensors: bool,
    is_causal: bool,
    return_softmax: bool,
    window_size_left: int = -1,
    window_size_right: int = -1,
    softcap: float = -1.0,
    sinks: Tensor | None = None,
) -> bool:
    if not _supported(query, key, value):
        return False
    queries = check_offsets("varlen_attention", "seqlen_q", seqlen_q, query.shape[0])
    keys = check_offsets("varlen_attention", "seqlen_k", seqlen_k, key.shape[0])
    check_pair = len(queries) == len(keys)
    check(check_pair, "varlen_attention", "seqlen_k", "be as long as seqlen_q", len(keys) + 1)
    if zero_tensors:
        out.zero_()
    _run(
        *(_packed(query), _packed(key), _packed(value), _packed(out)),
        scale=softmax_scale,
        sequences=len(queries),
        longest=max((end - begin for begin, end in queries), default=0),
        slopes=alibi_slopes,
        sinks=sinks,
        q_starts=seqlen_q.int().contiguous(),
        k_starts=seqlen_k.int().contiguous(),
        behind=window_size_left,
        ahead=0 if is_causal else window_size_right,
        softcap=softcap,
    )
    return True


def _flash_attn_varlen_func(
    out: Tensor,
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_kv: Tensor,
    max_seqlen_q: int,
    max_seqlen_kv: int,
    softmax_scale: float,
    is_causal: bool,
    block_table: Tensor,
    alibi_slopes: Tensor | None = None,
    window_left: int = -1,
    window_right: int = -1,
    kv_cache_dtype: str = "auto",
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    softcap: float = -1.0,
    sinks: Tensor | None = None,
    key_scales: Tensor | None = None,
    value_scales: Tensor | None = None,
) -> bool:
    op = "flash_attn_varlen_func"
    if near_shape(query, alibi_slopes):
        return False
    if not _supported(query, key_cache, value_cache, k_scale, v_scale, key_scales, value_scales):
        return False
    queries = check_offsets(op, "cu_seqlens_q", cu_seqlens_q, query.shape[0])
    keys = check_offsets(op, "cu_seqlens_kv", cu_seqlens_kv, 2**62)
    lengths = [end - begin for begin, end in keys]
    blocks, block_size = key_cache.shape[0], key_cache.shape[2]

    def check_values() -> None:
        check_block_tables(
            *(op, "cu_seqlens_kv", lengths, block_table, block_size, blocks, "block_table")
        )

    check_once((cu_seqlens_kv, block_table), (op, block_size, blocks), check_values)
    _run(
        *(_packed(query), key_cache, value_cache, _packed(out)),
        scale=softmax_scale,
        sequences=len(queries),
        longest=max((end - begin for begin, end in queries), default=0),
        slopes=alibi_slopes,
        sinks=sinks,
        q_starts=cu_seqlens_q.int().contiguous(),
        k_lengths=_int32(lengths, query),
        table=block_table.int().contiguous(),
        behind=window_left,
        ahead=0 if is_causal else window_right,
        softcap=softcap,
        factors=(k_scale, v_scale, key_scales, value_scales),
    )
    return True


#: Name of an op -> what runs for tensors of the device; None or False: as it is defined.
FUNCTIONS: dict[str, Callable[..., Any]] = {
    "attention": _attention,
    "decode_attention": _decode_attention,
    "flash_attn_varlen_func": _flash_attn_varlen_func,
    "single_query_cached_kv_attention": _single_query,
    "varlen_attention": _varlen_attention,
}

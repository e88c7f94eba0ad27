# SPDX-License-Identifier: Apache-2.0
"""The attention ops of ipex on the kernel of the device; what it does not have runs as the op is defined."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ipex_core.library.checks import check_once, read_once
from ipex_core.library.kernels import specs
from ipex_core.library.spec import FLOATS, Arguments
from ipex_core.ops.attention import check_offsets, near_shape
from ipex_core.ops.kv_cache import QUANTIZED, check_block_tables, check_lengths, check_longest
from ipex_xpu_kernels._launch import DTYPES, dense, is_gpu, kernel, launch


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


def _attention(a: Arguments) -> Tensor | None:
    if not _supported(a.query, a.key, a.value):
        return None
    batch, heads, length, size = a.query.shape
    out = a.query.new_empty(batch, length, heads, size).transpose(1, 2)
    _run(
        *(a.query, a.key, a.value, out),
        scale=a.scale,
        sequences=batch,
        longest=length,
        mask=_additive(a.mask, (batch, heads, length, a.key.shape[2])),
        slopes=a.alibi_slopes,
        sinks=a.sinks,
        behind=a.window_left,
        ahead=0 if a.is_causal else a.window_right,
        softcap=a.softcap,
        bottom_right=a.bottom_right,
    )
    return out


def _decode_attention(a: Arguments) -> Tensor | None:
    factors = a.k_scale, a.v_scale, a.key_scales, a.value_scales
    if not _supported(a.query, a.key_cache, a.value_cache, *factors):
        return None
    batch, heads, queries, size = a.query.shape
    capacity = a.key_cache.shape[2]
    if a.lengths is not None:
        check_lengths(a.op, read_once(a.lengths, Tensor.tolist), capacity)
    out = a.query.new_empty(batch, queries, heads, size).transpose(1, 2)
    _run(
        *(a.query, a.key_cache, a.value_cache, out),
        scale=a.scale,
        sequences=batch,
        longest=queries,
        mask=_additive(a.mask, (batch, heads, queries, capacity)),
        slopes=a.alibi_slopes,
        sinks=a.sinks,
        k_lengths=None if a.lengths is None else a.lengths.int().contiguous(),
        behind=a.window_size - 1 if a.window_size > 0 else -1,
        ahead=0,
        softcap=a.softcap,
        factors=factors,
    )
    return out


def _single_query(a: Arguments) -> bool:
    mapped = a.head_mapping is not None and a.head_mapping.shape[0] == a.query.shape[1]
    if mapped or a.output.stride(-1) != 1:
        return False  # the definition reads the mapping
    if near_shape(a.query, a.alibi_slopes):
        return False
    factors = a.k_scale, a.v_scale, a.key_scales, a.value_scales
    if not _supported(a.query, a.key_cache, a.value_cache, *factors):
        return False
    blocks = a.key_cache.shape[0]

    def check_values() -> None:
        lengths = read_once(a.context_lens, Tensor.tolist)
        check_block_tables(a.op, "context_lens", lengths, a.block_tables, a.block_size, blocks)
        check_longest(a.op, lengths, a.max_context_len)

    others = a.op, a.block_size, blocks, a.max_context_len
    check_once((a.context_lens, a.block_tables), others, check_values)
    _run(
        *(a.query.unsqueeze(2), a.key_cache, a.value_cache, a.output.unsqueeze(2)),
        scale=a.scale,
        sequences=a.query.shape[0],
        longest=1,
        slopes=a.alibi_slopes,
        sinks=a.sinks,
        k_lengths=a.context_lens.int().contiguous(),
        table=a.block_tables.int().contiguous(),
        behind=a.window_size - 1 if a.window_size > 0 else -1,
        ahead=0,
        softcap=a.softcap,
        factors=factors,
    )
    return True


def _packed(x: Tensor) -> Tensor:
    """View ``[tokens, heads, size]`` as one sequence ``[1, heads, tokens, size]``."""
    return x.transpose(0, 1).unsqueeze(0)


def _varlen_attention(a: Arguments) -> bool:
    if not _supported(a.query, a.key, a.value):
        return False
    queries = check_offsets(a.op, "seqlen_q", a.seqlen_q, a.query.shape[0])
    keys = check_offsets(a.op, "seqlen_k", a.seqlen_k, a.key.shape[0])
    same = len(queries) == len(keys)
    a.require(same, "seqlen_k", "be as long as seqlen_q", len(keys) + 1)
    if a.zero_tensors:
        a.out.zero_()
    _run(
        *(_packed(a.query), _packed(a.key), _packed(a.value), _packed(a.out)),
        scale=a.softmax_scale,
        sequences=len(queries),
        longest=max((end - begin for begin, end in queries), default=0),
        slopes=a.alibi_slopes,
        sinks=a.sinks,
        q_starts=a.seqlen_q.int().contiguous(),
        k_starts=a.seqlen_k.int().contiguous(),
        behind=a.window_size_left,
        ahead=0 if a.is_causal else a.window_size_right,
        softcap=a.softcap,
    )
    return True


#: Scores of queries that the definition computes at once, if heads are larger than kernels have.
_SCORES = 1 << 26


def _in_pieces(a: Arguments) -> bool:
    """Run the causal definition for some queries of a text at a time, whose scores fit the memory."""
    spans = (
        itertools.pairwise(read_once(ends, Tensor.tolist))
        for ends in (a.cu_seqlens_q, a.cu_seqlens_kv)
    )
    for text, ((begin, end), (low, high)) in enumerate(zip(*spans, strict=True)):
        step = max(_SCORES // max(a.query.shape[1] * (high - low), 1), 1)
        for first in range(begin, end, step):
            last = min(first + step, end)
            sizes = last - first, max(high - low - end + last, 0)
            starts, key_starts = (torch.tensor([0, size]) for size in sizes)
            own = {"out": a.out[first:last], "query": a.query[first:last]}
            own |= {"cu_seqlens_q": starts, "cu_seqlens_kv": key_starts}
            own |= {"block_table": a.block_table[text : text + 1]}
            specs()[a.op].reference(**{k: v for k, v in vars(a).items() if k != "op"} | own)
    return True


def _flash_attn_varlen_func(a: Arguments) -> bool:
    if near_shape(a.query, a.alibi_slopes):
        return False
    factors = a.k_scale, a.v_scale, a.key_scales, a.value_scales
    if not _supported(a.query, a.key_cache, a.value_cache, *factors):
        wide = a.query.shape[-1] > _LARGEST and a.is_causal and a.alibi_slopes is None
        return wide and _in_pieces(a)
    queries = check_offsets(a.op, "cu_seqlens_q", a.cu_seqlens_q, a.query.shape[0])
    keys = check_offsets(a.op, "cu_seqlens_kv", a.cu_seqlens_kv, 2**62)
    lengths = [end - begin for begin, end in keys]
    blocks, block_size = a.key_cache.shape[0], a.key_cache.shape[2]

    def check_values() -> None:
        check_block_tables(
            *(a.op, "cu_seqlens_kv", lengths, a.block_table, block_size, blocks, "block_table")
        )

    check_once((a.cu_seqlens_kv, a.block_table), (a.op, block_size, blocks), check_values)
    _run(
        *(_packed(a.query), a.key_cache, a.value_cache, _packed(a.out)),
        scale=a.softmax_scale,
        sequences=len(queries),
        longest=max((end - begin for begin, end in queries), default=0),
        slopes=a.alibi_slopes,
        sinks=a.sinks,
        q_starts=a.cu_seqlens_q.int().contiguous(),
        k_lengths=_int32(lengths, a.query),
        table=a.block_table.int().contiguous(),
        behind=a.window_left,
        ahead=0 if a.is_causal else a.window_right,
        softcap=a.softcap,
        factors=factors,
    )
    return True


def _bmm(a: Arguments) -> Tensor | None:
    if a.b.dtype == torch.uint8 or a.add is not None or a.alpha != 1.0:
        return None
    return torch.bmm(a.a, a.b)  # in the dtype of the factors, with sums in float32


#: Name of an op -> what runs for tensors of the device; None or False: as it is defined.
FUNCTIONS: dict[str, Callable[..., Any]] = {
    "attention": _attention,
    "bmm": _bmm,
    "decode_attention": _decode_attention,
    "flash_attn_varlen_func": _flash_attn_varlen_func,
    "single_query_cached_kv_attention": _single_query,
    "varlen_attention": _varlen_attention,
}

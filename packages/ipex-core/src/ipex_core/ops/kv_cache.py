# SPDX-License-Identifier: Apache-2.0
"""Key-value caches as the references see them: checks, rows gathered from blocks, quantized rows.

A cache holds rows of the dtype of the query, or int8, float8_e5m2 or float8_e4m3fn numbers. The value of a row is its
numbers times a factor of the whole cache (``k_scale``, ``v_scale``) and, for int8, times a float32 scale of the row
where there are any. Kernels repeat these checks with the same text (``ipex/glue/kv_glue.h``).
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from ipex_core.library.checks import (
    acc,
    check_device,
    check_dtype,
    check_dtype_in,
    check_like,
    check_not_expanded,
    check_one_of,
    check_shape,
    check_tensor,
    dtype_name,
    randn,
    read_once,
)
from ipex_core.library.kernels import register_op
from ipex_core.library.spec import Arguments, BenchCase, Sample, check

_INDEX = (torch.int32, torch.int64)

#: dtypes of quantized caches.
QUANTIZED = (torch.int8, torch.float8_e5m2, torch.float8_e4m3fn)

#: What ``kv_cache_dtype`` may demand of the caches.
_KINDS = {
    "auto": None,
    "fp8": torch.float8_e5m2,
    "fp8_e5m2": torch.float8_e5m2,
    "fp8_e4m3": torch.float8_e4m3fn,
    "int8": torch.int8,
}


def check_index_tensor(op: str, name: str, value: Tensor, dim: int, query: Tensor) -> None:
    """Check that ``value`` is a ``dim``-dimensional tensor of int32 or int64 on the device of ``query``."""
    check_device(op, name, value, query, "query")
    check_dtype_in(op, name, value, *_INDEX)
    check(value.dim() == dim, op, name, f"be {dim}-D", f"{value.dim()}-D")


def check_caches(a: Arguments, of: str, shape: str, written: bool = False) -> None:
    """Check a pair of caches: device, dtype, 4-D, consecutive elements, equal shapes and dtypes.

    Args:
        a: The call.
        of: Name of the argument whose device and dtype count.
        shape: The wanted shape in words, ``"[num_blocks, ...]"``.
        written: Whether the op writes to them, so that no two elements may share memory.
    """
    x, keys, values = getattr(a, of), a.key_cache, a.value_cache
    kinds = f"{dtype_name(x.dtype)}, int8, float8_e5m2 or float8_e4m3fn"
    for name, cache in (("key_cache", keys), ("value_cache", values)):
        check_device(a.op, name, cache, x, of)
        known = cache.dtype == x.dtype or cache.dtype in QUANTIZED
        a.require(known, name, f"have the dtype of {of} = {kinds}", dtype_name(cache.dtype))
        a.require(cache.dim() == 4, name, f"be 4-D {shape}", f"{cache.dim()}-D")
        stride = cache.stride(3)
        dense = stride == 1 or cache.shape[3] <= 1
        a.require(dense, name, "have a contiguous last dimension", f"stride {stride}")
        if written:
            check_not_expanded(a.op, name, cache)
    text = f"have the shape of key_cache = {list(keys.shape)}"
    a.require(values.shape == keys.shape, "value_cache", text, list(values.shape))
    check_dtype(a.op, "value_cache", values, keys, "key_cache")


def check_cache_kind(op: str, kind: str, key_cache: Tensor) -> None:
    """Check what the argument ``kv_cache_dtype`` demands of the caches."""
    check_one_of(op, "kv_cache_dtype", kind, _KINDS)
    wanted = _KINDS[kind]
    fits = wanted is None or key_cache.dtype == wanted
    text = f"have dtype {dtype_name(wanted or key_cache.dtype)} for kv_cache_dtype {kind}"
    check(fits, op, "key_cache", text, dtype_name(key_cache.dtype))


def check_row_scales(op: str, name: str, scales: Tensor | None, cache: Tensor) -> None:
    """Check the optional scales of rows: float32 in the shape of the int8 cache without its last dimension."""
    if scales is None:
        return
    check_device(op, name, scales, cache, "key_cache")
    check_dtype_in(op, name, scales, torch.float32)
    text = "be None unless the cache is int8"
    check(cache.dtype == torch.int8, op, name, text, f"a cache of dtype {dtype_name(cache.dtype)}")
    shape = list(cache.shape[:3])
    check_shape(op, name, scales, shape)


def check_lengths(op: str, lengths: Sequence[int], rows: int) -> None:
    """Check how many rows of a cache of ``rows`` each sequence uses. Reads data: references call it, fakes do not."""
    for length in lengths:
        if not 0 <= length <= rows:
            expected = f"be between 0 and the rows of the cache = {rows}"
            check(False, op, "lengths", expected, length)


def check_longest(op: str, lengths: Sequence[int], max_context_len: int) -> None:
    """Check that ``max_context_len`` covers all ``lengths``. Reads data: references call it, fakes do not."""
    longest = max(lengths, default=0)
    text = f"be at least the largest of context_lens, {longest}"
    check(longest <= max_context_len, op, "max_context_len", text, max_context_len)


def check_block_tables(
    op: str,
    lengths_name: str,
    lengths: Sequence[int],
    tables: Tensor,
    block_size: int,
    blocks: int,
    name: str = "block_tables",
) -> None:
    """Check lengths and the block numbers in use; unused entries of the table, ``name``, may hold anything.

    Reads data, so references call it and fakes do not.
    """
    capacity = tables.shape[1] * block_size
    for length, row in zip(lengths, read_once(tables, Tensor.tolist), strict=True):
        if not 0 <= length <= capacity:
            expected = f"be between 0 and the capacity of {name} = {capacity}"
            check(False, op, lengths_name, expected, length)
        used = row[: -(-length // block_size)]
        if used and (min(used) < 0 or max(used) >= blocks):
            wrong = next(block for block in used if not 0 <= block < blocks)
            check(False, op, name, f"hold numbers of blocks in [0, {blocks})", wrong)


def gather_blocks(cache: Tensor, table: Tensor, length: int) -> Tensor:
    """Return the rows of one sequence of a paged cache.

    Args:
        cache: ``[num_blocks, kv_heads, block_size, ...]``.
        table: The block numbers of the sequence.
        length: How many rows.

    Returns:
        ``[kv_heads, length, ...]``.
    """
    used = -(-length // cache.shape[2]) if length else 0
    rows = cache[table[:used].long()].transpose(0, 1)
    return rows.flatten(1, 2)[:, :length]


def dequantize(rows: Tensor, scale: float, row_scales: Tensor | None = None) -> Tensor:
    """Return the values of cache rows in the type references compute in."""
    values = acc(rows) * scale
    return values if row_scales is None else values * row_scales.unsqueeze(-1).to(values.dtype)


def quantize(rows: Tensor, dtype: torch.dtype, scale: float) -> Tensor:
    """Return rows as a cache of ``dtype`` stores them, with one factor for all.

    The numbers are rounded to nearest even. int8 is limited to -127..127 and NaN becomes 0; float8_e5m2 overflows to
    infinity; float8_e4m3fn, which has none, is limited to -448..448 and infinity becomes NaN.
    """
    # The reciprocal is rounded to float32, as kernels have it: ties must fall alike.
    inverse = 1.0 / torch.tensor(scale, dtype=torch.float32, device=rows.device)
    if dtype == torch.int8:
        scaled = torch.nan_to_num(acc(rows) * inverse, nan=0.0)
        return scaled.round().clamp(-127, 127).to(torch.int8)
    if dtype == torch.float8_e5m2:
        return (acc(rows) * inverse).to(dtype)
    if dtype == torch.float8_e4m3fn:
        scaled = acc(rows) * inverse
        return torch.where(scaled.isinf(), torch.nan, scaled.clamp(-448.0, 448.0)).to(dtype)
    return rows.to(dtype)


# --- the op -----------------------------------------------------------------------------------------------------------


def check_slots(op: str, slots: Tensor, capacity: int) -> None:
    """Check that slots lie in a cache of ``capacity`` slots. Reads data: references call it, fakes do not."""
    for slot in slots[slots >= capacity][:1].tolist():
        text = f"hold slots below num_blocks * block_size = {capacity}"
        check(False, op, "slot_mapping", text, slot)


def _write(
    op: str,
    rows_of: tuple[Tensor, Tensor],
    caches: tuple[Tensor, Tensor],
    slot_mapping: Tensor,
    scale_of: tuple[float, float],
    scales_of: tuple[Tensor | None, Tensor | None],
) -> None:
    """Write keys and values; each tuple has what is of the keys, and what is of the values."""
    block_size = caches[0].shape[2]
    capacity = caches[0].shape[0] * block_size
    check_slots(op, slot_mapping, capacity)
    slots = slot_mapping.tolist()
    for rows, cache, scale, scales in zip(rows_of, caches, scale_of, scales_of, strict=True):
        for token, slot in enumerate(slots):
            if slot < 0:
                continue
            place = slot // block_size, slice(None), slot % block_size
            if scales is None:
                cache[place] = quantize(rows[token], cache.dtype, scale)
            else:
                largest = acc(rows[token]).abs().amax(-1)
                largest = largest.where(largest.isfinite(), float("nan"))
                inverse = (127.0 / largest).where(largest > 0, 0.0)
                cache[place] = quantize(acc(rows[token]) * inverse.unsqueeze(-1), cache.dtype, 1.0)
                scales[place] = largest / 127.0


def _reshape_and_cache(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    kv_cache_dtype: str = "auto",
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    key_scales: Tensor | None = None,
    value_scales: Tensor | None = None,
) -> None:
    """Write the keys and values of new tokens into their slots of a paged cache, in place.

    Slot ``s`` is row ``s % block_size`` of block ``s // block_size``. A token with a negative slot (padding) is
    skipped; of several tokens with the same slot the last one stays. A quantized cache holds the rows divided by
    ``k_scale`` and ``v_scale`` and rounded to nearest even: float8_e5m2 (too large becomes infinity), float8_e4m3fn
    (limited to -448..448; infinity becomes NaN) or int8 (limited to -127..127). With ``key_scales`` and
    ``value_scales`` each row of an int8 cache is instead divided by a scale of its own, its largest magnitude / 127,
    which is written there; a row that is not finite gets NaN for a scale.

    Args:
        key: ``[tokens, kv_heads, head_size]``, float32, bfloat16 or float16.
        value: Like ``key``.
        key_cache: ``[num_blocks, kv_heads, block_size, head_size]``, written; dtype of ``key``, int8, float8_e5m2 or
            float8_e4m3fn.
        value_cache: Like ``key_cache``; written.
        slot_mapping: ``[tokens]``, int32 or int64, each below ``num_blocks * block_size``.
        kv_cache_dtype: ``"auto"`` (what the caches are), or a demand: ``"fp8"`` or ``"fp8_e5m2"``,
            ``"fp8_e4m3"``, ``"int8"``.
        k_scale: Value of 1 in a quantized key cache, positive.
        v_scale: The same for the values.
        key_scales: ``[num_blocks, kv_heads, block_size]`` float32, written, or None.
        value_scales: Like ``key_scales``; both or none.

    Source: Kwon et al., "Efficient Memory Management for Large Language Model Serving with PagedAttention", 2023.
    """
    caches, scales = (key_cache, value_cache), (key_scales, value_scales)
    _write("reshape_and_cache", (key, value), caches, slot_mapping, (k_scale, v_scale), scales)


def _reshape_and_cache_flash(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    kv_cache_dtype: str = "auto",
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    key_scales: Tensor | None = None,
    value_scales: Tensor | None = None,
) -> None:
    """Write the keys and values of new tokens into their slots: the same as `reshape_and_cache`.

    Engines have two names because other devices keep two layouts. On the CPU there is one,
    ``[num_blocks, kv_heads, block_size, head_size]``, which all attention ops here read; a cache stored as
    ``[num_blocks, block_size, kv_heads, head_size]`` is passed as its ``transpose(1, 2)``.

    Arguments and errors are as for `reshape_and_cache`.
    """
    caches, scales = (key_cache, value_cache), (key_scales, value_scales)
    _write(
        "reshape_and_cache_flash", (key, value), caches, slot_mapping, (k_scale, v_scale), scales
    )


def _check(a: Arguments) -> None:
    check_tensor(a.op, "key", a.key)
    a.require(a.key.dim() == 3, "key", "be 3-D [tokens, kv_heads, head_size]", f"{a.key.dim()}-D")
    check_like(a.op, "value", a.value, a.key, "key")
    shape = "[num_blocks, kv_heads, block_size, head_size]"
    check_caches(a, "key", shape, written=True)
    fits = a.key_cache.shape[1] == a.key.shape[1] and a.key_cache.shape[3] == a.key.shape[2]
    text = f"have shape [num_blocks, {a.key.shape[1]}, block_size, {a.key.shape[2]}]"
    a.require(fits, "key_cache", text, list(a.key_cache.shape))
    check_device(a.op, "slot_mapping", a.slot_mapping, a.key, "key")
    check_dtype_in(a.op, "slot_mapping", a.slot_mapping, torch.int32, torch.int64)
    fits = a.slot_mapping.dim() == 1 and a.slot_mapping.shape[0] == a.key.shape[0]
    text = f"be 1-D of size key.shape[0] = {a.key.shape[0]}"
    a.require(fits, "slot_mapping", text, list(a.slot_mapping.shape))
    check_cache_kind(a.op, a.kv_cache_dtype, a.key_cache)
    for name, scale in (("k_scale", a.k_scale), ("v_scale", a.v_scale)):
        fine = scale > 0 and math.isfinite(scale)
        a.require(fine, name, "be positive and finite", f"{scale:g}")
    check_row_scales(a.op, "key_scales", a.key_scales, a.key_cache)
    check_row_scales(a.op, "value_scales", a.value_scales, a.key_cache)
    for name, scales in (("key_scales", a.key_scales), ("value_scales", a.value_scales)):
        if scales is not None:
            check_not_expanded(a.op, name, scales)
    fits = (a.key_scales is None) == (a.value_scales is None)
    text = "be given if and only if key_scales are"
    a.require(fits, "value_scales", text, "None" if a.value_scales is None else "a tensor")


def _samples(dtype: torch.dtype) -> Iterator[Sample]:
    def make(
        tokens: int, heads: int, size: int, blocks: int, rows: int, cache: torch.dtype
    ) -> tuple[Tensor, ...]:
        def empty() -> Tensor:
            return torch.zeros(blocks, heads, rows, size).to(cache)

        key = randn(tokens, heads, size, dtype=dtype, seed=1)
        value = randn(tokens, heads, size, dtype=dtype, seed=2)
        order = torch.randperm(blocks * rows, generator=torch.Generator().manual_seed(tokens))
        return key, value, empty(), empty(), order[:tokens]

    yield Sample(make(1, 1, 8, 1, 1, dtype), id="one")
    yield Sample(make(7, 3, 40, 3, 4, dtype), id="small")
    k, v, kc, vc, slots = make(33, 2, 64, 5, 16, dtype)
    slots[::5] = -1
    yield Sample((k, v, kc, vc, slots), id="negative_slots")
    yield Sample((k, v, kc, vc, slots.int()), id="int32_slots")
    again = slots.clone()
    again[20:] = again[1]
    yield Sample((k, v, kc, vc, again), id="same_slot")
    yield Sample((k[:0], v[:0], kc, vc, slots[:0]), id="no_tokens")
    qkv = randn(9, 4, 3 * 32, dtype=dtype, seed=3)
    _, _, kc, vc, slots = make(9, 4, 32, 4, 8, dtype)
    yield Sample((qkv[..., 32:64], qkv[..., 64:], kc, vc, slots), id="split_projection")
    stored = torch.zeros(4, 8, 4, 32, dtype=dtype)
    args = (qkv[..., :32], qkv[..., 64:], stored.transpose(1, 2), stored.clone().transpose(1, 2))
    yield Sample((*args, slots), id="transposed_cache")
    for kind, cache in (("fp8_e5m2", torch.float8_e5m2), ("fp8_e4m3", torch.float8_e4m3fn)):
        k, v, kc, vc, slots = make(20, 2, 24, 3, 16, cache)
        k[0, 0, :3] = torch.tensor([float("nan"), float("inf"), -float("inf")], dtype=dtype)
        for token, size in enumerate((1e-5, 3e-3, 10.0, 250.0, 6e4)):
            k[1 + token] *= size
        yield Sample((k, v, kc, vc, slots, kind, 0.5, 2.0), id=kind)
    k, v, kc, vc, slots = make(20, 2, 24, 3, 16, torch.int8)
    k[0, 0, :3] = torch.tensor([float("nan"), float("inf"), -float("inf")], dtype=dtype)
    k[1] = 0
    yield Sample((k, v, kc, vc, slots, "auto", 0.02, 0.03), id="int8")
    scales = torch.ones(3, 2, 16), torch.ones(3, 2, 16)
    yield Sample((k, v, kc, vc, slots, "int8", 1.0, 1.0, *scales), id="int8_row_scales")


def _stock(
    key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor
) -> None:
    block, row = slot_mapping // key_cache.shape[2], slot_mapping % key_cache.shape[2]
    key_cache[block, :, row] = key
    value_cache[block, :, row] = value


def _bench() -> Iterator[BenchCase]:
    def make(tokens: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
        caches = [torch.zeros(tokens // 16 + 64, 8, 16, 128, dtype=dtype) for _ in range(2)]
        rows = [randn(tokens, 8, 128, dtype=dtype, seed=i) for i in range(2)]
        return *rows, *caches, torch.arange(tokens) + 5

    for tokens in (1, 32, 1024):
        yield BenchCase(
            f"{tokens}x8x128",
            functools.partial(make, tokens),
            lambda dtype, n=tokens * 8 * 128 * 4: n * dtype.itemsize,
        )


for _name, _reference in (
    ("reshape_and_cache", _reshape_and_cache),
    ("reshape_and_cache_flash", _reshape_and_cache_flash),
):
    register_op(
        name=_name,
        mutates=("key_cache", "value_cache", "key_scales", "value_scales"),
        reference=_reference,
        check=_check,
        samples=_samples,
        stock=_stock,
        backward=None,
        lift=False,
        bench=_bench if _name == "reshape_and_cache" else None,
        summary="Write new keys and values into a paged cache",
    )


# --- places of new tokens ---------------------------------------------------------------------------------------------


def _cache_slots(
    query_start_loc: Tensor,
    positions: Tensor,
    block_table: Tensor,
    slot_mapping: Tensor,
    block_size: int,
) -> None:
    """Write the row of a paged cache for each new token: ``block * block_size + position in the block``.

    Args:
        query_start_loc: ``[sequences + 1]`` int32 or int64, rising: where the new tokens of each sequence begin.
        positions: ``[tokens or more]`` int32 or int64: the position of each token in its sequence.
        block_table: ``[sequences or more, blocks]`` int32 or int64: the blocks of each sequence.
        slot_mapping: ``[tokens or more]`` int64; overwritten, -1 where no sequence has a token.
        block_size: Rows of a block.

    Raises:
        RuntimeError: An argument does not fit, or a position has no block; nothing is written then.

    Source: Kwon et al., "Efficient Memory Management for Large Language Model Serving with PagedAttention", 2023.
    """
    op = "cache_slots"
    offsets = query_start_loc.tolist()
    most = min(positions.numel(), slot_mapping.numel())
    before = 0
    for offset in offsets:
        wanted = f"hold rising offsets in [0, {most}]"
        check(before <= offset <= most, op, "query_start_loc", wanted, offset)
        before = offset
    rows = block_table.shape[1] * block_size
    slots = torch.full_like(slot_mapping, -1)
    for sequence, (begin, end) in enumerate(itertools.pairwise(offsets)):
        places = positions[begin:end].long()
        for place in places[(places < 0) | (places >= rows)][:1].tolist():
            wanted = f"be in [0, {rows}) = columns of block_table * block_size"
            check(False, op, "positions", wanted, place)
        blocks = block_table[sequence].long()[places // block_size]
        slots[begin:end] = blocks * block_size + places % block_size
    slot_mapping.copy_(slots)


def _cache_slots_check(a: Arguments) -> None:
    op = a.op
    for name, value, dim in (
        ("query_start_loc", a.query_start_loc, 1),
        ("positions", a.positions, 1),
        ("block_table", a.block_table, 2),
    ):
        check_device(op, name, value, a.query_start_loc, "query_start_loc")
        check_dtype_in(op, name, value, *_INDEX)
        check(value.dim() == dim, op, name, f"be {dim}-D", f"{value.dim()}-D")
    slots, name = a.slot_mapping, "slot_mapping"
    check_device(op, name, slots, a.query_start_loc, "query_start_loc")
    check_dtype_in(op, name, slots, torch.int64)
    check(slots.dim() == 1, op, name, "be 1-D", f"{slots.dim()}-D")
    check_not_expanded(op, name, slots)
    check(a.block_size > 0, op, "block_size", "be positive", a.block_size)
    count, most = a.query_start_loc.numel(), a.block_table.shape[0] + 1
    wanted = f"have between 1 and {most} offsets"
    check(1 <= count <= most, op, "query_start_loc", wanted, count)


def _cache_slots_samples(dtype: torch.dtype) -> Iterator[Sample]:
    kind = dtype if dtype in _INDEX else torch.int32  # tests of all ops ask in floats, too
    offsets = torch.tensor([0, 3, 3, 4, 9], dtype=kind)
    positions = torch.tensor([14, 15, 16, 0, 30, 31, 32, 33, 34, 7, 7])
    table = torch.randperm(24, generator=torch.Generator().manual_seed(1)).view(6, 4)
    slots = torch.full((12,), 5)
    yield Sample((offsets, positions, table.int(), slots, 16), id="padded")
    yield Sample((offsets, positions, table.int(), slots[:9], 9), id="exact")
    wide = torch.stack([table, table + 24], -1).flatten(1)
    yield Sample(
        (offsets, positions, wide[:, ::2], torch.zeros(24, dtype=torch.int64)[::2], 16),
        id="strided",
    )
    yield Sample((offsets[:1], positions, table, slots, 16), id="no_sequence")


register_op(
    mutates=("slot_mapping",),
    reference=_cache_slots,
    check=_cache_slots_check,
    samples=_cache_slots_samples,
    dtypes=_INDEX,
    backward=None,
    tolerance={},
    lift=False,
    summary="Rows of a paged cache for new tokens",
)

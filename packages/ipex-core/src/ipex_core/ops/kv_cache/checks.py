# SPDX-License-Identifier: Apache-2.0
"""Key-value caches as the references see them: checks, rows gathered from blocks, quantized rows.

A cache holds rows of the dtype of the query, or int8, float8_e5m2 or float8_e4m3fn numbers. The value of a row is its
numbers times a factor of the whole cache (``k_scale``, ``v_scale``) and, for int8, times a float32 scale of the row
where there are any. Kernels repeat these checks with the same text (``ipex/glue/kv_glue.h``).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ipex_core.library.checks import (
    acc,
    check_device,
    check_dtype_in,
    check_not_expanded,
    check_one_of,
    check_shape,
    dtype_name,
)
from ipex_core.library.spec import check

__all__ = [
    "QUANTIZED",
    "check_block_tables",
    "check_cache_kind",
    "check_caches",
    "check_index_tensor",
    "check_lengths",
    "check_longest",
    "check_row_scales",
    "dequantize",
    "gather_blocks",
    "quantize",
]

Tensor = torch.Tensor

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


def check_caches(
    op: str,
    key_cache: Tensor,
    value_cache: Tensor,
    x: Tensor,
    of: str,
    shape: str,
    written: bool = False,
) -> None:
    """Check a pair of caches: device, dtype, 4-D, consecutive elements, equal shapes and dtypes.

    Args:
        op: Name of the op.
        key_cache: Cache of the keys.
        value_cache: Cache of the values.
        x: The tensor whose device and dtype count, which messages call ``of``.
        of: Name of ``x``.
        shape: The wanted shape in words, ``"[num_blocks, ...]"``.
        written: Whether the op writes to them, so that no two elements may share memory.
    """
    for name, cache in (("key_cache", key_cache), ("value_cache", value_cache)):
        check_device(op, name, cache, x, of)
        check(
            cache.dtype == x.dtype or cache.dtype in QUANTIZED,
            op,
            name,
            f"have the dtype of {of} = {dtype_name(x.dtype)}, int8, float8_e5m2 or float8_e4m3fn",
            dtype_name(cache.dtype),
        )
        check(cache.dim() == 4, op, name, f"be 4-D {shape}", f"{cache.dim()}-D")
        stride = cache.stride(3)
        check(
            stride == 1 or cache.shape[3] <= 1,
            op,
            name,
            "have a contiguous last dimension",
            f"stride {stride}",
        )
        if written:
            check_not_expanded(op, name, cache)
    check(
        value_cache.shape == key_cache.shape,
        op,
        "value_cache",
        f"have the shape of key_cache = {list(key_cache.shape)}",
        list(value_cache.shape),
    )
    check(
        value_cache.dtype == key_cache.dtype,
        op,
        "value_cache",
        f"have the dtype of key_cache = {dtype_name(key_cache.dtype)}",
        dtype_name(value_cache.dtype),
    )


def check_cache_kind(op: str, kind: str, key_cache: Tensor) -> None:
    """Check what the argument ``kv_cache_dtype`` demands of the caches."""
    check_one_of(op, "kv_cache_dtype", kind, _KINDS)
    wanted = _KINDS[kind]
    check(
        wanted is None or key_cache.dtype == wanted,
        op,
        "key_cache",
        f"have dtype {dtype_name(wanted or key_cache.dtype)} for kv_cache_dtype {kind}",
        dtype_name(key_cache.dtype),
    )


def check_row_scales(op: str, name: str, scales: Tensor | None, cache: Tensor) -> None:
    """Check the optional scales of rows: float32 in the shape of the int8 cache without its last dimension."""
    if scales is None:
        return
    check_device(op, name, scales, cache, "key_cache")
    check_dtype_in(op, name, scales, torch.float32)
    check(
        cache.dtype == torch.int8,
        op,
        name,
        "be None unless the cache is int8",
        f"a cache of dtype {dtype_name(cache.dtype)}",
    )
    shape = list(cache.shape[:3])
    check_shape(op, name, scales, shape)


def check_lengths(op: str, lengths: Sequence[int], rows: int) -> None:
    """Check how many rows of a cache of ``rows`` each sequence uses. Reads data: references call it, fakes do not."""
    for length in lengths:
        check(
            0 <= length <= rows,
            op,
            "lengths",
            f"be between 0 and the rows of the cache = {rows}",
            length,
        )


def check_longest(op: str, lengths: Sequence[int], max_context_len: int) -> None:
    """Check that ``max_context_len`` covers all ``lengths``. Reads data: references call it, fakes do not."""
    longest = max(lengths, default=0)
    check(
        longest <= max_context_len,
        op,
        "max_context_len",
        f"be at least the largest of context_lens, {longest}",
        max_context_len,
    )


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
    for length, row in zip(lengths, tables.tolist(), strict=True):
        check(
            0 <= length <= capacity,
            op,
            lengths_name,
            f"be between 0 and the capacity of {name} = {capacity}",
            length,
        )
        for block in row[: -(-length // block_size)]:
            check(
                0 <= block < blocks,
                op,
                name,
                f"hold numbers of blocks in [0, {blocks})",
                block,
            )


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

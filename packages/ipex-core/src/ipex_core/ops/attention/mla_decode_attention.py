# SPDX-License-Identifier: Apache-2.0
"""Decode attention over a latent cache that all heads share (multi-head latent attention)."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch

from ipex_core.library.arguments import Arguments
from ipex_core.library.checks import (
    acc,
    check_device,
    check_dtype,
    check_not_expanded,
    check_score_scale,
    check_tensor,
    randn,
)
from ipex_core.library.kernels import register
from ipex_core.library.spec import BenchCase, OpSpec, Sample, check
from ipex_core.ops.attention.checks import TOLERANCE
from ipex_core.ops.kv_cache.checks import check_block_tables, check_index_tensor, check_lengths

Tensor = torch.Tensor

OP = "mla_decode_attention"


def _mla(
    query: Tensor,
    kv_cache: Tensor,
    lengths: Tensor,
    scale: float,
    kv_lora_rank: int,
    block_tables: Tensor | None = None,
    new_rows: Tensor | None = None,
) -> Tensor:
    """Attend with the newest token of each sequence to a latent cache, after writing its own row there.

    The up-projections of keys and values are absorbed into ``query`` and into what follows: a row of the cache is
    ``[latent | rotary key]`` for all heads, its score the product with the whole row, its value the latent.

    Args:
        query: ``[sequences, heads, width]``, width = kv_lora_rank + rotary size; float32, bfloat16 or float16.
        kv_cache: ``[num_blocks, block_size, width]`` with ``block_tables``, else ``[sequences, rows, width]``; dtype of
            ``query``; written if there are ``new_rows``.
        lengths: ``[sequences]`` int32 or int64, rows in use, the new one included; 0 gives zeros.
        scale: Factor on the scores; ``1 / sqrt(size of a head before absorption)`` as a rule.
        kv_lora_rank: How many first columns of a row are the value.
        block_tables: ``[sequences, max_blocks]`` int32 or int64, or None.
        new_rows: ``[sequences, width]``, written at position ``lengths - 1`` of each sequence first; or None.

    Returns:
        ``[sequences, heads, kv_lora_rank]`` in the dtype of ``query``.

    Source: DeepSeek-AI, "DeepSeek-V2", 2024, section 2.1.
    """
    used = lengths.tolist()
    rows = kv_cache.shape[1]
    if block_tables is not None:
        check_block_tables(OP, "lengths", used, block_tables, rows, kv_cache.shape[0])
    else:
        check_lengths(OP, used, rows)
    if new_rows is not None:
        for length in used:
            check(length > 0, OP, "lengths", "be positive where new_rows are written", length)
        for s, length in enumerate(used):
            place = divmod(length - 1, rows)
            block = s if block_tables is None else block_tables[s, place[0]]
            kv_cache[block, place[1]] = new_rows[s]
    out = query.new_zeros(*query.shape[:2], kv_lora_rank)
    for s, length in enumerate(used):
        if length == 0:
            continue
        if block_tables is None:
            past = acc(kv_cache[s, :length])
        else:
            blocks = block_tables[s, : -(-length // rows)].long()
            past = acc(kv_cache[blocks]).flatten(0, 1)[:length]
        weights = torch.softmax(acc(query[s]) @ past.T * scale, -1)
        out[s] = weights @ past[:, :kv_lora_rank]
    return out


def _check(a: Arguments) -> None:
    check_tensor(OP, "query", a.query)
    text = "be 3-D [sequences, heads, width]"
    check(a.query.dim() == 3, OP, "query", text, f"{a.query.dim()}-D")
    sequences, _, width = a.query.shape
    check(0 < width <= 4096, OP, "query", "have a width between 1 and 4096", width)
    text = f"be between 1 and the width of query = {width}"
    check(0 < a.kv_lora_rank <= width, OP, "kv_lora_rank", text, a.kv_lora_rank)
    check_score_scale(OP, "scale", a.scale)
    check_device(OP, "kv_cache", a.kv_cache, a.query, "query")
    check_dtype(OP, "kv_cache", a.kv_cache, a.query, "query")
    shape = list(a.kv_cache.shape)
    fits = a.kv_cache.dim() == 3 and shape[2] == width
    check(fits, OP, "kv_cache", f"have shape [blocks, rows, {width}]", shape)
    stride = a.kv_cache.stride(2)
    fine = stride == 1 or width == 1
    check(fine, OP, "kv_cache", "have a contiguous last dimension", f"stride {stride}")
    check_not_expanded(OP, "kv_cache", a.kv_cache)
    check_index_tensor(OP, "lengths", a.lengths, 1, a.query)
    have = a.lengths.shape[0]
    check(have == sequences, OP, "lengths", f"have size sequences = {sequences}", have)
    if a.block_tables is not None:
        check_index_tensor(OP, "block_tables", a.block_tables, 2, a.query)
        have = a.block_tables.shape[0]
        check(have == sequences, OP, "block_tables", f"have {sequences} rows", have)
        check(shape[1] > 0, OP, "kv_cache", "have rows in its blocks", shape)
    else:
        text = f"have {sequences} blocks where there are no block_tables"
        check(shape[0] == sequences, OP, "kv_cache", text, shape[0])
    if a.new_rows is not None:
        check_device(OP, "new_rows", a.new_rows, a.query, "query")
        check_dtype(OP, "new_rows", a.new_rows, a.query, "query")
        got = list(a.new_rows.shape)
        check(got == [sequences, width], OP, "new_rows", f"have shape [{sequences}, {width}]", got)


def _fake(a: Arguments) -> Tensor:
    return a.query.new_empty(*a.query.shape[:2], a.kv_lora_rank)


def _arguments(
    dtype: torch.dtype,
    lengths: list[int],
    heads: int,
    rank: int,
    rotary: int,
    block_size: int = 0,
    write: bool = False,
) -> tuple[Any, ...]:
    width, n = rank + rotary, len(lengths)
    query = randn(n, heads, width, dtype=dtype, seed=1)
    used = torch.tensor(lengths)
    new = randn(n, width, dtype=dtype, seed=3) if write else None
    if not block_size:
        cache = randn(n, max([*lengths, 1]), width, dtype=dtype, seed=2)
        return query, cache, used, width**-0.5, rank, None, new
    counts = [-(-length // block_size) for length in lengths]
    order = torch.randperm(sum(counts) + 1, generator=torch.Generator().manual_seed(n)).tolist()
    tables = torch.full((n, max([*counts, 1])), -1, dtype=torch.int32)
    for row, count in zip(tables, counts, strict=True):
        row[:count] = torch.tensor([order.pop() for _ in range(count)], dtype=torch.int32)
    cache = randn(sum(counts) + 1, block_size, width, dtype=dtype, seed=2)
    return query, cache, used, width**-0.5, rank, tables, new


def _samples(dtype: torch.dtype) -> Iterator[Sample]:
    yield Sample(_arguments(dtype, [1], 1, 8, 8), id="one")
    yield Sample(_arguments(dtype, [5, 130, 0], 3, 64, 32), id="lengths")
    yield Sample(_arguments(dtype, [65], 16, 512, 64), id="16_heads")
    yield Sample(_arguments(dtype, [40], 130, 128, 64), id="130_heads")
    yield Sample(_arguments(dtype, [1100, 513], 5, 96, 16), id="parts")
    yield Sample(_arguments(dtype, [33, 70], 7, 40, 9), id="odd_sizes")
    yield Sample(_arguments(dtype, [200, 64, 1], 16, 128, 64, 64, True), id="paged")
    yield Sample(_arguments(dtype, [200, 33], 40, 64, 32, 7, True), id="small_blocks")
    yield Sample(_arguments(dtype, [300, 257], 4, 64, 32, 256, True), id="large_blocks")
    yield Sample(_arguments(dtype, [20, 31], 4, 64, 32, 0, True), id="new_rows")
    query, cache, *rest = _arguments(dtype, [20, 31], 4, 64, 32)
    wide = randn(2, 4, 192, dtype=dtype, seed=5)[..., ::2]
    stored = randn(31, 2, 100, dtype=dtype, seed=6)[..., :96].transpose(0, 1)
    yield Sample((wide, stored, *rest), id="noncontiguous")
    cache = cache.clone()
    cache[0, 3, 5] = float("nan")
    yield Sample((query, cache, *rest), id="nan")
    yield Sample((query[:0], cache[:0], rest[0][:0], *rest[1:]), id="no_sequences")


def _stock(
    query: Tensor, kv_cache: Tensor, lengths: Tensor, scale: float, kv_lora_rank: int, *rest: Any
) -> Tensor:
    past = kv_cache[:, : int(lengths.max())]
    scores = torch.matmul(query, past.transpose(1, 2)) * scale
    weights = torch.softmax(scores, -1, dtype=torch.float32).to(query.dtype)
    return torch.matmul(weights, past[..., :kv_lora_rank])


def _bench() -> Iterator[BenchCase]:
    for sequences, heads, length in ((1, 16, 2048), (1, 128, 2048), (4, 128, 1024)):
        yield BenchCase(
            f"{sequences}x{heads}x{length}x(512+64)",
            functools.partial(
                _arguments, lengths=[length] * sequences, heads=heads, rank=512, rotary=64
            ),
            lambda dtype, n=sequences * length * 576: n * dtype.itemsize,
            flops=2 * sequences * heads * length * (576 + 512),
        )


register(
    OpSpec(
        name=OP,
        schema=(
            "(Tensor query, Tensor(a!) kv_cache, Tensor lengths, float scale, int kv_lora_rank,"
            " Tensor? block_tables=None, Tensor? new_rows=None) -> Tensor"
        ),
        reference=_mla,
        check=_check,
        fake=_fake,
        samples=_samples,
        stock=_stock,
        backward=None,
        tolerance=TOLERANCE,
        bench=_bench,
        summary="Decode attention over a latent cache that all heads share",
    )
)

# SPDX-License-Identifier: Apache-2.0
"""Attention over sequences of different lengths that lie behind each other."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch.nn import functional

from ipex_core.library.arguments import Arguments
from ipex_core.library.checks import check_device, check_dtype, check_score_scale, randn
from ipex_core.library.kernels import register
from ipex_core.library.spec import BenchCase, OpSpec, Sample, check
from ipex_core.ops.attention.attention import attention_reference
from ipex_core.ops.attention.checks import (
    check_offset_tensor,
    check_offsets,
    check_options,
    check_rows,
)

Tensor = torch.Tensor

OP = "varlen_attention"


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
) -> None:
    """Write the attention of each sequence to its own keys and values into ``out``.

    Sequence b owns the rows ``seqlen_q[b]`` to ``seqlen_q[b + 1]`` of ``query`` and ``out`` and the rows
    ``seqlen_k[b]`` to ``seqlen_k[b + 1]`` of ``key`` and ``value``. Where it has more keys than queries, the queries
    are the last positions: query i of n stands at the key ``p = keys - n + i``, which ``is_causal``, the window and
    the slopes refer to. A query that sees no key gets zeros. Rows of ``out`` of no sequence stay as they are, unless
    ``zero_tensors``.

    Args:
        query: ``[tokens, heads, head_size]``, float32, bfloat16 or float16.
        key: ``[key_tokens, kv_heads, head_size]``; heads is a multiple of kv_heads.
        value: Like ``key``.
        out: Like ``query``, with a contiguous last dimension; written.
        seqlen_q: ``[sequences + 1]`` int32 or int64, offsets of the sequences in ``query``, non-decreasing.
        seqlen_k: ``[sequences + 1]``, offsets in ``key``.
        alibi_slopes: ``[heads]`` or ``[sequences, heads]`` in the dtype of ``query`` or float32:
            ``-slope * |p - j|`` is added to the score of the key j; or None.
        max_seqlen_q: Length of the longest sequence; not needed here.
        max_seqlen_k: The same for the keys.
        pdropout: 0: there is no dropout.
        softmax_scale: Factor on the scores; 0 means ``1 / sqrt(head_size)``.
        zero_tensors: Fill ``out`` with zeros first.
        is_causal: Let a query see the keys up to its place p only.
        return_softmax: False: the weights never exist as a whole.
        window_size_left: How many keys before p a query sees; negative: all.
        window_size_right: How many keys behind p a query sees; negative: all.
        softcap: If positive, scores become ``softcap * tanh(scores / softcap)``, before alibi.
        sinks: ``[heads]`` in the dtype of ``query`` or float32: a score per head that takes part in the sum of the
            softmax, but has no value; or None.

    Source: Dao, "FlashAttention-2", 2023.
    """
    queries = check_offsets(OP, "seqlen_q", seqlen_q, query.shape[0])
    keys = check_offsets(OP, "seqlen_k", seqlen_k, key.shape[0])
    if zero_tensors:
        out.zero_()
    for b, ((q0, q1), (k0, k1)) in enumerate(zip(queries, keys, strict=True)):
        slopes = alibi_slopes
        if slopes is not None and slopes.dim() == 2:
            slopes = slopes[b]
        result = attention_reference(
            query[None, q0:q1].transpose(1, 2),
            key[None, k0:k1].transpose(1, 2),
            value[None, k0:k1].transpose(1, 2),
            scale=softmax_scale,
            is_causal=is_causal,
            alibi_slopes=slopes,
            window_left=window_size_left,
            window_right=window_size_right,
            softcap=softcap,
            sinks=sinks,
            bottom_right=True,
        )
        out[q0:q1] = result[0].transpose(0, 1)


def _check(a: Arguments) -> None:
    check_rows(OP, a.query, a.out)
    check_score_scale(OP, "softmax_scale", a.softmax_scale)
    heads, size = a.query.shape[1:]
    for name, tensor in (("key", a.key), ("value", a.value)):
        check_device(OP, name, tensor, a.query, "query")
        check_dtype(OP, name, tensor, a.query, "query")
    text = f"have shape [tokens, kv_heads, {size}]"
    check(a.key.dim() == 3 and a.key.shape[2] == size, OP, "key", text, list(a.key.shape))
    text = f"have the shape of key = {list(a.key.shape)}"
    check(list(a.value.shape) == list(a.key.shape), OP, "value", text, list(a.value.shape))
    check(
        a.key.shape[1] > 0 and heads % a.key.shape[1] == 0,
        OP,
        "key",
        f"have a number of heads that divides the {heads} heads of query",
        a.key.shape[1],
    )
    check_offset_tensor(OP, "seqlen_q", a.seqlen_q, a.query)
    check_offset_tensor(OP, "seqlen_k", a.seqlen_k, a.query, a.seqlen_q.shape[0])
    check(a.pdropout == 0, OP, "pdropout", "be 0", f"{a.pdropout:g}")
    check(not a.return_softmax, OP, "return_softmax", "be False", a.return_softmax)
    check_options(OP, a.query, a.seqlen_q.shape[0] - 1, heads, a.alibi_slopes, a.sinks, a.softcap)


def _fake(a: Arguments) -> None:
    return None


def _make(
    dtype: torch.dtype,
    heads: int,
    kv_heads: int,
    size: int,
    queries: tuple[int, ...],
    keys: tuple[int, ...],
) -> tuple[Tensor, ...]:
    rows = sum(queries) + 2, sum(keys) + 3  # the last ones belong to no sequence
    return (
        randn(rows[0], heads, size, dtype=dtype, seed=81),
        randn(rows[1], kv_heads, size, dtype=dtype, seed=82),
        randn(rows[1], kv_heads, size, dtype=dtype, seed=83),
        randn(rows[0], heads, size, dtype=dtype, seed=84),
        torch.tensor([0, *queries]).cumsum(0),
        torch.tensor([0, *keys]).cumsum(0),
    )


def _samples(dtype: torch.dtype) -> Iterator[Sample]:
    def rest(queries: tuple[int, ...], keys: tuple[int, ...], causal: bool, *more: Any) -> Any:
        slopes, *others = more or (None,)
        return slopes, max(queries), max(keys), 0.0, 0.0, False, causal, False, *others

    few = (5, 1, 0, 70, 33), (5, 40, 8, 70, 0)
    mixed = (100, 300, 3, 1), (100, 300, 700, 520)
    for causal in (False, True):
        yield Sample((*_make(dtype, 4, 4, 32, *few), *rest(*few, causal)), id=f"few-{causal}")
        yield Sample((*_make(dtype, 8, 2, 64, *mixed), *rest(*mixed, causal)), id=f"mixed-{causal}")
    yield Sample((*_make(dtype, 3, 1, 33, *few), *rest(*few, True)), id="odd_head")
    slopes, sinks = 2.0 ** -torch.arange(1, 5), randn(4, seed=85)
    args = _make(dtype, 4, 2, 40, *few)
    yield Sample((*args, *rest(*few, True, slopes)), id="alibi")
    slopes = slopes.repeat(5, 1) * torch.arange(1, 6)[:, None]
    yield Sample((*args, *rest(*few, False, slopes.to(dtype))), id="alibi_per_sequence")
    yield Sample((*args, *rest(*few, False, None, 7, 3)), id="window")
    long = _make(dtype, 4, 2, 40, *mixed)
    yield Sample((*long, *rest(*mixed, True, None, 60, -1, 2.0, sinks)), id="everything")
    yield Sample((*args, None, 0, 0, 0.0, 0.3, True, True, False), id="zero_tensors")
    short = (*args[:4], args[4].int(), args[5].int())
    yield Sample((*short, *rest(*few, True)), id="int32_offsets")
    qkv = randn(112, 8, 40, dtype=dtype, seed=86)
    split = (qkv[:, :4], qkv[:, 4:6], qkv[:, 6:], torch.zeros(112, 8, 40, dtype=dtype)[:, 2:6])
    yield Sample((*split, args[4], args[4], *rest(*few, True)), id="split_projection")
    none = torch.zeros(1, dtype=torch.int64)
    yield Sample((*args[:4], none, none, *rest(*few, True)), id="no_sequences")


def _stock(
    query: Tensor, key: Tensor, value: Tensor, out: Tensor, seqlen_q: Tensor, *rest: Any
) -> None:
    offsets = seqlen_q.tolist()
    for begin, end in itertools.pairwise(offsets):
        q, k, v = (x[None, begin:end].transpose(1, 2) for x in (query, key, value))
        result = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        out[begin:end] = result[0].transpose(0, 1)


def _bench() -> Iterator[BenchCase]:
    def make(lengths: tuple[int, ...], dtype: torch.dtype) -> tuple[Any, ...]:
        args = _make(dtype, 16, 4, 128, lengths, lengths)
        return *args, None, max(lengths), max(lengths), 0.0, 0.0, False, True, False

    def n_bytes(lengths: tuple[int, ...], dtype: torch.dtype) -> int:
        return 2 * sum(lengths) * 128 * (16 + 4) * dtype.itemsize

    for name, lengths in (
        ("8 prompts of 37..900", (37, 900, 120, 256, 64, 480, 33, 75)),
        ("1 prompt of 1024", (1024,)),
    ):
        yield BenchCase(
            name,
            functools.partial(make, lengths),
            functools.partial(n_bytes, lengths),
            flops=2 * 16 * 128 * sum(n * n for n in lengths),
        )


register(
    OpSpec(
        name=OP,
        schema=(
            "(Tensor query, Tensor key, Tensor value, Tensor(a!) out, Tensor seqlen_q, Tensor seqlen_k,"
            " Tensor? alibi_slopes, SymInt max_seqlen_q, SymInt max_seqlen_k, float pdropout, float softmax_scale,"
            " bool zero_tensors, bool is_causal, bool return_softmax, int window_size_left=-1,"
            " int window_size_right=-1, float softcap=-1.0, Tensor? sinks=None) -> ()"
        ),
        reference=_varlen_attention,
        check=_check,
        fake=_fake,
        samples=_samples,
        stock=_stock,
        backward=None,
        tolerance={
            torch.float32: (1e-4, 1e-4),
            torch.bfloat16: (1.6e-2, 2e-2),
            torch.float16: (4e-3, 4e-3),
        },
        bench=_bench,
        summary="Attention over packed sequences of different lengths",
    )
)

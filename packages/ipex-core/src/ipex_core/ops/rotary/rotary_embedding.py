# SPDX-License-Identifier: Apache-2.0
"""Rotary position embedding of queries and keys, in place and as a function."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ipex_core.library.arguments import Arguments
from ipex_core.library.checks import check_not_expanded, fake_like, randn, strided
from ipex_core.library.kernels import register
from ipex_core.library.spec import BenchCase, OpSpec, Sample
from ipex_core.ops.rotary._common import (
    check_heads,
    check_position_ids,
    check_rotary_dim,
    check_tables,
    rotate,
    table_rows,
)

Tensor = torch.Tensor


def _rotary_embedding(
    query: Tensor,
    key: Tensor,
    sin: Tensor,
    cos: Tensor,
    rotary_dim: int,
    rotary_half: bool,
    position_ids: Tensor | None = None,
) -> None:
    """Rotate pairs of elements of each head by the angle of the token's position, in place.

    A pair ``(x1, x2)`` becomes ``(x1 cos - x2 sin, x2 cos + x1 sin)``. Computed in float32 and rounded once.

    Args:
        query: ``[tokens, heads, head_dim]`` or ``[batch, positions, heads, head_dim]``, float32, bfloat16 or
            float16; overwritten. Views, for instance of a fused projection, are welcome.
        key: Like ``query``, with its own number of heads; overwritten.
        sin: ``[..., rotary_dim]``, or ``[..., rotary_dim / 2]`` with one number per pair, in the dtype of ``query``
            or float32. All leading dimensions together count the rows of the table.
        cos: Like ``sin``.
        rotary_dim: The first elements of a head that are rotated, an even number up to 1024; the rest stays.
        rotary_half: True: element ``i`` pairs with ``i + rotary_dim / 2`` (GPT-NeoX, Llama). False: element ``2 i``
            pairs with ``2 i + 1`` (GPT-J).
        position_ids: int32 or int64: the row of the tables of each token or, where all sequences agree, of each
            position. None: row ``t`` for token ``t`` where there are as many rows as tokens, else row ``p`` for
            position ``p``.

    Raises:
        RuntimeError: An argument does not fit, or a position has no row; nothing is written then.

    Source: Su et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding", 2021.
    """
    rows = [table_rows("rotary_embedding", table, query, position_ids) for table in (cos, sin)]
    for x in (query, key):
        x.copy_(rotate(x, rows[0], rows[1], rotary_dim, rotary_half))


def _functional(
    query: Tensor,
    key: Tensor,
    sin: Tensor,
    cos: Tensor,
    rotary_dim: int,
    rotary_half: bool,
    position_ids: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Rotate query and key as `rotary_embedding` does and return the results as new tensors.

    The form for training and for rewriting traced graphs; it can be differentiated.

    Args:
        query: As for `rotary_embedding`; not written to.
        key: As for `rotary_embedding`; not written to.
        sin: As for `rotary_embedding`.
        cos: As for `rotary_embedding`.
        rotary_dim: As for `rotary_embedding`.
        rotary_half: As for `rotary_embedding`.
        position_ids: As for `rotary_embedding`.

    Returns:
        The rotated query and the rotated key, contiguous.
    """
    op = "rotary_embedding_functional"
    rows = [table_rows(op, table, query, position_ids) for table in (cos, sin)]
    q, k = (rotate(x, rows[0], rows[1], rotary_dim, rotary_half) for x in (query, key))
    return q, k


def _check_functional(a: Arguments) -> None:
    check_heads(a.op, a.query, a.key)
    check_rotary_dim(a.op, "rotary_dim", a.rotary_dim, a.query.shape[-1])
    check_tables(a.op, a.sin, a.cos, a.query, a.rotary_dim)
    check_position_ids(a.op, a.query, a.sin, a.position_ids)


def _check(a: Arguments) -> None:
    _check_functional(a)
    check_not_expanded(a.op, "query", a.query)
    check_not_expanded(a.op, "key", a.key)


def _fake(a: Arguments) -> None:
    return None


def _functional_fake(a: Arguments) -> tuple[Tensor, Tensor]:
    return fake_like(a.query), fake_like(a.key)


def tables(rows: int, columns: int, dtype: torch.dtype, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Return sines and cosines of random angles: ``(sin, cos)``."""
    angles = randn(rows, columns, seed=seed + 61, scale=3.0)
    return angles.sin().to(dtype), angles.cos().to(dtype)


def _samples(dtype: torch.dtype) -> Iterator[Sample]:
    for half in (True, False):
        name = "half" if half else "pairs"
        for dim, rotary in ((64, 64), (128, 128), (80, 32), (96, 96), (22, 10), (2, 2)):
            q, k = randn(7, 4, dim, dtype=dtype, seed=1), randn(7, 2, dim, dtype=dtype, seed=2)
            sin, cos = tables(7, rotary // 2, torch.float32)
            yield Sample((q, k, sin, cos, rotary, half), id=f"{name}-{dim}-{rotary}")
        q, k = (randn(2, 5, h, 64, dtype=dtype, seed=h) for h in (6, 3))
        ids = torch.tensor([[3, 0, 9, 9, 1], [8, 7, 2, 0, 5]])
        sin, cos = tables(10, 48, dtype, seed=1)
        yield Sample((q, k, sin, cos, 48, half, ids), id=f"{name}-full-tables-positions")
        fused = randn(2, 5, 12 * 32, dtype=dtype, seed=3).view(2, 5, 12, 32)
        sin, cos = (t.view(1, 9, 16) for t in tables(9, 16, dtype, seed=2))
        args = (fused[:, :, :8], fused[:, :, 8:10], sin, cos, 32, half)
        yield Sample((*args, ids[1].int()), id=f"{name}-views-of-fused")
        yield Sample(args, id=f"{name}-longer-tables")
    q, k = (randn(2, h, 5, 64, dtype=dtype, seed=h).transpose(1, 2) for h in (6, 3))
    sin, cos = (t.view(2, 5, 1, 32) for t in tables(10, 32, torch.float32, seed=3))
    yield Sample((q, k, sin, cos, 64, True), id="transposed-one-row-per-token")
    q, k = strided(randn(3, 4, 16, dtype=dtype, seed=4)), randn(3, 1, 16, dtype=dtype, seed=5)
    sin, cos = tables(3, 16, dtype)
    yield Sample((q, k, sin, cos, 16, True), id="scattered-heads")
    yield Sample((q[:0], k[:0], sin, cos, 16, False), id="no_tokens")


def stock_rotary(
    query: Tensor,
    key: Tensor,
    sin: Tensor,
    cos: Tensor,
    rotary_dim: int,
    rotary_half: bool,
    position_ids: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The chain of transformers' Llama model, for one table row per token and whole heads."""

    def rotate_half(x: Tensor) -> Tensor:
        return torch.cat((-x[..., x.shape[-1] // 2 :], x[..., : x.shape[-1] // 2]), -1)

    c, s = cos.unsqueeze(-2), sin.unsqueeze(-2)
    return query * c + rotate_half(query) * s, key * c + rotate_half(key) * s


def _bench() -> Iterator[BenchCase]:
    for tokens, heads, kv_heads, dim in (
        (1, 32, 8, 128),
        (512, 32, 8, 128),
        (512, 32, 32, 128),
        (2048, 16, 8, 64),
    ):
        yield BenchCase(
            f"{tokens}x{heads}+{kv_heads}x{dim}",
            lambda dtype, t=tokens, h=heads, k=kv_heads, d=dim: (
                randn(t, h, d, dtype=dtype),
                randn(t, k, d, dtype=dtype),
                *tables(t, d, dtype),
                d,
                True,
            ),
            lambda dtype, n=tokens * (heads + kv_heads + 1) * dim: 2 * n * dtype.itemsize,
        )


_ARGUMENTS = "Tensor sin, Tensor cos, int rotary_dim, bool rotary_half, Tensor? position_ids=None)"

register(
    OpSpec(
        name="rotary_embedding",
        schema=f"(Tensor(a!) query, Tensor(b!) key, {_ARGUMENTS} -> ()",
        reference=_rotary_embedding,
        check=_check,
        fake=_fake,
        samples=_samples,
        stock=stock_rotary,
        backward=None,
        bench=_bench,
        summary="Rotary position embedding of query and key in place",
    )
)
register(
    OpSpec(
        name="rotary_embedding_functional",
        schema=f"(Tensor query, Tensor key, {_ARGUMENTS} -> (Tensor, Tensor)",
        reference=_functional,
        check=_check_functional,
        fake=_functional_fake,
        samples=_samples,
        stock=stock_rotary,
        bench=_bench,
        summary="Rotary position embedding of query and key as new tensors",
    )
)

# SPDX-License-Identifier: Apache-2.0
"""Rows of a packed linear weight: the embedding of a model whose head is the same weight."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ipex_core.library.arguments import Arguments
from ipex_core.library.checks import check_device, check_tensor, dtype_name, randn
from ipex_core.library.kernels import register
from ipex_core.library.spec import FLOATS, BenchCase, OpSpec, Sample, check
from ipex_core.packing import dense
from ipex_core.packing.dense import check_packed

Tensor = torch.Tensor

_OP = "packed_embedding"


def _embedding(
    packed: Tensor, ids: Tensor, num_embeddings: int, embedding_dim: int, dtype: torch.dtype
) -> Tensor:
    """Return rows of a weight that is packed for `linear`, bit for bit.

    A language model whose head has the weight of its embedding needs that weight once: packed, as the head reads it.

    Args:
        packed: Result of `pack_linear_weight` for a weight ``[num_embeddings, embedding_dim]``.
        ids: int32 or int64 of any shape, each in ``[0, num_embeddings)``.
        num_embeddings: The number of rows of the weight.
        embedding_dim: The size of a row.
        dtype: The dtype of the weight that was packed: float32, bfloat16 or float16.

    Returns:
        ``[*ids.shape, embedding_dim]`` of this dtype, contiguous.

    Raises:
        RuntimeError: An argument does not fit, or there is no row for an id.
    """
    dense.check_header(_OP, "packed", packed, num_embeddings, embedding_dim, dtype)
    for row in ids.flatten().tolist():
        check(0 <= row < num_embeddings, _OP, "ids", f"hold rows in [0, {num_embeddings})", row)
    weight = dense.unpack(packed, num_embeddings, embedding_dim, dtype)
    return torch.nn.functional.embedding(ids, weight)


def _check(a: Arguments) -> None:
    check(a.dtype in FLOATS, _OP, "dtype", "be float32, bfloat16 or float16", dtype_name(a.dtype))
    check(a.num_embeddings > 0, _OP, "num_embeddings", "be positive", a.num_embeddings)
    check(a.embedding_dim > 0, _OP, "embedding_dim", "be positive", a.embedding_dim)
    check_packed(_OP, "packed", a.packed, a.num_embeddings, a.embedding_dim, a.dtype)
    check_device(_OP, "ids", a.ids, a.packed, "packed")
    check_tensor(_OP, "ids", a.ids, (torch.int32, torch.int64), min_dim=0)


def _fake(a: Arguments) -> Tensor:
    return a.packed.new_empty(*a.ids.shape, a.embedding_dim, dtype=a.dtype)


def _ids(*shape: int, rows: int, dtype: torch.dtype = torch.int64) -> Tensor:
    generator = torch.Generator().manual_seed(rows)
    return torch.randint(rows, shape, generator=generator).to(dtype)


def _samples(dtype: torch.dtype) -> Iterator[Sample]:
    for rows, dim in ((1, 1), (32, 64), (33, 65), (50, 7), (200, 130)):
        packed = dense.pack(randn(rows, dim, dtype=dtype, seed=71))
        every = torch.arange(rows).flip(0)
        yield Sample((packed, every, rows, dim, dtype), id=f"{rows}x{dim}")
    more = (rows, dim, dtype)
    yield Sample((packed, _ids(2, 3, 5, rows=rows, dtype=torch.int32), *more), id="int32-3d")
    yield Sample((packed, _ids(9, 14, rows=rows)[::2, ::3], *more), id="strided_ids")
    yield Sample((packed, torch.full((9,), 3).expand(2, 9), *more), id="one_id_often")
    yield Sample((packed, torch.tensor(rows - 1), *more), id="0d")
    yield Sample((packed, _ids(3, 0, rows=rows), *more), id="no_ids")
    special = randn(3, 5, dtype=dtype, seed=63)
    special[0, 0], special[1, 1], special[2, 2] = float("nan"), float("inf"), -0.0
    args = (dense.pack(special), torch.tensor([2, 0, 1]), 3, 5, dtype)
    yield Sample(args, id="special_values")


def _bench() -> Iterator[BenchCase]:
    for tokens, rows, dim in ((1, 16384, 2048), (1024, 16384, 2048), (64, 2000, 512)):
        yield BenchCase(
            f"{tokens}of{rows}x{dim}",
            lambda dtype, t=tokens, n=rows, k=dim: (
                torch.ops.ipex.pack_linear_weight(randn(n, k, dtype=dtype)),
                _ids(t, rows=n),
                n,
                k,
                dtype,
            ),
            lambda dtype, n=tokens * dim: 2 * n * dtype.itemsize,
        )


def _stock_args(
    packed: Tensor, ids: Tensor, num_embeddings: int, embedding_dim: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    return ids, dense.unpack(packed, num_embeddings, embedding_dim, dtype)


register(
    OpSpec(
        name=_OP,
        schema=(
            "(Tensor packed, Tensor ids, int num_embeddings, int embedding_dim, ScalarType dtype)"
            " -> Tensor"
        ),
        reference=_embedding,
        check=_check,
        fake=_fake,
        samples=_samples,
        stock=torch.nn.functional.embedding,
        stock_args=_stock_args,
        backward=None,
        lift=False,
        bench=_bench,
        summary="Rows of a weight that is packed for `linear`",
    )
)

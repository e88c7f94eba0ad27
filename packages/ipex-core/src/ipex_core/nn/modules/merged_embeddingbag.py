# SPDX-License-Identifier: Apache-2.0
"""IPEX's module for embedding tables, ``ipex.nn.modules.merged_embeddingbag``, with its functions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ipex_core.nn.embedding import (
    AdaGradArgs,
    DistMergeEmbeddingBagWithAdaGrad,
    EmbeddingSpec,
    MergedEmbeddingBag,
    MergedEmbeddingBagWithAdaGrad,
    MergedEmbeddingBagWithCat,
    MergedEmbeddingBagWithSGD,
    PoolingMode,
    SGDArgs,
)

__all__ = [
    "AdaGradArgs",
    "DistMergeEmbeddingBagWithAdaGrad",
    "EmbeddingSpec",
    "MergedEmbeddingBag",
    "MergedEmbeddingBagWithAdaGrad",
    "MergedEmbeddingBagWithCat",
    "MergedEmbeddingBagWithSGD",
    "PoolingMode",
    "SGDArgs",
    "merged_embeddingbag",
    "merged_embeddingbag_adagrad",
    "merged_embeddingbag_sgd",
    "merged_embeddingbag_with_cat",
]


def _call(
    kind: type[MergedEmbeddingBag],
    weights: Sequence[Tensor],
    indices: Sequence[Tensor],
    offsets: Sequence[Tensor],
    pooling_mode: int,
    include_last_offset: bool,
    **args: Any,
) -> tuple[Tensor, ...]:
    mode = PoolingMode(pooling_mode).name.lower()
    owner = kind(
        [
            EmbeddingSpec(
                w.shape[0], w.shape[1], mode, w.dtype, w.detach(), False, include_last_offset
            )
            for w in weights
        ]
    )
    for name, value in args.items():
        setattr(owner, name, value)
    return owner._bags_of(weights, owner._lookups(indices, offsets, None))


def merged_embeddingbag(
    weights: Sequence[Tensor],
    indices: Sequence[Tensor],
    offsets: Sequence[Tensor],
    pooling_mode: int,
    include_last_offset: bool,
) -> tuple[Tensor, ...]:
    """Return the bags of each table, with dense gradients of the tables; see `MergedEmbeddingBag`.

    Args:
        weights: T tables ``[rows, D]``.
        indices: T vectors of rows, int32 or int64.
        offsets: T vectors: where each of the B bags begins.
        pooling_mode: A `PoolingMode`.
        include_last_offset: Whether the last offset is the end of the last bag.

    Returns:
        T tensors ``[B, D]``.

    Raises:
        RuntimeError: An argument does not fit, an index is not in its table, or offsets decrease.
    """
    return _call(_OfCaller, weights, indices, offsets, pooling_mode, include_last_offset)


def merged_embeddingbag_sgd(
    weights: Sequence[Tensor],
    indices: Sequence[Tensor],
    offsets: Sequence[Tensor],
    pooling_mode: int,
    include_last_offset: bool,
    sgd_args: SGDArgs,
) -> tuple[Tensor, ...]:
    """`merged_embeddingbag` whose backward pass takes a step of SGD; see `MergedEmbeddingBagWithSGD`."""
    lookups = (weights, indices, offsets, pooling_mode, include_last_offset)
    return _call(_WithSGD, *lookups, sgd_args=sgd_args)


def merged_embeddingbag_adagrad(
    weights: Sequence[Tensor],
    indices: Sequence[Tensor],
    offsets: Sequence[Tensor],
    pooling_mode: int,
    include_last_offset: bool,
    adagrad_args: AdaGradArgs,
) -> tuple[Tensor, ...]:
    """`merged_embeddingbag` whose backward pass takes a step of Adagrad; see `MergedEmbeddingBagWithAdaGrad`."""
    lookups = (weights, indices, offsets, pooling_mode, include_last_offset)
    return _call(_WithAdaGrad, *lookups, adagrad_args=adagrad_args)


class _OfCaller(MergedEmbeddingBag):
    """Tables and state belong to the caller, and the module is made for one call."""

    def _place(self) -> None:
        pass

    def init_adagrad_args(self, *_: Any, **__: Any) -> None:
        pass


class _WithSGD(_OfCaller, MergedEmbeddingBagWithSGD):
    pass


class _WithAdaGrad(_OfCaller, MergedEmbeddingBagWithAdaGrad):
    pass


def merged_embeddingbag_with_cat(
    weights: Sequence[Tensor],
    indices: Sequence[Tensor],
    offsets: Sequence[Tensor],
    dense_feature: Tensor,
) -> Tensor:
    """Return dense features and the sums of all tables side by side, ``[B, (T + 1) * D]``, without gradients."""
    return torch.ops.ipex.merged_embeddingbag_cat_forward(
        list(weights), list(indices), list(offsets), dense_feature, "sum", False
    )

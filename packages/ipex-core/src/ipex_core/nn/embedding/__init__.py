# SPDX-License-Identifier: Apache-2.0
"""Embedding tables of a recommendation model in one module, updated in the backward pass."""

from __future__ import annotations

from ipex_core.nn.embedding.distributed import DistMergeEmbeddingBagWithAdaGrad
from ipex_core.nn.embedding.fused_update import (
    AdaGradArgs,
    MergedEmbeddingBagWithAdaGrad,
    MergedEmbeddingBagWithSGD,
    SGDArgs,
)
from ipex_core.nn.embedding.tables import (
    EmbeddingSpec,
    MergedEmbeddingBag,
    MergedEmbeddingBagWithCat,
    PoolingMode,
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
]

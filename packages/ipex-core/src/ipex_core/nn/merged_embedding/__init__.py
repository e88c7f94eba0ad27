# SPDX-License-Identifier: Apache-2.0
"""Embedding tables of a recommendation model in one module, updated in the backward pass."""

from __future__ import annotations

from ipex_core.nn.merged_embedding._distributed import DistMergeEmbeddingBagWithAdaGrad
from ipex_core.nn.merged_embedding._inference import MergedEmbeddingBagWithCat
from ipex_core.nn.merged_embedding._steps import (
    AdaGradArgs,
    MergedEmbeddingBagWithAdaGrad,
    MergedEmbeddingBagWithSGD,
    SGDArgs,
)
from ipex_core.nn.merged_embedding._tables import EmbeddingSpec, MergedEmbeddingBag, PoolingMode

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

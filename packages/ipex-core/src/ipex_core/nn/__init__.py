# SPDX-License-Identifier: Apache-2.0
"""Layers that `ipex.optimize` puts in place of stock ones.

They are subclasses of the stock layers and are made by changing the class of an existing layer, never constructed.
`FrozenBatchNorm2d` is an exception: a layer of its own.
"""

from __future__ import annotations

from typing import Any

from ipex_core.module_swap.base import OptimizedModule
from ipex_core.nn import modules
from ipex_core.nn.conv import (
    OptimizedConv1d,
    OptimizedConv2d,
    OptimizedConv3d,
    OptimizedConvTranspose1d,
    OptimizedConvTranspose2d,
    OptimizedConvTranspose3d,
)
from ipex_core.nn.layers import (
    FoldedBatchNorm1d,
    FoldedBatchNorm2d,
    FoldedBatchNorm3d,
    FrozenBatchNorm2d,
    OptimizedEmbeddingBag,
    OptimizedGELU,
    OptimizedGroupNorm,
    OptimizedLayerNorm,
    OptimizedMultiheadAttention,
    OptimizedPReLU,
    OptimizedRMSNorm,
    OptimizedSoftmax,
    OptimizedTransformerEncoder,
    OptimizedTransformerEncoderLayer,
)
from ipex_core.nn.linear import FusableLinear, OptimizedLinear
from ipex_core.nn.recurrent import OptimizedGRU, OptimizedLSTM, OptimizedRNN
from ipex_core.packing.parameter import PackedWeight

__all__ = [
    "FoldedBatchNorm1d",
    "FoldedBatchNorm2d",
    "FoldedBatchNorm3d",
    "FrozenBatchNorm2d",
    "FusableLinear",
    "OptimizedConv1d",
    "OptimizedConv2d",
    "OptimizedConv3d",
    "OptimizedConvTranspose1d",
    "OptimizedConvTranspose2d",
    "OptimizedConvTranspose3d",
    "OptimizedEmbeddingBag",
    "OptimizedGELU",
    "OptimizedGRU",
    "OptimizedGroupNorm",
    "OptimizedLSTM",
    "OptimizedLayerNorm",
    "OptimizedLinear",
    "OptimizedModule",
    "OptimizedMultiheadAttention",
    "OptimizedPReLU",
    "OptimizedRMSNorm",
    "OptimizedRNN",
    "OptimizedSoftmax",
    "OptimizedTransformerEncoder",
    "OptimizedTransformerEncoderLayer",
    "PackedWeight",
    "modules",
]


def __getattr__(name: str) -> Any:
    if name in modules._OWN:  # IPEX has its layers here too
        return getattr(modules, name)
    raise AttributeError(f"module 'ipex.nn' has no attribute {name!r}")

# SPDX-License-Identifier: Apache-2.0
"""Fused modules for those who write their own model code.

Names, arguments and the layout of caches are those of IPEX. A module works on any device; the same class serves all.
"""

from __future__ import annotations

from ipex_llm.modules import utils
from ipex_llm.modules._attention import (
    IndirectAccessKVCacheAttention,
    PagedAttention,
    VarlenAttention,
)
from ipex_llm.modules._linear import (
    IPEXLinear2Fusion,
    IPEXLinearFusion,
    Linear2SiluMul,
    LinearAdd,
    LinearAddAdd,
    LinearGelu,
    LinearMul,
    LinearNewGelu,
    LinearRelu,
    LinearSilu,
    LinearSiluMul,
)
from ipex_llm.modules._mamba import MambaMixer
from ipex_llm.modules._moe import GatedMLPMOE
from ipex_llm.modules._norm import FastLayerNorm, RMSNorm
from ipex_llm.modules._rotary import RotaryEmbedding

__all__ = [
    "FastLayerNorm",
    "GatedMLPMOE",
    "IPEXLinear2Fusion",
    "IPEXLinearFusion",
    "IndirectAccessKVCacheAttention",
    "Linear2SiluMul",
    "LinearAdd",
    "LinearAddAdd",
    "LinearGelu",
    "LinearMul",
    "LinearNewGelu",
    "LinearRelu",
    "LinearSilu",
    "LinearSiluMul",
    "MambaMixer",
    "PagedAttention",
    "RMSNorm",
    "RotaryEmbedding",
    "VarlenAttention",
    "utils",
]

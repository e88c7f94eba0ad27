# SPDX-License-Identifier: Apache-2.0
"""Fused modules for those who write their own model code.

Names, arguments and the layout of caches are as in IPEX. A module works on any device; the same class serves all.
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
from ipex_llm.modules._moe import GatedMLPMOE
from ipex_llm.modules._norm import FastLayerNorm, MambaMixer, RMSNorm, RotaryEmbedding

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

utils.CLASSES.update(
    {
        utils.IPEXCustomOpType.LINEAR_SILU: LinearSilu,
        utils.IPEXCustomOpType.LINEAR_SILU_MUL: LinearSiluMul,
        utils.IPEXCustomOpType.LINEAR2_SILU_MUL: Linear2SiluMul,
        utils.IPEXCustomOpType.LINEAR_RELU: LinearRelu,
        utils.IPEXCustomOpType.LINEAR_NEW_GELU: LinearNewGelu,
        utils.IPEXCustomOpType.LINEAR_GELU: LinearGelu,
        utils.IPEXCustomOpType.LINEAR_ADD: LinearAdd,
        utils.IPEXCustomOpType.LINEAR_ADD_ADD: LinearAddAdd,
        utils.IPEXCustomOpType.LINEAR_MUL: LinearMul,
        utils.IPEXCustomOpType.ROPE: RotaryEmbedding,
        utils.IPEXCustomOpType.RMS_NORM: RMSNorm,
        utils.IPEXCustomOpType.PAGED_ATTENTION: PagedAttention,
        utils.IPEXCustomOpType.FAST_LAYERNORM: FastLayerNorm,
        utils.IPEXCustomOpType.VARLEN_ATTENTION: VarlenAttention,
        utils.IPEXCustomOpType.INDIRECTACCESS_KVCACHE_ATTENTION: IndirectAccessKVCacheAttention,
        utils.IPEXCustomOpType.LINEAR_MOE: GatedMLPMOE,
        utils.IPEXCustomOpType.MAMBA_MIXER: MambaMixer,
    }
)

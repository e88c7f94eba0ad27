# SPDX-License-Identifier: Apache-2.0
"""Fused functions for those who write their own model code: rotary embeddings, norms, activations, attention, LoRA.

The names, the order of the arguments and what is written in place are as in IPEX, for all devices alike. Tensors on
devices without kernels are computed by the reference of the op. Functions that write to their arguments have no
derivative: call them under ``torch.no_grad()`` or with tensors that require no gradient.

Wrong arguments raise `OpArgumentError` (both a ``ValueError`` and a ``RuntimeError``) where Python checks them and
``RuntimeError`` with the same text where a kernel does.
"""

from __future__ import annotations

from ipex_core.nn.ipex_api.lora import sgmv_expand, sgmv_expand_slice, sgmv_shrink
from ipex_llm.functional._attention import (
    indirect_access_kv_cache_attention,
    rotary_embedding,
    rotary_embedding_batched,
    varlen_attention,
    varlen_fwd,
)
from ipex_llm.functional._rows import (
    add_layer_norm,
    add_rms_norm,
    bgmv_expand,
    bgmv_expand_slice,
    bgmv_shrink,
    fast_layer_norm,
    gelu_and_mul,
    gelu_mul,
    gelu_quick,
    rms_norm,
    silu_and_mul,
    silu_mul,
)

__all__ = [
    "add_layer_norm",
    "add_rms_norm",
    "bgmv_expand",
    "bgmv_expand_slice",
    "bgmv_shrink",
    "fast_layer_norm",
    "gelu_and_mul",
    "gelu_mul",
    "gelu_quick",
    "indirect_access_kv_cache_attention",
    "rms_norm",
    "rotary_embedding",
    "rotary_embedding_batched",
    "sgmv_expand",
    "sgmv_expand_slice",
    "sgmv_shrink",
    "silu_and_mul",
    "silu_mul",
    "varlen_attention",
    "varlen_fwd",
]

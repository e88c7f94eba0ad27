# SPDX-License-Identifier: Apache-2.0
"""What optimum-intel calls."""

from __future__ import annotations

from typing import Any

import torch
from clients import Paged, needs_llm

import intel_extension_for_pytorch as ipex


@needs_llm
def test_optimum_intel() -> None:
    from intel_extension_for_pytorch.llm.functional import varlen_attention
    from intel_extension_for_pytorch.llm.modules import (
        Linear2SiluMul,
        LinearAdd,
        LinearAddAdd,
        LinearGelu,
        LinearNewGelu,
        PagedAttention,
        RMSNorm,
        RotaryEmbedding,
    )

    device_type = "xpu" if ipex._C._has_xpu() else "cpu"
    PagedAttention.runtime_ops.device_type = device_type
    RMSNorm.runtime_ops.device_type = device_type
    RotaryEmbedding.runtime_ops.device_type = device_type
    x, y, z = (torch.randn(3, 16) for _ in range(3))
    first, second = torch.nn.Linear(16, 16), torch.nn.Linear(16, 16)
    functional = torch.nn.functional
    with torch.no_grad():
        torch.testing.assert_close(
            Linear2SiluMul(first, second)(x), functional.silu(first(x)) * second(x)
        )
        torch.testing.assert_close(LinearAdd(first)(x, y), first(x) + y)
        torch.testing.assert_close(LinearAddAdd(first)(x, y, z), first(x) + y + z)
        torch.testing.assert_close(LinearGelu(first)(x), functional.gelu(first(x)))
        expected = functional.gelu(first(x), approximate="tanh")
        torch.testing.assert_close(LinearNewGelu(first)(x), expected)
    weight = torch.rand(16)
    normed = RMSNorm.apply_function(x, weight, 1e-6)
    torch.testing.assert_close(normed, functional.rms_norm(x, (16,), weight, 1e-6))
    query, key = torch.randn(8, 4, 8), torch.randn(8, 2, 8)
    angles = torch.rand(8, 1, 8)
    RotaryEmbedding.apply_function(query, key, angles.sin(), angles.cos(), 8, True)
    p = Paged()
    PagedAttention.reshape_and_cache(p.key, p.value, p.key_cache, p.value_cache, p.slots)
    largest: Any = max(p.context)  # a tensor, as there
    p.check(
        lambda out: varlen_attention(
            *p.new(out), largest, largest, 0.0, p.scale, False, True, False, None
        )
    )
    p.check_step(
        lambda out: PagedAttention.single_query_cached_kv_attention(
            *p.step(out, p.head_mapping), p.block, largest, None
        )
    )

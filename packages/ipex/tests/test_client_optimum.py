# SPDX-License-Identifier: Apache-2.0
"""What optimum-intel calls."""

from __future__ import annotations

from typing import Any

import torch
import torch._dynamo.testing
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


@needs_llm
def test_one_buffer_of_slots_serves_all_steps() -> None:
    from intel_extension_for_pytorch.llm.modules import PagedAttention

    p, alias, flash = Paged(), Paged(), Paged()
    # What is behind the tokens would overwrite row 3 of block 0.
    slots = torch.cat([p.slots, torch.full((5,), 3)])
    PagedAttention.reshape_and_cache(p.key, p.value, p.key_cache, p.value_cache, p.slots)
    PagedAttention.reshape_and_cache_flash(
        flash.key, flash.value, flash.key_cache, flash.value_cache, slots
    )
    torch.ops.torch_ipex.reshape_and_cache(
        alias.key, alias.value, alias.key_cache, alias.value_cache, slots, "auto", 1.0, 1.0
    )
    for other in (alias, flash):
        assert torch.equal(other.key_cache, p.key_cache)
        assert torch.equal(other.value_cache, p.value_cache)


@needs_llm
def test_a_compiled_step_serves_all_lengths() -> None:
    from intel_extension_for_pytorch.llm.modules import PagedAttention

    p = Paged()
    PagedAttention.reshape_and_cache(p.key, p.value, p.key_cache, p.value_cache, p.slots)

    def step(out: torch.Tensor, longest: int) -> torch.Tensor:
        PagedAttention.single_query_cached_kv_attention(
            *p.step(out, p.head_mapping), p.block, longest, None
        )
        return out

    def prefill(out: torch.Tensor, longest: int) -> torch.Tensor:
        PagedAttention.flash_attn_varlen_func(
            *p.cached(out), longest, longest, p.scale, True, p.tables, None
        )
        return out

    for call, expected in ((step, p.expected()[p.last]), (prefill, p.expected())):
        counter = torch._dynamo.testing.CompileCounter()
        compiled = torch.compile(call, fullgraph=True, dynamic=True, backend=counter)
        for longest in (5, 6, 7, 9):
            torch.testing.assert_close(compiled(torch.empty_like(expected), longest), expected)
        assert counter.frame_count == 1

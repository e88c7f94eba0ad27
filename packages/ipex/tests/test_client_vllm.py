# SPDX-License-Identifier: Apache-2.0
"""What vLLM calls, on CPUs and on XPUs."""

from __future__ import annotations

import pytest
import torch
from clients import Paged, experts, needs_llm

import intel_extension_for_pytorch as ipex


@needs_llm
def test_vllm_cpu() -> None:
    import intel_extension_for_pytorch.llm.modules as ipex_modules

    assert ipex.__version__.endswith("cpu")
    p = Paged()
    ipex_modules.PagedAttention.reshape_and_cache(
        p.key, p.value, p.key_cache, p.value_cache, p.slots.flatten().int()
    )
    p.check(
        lambda out: ipex.llm.functional.varlen_attention(
            *p.new(out), 5, 5, 0.0, p.scale, False, True, False, None
        )
    )
    paged = ipex_modules.PagedAttention
    p.check(
        lambda out: paged.flash_attn_varlen_func(
            *p.cached(out), 5, 5, p.scale, True, p.tables, None
        )
    )
    p.check_step(
        lambda out: paged.single_query_cached_kv_attention(
            *p.step(out, p.head_mapping), p.block, 5, None
        )
    )


@needs_llm
def test_vllm_experts() -> None:
    w13, w2, x, logits = experts()
    fused = ipex.llm.modules.GatedMLPMOE(w13, w2, use_prepack=False)
    expected = fused(x, False, 2, logits, True, None, None, None, "softmax", None)
    prepacked = ipex.llm.modules.GatedMLPMOE(w13, w2, use_prepack=True)
    result = prepacked(x, False, 2, logits, True)
    torch.testing.assert_close(result, expected, rtol=1e-3, atol=1e-4)
    bias = torch.linspace(-1, 1, logits.shape[1])
    chosen = prepacked(x, False, 2, logits, True, None, None, None, "sigmoid", bias, "gelu")
    on_xpu = prepacked(x, False, 2, logits, True, None, None, None, "sigmoid", "gelu", bias)
    assert torch.equal(chosen, on_xpu)
    dtype = torch.float8_e4m3fn
    scales = [w.abs().amax((1, 2)) / torch.finfo(dtype).max for w in (w13, w2)]
    eight = [(w / s.view(-1, 1, 1)).to(dtype) for w, s in zip((w13, w2), scales, strict=True)]
    fp8 = ipex.llm.modules.GatedMLPMOE(
        *eight,
        w1_scale_inv=scales[0],
        w2_scale_inv=scales[1],
        a1_scale_inv=None,
        a2_scale_inv=None,
        use_prepack=True,
        experts_start_id=0,
    )
    result = fp8(
        x.bfloat16(),
        use_grouped_topk=False,
        top_k=2,
        router_logits=logits,
        renormalize=True,
        topk_group=None,
        num_expert_group=None,
        custom_routing_function=None,
        scoring_func="softmax",
        e_score_correction_bias=None,
    )
    torch.testing.assert_close(result.float(), expected, rtol=0.1, atol=0.1)
    half = fp8(x.half(), False, 2, logits, True, None, None, custom_routing_function=None)
    assert half.dtype == torch.float16
    torch.testing.assert_close(half.float(), expected, rtol=0.1, atol=0.1)
    with pytest.raises(ValueError, match="scales of W13 must have 4 numbers"):
        ipex.llm.modules.GatedMLPMOE(*eight, w1_scale_inv=torch.ones(3))


@needs_llm
def test_vllm_xpu() -> None:
    f = ipex.llm.functional
    p = Paged()
    x, weight = torch.randn(3, 32), torch.rand(16)
    out = torch.empty(3, 16)
    f.silu_and_mul(x, out)
    torch.testing.assert_close(out, torch.nn.functional.silu(x[:, :16]) * x[:, 16:])
    f.gelu_and_mul(x, out)
    torch.testing.assert_close(out, torch.nn.functional.gelu(x[:, :16]) * x[:, 16:])
    f.gelu_and_mul(x, out, approximate="tanh")
    same = torch.empty_like(x)
    f.gelu_quick(x, same)
    torch.testing.assert_close(same, x * torch.sigmoid(1.702 * x))
    norm = f.rms_norm(x[:, :16], weight, 1e-6)
    torch.testing.assert_close(norm, torch.nn.functional.rms_norm(x[:, :16], (16,), weight, 1e-6))
    residual, hidden = torch.randn(3, 16), torch.randn(3, 16)
    total = residual + hidden
    norm = f.add_rms_norm(residual, hidden, weight, None, 1e-6, True)
    torch.testing.assert_close(residual, total)
    torch.testing.assert_close(norm, torch.nn.functional.rms_norm(total, (16,), weight, 1e-6))
    tail = (0.0, p.scale, False, True, False, None, -1, -1, -1.0)
    p.check(lambda out: f.varlen_attention(*p.new(out), None, 5, 5, *tail))
    paged = ipex.llm.modules.PagedAttention
    paged.reshape_and_cache_flash(
        p.key, p.value, p.key_cache, p.value_cache, p.slots, "auto", 1.0, 1.0
    )
    groups = p.heads // p.kv_heads
    p.check_step(
        lambda out: paged.single_query_kv_attention(*p.step(out, groups), p.block, 5, None)
    )
    p.check_step(
        lambda out: paged.single_query_cached_kv_attention(
            *p.step(out, p.head_mapping), p.block, 5, None, "auto", -1, 1.0, 1.0, -1.0
        )
    )
    with pytest.raises(ValueError, match="num_queries_per_kv must be heads / kv_heads = 4 / 2"):
        paged.single_query_kv_attention(*p.step(torch.empty(2, 4, 8), 3), p.block, 5, None)
    paged.copy_blocks([p.key_cache], [p.value_cache], torch.tensor([[2, 1]]))
    assert torch.equal(p.key_cache[1], p.key_cache[2])
    other = torch.zeros_like(p.key_cache)
    paged.swap_blocks(p.key_cache, other, torch.tensor([[2, 3]]))
    assert torch.equal(other[3], p.key_cache[2])
    quantized = torch.empty(3, 32, dtype=torch.float8_e4m3fn)
    scale = torch.zeros(1)
    torch.ops.torch_ipex.dynamic_scaled_fp8_quant(quantized, x, scale)
    torch.testing.assert_close(quantized.float() * scale, x, rtol=0.1, atol=0.1)
    w = torch.randn(8, 32).to(torch.float8_e4m3fn)
    y = torch.ops.torch_ipex.fp8_gemm_w8a16(x, w, True, torch.ones(1), None)
    torch.testing.assert_close(y, x @ w.float().T, rtol=1e-3, atol=1e-3)
    assert ipex.llm.modules.MambaMixer.selective_scan_fn is not None

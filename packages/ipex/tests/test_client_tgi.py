# SPDX-License-Identifier: Apache-2.0
"""What text-generation-inference calls."""

from __future__ import annotations

import torch
from clients import Paged, experts, needs_llm

import intel_extension_for_pytorch as ipex


@needs_llm
def test_tgi() -> None:
    p = Paged()
    f, paged = ipex.llm.functional, ipex.llm.modules.PagedAttention
    paged.reshape_and_cache_flash(p.key, p.value, p.key_cache, p.value_cache, p.slots)
    scales = {"k_scale": 1.0, "v_scale": 1.0, "softcap": -1.0}
    p.check(
        lambda out: paged.flash_attn_varlen_func(
            *(*p.cached(out), 5, 5, p.scale, True, p.tables, None),
            window_size_left=-1,
            window_size_right=-1,
            kv_cache_dtype="auto",
            **scales,
        )
    )
    p.check(
        lambda out: f.varlen_attention(
            *(*p.new(out), None, 5, 5, 0, p.scale),
            zero_tensors=False,
            is_causal=True,
            return_softmax=False,
            gen_=None,
        )
    )
    p.check_step(
        lambda out: paged.single_query_cached_kv_attention(
            *p.step(out, p.head_mapping), p.block, 5, None, window_size=-1, **scales
        )
    )
    query, key = torch.randn(8, 4, 8), torch.randn(8, 2, 8)
    angles = torch.rand(8, 1, 4)
    norms = query.norm(dim=-1)
    f.rotary_embedding(query, key, angles.sin(), angles.cos(), 8, True)
    torch.testing.assert_close(query.norm(dim=-1), norms)
    x, residual, weight = torch.randn(3, 16), torch.randn(3, 16), torch.rand(16)
    normed = f.add_layer_norm(residual, x, weight, None, 1e-5, residual is not None)
    expected = torch.nn.functional.layer_norm(residual, (16,), weight, None, 1e-5)
    torch.testing.assert_close(normed, expected)
    hidden, rank, ids = torch.randn(3, 16), torch.zeros(3, 4), torch.tensor([0, 1, 0])
    a, b = torch.randn(2, 1, 4, 16), torch.randn(2, 1, 16, 4)
    f.bgmv_shrink(hidden, a, rank, ids, 1.0)
    torch.testing.assert_close(rank[1], a[1, 0] @ hidden[1])
    result = torch.zeros(3, 16)
    f.bgmv_expand(rank, b, result, ids, add_inputs=True)
    torch.testing.assert_close(result[0], b[0, 0] @ rank[0])
    w13, w2, x, logits = experts()
    y = ipex.llm.modules.GatedMLPMOE(W13=w13, W2=w2, use_prepack=True)(
        hidden_states=x,
        router_logits=logits,
        top_k=2,
        renormalize=True,
        use_grouped_topk=False,
        num_expert_group=None,
        topk_group=None,
        scoring_func="softmax",
        e_score_correction_bias=None,
    )
    assert y.shape == x.shape
    assert callable(ipex.distributed.all_gather_into_tensor)

# SPDX-License-Identifier: Apache-2.0
"""A plan made by hand, for tests of what runs plans."""

from __future__ import annotations

from ipex_llm.arch import (
    AttentionPlan,
    DecoderPlan,
    LayerPlan,
    LinearPlan,
    MlpPlan,
    NormPlan,
    RopePlan,
)

__all__ = ["llama_plan"]


def llama_plan(model):
    """Return the plan of a LlamaForCausalLM."""
    config, decoder = model.config, model.model
    size = decoder.layers[0].self_attn.head_dim
    rope = RopePlan("default", size, 10000.0, None, True, config.max_position_embeddings)
    layers = []
    for layer in decoder.layers:
        a, m = layer.self_attn, layer.mlp
        attention = AttentionPlan(
            LinearPlan((a.q_proj, a.k_proj, a.v_proj)),
            LinearPlan((a.o_proj,)),
            config.num_attention_heads,
            config.num_key_value_heads,
            size,
            size**-0.5,
            rope,
        )
        gate, up, down = (LinearPlan((p,)) for p in (m.gate_proj, m.up_proj, m.down_proj))
        eps = config.rms_norm_eps
        layers.append(
            LayerPlan(
                layer,
                attention,
                MlpPlan(gate, up, down, "silu"),
                NormPlan("rms", layer.input_layernorm, eps),
                NormPlan("rms", layer.post_attention_layernorm, eps),
            )
        )
    return DecoderPlan(
        decoder,
        decoder.embed_tokens,
        tuple(layers),
        NormPlan("rms", decoder.norm, config.rms_norm_eps),
        LinearPlan((model.lm_head,)),
        config.hidden_size,
        config.vocab_size,
        config.max_position_embeddings,
    )

# SPDX-License-Identifier: Apache-2.0
"""Tiny seeded models with recurrent layers, made from the config classes of transformers."""

from __future__ import annotations

import copy
import functools
from typing import Any

import torch
import transformers
from families import OLD, VOCAB, randomize
from torch import nn

BASE: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "vocab_size": VOCAB,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
_DELTA = {
    "head_dim": 32,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
}
_MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16, "mamba_expand": 2}
_EXPERTS = {"num_experts_per_tok": 2, "num_local_experts": 4, "shared_intermediate_size": 64}
_MAMBA_2 = {"num_heads": 8, "head_dim": 16, "state_size": 16, "expand": 2}
_NEMOTRON = {"mamba_num_heads": 8, "mamba_head_dim": 16, "ssm_state_size": 16, "expand": 2}
_MAMBA_1 = {"state_size": 16, "time_step_rank": 8, "use_conv_bias": True}
_ZAMBA = {
    "num_key_value_heads": 4,
    "mamba_d_state": 16,
    "n_mamba_heads": 8,
    "mamba_expand": 2,
    "adapter_rank": 8,
}
_LATENT = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "layer_types": ["linear_attention", "full_attention", *["linear_attention"] * 2],
    "mlp_layer_types": ["dense", *["sparse"] * 3],
}
_KINDS = {"layers_block_type": ["mamba", "attention", "mamba", "mamba"]}

#: Name -> class and what its configuration has besides.
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_next": (
        "Qwen3Next",
        {
            **_DELTA,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 32,
        },
    ),
    "qwen3_5": ("Qwen3_5", _DELTA),
    # Several streams, n-grams that are brought into them, as many tokens as the indexer chooses.
    "qwen4_exp": (
        "Qwen4Exp",
        {
            **_DELTA,
            "eos_token_id": 2,
            "layer_types": ["linear_attention", "full_attention", *["linear_attention"] * 2],
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 32,
            "hc_count": 3,
            "hc_lowrank": 24,
            "ple_layer_ids": [1, 3],
            "heads_per_ngram": 2,
            "ngram_vocab_size_base": 50,
            "indexer_n_heads": 2,
            "indexer_kv_heads": 1,
            "indexer_head_dim": 32,
            "indexer_budget": 64,
            "indexer_compress_ratio": 4,
        },
    ),
    # Strengths of the delta rule up to two, and attention without rotation.
    "olmo_hybrid": (
        "OlmoHybrid",
        {
            "layer_types": ["linear_attention", "full_attention", *["linear_attention"] * 2],
            "linear_num_value_heads": 4,
            "linear_num_key_heads": 4,
            "linear_key_head_dim": 12,
            "linear_value_head_dim": 24,
        },
    ),
    # A step for each key, gates and steps of low rank, latent attention without rotation.
    "kimi_linear": (
        "KimiLinear",
        {**_LATENT, "linear_head_dim": 16, "linear_num_heads": 4, "n_group": 1},
    ),
    # Steps with a bound, latent attention with a gate for each head.
    "bailing_hybrid": (
        "BailingHybrid",
        {**_LATENT, "head_dim": 16, "n_group": 2, "topk_group": 1, "q_lora_rank": 24},
    ),
    # A gate for each head, windows, norms behind the blocks.
    "lfm3": (
        "Lfm3",
        {
            "layer_types": ["conv", "sliding_attention", "full_attention", "conv"],
            "head_dim": 16,
            "sliding_window": 8,
        },
    ),
    # Heads that forget at fixed rates, residuals from norms with factors.
    "minimax": (
        "MiniMax",
        {
            "head_dim": 16,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "layer_types": ["full_attention", *["linear_attention"] * 3],
            "linear_attn_alpha_factor": 2.5,
            "full_attn_alpha_factor": 3.0,
            "mlp_alpha_factor": 3.5,
        },
    ),
    # As the models are: transformers counts the tokens of the first layer, which has none.
    "minimax_uncounted": (
        "MiniMax",
        {
            "head_dim": 16,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "layer_types": ["linear_attention", "full_attention", *["linear_attention"] * 2],
        },
    ),
    # A recurrence of single channels, windows; the stock model keeps the states in its modules.
    "recurrent_gemma": (
        "RecurrentGemma",
        {
            "lru_width": 64,
            "attention_window_size": 8,
            "block_types": ["recurrent", "attention", "recurrent", "recurrent"],
        },
    ),
    # Heads with gates for what they forget and add. Sizes of keys are multiples of 64 in its caches.
    "xlstm": ("xLSTM", {"hidden_size": 128, "num_heads": 4}),
    "lfm2": ("Lfm2", {"layer_types": ["conv", "full_attention", "conv", "conv"]}),
    "falcon_h1": (
        "FalconH1",
        {
            **_MAMBA,
            "num_hidden_layers": 2,
            "mamba_n_groups": 2,
            "mamba_d_ssm": 128,
            "mamba_rms_norm": False,
            "ssm_multipliers": [0.5, 0.7, 0.9, 1.2, 0.8],
            "ssm_in_multiplier": 1.3,
            "ssm_out_multiplier": 0.6,
            "attention_in_multiplier": 0.9,
            "attention_out_multiplier": 0.8,
            "key_multiplier": 0.7,
            "mlp_multipliers": [0.7, 0.6],
            "embedding_multiplier": 2.0,
            "lm_head_multiplier": 0.3,
        },
    ),
    "lfm2_moe": (
        "Lfm2Moe",
        {
            "layer_types": ["conv", "full_attention", "conv", "conv"],
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "num_dense_layers": 1,
        },
    ),
    "mamba2": ("Mamba2", {**_MAMBA_2, "n_groups": 2}),
    "mamba": ("Mamba", _MAMBA_1),
    "falcon_mamba": ("FalconMamba", _MAMBA_1),
    "jamba": (
        "Jamba",
        {
            "mamba_d_state": 16,
            "mamba_dt_rank": 8,
            "attn_layer_period": 4,
            "attn_layer_offset": 1,
            "expert_layer_period": 2,
            "expert_layer_offset": 1,
            "num_experts": 4,
            "num_experts_per_tok": 2,
        },
    ),
    "nemotron_h": (
        "NemotronH",
        {
            **_NEMOTRON,
            "n_groups": 2,
            "head_dim": 16,
            "layers_block_type": ["mamba", "attention", "mlp", "mamba"],
        },
    ),
    "nemotron_h_moe": (
        "NemotronH",
        {
            **_NEMOTRON,
            "n_groups": 2,
            "head_dim": 16,
            "layers_block_type": ["mamba", "attention", "moe", "moe"],
            "n_routed_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 48,
            "moe_shared_expert_intermediate_size": 40,
            "n_group": 2,
            "topk_group": 1,
            "routed_scaling_factor": 1.5,
        },
    ),
    "nemotron_h_latent": (
        "NemotronH",
        {
            **_NEMOTRON,
            "n_groups": 2,
            "head_dim": 16,
            "layers_block_type": ["mamba", "attention", "moe", "mamba"],
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 48,
            "moe_shared_expert_intermediate_size": 40,
            "moe_latent_size": 24,
        },
    ),
    "zamba2": (
        "Zamba2",
        {
            **_ZAMBA,
            "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"],
            "num_mem_blocks": 1,
            "use_mem_rope": True,
        },
    ),
    "zamba2_blocks": (
        "Zamba2",
        {
            **_ZAMBA,
            "num_hidden_layers": 5,
            "layers_block_type": ["mamba", "hybrid", "hybrid", "mamba", "hybrid"],
            "num_mem_blocks": 2,
            "mamba_ngroups": 2,
        },
    ),
    "bamba": ("Bamba", {**_MAMBA, "mamba_n_groups": 1, "attn_layer_indices": [1]}),
    "granite": ("GraniteMoeHybrid", {**_MAMBA, **_EXPERTS, **_KINDS, "mamba_n_groups": 1}),
    "granite_dense": (
        "GraniteMoeHybrid",
        {
            **_MAMBA,
            **_EXPERTS,
            **_KINDS,
            "mamba_n_groups": 2,
            "num_local_experts": 0,
            "num_experts_per_tok": 0,
            "residual_multiplier": 0.22,
            "embedding_multiplier": 3.0,
            "logits_scaling": 2.0,
        },
    ),
}

#: Those that this transformers has in a form that programs know.
NAMES = tuple(
    name
    for name, (kind, _) in CONFIGS.items()
    if not OLD and hasattr(transformers, kind + "Config")
)


@functools.cache
def _prototype(name: str) -> nn.Module:
    kind, more = CONFIGS[name]
    text = kind + ("TextConfig" if hasattr(transformers, kind + "TextConfig") else "Config")
    config = getattr(transformers, text)(**{**BASE, **more})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return randomize(getattr(transformers, kind + "ForCausalLM")(config))


def build(name: str) -> Any:
    """Return a new model: float32, in eval mode."""
    return copy.deepcopy(_prototype(name))

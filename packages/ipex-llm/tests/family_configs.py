# SPDX-License-Identifier: Apache-2.0
"""Options of the config classes of transformers that make a tiny model of each family; for families.py."""

from __future__ import annotations

from typing import Any

VOCAB = 96
#: Longest sequence of the tiny models, and a sliding window short enough to matter in a test.
POSITIONS = 256
WINDOW = 8

BASE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": POSITIONS,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": 0,
}
_GPT: dict[str, Any] = {
    "vocab_size": VOCAB,
    "n_embd": 64,
    "n_inner": 96,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": POSITIONS,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": 0,
}
_MHA = {"num_key_value_heads": 4}
FOUR_LAYERS = {"num_hidden_layers": 4}
_JAMBA = {
    **BASE,
    **FOUR_LAYERS,
    "attn_layer_period": 2,
    "attn_layer_offset": 1,
    "num_experts": 2,
    "mamba_d_state": 4,
}
_MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}

_INKLING2 = {
    **{k: v for k, v in BASE.items() if k != "intermediate_size"},
    **{**FOUR_LAYERS, "layer_types": ["hybrid_sliding", "hybrid"] * 2, "head_dim": 16},
    **{"swa_num_attention_heads": 4, "swa_num_key_value_heads": 2, "swa_head_dim": 16},
    **{"sliding_window_size": WINDOW, "d_rel": 4, "rel_extent": 12},
    **{"log_scaling_n_floor": 16, "n_layers_per_attn_res_block": 2},
    **{"qk_l2_clip_threshold": 3.0, "rel_l2_clip_threshold": 1.0},
    **{"mlp_gate_softcap": 1.0, "mlp_up_softcap": 1.5, "final_logit_softcapping": 5.0},
    **{"moe_intermediate_size": 32, "n_routed_experts": 4, "num_experts_per_tok": 2},
    "unpadded_vocab_size": VOCAB,
}

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "original_max_position_embeddings": 64,
}
_LONG = {
    "type": "longrope",  # the name of "rope_type" before transformers 5, which takes both
    "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6, 1.7],
    "long_factor": [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0],
}
_MLA = {
    **_MHA,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "moe_intermediate_size": 32,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
    "n_group": 2,
    "topk_group": 1,
}


_HEAVY = "heavily_compressed_attention"
_SLIDING = "sliding_attention"
_INDEX = {"index_topk": 96, "index_head_dim": 16, "index_n_heads": 4}
_EXPERT_NAMES = (
    *("moe_intermediate_size", "n_routed_experts", "n_shared_experts", "num_experts_per_tok"),
    *("first_k_dense_replace", "n_group", "topk_group"),
)


def _falcon(**options: Any) -> dict[str, Any]:
    return {
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": POSITIONS,
        "bos_token_id": 1,
        "eos_token_id": None,
        "pad_token_id": 0,
        **options,
    }


def _opt(**options: Any) -> dict[str, Any]:
    return {
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "ffn_dim": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": POSITIONS,
        "word_embed_proj_dim": 64,
        "bos_token_id": 1,
        "eos_token_id": None,
        "pad_token_id": 0,
        **options,
    }


def _mpt(**attention: Any) -> dict[str, Any]:
    return {
        "vocab_size": VOCAB,
        "d_model": 64,
        "n_heads": 4,
        "n_layers": 2,
        "max_seq_len": POSITIONS,
        "bos_token_id": 1,
        "eos_token_id": None,
        "pad_token_id": 0,
        "attn_config": attention or None,
    }


_GEMMA4: dict[str, Any] = {
    **BASE,
    **FOUR_LAYERS,
    "layer_types": [_SLIDING] * 3 + ["full_attention"],
    "head_dim": 16,
    "global_head_dim": 32,
    "num_global_key_value_heads": 1,
    "attention_k_eq_v": True,
    "sliding_window": WINDOW,
    "hidden_size_per_layer_input": 0,
    "final_logit_softcapping": 30.0,
    "tie_word_embeddings": True,
}

#: Name -> (prefix of the classes in transformers, arguments of the config).
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {**BASE}),
    "llama_tied": ("Llama", {**BASE, "tie_word_embeddings": True}),
    "llama_bias": ("Llama", {**BASE, "attention_bias": True, "mlp_bias": True, "head_dim": 8}),
    "llama3": ("Llama", {**BASE, "rope_theta": 500000.0, "rope_scaling": LLAMA3}),
    "llama_linear": ("Llama", {**BASE, "rope_scaling": {"rope_type": "linear", "factor": 2.0}}),
    "llama_yarn": ("Llama", {**BASE, "rope_scaling": _YARN}),
    "mistral": ("Mistral", {**BASE, "sliding_window": WINDOW}),
    "mistral_full": ("Mistral", {**BASE, "sliding_window": None}),
    "mixtral": ("Mixtral", {**BASE, "num_local_experts": 4, "sliding_window": None}),
    "qwen2": ("Qwen2", {**BASE}),
    "qwen2_window": (
        "Qwen2",
        {
            **BASE,
            **FOUR_LAYERS,
            "use_sliding_window": True,
            "sliding_window": WINDOW,
            "max_window_layers": 2,
        },
    ),
    "qwen2_moe": (
        "Qwen2Moe",
        {**BASE, **_MOE, "shared_expert_intermediate_size": 48, "mlp_only_layers": [0]},
    ),
    "qwen3": ("Qwen3", {**BASE, "head_dim": 32}),
    # Experts chosen by logits with a bias, weights without it; rotation in layers with a window alone.
    "kolibri1": (
        "Kolibri1",
        {
            **{k: v for k, v in {**BASE, **_MOE}.items() if k != "intermediate_size"},
            "head_dim": 16,
            "shared_expert_intermediate_size": 32,
            "layer_types": [_SLIDING, "full_attention"],
            "sliding_window": WINDOW,
            "norm_topk_prob": True,
        },
    ),
    "qwen3_moe": ("Qwen3Moe", {**BASE, **_MOE, "head_dim": 16, "norm_topk_prob": True}),
    "gemma": ("Gemma", {**BASE, "head_dim": 16, "tie_word_embeddings": True}),
    "gemma2": (
        "Gemma2",
        {
            **BASE,
            **FOUR_LAYERS,
            "head_dim": 16,
            "query_pre_attn_scalar": 24,
            "sliding_window": WINDOW,
            "tie_word_embeddings": True,
        },
    ),
    "gemma3": (
        "Gemma3",
        {
            **BASE,
            **FOUR_LAYERS,
            "head_dim": 16,
            "query_pre_attn_scalar": 24,
            "sliding_window": WINDOW,
            "sliding_window_pattern": 3,
            "tie_word_embeddings": True,
        },
    ),
    # Keys as values, larger heads and a rotation of a share of the frequencies in the last layer.
    "gemma4": ("Gemma4", _GEMMA4),
    # Each token brings something for each layer; the last two layers read keys and values of layers before.
    "gemma4_shared": (
        "Gemma4",
        {
            **_GEMMA4,
            "num_hidden_layers": 5,
            "layer_types": [_SLIDING, "full_attention", _SLIDING, _SLIDING, "full_attention"],
            "num_kv_shared_layers": 2,
            "use_double_wide_mlp": True,
            "attention_k_eq_v": False,
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": VOCAB,
        },
    ),
    "gemma4_moe": (
        "Gemma4",
        {
            **_GEMMA4,
            "enable_moe_block": True,
            "num_experts": 4,
            "top_k_experts": 2,
            "moe_intermediate_size": 32,
        },
    ),
    # Several streams, layers of low rank beside attention, and gates of which little is left in the first layers.
    "gemma3n": (
        "Gemma3n",
        {
            **BASE,
            "num_hidden_layers": 5,
            "layer_types": [_SLIDING, "full_attention", _SLIDING, _SLIDING, "full_attention"],
            "num_kv_shared_layers": 2,
            "head_dim": 16,
            "sliding_window": WINDOW,
            "activation_sparsity_pattern": [0.9, 0.8, 0.0, 0.0, 0.9],
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": VOCAB - 6,  # the last tokens have no row of their own
            "laurel_rank": 8,
            "altup_num_inputs": 3,
            "tie_word_embeddings": True,
        },
    ),
    "gemma4_unified": (
        "Gemma4Unified",
        {k: v for k, v in _GEMMA4.items() if k != "hidden_size_per_layer_input"},
    ),
    "phi": ("Phi", {**BASE, **_MHA}),
    "phi_qk_norm": ("Phi", {**BASE, **_MHA, "qk_layernorm": True}),
    "phi3": ("Phi3", {**BASE, "sliding_window": WINDOW}),
    "phi3_longrope": (
        "Phi3",
        {**BASE, "rope_scaling": _LONG, "original_max_position_embeddings": 64},
    ),
    "phi4": ("Phi3", {**BASE, "tie_word_embeddings": True, "partial_rotary_factor": 0.75}),
    "gptj": ("GPTJ", {**_GPT, "rotary_dim": 8}),
    "gpt_neox": ("GPTNeoX", {**BASE}),
    "gpt_neox_sequential": ("GPTNeoX", {**BASE, "use_parallel_residual": False}),
    # A bias in the last layer, which is added behind the attention.
    "gpt_neox_japanese": ("GPTNeoXJapanese", {**BASE, "intermediate_multiple_size": 2}),
    "gpt2": ("GPT2", {**_GPT}),
    "opt": ("OPT", _opt()),
    # Positions are sinusoids in a buffer.
    "xglm": (
        "XGLM",
        {
            "vocab_size": VOCAB,
            "d_model": 64,
            "ffn_dim": 96,
            "num_layers": 2,
            "attention_heads": 4,
            "max_position_embeddings": POSITIONS,
            "bos_token_id": 1,
            "eos_token_id": None,
            "pad_token_id": 0,
        },
    ),
    "opt_350m": ("OPT", _opt(do_layer_norm_before=False, word_embed_proj_dim=32)),
    "falcon": ("Falcon", _falcon()),
    "falcon_gqa": ("Falcon", _falcon(new_decoder_architecture=True, num_kv_heads=2, bias=False)),
    "falcon_gqa_one_norm": (
        "Falcon",
        _falcon(new_decoder_architecture=True, num_kv_heads=2, num_ln_in_parallel_attn=1),
    ),
    "falcon_alibi": (
        "Falcon",
        _falcon(alibi=True, multi_query=False, parallel_attn=False, bias=True),
    ),
    "bloom": (
        "Bloom",
        {"vocab_size": VOCAB, "hidden_size": 64, "n_layer": 2, "n_head": 4, "pad_token_id": 0},
    ),
    "bloom_post_norm": (
        "Bloom",
        {
            "vocab_size": VOCAB,
            "hidden_size": 64,
            "n_layer": 2,
            "n_head": 4,
            "pad_token_id": 0,
            "apply_residual_connection_post_layernorm": True,
        },
    ),
    "codegen": ("CodeGen", {**_GPT, "rotary_dim": 8, "n_ctx": POSITIONS}),
    "gpt_bigcode": ("GPTBigCode", {**_GPT}),
    "gpt_bigcode_mha": ("GPTBigCode", {**_GPT, "multi_query": False}),
    "stablelm": ("StableLm", {**BASE, "use_qkv_bias": True}),
    "stablelm_parallel": (
        "StableLm",
        {**BASE, "use_parallel_residual": True, "qk_layernorm": True},
    ),
    "mpt": ("Mpt", _mpt()),
    # Norms around attention in a module of their own, clipped projections, experts in three matrices.
    "dbrx": (
        "Dbrx",
        {
            **{"vocab_size": VOCAB, "d_model": 64, "n_heads": 4, "n_layers": 2},
            **{"max_seq_len": POSITIONS, "pad_token_id": 0, "bos_token_id": 1},
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
            "attn_config": {"kv_n_heads": 2, "clip_qkv": 0.9, "rope_theta": 10000.0},
            "ffn_config": {"ffn_hidden_size": 48, "moe_num_experts": 4, "moe_top_k": 2},
        },
    ),
    "mpt_clip": ("Mpt", _mpt(clip_qkv=0.8, softmax_scale=0.3)),
    "glm": ("Glm", {**BASE, "head_dim": 16}),
    "glm4": ("Glm4", {**BASE, "head_dim": 16}),
    "granite": (
        "Granite",
        {
            **BASE,
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.3,
            "attention_multiplier": 0.2,
            "logits_scaling": 4.0,
        },
    ),
    "olmo": ("Olmo", {**BASE, "clip_qkv": 0.9}),
    "olmo2": ("Olmo2", {**BASE}),
    "apertus": ("Apertus", {**BASE}),
    "bitnet": ("BitNet", {**BASE}),
    "cohere": ("Cohere", {**BASE, "tie_word_embeddings": True}),
    "cohere_qk_norm": ("Cohere", {**BASE, "use_qk_norm": True}),
    "cohere2": ("Cohere2", {**BASE, **FOUR_LAYERS, "sliding_window": WINDOW}),
    # Rotation in layers with a window alone; positions of three kinds, which are one in texts.
    "cohere_compass": (
        "CohereCompass",
        {
            **BASE,
            "layer_types": [_SLIDING, "full_attention"],
            "sliding_window": WINDOW,
            "logit_scale": 0.25,
            "rope_parameters": {
                _SLIDING: {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2]},
                "full_attention": None,
            },
        },
    ),
    "starcoder2": ("Starcoder2", {**BASE, "sliding_window": WINDOW}),
    "gpt_oss": (
        "GptOss",
        {
            **BASE,
            **FOUR_LAYERS,
            "head_dim": 16,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "sliding_window": WINDOW,
            "rope_scaling": {**_YARN, "truncate": False},
        },
    ),
    "nemotron": ("Nemotron", {**BASE}),
    "olmoe": ("Olmoe", {**BASE, **_MOE, "num_key_value_heads": 2}),
    "phimoe": (
        "Phimoe",
        {**BASE, "num_local_experts": 4, "sliding_window": None, "attention_bias": True},
    ),
    "granitemoe": ("GraniteMoe", {**BASE, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "llama4": (
        "Llama4",
        {
            **BASE,
            **FOUR_LAYERS,
            "head_dim": 16,
            "intermediate_size_mlp": 96,
            "intermediate_size": 32,
            "num_local_experts": 4,
            "interleave_moe_layer_step": 2,
            "attention_chunk_size": 128,
            "attn_temperature_tuning": False,
        },
    ),
    "deepseek_v2": ("DeepseekV2", {**BASE, **_MLA, "topk_method": "group_limited_greedy"}),
    "deepseek_v3": ("DeepseekV3", {**BASE, **_MLA}),
    # Blocks that read several streams and are added to all, sinks and gates beside latents, experts with a bound.
    "hy_v4": (
        "HYV4",
        {
            **{k: v for k, v in {**BASE, **_MLA, **_INDEX}.items() if k != "first_k_dense_replace"},
            **{"n_group": 1, "hc_mult": 3, "swiglu_limit": 0.5},
            "indexer_types": ["full", "shared"],
        },
    ),
    # One row for all heads, rows of windows of two kinds, streams that are mixed, experts by token.
    "deepseek_v4": (
        "DeepseekV4",
        {
            **{**BASE, **_MOE, "num_hidden_layers": 4, "head_dim": 16, "num_key_value_heads": 1},
            **{"num_local_experts": 4, "swiglu_limit": 0.5, "sliding_window": WINDOW},
            **{"q_lora_rank": 24, "o_groups": 2, "o_lora_rank": 24, "qk_rope_head_dim": 8},
            **{"hc_mult": 3, "hc_sinkhorn_iters": 3, "partial_rotary_factor": 0.5},
            **{"index_n_heads": 2, "index_head_dim": 16, "index_topk": 24},
            "layer_types": [_SLIDING, _HEAVY, "compressed_sparse_attention", _HEAVY],
            "compress_rates": {_HEAVY: 10, "compressed_sparse_attention": 4},
            "mlp_layer_types": ["hash_moe", "hash_moe", "moe", "moe"],
        },
    ),
    # Residuals that shrink with depth, biases of gates of heads, queries that grow with the position without rotation.
    "beam": (
        "Beam",
        {
            **BASE,
            **_MOE,
            "head_dim": 16,
            "layer_types": [_SLIDING, "full_attention"],
            "mlp_layer_types": ["dense", "sparse"],
            "sliding_window": WINDOW,
            "n_group": 2,
            "topk_group": 1,
        },
    ),
    # Rows of length one, residuals that move towards blocks, layers that run twice, gates with a norm behind them.
    "dory": (
        "Dory",
        {
            **{**BASE, "num_hidden_layers": 3},
            "head_dim": 16,
            "layer_types": [_SLIDING, "full_attention", _SLIDING],
            "sliding_window": WINDOW,
            "n_input_layers": 1,
            "n_output_layers": 1,
        },
    ),
    # Norms with gates, gates of attention beside the queries.
    "axk2": (
        "AXK2",
        {
            **{k: v for k, v in {**BASE, **_MLA, **_INDEX}.items() if k != "first_k_dense_replace"},
            **{"gated_norm_rank": 8, "n_group": None, "topk_group": None},
            "mlp_layer_types": ["dense", "sparse"],
        },
    ),
    # A norm of the rotated part of keys, factors on latents, gates of heads; layers with a window have other heads.
    "dots3_note": (
        "Dots3Note",
        {
            **{k: v for k, v in {**BASE, **_MLA, **_INDEX}.items() if k != "topk_group"},
            "head_dim": 32,
            "layer_types": ["indexed_attention", _SLIDING],
            "sliding_window": WINDOW,
            "shared_experts_intermediate_size": 32,
            "swa_num_attention_heads": 2,
            "swa_num_key_value_heads": 2,
            "swa_q_lora_rank": 24,
            "swa_kv_lora_rank": 24,
            "swa_head_dim": 24,
            "swa_qk_nope_head_dim": 16,
            "swa_v_head_dim": 8,
        },
    ),
    # A norm at the end of the experts.
    "axk1": ("AXK1", {**BASE, **_MLA, "mlp_layer_types": ["dense", "sparse"]}),
    # Gated projections with a bound in dense blocks, an indexer of blocks of keys in the second layer.
    "minimax_m3": (
        "MiniMaxM3VL",
        {
            **BASE,
            "head_dim": 16,
            "rotary_dim": 8,
            "num_experts_per_tok": 2,
            "num_local_experts": 4,
            "intermediate_size": 32,
            "shared_intermediate_size": 32,
            "dense_intermediate_size": 48,
            "mlp_layer_types": ["dense", "sparse"],
            "layer_types": ["full_attention", "minimax_m3_sparse"],
            "index_n_heads": 2,
            "index_head_dim": 16,
            "index_block_size": 8,
            "index_topk_blocks": 12,
        },
    ),
    # As many keys as the indexer chooses: beyond, the stock forward runs.
    "deepseek_v32": (
        "DeepseekV32",
        {**BASE, **_MLA, **_INDEX, "mlp_layer_types": ["dense", "sparse"]},
    ),
    "glm_moe_dsa": (
        "GlmMoeDsa",
        {
            **BASE,
            **_MLA,
            **_INDEX,
            "n_group": 1,
            "indexer_types": ["full", "shared"],
        },
    ),
    "glm4_moe_lite": ("Glm4MoeLite", {**BASE, **_MLA, "n_group": 1}),
    # Hidden states divided before the head, factors on embeddings and blocks, dense blocks behind latent attention.
    "minicpm3": (
        "MiniCPM3",
        {
            **{k: v for k, v in {**BASE, **_MLA}.items() if k not in _EXPERT_NAMES},
            "scale_emb": 3,
            "scale_depth": 1.2,
            "dim_model_base": 32,
        },
    ),
    "minimax_m2": (
        "MiniMaxM2",
        {**BASE, "num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16},
    ),
    # A block before the head.
    "modernbert_decoder": (
        "ModernBertDecoder",
        {
            **{k: v for k, v in BASE.items() if k != "num_key_value_heads"},
            "local_attention": 2 * WINDOW,
            "tie_word_embeddings": True,
        },
    ),
    # Rotation the other way round, norms without weights behind it.
    "nanochat": ("NanoChat", {**BASE, "final_logit_softcapping": 15.0}),
    # Gates of heads opened by softplus.
    "laguna": (
        "Laguna",
        {
            **BASE,
            **_MOE,
            "head_dim": 16,
            "layer_types": ["full_attention", _SLIDING],
            "num_attention_heads_per_layer": [4, 6],
            "shared_expert_intermediate_size": 32,
            "sliding_window": WINDOW,
        },
    ),
    # Two layers in each module, with experts beside them of which some give what they read; factors on latents.
    "longcat_flash": (
        "LongcatFlash",
        {
            **{k: v for k, v in {**BASE, **_MLA}.items() if k not in _EXPERT_NAMES},
            **{"num_layers": 2, "ffn_hidden_size": 96, "expert_ffn_hidden_size": 32},
            **{"zero_expert_num": 2, "moe_topk": 3, "routed_scaling_factor": 2.0},
            **{"num_hidden_layers": 4, "head_dim": 8, "n_routed_experts": 4},
        },
    ),
    # Values narrower than keys, with a factor; sinks in the layers with a window, which have more heads.
    "mimo_v2_flash": (
        "MiMoV2Flash",
        {
            **BASE,
            "num_key_value_heads": 1,
            "head_dim": 24,
            "v_head_dim": 16,
            "sliding_window": WINDOW,
            "layer_types": ["full_attention", _SLIDING],
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
        },
    ),
    # A bias of each key, which is made of its values; factors on residuals. Beyond so many keys some are chosen.
    "doge": ("Doge", {**BASE, "keep_window_size": 96}),
    # One half of the heads less a multiple of the other.
    "diffllama": ("DiffLlama", {**BASE}),
    # Queries and what heads attend to go through experts, and so does the mlp; both add a parameter.
    "jetmoe": (
        "JetMoe",
        {
            **{name: value for name, value in BASE.items() if name != "num_attention_heads"},
            "kv_channels": 16,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
        },
    ),
    # Numbers for the last keys of queries, short convolutions behind projections and blocks, experts that all tokens go
    # to, a padded head.
    "inkling": (
        "Inkling",
        {
            **BASE,
            "num_hidden_layers": 3,
            "head_dim": 16,
            "layer_types": ["hybrid", "hybrid_sliding", "hybrid"],
            "mlp_layer_types": ["dense", "sparse", "sparse"],
            **{f"swa_num_{name}_heads": 4 for name in ("attention", "key_value")},
            **{"swa_head_dim": 16, "sliding_window_size": WINDOW, "d_rel": 4, "rel_extent": 12},
            **{"log_scaling_n_floor": 16, "logits_mup_width_multiplier": 2.0},
            **{"moe_intermediate_size": 32, "n_routed_experts": 4, "num_experts_per_tok": 2},
            **{"vocab_size": VOCAB + 6, "unpadded_vocab_size": VOCAB},
        },
    ),
    # Means of earlier streams, queries, keys and values that read rows of their own, taps and sinks of each token.
    "inkling2": ("Inkling2", _INKLING2),
    # Layers that run several times, with messages from one time to the next.
    "inkling2_loop": (
        "Inkling2Loop",
        {
            **{
                **_INKLING2,
                "num_hidden_layers": 6,
                "layer_types": ["hybrid_sliding", "hybrid"] * 3,
            },
            **{"loop_layer_index_start": 2, "loop_layer_index_end": 4, "loop_gate_rank": 8},
        },
    ),
    # Text alone of a model with layers that read pictures, one of them the last.
    "mllama_text": (
        "Mllama",
        {**BASE, **FOUR_LAYERS, "cross_attention_layers": [1, 3], "rope_scaling": LLAMA3},
    ),
    "jamba": ("Jamba", _JAMBA),
    # With an activation behind the convolution that no op has: some layers are understood, others are not.
    "jamba_gelu": ("Jamba", {**_JAMBA, "hidden_act": "gelu"}),
}

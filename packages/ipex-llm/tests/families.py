# SPDX-License-Identifier: Apache-2.0
"""Tiny seeded models of each family, made from the real config classes of transformers.

``FAMILIES[name]()`` gives a new model each time (a copy of one that is made once): float32, in eval mode, with random
weights that make every part matter - biases are not zero and norms not one, unlike those of a freshly made model.

>>> model = FAMILIES["llama"]()
>>> model(torch.tensor([[1, 2, 3]])).logits.shape
torch.Size([1, 3, 96])
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import nn

__all__ = ["CAUSAL", "FAMILIES", "LOOKALIKES", "OLD", "UNMATCHED", "VOCAB", "randomize", "tokens"]

VOCAB = 96
#: Whether transformers is older than 5.
OLD = transformers.__version__.startswith("4.")
#: Longest sequence of the tiny models, and a sliding window short enough to matter in a test.
POSITIONS = 256
WINDOW = 8

_BASE: dict[str, Any] = {
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
_FOUR = {"num_hidden_layers": 4}
_MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}

_LLAMA3 = {
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


#: Name -> (prefix of the classes in transformers, arguments of the config).
_CAUSAL: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {**_BASE}),
    "llama_tied": ("Llama", {**_BASE, "tie_word_embeddings": True}),
    "llama_bias": ("Llama", {**_BASE, "attention_bias": True, "mlp_bias": True, "head_dim": 8}),
    "llama3": ("Llama", {**_BASE, "rope_theta": 500000.0, "rope_scaling": _LLAMA3}),
    "llama_linear": ("Llama", {**_BASE, "rope_scaling": {"rope_type": "linear", "factor": 2.0}}),
    "llama_yarn": ("Llama", {**_BASE, "rope_scaling": _YARN}),
    "mistral": ("Mistral", {**_BASE, "sliding_window": WINDOW}),
    "mistral_full": ("Mistral", {**_BASE, "sliding_window": None}),
    "mixtral": ("Mixtral", {**_BASE, "num_local_experts": 4, "sliding_window": None}),
    "qwen2": ("Qwen2", {**_BASE}),
    "qwen2_window": (
        "Qwen2",
        {
            **_BASE,
            **_FOUR,
            "use_sliding_window": True,
            "sliding_window": WINDOW,
            "max_window_layers": 2,
        },
    ),
    "qwen2_moe": (
        "Qwen2Moe",
        {**_BASE, **_MOE, "shared_expert_intermediate_size": 48, "mlp_only_layers": [0]},
    ),
    "qwen3": ("Qwen3", {**_BASE, "head_dim": 32}),
    "qwen3_moe": ("Qwen3Moe", {**_BASE, **_MOE, "head_dim": 16, "norm_topk_prob": True}),
    "gemma": ("Gemma", {**_BASE, "head_dim": 16, "tie_word_embeddings": True}),
    "gemma2": (
        "Gemma2",
        {
            **_BASE,
            **_FOUR,
            "head_dim": 16,
            "query_pre_attn_scalar": 24,
            "sliding_window": WINDOW,
            "tie_word_embeddings": True,
        },
    ),
    "gemma3": (
        "Gemma3",
        {
            **_BASE,
            **_FOUR,
            "head_dim": 16,
            "query_pre_attn_scalar": 24,
            "sliding_window": WINDOW,
            "sliding_window_pattern": 3,
            "tie_word_embeddings": True,
        },
    ),
    "phi": ("Phi", {**_BASE, **_MHA}),
    "phi_qk_norm": ("Phi", {**_BASE, **_MHA, "qk_layernorm": True}),
    "phi3": ("Phi3", {**_BASE, "sliding_window": WINDOW}),
    "phi3_longrope": (
        "Phi3",
        {**_BASE, "rope_scaling": _LONG, "original_max_position_embeddings": 64},
    ),
    "phi4": ("Phi3", {**_BASE, "tie_word_embeddings": True, "partial_rotary_factor": 0.75}),
    "gptj": ("GPTJ", {**_GPT, "rotary_dim": 8}),
    "gpt_neox": ("GPTNeoX", {**_BASE}),
    "gpt_neox_sequential": ("GPTNeoX", {**_BASE, "use_parallel_residual": False}),
    "gpt2": ("GPT2", {**_GPT}),
    "opt": ("OPT", _opt()),
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
    "stablelm": ("StableLm", {**_BASE, "use_qkv_bias": True}),
    "stablelm_parallel": (
        "StableLm",
        {**_BASE, "use_parallel_residual": True, "qk_layernorm": True},
    ),
    "mpt": ("Mpt", _mpt()),
    "mpt_clip": ("Mpt", _mpt(clip_qkv=0.8, softmax_scale=0.3)),
    "glm": ("Glm", {**_BASE, "head_dim": 16}),
    "glm4": ("Glm4", {**_BASE, "head_dim": 16}),
    "granite": (
        "Granite",
        {
            **_BASE,
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.3,
            "attention_multiplier": 0.2,
            "logits_scaling": 4.0,
        },
    ),
    "olmo": ("Olmo", {**_BASE, "clip_qkv": 0.9}),
    "olmo2": ("Olmo2", {**_BASE}),
    "cohere": ("Cohere", {**_BASE, "tie_word_embeddings": True}),
    "cohere_qk_norm": ("Cohere", {**_BASE, "use_qk_norm": True}),
    "cohere2": ("Cohere2", {**_BASE, **_FOUR, "sliding_window": WINDOW}),
    "starcoder2": ("Starcoder2", {**_BASE, "sliding_window": WINDOW}),
    "gpt_oss": (
        "GptOss",
        {
            **_BASE,
            **_FOUR,
            "head_dim": 16,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "sliding_window": WINDOW,
            "rope_scaling": {**_YARN, "truncate": False},
        },
    ),
    "nemotron": ("Nemotron", {**_BASE}),
    "olmoe": ("Olmoe", {**_BASE, **_MOE, "num_key_value_heads": 2}),
    "phimoe": (
        "Phimoe",
        {**_BASE, "num_local_experts": 4, "sliding_window": None, "attention_bias": True},
    ),
    "granitemoe": ("GraniteMoe", {**_BASE, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "llama4": (
        "Llama4",
        {
            **_BASE,
            **_FOUR,
            "head_dim": 16,
            "intermediate_size_mlp": 96,
            "intermediate_size": 32,
            "num_local_experts": 4,
            "interleave_moe_layer_step": 2,
            "attention_chunk_size": 128,
            "attn_temperature_tuning": False,
        },
    ),
    "deepseek_v2": ("DeepseekV2", {**_BASE, **_MLA, "topk_method": "group_limited_greedy"}),
    "deepseek_v3": ("DeepseekV3", {**_BASE, **_MLA}),
    "jamba": (
        "Jamba",
        {
            **_BASE,
            **_FOUR,
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "num_experts": 2,
            "mamba_d_state": 4,
        },
    ),
}

_CONFIGS = {"Gemma3": "Gemma3TextConfig", "Llama4": "Llama4TextConfig", "Phimoe": "PhimoeConfig"}

#: Families whose whole decoder is not matched on purpose.
UNMATCHED: frozenset[str] = frozenset({"jamba", "mllama", "phimoe", "yuan"})


@torch.no_grad()
def randomize(model: nn.Module, seed: int = 0) -> nn.Module:
    """Give `model` weights that make all of its parts matter, and return it in eval mode."""
    generator = torch.Generator().manual_seed(seed)

    def noise(shape: torch.Size, scale: float) -> torch.Tensor:
        return torch.randn(shape, generator=generator) * scale

    embeddings = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    for name, parameter in model.named_parameters():
        if parameter.ndim < 2:
            parameter.copy_(parameter.nan_to_num().clamp(-1, 1) + noise(parameter.shape, 0.15))
        elif name.endswith("A_log"):
            parameter.add_(noise(parameter.shape, 0.05))
        else:
            fan = parameter[0].numel() if parameter.ndim == 2 else parameter.shape[1]
            scale = 0.3 if id(parameter) in embeddings else 1.2 / fan**0.5
            parameter.copy_(noise(parameter.shape, scale))
    for name, buffer in model.named_buffers():
        if name.endswith("correction_bias"):
            buffer.copy_(noise(buffer.shape, 0.1))
    return model.eval()


def _causal(name: str) -> nn.Module:
    prefix, options = _CAUSAL[name]
    config_class = getattr(transformers, _CONFIGS.get(prefix, f"{prefix}Config"))
    model_class = getattr(transformers, f"{prefix}ForCausalLM", None)
    if model_class is None:
        model_class = getattr(transformers, f"{prefix}LMHeadModel")
    config = config_class(**options)
    if prefix == "Gemma2":
        config._attn_implementation = (
            "eager"  # until 5.18 it is "sdpa", which leaves the soft cap out
        )
    if OLD:
        # The eager one of Falcon adds ALiBi twice, that of Llama 4 mixes dtypes.
        if prefix not in ("Falcon", "Llama4"):
            # The others leave out windows and soft caps of some models.
            config._attn_implementation = "eager"
        config.use_mamba_kernels = False
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return randomize(model_class(config))


def _vision(kind: str) -> Any:
    size = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "image_size": 16,
        "patch_size": 8,
    }
    if kind == "llava":
        return transformers.CLIPVisionConfig(**size, projection_dim=32)
    size = {k: v for k, v in size.items() if k not in ("num_attention_heads",)}
    return {
        **size,
        "attention_heads": 2,
        "num_global_layers": 1,
        "vision_output_dim": 64,
        "intermediate_layers_indices": [1],
        "max_num_tiles": 1,
        "supported_aspect_ratios": [[1, 1]],
    }


def _llava() -> nn.Module:
    text = transformers.LlamaConfig(**_BASE)
    config = transformers.LlavaConfig(
        vision_config=_vision("llava"), text_config=text, image_token_index=VOCAB - 1
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return randomize(transformers.LlavaForConditionalGeneration(config))


def _mllama() -> nn.Module:
    text = {**_BASE, **_FOUR, "cross_attention_layers": [1, 3], "rope_scaling": _LLAMA3}
    config = transformers.MllamaConfig(
        vision_config=_vision("mllama"), text_config=text, image_token_index=VOCAB - 1
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return randomize(transformers.MllamaForConditionalGeneration(config))


def _t5(gated: bool = False) -> nn.Module:
    config = transformers.T5Config(
        vocab_size=VOCAB,
        d_model=64,
        d_kv=16,
        d_ff=96,
        num_layers=2,
        num_heads=4,
        relative_attention_num_buckets=8,
        relative_attention_max_distance=16,
        feed_forward_proj="gated-gelu" if gated else "relu",
        tie_word_embeddings=not gated,
        eos_token_id=None,
        pad_token_id=0,
        decoder_start_token_id=0,
    )
    return randomize(transformers.T5ForConditionalGeneration(config))


def _whisper() -> nn.Module:
    config = transformers.WhisperConfig(
        vocab_size=VOCAB,
        num_mel_bins=8,
        d_model=64,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=96,
        decoder_ffn_dim=96,
        max_source_positions=16,
        max_target_positions=POSITIONS,
        bos_token_id=1,
        eos_token_id=None,
        pad_token_id=0,
        decoder_start_token_id=1,
        suppress_tokens=None,
        begin_suppress_tokens=None,
    )
    return randomize(transformers.WhisperForConditionalGeneration(config))


@functools.cache
def _prototype(name: str) -> nn.Module:
    if name in ENCODER_DECODERS:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return ENCODER_DECODERS[name]()
    if name in _CAUSAL:
        return _causal(name)
    if name in _VISION:
        return {"llava": _llava, "mllama": _mllama}[name]()
    import lookalikes

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return randomize(lookalikes.make(name))


def build(name: str) -> nn.Module:
    """Return a new model of a family."""
    return copy.deepcopy(_prototype(name))


_VISION = ("llava", "mllama")

#: Families whose decoder reads what an encoder made of the input; of `build`.
ENCODER_DECODERS: dict[str, Callable[[], nn.Module]] = {
    "t5": _t5,
    "t5_gated": functools.partial(_t5, gated=True),
    "whisper": _whisper,
}

#: The names of `FAMILIES` that are plain causal language models, those that this transformers has.
CAUSAL: tuple[str, ...] = tuple(
    name
    for name, (prefix, _) in _CAUSAL.items()
    if hasattr(transformers, f"{prefix}ForCausalLM")
    or hasattr(transformers, f"{prefix}LMHeadModel")
)

#: Models whose code comes with their checkpoints; see lookalikes.py. They have no cache.
LOOKALIKES: tuple[str, ...] = (
    "baichuan",
    "baichuan_alibi",
    "chatglm",
    "internlm2",
    "qwen",
    "yuan",
)

#: Name -> maker of a new model.
FAMILIES: dict[str, Callable[[], Any]] = {
    name: functools.partial(build, name) for name in (*CAUSAL, *_VISION, *LOOKALIKES)
}


def tokens(batch: int = 1, length: int = 20, seed: int = 1) -> torch.Tensor:
    """Return random token ids ``[batch, length]`` that each model of `FAMILIES` takes."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(2, VOCAB - 2, (batch, length), generator=generator)

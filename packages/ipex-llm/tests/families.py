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
from family_configs import BASE, CONFIGS, FOUR_LAYERS, LLAMA3, POSITIONS, VOCAB, WINDOW
from torch import nn

from ipex_core.optimization.passes.cast import wide_names
from ipex_llm.optimization.proof.small import spread

__all__ = [
    "CAUSAL",
    "ENCODER_DECODERS",
    "FAMILIES",
    "LOOKALIKES",
    "OLD",
    "POSITIONS",
    "UNMATCHED",
    "UNPROVEN",
    "VOCAB",
    "WINDOW",
    "build",
    "cast",
    "randomize",
    "tokens",
]

#: Whether transformers is older than 5.
OLD = transformers.__version__.startswith("4.")

#: Families of which less is proven with transformers 4: its windows, chunks and rotations differ from its own rules.
UNPROVEN: frozenset[str] = frozenset(
    {"cohere2", "deepseek_v3", "gemma2", "gemma3", "llama4", "llama_yarn", "qwen2", "qwen3"}
    if OLD
    else ()
)

_CONFIG_NAMES = {
    "CohereCompass": "CohereCompassTextConfig",
    "Dots3Note": "Dots3NoteTextConfig",
    "Gemma3": "Gemma3TextConfig",
    "Gemma3n": "Gemma3nTextConfig",
    "Gemma4": "Gemma4TextConfig",
    "Gemma4Unified": "Gemma4UnifiedTextConfig",
    "Inkling": "InklingTextConfig",
    "Inkling2": "Inkling2TextConfig",
    "Inkling2Loop": "Inkling2LoopTextConfig",
    "Llama4": "Llama4TextConfig",
    "MiniMaxM3VL": "MiniMaxM3VLTextConfig",
    "Mllama": "MllamaTextConfig",
    "Phimoe": "PhimoeConfig",
}

#: Families whose whole decoder is not matched on purpose.
UNMATCHED: frozenset[str] = frozenset({"jamba_gelu", "yuan"})


@torch.no_grad()
def randomize(model: nn.Module, seed: int = 0) -> nn.Module:
    """Give `model` weights that make all of its parts matter, and return it in eval mode."""
    generator = torch.Generator().manual_seed(seed)

    def noise(shape: torch.Size, scale: float) -> torch.Tensor:
        return torch.randn(shape, generator=generator) * scale

    embeddings = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    for name, parameter in model.named_parameters():
        if parameter.ndim < 2:
            kept = parameter.nan_to_num().clamp(-1, 1)
            parameter.copy_(kept + noise(parameter.shape, spread(kept)))
        elif name.endswith("A_log"):
            parameter.add_(noise(parameter.shape, 0.05))
        else:
            fan = parameter[0].numel() if parameter.ndim == 2 else parameter.shape[1]
            scale = 0.3 if id(parameter) in embeddings else 1.2 / fan**0.5
            parameter.copy_(noise(parameter.shape, scale))
    for name, buffer in model.named_buffers():
        if name.endswith("correction_bias"):
            buffer.copy_(noise(buffer.shape, 0.1))
        elif name.endswith("layer_scalar"):
            buffer.copy_(1.0 + noise(buffer.shape, 0.15))
        elif name.endswith("tid2eid"):
            buffer.copy_(torch.arange(buffer.numel()).view_as(buffer) % (buffer.shape[1] + 1))
    return model.eval()


def cast(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Cast `model` as `from_pretrained` does, which leaves what its class keeps in float32, and return it."""
    wide = wide_names(model)
    for name, value in (*model.named_parameters(), *model.named_buffers()):
        if value.is_floating_point() and not (wide and wide.search(name)):
            value.data = value.data.to(dtype)
    return model


def _causal(name: str) -> nn.Module:
    prefix, options = CONFIGS[name]
    config_class = getattr(transformers, _CONFIG_NAMES.get(prefix, f"{prefix}Config"))
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
    text = transformers.LlamaConfig(**BASE)
    config = transformers.LlavaConfig(
        vision_config=_vision("llava"), text_config=text, image_token_index=VOCAB - 1
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return randomize(transformers.LlavaForConditionalGeneration(config))


def _mllama() -> nn.Module:
    text = {**BASE, **FOUR_LAYERS, "cross_attention_layers": [1, 3], "rope_scaling": LLAMA3}
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


def _bart(prefix: str, model: str = "", **more: Any) -> nn.Module:
    """Return a model of the families that descend from BART."""
    config = getattr(transformers, f"{prefix}Config")(
        vocab_size=VOCAB,
        d_model=64,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=96,
        decoder_ffn_dim=96,
        max_position_embeddings=POSITIONS,
        bos_token_id=1,
        eos_token_id=None,
        pad_token_id=0,
        decoder_start_token_id=1,
        forced_eos_token_id=None,
        **more,
    )
    kind = getattr(transformers, model or f"{prefix}ForConditionalGeneration")
    return randomize(kind(config))


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
    if name in CONFIGS:
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
    "bart": functools.partial(_bart, "Bart"),
    "mbart": functools.partial(_bart, "MBart", scale_embedding=True),
    "marian": functools.partial(
        _bart, "Marian", "MarianMTModel", decoder_vocab_size=VOCAB, activation_function="silu"
    ),
    "m2m_100": functools.partial(_bart, "M2M100"),
    "pegasus": functools.partial(_bart, "Pegasus"),
    "whisper": _whisper,
}

#: The names of `FAMILIES` that are plain causal language models, those that this transformers has.
CAUSAL: tuple[str, ...] = tuple(
    name
    for name, (prefix, _) in CONFIGS.items()
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

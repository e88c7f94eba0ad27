# SPDX-License-Identifier: Apache-2.0
"""Tiny models of random weights, saved as vLLM reads them, for `vllm_check`."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

__all__ = [
    "eagle",
    "family",
    "nearest",
    "nearest_fp4",
    "nearest_fp8",
    "online_fp8",
    "tokenizer",
    "vision_model",
]

_LATENT = {"kv_lora_rank": 512, "qk_rope_head_dim": 64}
#: What vLLM wants of a family: latent rows of 576 numbers, the shared head that all checkpoints of Cohere 2 have, and
#: no number of key heads where the model has none.
SIZES: dict[str, dict[str, Any]] = {
    "deepseek_v2": _LATENT,
    "deepseek_v3": _LATENT,
    "cohere2": {"tie_word_embeddings": True},
    "gpt_neox": {"num_key_value_heads": 4},
}
#: What the file of the configuration says otherwise than transformers: the window, in which vLLM counts one token more,
#: and how experts are chosen, which DeepSeek's files say and the class of transformers does not.
SAVED: dict[str, dict[str, Any]] = {
    "deepseek_v3": {"topk_method": "noaux_tc", "scoring_func": "sigmoid"},
    "cohere2": {"sliding_window": 7},
}


def family(name: str, folder: Path) -> tuple[Any, Path]:
    """Return a tiny float32 model, and the folder that it is saved in."""
    from families import build
    from family_configs import CONFIGS

    CONFIGS[name][1].update(SIZES.get(name, {}))
    model = build(name).float()
    place = folder / name
    if not place.exists():
        model.save_pretrained(place)
        file = place / "config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), **SAVED.get(name, {})}))
    return model, place


def eagle(model: Any, place: Path, head: Path) -> Path:
    """Save a head of EAGLE for a Llama: a layer of the model behind a random mix of states and embeddings."""
    import torch
    from safetensors.torch import save_file

    config = json.loads((place / "config.json").read_text())
    size, begin = config["hidden_size"], "model.layers.0."
    state = {
        name.removeprefix("model."): value.clone()
        for name, value in model.state_dict().items()
        if name.startswith(begin) and "input_layernorm" not in name
    }
    mix = torch.randn(size, 2 * size, generator=torch.Generator().manual_seed(1))
    state["fc.weight"] = mix / (2 * size) ** 0.5
    head.mkdir()
    save_file(state, head / "model.safetensors")
    (head / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 1}))
    return head


def vision_model(place: Path) -> tuple[Any, Any]:
    """Save a tiny Qwen2.5-VL of random weights, with a tokenizer of bytes; return it and its processor."""
    import torch
    import transformers
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    marks = ["vision_start", "vision_end", "image_pad", "video_pad", "vision_pad"]
    make: Any = transformers.PreTrainedTokenizerFast
    fast = make(
        tokenizer_object=made,
        eos_token="<|endoftext|>",
        additional_special_tokens=[f"<|{mark}|>" for mark in marks],
    )
    ids = {mark: fast.convert_tokens_to_ids(f"<|{mark}|>") for mark in marks}
    config = transformers.Qwen2_5_VLConfig(
        text_config={
            "vocab_size": 300,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 512,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10000.0,
                "mrope_section": [2, 3, 3],
            },
            "bos_token_id": None,
            "eos_token_id": fast.eos_token_id,
            "tie_word_embeddings": False,
        },
        vision_config={
            "depth": 2,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_heads": 2,
            "out_hidden_size": 64,
            "fullatt_block_indexes": [1],
            "window_size": 56,
        },
        image_token_id=ids["image_pad"],
        video_token_id=ids["video_pad"],
        vision_start_token_id=ids["vision_start"],
        vision_end_token_id=ids["vision_end"],
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    made_of: Any = transformers.Qwen2_5_VLForConditionalGeneration
    model = made_of(config).eval()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.data.normal_(0, 0.15)
    model.save_pretrained(place)
    images = transformers.Qwen2VLImageProcessor(min_pixels=56 * 56, max_pixels=112 * 112)
    videos = transformers.Qwen2VLVideoProcessor()
    process: Any = transformers.Qwen2_5_VLProcessor
    processor = process(images, fast, videos)
    processor.save_pretrained(place)
    fast.save_pretrained(place)
    return model, processor


def nearest(weight: Any) -> tuple[dict[str, Any], Any]:
    """Round ``[N, K]`` to 4 bits in groups of 32; return the tensors of compressed-tensors, and what they stand for."""
    import torch
    from vllm_stand_in import words

    groups = weight.unflatten(1, (-1, 32))
    scale = groups.abs().amax(-1) / 7
    codes = (groups / scale[..., None]).round().clamp(-8, 7)
    tensors = {
        "weight_packed": words((codes + 8).flatten(1), 4, 1),
        "weight_scale": scale,
        "weight_shape": torch.tensor(weight.shape),
    }
    return tensors, (codes * scale[..., None]).flatten(1)


def nearest_fp8(weight: Any) -> tuple[dict[str, Any], Any]:
    """Round ``[N, K]`` to FP8 with a scale for each row; return the tensors of compressed-tensors, and the values."""
    import torch

    scale = weight.abs().amax(1, keepdim=True) / 448
    codes = (weight / scale).to(torch.float8_e4m3fn)
    return {"weight": codes, "weight_scale": scale}, codes.float() * scale


def online_fp8(model: Any) -> Any:
    """Return a copy of a mixture of experts with FP8 weights as ``--quantization fp8`` makes them, in float32.

    One scale is for all weights that vLLM merges: queries, keys and values; gates and up projections of an expert.
    """
    import torch

    def rounded(weight: Any, largest: Any) -> Any:
        scale = largest / 448
        return (weight / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale

    made = copy.deepcopy(model)
    for layer in made.model.layers:
        attention, experts = layer.self_attn, layer.mlp.experts
        merged = (attention.q_proj, attention.k_proj, attention.v_proj)
        for group in (merged, (attention.o_proj,)):
            largest = torch.stack([one.weight.detach().abs().amax() for one in group]).amax()
            for one in group:
                one.weight.data = rounded(one.weight.data, largest)
        for weight in (experts.gate_up_proj, experts.down_proj):
            weight.data = rounded(weight.data, weight.data.abs().amax((1, 2), keepdim=True))
    return made


def nearest_fp4(weight: Any) -> tuple[Any, Any, Any]:
    """Round ``[E, N, K]`` to MXFP4; return blocks ``[E, N, K / 32, 16]``, their exponents, and what they stand for."""
    import torch

    values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    values = torch.cat([values, -values])
    groups = weight.unflatten(2, (-1, 32))
    power = (groups.abs().amax(-1) / 6).log2().ceil()
    scaled = groups / power.exp2()[..., None]
    codes = (scaled[..., None] - values).abs().argmin(-1)
    blocks = (codes[..., 0::2] | (codes[..., 1::2] << 4)).to(torch.uint8)
    return (
        blocks,
        (power + 127).to(torch.uint8),
        (values[codes] * power.exp2()[..., None]).flatten(2),
    )


def tokenizer(place: Path) -> None:
    """Save a tokenizer of bytes and a chat template for a model with 300 tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    table = {"<s>": 0, "</s>": 1, **{c: i + 2 for i, c in enumerate(alphabet)}}
    made = Tokenizer(models.BPE(vocab=table, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    make: Any = PreTrainedTokenizerFast
    fast = make(tokenizer_object=made, bos_token="<s>", eos_token="</s>")
    fast.chat_template = "{% for m in messages %}{{ m['content'] }} {% endfor %}"
    fast.save_pretrained(place)

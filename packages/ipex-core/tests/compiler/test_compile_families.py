# SPDX-License-Identifier: Apache-2.0
"""Which fusions fire in models of transformers under torch.compile(backend="ipex").

The models have one small layer and random weights. AOTAutograd and our passes run as ever; the graph that they make is
interpreted instead of compiled to C++, which would take most of the time and has tests of its own.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

import ipex_core

transformers = pytest.importorskip("transformers")

TINY = {
    "hidden_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "intermediate_size": 96,
    "vocab_size": 50,
    "max_position_embeddings": 64,
}
GROUPED = {**TINY, "num_key_value_heads": 2, "head_dim": 16}
GEMMA = {**GROUPED, "query_pre_attn_scalar": 16}

#: Name -> configuration and model, arguments of the configuration, input, and which of the optional patterns there are.
FAMILIES: dict[str, tuple[str, str, dict[str, Any], str, tuple[str, ...]]] = {
    "bert": ("BertConfig", "BertModel", TINY, "masked", ()),
    "roberta": ("RobertaConfig", "RobertaModel", TINY, "masked", ()),
    "distilbert": (
        "DistilBertConfig",
        "DistilBertModel",
        {"dim": 64, "n_layers": 1, "n_heads": 4, "hidden_dim": 96, "vocab_size": 50},
        "masked",
        (),
    ),
    "vit": (
        "ViTConfig",
        "ViTModel",
        {**TINY, "image_size": 32, "patch_size": 8},
        "images",
        (),
    ),
    "gpt2": (
        "GPT2Config",
        "GPT2LMHeadModel",
        {"n_embd": 64, "n_layer": 1, "n_head": 4, "vocab_size": 50, "n_positions": 64},
        "masked",
        (),
    ),
    "opt": (
        "OPTConfig",
        "OPTForCausalLM",
        {**TINY, "ffn_dim": 96, "word_embed_proj_dim": 64},
        "masked",
        (),
    ),
    "neox": ("GPTNeoXConfig", "GPTNeoXForCausalLM", TINY, "ids", ("rotary",)),
    "falcon": (
        "FalconConfig",
        "FalconForCausalLM",
        {**TINY, "multi_query": True, "bias": False, "parallel_attn": True},
        "ids",
        ("rotary",),
    ),
    "llama": ("LlamaConfig", "LlamaForCausalLM", GROUPED, "ids", ("rotary", "gated")),
    "mistral": ("MistralConfig", "MistralForCausalLM", GROUPED, "ids", ("rotary", "gated")),
    "qwen2": (
        "Qwen2Config",
        "Qwen2ForCausalLM",
        {**TINY, "num_key_value_heads": 2},
        "ids",
        ("rotary", "gated"),
    ),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM", GROUPED, "ids", ("rotary", "gated")),
    "gemma2": ("Gemma2Config", "Gemma2ForCausalLM", GEMMA, "ids", ("rotary", "gated")),
    "gemma3": ("Gemma3TextConfig", "Gemma3ForCausalLM", GEMMA, "ids", ("rotary", "gated")),
    "phi": ("PhiConfig", "PhiForCausalLM", TINY, "ids", ("rotary",)),
    "phi3": (
        "Phi3Config",
        "Phi3ForCausalLM",
        {**TINY, "num_key_value_heads": 2, "pad_token_id": 0},
        "ids",
        ("rotary", "gated"),
    ),
    "t5": (
        "T5Config",
        "T5EncoderModel",
        {"d_model": 64, "d_kv": 16, "d_ff": 96, "num_layers": 1, "num_heads": 4, "vocab_size": 50},
        "ids",
        (),
    ),
}


pytestmark = pytest.mark.usefixtures("no_code_generation")


def inputs(kind: str, size: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Return an input whose length, or number of images, may change."""
    if kind == "images":
        given = {"pixel_values": torch.randn(size // 3, 3, 32, 32, dtype=dtype)}
    else:
        given = {"input_ids": torch.randint(3, 50, (2, size))}
    if kind == "masked":
        given["attention_mask"] = torch.ones(2, size, dtype=torch.long)
        given["attention_mask"][1, -2:] = 0
    for x in given.values():
        torch._dynamo.mark_dynamic(x, int(kind != "images"))
    return given


CASES = [(name, "sdpa", torch.float32) for name in FAMILIES if name != "gemma2"]
CASES += [(name, "eager", torch.float32) for name in ("bert", "gemma2")]
CASES += [("phi3", "sdpa", torch.bfloat16)]


@pytest.mark.parametrize(("name", "implementation", "dtype"), CASES)
def test_family(name: str, implementation: str, dtype: torch.dtype) -> None:
    config_class, model_class, arguments, kind, optional = FAMILIES[name]
    if not hasattr(transformers, model_class):
        pytest.skip(f"this transformers has no {model_class}")
    config = getattr(transformers, config_class)(**arguments)
    if hasattr(config, "use_cache"):
        config.use_cache = False
    made = getattr(transformers, model_class)
    if not getattr(made, "_supports_sdpa", True):
        implementation = "eager"
    model = made._from_config(config, attn_implementation=implementation).eval().to(dtype)
    compiled = torch.compile(model, backend="ipex", fullgraph=True, options={"ipex.always": True})
    with torch.no_grad():
        for size in (6, 13):
            x = inputs(kind, size, dtype)
            expected, got = model(**x)[0], compiled(**x)[0]
            limit = 3e-2 if dtype == torch.bfloat16 else 1e-5
            largest = expected.abs().max().item()
            torch.testing.assert_close(got, expected, rtol=limit, atol=limit * largest)
    (report,) = ipex_core.explain(compiled).graphs
    assert report.frozen
    assert report.count("attention") == 1
    assert report.count("rotary") == (2 if "rotary" in optional else 0)
    assert report.count("gated") == (1 if "gated" in optional else 0)
    assert report.count("rms_norm") + report.count("layer_norm") >= 2
    assert report.count("linear") >= 4
    assert report.count("post_op") + report.count("add_norm") >= 1


HEADS = {"n_embd": 64, "n_layer": 1, "n_head": 4, "vocab_size": 50, "n_positions": 64}
#: Name -> configuration and model, its arguments, input, and how many attentions there are.
UNUSUAL: dict[str, tuple[str, str, dict[str, Any], str, int]] = {
    "bloom": (
        "BloomConfig",
        "BloomForCausalLM",
        {"hidden_size": 64, "n_layer": 1, "n_head": 4, "vocab_size": 50},
        "masked",
        1,
    ),
    "codegen": (
        "CodeGenConfig",
        "CodeGenForCausalLM",
        {**HEADS, "rotary_dim": 8, "n_ctx": 64},
        "masked",
        1,
    ),
    "gpt_neo": (
        "GPTNeoConfig",
        "GPTNeoForCausalLM",
        {
            "hidden_size": 64,
            "num_layers": 2,
            "num_heads": 4,
            "vocab_size": 50,
            "max_position_embeddings": 64,
            "attention_types": [[["global", "local"], 1]],
            "window_size": 4,
        },
        "masked",
        2,
    ),
    "deberta_v2": (
        "DebertaV2Config",
        "DebertaV2Model",
        {
            **TINY,
            "relative_attention": True,
            "position_buckets": 16,
            "pos_att_type": ["p2c", "c2p"],
            "share_att_key": True,
        },
        "masked",
        1,
    ),
    "swin_v2": (
        "Swinv2Config",
        "Swinv2Model",
        {
            "image_size": 32,
            "patch_size": 4,
            "embed_dim": 32,
            "depths": [2, 1],
            "num_heads": [2, 4],
            "window_size": 4,
        },
        "images",
        3,
    ),
    "deepseek_v3": (
        "DeepseekV3Config",
        "DeepseekV3ForCausalLM",
        {
            **TINY,
            "num_key_value_heads": 4,
            "q_lora_rank": 32,
            "kv_lora_rank": 16,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 16,
            "v_head_dim": 16,
            "first_k_dense_replace": 1,
            "pad_token_id": 0,
        },
        "masked",
        1,
    ),
    "gpt_oss": (
        "GptOssConfig",
        "GptOssForCausalLM",
        {
            **GROUPED,
            "num_hidden_layers": 2,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "sliding_window": 4,
            "pad_token_id": 0,
        },
        "masked",
        2,
    ),
}


@pytest.mark.parametrize("name", UNUSUAL)
def test_unusual_attention(name: str) -> None:
    config_class, model_class, arguments, kind, count = UNUSUAL[name]
    if not hasattr(transformers, model_class) or int(transformers.__version__.split(".")[0]) < 5:
        pytest.skip(f"the {model_class} of transformers 5 is not there")
    config = getattr(transformers, config_class)(**arguments)
    if hasattr(config, "use_cache"):
        config.use_cache = False
    model = getattr(transformers, model_class)._from_config(config).eval()
    compiled = torch.compile(model, backend="ipex", fullgraph=True, options={"ipex.always": True})
    with torch.no_grad():
        for size in (6, 13):
            x = inputs(kind, size, torch.float32)
            expected, got = model(**x)[0], compiled(**x)[0]
            torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)
    (report,) = ipex_core.explain(compiled).graphs
    assert report.count("attention") == count

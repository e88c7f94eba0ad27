# SPDX-License-Identifier: Apache-2.0
"""GGUF files and bitsandbytes' tensors in models: what the model computes is what it computes with their weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

from ipex_core.errors import OpArgumentError
from ipex_llm.utils import load_low_precision_checkpoint, replace_linears_from_checkpoint
from ipex_quant import WeightOnlyQuantizedLinear, gptq, load, quantize_linears, save, woq_qconfig

G = pytest.importorskip("ggufs", reason="needs the tests of ipex-quant")
SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 64,
}
NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
OUTER = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def interleaved(rows: torch.Tensor, heads: int) -> torch.Tensor:
    """Return rows as llama.cpp has them: row i of the halves of a head become neighbors."""
    shape = rows.shape
    return rows.reshape(heads, 2, shape[0] // heads // 2, -1).swapaxes(1, 2).reshape(shape)


def make_file(path: Path, model: nn.Module, architecture: str, metadata: Any = None) -> None:
    """Write a model's shapes with random quantized weights, and give the model their values."""
    tensors = {}
    state = model.state_dict()
    for seed, (name, tensor) in enumerate(state.items()):
        module, _, last = name.rpartition(".")
        if module.startswith("model.layers."):
            _, _, layer, inner = module.split(".", 3)
            target = f"blk.{layer}.{NAMES[inner]}.{last}"
        else:
            target = f"{OUTER[module]}.{last}"
        kind = "F32" if tensor.dim() == 1 else ("Q8_0", "Q4_0")[seed % 2]
        n, k = (1, tensor.numel()) if tensor.dim() == 1 else tensor.shape
        data = G.random_rows(kind, n, k, seed)
        value = torch.from_numpy(G.decode(kind, n, k, data)).float().view(tensor.shape)
        heads = {"attn_q": 4, "attn_k": 2}.get(target.split(".")[-2])
        if heads and architecture == "llama":
            # The file has these rows in llama.cpp's order.
            order = interleaved(torch.arange(n if tensor.dim() == 2 else k).view(-1, 1), heads)
            back = torch.empty_like(value)
            back[order.flatten()] = value
            value = back
        tensor.copy_(value / 16 if tensor.dim() == 1 else value)
        if tensor.dim() == 1:
            data = (torch.frombuffer(bytearray(data), dtype=torch.float32) / 16).numpy().tobytes()
        tensors[target] = (kind, tuple(tensor.shape), data)
    tensors["rope_freqs.weight"] = ("F32", (8,), G.random_rows("F32", 1, 8))
    about = {
        "general.architecture": architecture,
        f"{architecture}.attention.head_count": 4,
        f"{architecture}.attention.head_count_kv": 2,
        **(metadata or {}),
    }
    G.write(path, tensors, {key: value for key, value in about.items() if value is not None})


def make_model(architecture: str) -> Any:
    torch.manual_seed(0)
    if architecture == "llama":
        return LlamaForCausalLM(LlamaConfig(**SIZES, attention_bias=True)).eval()
    return Qwen2ForCausalLM(Qwen2Config(**SIZES)).eval()


@pytest.mark.parametrize("architecture", ["llama", "qwen2"])
@torch.no_grad()
def test_gguf_in_a_model(architecture: str, tmp_path: Path) -> None:
    model = make_model(architecture)
    make_file(tmp_path / "m.gguf", model, architecture)
    ids = torch.tensor([[1, 2, 3, 4, 5, 60]])
    expected = model(ids).logits
    state, config = load_low_precision_checkpoint(tmp_path / "m.gguf")
    assert config["quant_method"] == "gguf"
    with torch.device("meta"):
        fresh = type(model)(model.config).eval()
    found = replace_linears_from_checkpoint(fresh, state, config)
    assert len(found.layers) == 15 and not found.dense and not found.unused
    layer: Any = fresh.model.layers[0].self_attn.q_proj
    assert type(layer) is WeightOnlyQuantizedLinear
    assert torch.equal(layer.dequantize(), model.model.layers[0].self_attn.q_proj.weight)
    torch.testing.assert_close(fresh(ids).logits, expected, rtol=1e-3, atol=1e-2)


def test_gguf_errors(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    load = load_low_precision_checkpoint
    for change, message in (
        ({"general.architecture": "mamba"}, "must be one of llama, qwen2, qwen3, got mamba"),
        ({"general.architecture": None}, "general.architecture must be one of"),
        ({"llama.attention.head_count": None}, "head_count must be a positive number, got None"),
        ({"llama.attention.head_count": 3}, r"blk\.0\.attn_q\.weight must have rows for 3 heads"),
    ):
        make_file(path, make_model("llama"), "llama", change)
        with pytest.raises(OpArgumentError, match=message):
            load(path)
    make_file(path, make_model("llama"), "llama")
    with pytest.raises(OpArgumentError, match="world_size must be 1 for GGUF files, got 2"):
        load(tmp_path, 0, 2)
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(OpArgumentError, match=r"load_low_precision_checkpoint: .* fewer than"):
        load(tmp_path)
    data = G.random_rows("Q8_0", 2, 32)
    about = {"general.architecture": "llama", "llama.attention.head_count": 4}
    G.write(path, {"blk.0.ffn_gate_exps.weight": ("Q8_0", (2, 32), data)}, about)
    with pytest.raises(OpArgumentError, match="tensors of a Llama-like model only, got blk"):
        load(path)


@torch.no_grad()
def test_bitsandbytes_in_a_model(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    from ipex_core.packing.quantize import NF4_VALUES

    model = make_model("qwen2")
    state = {key: value.clone() for key, value in model.state_dict().items()}
    for name, layer in model.named_modules():
        if not isinstance(layer, nn.Linear) or name == "lm_head":
            continue
        n, k = layer.weight.shape
        codes = torch.randint(0, 16, (n * k,), dtype=torch.uint8)
        absmax = torch.rand(n * k // 32) / 8
        about = {"quant_type": "nf4", "blocksize": 32, "shape": [n, k], "dtype": "float32"}
        text = torch.tensor(list(json.dumps(about).encode()), dtype=torch.uint8)
        key = f"{name}.weight"
        state[key] = (codes[::2] << 4 | codes[1::2]).view(-1, 1)
        state[f"{key}.absmax"], state[f"{key}.quant_map"] = absmax, torch.tensor(NF4_VALUES)
        state[f"{key}.quant_state.bitsandbytes__nf4"] = text
        values = torch.tensor(NF4_VALUES)[codes.int()] * absmax.repeat_interleave(32)
        layer.weight.copy_(values.view(n, k))
    save_file(state, tmp_path / "model.safetensors")
    config = {"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    ids = torch.tensor([[1, 2, 3, 60]])
    expected = model(ids).logits
    found = replace_linears_from_checkpoint(model, *load_low_precision_checkpoint(tmp_path))
    assert len(found.layers) == 14 and not found.unused
    torch.testing.assert_close(model(ids).logits, expected, rtol=1e-3, atol=1e-3)


SMALL = {"vocab_size": 64, "bos_token_id": 1, "eos_token_id": 2}
FAMILIES: dict[str, Any] = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SIZES)),
    "gpt2": lambda: GPT2LMHeadModel(GPT2Config(n_embd=64, n_layer=2, n_head=4, **SMALL)),
    "t5": lambda: T5ForConditionalGeneration(
        T5Config(d_model=64, d_kv=16, d_ff=96, num_layers=2, num_heads=4, vocab_size=64)
    ),
}


@pytest.mark.parametrize(("family", "layers"), [("llama", 14), ("gpt2", 8), ("t5", 32)])
@torch.no_grad()
def test_gptq_writes_what_is_read(family: str, layers: int, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = FAMILIES[family]().eval()
    ids = torch.randint(3, 64, (4, 2, 16))
    more = {"decoder_input_ids": ids[0, :, :7]} if family == "t5" else {}
    expected = model(ids[0], **more).logits
    gptq(model, [{"input_ids": row, **more} for row in ids], group_size=32, save_dir=tmp_path)
    found = model(ids[0], **more).logits
    assert torch.nn.functional.cosine_similarity(found.flatten(), expected.flatten(), 0) > 0.99
    other = FAMILIES[family]().eval()
    replaced = replace_linears_from_checkpoint(other, *load_low_precision_checkpoint(tmp_path))
    assert len(replaced.layers) == layers and not replaced.unused and not replaced.dense
    assert torch.equal(other(ids[0], **more).logits, found)


@torch.no_grad()
def test_saved_folders_are_checkpoints(tmp_path: Path) -> None:
    import ipex_llm

    model = make_model("llama")
    quantize_linears(model, woq_qconfig(weight_dtype=2, group_size=32), modules_to_skip=["lm_head"])
    ids = torch.tensor([[1, 2, 3, 60]])
    expected = model(ids).logits
    save(
        ipex_llm.optimize(model, dtype=torch.float32), tmp_path / "m"
    )  # packed side by side by then
    assert torch.equal(load(tmp_path / "m")(ids).logits, expected)
    other = make_model("llama")
    replace_linears_from_checkpoint(other, *load_low_precision_checkpoint(tmp_path / "m"))
    assert torch.equal(other(ids).logits, expected)

# SPDX-License-Identifier: Apache-2.0
"""A tiny Llama with quantized weights, as a state dict, as a folder, and as the float model that computes the same."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, LlamaConfig

P = pytest.importorskip("packers", reason="needs the tests of ipex-quant")
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 16, "sym": False, "desc_act": False}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 16, "zero_point": True, "version": "gemm"}
CONFIG = LlamaConfig(
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=8,
    num_key_value_heads=4,
    vocab_size=50,
    max_position_embeddings=64,
    tie_word_embeddings=False,
)
SIZES = {
    "self_attn.q_proj": (64, 64),
    "self_attn.k_proj": (32, 64),
    "self_attn.v_proj": (32, 64),
    "self_attn.o_proj": (64, 64),
    "mlp.gate_proj": (96, 64),
    "mlp.up_proj": (96, 64),
    "mlp.down_proj": (64, 96),
}


def make_model() -> Any:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(CONFIG).eval()


def checkpoint(pack: Callable[..., Any] = P.gptq, **options: Any) -> tuple[dict[str, Any], Any]:
    """Return a state dict with quantized linear layers and the float model that computes the same."""
    model = make_model()
    state: dict[str, Any] = {}
    for i in range(CONFIG.num_hidden_layers):
        for j, (part, (n, k)) in enumerate(SIZES.items()):
            name = f"model.layers.{i}.{part}"
            tensors, weight = pack(n, k, seed=10 * i + j, **options)
            key = "weight_scale_inv" if "weight_scale_inv" in tensors else "scales"
            key = key if key in tensors else "weight_scale"
            tensors[key] = (tensors[key] / 64).to(tensors[key].dtype)  # keep activations small
            state |= P.state_of(name, tensors)
            exact = tensors[key].float()
            model.get_submodule(name).weight.data = rescaled(weight, exact)
    for key, value in model.state_dict().items():
        if not any(part in key for part in SIZES):
            state[key] = value.clone()
    return state, model


def rescaled(weight: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Return the weight with scales that are 1/64 of what they were: a power of two, so exact."""
    assert scales.min() > 0.001  # no subnormal float16
    return weight / 64


def write(
    folder: Path,
    state: dict[str, Any],
    config: dict[str, Any],
    files: int = 1,
    beside: str | None = None,
    suffix: str = "safetensors",
) -> Path:
    folder.mkdir(exist_ok=True)
    described = CONFIG.to_dict()
    if beside is None:
        described["quantization_config"] = config
    else:
        (folder / beside).write_text(json.dumps(config))
    (folder / "config.json").write_text(json.dumps(described))
    keys = list(state)
    stem = "model" if suffix == "safetensors" else "pytorch_model"
    table = {}
    for i in range(files):
        part = {key: state[key].contiguous() for key in keys[i::files]}
        name = f"{stem}.{suffix}" if files == 1 else f"{stem}-{i + 1:05}-of-{files:05}.{suffix}"
        if suffix == "safetensors":
            save_file(part, folder / name)
        else:
            torch.save(part, folder / name)
        table |= dict.fromkeys(part, name)
    if files > 1:
        index = {"metadata": {}, "weight_map": table}
        (folder / f"{stem}.{suffix}.index.json").write_text(json.dumps(index))
    return folder


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        result: torch.Tensor = model(torch.arange(12).view(2, 6)).logits
    return result


FORMATS: list[Any] = [
    pytest.param(P.gptq, {}, GPTQ, id="gptq"),
    pytest.param(P.gptq, {"act_order": True}, {**GPTQ, "desc_act": True}, id="gptq-act_order"),
    pytest.param(P.gptq, {"second": True}, {**GPTQ, "checkpoint_format": "gptq_v2"}, id="gptq_v2"),
    pytest.param(P.gptq, {"bits": 8}, {**GPTQ, "bits": 8}, id="gptq-8"),
    pytest.param(P.awq, {}, AWQ, id="awq"),
    pytest.param(P.awq, {}, {**AWQ, "quant_method": "rtn"}, id="rtn"),
    pytest.param(P.gptq, {}, {**GPTQ, "quant_method": "auto-round"}, id="auto-round"),
    pytest.param(P.int8, {}, {"quant_method": "int8"}, id="int8"),
    pytest.param(P.fp8, {}, {"quant_method": "fp8", "weight_block_size": [128, 128]}, id="fp8"),
    pytest.param(
        P.compressed, {}, P.compressed_config(4, 16, True, "pack-quantized"), id="compressed"
    ),
]

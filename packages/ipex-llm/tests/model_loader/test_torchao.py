# SPDX-License-Identifier: Apache-2.0
"""Models that torchao has quantized, taken as they are, and written in torchao's form."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ipex_llm
from ipex_core.errors import OpArgumentError
from ipex_llm.optimization.proof.small import randomize
from ipex_quant import WeightOnlyQuantizedLinear, WoqWeightDtype, woq_qconfig
from ipex_quant.weight_only.torchao import read_weight, replace_torchao, save_torchao

transformers = pytest.importorskip("transformers")
ao = pytest.importorskip("torchao.quantization")


def _model() -> Any:
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
    )
    return randomize(transformers.LlamaForCausalLM(config)).bfloat16()


CONFIGS: dict[str, Any] = {
    "int8": lambda: ao.Int8WeightOnlyConfig(version=2),
    "int8 dynamic": lambda: ao.Int8DynamicActivationInt8WeightConfig(version=2),
    "int4": lambda: ao.IntxWeightOnlyConfig(torch.int4, ao.PerGroup(32)),
    "int4 dynamic": lambda: ao.Int8DynamicActivationIntxWeightConfig(
        weight_dtype=torch.int4, weight_granularity=ao.PerGroup(32)
    ),
    "float8": lambda: ao.Float8WeightOnlyConfig(),
}
IDS = torch.tensor([[5, 9, 33, 2, 41, 17]])


def _reference(model: nn.Module) -> Any:
    """Return a copy in float32 with the weights that the codes of torchao stand for."""
    plain = _model().float()
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            weight: Any = module.weight
            values = weight.dequantize() if hasattr(weight, "dequantize") else weight
            plain.get_submodule(name).weight = nn.Parameter(values.detach().float(), False)
    return plain


@pytest.mark.parametrize("name", CONFIGS)
@torch.no_grad()
def test_weights_are_taken_as_they_are(name: str) -> None:
    model = _model()
    ao.quantize_(model, CONFIGS[name]())
    layer = model.model.layers[0].mlp.up_proj
    codes, _ = read_weight(layer.weight)
    exact = codes.dequantize(torch.float32)
    wanted = layer.weight.dequantize().float()
    torch.testing.assert_close(exact, wanted, rtol=1e-2, atol=1e-2 * float(wanted.abs().max()))
    reference = _reference(model)
    fast = ipex_llm.optimize(model, dtype=torch.bfloat16)
    assert ipex_llm.plan(_quantized(name), dtype=torch.bfloat16).depth == 3
    kinds = {type(m) for m in fast.model.layers.modules() if hasattr(m, "in_features")}
    assert kinds and all(issubclass(k, WeightOnlyQuantizedLinear) for k in kinds)
    got, want = fast(IDS).logits.float(), reference(IDS).logits
    off = 1 - nn.functional.cosine_similarity(got, want, dim=-1)
    assert float(off.median()) < (2e-2 if "dynamic" in name else 2e-3)


def _quantized(name: str) -> Any:
    model = _model()
    ao.quantize_(model, CONFIGS[name]())
    return model


def test_int4_tensor_in_nibbles() -> None:
    """`Int4Tensor`, which torchao makes on GPUs only: ``scale * code + zero_point``."""
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(-8, 8, (32, 64), generator=generator, dtype=torch.int8)
    scale = torch.rand(2, 32, generator=generator) + 0.1
    zero = torch.randn(2, 32, generator=generator)
    low, high = codes[:, ::2] & 0xF, codes[:, 1::2] << 4
    tensor = ao.Int4Tensor(low | high, scale, zero, [1, 32], torch.Size([32, 64]))
    weight, _ = read_weight(tensor)
    by_group = codes.view(32, 2, 32).float()
    want = (by_group * scale.t().unsqueeze(-1) + zero.t().unsqueeze(-1)).view(32, 64)
    torch.testing.assert_close(weight.dequantize(torch.float32), want, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    ("kind", "group"),
    [(WoqWeightDtype.INT8, -1), (WoqWeightDtype.INT4, 32), (WoqWeightDtype.FP8, -1)],
)
@torch.no_grad()
def test_saved_for_transformers(kind: Any, group: int, tmp_path: Path) -> None:
    config = woq_qconfig(weight_dtype=kind, group_size=group)
    fast = ipex_llm.optimize(_model(), dtype=torch.bfloat16, quantization_config=config)
    save_torchao(fast, tmp_path)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    weight = loaded.model.layers[1].mlp.down_proj.weight
    assert type(weight).__module__.startswith("torchao")
    layer = fast.get_submodule("model.layers.1.mlp.down_proj")
    torch.testing.assert_close(
        weight.dequantize().float(), layer.dequantize(torch.float32), rtol=1e-2, atol=1e-2
    )
    got, want = loaded(IDS).logits.float(), fast(IDS).logits.float()
    assert float((1 - nn.functional.cosine_similarity(got, want, dim=-1)).median()) < 2e-3
    # And back again.
    again = ipex_llm.optimize(copy.deepcopy(loaded), dtype=torch.bfloat16)
    back = again(IDS).logits.float()
    assert float((1 - nn.functional.cosine_similarity(back, want, dim=-1)).median()) < 1e-3


def test_bad_input(tmp_path: Path) -> None:
    with pytest.raises(OpArgumentError, match="must have weight-only quantized layers"):
        save_torchao(_model(), tmp_path)
    with pytest.raises(OpArgumentError, match="without config"):
        save_torchao(nn.Linear(4, 4), tmp_path)
    model = _model()
    config = woq_qconfig(weight_dtype=WoqWeightDtype.NF4, group_size=32)
    with pytest.raises(OpArgumentError, match="got nf4"):
        save_torchao(ipex_llm.optimize(model, quantization_config=config), tmp_path)
    with pytest.raises(OpArgumentError, match="of two dimensions, got a Tensor"):
        read_weight(torch.ones(2, 2))
    odd = ao.Int8Tensor(
        torch.ones(4, 32, dtype=torch.int8),
        torch.ones(4, 1),
        [1, 32],
        torch.float32,
        act_pre_scale=torch.ones(32),
    )
    linear = nn.Sequential(nn.Linear(32, 4))
    linear[0].weight = nn.Parameter(odd, requires_grad=False)
    with pytest.raises(OpArgumentError, match="without act_pre_scale"):
        replace_torchao(linear)

# SPDX-License-Identifier: Apache-2.0
"""Decoders with parts that no plan can say: they run on the layers of transformers, and nothing raises."""

from __future__ import annotations

import importlib

import pytest
import torch

import ipex_llm
from ipex_quant import WoqWeightDtype, get_weight_only_quant_qconfig_mapping

SMALL = {"vocab_size": 64, "hidden_size": 32, "max_position_embeddings": 64}


def decoder(name: str, kind: str, **options: object) -> torch.nn.Module:
    torch.manual_seed(0)
    module = pytest.importorskip(f"transformers.models.{name}")
    importlib.import_module(f"transformers.models.{name}.modeling_{name}")
    config = getattr(module, f"{kind}Config")(**SMALL, **options)
    return getattr(module, f"{kind}ForCausalLM")(config).eval()  # type: ignore[no-any-return]


@torch.no_grad()
def test_experts_without_weights() -> None:
    """LongCat-Flash: the router has outputs for experts that return their input."""
    model = decoder(
        "longcat_flash",
        "LongcatFlash",
        num_layers=1,
        num_attention_heads=2,
        ffn_hidden_size=32,
        q_lora_rank=16,
        kv_lora_rank=16,
        qk_nope_head_dim=8,
        qk_rope_head_dim=8,
        head_dim=8,
        v_head_dim=8,
        moe_topk=2,
        n_routed_experts=4,
        zero_expert_num=2,
        expert_ffn_hidden_size=16,
    )
    ids = torch.arange(10)[None]
    want = model(ids).logits
    mapping = get_weight_only_quant_qconfig_mapping(weight_dtype=WoqWeightDtype.INT8)
    got = ipex_llm.optimize(model, quantization_config=mapping)(ids).logits
    torch.testing.assert_close(got, want, rtol=0.05, atol=0.05)


@torch.no_grad()
def test_odd_number_of_rotated_features() -> None:
    """MiMo-V2-Flash rotates a third of a head."""
    model = decoder(
        "mimo_v2_flash",
        "MiMoV2Flash",
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        v_head_dim=16,
        intermediate_size=32,
        partial_rotary_factor=0.334,
    )
    ids = torch.arange(10)[None]
    want = model(ids).logits
    got = ipex_llm.optimize(model)(ids).logits
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)

# SPDX-License-Identifier: Apache-2.0
"""Quantized checkpoints divided among ranks."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from quantized_llama import AWQ, CONFIG, FORMATS, GPTQ, SIZES, P, checkpoint, write
from torch import nn

from ipex_core.errors import OpArgumentError
from ipex_llm.utils import load_low_precision_checkpoint, shard_low_precision_checkpoint
from ipex_quant import linear_from, read_linear


def dequantized(state: dict[str, Any], name: str, config: Any) -> torch.Tensor:
    weight = read_linear(state, name, config)
    layer: Any = linear_from(weight)
    wanted = weight.dequantize()
    found = layer.weight if type(layer) is nn.Linear else layer.dequantize()
    assert torch.equal(found, wanted)
    return wanted


SHARDED: list[Any] = [case for case in FORMATS if case.id not in ("fp8", "compressed")]


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize(("pack", "options", "config"), SHARDED)
def test_parts_make_the_whole(
    pack: Callable[..., Any], options: Any, config: Any, world_size: int
) -> None:
    state, model = checkpoint(pack, **options)
    parts = [
        shard_low_precision_checkpoint(
            state,
            CONFIG,
            rank,
            world_size,
            config["quant_method"],
            8,
            config.get("desc_act", False),
            config.get("bits", 4),
        )
        for rank in range(world_size)
    ]
    heads = [2, 1, 1] if world_size == 3 else [4 // world_size] * world_size
    for i in range(2):
        for part in SIZES:
            name = f"model.layers.{i}.{part}"
            whole = model.get_submodule(name).weight
            pieces = [dequantized(p, name, config) for p in parts]
            dim = 1 if part in ("self_attn.o_proj", "mlp.down_proj") else 0
            assert torch.equal(torch.cat(pieces, dim=dim), whole)
            if part == "self_attn.k_proj":
                assert [len(p) // 8 for p in pieces] == heads
    for p in parts:
        assert torch.equal(p["lm_head.weight"], state["lm_head.weight"])


def test_parts_of_a_folder(tmp_path: Path) -> None:
    state, model = checkpoint()
    folder = write(tmp_path / "m", state, GPTQ)
    name = "model.layers.0.mlp.down_proj"
    pieces = []
    for rank in range(2):
        part, config = load_low_precision_checkpoint(folder, rank, 2)
        pieces.append(dequantized(part, name, config))
    assert torch.equal(torch.cat(pieces, dim=1), model.get_submodule(name).weight)


@pytest.mark.parametrize("pack", [P.gptq, P.awq])
def test_parts_that_begin_within_a_group(
    pack: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    """Two heads of 16 share a group of 32; three ranks of 4 heads: 2, 1, 1."""
    tensors, whole = pack(24, 64, 32)
    config = {**(GPTQ if pack is P.gptq else AWQ), "group_size": 32}
    state = P.state_of("a.o_proj", tensors)
    heads = {"num_attention_heads": 4}
    for drop in (False, True):
        if drop:
            state.pop("a.o_proj.g_idx", None)
        pieces = []
        for rank in range(3):
            part = shard_low_precision_checkpoint(
                state, heads, rank, 3, config["quant_method"], 1, False, 4
            )
            with caplog.at_level(logging.WARNING, "ipex"):
                pieces.append(dequantized(part, "a.o_proj", config))
        assert torch.equal(torch.cat(pieces, dim=1), whole)
    assert not caplog.records  # all of them are packed, with smaller groups


def test_bias_is_added_once() -> None:
    tensors, _ = P.gptq(64, 64)
    state = P.state_of("a.o_proj", tensors) | {"a.o_proj.bias": torch.ones(64)}
    state |= P.state_of("a.q_proj", tensors) | {"a.q_proj.bias": torch.arange(64.0)}
    parts = [
        shard_low_precision_checkpoint(state, CONFIG, r, 2, "gptq", 8, False, 4) for r in (0, 1)
    ]
    assert "a.o_proj.bias" in parts[0] and "a.o_proj.bias" not in parts[1]
    assert torch.equal(torch.cat([p["a.q_proj.bias"] for p in parts]), torch.arange(64.0))


def test_fused_projections() -> None:
    """Rows of qkv_proj: all query heads, all key heads, all value heads; of gate_up_proj: halves."""
    tensors, whole = P.gptq(128, 64)  # 8 + 4 + 4 heads of 8
    gate, up_whole = P.gptq(192, 64, seed=1)
    state = P.state_of("a.qkv_proj", tensors) | P.state_of("a.gate_up_proj", gate)
    parts = [
        shard_low_precision_checkpoint(state, CONFIG, r, 2, "gptq", 8, False, 4) for r in (0, 1)
    ]
    second = dequantized(parts[1], "a.qkv_proj", GPTQ)
    rows = [*range(32, 64), *range(80, 96), *range(112, 128)]
    assert torch.equal(second, whole[rows])
    second = dequantized(parts[1], "a.gate_up_proj", GPTQ)
    assert torch.equal(second, torch.cat([up_whole[48:96], up_whole[144:]]))


def test_float_layers_are_split_too() -> None:
    weight = torch.randn(64, 64)
    state = {"a.q_proj.weight": weight, "a.o_proj.weight": weight}
    part = shard_low_precision_checkpoint(state, CONFIG, 1, 2, "gptq", 8, False, 4)
    assert torch.equal(part["a.q_proj.weight"], weight[32:])
    assert torch.equal(part["a.o_proj.weight"], weight[:, 32:])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"world_size": 5}, "world_size must be at most the number of key/value heads, 4, got 5"),
        ({"world_size": 0}, "world_size must be positive"),
        ({"rank": 2}, r"rank must be in 0\.\.1, got 2"),
        ({"quantization_method": "fp8"}, "quantization_method must be one of gptq, awq"),
        ({"tp_grain_size": 0}, "tp_grain_size must be positive"),
        ({"model_config": {}}, "model_config must have num_attention_heads"),
    ],
)
def test_sharding_errors(change: dict[str, Any], message: str) -> None:
    state, _ = checkpoint()
    arguments: dict[str, Any] = {
        "low_precision_checkpoint": state,
        "model_config": CONFIG,
        "rank": 0,
        "world_size": 2,
        "quantization_method": "gptq",
        "tp_grain_size": 8,
        "desc_act": False,
        "bits": 4,
    }
    with pytest.raises(OpArgumentError, match=message):
        shard_low_precision_checkpoint(**{**arguments, **change})


def test_layers_that_cannot_be_split() -> None:
    tensors, _ = P.gptq(64, 64)
    state = P.state_of("a.query_key_value", tensors)
    with pytest.raises(OpArgumentError, match="belong to a layer with one projection"):
        shard_low_precision_checkpoint(state, CONFIG, 0, 2, "gptq", 8, False, 4)
    tensors, _ = P.gptq(20, 64)
    state = P.state_of("a.up_proj", tensors)
    with pytest.raises(OpArgumentError, match=r"features of a\.up_proj must be divisible among 2"):
        shard_low_precision_checkpoint(state, CONFIG, 0, 2, "gptq", 8, False, 4)

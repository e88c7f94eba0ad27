# SPDX-License-Identifier: Apache-2.0
"""Quantised checkpoints: from folders, in parts for ranks, into models."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, LlamaConfig

from ipex_core.errors import OpArgumentError
from ipex_llm.quantization import IPEXWeightOnlyQuantizedLinear, QuantDtype, QuantMethod
from ipex_llm.utils import (
    load_low_precision_checkpoint,
    replace_linears_from_checkpoint,
    shard_low_precision_checkpoint,
)
from ipex_quant import (
    WeightOnlyQuantizedLinear,
    WoqLowpMode,
    WoqWeightDtype,
    get_weight_only_quant_qconfig_mapping,
    linear_from,
    read_linear,
    woq_qconfig,
)

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
    """Return a state dict with quantised linear layers and the float model that computes the same."""
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


# -- folders --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", ["safetensors", "bin"])
@pytest.mark.parametrize("files", [1, 3])
def test_load(tmp_path: Path, files: int, suffix: str) -> None:
    state, _ = checkpoint()
    folder = write(tmp_path / "m", state, GPTQ, files, suffix=suffix)
    found, config = load_low_precision_checkpoint(folder)
    assert config == GPTQ
    assert set(found) == set(state)
    assert all(torch.equal(found[key], state[key]) for key in state)
    assert load_low_precision_checkpoint(str(folder))[1] == GPTQ


def test_file_of_ipex(tmp_path: Path) -> None:
    """A state dict without ``g_idx`` and configuration, as IPEX's ``gptq`` has written it."""
    state, reference = checkpoint(group=16)
    path = tmp_path / "gptq_checkpoint_g16.pt"
    torch.save({key: value for key, value in state.items() if "g_idx" not in key}, path)
    found, config = load_low_precision_checkpoint(path)
    assert config == {"quant_method": "gptq", "bits": 4} and "lm_head.weight" in found
    model = make_model()
    assert len(replace_linears_from_checkpoint(model, found, config).layers) == 14
    torch.testing.assert_close(logits(model), logits(reference), rtol=1e-3, atol=1e-3)
    with pytest.raises(OpArgumentError, match=r"world_size must be 1 for \.pt files"):
        load_low_precision_checkpoint(path, 0, 2)
    torch.save({"a.weight": torch.ones(2)}, path)
    with pytest.raises(OpArgumentError, match="pathname must have gptq weights"):
        load_low_precision_checkpoint(path)
    path.write_bytes(b"nothing")
    with pytest.raises(OpArgumentError, match="must be a complete weight file"):
        load_low_precision_checkpoint(path)


def test_configuration_beside(tmp_path: Path) -> None:
    state, _ = checkpoint()
    old = {"bits": 4, "group_size": 16, "desc_act": False}
    folder = write(tmp_path / "m", state, old, beside="quantize_config.json")
    found, config = load_low_precision_checkpoint(folder)
    assert config == old
    replace_linears_from_checkpoint(make_model(), found, config)


def test_folder_errors(tmp_path: Path) -> None:
    load = load_low_precision_checkpoint
    with pytest.raises(OpArgumentError, match="pathname must be a model folder"):
        load(tmp_path / "nothing")
    with pytest.raises(OpArgumentError, match=r"pathname must have a config\.json"):
        load(tmp_path)
    (tmp_path / "config.json").write_text("{]")
    with pytest.raises(OpArgumentError, match=r"config\.json must be a readable JSON file"):
        load(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(OpArgumentError, match="pathname must have a quantization_config"):
        load(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": GPTQ}))
    with pytest.raises(OpArgumentError, match="pathname must have weights"):
        load(tmp_path)
    save_file({"a.weight": torch.ones(2)}, tmp_path / "model.safetensors")
    with pytest.raises(OpArgumentError, match="pathname must have gptq weights, got none"):
        load(tmp_path)
    odd = json.dumps({"quantization_config": {"quant_method": "quip"}})
    (tmp_path / "config.json").write_text(odd)
    with pytest.raises(OpArgumentError, match=r"quant_method must be one of .*, got quip"):
        load(tmp_path)


@pytest.mark.parametrize("suffix", ["safetensors", "bin"])
def test_missing_and_damaged_shards(tmp_path: Path, suffix: str) -> None:
    state, _ = checkpoint()
    folder = write(tmp_path / "m", state, GPTQ, 3, suffix=suffix)
    second = next(folder.glob(f"*00002*.{suffix}"))
    data = second.read_bytes()
    second.write_bytes(data[: len(data) // 2])
    with pytest.raises(OpArgumentError, match=r"00002.* must be a complete weight file"):
        load_low_precision_checkpoint(folder)
    second.unlink()
    with pytest.raises(OpArgumentError, match=r"must have all shards of .*, got no .*00002"):
        load_low_precision_checkpoint(folder)
    next(folder.glob("*.index.json")).unlink()
    with pytest.raises(OpArgumentError, match=r"must have all shards of .*, got no .*00002"):
        load_low_precision_checkpoint(folder)


def test_index_that_promises_more(tmp_path: Path) -> None:
    state, _ = checkpoint()
    folder = write(tmp_path / "m", state, GPTQ, 2)
    index = folder / "model.safetensors.index.json"
    table = json.loads(index.read_text())
    table["weight_map"]["more.weight"] = "model-00001-of-00002.safetensors"
    index.write_text(json.dumps(table))
    with pytest.raises(OpArgumentError, match=r"every tensor of its index, got no more\.weight"):
        load_low_precision_checkpoint(folder)
    table["weight_map"]["more.weight"] = 300 * "x"  # longer than a name can be
    index.write_text(json.dumps(table))
    with pytest.raises(OpArgumentError, match=r"must have all shards of .*, got no x"):
        load_low_precision_checkpoint(folder)


# -- into models ----------------------------------------------------------------------------------------------

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


@pytest.mark.parametrize(("pack", "options", "config"), FORMATS)
def test_model_computes_the_same(
    tmp_path: Path, pack: Callable[..., Any], options: Any, config: Any
) -> None:
    state, reference = checkpoint(pack, **options)
    folder = write(tmp_path / "m", state, config)
    found, quant_config = load_low_precision_checkpoint(folder)
    model = make_model()
    torch.nn.init.zeros_(model.lm_head.weight)  # comes from the checkpoint
    done = replace_linears_from_checkpoint(model, found, quant_config)
    assert len(done.layers) == 14 and not done.dense and not done.unused
    assert "lm_head.weight" in done.loaded
    for name in done.layers:
        layer: Any = model.get_submodule(name)
        assert type(layer) is WeightOnlyQuantizedLinear
        assert torch.equal(layer.dequantize(), reference.get_submodule(name).weight)
    torch.testing.assert_close(logits(model), logits(reference), rtol=1e-3, atol=1e-3)


def test_model_on_the_meta_device() -> None:
    state, reference = checkpoint()
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(CONFIG)
    model.eval()
    replace_linears_from_checkpoint(model, state, GPTQ)
    torch.testing.assert_close(logits(model), logits(reference), rtol=1e-3, atol=1e-3)


def test_missing_weights_of_a_meta_model() -> None:
    state, _ = checkpoint()
    del state["model.layers.1.input_layernorm.weight"]
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(CONFIG)
    with pytest.raises(OpArgumentError, match=r"got no model\.layers\.1\.input_layernorm\.weight"):
        replace_linears_from_checkpoint(model, state, GPTQ)


def test_names_without_the_prefix_and_taking() -> None:
    state, reference = checkpoint()
    short = {key.removeprefix("model."): value for key, value in state.items()}
    short["strange.inv_freq"] = torch.ones(3)
    calls: list[Any] = []
    model = make_model()
    done = replace_linears_from_checkpoint(
        model, short, GPTQ, take=True, progress=lambda *a: calls.append(a)
    )
    assert done.unused == ("strange.inv_freq",)
    assert not any("qweight" in key for key in short)
    assert calls[-1] == (14, 14, "model.layers.1.mlp.down_proj")
    torch.testing.assert_close(logits(model), logits(reference), rtol=1e-3, atol=1e-3)


def test_low_precision_mode_comes_from_the_configuration() -> None:
    state, reference = checkpoint()
    model = make_model()
    mapping = get_weight_only_quant_qconfig_mapping(
        weight_dtype=WoqWeightDtype.INT4, lowp_mode=WoqLowpMode.INT8, group_size=16
    )
    replace_linears_from_checkpoint(model, state, GPTQ, mapping)
    assert model.model.layers[0].mlp.up_proj.modes == ("int8", "per_batch_ic_block_sym")
    near = F.cosine_similarity(logits(model).flatten(), logits(reference).flatten(), 0)
    assert near > 0.99


def test_modules_of_another_library() -> None:
    """A model that was loaded with layers that hold the tensors of the checkpoint."""

    class Holder(nn.Module):
        def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
            super().__init__()
            for name, value in tensors.items():
                self.register_buffer(name, value)

    state, reference = checkpoint()
    model = make_model()
    model.load_state_dict({k: v for k, v in state.items() if not any(p in k for p in SIZES)}, False)
    for i in range(2):
        for part in SIZES:
            name = f"model.layers.{i}.{part}"
            held = {t: state[f"{name}.{t}"] for t in ("qweight", "qzeros", "scales", "g_idx")}
            model.set_submodule(name, Holder(held))
    replace_linears_from_checkpoint(model, model.state_dict(), GPTQ)
    torch.testing.assert_close(logits(model), logits(reference), rtol=1e-3, atol=1e-3)


def test_does_not_fit_the_model() -> None:
    state, _ = checkpoint()
    with pytest.raises(OpArgumentError, match="group_size -1 or 16, as the checkpoint has, got 64"):
        replace_linears_from_checkpoint(
            make_model(), state, GPTQ, woq_qconfig(weight_dtype=2, group_size=64)
        )
    with pytest.raises(OpArgumentError, match=r"weight_dtype of INT4, NF4, .* got INT8"):
        replace_linears_from_checkpoint(make_model(), state, GPTQ, woq_qconfig())
    with pytest.raises(OpArgumentError, match="scales must have 2 groups of 32 for 64"):
        replace_linears_from_checkpoint(make_model(), state, {**GPTQ, "group_size": 32})
    tensors, _ = P.gptq(8, 16)
    more = state | P.state_of("model.layers.9.up", tensors)
    with pytest.raises(OpArgumentError, match=r"of this model only, got model\.layers\.9\.up"):
        replace_linears_from_checkpoint(make_model(), more, GPTQ)
    name = "model.layers.0.mlp.up_proj"
    other = state | P.state_of(name, P.gptq(48, 64)[0])
    with pytest.raises(OpArgumentError, match=rf"{name} must have shape \[96, 64\].*\[48, 64\]"):
        replace_linears_from_checkpoint(make_model(), other, GPTQ)
    wide = state | {"lm_head.weight": torch.ones(51, 64)}
    with pytest.raises(OpArgumentError, match=r"lm_head\.weight must have shape \[50, 64\]"):
        replace_linears_from_checkpoint(make_model(), wide, GPTQ)
    with pytest.raises(OpArgumentError, match="state_dict must have quantised layers"):
        replace_linears_from_checkpoint(make_model(), {}, GPTQ)


# -- parts for ranks ------------------------------------------------------------------------------------------


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


# -- IPEX's layer ---------------------------------------------------------------------------------------------


def test_layer_in_the_order_of_clients() -> None:
    tensors, wanted = P.gptq()
    bias = torch.randn(40)
    arguments = (tensors["qweight"], tensors["scales"], tensors["qzeros"], 64, 40, None, bias, 16)
    for g_idx in (tensors["g_idx"], None):
        for method, dtype in ((QuantMethod.GPTQ_GEMM, QuantDtype.INT4), (0, 0)):
            layer = IPEXWeightOnlyQuantizedLinear.from_weight(*arguments, g_idx, method, dtype)
            assert type(layer) is IPEXWeightOnlyQuantizedLinear
            x = torch.randn(2, 64).bfloat16()
            wanted_y = F.linear(x.float(), wanted, bias)
            torch.testing.assert_close(layer(x, unused=1).float(), wanted_y, rtol=2e-2, atol=0.5)
    tensors, wanted = P.awq()
    arguments = (tensors["qweight"], tensors["scales"], tensors["qzeros"], 64, 40, None, bias, 16)
    layer = IPEXWeightOnlyQuantizedLinear.from_weight(*arguments, None, 1, 0)
    assert torch.equal(layer.dequantize(), wanted)
    with pytest.raises(OpArgumentError, match="dtype must be one of"):
        IPEXWeightOnlyQuantizedLinear.from_weight(*arguments, None, 1, 1)

# SPDX-License-Identifier: Apache-2.0
"""Quantized checkpoints: from folders into models."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from quantized_llama import CONFIG, FORMATS, GPTQ, SIZES, P, checkpoint, logits, make_model, write
from safetensors.torch import save_file
from torch import nn
from torch.nn import functional as F
from transformers import AutoModelForCausalLM

import ipex_llm
from ipex_core.errors import OpArgumentError
from ipex_llm.quantization import IPEXWeightOnlyQuantizedLinear, QuantDtype, QuantMethod
from ipex_llm.utils import load_low_precision_checkpoint, replace_linears_from_checkpoint
from ipex_quant import (
    WeightOnlyQuantizedLinear,
    WoqLowpMode,
    WoqWeightDtype,
    get_weight_only_quant_qconfig_mapping,
    woq_qconfig,
)
from ipex_quant.weight.tensor import QuantizedWeight

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


@pytest.mark.filterwarnings("ignore")  # torch's, of kinds that it means to drop
@pytest.mark.parametrize("suffix", ["bin", "pt"])
@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: torch.eye(4).to_sparse(), "layout torch.sparse_coo"),
        (lambda: torch.eye(4).to_sparse_csr(), "layout torch.sparse_csr"),
        (lambda: torch.empty(1 << 40, device="meta"), "on the meta device"),
        (lambda: torch.ones(4, dtype=torch.complex64), "torch.complex64"),
        (lambda: torch.quantize_per_tensor(torch.ones(4), 1.0, 0, torch.qint8), "quantized"),
        (lambda: torch.ones(1).expand(1 << 42), "with 4 bytes"),
    ],
    ids=["sparse", "csr", "meta", "complex", "quantized", "expanded"],
)
def test_tensors_that_only_pickles_have(
    make: Callable[[], torch.Tensor], message: str, suffix: str, tmp_path: Path
) -> None:
    state, _ = checkpoint()
    folder = write(tmp_path / "m", state, GPTQ, 1, suffix="bin")
    (path,) = folder.glob("*.bin")
    torch.save({**state, "model.layers.0.self_attn.q_proj.scales": make()}, path)
    if suffix == "pt":
        folder = path.rename(folder / "a.pt")
    with pytest.raises(OpArgumentError, match=f"q_proj.scales of .* {message}"):
        load_low_precision_checkpoint(folder)


@pytest.mark.parametrize("name", [5, ("a",), b"a", None])
def test_names_that_only_pickles_have(name: object, tmp_path: Path) -> None:
    state, _ = checkpoint()
    folder = write(tmp_path / "m", state, GPTQ, 1, suffix="bin")
    (path,) = folder.glob("*.bin")
    torch.save({**state, name: torch.ones(1)}, path)
    with pytest.raises(OpArgumentError, match=r"names in .* must be texts, got"):
        load_low_precision_checkpoint(folder)


def test_weights_are_packed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Looking at a model does not pack weights that its program then packs side by side with others."""
    state, reference = checkpoint()
    found = load_low_precision_checkpoint(write(tmp_path / "m", state, GPTQ))
    rows: list[int] = []
    pack = QuantizedWeight.pack

    def counted(self: QuantizedWeight, order: str = "dot") -> torch.Tensor:
        rows.append(self.out_features)
        return pack(self, order)

    monkeypatch.setattr(QuantizedWeight, "pack", counted)
    model = ipex_llm.optimize(make_model(), low_precision_checkpoint=found)
    layers = [m for m in model.modules() if isinstance(m, WeightOnlyQuantizedLinear)]
    assert sum(rows) == sum(layer.out_features for layer in layers)
    torch.testing.assert_close(logits(model), logits(reference), rtol=2e-2, atol=2e-2)


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
    with pytest.raises(OpArgumentError, match="state_dict must have quantized layers"):
        replace_linears_from_checkpoint(make_model(), {}, GPTQ)


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

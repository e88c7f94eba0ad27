# SPDX-License-Identifier: Apache-2.0
"""Quantized models in ``from_pretrained`` of transformers."""

from __future__ import annotations

import copy
import json
import logging
import subprocess
import sys

import pytest
import torch
from small_llama import llama, padded
from torch import nn

import ipex_llm
import ipex_quant
from ipex_core.errors import OpArgumentError
from ipex_llm.integrations import IpexConfig, register_transformers
from ipex_quant.util.safetensors import CheckpointError, mapped

transformers = pytest.importorskip("transformers")


@pytest.fixture(autouse=True)
def registered():
    register_transformers()


@pytest.mark.parametrize("tied", [False, True], ids=["", "tied"])
@pytest.mark.parametrize("weights", ["INT4", "INT8"])
def test_from_pretrained_loads_what_save_wrote(weights, tied, tmp_path, caplog):
    model = llama(tie_word_embeddings=tied)
    kind = ipex_quant.WoqWeightDtype[weights]
    skip = ["lm_head"] if tied else []
    ipex_quant.quantize_linears(
        model, ipex_quant.woq_qconfig(weight_dtype=kind, group_size=32), skip
    )
    with torch.no_grad():
        wanted = model(**padded()).logits
    ipex_quant.save(model, tmp_path / "model")
    with caplog.at_level(logging.WARNING):
        again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert not [
        r for r in caplog.records if "newly initialized" in r.message or "not used" in r.message
    ]
    assert isinstance(again.model.layers[0].mlp.up_proj, ipex_quant.WeightOnlyQuantizedLinear)
    assert not any(t.is_meta for t in [*again.parameters(), *again.buffers()])
    with torch.no_grad():
        got = again(**padded()).logits
    torch.testing.assert_close(got, wanted, rtol=0, atol=0)
    # And once more: what was loaded can be saved and loaded.
    ipex_quant.save(again, tmp_path / "again")
    third = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "again")
    with torch.no_grad():
        torch.testing.assert_close(third(**padded()).logits, wanted, rtol=0, atol=0)


def test_from_pretrained_quantizes_while_loading(tmp_path):
    model = llama()
    model.save_pretrained(tmp_path / "float")
    config = IpexConfig("int8", group_size=-1)
    fast = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "float", quantization_config=config
    )
    assert isinstance(fast.model.layers[1].self_attn.o_proj, ipex_quant.WeightOnlyQuantizedLinear)
    assert type(fast.lm_head) is nn.Linear
    with torch.no_grad():
        got, wanted = fast(**padded()).logits, model(**padded()).logits
    assert nn.functional.cosine_similarity(got.flatten(), wanted.flatten(), 0) > 0.99


def test_wrong_configurations_raise_before_a_model_is_loaded():
    for error, text, arguments in (
        (ValueError, "weight_dtype must be one of", {"weight_dtype": "int3"}),
        (ValueError, "group_size must be -1 or a power of two, got 0", {"group_size": 0}),
        (ValueError, "lowp_mode must be", {"weight_dtype": "fp8", "lowp_mode": "INT8"}),
        (TypeError, "must be known, got group_sizes", {"group_sizes": 64}),
        (TypeError, "must be a list of texts, got 'o_proj'", {"modules_to_not_convert": "o_proj"}),
    ):
        with pytest.raises(error, match=text):
            IpexConfig(**arguments)
    assert IpexConfig("mxfp4").group_size == 32 and IpexConfig().group_size == 128


def test_only_the_cpu_as_device():
    from ipex_quant.io.transformers import IpexQuantizer

    quantizer = IpexQuantizer(IpexConfig("int8"))
    for device in ("auto", "cpu", {"": "cpu"}, {"": torch.device("cpu")}, None):
        quantizer.validate_environment(device_map=device)
    for device in ("cuda", {"": 0}, {"model": "cpu", "lm_head": "disk"}, {"": "meta"}):
        with pytest.raises(ValueError, match="device_map must be the CPU"):
            quantizer.validate_environment(device_map=device)


def test_layers_by_the_name_of_a_module_around_them(tmp_path):
    llama().save_pretrained(tmp_path)
    config = IpexConfig("int8", group_size=-1, modules_to_not_convert=["self_attn"])
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=config)
    left = {n.rpartition(".")[0] for n, m in model.named_modules() if type(m) is nn.Linear}
    assert left == {"model.layers.0.self_attn", "model.layers.1.self_attn"}


def test_models_whose_blocks_initialize_their_layers(tmp_path):
    shape = {
        "vocab_size": 96,
        "d_model": 64,
        "d_kv": 16,
        "d_ff": 64,
        "num_layers": 2,
        "num_heads": 4,
    }
    torch.manual_seed(0)
    config = transformers.T5Config(**shape, decoder_start_token_id=0)
    model = transformers.T5ForConditionalGeneration(config).eval()
    qconfig = ipex_quant.woq_qconfig(weight_dtype=ipex_quant.WoqWeightDtype.INT8)
    ipex_quant.quantize_linears(model, qconfig, ["lm_head"])
    ids = padded()["input_ids"]
    ipex_quant.save(model, tmp_path)
    again = transformers.AutoModelForSeq2SeqLM.from_pretrained(tmp_path)
    with torch.no_grad():
        got, wanted = (m(ids, decoder_input_ids=ids[:, :4]).logits for m in (again, model))
    torch.testing.assert_close(got, wanted, rtol=0, atol=0)


def test_what_transformers_cannot_do_with_a_saved_model(tmp_path, caplog):
    model = llama()
    ipex_quant.quantize_linears(model, ipex_quant.woq_qconfig(), ["lm_head"])
    ipex_quant.save(model, tmp_path)
    with pytest.raises(ValueError, match=r"must be LlamaForCausalLM for .*, got LlamaModel"):
        transformers.AutoModel.from_pretrained(tmp_path)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    with pytest.raises(ValueError, match="not serializable"):
        again.save_pretrained(tmp_path / "other")
    assert "ipex.quantization.save(model, folder) writes this model" in caplog.text


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("optimized", [False, True])
def test_save_pretrained_of_a_quantized_model(tied, optimized, tmp_path, caplog):
    """It says that it is quantized: transformers made the weights up before, and told so in a log."""
    model = llama(tie_word_embeddings=tied)
    qconfig = ipex_quant.woq_qconfig(weight_dtype=ipex_quant.WoqWeightDtype.INT8)
    if optimized:
        mapping = ipex_quant.get_weight_only_quant_qconfig_mapping(
            weight_dtype=ipex_quant.WoqWeightDtype.INT8
        )
        model = ipex_llm.optimize(model, dtype=torch.float32, quantization_config=mapping)
    else:
        ipex_quant.quantize_linears(model, qconfig, ["lm_head"] if tied else [])
    model.save_pretrained(tmp_path)
    ids = padded()["input_ids"]
    caplog.clear()
    for again in (
        ipex_quant.load(tmp_path),
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path),
    ):
        wanted, got = model.state_dict(), again.state_dict()
        assert wanted.keys() == got.keys() and all(torch.equal(wanted[k], got[k]) for k in wanted)
        if not optimized:
            with torch.no_grad():
                assert torch.equal(again(ids).logits, model(ids).logits)
        assert any(isinstance(m, ipex_quant.WeightOnlyQuantizedLinear) for m in again.modules())
    assert "newly initialized" not in caplog.text
    copy.deepcopy(model).save_pretrained(tmp_path / "copy")
    assert (tmp_path / "copy/config.json").read_text() == (tmp_path / "config.json").read_text()
    assert not hasattr(model.config, "quantization_config")


@pytest.mark.parametrize(
    "changes",
    [
        {"hidden_size": 1 << 21},
        {"vocab_size": 1 << 40},
        {"num_hidden_layers": 1 << 40},
        {"intermediate_size": 1 << 62},
        {"hidden_size": 0},
        {"num_attention_heads": 0},
    ],
    ids=str,
)
def test_load_of_a_config_that_asks_for_more_than_there_is(changes, tmp_path, monkeypatch):
    """Nothing is made but on the meta device."""
    model = llama()
    ipex_quant.quantize_linears(model, ipex_quant.woq_qconfig(weight_dtype=1), progress=False)
    ipex_quant.save(model, tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    made = []
    init = transformers.LlamaForCausalLM.__init__

    def watched(self, *args, **kwargs):
        made.append(torch.empty(0).device.type)
        init(self, *args, **kwargs)

    monkeypatch.setattr(transformers.LlamaForCausalLM, "__init__", watched)
    with pytest.raises((CheckpointError, OpArgumentError)):
        ipex_quant.load(tmp_path)
    assert set(made) <= {"meta"} or 0 in changes.values()


@pytest.mark.parametrize("name", ["mixtral", "gpt_neox", "gpt2"])
def test_save_pretrained_keeps_the_names_of_the_model(name, tmp_path):
    """Those of older checkpoints (one tensor for each expert) have no place in a quantized model."""
    from families import build

    model = build(name)
    qconfig = ipex_quant.woq_qconfig(weight_dtype=ipex_quant.WoqWeightDtype.INT8)
    ipex_quant.quantize_linears(model, qconfig, [])
    model.save_pretrained(tmp_path)
    ids = padded()["input_ids"]
    for again in (
        ipex_quant.load(tmp_path),
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path),
    ):
        with torch.no_grad():
            torch.testing.assert_close(again(ids).logits, model(ids).logits, rtol=1e-4, atol=1e-4)


def test_a_quantized_model_makes_its_folders_known(tmp_path):
    """Without a call of `register_transformers`: weights that are made up are no weights."""
    done = subprocess.run([sys.executable, "-c", ROUND_TRIP, str(tmp_path)], check=False)
    assert done.returncode == 0


ROUND_TRIP = """
import sys, torch, transformers, ipex_quant
shape = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
config = transformers.LlamaConfig(**shape, num_attention_heads=2, num_key_value_heads=1)
model = transformers.LlamaForCausalLM(config).eval()
ipex_quant.quantize_linears(model, ipex_quant.woq_qconfig(weight_dtype=1), ["lm_head"])
model.save_pretrained(sys.argv[1])
again = transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1])
ids = torch.arange(8).unsqueeze(0)
with torch.no_grad():
    assert torch.equal(again(ids).logits, model(ids).logits)
"""


@pytest.mark.parametrize("kind", ["AutoModelForCausalLM", "AutoModel"])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("writer", ["save", "save_pretrained"])
def test_transformers_alone_refuses_quantized_folders(writer, tied, kind, tmp_path, monkeypatch):
    """It would make up the weights of quantized layers, with no more than a warning."""
    model = llama(tie_word_embeddings=tied)
    ipex_quant.quantize_linears(model, IpexConfig("int8").qconfig(), ["lm_head"] if tied else [])
    if writer == "save":
        ipex_quant.save(model, tmp_path)
    else:
        model.save_pretrained(tmp_path)
    if not tied:  # what says that a layer is quantized is no key that a model does not expect
        model.load_state_dict(mapped(tmp_path / "model.safetensors"))
    for table in ("AUTO_QUANTIZER_MAPPING", "AUTO_QUANTIZATION_CONFIG_MAPPING"):
        monkeypatch.delitem(getattr(transformers.quantizers.auto, table), "ipex")
    with pytest.raises((RuntimeError, ValueError), match="mismatch"):
        getattr(transformers, kind).from_pretrained(tmp_path)

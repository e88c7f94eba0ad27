# SPDX-License-Identifier: Apache-2.0
"""Static INT8 by `ipex.llm.optimize`: calibrate, save the summary, optimize with it, generate."""

import json

import pytest
import torch
import transformers

import ipex
from ipex_llm import optimize

KINDS = {
    "llama": (
        transformers.LlamaForCausalLM,
        transformers.LlamaConfig(
            vocab_size=64,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
        ),
    ),
    "opt": (
        transformers.OPTForCausalLM,
        transformers.OPTConfig(
            vocab_size=64,
            hidden_size=32,
            ffn_dim=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            word_embed_proj_dim=32,
            max_position_embeddings=64,
        ),
    ),
}


def build(name):
    torch.manual_seed(0)
    kind, config = KINDS[name]
    return kind(config).eval()


def calibrate(model, mapping, path):
    """The steps of IPEX's script before the summary is there."""
    user_model = optimize(
        model, dtype=torch.float32, quantization_config=mapping, deployment_mode=False
    )
    ids = torch.randint(2, 64, (1, 16), generator=torch.Generator().manual_seed(1))
    prepared = ipex.quantization.prepare(user_model, mapping, example_inputs=(ids,), inplace=True)
    with torch.no_grad():
        for _ in range(2):
            prepared(ids)
    prepared.save_qconf_summary(path)
    return ids


def int8_layers(model):
    return [row.module for row in ipex.explain(model).rows if row.step == "int8" and row.done]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", list(KINDS))
def test_documented_script(name, dtype, tmp_path):
    mapping = ipex.quantization.get_smooth_quant_qconfig_mapping(alpha=0.5)
    model, path = build(name), str(tmp_path / "summary.json")
    ids = calibrate(build(name), mapping, path)
    with torch.no_grad():
        wanted = model(ids).logits
    fast = optimize(model, dtype=dtype, quantization_config=mapping, qconfig_summary_file=path)
    assert type(fast) is type(model) and not int8_layers(model)
    linears = {n for n, m in model.named_modules() if isinstance(m, torch.nn.Linear)}
    assert {n.removesuffix(".float_module") for n in int8_layers(fast)} >= linears
    with torch.no_grad():
        logits = fast(ids).logits.float()
        assert torch.cosine_similarity(logits, wanted, -1).min() > 0.98
        # Another length, and a cache: what calibration never saw.
        out = fast.generate(ids[:, :5], max_new_tokens=6, do_sample=False, pad_token_id=0)
    assert out.shape == (1, 11)


def test_keyword_inputs_and_recipe(tmp_path):
    mapping = ipex.quantization.default_static_qconfig_mapping
    path = str(tmp_path / "summary.json")
    ids = calibrate(build("llama"), mapping, path)
    fast = optimize(
        build("llama"),
        inplace=True,
        quantization_config=mapping,
        qconfig_summary_file=path,
        sample_inputs={"input_ids": ids, "attention_mask": torch.ones_like(ids)},
    )
    assert "lm_head" in int8_layers(fast)


def test_calibration_leaves_the_model():
    mapping = ipex.quantization.get_smooth_quant_qconfig_mapping()
    model = build("llama")
    result = optimize(model, quantization_config=mapping)
    assert result is not model and type(result.lm_head) is torch.nn.Linear
    assert optimize(model, quantization_config=mapping, inplace=True) is model


def test_errors(tmp_path):
    mapping = ipex.quantization.get_smooth_quant_qconfig_mapping()
    with pytest.raises(ValueError, match="qconfig_summary_file must come with a static"):
        optimize(build("llama"), qconfig_summary_file="x.json")
    with pytest.raises(ValueError, match=r"must come with a static.*QConfigMapping"):
        optimize(
            build("llama"),
            quantization_config=ipex.quantization.get_weight_only_quant_qconfig_mapping(),
            qconfig_summary_file="x.json",
        )
    missing = str(tmp_path / "no.json")
    with pytest.raises(ValueError, match="must be a file of save_qconf_summary"):
        optimize(build("llama"), quantization_config=mapping, qconfig_summary_file=missing)
    other = tmp_path / "other.json"
    calibrate(build("opt"), mapping, str(other))
    assert json.loads(other.read_text())
    with pytest.raises(ValueError, match="qconf_summary must be of this model"):
        optimize(build("llama"), quantization_config=mapping, qconfig_summary_file=str(other))
    with pytest.warns(UserWarning, match="low_precision_checkpoint is for weight-only"):
        optimize(build("llama"), quantization_config=mapping, low_precision_checkpoint={})

# SPDX-License-Identifier: Apache-2.0
"""Weight-only quantization of experts: stacked parameters, and one module for each expert."""

from __future__ import annotations

import copy
import gc
import json
import pickle
import subprocess
import sys

import pytest
import torch
from families import FAMILIES, tokens
from plain_weights import with_plain_weights
from torch import nn

import ipex_core
import ipex_quant as q
from ipex_core.errors import OpArgumentError
from ipex_llm.optimization import optimize
from ipex_llm.records import record_of

pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore")

Dtype, Lowp = q.WoqWeightDtype, q.WoqLowpMode
STACKED = hasattr(
    next(m for n, m in FAMILIES["mixtral"]().named_modules() if n.endswith(".experts")),
    "gate_up_proj",
)
needs_stacks = pytest.mark.skipif(not STACKED, reason="this transformers has a module per expert")


def config(dtype=Dtype.INT8, lowp=Lowp.NONE, **options):
    return q.woq_qconfig(weight_dtype=dtype, lowp_mode=lowp, **options)


@torch.no_grad()
def logits(model, **options):
    return model(tokens(2, 12), **options).logits.float()


def greedy(model):
    options = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
    return model.generate(tokens(2, 12), **options)


def reached(model):
    return next(row for row in ipex_core.explain(model).rows if row.step == "llm")


def dense(model):
    """Return the names of float weights within experts."""
    return [
        name
        for name, value in (*model.named_parameters(), *model.named_buffers())
        if ".experts." in name
        and value.dim() > 1
        and value.is_floating_point()
        and value.numel()
        and "bias" not in name
    ]


INT8, INT4 = {}, {"dtype": Dtype.INT4, "group_size": 16}


@pytest.mark.parametrize(
    ("name", "options", "deployment_mode"),
    [
        ("mixtral", INT8, True),
        ("mixtral", INT4, False),
        ("mixtral", {"dtype": Dtype.MXFP4}, True),
        ("qwen3_moe", INT8, False),
        ("qwen3_moe", INT4, True),
        ("qwen2_moe", INT8, True),
        ("gpt_oss", INT8, False),
        ("gpt_oss", INT4, True),
        ("gpt_oss", {"dtype": Dtype.NF4}, False),
    ],
)
def test_results(name, options, deployment_mode):
    if name not in FAMILIES:
        pytest.skip("not in this transformers")
    fast = optimize(
        FAMILIES[name](), quantization_config=config(**options), deployment_mode=deployment_mode
    )
    assert reached(fast).done == deployment_mode, reached(fast).text
    assert dense(fast) == []
    want = with_plain_weights(FAMILIES[name](), fast)
    torch.testing.assert_close(logits(fast), logits(want), rtol=1e-3, atol=1e-3)
    assert torch.equal(greedy(fast), greedy(want))
    # Its own forward.
    torch.testing.assert_close(
        logits(fast, output_hidden_states=True), logits(want), rtol=1e-3, atol=1e-3
    )


@pytest.mark.parametrize("name", ["mixtral", "gpt_oss"])
@pytest.mark.parametrize(
    ("dtype", "lowp"),
    [(torch.float32, Lowp.INT8), (torch.bfloat16, Lowp.BF16), (torch.bfloat16, Lowp.NONE)],
)
def test_modes(name, dtype, lowp):
    if name not in FAMILIES:
        pytest.skip("not in this transformers")
    qconfig = config(Dtype.INT4, lowp, group_size=32)
    fast = optimize(FAMILIES[name](), dtype=dtype, quantization_config=qconfig)
    assert reached(fast).done and dense(fast) == []
    want, got = logits(with_plain_weights(FAMILIES[name](), fast)), logits(fast)
    apart = 1 - nn.functional.cosine_similarity(got, want, dim=-1)
    assert float(apart.median()) < 2e-2
    layers = optimize(
        FAMILIES[name](), dtype=dtype, quantization_config=qconfig, deployment_mode=False
    )
    apart = 1 - nn.functional.cosine_similarity(logits(layers), want, dim=-1)
    assert float(apart.median()) < 2e-2


def test_memory():
    """The float weights are freed, wherever they were."""
    model = FAMILIES["mixtral"]()
    size = sum(p.numel() for n, p in model.named_parameters() if ".experts." in n)
    shapes = {p.shape for n, p in model.named_parameters() if ".experts." in n}
    pointers = {p.data_ptr() for n, p in model.named_parameters() if ".experts." in n}
    fast = optimize(model, inplace=True, quantization_config=config())
    gc.collect()
    alive = [
        o
        for o in gc.get_objects()
        if type(o) in (torch.Tensor, nn.Parameter) and o.shape in shapes and o.numel()
    ]
    assert not [o for o in alive if o.data_ptr() in pointers]
    stored = sum(b.numel() for n, b in fast.named_buffers() if ".experts." in n and b is not None)
    lent = {
        id(part.packed._base): part.packed._base.numel()
        for m in fast.modules()
        if (part := record_of(m).part) is not None and part.packed._base is not None
    }
    assert size < (stored + sum(lent.values())) < 1.7 * size  # of 4 bytes each before


@needs_stacks
def test_experts_of_a_model_that_is_not_matched(name="jamba_gelu"):
    fast = optimize(FAMILIES[name](), quantization_config=config())
    assert not reached(fast).done
    rows = [row for row in ipex_core.explain(fast).rows if row.step == "experts"]
    assert rows and all(row.done for row in rows)
    assert dense(fast) == []
    want = with_plain_weights(FAMILIES[name](), fast)
    torch.testing.assert_close(logits(fast), logits(want), rtol=1e-3, atol=1e-3)


@needs_stacks
@pytest.mark.parametrize("dtype", [Dtype.INT8, Dtype.INT4, Dtype.MXFP4])
@pytest.mark.parametrize("name", ["mixtral", "gpt_oss"])
def test_state_dict(name, dtype):
    fast = optimize(FAMILIES[name](), quantization_config=config(dtype, group_size=32))
    saved = {k: v.clone() for k, v in fast.state_dict().items()}
    experts = "model.layers.0.mlp.experts"
    assert saved[f"{experts}.woq_down_proj.qweight"].shape[:2] == (4, 64)
    assert f"{experts}.down_proj" not in saved
    other = FAMILIES[name]()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(0.5)
    other = optimize(other, quantization_config=config(dtype, group_size=32))
    assert not torch.allclose(logits(other), logits(fast))
    other.load_state_dict(saved)
    torch.testing.assert_close(logits(other), logits(fast))
    with pytest.raises(RuntimeError, match=r"down_proj\.qweight"):
        other.load_state_dict({k: v for k, v in saved.items() if "down_proj.qweight" not in k})
    saved[f"{experts}.woq_down_proj.qweight"] = saved[f"{experts}.woq_down_proj.qweight"][:3]
    with pytest.raises(RuntimeError, match="have 4 experts"):
        other.load_state_dict(saved)


@needs_stacks
@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe", "gpt_oss"])
def test_save_pretrained(name, tmp_path):
    import safetensors.torch

    fast = optimize(FAMILIES[name](), quantization_config=config())
    fast.save_pretrained(tmp_path)
    saved = safetensors.torch.load_file(tmp_path / "model.safetensors")
    assert sum("woq_" in key for key in saved) == sum("woq_" in key for key in fast.state_dict())
    # Nothing loads quantized experts from a folder: it must not be taken for one of floats.
    about = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    assert about["quant_method"] == "ipex" and about["format"] == "state_dict"
    with pytest.raises(OpArgumentError, match="give the tensors of the folder to its load_state"):
        q.load(tmp_path)
    other = optimize(FAMILIES[name](), quantization_config=config())
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(0.5)
    other.load_state_dict(saved)
    torch.testing.assert_close(logits(other), logits(fast))


PLAIN = """
import sys, transformers
assert not any(name.startswith("ipex") for name in sys.modules)
try:
    transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1])
except RuntimeError as error:
    assert "mismatch" in str(error)
    raise SystemExit(0)
raise SystemExit("weights were made up")
"""


@needs_stacks
def test_a_transformers_without_ipex_makes_no_experts_up(tmp_path):
    """Also where nothing else of the model is quantized."""
    from torch.ao.quantization import QConfigMapping
    from transformers import AutoModelForCausalLM

    only = QConfigMapping().set_module_name_regex(r".*experts.*", config())
    fast = optimize(FAMILIES["mixtral"](), quantization_config=only)
    assert isinstance(fast.model.layers[0].self_attn.q_proj, torch.nn.Linear)
    fast.save_pretrained(tmp_path)
    done = subprocess.run(
        [sys.executable, "-c", PLAIN, str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    with pytest.raises(ValueError, match="give the tensors of the folder to its load_state_dict"):
        AutoModelForCausalLM.from_pretrained(tmp_path)


@needs_stacks
def test_copies():
    fast = optimize(FAMILIES["mixtral"](), quantization_config=config())
    want = logits(fast)
    for again in (copy.deepcopy(fast), pickle.loads(pickle.dumps(fast))):
        torch.testing.assert_close(logits(again), want)
    ipex_core.restore(fast)  # what is quantized stays so
    assert dense(fast) == []
    torch.testing.assert_close(logits(fast), want, rtol=1e-3, atol=1e-3)


@needs_stacks
def test_weights_of_modules():
    fast = optimize(FAMILIES["gpt_oss"](), quantization_config=config(), deployment_mode=False)
    experts = fast.model.layers[0].mlp.experts
    old = FAMILIES["gpt_oss"]().model.layers[0].mlp.experts
    for name in ("gate_up_proj", "down_proj"):
        weight = getattr(experts, name)
        assert weight.shape == getattr(old, name).shape and weight.dtype == torch.float32
        torch.testing.assert_close(weight[2], weight.plain()[2], rtol=0, atol=0)
        torch.testing.assert_close(weight.plain(), getattr(old, name).detach(), rtol=0.1, atol=0.02)
    with pytest.raises(RuntimeError, match="cannot be changed in place"):
        experts.down_proj.zero_()


def test_bad_groups_change_nothing():
    model = FAMILIES["mixtral"]()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    with pytest.raises(ValueError, match="group_size must be -1 or at least 16"):
        optimize(model, inplace=True, quantization_config=config(Dtype.INT4, group_size=8))
    after = model.state_dict()
    assert list(after) == list(before)
    assert all(torch.equal(after[k], v) for k, v in before.items())

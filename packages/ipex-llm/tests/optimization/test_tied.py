# SPDX-License-Identifier: Apache-2.0
"""Models whose head has the weight of the embedding: it is kept once, packed, and stays one parameter."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
from families import FAMILIES, UNPROVEN, tokens

import ipex_core
from ipex_llm.model_runner.dense import PlannedWeight
from ipex_llm.optimization import optimize

pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore")

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def weights(model):
    return model.get_input_embeddings().weight, model.get_output_embeddings().weight


def logits(model, ids=None):
    with torch.no_grad():
        return model(tokens(1, 9) if ids is None else ids).logits


def check_tied(model, packed=True):
    embedding, head = weights(model)
    assert embedding is head
    assert isinstance(embedding, PlannedWeight) == packed
    return embedding


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["llama_tied", "gpt2", "gemma", "gemma3", "opt", "cohere"])
def test_one_weight(name, dtype):
    if name not in FAMILIES:
        pytest.skip("not in this transformers")
    if name in UNPROVEN:
        pytest.skip("less is proven with transformers 4")
    model = FAMILIES[name]().to(dtype)
    fast = optimize(model)
    weight = check_tied(fast)
    assert weight.whole and torch.equal(weight, weights(model)[0])
    assert isinstance(fast.get_input_embeddings(), type(model.get_input_embeddings()))
    if dtype == torch.float32:  # others: test_matrix.py
        torch.testing.assert_close(logits(fast), logits(model), rtol=1e-4, atol=1e-4)
    ids = tokens(2, 5)
    # The forward of the module itself, and with gradients.
    embed, stock = fast.get_input_embeddings(), model.get_input_embeddings()
    assert torch.equal(embed(ids), stock(ids))
    embed(ids).sum().backward()
    stock(ids).sum().backward()
    assert torch.equal(weight.grad, stock.weight.grad)


def test_names_of_one_parameter():
    model = FAMILIES["llama_tied"]()
    fast = optimize(model, dtype=torch.bfloat16)
    assert [n for n, _ in fast.named_parameters()] == [n for n, _ in model.named_parameters()]
    fast.tie_weights()
    check_tied(fast)
    want = logits(fast)
    assert torch.equal(logits(fast), want)
    state = fast.state_dict()
    first, second = state["model.embed_tokens.weight"], state["lm_head.weight"]
    assert first.data_ptr() == second.data_ptr()
    assert torch.equal(first, model.state_dict()["lm_head.weight"])
    again = fast.state_dict()["lm_head.weight"]
    assert again.data_ptr() != first.data_ptr()  # no alias from one call to the next


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_restore(dtype):
    model = FAMILIES["llama_tied"]()
    kinds = [type(m) for m in model.modules()]
    fast = ipex_core.restore(optimize(model, dtype=dtype))
    weight = check_tied(fast, packed=False)
    assert torch.equal(weight, weights(model)[0])
    assert [type(m) for m in fast.modules()] == kinds
    assert torch.equal(logits(fast), logits(model))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_copies(dtype):
    fast = optimize(FAMILIES["llama_tied"](), dtype=dtype)
    want = logits(fast)
    buffer = io.BytesIO()
    torch.save(fast, buffer)
    buffer.seek(0)
    loaded = torch.load(buffer, weights_only=False)
    for again in (copy.deepcopy(fast), pickle.loads(pickle.dumps(fast)), loaded):
        check_tied(again, packed=False)
        torch.testing.assert_close(logits(again), want, rtol=1e-5, atol=1e-5)
        check_tied(again)  # since it has run
        check_tied(ipex_core.restore(again), packed=False)
    check_tied(fast)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("part", [False, True])
def test_loading(dtype, part):
    model, expected = FAMILIES["llama_tied"](), FAMILIES["llama_tied"]()
    other = {k: v + 0.01 for k, v in model.state_dict().items()}
    expected.load_state_dict(other)
    fast = optimize(model, dtype=dtype, inplace=True)
    logits(fast)
    if part:  # as files have it
        del other["lm_head.weight"]
    fast.load_state_dict(other, strict=not part)
    check_tied(fast, packed=False)
    tolerance = 1e-4 if dtype == torch.float32 else 0.1
    torch.testing.assert_close(
        logits(fast).float(), logits(expected), rtol=tolerance, atol=tolerance
    )
    check_tied(fast)
    assert torch.equal(fast.state_dict()["lm_head.weight"], expected.lm_head.weight)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_save_pretrained(dtype, tmp_path):
    import safetensors.torch
    import transformers

    model = FAMILIES["llama_tied"]()
    optimize(model, dtype=dtype).save_pretrained(tmp_path)
    saved = safetensors.torch.load_file(tmp_path / "model.safetensors")
    assert "lm_head.weight" not in saved
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    check_tied(again, packed=False)
    assert torch.equal(saved["model.embed_tokens.weight"], weights(model)[0])


def test_changed_weights():
    model = FAMILIES["llama_tied"]()
    fast = optimize(model)
    assert torch.equal(weights(fast)[0].data[:3, 1:], weights(model)[0][:3, 1:])
    fast.to(torch.bfloat16)  # of the module: no cast of ours
    assert check_tied(fast, packed=False).dtype == torch.bfloat16
    logits(fast)
    check_tied(fast)
    fast.resize_token_embeddings(weights(fast)[0].shape[0] + 8)
    assert logits(fast).shape[-1] == weights(model)[0].shape[0] + 8
    check_tied(fast)
    # Of their own from now on.
    fast.lm_head.weight = torch.nn.Parameter(torch.zeros_like(weights(fast)[0].detach()))
    assert not logits(fast).any()
    assert weights(fast)[0] is not weights(fast)[1]


def test_kept_where_it_cannot_be_shared():
    import ipex_quant

    model = FAMILIES["llama_tied"]()
    model.model.embed_tokens.max_norm = 100.0  # writes to the weight
    check_tied(optimize(model), packed=False)
    config = ipex_quant.woq_qconfig(weight_dtype=ipex_quant.WoqWeightDtype.INT8)
    fast = optimize(FAMILIES["llama_tied"](), quantization_config=config)
    assert not isinstance(fast.model.embed_tokens.weight, PlannedWeight)

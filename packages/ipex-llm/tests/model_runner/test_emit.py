# SPDX-License-Identifier: Apache-2.0
"""Programs of a plan against the model it was made from."""

from __future__ import annotations

import copy
import dataclasses

import pytest
import torch
from families import FAMILIES, VOCAB, randomize, tokens
from plans import llama_plan
from small_llama import llama

from ipex_llm.arch import TemperaturePlan
from ipex_llm.arch.detect import match
from ipex_llm.kv_cache import Sequences
from ipex_llm.model_runner import Runner
from ipex_llm.model_runner.dense import UnsupportedPlan


def run(runner, sequences, ids, rows=None, logits=True):
    """Run a list of token lists, one per sequence."""
    counts = [len(one) for one in ids]
    history = list(sequences.lengths)
    step = sequences.append(counts)
    flat = torch.tensor([t for one in ids for t in one])
    positions = torch.cat([torch.arange(h, h + c) for h, c in zip(history, counts, strict=True)])
    hidden = runner.embed(flat, positions)
    return runner.run(sequences.cache, hidden, positions, step, rows, logits=logits)


@pytest.mark.parametrize("block_size", [4, 64])
def test_llama_logits_of_prompts_pieces_and_single_tokens(block_size):
    model = FAMILIES["llama"]()
    ids = tokens(3, 24)
    with torch.no_grad():
        expected = model(ids).logits
    runner = Runner(llama_plan(model), torch.float32)
    sequences = Sequences(runner.new_cache(4, block_size), 3)
    got = run(runner, sequences, [ids[0, :9].tolist(), ids[1, :1].tolist(), ids[2, :5].tolist()])
    want = torch.stack([expected[0, 8], expected[1, 0], expected[2, 4]])
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
    # A piece with history, a single token, and a piece across blocks.
    run(runner, sequences, [ids[0, 9:12].tolist(), ids[1, 1:2].tolist(), ids[2, 5:20].tolist()])
    for at in range(4):
        got = run(runner, sequences, [[int(ids[b, n + at])] for b, n in enumerate((12, 2, 20))])
        want = torch.stack([expected[b, n + at] for b, n in enumerate((12, 2, 20))])
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("activation", ["relu2", "quick_gelu", "relu"])
def test_gates_that_no_layer_takes_along(activation):
    model = llama(hidden_act=activation)
    ids = tokens(1, 12)
    with torch.no_grad():
        expected = model(ids).logits
    runner = Runner(match(model), torch.float32)
    sequences = Sequences(runner.new_cache(4, 16), 1)
    for count in (11, 1):
        start = sequences.lengths[0]
        got = run(runner, sequences, [ids[0, start : start + count].tolist()])
        want = expected[:, start + count - 1]
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


def test_activations_that_no_op_computes_are_refused():
    plan = llama_plan(FAMILIES["llama"]())
    for fused, activation, message in (
        (False, "softsign", "activation 'softsign'$"),
        (True, "relu2", "activation 'relu2' of a fused pair"),
    ):
        mlp = dataclasses.replace(plan.layers[0].mlp, fused=fused, activation=activation)
        layer = dataclasses.replace(plan.layers[0], mlp=mlp)
        with pytest.raises(UnsupportedPlan, match=message):
            Runner(dataclasses.replace(plan, layers=(layer,)), torch.float32)


def test_parameters_stay_what_they_were():
    model = FAMILIES["llama_bias"]()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    with torch.no_grad():
        expected = model(tokens()).logits
    runner = Runner(llama_plan(model), torch.float32)
    assert runner.fresh()
    after = model.state_dict()
    assert list(after) == list(before)
    for name, value in before.items():
        assert torch.equal(after[name], value), name
    # The model's own forward unpacks what it needs.
    with torch.no_grad():
        torch.testing.assert_close(model(tokens()).logits, expected, rtol=1e-4, atol=1e-4)
    model.load_state_dict({k: v * 2 for k, v in before.items()})
    assert not runner.fresh()
    assert torch.equal(
        model.state_dict()["model.layers.0.self_attn.k_proj.weight"],
        2 * before["model.layers.0.self_attn.k_proj.weight"],
    )


def test_queries_scaled_by_position():
    """Llama 4's layers without rotation, beyond the place from which on it matters."""
    import transformers

    config = transformers.Llama4TextConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=32,
        intermediate_size_mlp=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        num_local_experts=2,
        no_rope_layers=[1, 0],
        attention_chunk_size=128,
        attn_temperature_tuning=True,
        floor_scale=3,
        attn_scale=0.5,
        max_position_embeddings=128,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    model = randomize(transformers.Llama4ForCausalLM(config))
    second = model.model.layers[1].self_attn
    if second.use_rope:  # transformers 4.51 does not read no_rope_layers
        second.use_rope = 0
        del second.qk_norm
    plan = match(model)
    found = [layer.attention.temperature for layer in plan.layers]
    assert found == [None, TemperaturePlan(0.5, 3.0, 1.0)]
    ids = tokens(1, 24)
    with torch.no_grad():
        expected = model(ids, use_cache=False).logits
    for dtype, close in ((torch.float32, 1e-4), (torch.bfloat16, 0.1)):
        runner = Runner(match(copy.deepcopy(model).to(dtype)), dtype)
        sequences = Sequences(runner.new_cache(4, 16), 1)
        got = run(runner, sequences, [ids[0, :20].tolist()]).float()
        torch.testing.assert_close(got, expected[:, 19], rtol=close, atol=close)
        for at in range(20, 24):
            got = run(runner, sequences, [[int(ids[0, at])]]).float()
            torch.testing.assert_close(got, expected[:, at], rtol=close, atol=close)

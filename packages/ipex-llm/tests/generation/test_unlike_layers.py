# SPDX-License-Identifier: Apache-2.0
"""Layers with heads of unlike sizes, keys as values, shared keys and values, experts beside the mlp, several streams,
and rows of their own for each token.
"""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
from families import CAUSAL, VOCAB, WINDOW, build, randomize, tokens

import ipex
from ipex_core.errors import OpArgumentError
from ipex_llm.arch import AttentionPlan, ExpertsPlan
from ipex_llm.arch.detect import MatchError, match
from ipex_llm.arch.reference import verify
from ipex_llm.distributed.group import TensorParallel
from ipex_llm.distributed.shard import check_shards
from ipex_llm.engine import Engine, SamplingParams
from ipex_llm.records import record_of

_EVERY = ("gemma4", "gemma4_shared", "gemma4_moe", "gemma4_unified", "gemma3n")
NAMES = [name for name in _EVERY if name in CAUSAL]
pytestmark = pytest.mark.skipif(not NAMES, reason="this transformers has no Gemma 4")


@functools.cache
def optimized(name: str) -> Any:
    fast = ipex.llm.optimize(build(name), dtype=torch.float32)
    assert record_of(fast).runner is not None, str(ipex.explain(fast))
    return fast


def close(got: torch.Tensor, want: torch.Tensor, limit: float = 1e-4) -> None:
    torch.testing.assert_close(got, want, rtol=0, atol=limit * float(want.abs().max()))


class Sine(torch.nn.Module):
    """An activation that no program has."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.sin(x)


def test_structure() -> None:
    plan = match(build("gemma4"))
    found = []
    for layer in plan.layers:
        a = layer.attention
        assert isinstance(a, AttentionPlan) and a.rope is not None and a.value_norm is not None
        found.append((a.head_dim, a.kv_heads, a.keys_as_values, a.window, a.rope.kind))
    sliding = (16, 2, False, WINDOW - 1, "default")
    assert found == [sliding, sliding, sliding, (32, 1, True, -1, "proportional")]
    scales = [float(layer.layer_scalar) for layer in build("gemma4").model.layers]
    assert [layer.stream_scale for layer in plan.layers] == scales
    assert len(set(scales)) == 4
    assert plan.token_rows is None


def test_structure_of_shared_layers() -> None:
    model = build("gemma4_shared")
    plan = match(model)
    assert [layer.attention.source for layer in plan.layers] == [None, None, None, 2, 1]
    assert len(plan.attentions) == 3
    rows = plan.token_rows
    assert rows is not None
    assert (rows.width, rows.scale) == (8, pytest.approx(0.5**0.5))
    assert rows.table_scale == pytest.approx(8**0.5)
    assert {layer.token_block.activation for layer in plan.layers} == {"gelu_tanh"}
    assert verify(model, plan) < 1e-5


def test_structure_of_experts() -> None:
    model = build("gemma4_moe")
    plan = match(model)
    for layer, module in zip(plan.layers, model.model.layers, strict=True):
        mlp = layer.mlp
        assert isinstance(mlp, ExpertsPlan) and mlp.norms is not None and mlp.shared is not None
        assert (mlp.experts, mlp.top_k, mlp.activation) == (4, 2, "gelu_tanh")
        assert mlp.expert_scales is module.router.per_expert_scale
        assert mlp.norms.input.module is module.pre_feedforward_layernorm_2
    assert verify(model, plan) < 1e-5


def test_structure_of_streams() -> None:
    model = build("gemma3n")
    plan = match(model)
    assert plan.streams is not None and len(plan.streams.first) == len(plan.streams.last) == 2
    assert [layer.attention.source for layer in plan.layers] == [None, None, None, 2, 1]
    cutoffs = [layer.mlp.cutoff for layer in plan.layers]
    assert cutoffs[2:4] == [None, None] and cutoffs[0] == pytest.approx(1.2815516)
    for layer in plan.layers:
        assert layer.low is not None and layer.low.factor == 2.0**-0.5
        assert layer.streams is not None and layer.streams.count == 3
    assert verify(model, plan) < 1e-5


@torch.no_grad()
def test_tokens_without_rows() -> None:
    model, fast = build("gemma3n"), optimized("gemma3n")
    ids = torch.arange(VOCAB - 12, VOCAB).view(1, -1)
    close(fast(ids, use_cache=False).logits, model(ids, use_cache=False).logits)


@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_same_answers(name: str) -> None:
    model, fast = build(name), optimized(name)
    ids = tokens(3, 2 * WINDOW + 9)
    mask = torch.ones_like(ids)
    mask[0, :6], mask[2, : WINDOW + 3] = 0, 0
    for given in ({}, {"attention_mask": mask}):
        got, want = (m(ids, use_cache=False, **given).logits for m in (fast, model))
        close(got[mask.bool()], want[mask.bool()])
    options = {"attention_mask": mask, "max_new_tokens": WINDOW + 4, "do_sample": False}
    want = model.generate(ids, **options)
    assert torch.equal(fast.generate(ids, **options), want)
    assert torch.equal(fast.generate(ids, prefill_chunk_size=5, **options), want)
    beams = {**options, "num_beams": 3}
    assert torch.equal(fast.generate(ids, **beams), model.generate(ids, **beams))


@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_pieces(name: str) -> None:
    model, fast = build(name), optimized(name)
    ids = tokens(2, WINDOW + 11, seed=4)
    want = model(ids, use_cache=False)
    result, found = None, []
    for part in ids.split([7, 9, *[1] * (WINDOW - 5)], dim=1):
        cache = None if result is None else result.cache
        result = fast(part, cache=cache)
        found.append(result.logits)
    close(torch.cat(found, 1), want.logits)
    # What the programs do not have runs the stock forward, with the same numbers.
    states = fast(ids, use_cache=False, output_hidden_states=True).hidden_states
    for got, stock in zip(
        states, model(ids, use_cache=False, output_hidden_states=True).hidden_states, strict=True
    ):
        close(got, stock)
    rows = fast.get_input_embeddings()(ids)  # Gemma 3n answers otherwise than for the tokens
    close(fast(inputs_embeds=rows).logits, model(inputs_embeds=rows).logits)


@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_engine(name: str) -> None:
    model, fast = build(name), optimized(name)
    prompts = [tokens(1, n, seed=n)[0].tolist() for n in (3, 40, 17, 1, 70, 5)]
    wanted = []
    for prompt in prompts:
        given = torch.tensor([prompt])
        out = model.generate(given, max_new_tokens=12, do_sample=False)
        wanted.append(tuple(out[0, len(prompt) :].tolist()))
    for options in ({"num_blocks": 64}, {"num_blocks": 64, "max_tokens_per_step": 16}):
        engine = Engine(fast, block_size=16, eos_token_ids=(), **options)
        for _ in range(2):  # the second time on the prefixes of the first
            outputs = engine.generate(prompts, SamplingParams(max_new_tokens=12))
            assert [output.tokens for output in outputs] == wanted
        assert engine.stats().cached_tokens > 0


@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_fewer_bits(name: str) -> None:
    model, ids = build(name), tokens(3, 21)
    want = model(ids, use_cache=False).logits
    half = build(name).bfloat16()

    def off(other: Any, **more: Any) -> float:
        found = other(ids, **more).logits.float()
        return float((1 - torch.nn.functional.cosine_similarity(found, want, dim=-1)).median())

    stock = off(half, use_cache=False)
    fast = ipex.llm.optimize(copy.deepcopy(half), dtype=torch.bfloat16)
    assert record_of(fast).runner is not None, str(ipex.explain(fast))
    assert off(fast) < max(2e-3, 2 * stock)
    cached = ipex.llm.optimize(build(name), dtype=torch.float32, kv_cache_dtype="int8")
    assert off(cached) < 2e-3


@pytest.mark.parametrize("bits", ["INT8", "INT4"])
@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_quantized_weights(name: str, bits: str) -> None:
    found, ids = [], tokens(2, 19)
    for depth in (3, 1):
        config = ipex.quantization.get_weight_only_quant_qconfig_mapping(
            weight_dtype=ipex.quantization.WoqWeightDtype[bits], group_size=-1
        )
        fast = ipex.llm.optimize(
            build(name), dtype=torch.float32, quantization_config=config, depth=depth
        )
        assert (record_of(fast).runner is not None) == (depth == 3)
        found.append(fast(ids, use_cache=False).logits)
    close(*found)


@torch.no_grad()
def test_what_is_not_understood() -> None:
    ids = tokens(1, 9)
    model = build("gemma4_shared")
    for layer in model.model.layers:
        layer.act_fn = Sine()
    with pytest.raises(MatchError, match="gives its layers something else"):
        match(model)
    close(ipex.llm.optimize(copy.deepcopy(model))(ids).logits, model(ids).logits)
    model = build("gemma4")
    model.model.layers[0].layer_scalar.zero_()
    with pytest.raises(MatchError, match="adds its blocks in a way"):
        match(model)
    close(ipex.llm.optimize(copy.deepcopy(model))(ids).logits, model(ids).logits)
    model = build("gemma3n")
    model.model.layers[1].laurel.post_laurel_norm = Sine()
    with pytest.raises(MatchError, match="adds its blocks to its streams"):
        match(model)
    close(ipex.llm.optimize(copy.deepcopy(model))(ids).logits, model(ids).logits)
    model = build("gemma4_moe")
    model.model.layers[0].router.norm = Sine()
    with pytest.raises(MatchError, match="without norms around them"):
        match(model)
    close(ipex.llm.optimize(copy.deepcopy(model))(ids).logits, model(ids).logits)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("gemma4_shared", "reads the tokens"),
        ("gemma4", "whose values are its keys"),
        ("gemma4_moe", "norms around them"),
        ("gemma3n", "reads the tokens"),
        ("bitnet", "a norm between"),
    ],
)
def test_is_not_divided(name: str, text: str) -> None:
    ranks = TensorParallel(None, 0, 2, None, 1.0, "")
    with pytest.raises(OpArgumentError, match=text):
        check_shards(match(build(name)), ranks, (1,))


@pytest.mark.skipif("dory" not in CAUSAL, reason="this transformers has no Dory")
@torch.no_grad()
def test_layers_that_run_several_times() -> None:
    config = copy.deepcopy(build("dory").config)
    config.n_recurrent_layers, config.n_output_layers, config.n_recurrent_loops = 2, 0, 3
    stock = randomize(type(build("dory"))(config))
    fast = ipex.llm.optimize(copy.deepcopy(stock), dtype=torch.float32)
    assert len(record_of(fast).runner.plan.layers) == 7
    ids = tokens(2, 2 * WINDOW)
    close(fast(ids).logits, stock(ids).logits)
    # The stock forward goes on with the same cache.
    cache = fast.model(ids[:, :WINDOW]).cache
    more = fast.model(ids[:, WINDOW:], cache=cache, output_attentions=True)
    close(more.last_hidden_state, stock.model(ids).last_hidden_state[:, WINDOW:])
    # Factors are computed from parameters, which may change.
    for name in ("lambda_1", "self_attn.s_gate", "self_attn.sqk"):
        for model in (stock, fast):
            model.model.layers[1].get_parameter(name).mul_(1.5)
    for model in (stock, fast):
        model.lm_head.logit_scale[::2].mul_(1.5)
    close(fast(ids).logits, stock(ids).logits)
    for other in ({"recurrent_kv_cache_mode": "last_loop"}, {"n_recurrent_loops": 1}):
        own = copy.deepcopy(config)
        own.update(other)
        assert ipex.llm.plan(randomize(type(stock)(own)), dtype=torch.float32).depth == 1

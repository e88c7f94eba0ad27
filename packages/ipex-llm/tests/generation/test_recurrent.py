# SPDX-License-Identifier: Apache-2.0
"""Models with recurrent layers run as one program, and give what the stock model gives."""

from __future__ import annotations

import copy
import functools
import itertools
from typing import Any

import pytest
import torch
import transformers
from families import VOCAB
from recurrent_models import NAMES, build

import ipex
from ipex_llm.arch import AttentionPlan, DeltaPlan, ScanPlan
from ipex_llm.arch.detect import MatchError, match
from ipex_llm.arch.reference import verify
from ipex_llm.kv_cache import PagedCache, Sequences, StateShape
from ipex_llm.kv_cache.transformers import state_of_cache
from ipex_llm.records import record_of

needs_models = pytest.mark.skipif(not NAMES, reason="transformers 4 has other caches of states")


@functools.cache
def optimized(name: str) -> Any:
    return ipex.llm.optimize(build(name), dtype=torch.float32)


def text(batch: int, length: int, seed: int = 1) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCAB, (batch, length), generator=generator)


def cache_of(result: Any) -> Any:
    cache = getattr(result, "cache", None)
    return result.past_key_values if cache is None else cache


def begun(model: Any, ids: torch.Tensor) -> tuple[Any, Any]:
    """Return what the beginning of a text gives and the cache; RecurrentGemma returns none, and only takes one."""
    given = {}
    if "RecurrentGemma" in type(model).__name__:
        given["cache"] = transformers.DynamicCache(config=model.config)
    result = model(input_ids=ids, use_cache=True, **given)
    return result, given["cache"] if given else cache_of(result)


def logits(model: Any, ids: torch.Tensor, **more: Any) -> torch.Tensor:
    return model(input_ids=ids, use_cache=False, **more).logits  # type: ignore[no-any-return]


def close(got: torch.Tensor, want: torch.Tensor) -> None:
    torch.testing.assert_close(got, want, rtol=0, atol=1e-4 * float(want.abs().max()))


@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_structure(name: str) -> None:
    model = build(name)
    plan = match(model)
    kinds = [type(layer.attention).__name__ for layer in plan.layers]
    aside = sum(layer.side is not None for layer in plan.layers)  # Zamba 2
    attentions = {"falcon_h1": 2, "lfm3": 2, "zamba2": 2, "zamba2_blocks": 3}.get(name, 1)
    attentions = 0 if name in ("mamba", "falcon_mamba", "mamba2", "xlstm") else attentions
    assert kinds.count("AttentionPlan") + aside == len(plan.attentions) == attentions
    assert plan.has_states
    assert verify(model, plan) < 1e-4


@pytest.mark.skipif("olmo_hybrid" not in NAMES, reason="newer than this transformers")
@torch.no_grad()
def test_strength_of_the_delta_rule() -> None:
    model = build("olmo_hybrid")
    assert [a.strength for a in _deltas(model)] == [2.0] * 3
    for layer in model.model.layers:
        if hasattr(layer, "linear_attn"):
            layer.linear_attn.allow_neg_eigval = False
    assert [a.strength for a in _deltas(model)] == [1.0] * 3


@pytest.mark.skipif("bailing_hybrid" not in NAMES, reason="newer than this transformers")
@torch.no_grad()
def test_bounds_of_decays() -> None:
    model = build("bailing_hybrid")
    assert [(a.each, a.opening, a.lowest) for a in _deltas(model)] == [(True, "sigmoid", -5.0)] * 3
    attention = match(model).layers[1].attention
    assert isinstance(attention, AttentionPlan) and attention.gated == "heads"
    for layer in model.model.layers:
        if hasattr(layer.self_attn, "forget_gate"):
            layer.self_attn.forget_gate.safe_gate = False
    plan = match(model)
    assert [a.lowest for a in _deltas(model)] == [0.0] * 3
    assert verify(model, plan) < 1e-4


@pytest.mark.skipif("kimi_linear" not in NAMES, reason="newer than this transformers")
@torch.no_grad()
def test_low_rank_gates_and_latents_without_rotation() -> None:
    model = build("kimi_linear")
    assert [(a.each, a.lowest, a.rank) for a in _deltas(model)] == [(True, 0.0, 16)] * 3
    attention = match(model).layers[1].attention
    assert isinstance(attention, AttentionPlan) and attention.latent is not None
    assert attention.rope is None and attention.latent.common == 8
    model.model.layers[0].self_attn.o_norm.activation = "tanh"
    with pytest.raises(MatchError, match=r"layers\.0\.self_attn: \w+ computes something else"):
        match(model)


def _deltas(model: Any) -> list[DeltaPlan]:
    found = [layer.attention for layer in match(model).layers]
    return [one for one in found if isinstance(one, DeltaPlan)]


#: With a cache the stock model reorders no states for beams, and MiniMax counts the tokens of its first layer.
FALSE_WITH_A_CACHE = ("minimax", "minimax_uncounted", "recurrent_gemma", "xlstm")


@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_same_answers(name: str) -> None:
    model, fast = build(name), optimized(name)
    assert record_of(fast).runner is not None, str(ipex.explain(fast))
    ids = text(3, 21)
    close(logits(fast, ids), logits(model, ids))
    mask = torch.ones_like(ids)
    if name != "recurrent_gemma":  # padding counts: the stock forward runs, see below
        mask[0, :6], mask[2, :1] = 0, 0
    options = {"attention_mask": mask, "max_new_tokens": 12, "do_sample": False}
    stock = {"use_cache": False} if name in FALSE_WITH_A_CACHE else {}
    want = model.generate(ids, **options, **stock)
    assert torch.equal(fast.generate(ids, **options), want)
    assert torch.equal(fast.generate(ids, prefill_chunk_size=5, **options), want)
    beams = {**options, "num_beams": 3}
    assert torch.equal(fast.generate(ids, **beams), model.generate(ids, **beams, **stock))


# A cache from outside `generate` is one of the stock model with an indexer.
@pytest.mark.parametrize("name", [n for n in NAMES if n != "qwen4_exp"])
@torch.no_grad()
def test_pieces_and_order(name: str) -> None:
    model, fast = build(name), optimized(name)
    ids = text(3, 17, seed=4)
    want = logits(model, ids)
    first, cache = begun(fast, ids[:, :6])
    second = fast(input_ids=ids[:, 6:9], cache=cache, position_ids=torch.arange(6, 9).unsqueeze(0))
    close(torch.cat([first.logits, second.logits], 1), want[:, :9])
    order = torch.tensor([2, 0, 0, 1])  # one more sequence than before
    cache.reorder_cache(order)
    for at in range(9, 17):
        one = torch.tensor([[at]])
        step = fast(input_ids=ids[order, at : at + 1], cache=cache, position_ids=one)
        close(step.logits[:, 0], want[order, at])


@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_bfloat16_is_as_near_as_the_stock_model(name: str) -> None:
    model, ids = build(name), text(3, 21)
    want = logits(model, ids)
    half = build(name).bfloat16()
    fast = ipex.llm.optimize(copy.deepcopy(half), dtype=torch.bfloat16)
    assert record_of(fast).runner is not None, str(ipex.explain(fast))

    def off(other: Any) -> float:
        found = logits(other, ids).float()
        return float((1 - torch.nn.functional.cosine_similarity(found, want, dim=-1)).median())

    assert off(fast) < max(2e-3, 2 * off(half))


@needs_models
@torch.no_grad()
def test_what_a_cache_cannot_do() -> None:
    fast = optimized("lfm2")
    ids = text(1, 9)
    cache = cache_of(fast(input_ids=ids, use_cache=True))
    assert not cache.is_croppable
    with pytest.raises(NotImplementedError, match="must not be removed from the end of a cache"):
        cache.crop(4)
    with pytest.raises(NotImplementedError, match="layer must have keys and values, got layer 0"):
        cache[0]
    cache.reset()
    close(fast(input_ids=ids, cache=cache).logits, logits(fast, ids))


#: The stock model starts from zeros at each part of a prompt.
FORGETFUL = ("jamba", "mamba", "falcon_mamba")


@pytest.mark.parametrize("name", [n for n in NAMES if n in FORGETFUL])
@torch.no_grad()
def test_a_stock_forward_that_goes_on_token_by_token(name: str) -> None:
    model, fast, ids = build(name), optimized(name), text(2, 12, seed=4)
    want = logits(model, ids)
    first = fast(input_ids=ids[:, :7], use_cache=True)
    cache, more = cache_of(first), {}
    if name == "jamba":  # the others have no attentions, and leave the option out
        more["output_attentions"] = True
    for at in range(7, 12):
        step = fast(input_ids=ids[:, at : at + 1], cache=cache, **more)
        close(step.logits[:, 0], want[:, at])
        cache = cache_of(step)
    assert (state_of_cache(cache) is None) == (name == "jamba")


@pytest.mark.parametrize("name", [n for n in NAMES if n == "recurrent_gemma"])
@torch.no_grad()
def test_states_that_the_stock_model_keeps_in_its_modules(name: str) -> None:
    model, fast, ids = build(name), optimized(name), text(2, 14, seed=4)
    want, mask = logits(model, ids), torch.ones(2, 14, dtype=torch.int64)
    mask[0, :3] = 0
    _, cache = begun(fast, ids[:, :9])
    with pytest.raises(NotImplementedError, match="must go on as it began, got argument output_at"):
        fast(input_ids=ids[:, 9:10], cache=cache, output_attentions=True)
    found = [fast(input_ids=ids[:, i : i + 1], cache=cache).logits for i in range(9, 14)]
    close(torch.cat(found, 1), want[:, 9:])
    close(logits(fast, ids, attention_mask=mask), logits(model, ids, attention_mask=mask))
    options = {"attention_mask": mask, "max_new_tokens": 8, "do_sample": False}
    for _ in range(2):  # the states of the first call are still there
        assert torch.equal(fast.generate(ids, **options), model.generate(ids, **options))
    moved = (torch.arange(14) + 5).unsqueeze(0)
    close(logits(fast, ids, position_ids=moved), logits(model, ids, position_ids=moved))


@pytest.mark.parametrize(
    "name",
    [
        n
        for n in NAMES
        if n not in (*FORGETFUL, "minimax_uncounted", "recurrent_gemma", "xlstm", "qwen4_exp")
    ],
)
@torch.no_grad()
def test_calls_of_the_stock_forward_go_on_with_the_same_cache(name: str) -> None:
    model, fast = build(name), optimized(name)
    ids, mask = text(2, 14, seed=4), torch.ones(2, 14, dtype=torch.int64)
    mask[0, :3] = 0
    cuts = (0, 6, 9, 10, 11, 14)
    for first in (
        0,
        6,
        9,
    ):  # the call from which on attentions are wanted, which programs do not give
        caches: list[Any] = [{}, {}]
        for start, end in itertools.pairwise(cuts):
            given = {"input_ids": ids[:, start:end], "attention_mask": mask[:, :end]}
            given["position_ids"] = torch.arange(start, end).unsqueeze(0)
            more = {"output_attentions": True} if start >= first else {}
            stock = model(**given, **caches[0], use_cache=True)
            found = fast(**given, **caches[1], use_cache=True, **more)
            caches = [{"cache": cache_of(one)} for one in (stock, found)]
            tokens = mask[:, start:end].bool()
            close(found.logits[tokens], stock.logits[tokens])
        if name != "mamba2":  # it has no attentions, and leaves the option out
            assert state_of_cache(caches[1]["cache"]) is None


@pytest.mark.parametrize("name", ["lfm2", "granite_dense"] if NAMES else [])
@torch.no_grad()
def test_padding_that_states_go_through(name: str) -> None:
    model, fast = build(name), optimized(name)
    ids, mask = text(2, 14, seed=4), torch.ones(2, 14, dtype=torch.int64)
    mask[0, 4:6], mask[1, 8:] = 0, 0
    options = {"attention_mask": mask, "max_new_tokens": 4, "do_sample": False}
    assert torch.equal(fast.generate(ids, **options), model.generate(ids, **options))
    caches: list[Any] = [{}, {}]
    for start, end in ((0, 3), (3, 8), (8, 14)):
        given = {"input_ids": ids[:, start:end], "attention_mask": mask[:, :end]}
        stock = model(**given, **caches[0], use_cache=True)
        found = fast(**given, **caches[1], use_cache=True)
        caches = [{"cache": cache_of(one)} for one in (stock, found)]
        tokens = mask[:, start:end].bool()
        close(found.logits[tokens], stock.logits[tokens])


@pytest.mark.parametrize("name", [n for n in NAMES if n in ("qwen3_next", "lfm2", "bamba")])
@torch.no_grad()
def test_a_single_hidden_token_counts_as_in_the_stock_model(name: str) -> None:
    """The stock models do not mask a call with one token, so padding gets into their states there."""
    model, fast = build(name), optimized(name)
    ids, mask = text(2, 12, seed=7), torch.ones(2, 12, dtype=torch.int64)
    mask[:, :4], mask[0, 9:] = 0, 0
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    caches: list[Any] = [{}, {}]
    for start, end in ((0, 1), (1, 7), (7, 12)):
        given = {
            "input_ids": ids[:, start:end],
            "attention_mask": mask[:, :end],
            "position_ids": positions[:, start:end],
        }
        stock = model(**given, **caches[0], use_cache=True)
        found = fast(**given, **caches[1], use_cache=True)
        caches = [{"cache": cache_of(one)} for one in (stock, found)]
        tokens = mask[:, start:end].bool()
        if start:  # before there are no tokens
            close(found.logits[tokens], stock.logits[tokens])


@needs_models
@torch.no_grad()
def test_weights_that_change_are_packed_again() -> None:
    fast = ipex.llm.optimize(build("granite_dense"), dtype=torch.float32)
    ids = text(1, 9)
    before = logits(fast, ids)
    fast.model.layers[0].mamba.A_log.add_(0.5)
    model = build("granite_dense")
    model.model.layers[0].mamba.A_log.add_(0.5)
    close(logits(fast, ids), logits(model, ids))
    assert not torch.allclose(before, logits(fast, ids))


@needs_models
@torch.no_grad()
def test_steps_within_limits() -> None:
    model = build("granite_dense")
    for layer in model.model.layers:
        if layer.mamba is not None:
            layer.mamba.time_step_limit = (0.5, 0.9)
    plan = match(model)
    first = plan.layers[0].attention
    assert isinstance(first, ScanPlan) and first.limits == (0.5, 0.9)
    assert verify(model, plan) < 1e-4
    ids = text(2, 9)
    assert not torch.allclose(logits(model, ids), logits(build("granite_dense"), ids), atol=1e-3)
    # The stock model keeps the steps of a first call within the limits, and no single token behind it.
    fast = ipex.llm.optimize(copy.deepcopy(model), dtype=torch.float32)
    caches: list[Any] = [{}, {}]
    for start, end in ((0, 1), (1, 2), (2, 8), (8, 9)):
        given = {"input_ids": ids[:, start:end]}
        given["position_ids"] = torch.arange(start, end).unsqueeze(0)
        stock = model(**given, **caches[0], use_cache=True)
        found = fast(**given, **caches[1], use_cache=True)
        caches = [{"cache": cache_of(one)} for one in (stock, found)]
        close(found.logits, stock.logits)


@needs_models
@torch.no_grad()
def test_what_is_not_understood_is_named() -> None:
    model = build("granite_dense")
    mamba = model.model.layers[2].mamba
    mamba.second_norm = copy.deepcopy(mamba.norm)
    with pytest.raises(MatchError, match=r"layers\.2\.mamba: \w+ has not the parts of"):
        match(model)
    model = build("lfm2")
    own = model.model.layers[0].conv.forward
    model.model.layers[0].conv.forward = lambda *args, **kwargs: 1.5 * own(*args, **kwargs)
    plan = ipex.llm.plan(model, dtype=torch.float32)
    assert plan.depth < 3 and "layers.0" in str(plan.reason)


def test_rows_of_states() -> None:
    shapes = [StateShape((3, 4), (2, 2, 3), torch.float32), StateShape((1, 2), None, torch.float32)]
    cache = PagedCache(shapes, 1, 4, torch.float32)
    sequences = Sequences(cache, 2)
    assert cache.num_states == 2 and [len(cache.tensors_of(i)) for i in range(2)] == [2, 1]
    for number, tensor in enumerate(cache.tensors):
        tensor[0], tensor[1] = number + 1, -number - 1
    step = sequences.append([3, 2])
    assert step.states is not None and step.states.tolist() == [0, 1]
    sequences.select([1, 1, 0])
    rows = sequences.states
    assert sorted(rows) == [0, 1, 2] and cache.num_states == 3
    for number, tensor in enumerate(cache.tensors):
        found = [float(tensor[row].flatten()[0]) for row in rows]
        assert found == [-number - 1, -number - 1, number + 1]
    sequences.select([0])
    assert len(sequences.states) == 1
    with pytest.raises(NotImplementedError, match="must not be removed"):
        sequences.cut([1])
    sequences.clear()
    assert sequences.lengths == [0]


@pytest.mark.parametrize("name", [n for n in NAMES if n == "zamba2_blocks"])
@torch.no_grad()
def test_shared_layers_are_packed_once_and_watched(name: str) -> None:
    model, fast, ids = build(name), ipex.llm.optimize(build(name), dtype=torch.float32), text(1, 9)
    runner = record_of(fast).runner
    sides = [one.side for one in runner.emitter.layers if one.side is not None]
    assert [one is sides[0].qkv for one in (side.qkv for side in sides)] == [True, False, True]
    assert sides[0].mlp[-1] is sides[2].mlp[-1] and sides[0].output is sides[2].output
    for one in (model, fast):  # seen from the layer that has not packed it
        one.model.layers[4].shared_transformer.self_attn.q_proj.weight.mul_(1.5)
    close(logits(fast, ids), logits(model, ids))


@pytest.mark.parametrize("form", ["INT8", "INT4"])
@pytest.mark.parametrize(
    "name",
    [
        n
        for n in NAMES
        if n
        in (
            *("jamba", "kimi_linear", "minimax", "nemotron_h_moe", "nemotron_h_latent", "zamba2"),
            *("recurrent_gemma", "xlstm"),
        )
    ],
)
@torch.no_grad()
def test_quantized_weights_in_the_program_and_layer_by_layer(name: str, form: str) -> None:
    ids = text(2, 19)
    found = []
    for depth in (3, 1):
        config = ipex.quantization.get_weight_only_quant_qconfig_mapping(
            weight_dtype=getattr(ipex.quantization.WoqWeightDtype, form), group_size=16
        )
        fast = ipex.llm.optimize(
            build(name), dtype=torch.float32, quantization_config=config, depth=depth
        )
        assert (record_of(fast).runner is not None) == (depth == 3)
        found.append(logits(fast, ids))
    close(*found)

# SPDX-License-Identifier: Apache-2.0
"""Tokens of optimized models against those of the stock model, through ``model.generate``."""

from __future__ import annotations

import copy
import logging

import pytest
import torch
from families import FAMILIES, OLD, UNPROVEN, tokens

import ipex_core
from ipex_llm.kv_cache import CACHE_DTYPES
from ipex_llm.kv_cache.transformers import state_of_cache
from ipex_llm.optimization import optimize
from ipex_llm.patch import decoder

transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.filterwarnings("ignore")


def pair(name="llama", **options):
    model = FAMILIES[name]()
    return model, optimize(model, **options)


def whole(model):
    """Return whether a model runs as programs."""
    return [row.done for row in ipex_core.explain(model).rows if row.step == "llm"] == [True]


def padded(batch=3, length=14):
    ids = tokens(batch, length)
    mask = torch.ones_like(ids)
    for row in range(batch):
        mask[row, : 3 * row] = 0
    ids[mask == 0] = 0
    return ids, mask


@pytest.mark.parametrize("name", ["llama", "mixtral", "gemma2", "gpt2", "bloom", "qwen3", "phi"])
def test_padded_batches_greedy_and_beam(name):
    model, fast = pair(name)
    ids, mask = padded()
    options = {"attention_mask": mask, "do_sample": False, "pad_token_id": 0}
    expected = model.generate(ids, max_new_tokens=30, **options)
    assert torch.equal(fast.generate(ids, max_new_tokens=30, **options), expected)
    ids = tokens(2, 11)
    options = {"do_sample": False, "num_beams": 3, "max_new_tokens": 10, "pad_token_id": 0}
    expected = model.generate(ids, num_return_sequences=2, **options)
    assert torch.equal(fast.generate(ids, num_return_sequences=2, **options), expected)


@pytest.mark.parametrize(
    "options",
    [
        {"max_new_tokens": 64},
        {"max_new_tokens": 20, "repetition_penalty": 1.3, "no_repeat_ngram_size": 2},
        {"max_new_tokens": 20, "min_new_tokens": 20, "eos_token_id": [5, 9, 11, 13]},
        {"max_new_tokens": 40, "eos_token_id": list(range(40, 60))},
        {"max_new_tokens": 6, "bad_words_ids": [[7], [8]], "suppress_tokens": [11]},
        {"max_new_tokens": 12, "prefill_chunk_size": 4},
        {"max_new_tokens": 12, "use_cache": False},
        {"max_new_tokens": 12, "prompt_lookup_num_tokens": 3},
        {"max_new_tokens": 12, "num_beams": 4, "length_penalty": 0.5, "early_stopping": True},
        {"max_new_tokens": 10, "num_beams": 2, "repetition_penalty": 1.2},
    ],
)
@pytest.mark.parametrize("batch", [1, 3])
def test_generation_config(options, batch):
    if batch > 1 and "prompt_lookup_num_tokens" in options:
        pytest.skip("transformers: one sequence")
    if OLD and "prompt_lookup_num_tokens" in options:
        pytest.skip("transformers 4: needs a token that ends")
    if OLD and batch > 1 and "prefill_chunk_size" in options:
        pytest.skip("transformers 4: positions of chunks do not know padding")
    model, fast = pair()
    ids, mask = padded(batch)
    common = {"attention_mask": mask, "do_sample": False, "pad_token_id": 0, **options}
    assert torch.equal(fast.generate(ids, **common), model.generate(ids, **common))


def test_assistant():
    model, fast = pair("qwen2")
    _, draft = pair("llama")
    ids = tokens(1, 10)
    expected = model.generate(ids, max_new_tokens=24, do_sample=False)
    got = fast.generate(ids, max_new_tokens=24, do_sample=False, assistant_model=draft)
    assert torch.equal(got, expected)


def test_outputs_and_cache():
    model, fast = pair()
    ids = tokens(2, 9)
    options = {"max_new_tokens": 6, "do_sample": False, "return_dict_in_generate": True}
    options |= {"output_scores": True, "output_logits": True}
    want, got = model.generate(ids, **options), fast.generate(ids, **options)
    assert torch.equal(got.sequences, want.sequences)
    for name in ("scores", "logits"):
        for a, b in zip(getattr(got, name), getattr(want, name), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
    # The cache that came back can be used again.
    assert got.past_key_values.get_seq_length() == 14
    more = torch.cat([got.sequences, tokens(2, 3, seed=5)], dim=1)
    expected = model.generate(more, max_new_tokens=5, do_sample=False)
    again = fast.generate(
        more, max_new_tokens=5, do_sample=False, past_key_values=got.past_key_values
    )
    assert torch.equal(again, expected)


@pytest.mark.parametrize("use_cache", [None, False, True])
def test_without_a_cache(use_cache, caplog):
    """As the configs of MPT have it; our loop runs all the same, only hands no cache out."""
    model, fast = pair("mpt")
    assert model.config.use_cache is False
    caplog.set_level(logging.INFO, "ipex.llm")
    options = {"max_new_tokens": 6, "do_sample": False, "return_dict_in_generate": True}
    options |= {"pad_token_id": 0} | ({} if use_cache is None else {"use_cache": use_cache})
    got, want = (m.generate(tokens(2, 9), **options) for m in (fast, model))
    assert torch.equal(got.sequences, want.sequences)
    assert (got.past_key_values is None) == (not use_cache)
    assert "the loop of transformers" not in caplog.text


def test_sampling_is_seeded_and_limited():
    _, fast = pair()
    ids = tokens(2, 8)
    runs = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        runs.append(
            fast.generate(
                ids, max_new_tokens=20, do_sample=True, temperature=1.5, top_k=20, top_p=0.9
            )
        )
    assert torch.equal(runs[0], runs[1])
    assert not torch.equal(runs[0], runs[2])
    greedy = fast.generate(ids, max_new_tokens=10, do_sample=False)
    assert torch.equal(fast.generate(ids, max_new_tokens=10, do_sample=True, top_k=1), greedy)
    one = fast.generate(ids, max_new_tokens=10, do_sample=True, top_k=0, top_p=1.0, min_p=1.0)
    assert torch.equal(one, greedy)


def test_sampling_follows_the_distribution():
    model, fast = pair()
    ids = tokens(1, 6)
    with torch.no_grad():
        p = (model(ids).logits[0, -1] / 0.7).softmax(-1)
    torch.manual_seed(0)
    drawn = fast.generate(
        ids.expand(4000, -1), max_new_tokens=1, do_sample=True, temperature=0.7, top_k=0
    )
    counts = torch.bincount(drawn[:, -1], minlength=p.numel()).float() / 4000
    assert (counts - p).abs().max() < 0.03


class Streamer:
    def __init__(self):
        self.tokens, self.ended = [], False

    def put(self, value):
        self.tokens += value.flatten().tolist()

    def end(self):
        self.ended = True


def test_streamer_and_stopping_criteria():
    model, fast = pair()
    ids = tokens(1, 7)
    streamer = Streamer()

    def stop(sequences, scores, **_):
        return torch.tensor([sequences.shape[1] >= 15])

    out = fast.generate(
        ids, max_new_tokens=30, do_sample=False, streamer=streamer, stopping_criteria=[stop]
    )
    assert torch.equal(out, model.generate(ids, max_new_tokens=8, do_sample=False))
    assert streamer.tokens == out[0].tolist() and streamer.ended


def test_criteria_and_processors_of_the_caller():
    """A text that a criterion ends goes on where no end token is looked for; temperatures count in scores."""
    model, fast = pair()
    ids = tokens(3, 7)
    options = {"max_new_tokens": 12, "do_sample": False, "output_scores": True}
    options |= {"logits_processor": [transformers.TemperatureLogitsWarper(0.5)]}
    options |= {"stopping_criteria": [lambda ids, scores, **_: ids[:, -1] % 3 == 0]}
    options |= {"return_dict_in_generate": True}
    want, got = (m.generate(ids, **options) for m in (model, fast))
    assert torch.equal(got.sequences, want.sequences)
    torch.testing.assert_close(got.scores[0], want.scores[0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma3", "gemma4", "mpt", "bloom"])
def test_gaps_in_the_mask(name):
    """Sliding windows and the ALiBi of MPT count the places that are hidden between tokens."""
    if name in UNPROVEN:
        pytest.skip("less is proven with transformers 4")
    model, fast = pair(name)
    ids = tokens(3, 14)
    mask = torch.ones_like(ids)
    mask[0, 4:6] = mask[1, :3] = mask[1, 7] = mask[2, 2] = 0
    with torch.no_grad():
        want, got = (m(ids, attention_mask=mask).logits for m in (model, fast))
    torch.testing.assert_close(got[mask.bool()], want[mask.bool()], rtol=1e-4, atol=1e-4)
    options = {"attention_mask": mask, "max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
    for beams in (1, 2):
        expected = model.generate(ids, num_beams=beams, **options)
        assert torch.equal(fast.generate(ids, num_beams=beams, **options), expected)
    # A gap that the next call makes.
    with torch.no_grad():
        outs = []
        for m in (model, fast):
            first = m(ids[:, :10], attention_mask=mask.flip(1)[:, 4:], use_cache=True)
            rest = {"past_key_values": first.past_key_values, "use_cache": True}
            both = torch.cat([mask.flip(1)[:, 4:], torch.ones(3, 4, dtype=torch.long)], 1)
            outs.append(m(ids[:, 10:], attention_mask=both, **rest).logits)
    torch.testing.assert_close(outs[1], outs[0], rtol=1e-4, atol=1e-4)


def test_prompts_longer_than_a_chunk_of_attention():
    if "llama4" in UNPROVEN:
        pytest.skip("less is proven with transformers 4")
    model, fast = pair("llama4")
    assert whole(fast) and model.config.attention_chunk_size == 128
    for length, beams in ((200, 1), (120, 1), (120, 2)):
        ids = tokens(2, length)
        mask = torch.ones_like(ids)
        mask[0, :3] = 0
        options = {"attention_mask": mask, "max_new_tokens": 16, "num_beams": beams}
        options |= {"do_sample": False, "pad_token_id": 0}
        assert torch.equal(fast.generate(ids, **options), model.generate(ids, **options))
    # A cache of the programs, which the own forward goes on with.
    with torch.no_grad():
        want = model(tokens(1, 140)).logits[:, 120:]
        first = fast(tokens(1, 140)[:, :120], use_cache=True)
        got = fast(tokens(1, 140)[:, 120:], past_key_values=first.past_key_values).logits
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("side", ["left", "right", "both"])
def test_padding_in_forward(side):
    model, fast = pair()
    ids = tokens(2, 12)
    mask = torch.ones_like(ids)
    if side != "right":
        mask[0, :3] = 0
    if side != "left":
        mask[1, -4:] = 0
    positions = (mask.cumsum(1) - 1).clamp_min(0)
    with torch.no_grad():
        want = model(ids, attention_mask=mask, position_ids=positions).logits
        got = fast(ids, attention_mask=mask, position_ids=positions).logits
    torch.testing.assert_close(got[mask.bool()], want[mask.bool()], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt2", "bloom", "phi", "mixtral", "opt_350m"])
def test_hidden_states_of_all_layers(name):
    model, fast = pair(name)
    ids, mask = padded(2, 10)
    decoder._told.clear()
    with torch.no_grad():
        want = model(ids, attention_mask=mask, output_hidden_states=True).hidden_states
        got = fast(ids, attention_mask=mask, output_hidden_states=True).hidden_states
    # OPT 350m ends its layers in norms: its own forward has to give them.
    assert bool(decoder._told) == (name == "opt_350m")
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a[mask.bool()], b[mask.bool()], rtol=1e-4, atol=1e-4)


def test_what_programs_cannot_do_runs_as_before(caplog):
    model, fast = pair()
    ids, mask = padded(2, 10)
    decoder._told.clear()
    with torch.no_grad(), caplog.at_level(logging.INFO, logger="ipex.llm"):
        want = model(ids, attention_mask=mask, output_attentions=True)
        for _ in range(2):
            got = fast(ids, attention_mask=mask, output_attentions=True)
    told = [r for r in caplog.records if "runs its own forward" in r.message]
    assert len(told) == 1
    keep = mask.bool()
    torch.testing.assert_close(got.logits[keep], want.logits[keep], rtol=1e-4, atol=1e-4)
    # A call in between on the same cache.
    with torch.no_grad():
        first = fast(ids, attention_mask=mask, use_cache=True)
        longer = torch.cat([mask, mask.new_ones(2, 1)], dim=1)
        token = tokens(2, 1, seed=3)
        second = fast(
            token,
            attention_mask=longer,
            past_key_values=first.past_key_values,
            position_ids=torch.full((2, 1), 10),
            output_attentions=True,
        )
        whole_ids = torch.cat([ids, token], dim=1)
        positions = torch.arange(11).expand(2, -1)
        want = model(whole_ids, attention_mask=longer, position_ids=positions).logits[:, -1]
    assert state_of_cache(first.past_key_values) is not None
    torch.testing.assert_close(second.logits[:, -1], want, rtol=1e-4, atol=1e-4)
    # Embeddings, labels, gradients.
    with torch.no_grad():
        embeds = model.get_input_embeddings()(ids)
        torch.testing.assert_close(
            fast(inputs_embeds=embeds).logits,
            model(inputs_embeds=embeds).logits,
            rtol=1e-4,
            atol=1e-4,
        )
        torch.testing.assert_close(fast(ids, labels=ids).loss, model(ids, labels=ids).loss)
    fast(ids, labels=ids).loss.backward()
    model(ids, labels=ids).loss.backward()
    name = "model.layers.0.self_attn.q_proj.bias"
    for key, parameter in fast.named_parameters():
        if key.endswith("norm.weight") or key == name:
            want = dict(model.named_parameters())[key].grad
            torch.testing.assert_close(parameter.grad, want, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("dtype", ["int8", "fp8_e5m2", "fp8_e4m3"])
def test_small_caches(dtype):
    model, fast = pair(kv_cache_dtype=dtype)
    ids = tokens(1, 30)
    out = fast.generate(
        ids, max_new_tokens=4, do_sample=False, return_dict_in_generate=True, output_logits=True
    )
    cache = state_of_cache(out.past_key_values).cache
    assert cache.dtype == CACHE_DTYPES[dtype]
    with torch.no_grad():
        want = model(out.sequences).logits[0, -2]
    close = torch.nn.functional.cosine_similarity(out.logits[-1][0], want, dim=0)
    assert close > {"int8": 0.999, "fp8_e4m3": 0.98, "fp8_e5m2": 0.95}[dtype]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_reduced_dtypes(dtype):
    model, fast = pair("llama", dtype=dtype)
    assert whole(fast)
    ids = tokens(2, 20)
    with torch.no_grad():
        got = fast(ids).logits.float()
        want = copy.deepcopy(model).to(dtype)(ids).logits.float()
        exact = model(ids).logits
    assert (got - exact).norm() <= 1.2 * (want - exact).norm() + 1e-3
    assert fast.generate(ids, max_new_tokens=8, do_sample=False).shape == (2, 28)


def test_functions_of_ipex():
    from ipex_llm.generation import hf_beam_search, hf_greedy_search, hf_sample

    model, fast = pair()
    ids = tokens(2, 8)
    expected = model.generate(ids, max_new_tokens=8, do_sample=False)
    assert torch.equal(hf_greedy_search(fast, ids, max_length=16), expected)
    expected = model.generate(ids, max_new_tokens=8, do_sample=False, num_beams=3)
    assert torch.equal(hf_beam_search(fast, ids, num_beams=3, max_length=16), expected)
    assert hf_sample(fast, ids, max_length=12).shape == (2, 12)


def test_token_latency():
    _, fast = pair()
    fast.config.token_latency = True
    out, times = fast.generate(tokens(1, 5), max_new_tokens=7, do_sample=False)
    assert out.shape == (1, 12) and len(times) == 7

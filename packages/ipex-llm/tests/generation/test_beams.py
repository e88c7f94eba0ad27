# SPDX-License-Identifier: Apache-2.0
"""Beams of optimized models against those of the stock model: tokens, scores and the beams they came from."""

from __future__ import annotations

import copy
import logging

import pytest
import torch
from families import FAMILIES, UNPROVEN, tokens

from ipex_llm.generation._beam import BeamLoop
from ipex_llm.kv_cache.transformers import state_of_cache
from ipex_llm.optimization import optimize
from ipex_llm.patch import decoder

transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.filterwarnings("ignore")

SOME = list(range(20, 60))
DETAILED = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}
FULL = [
    name
    for name in ("llama", "gpt2", "gptj", "bloom", "opt", "gemma2", "mistral", "qwen3", "mixtral")
    if name in FAMILIES
]


@pytest.fixture(scope="module")
def llama():
    model = FAMILIES["llama"]()
    return model, optimize(copy.deepcopy(model))


@pytest.fixture
def searches(monkeypatch):
    """Count runs of our loop."""
    runs = []
    search = BeamLoop.search

    def counted(self, *args):
        runs.append(self)
        return search(self, *args)

    monkeypatch.setattr(BeamLoop, "search", counted)
    return runs


def batch(side="left"):
    """Return prompts of 12 and 7 tokens."""
    ids = tokens(2, 12)
    mask = torch.ones_like(ids)
    padding = slice(0, 5) if side == "left" else slice(7, 12)
    mask[1, padding] = 0
    ids[1, padding] = 0
    return ids, mask


def compare(pair, searches, ids, mask, **options):
    """Check that everything equals and that our loop ran, and return the output."""
    model, fast = pair
    options = {"num_beams": 4, "max_new_tokens": 14, "pad_token_id": 2, **DETAILED, **options}
    options = {"do_sample": False, "attention_mask": mask, **options}
    torch.manual_seed(3)
    want = model.generate(ids, **options)
    torch.manual_seed(3)
    got = fast.generate(ids, **options)
    assert len(searches) == 1
    assert torch.equal(got.sequences, want.sequences)
    assert torch.equal(got.beam_indices, want.beam_indices)
    torch.testing.assert_close(got.sequences_scores, want.sequences_scores, rtol=1e-4, atol=1e-4)
    for name in ("scores", "logits"):
        pairs = zip(getattr(got, name), getattr(want, name), strict=True)
        for a, b in pairs:
            torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-3)
    assert type(got) is type(want)
    return got


@pytest.mark.parametrize("name", FULL)
def test_families(name, searches):
    if name in UNPROVEN:
        pytest.skip("less is proven with transformers 4")
    model = FAMILIES[name]()
    pair = model, optimize(copy.deepcopy(model))
    compare(pair, searches, *batch(), num_return_sequences=2, eos_token_id=SOME[:3])


@pytest.mark.parametrize(
    "options",
    [
        {"num_beams": 1, "num_return_sequences": 1, "do_sample": False, "max_new_tokens": 3},
        {"num_return_sequences": 4},
        {"eos_token_id": SOME},
        {"eos_token_id": SOME, "early_stopping": True},
        {"eos_token_id": SOME, "early_stopping": "never", "num_return_sequences": 3},
        {"eos_token_id": SOME, "length_penalty": 0.0, "num_return_sequences": 3},
        {"eos_token_id": SOME, "length_penalty": -1.5, "early_stopping": True},
        {"eos_token_id": SOME, "length_penalty": 3.0, "early_stopping": "never"},
        {"eos_token_id": SOME, "min_new_tokens": 6, "max_new_tokens": 9},
        {"eos_token_id": 7, "min_length": 20, "max_new_tokens": 10},
        {"repetition_penalty": 1.4, "no_repeat_ngram_size": 2},
        {"eos_token_id": SOME[:4], "forced_eos_token_id": SOME[0], "bad_words_ids": [[7], [8, 9]]},
        {"max_new_tokens": 1, "num_return_sequences": 2},
        {"do_sample": True, "temperature": 1.3, "top_k": 20, "top_p": 0.9},
        {"do_sample": True, "eos_token_id": SOME[:10], "num_return_sequences": 3},
        {"num_beams": 9, "max_new_tokens": 40, "prefill_chunk_size": 5},
    ],
)
def test_generation_config(llama, searches, options):
    if options.get("num_beams") == 1:
        model, fast = llama
        ids, mask = batch()
        options = options | {"attention_mask": mask, "pad_token_id": 2}
        assert torch.equal(fast.generate(ids, **options), model.generate(ids, **options))
        assert not searches
        return
    compare(llama, searches, *batch(), **options)


@pytest.mark.parametrize("side", ["left", "right"])
def test_beams_of_a_batch_are_those_of_each_prompt_alone(llama, searches, side):
    """Padding on the right too, which transformers reads as part of the prompt."""
    _, fast = llama
    ids, mask = batch(side)
    options = {"num_beams": 3, "max_new_tokens": 10, "do_sample": False, "eos_token_id": None}
    options |= {"return_dict_in_generate": True, "output_scores": True}
    got = fast.generate(ids, attention_mask=mask, pad_token_id=0, **options)
    for row in range(2):
        alone = fast.generate(ids[row : row + 1, mask[row].bool()], **options)
        assert torch.equal(got.sequences[row, 12:], alone.sequences[0, -10:])
        torch.testing.assert_close(got.sequences_scores[row], alone.sequences_scores[0])
    assert len(searches) == 3


def test_prompts_are_read_once_and_blocks_are_shared(llama, searches):
    ids = tokens(1, 100)
    out = compare(llama, searches, ids, torch.ones_like(ids), max_new_tokens=3)
    sequences = state_of_cache(out.past_key_values).sequences
    assert sequences.lengths == [102] * 4
    # Of 100 tokens three blocks of 32 are full.
    assert all(blocks[:3] == sequences.blocks[0][:3] for blocks in sequences.blocks)
    assert len({blocks[3] for blocks in sequences.blocks}) > 1


def test_the_cache_goes_on(llama):
    """The cache is that of the beams that were last, without their last token."""
    model, fast = llama
    ids = tokens(1, 9)
    options = {"num_beams": 2, "max_new_tokens": 5, "do_sample": False, **DETAILED}
    out = fast.generate(ids, **options)
    assert out.past_key_values.get_seq_length() == 13
    assert model.generate(ids, **options).past_key_values.get_seq_length() == 13


def test_stopping_criteria(llama, searches):
    def stop(sequences, scores, **_):
        assert len(scores) == sequences.shape[1] - 12
        return (sequences[:, -1] % 5 == 0) & (sequences.shape[1] > 14)

    compare(llama, searches, *batch(), stopping_criteria=[stop], num_return_sequences=2)


def test_what_the_loop_cannot_do_runs_as_before(llama, searches, caplog):
    model, fast = llama
    ids, mask = batch()
    decoder._told.clear()
    options = {"num_beams": 2, "max_new_tokens": 4, "attention_mask": mask, "do_sample": False}
    options |= {"pad_token_id": 2, "return_dict_in_generate": True}
    with caplog.at_level(logging.INFO, logger="ipex.llm"):
        got = fast.generate(ids, output_hidden_states=True, **options)
    want = model.generate(ids, output_hidden_states=True, **options)
    assert torch.equal(got.sequences, want.sequences)
    assert not searches
    without = fast.generate(ids, use_cache=False, **options)
    assert torch.equal(without.sequences, want.sequences) and without.past_key_values is None
    assert [r for r in caplog.records if "the loop of transformers runs" in r.message]


def test_token_latency(llama):
    _, fast = llama
    fast.config.token_latency = True
    try:
        out, times = fast.generate(tokens(1, 5), max_new_tokens=7, num_beams=2, do_sample=False)
    finally:
        del fast.config.token_latency
    assert out.shape == (1, 12) and len(times) == 7


@pytest.mark.parametrize("sample", [False, True])
def test_functions_of_ipex(llama, searches, sample):
    from ipex_llm.generation import hf_beam_sample, hf_beam_search

    class Scorer:
        num_beams, length_penalty, do_early_stopping, num_beam_hyps_to_keep = 3, 0.5, True, 2

    model, fast = llama
    ids, mask = batch()
    options = {"num_beams": 3, "length_penalty": 0.5, "early_stopping": True, "pad_token_id": 2}
    options |= {"num_return_sequences": 2, "attention_mask": mask, "eos_token_id": SOME[:9]}
    torch.manual_seed(1)
    want = model.generate(ids, max_length=24, do_sample=sample, top_k=0, **options)
    function = hf_beam_sample if sample else hf_beam_search
    torch.manual_seed(1)
    assert torch.equal(function(fast, ids, max_length=24, **options), want)
    repeated = {"attention_mask": mask.repeat_interleave(3, 0), "eos_token_id": SOME[:9]}
    torch.manual_seed(1)
    got = function(
        fast, ids.repeat_interleave(3, 0), Scorer(), max_length=24, pad_token_id=2, **repeated
    )
    assert torch.equal(got, want)
    assert len(searches) == 2

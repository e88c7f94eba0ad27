# SPDX-License-Identifier: Apache-2.0
"""Requests with unusual parameters side by side give what each gives alone, and what the stock model gives."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from small_llama import llama

import ipex_llm
from ipex_llm.engine import Engine, SamplingParams
from ipex_llm.model_loader.make import make_tokenizer

pytest.importorskip("transformers")

VOCAB, COUNT = 512, 12
NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1}


@pytest.fixture(scope="module")
def parts() -> tuple[Any, Any, Any]:
    model = llama(vocab_size=VOCAB, max_position_embeddings=512)
    for parameter in model.parameters():
        if parameter.dim() == 2:
            parameter.data.mul_(4)
    return model, ipex_llm.optimize(model, dtype=torch.float32), make_tokenizer()


def engine_of(parts: tuple[Any, Any, Any], **options: Any) -> Engine:
    most = {"num_blocks": 200, "max_num_seqs": 5, "max_tokens_per_step": 24}
    return Engine(parts[1], parts[2], block_size=4, eos_token_ids=(1,), **{**most, **options})


def params(rng: random.Random) -> SamplingParams:
    """Return random parameters: greedy or sampled, penalties, stops over borders of tokens, log probabilities."""
    chosen: dict[str, Any] = {"max_new_tokens": rng.randrange(1, 24)}

    def maybe(share: float, **values: Any) -> None:
        if rng.random() < share:
            chosen.update(values)

    maybe(
        0.5,
        temperature=rng.choice([0.3, 1.0, 2.0]),
        seed=rng.randrange(99),
        top_k=rng.choice([0, 3, 40]),
        top_p=rng.choice([1.0, 0.7]),
        min_p=rng.choice([0.0, 0.05]),
    )
    maybe(0.4, logprobs=rng.choice([0, 1, 5]))
    maybe(0.3, prompt_logprobs=rng.choice([0, 2]))
    maybe(0.3, stop=tuple(rng.sample(["e", "th", "ab", "  ", "\n", "x y", "é", "aa"], 2)))
    maybe(0.3, stop_token_ids=(rng.randrange(3, VOCAB),))
    maybe(0.3, include_stop=True)
    maybe(0.3, min_new_tokens=rng.randrange(chosen["max_new_tokens"] + 1))
    maybe(0.3, repetition_penalty=rng.choice([1.3, 0.8]))
    maybe(0.3, presence_penalty=1.0)
    maybe(0.2, frequency_penalty=0.7)
    maybe(0.2, logit_bias={rng.randrange(VOCAB): rng.choice([-50, 5])})
    maybe(0.2, ignore_eos=True)
    maybe(0.2, skip_special_tokens=False)
    return SamplingParams(**chosen)


def requests(rng: random.Random, tokenizer: Any) -> list[tuple[list[int], SamplingParams]]:
    """Return requests; the prompts of some begin alike."""
    text = tokenizer.encode("The quick brown fox jumps over the lazy dog and")
    starts = [text[: rng.randrange(4, 40)] for _ in range(4)]
    tails = [[rng.randrange(3, VOCAB) for _ in range(rng.randrange(12))] for _ in range(COUNT)]
    return [([*rng.choice(starts), *tail], params(rng)) for tail in tails]


def assert_near(got: Any, want: Any) -> None:
    assert len(got or ()) == len(want or ())
    for a, b in zip(got or (), want or (), strict=True):
        assert a.token == b.token and a.logprob == pytest.approx(b.logprob, abs=2e-3)
        assert [v for _, v in a.top] == pytest.approx([v for _, v in b.top], abs=2e-3)


@pytest.mark.parametrize("speculative", [None, NGRAM], ids=["plain", "ngram"])
@pytest.mark.parametrize("seed", [0, 1])
def test_side_by_side_as_alone(parts: Any, seed: int, speculative: Any) -> None:
    model, _, tokenizer = parts
    asked = requests(random.Random(seed), tokenizer)
    alone = engine_of(parts, prefix_reuse=False)
    want = [alone.generate([prompt], [one])[0] for prompt, one in asked]
    engine = engine_of(parts, speculative_config=speculative)
    prompts, every = ([one[i] for one in asked] for i in range(2))
    for _ in range(2):  # the second time with prefixes in the cache
        for got, one in zip(engine.generate(prompts, every), want, strict=True):
            assert (got.tokens, got.text, got.reason) == (one.tokens, one.text, one.reason)
            assert_near(got.logprobs, one.logprobs)
            assert_near(got.prompt_logprobs, one.prompt_logprobs)
    for (prompt, one), output in zip(asked, want, strict=True):
        if one.logprobs is None or not output.tokens:
            continue
        with torch.inference_mode():
            ids = torch.tensor([[*prompt, *output.tokens]])
            rows = model(input_ids=ids).logits[0].log_softmax(-1)
        for place, entry in enumerate(output.logprobs):
            expected = float(rows[len(prompt) - 1 + place, entry.token])
            assert entry.logprob == pytest.approx(expected, abs=2e-3)


@pytest.mark.parametrize("speculative", [None, NGRAM], ids=["plain", "ngram"])
def test_cancelled_requests_change_no_others(parts: Any, speculative: Any) -> None:
    asked = requests(random.Random(5), parts[2])
    asked = [(prompt, one.replace(stop=())) for prompt, one in asked]
    alone = engine_of(parts, prefix_reuse=False)
    want = [alone.generate([prompt], [one])[0].tokens for prompt, one in asked]
    engine = engine_of(parts, speculative_config=speculative)
    names = [engine.add_request(prompt, one) for prompt, one in asked]
    found: dict[str, tuple[int, ...]] = dict.fromkeys(names, ())
    steps = 0
    while engine.has_work:
        for output in engine.step():
            found[output.request_id] += tuple(output.tokens)
        steps += 1
        if steps in (2, 4):
            for name in names[steps // 2 :: 4]:
                engine.cancel(name)
    kept = [i for i in range(COUNT) if i % 4 not in (1, 2)]
    assert [found[names[i]] for i in kept] == [want[i] for i in kept]
    assert engine.stats().running == 0

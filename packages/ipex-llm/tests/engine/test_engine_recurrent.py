# SPDX-License-Identifier: Apache-2.0
"""The engine with recurrent layers: each request has a row of the states, which the next one gets."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from families import VOCAB
from recurrent_models import NAMES, build

import ipex
from ipex.llm import Engine, SamplingParams

needs_models = pytest.mark.skipif(not NAMES, reason="transformers 4 has other caches of states")


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(3, VOCAB, (n,), generator=generator).tolist() for n in (5, 40, 17, 3, 29)]


@torch.no_grad()
def greedy(model: Any, prompt: list[int], count: int) -> list[int]:
    ids = torch.tensor([prompt])
    found = model.generate(ids, max_new_tokens=count, do_sample=False, pad_token_id=0)
    return found[0, len(prompt) :].tolist()  # type: ignore[no-any-return]


def run(engine: Engine, later: dict[int, list[list[int]]], count: int) -> list[list[int]]:
    """Run requests that are added before the steps of these numbers, and return their tokens."""
    params = SamplingParams(max_new_tokens=count, ignore_eos=True)
    names: list[str] = []
    found: dict[str, list[int]] = {}
    step = 0
    while step <= max(later) or engine.has_work:
        names += [engine.add_request(prompt, params) for prompt in later.get(step, ())]
        for output in engine.step():
            found.setdefault(output.request_id, []).extend(output.tokens)
        step += 1
    return [found[name] for name in names]


@pytest.mark.parametrize("name", NAMES)
def test_interleaved_requests(name: str) -> None:
    model, texts = build(name), prompts()
    want = [greedy(model, text, 10) for text in texts]
    fast = ipex.llm.optimize(build(name), dtype=torch.float32)
    options = {"max_num_seqs": 3, "max_tokens_per_step": 16, "max_state_snapshots": 16}
    engine = Engine(fast, block_size=8, num_blocks=32, **options)
    later = {0: texts[:2], 2: texts[2:3], 5: texts[3:]}
    assert run(engine, later, 10) == want
    # The same texts again, from the states at the ends of their last full blocks.
    assert engine.stats().cached_tokens == 0
    assert run(engine, later, 10) == want
    assert engine.stats().cached_tokens >= 32


def engine_of(name: str, **options: Any) -> Engine:
    fast = ipex.llm.optimize(build(name), dtype=torch.float32)
    return Engine(fast, max_num_seqs=2, block_size=8, num_blocks=64, **options)


@pytest.mark.parametrize("name", [n for n in NAMES if n in ("qwen3_next", "lfm2", "mamba2")])
def test_a_conversation_goes_on_from_its_state(name: str) -> None:
    model, engine, text = build(name), engine_of(name), prompts()[2]
    cached = 0
    for _ in range(3):
        want = greedy(model, text, 33)
        before = engine.stats().cached_tokens
        assert run(engine, {0: [text]}, 33) == [want]
        assert engine.stats().cached_tokens - before == cached
        # At the end of each fourth block of an output; the last token has not been in the model.
        cached = max((len(text) - 1) // 8 * 8, (len(text) + 32) // 32 * 32)
        text = [*text, *want, 7, 11, 5]


@needs_models
def test_prefixes_without_a_state_are_computed() -> None:
    model, text = build("lfm2"), prompts()[1]  # of 40 tokens
    engine = engine_of("lfm2", max_state_snapshots=1)
    assert run(engine, {0: [text]}, 2) == [greedy(model, text, 2)]
    short = text[:20]  # its blocks are there, with the keys and values; the state is of 32 tokens
    for one, cached in ((short, 0), (text, 16), (text, 32)):
        before = engine.stats().cached_tokens
        assert run(engine, {0: [one]}, 2) == [greedy(model, one, 2)]
        assert engine.stats().cached_tokens - before == cached
    engine.forget_prefixes()
    assert run(engine, {0: [text]}, 2) == [greedy(model, text, 2)]
    assert engine.stats().cached_tokens == 48
    for options in ({"max_state_snapshots": 0}, {"prefix_reuse": False}):
        engine = engine_of("lfm2", **options)
        assert run(engine, {0: [text], 1: [text], 9: [text]}, 2) == 3 * [greedy(model, text, 2)]
        assert engine.stats().cached_tokens == 0
    for wrong in (-1, True, 0.0, "4"):
        with pytest.raises(ValueError, match=f"max_state_snapshots must be .*, got {wrong!r}"):
            engine_of("lfm2", max_state_snapshots=wrong)
    with pytest.raises(MemoryError, match="states of"):
        engine_of("lfm2", max_state_snapshots=1 << 40)


@needs_models
def test_a_state_that_is_not_finite_is_not_kept() -> None:
    model, text = build("lfm2"), prompts()[1]
    engine = engine_of("lfm2")
    own = engine.runner.forward

    def spoiled(cache: Any, *args: Any, **kwargs: Any) -> Any:
        found = own(cache, *args, **kwargs)
        for one in cache.tensors:
            one[:2] = float("nan")
        return found * float("nan")

    engine.runner.forward = spoiled
    engine.add_request(text, SamplingParams(max_new_tokens=2))
    reasons = [output.reason for _ in range(4) for output in engine.step()]
    assert reasons == ["error"]
    engine.runner.forward = own
    assert run(engine, {0: [text]}, 4) == [greedy(model, text, 4)]
    assert engine.stats().cached_tokens == 0


@needs_models
def test_requests_that_give_way_begin_again() -> None:
    model, texts = build("lfm2"), prompts()[:3]
    fast = ipex.llm.optimize(build("lfm2"), dtype=torch.float32)
    engine = Engine(fast, max_num_seqs=3, max_tokens_per_step=16, block_size=8, num_blocks=10)
    assert run(engine, {0: texts}, 24) == [greedy(model, text, 24) for text in texts]
    assert engine.stats().preemptions > 0


@needs_models
def test_a_step_that_fails_can_be_done_again(monkeypatch: pytest.MonkeyPatch) -> None:
    model, texts = build("lfm2"), prompts()[:2]
    fast = ipex.llm.optimize(build("lfm2"), dtype=torch.float32)
    engine = Engine(fast, max_num_seqs=2, block_size=8, num_blocks=24)
    params = SamplingParams(max_new_tokens=8, ignore_eos=True)
    names = [engine.add_request(text, params) for text in texts]
    found: dict[str, list[int]] = {name: [] for name in names}

    def step() -> None:
        for output in engine.step():
            found[output.request_id].extend(output.tokens)

    step()
    step()
    own = engine.runner.forward

    def fails(*args: Any, **kwargs: Any) -> Any:
        own(*args, **kwargs)  # the states have gone on
        raise RuntimeError("lost")

    monkeypatch.setattr(engine.runner, "forward", fails)
    with pytest.raises(RuntimeError, match="lost"):
        engine.step()
    monkeypatch.undo()
    while engine.has_work:
        step()
    assert list(found.values()) == [greedy(model, text, 8) for text in texts]


@needs_models
def test_guesses_are_refused() -> None:
    fast = ipex.llm.optimize(build("lfm2"), dtype=torch.float32)
    with pytest.raises(ValueError, match="speculative_config must be None for a model with recur"):
        Engine(fast, num_blocks=8, speculative_config={"method": "ngram"})

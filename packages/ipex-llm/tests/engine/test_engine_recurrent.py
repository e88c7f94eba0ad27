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
    engine = Engine(fast, max_num_seqs=3, max_tokens_per_step=16, block_size=8, num_blocks=24)
    later = {0: texts[:2], 2: texts[2:3], 5: texts[3:]}
    assert run(engine, later, 10) == want
    # The same texts again: no prefix is found, whose state is gone.
    assert run(engine, later, 10) == want
    assert engine.stats().cached_tokens == 0


@needs_models
def test_requests_that_give_way_begin_again() -> None:
    model, texts = build("lfm2"), prompts()[:3]
    fast = ipex.llm.optimize(build("lfm2"), dtype=torch.float32)
    engine = Engine(fast, max_num_seqs=3, max_tokens_per_step=16, block_size=8, num_blocks=10)
    assert run(engine, {0: texts}, 20) == [greedy(model, text, 20) for text in texts]
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

# SPDX-License-Identifier: Apache-2.0
"""`ipex_llm.engine`: requests that are cancelled, that fail, and that are refused."""

from __future__ import annotations

import pytest
import torch
from fake_runner import GREEDY, CharTokenizer, FakeRunner, drain, engine, prompts

from ipex_llm.engine import Engine, SamplingParams
from ipex_llm.records import record_of, update


def test_cancelled_requests_free_their_blocks():
    e = engine(max_num_seqs=1, prefix_reuse=False)
    running, waiting = e.add_request([1] * 9, GREEDY), e.add_request([2], GREEDY)
    e.step()
    assert e.cancel(running) and e.cancel(waiting)
    assert not e.cancel(running) and not e.cancel("unknown")
    assert e.stats().blocks_held == 0
    assert [(o.request_id, o.reason) for o in e.step()] == [
        (running, "cancelled"),
        (waiting, "cancelled"),
    ]
    assert not e.has_work and e.step() == []
    assert e.stats().cancelled == 2


def test_a_stream_that_is_left_is_cancelled():
    e = engine()
    other = e.add_request([1], SamplingParams(max_new_tokens=3))
    stream = e.stream([2, 3], GREEDY)
    next(stream)
    stream.close()
    found = drain(e)
    assert list(found) == [other]
    assert sum(len(o.tokens) for o in found[other]) == 3
    assert e.stats().cancelled == 1


def test_a_failed_step_can_be_repeated():
    runner = FakeRunner()
    e = engine(runner)
    e.add_request([1, 2, 3], GREEDY)
    e.step()
    runner.broken = True
    with pytest.raises(RuntimeError, match="broken"):
        e.step()
    runner.broken = False
    tokens = [t for o in drain(e)["r0"] for t in o.tokens]
    assert tuple(tokens) == runner.alone([1, 2, 3], 12)[1:]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_not_finite_end_one_request(value, temperature):
    runner = FakeRunner()
    runner.poison = {63: value}
    e = engine(runner, tokenizer=CharTokenizer(), max_tokens_per_step=8)
    bad = [5] * 9 + [63, 1]
    asked = [[1, 2, 3], bad, [4] * 12, bad]
    params = SamplingParams(max_new_tokens=4, seed=1, logprobs=1)
    outputs = e.generate(asked, [params, *[params.replace(temperature=temperature)] * 3])
    good, first, _, second = outputs
    healthy = runner.alone([1, 2, 3], 4)
    assert good.tokens[: healthy.index(63) if 63 in healthy else 4] == healthy
    assert good.error is None
    for failed in (first, second):
        assert failed.reason == "error" and failed.tokens == () and failed.logprobs == ()
        assert failed.error == (
            "Engine.step: the logits after token 11 must be finite, got NaN or infinity"
        )
    stats = e.stats()
    assert stats.failed == 2 and stats.blocks_held == 0 and not e.has_work
    # What it left in the cache is not used again.
    assert e.generate([[*bad[:8], 2]], params)[0].cached_tokens == 0


def test_logits_that_are_not_finite_later_keep_what_came_before():
    runner = FakeRunner()
    # A prompt whose output repeats nothing at first.
    prompt, tokens = next(
        (p, t) for p in prompts(50) if (t := runner.alone(p, 12))[5] not in [*p, *t[:5]]
    )
    poison = tokens[5]
    runner.poison = {poison: float("nan")}
    e = engine(runner, tokenizer=CharTokenizer())
    (*before, last) = e.stream(prompt, GREEDY)
    count = tokens.index(poison) + 1
    assert tuple(t for o in before for t in o.tokens) == tokens[:count]
    assert last.finished and last.reason == "error" and last.tokens == ()


@pytest.mark.parametrize(
    ("prompt", "error", "message"),
    [
        ([], ValueError, "at least one token"),
        ("", ValueError, "at least one token"),
        ([1] * 256, ValueError, "fewer than 256 tokens, the context of this engine, got 256"),
        ([1, 64], ValueError, r"ids in \[0, 64\), got 64"),
        ([-1], ValueError, "got -1"),
        ([1.5], TypeError, "text or a list of integers"),
        ([True], TypeError, "text or a list of integers"),
        (5, TypeError, "text or a list of integers, got int"),
        (torch.ones(3), TypeError, "integers"),
        (torch.ones(2, 2, dtype=torch.int64), TypeError, r"\[1, T\]"),
    ],
)
def test_bad_prompts(prompt, error, message):
    e = engine(tokenizer=CharTokenizer(), num_blocks=1000)
    with pytest.raises(error, match=f"Engine.add_request: prompt must .*{message}"):
        e.add_request(prompt)
    assert not e.has_work


def test_text_needs_a_tokenizer():
    with pytest.raises(TypeError, match="without a tokenizer"):
        engine().add_request("text")
    with pytest.raises(ValueError, match="stop must be empty"):
        engine().add_request([1], SamplingParams(stop="x"))
    with pytest.raises(ValueError, match="must not be in use"):
        e = engine()
        e.add_request([1], request_id="a")
        e.add_request([1], request_id="a")
    with pytest.raises(TypeError, match="params must be"):
        engine().add_request([1], {"max_new_tokens": 3})
    with pytest.raises(ValueError, match="one or 1"):
        engine().generate([[1]], [GREEDY, GREEDY])


def test_generate_checks_all_prompts_first():
    e = engine()
    with pytest.raises(ValueError, match="at least one token"):
        e.generate([[1], []])
    assert [o.reason for o in e.step()] == ["cancelled"] and not e.has_work


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens must be a positive integer, got 0"),
        ({"max_new_tokens": 2.5}, "max_new_tokens"),
        ({"min_new_tokens": 200}, "min_new_tokens must be between"),
        ({"temperature": -1}, "temperature must be 0 or in"),
        ({"temperature": float("nan")}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"top_k": -1}, "top_k must be an integer in"),
        ({"top_p": 1.5}, r"top_p must be in \[0, 1\], got 1.5"),
        ({"min_p": -0.1}, "min_p"),
        ({"seed": "x"}, "seed"),
        ({"seed": 2**64}, "seed"),
        ({"repetition_penalty": 0}, "repetition_penalty must be positive"),
        ({"presence_penalty": float("inf")}, "presence_penalty"),
        ({"stop": ("",)}, "stop must be strings that are not empty"),
        ({"stop": ("x",) * 17}, "at most 16"),
        ({"stop_token_ids": (-1,)}, "stop_token_ids"),
        ({"logprobs": 51}, "logprobs"),
    ],
)
def test_bad_sampling_parameters(options, message):
    with pytest.raises(ValueError, match=f"SamplingParams: .*{message}"):
        SamplingParams(**options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_num_seqs": 0}, "max_num_seqs must be a positive integer"),
        ({"block_size": -1}, "block_size"),
        ({"num_blocks": 0}, "num_blocks"),
        ({"num_blocks": 1, "cache_bytes": 1}, "not both"),
        ({"max_model_len": 257}, "at most 256, the context of the model"),
    ],
)
def test_bad_engine_arguments(options, message):
    with pytest.raises(ValueError, match=f"Engine: .*{message}"):
        Engine(FakeRunner(), **options)


def test_only_runners_and_optimized_models():
    with pytest.raises(TypeError, match=r"ipex\.llm\.optimize"):
        Engine(torch.nn.Linear(2, 2))
    model = torch.nn.Linear(2, 2)
    update(model, runner=FakeRunner())
    assert Engine(model, num_blocks=1).runner is record_of(model).runner

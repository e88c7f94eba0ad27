# SPDX-License-Identifier: Apache-2.0
"""`ipex_llm.engine` on a runner that checks the paged cache."""

from __future__ import annotations

import threading

import pytest
import torch
from fake_runner import GREEDY, CharTokenizer, FakeRunner, drain, engine, prompts
from hypothesis import given, settings
from hypothesis import strategies as st

from ipex_llm.engine import CacheMemoryError, Engine, SamplingParams
from ipex_llm.engine.request import MaskThreads, TextStream, block_key
from ipex_llm.engine.scheduler import BlockPool

# -- tokens ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reuse", [False, True])
@pytest.mark.parametrize(
    ("blocks", "seqs", "budget"), [(64, 8, 64), (200, 32, 8), (14, 8, 5), (14, 1, 1), (16, 4, 1000)]
)
def test_tokens_are_those_of_each_request_alone(blocks, seqs, budget, reuse):
    runner = FakeRunner()
    e = engine(
        runner,
        num_blocks=blocks,
        max_num_seqs=seqs,
        max_tokens_per_step=budget,
        prefix_reuse=reuse,
    )
    asked = prompts(20)
    outputs = e.generate(asked, GREEDY)
    for prompt, output in zip(asked, outputs, strict=True):
        assert output.tokens == runner.alone(prompt, 12)
        assert output.reason == "length" and output.prompt_tokens == len(prompt)
    assert max(runner.batches) <= max(budget, seqs)
    stats = e.stats()
    assert stats.blocks_held == stats.running == stats.waiting == 0
    assert stats.finished == 20 and stats.generated_tokens == 240
    if blocks == 14 and seqs == 8:
        assert stats.preemptions > 0


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_any_order_of_requests_and_cancellations(data):
    runner = FakeRunner()
    e = engine(runner, num_blocks=16, max_num_seqs=4, max_tokens_per_step=7)
    waiting = prompts(10, most=24, seed=data.draw(st.integers(0, 100)))
    waiting += [[*p[:8], 5] for p in waiting if len(p) > 8]
    expected, got, cancelled = {}, {}, set()
    while waiting or e.has_work:
        action = data.draw(st.sampled_from("aassssc"))
        if action == "a" and waiting:
            prompt = waiting.pop()
            count = data.draw(st.integers(1, 10))
            name = e.add_request(prompt, SamplingParams(max_new_tokens=count))
            expected[name] = runner.alone(prompt, count)
        elif action == "c" and expected:
            name = data.draw(st.sampled_from(sorted(expected)))
            if e.cancel(name):
                cancelled.add(name)
        for output in e.step():
            got.setdefault(output.request_id, []).extend(output.tokens)
            assert output.reason != "cancelled" or output.request_id in cancelled
    for name, tokens in expected.items():
        length = len(got.get(name, ()))
        assert tuple(got.get(name, ())) == tokens[:length]
        assert name in cancelled or length == len(tokens)
    assert e.stats().blocks_held == 0


def test_first_come_first_served():
    e = engine(max_num_seqs=2)
    ids = [e.add_request([1, 2, 3], SamplingParams(max_new_tokens=4)) for _ in range(6)]
    order = [o.request_id for _ in range(100) for o in e.step() if o.finished]
    assert order == ids


def test_a_long_prompt_delays_no_running_request():
    e = engine(max_tokens_per_step=8, max_num_seqs=4)
    short = e.add_request([1], SamplingParams(max_new_tokens=40))
    e.step()
    long = e.add_request(prompts(1, 100, 100)[0], GREEDY)
    for _ in range(13):
        assert short in {o.request_id for o in e.step()}
    assert long not in {o.request_id for o in e.step()}
    assert long in {o.request_id for o in e.step()}


# -- sampling ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "limits", [{}, {"top_k": 5}, {"top_p": 0.8}, {"min_p": 0.1}, {"top_k": 9, "top_p": 0.9}]
)
def test_a_seed_gives_the_same_tokens_in_any_company(limits):
    runner = FakeRunner()
    params = SamplingParams(max_new_tokens=10, temperature=0.9, seed=7, **limits)
    alone = engine(runner).generate([[3, 4, 5]], params)[0].tokens
    company = [params.replace(seed=i, temperature=1.0 + i % 2) for i in range(6)] + [GREEDY]
    e = engine(runner, num_blocks=12, max_num_seqs=8)
    outputs = e.generate([[3, 4, 5], *prompts(7, most=20)], [params, *company])
    assert outputs[0].tokens == alone
    assert outputs[-1].tokens == runner.alone(prompts(7, most=20)[-1], 12)
    other = engine(runner).generate([[3, 4, 5]], params.replace(seed=8))[0].tokens
    assert other != alone


def test_sampling_without_a_seed_differs():
    params = SamplingParams(max_new_tokens=20, temperature=2.0)
    first, second = engine().generate([[1], [1]], params)
    assert first.tokens != second.tokens


def test_logprobs_are_those_of_the_model():
    runner = FakeRunner()
    output = engine(runner).generate(
        [[1, 2]], SamplingParams(max_new_tokens=3, temperature=0.5, seed=1, logprobs=4)
    )[0]
    tokens = [1, 2]
    for token, entry in zip(output.tokens, output.logprobs, strict=True):
        expected = runner.row(torch.tensor(tokens)).log_softmax(-1)
        assert entry.token == token
        assert entry.logprob == pytest.approx(float(expected[token]), abs=1e-5)
        assert [t for t, _ in entry.top] == expected.topk(4).indices.tolist()
        tokens.append(token)


def test_penalties_and_least_length():
    runner = FakeRunner(vocab=8)
    plain = engine(runner).generate([[1]], SamplingParams(max_new_tokens=8))[0].tokens
    assert len(set(plain)) < 8
    for penalty in ("presence_penalty", "frequency_penalty"):
        params = SamplingParams(max_new_tokens=8, **{penalty: 1000.0})
        assert len(set(engine(runner).generate([[1]], params)[0].tokens)) == 8
    # Divides what is positive: tokens that were there can be chosen only where all others are negative.
    params = SamplingParams(max_new_tokens=6, repetition_penalty=1e6)
    tokens = engine(runner).generate([[1]], params)[0].tokens
    assert len(set(tokens)) > len(set(plain[:6])) or len(set(tokens)) == 6
    ends = frozenset(plain[:1])
    params = SamplingParams(max_new_tokens=8, min_new_tokens=4)
    output = engine(runner, eos_token_ids=ends).generate([[1]], params)[0]
    assert len(output.tokens) >= 5 and not ends & set(output.tokens[:4])


# -- ends and text -----------------------------------------------------------------------------------------------------


def test_end_tokens_stop_tokens_and_the_context():
    runner = FakeRunner(context=16)
    tokens = runner.alone([1, 2], 14)
    place = tokens.index(tokens[5])
    output = engine(runner, eos_token_ids=[tokens[5]]).generate([[1, 2]], GREEDY)[0]
    assert output.reason == "stop" and output.tokens == tokens[: place + 1]
    params = SamplingParams(max_new_tokens=99, ignore_eos=True)
    output = engine(runner, eos_token_ids=[tokens[5]]).generate([[1, 2]], params)[0]
    assert output.reason == "length" and output.tokens == tokens
    params = SamplingParams(max_new_tokens=99, stop_token_ids=(tokens[5],))
    assert engine(runner).generate([[1, 2]], params)[0].tokens == tokens[: place + 1]


def test_end_tokens_come_from_the_model_or_the_tokenizer():
    assert Engine(FakeRunner(), CharTokenizer(), num_blocks=1).eos_token_ids == {0}
    runner = FakeRunner()
    runner.generation_config = type("Config", (), {"eos_token_id": [3, 4]})()
    assert Engine(runner, CharTokenizer(), num_blocks=1).eos_token_ids == {3, 4}


def test_stop_strings_are_cut_and_never_shown_in_part():
    runner = FakeRunner()
    tokenizer = CharTokenizer()
    text = tokenizer.decode(runner.alone([5, 6], 30))
    stop = text[10:13]
    end = text.index(stop)
    e = engine(runner, tokenizer=tokenizer)
    params = SamplingParams(max_new_tokens=30, stop=(stop, "no such text"))
    pieces = [o.text for o in e.stream([5, 6], params)]
    assert "".join(pieces) == text[:end]
    output = e.generate([[5, 6]], params)[0]
    assert output.text == text[:end] and output.reason == "stop"
    assert len(output.tokens) == end + 3


class _Bytes:
    def decode(self, ids, skip_special_tokens=True):
        return bytes(ids).decode("utf-8", errors="replace")


@pytest.mark.parametrize("text", ["héllo wörld", "日本語 🎉 ok", "a"])
def test_text_comes_in_whole_characters(text):
    stream = TextStream(_Bytes())
    pieces = [stream.add(byte) for byte in text.encode()]
    assert "".join(pieces) + stream.finish() == text
    assert not any("\ufffd" in piece for piece in pieces)


def test_text_that_ends_inside_a_character_is_told_at_the_end():
    stream = TextStream(_Bytes())
    pieces = [stream.add(byte) for byte in "a🎉".encode()[:-1]]
    assert "".join(pieces) == "a"
    assert stream.finish() == "\ufffd"


def test_held_text_is_given_out_at_the_end():
    stream = TextStream(CharTokenizer(), stop=("abc",))
    ids = CharTokenizer().encode("xxab")
    assert [stream.add(i) for i in ids] == ["x", "x", "", ""]
    assert stream.finish() == "ab"


# -- cache -------------------------------------------------------------------------------------------------------------


def test_prefixes_are_computed_once():
    runner = FakeRunner()
    e = engine(runner)
    shared = prompts(1, 30, 30)[0]
    first = e.generate([shared], GREEDY)[0]
    assert first.cached_tokens == 0
    runner.batches.clear()
    second, third = e.generate([shared, [*shared, 9, 9, 9]], GREEDY)
    assert second.tokens == first.tokens
    assert second.cached_tokens == third.cached_tokens == 28
    assert runner.batches[0] == 2 + 5
    # The same length, so that the last token is computed although all blocks are there.
    assert e.generate([shared[:28]], GREEDY)[0].cached_tokens == 24
    # Output is a prefix too: the next turn of a conversation.
    again = e.generate([[*shared, *first.tokens, 7]], GREEDY)[0]
    assert again.cached_tokens == 40
    assert e.stats().cached_tokens == 28 + 28 + 24 + 40
    e.forget_prefixes()
    assert e.generate([shared], GREEDY)[0].cached_tokens == 0


def test_the_oldest_prefix_is_given_up_first():
    pool = BlockPool(3, 2)
    keys = [block_key(b"", [i, i]) for i in range(3)]
    blocks = [pool.take() for _ in range(3)]
    for block, key in zip(blocks, keys, strict=True):
        pool.publish(block, key)
        pool.give_back([block])
    assert pool.available == 3 and pool.held == 0
    pool.hold(pool.find(keys[:1]))
    assert pool.available == 2
    pool.give_back(blocks[:1])  # now it is the youngest
    assert pool.take() == blocks[1]
    assert pool.find([keys[1]]) == []
    assert pool.find([keys[0]]) == blocks[:1]
    assert pool.evictions == 1


def test_no_prefix_is_found_under_another_one():
    runner = FakeRunner()
    e = engine(runner)
    block = [1, 2, 3, 4]
    e.generate([[9, 9, 9, 9, *block, 5]], GREEDY)
    assert e.generate([[*block, 5]], GREEDY)[0].cached_tokens == 0
    assert e.generate([[*block, *block, 5]], GREEDY)[0].cached_tokens == 4


def test_memory_is_bounded_and_checked_before_work(monkeypatch):
    from ipex_llm.engine import limits

    runner = FakeRunner()
    e = Engine(runner, block_size=4, cache_bytes=1000)
    assert e.stats().blocks == 1000 // 64
    with pytest.raises(CacheMemoryError, match=r"at least one block of 64 B, got 63 B as cache"):
        Engine(runner, block_size=4, cache_bytes=63)
    with pytest.raises(CacheMemoryError, match=r"fit the cache of 60 tokens, got 50 and up to 20"):
        e.add_request([1] * 50, SamplingParams(max_new_tokens=20))
    e.add_request([1] * 50, SamplingParams(max_new_tokens=11))
    monkeypatch.setattr(limits, "available_memory", lambda device: 10_000)
    assert Engine(runner, block_size=4).stats().blocks == 5000 // 64
    assert Engine(runner, block_size=4, max_num_seqs=1, max_model_len=32).stats().blocks == 8
    with pytest.raises(CacheMemoryError, match=r"fit the free memory of 9.8 KiB, got 1000 blocks"):
        Engine(runner, block_size=4, num_blocks=1000)
    monkeypatch.setattr(limits, "available_memory", lambda device: 100)
    with pytest.raises(CacheMemoryError, match="from the free memory"):
        Engine(runner, block_size=4)
    assert isinstance(CacheMemoryError("x"), MemoryError)


class Allows:
    """A grammar of one token, which takes as long as it is told."""

    def __init__(self, token, go=None):
        self.token, self.go = token, go
        self.done, self.error, self.accepted = False, None, []

    def matcher(self):
        return self

    def fill(self, drafts=()):
        assert self.go is None or self.go.wait(30)

    def apply(self, row, ahead=0):
        value = row[self.token].clone()
        row.fill_(float("-inf"))
        row[self.token] = value

    def accept(self, token):
        self.accepted.append(token)
        self.done = len(self.accepted) == 4


def test_threads_of_masks_go_on_beside_a_slow_grammar():
    go = threading.Event()
    slow, *others = MaskThreads(2).fill([(Allows(1, go), ()), *[(Allows(2), ())] * 5])
    for done in others:
        done.result(30)
    assert not slow.done()
    go.set()
    slow.result(30)
    (wrong,) = MaskThreads(1).fill([(None, ())])
    with pytest.raises(AttributeError, match="fill"):
        wrong.result(30)


def test_a_grammar_that_takes_long_stops_no_other():
    go = threading.Event()
    slow = Allows(7, go)
    e = engine()
    prompt = prompts(1)[0]
    alone = e.generate([prompt], GREEDY)[0].tokens
    first = e.add_request(prompt, GREEDY.replace(grammar=slow))
    second = e.add_request(prompt, GREEDY)
    tokens = []
    while second in e._requests:
        for output in e.step():
            assert output.request_id == second
            tokens += output.tokens
    assert tuple(tokens) == alone and not slow.accepted
    assert e.step() == []  # with nothing else to do it waits a little
    go.set()
    found = drain(e)[first]
    assert [t for o in found for t in o.tokens] == slow.accepted == [7] * 4
    assert found[-1].reason == "stop" and e.stats().blocks_held == 0


def test_a_grammar_beside_others_and_without():
    e = engine()
    some = prompts(4)
    alone = e.generate(some, GREEDY)
    grammars = [Allows(9), None, Allows(5), None]
    found = e.generate(some, [GREEDY.replace(grammar=g) for g in grammars])
    for one, other, grammar in zip(found, alone, grammars, strict=True):
        assert one.tokens == (other.tokens if grammar is None else (grammar.token,) * 4)
    go = threading.Event()
    name = e.add_request(some[0], GREEDY.replace(grammar=Allows(9, go)))
    e.step()
    assert e.cancel(name) and e.stats().blocks_held == 0
    go.set()

# SPDX-License-Identifier: Apache-2.0
"""Speculation: the same tokens as without, whatever is guessed; and the distribution that was asked for."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from fake_runner import GREEDY, CharTokenizer, FakeRunner, drain, engine, prompts

from ipex_llm.engine import Engine, SamplingParams, SpeculativeConfig
from ipex_llm.engine.speculation import Acceptance, Matches


class LoopRunner(FakeRunner):
    """The logits depend on the last two tokens: what it writes comes back soon, so that guesses are right."""

    def row(self, tokens):
        before = int(tokens[-2]) if len(tokens) > 1 else 0
        for token, value in self.poison.items():
            if int(tokens[-1]) == token:
                return torch.full_like(self.weights[0], value)
        return self.weights[(int(tokens[-1]) * 31 + before % 3) % 257]


NGRAM = {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_min": 1}


def model(same=True):
    """Return a config with a smaller model, which is the large one, or another one."""
    return {"model": LoopRunner(seed=0 if same else 1), "num_speculative_tokens": 3}


CONFIGS = {"ngram": lambda: NGRAM, "same": model, "other": lambda: model(False)}
SAMPLED = SamplingParams(max_new_tokens=24, temperature=0.7, seed=3)
PARAMS = {
    "greedy": GREEDY.replace(max_new_tokens=40),
    "sampled": SAMPLED,
    "limited": SAMPLED.replace(top_k=5, top_p=0.8, min_p=0.01),
    "penalized": SAMPLED.replace(
        repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=0.2
    ),
    "biased": SAMPLED.replace(logit_bias={3: 5.0, 9: -100.0}, temperature=0.3),
    "late": SAMPLED.replace(min_new_tokens=9, stop_token_ids=tuple(range(32))),
    "logprobs": SAMPLED.replace(logprobs=3, temperature=0.2),
}


def same(found, wanted):
    for one, other in zip(found, wanted, strict=True):
        assert (one.tokens, one.text, one.reason) == (other.tokens, other.text, other.reason)
        assert len(one.logprobs) == len(other.logprobs)
        for a, b in zip(one.logprobs, other.logprobs, strict=True):
            assert (a.token, a.top) == (b.token, b.top)


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("params", PARAMS)
def test_the_same_tokens(config, params):
    some = prompts(6)
    wanted = engine(LoopRunner()).generate(some, PARAMS[params])
    e = engine(LoopRunner(), speculative_config=CONFIGS[config]())
    same(e.generate(some, PARAMS[params]), wanted)
    stats = e.stats()
    assert stats.blocks_held == 0 and 0 < stats.draft_tokens
    assert stats.accepted_tokens == sum(stats.accepted_at) <= stats.draft_tokens
    if config == "same" or (config == "ngram" and params == "greedy"):
        assert stats.accepted_tokens > stats.draft_tokens / 2


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("blocks", [16, 22, 64])
def test_requests_of_all_kinds_with_little_memory(config, blocks):
    some = [p for p in prompts(12, most=20, seed=5)]
    params = [list(PARAMS.values())[i % len(PARAMS)].replace(seed=i) for i in range(12)]
    wanted = [
        engine(LoopRunner()).generate([p], one)[0] for p, one in zip(some, params, strict=True)
    ]
    e = engine(
        LoopRunner(),
        num_blocks=blocks,
        max_num_seqs=5,
        max_tokens_per_step=9,
        speculative_config=CONFIGS[config](),
    )
    same(e.generate(some, params), wanted)
    assert e.stats().blocks_held == 0
    # Once more: prompts and outputs are found in the cache, in both models.
    same(e.generate(some, params), wanted)


def test_ends_inside_a_run():
    prompt = [5, 6, 7]
    plain = engine(LoopRunner(), tokenizer=CharTokenizer())
    e = engine(LoopRunner(), tokenizer=CharTokenizer(), speculative_config=model())
    text = plain.generate([prompt], GREEDY.replace(max_new_tokens=30))[0].text
    for place in range(1, 25):
        for params in (
            GREEDY.replace(max_new_tokens=place),
            GREEDY.replace(max_new_tokens=30, stop_token_ids=(ord(text[place]) - 32,)),
            GREEDY.replace(max_new_tokens=30, stop=(text[place : place + 3],)),
            GREEDY.replace(
                max_new_tokens=30, stop=(text[place : place + 2],), include_stop=True, logprobs=1
            ),
        ):
            same(e.generate([prompt], params), plain.generate([prompt], params))
    assert e.stats().blocks_held == 0 and max(e.stats().accepted_at) > 0


def test_several_tokens_come_in_one_output():
    e = engine(LoopRunner(), tokenizer=CharTokenizer(), speculative_config=model())
    name = e.add_request([5, 6, 7], GREEDY.replace(logprobs=2))
    outputs = drain(e)[name]
    assert [len(o.tokens) for o in outputs] == [1, 4, 4, 3]
    for output in outputs:
        assert [entry.token for entry in output.logprobs] == list(output.tokens)
        assert len(output.text) == len(output.tokens)


def test_a_request_that_ends_early_and_one_whose_logits_are_bad():
    runner = LoopRunner()
    wanted = engine(LoopRunner()).generate([[5, 6, 7]], GREEDY)[0].tokens
    e = engine(runner, speculative_config=model())
    name = e.add_request([5, 6, 7], GREEDY.replace(max_new_tokens=100))
    other = e.add_request([8, 9], GREEDY)
    e.step()
    e.step()
    assert e.cancel(name)
    assert drain(e)[other][-1].reason == "length" and e.stats().blocks_held == 0
    runner.poison = {wanted[5]: math.nan}
    outputs = e.generate([[5, 6, 7], [8, 9]], GREEDY)
    assert outputs[0].reason == "error" and "NaN" in outputs[0].error
    assert outputs[0].tokens == wanted[: wanted.index(wanted[5]) + 1]
    e._proposer.runner.poison = {wanted[2]: math.nan}  # the smaller model guesses nothing then
    runner.poison = {}
    assert e.generate([[5, 6, 7]], GREEDY)[0].tokens == wanted


def test_a_failed_step_can_be_done_again():
    runner = LoopRunner()
    wanted = engine(LoopRunner()).generate([[5, 6, 7]], SAMPLED)[0].tokens
    e = engine(runner, speculative_config=NGRAM)
    name = e.add_request([5, 6, 7], SAMPLED)
    tokens = []
    for number in itertools.count():
        runner.broken = number % 2 == 0
        if runner.broken and e.has_work:
            with pytest.raises(RuntimeError, match="broken"):
                e.step()
            continue
        if not e.has_work:
            break
        tokens += [t for o in e.step() for t in o.tokens if o.request_id == name]
    assert tuple(tokens) == wanted


class Digits:
    """A grammar: a token whose number is larger than the one before by 1 to 9, six times."""

    def __init__(self):
        self.done, self.error, self.tokens = False, None, []
        self.places = []

    def matcher(self):
        return Digits()

    def fill(self, drafts=()):
        self.places = [self.tokens[-1:]]
        for token in drafts:
            if not self.may(self.places[-1], token):
                break
            self.places.append([token])

    @staticmethod
    def may(before, token):
        return not before or before[0] < token < before[0] + 10

    def apply(self, row, ahead=0):
        before = self.places[ahead] if ahead < len(self.places) else [10**9]
        for token in range(len(row)):
            if not self.may(before, token):
                row[token] = -torch.inf

    def accept(self, token):
        assert self.may(self.tokens[-1:], token)
        self.tokens.append(token)
        self.done = len(self.tokens) == 6


@pytest.mark.parametrize("config", CONFIGS)
def test_grammars(config):
    some = [[p % 4 + 1 for p in range(20)], *prompts(3)]
    params = [
        GREEDY.replace(grammar=Digits()),
        SAMPLED.replace(grammar=Digits(), logit_bias={n: 8.0 for n in range(2, 60, 3)}),
        GREEDY,
        SAMPLED.replace(grammar=Digits(), top_k=1),
    ]
    wanted = engine(LoopRunner()).generate(some, params)
    e = engine(LoopRunner(), speculative_config=CONFIGS[config]())
    same(e.generate(some, params), wanted)
    assert e.stats().blocks_held == 0


# -- The distribution -------------------------------------------------------------------------------------------------


def probabilities(runner, prompt, output, params):
    """Return the distribution of the next token, in float64 and by the words of `SamplingParams`."""
    row = runner.row(torch.tensor([*prompt, *output])).double()
    seen = torch.tensor(sorted({*prompt, *output}))
    factor = params.repetition_penalty
    row[seen] = torch.where(row[seen] > 0, row[seen] / factor, row[seen] * factor)
    for token in set(output):
        row[token] -= params.presence_penalty + params.frequency_penalty * output.count(token)
    p = (row / params.temperature).softmax(-1)
    order = p.argsort(descending=True).tolist()
    if params.top_k:
        p[order[params.top_k :]] = 0
        p /= p.sum()
    total = 0.0
    for token in order:
        if total >= params.top_p:
            p[token] = 0
        total += float(p[token])
    return (p / p.sum()).tolist()


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(max_new_tokens=4, temperature=1.5),
        SamplingParams(
            max_new_tokens=4,
            temperature=2.0,
            top_k=4,
            top_p=0.9,
            repetition_penalty=1.2,
            presence_penalty=0.5,
            frequency_penalty=0.3,
        ),
    ],
    ids=["temperature", "all"],
)
def test_the_distribution_by_chi_square(config, params):
    vocab, count, prompt = 6, 1000, [1, 2, 1, 2, 1]
    runner = LoopRunner(vocab=vocab)
    options = dict(CONFIGS[config]())
    if "model" in options:
        options["model"] = LoopRunner(vocab=vocab, seed=0 if config == "same" else 1)
    options["min_acceptance"] = 0.0
    e = engine(runner, max_num_seqs=32, num_blocks=512, speculative_config=options)
    found = e.generate([prompt] * count, [params.replace(seed=i) for i in range(count)])
    stats = e.stats()
    assert 0 < stats.accepted_tokens <= stats.draft_tokens
    # Tokens 2 and 3 of the output: these come from guesses.
    expected = dict.fromkeys(itertools.product(range(vocab), repeat=2), 0.0)
    for output in itertools.product(range(vocab), repeat=3):
        p = math.prod(
            probabilities(runner, prompt, list(output[:i]), params)[output[i]] for i in range(3)
        )
        expected[output[1:]] += p
    observed = dict.fromkeys(expected, 0)
    for one in found:
        observed[one.tokens[1:3]] += 1
    assert all(not observed[pair] for pair, p in expected.items() if p == 0)
    rest = [(observed[pair], count * p) for pair, p in expected.items() if p * count >= 5]
    few = [(observed[pair], count * p) for pair, p in expected.items() if 0 < p * count < 5]
    if few:
        rest.append((sum(o for o, _ in few), sum(x for _, x in few)))
    statistic = sum((o - x) ** 2 / x for o, x in rest)
    freedom = len(rest) - 1
    # Wilson and Hilferty: the statistic is below this with a probability of 0.9999.
    bound = freedom * (1 - 2 / (9 * freedom) + 3.72 * math.sqrt(2 / (9 * freedom))) ** 3
    assert freedom > 4 and statistic < bound


# -- When to guess ----------------------------------------------------------------------------------------------------


def test_a_request_whose_guesses_are_wrong_stops():
    poor = Acceptance(4, 0.3)
    place = drafted = 0
    while place < 400:
        count = poor.wanted(place)
        drafted += count
        if count:
            poor.note(place, count, 0)
        place += 1
    assert drafted < 70
    good = Acceptance(4, 0.3)
    for place in range(0, 100, 3):
        assert good.wanted(place) >= 1
        good.note(place, good.wanted(place), 1)
    assert good.wanted(100) == 2  # one more than is right
    good.note(100, 2, 2)
    good.note(103, 4, 4)
    assert good.wanted(108) == 4

    prompt = prompts(1, 30, 40)[0]
    e = engine(FakeRunner(), speculative_config={**model(False), "num_speculative_tokens": 4})
    good = engine(LoopRunner(), speculative_config=model())
    for one in (e, good):
        one.generate([prompt], GREEDY.replace(max_new_tokens=150))
    assert e.stats().draft_tokens < 75 and e.stats().drafts < 40
    assert good.stats().draft_tokens >= 100
    e = engine(LoopRunner(), speculative_config={**NGRAM, "disable_by_batch_size": 1})
    e.generate([[1, 2], [2, 3]], [GREEDY, GREEDY])
    assert e.stats().draft_tokens == 0
    e.generate([[1, 2]], GREEDY.replace(max_new_tokens=60))
    assert e.stats().draft_tokens > 0


def test_matches():
    text = [1, 2, 3, 4, 9, 2, 3, 4, 8, 7, 2, 3]
    assert Matches(2, 4).draft(text, 3) == [4, 8, 7]  # the latest of two
    assert Matches(2, 4).draft([*text[:-2], 1, 2, 3], 3) == [4, 9, 2]  # the longest
    assert Matches(3, 4).draft(text, 3) == []
    assert Matches(1, 4).draft([5], 3) == []
    assert Matches(1, 2).draft([5, 6, 5, 6], 5) == [5, 6, 5, 6, 5]
    long = Matches(2, 4)  # is read in pieces
    found = [long.draft([*range(9000), 5, 6], 2) for _ in range(3)]
    assert found == [[], [], [7, 8]]
    growing = Matches(2, 4)
    tokens = []
    for token in torch.randint(4, (300,), generator=torch.Generator().manual_seed(0)).tolist():
        tokens.append(token)
        found = growing.draft(tokens, 3)
        assert found == Matches(2, 4).draft(tokens, 3)
        ends = [e for e in range(2, len(tokens)) if tokens[e - 2 : e] == tokens[-2:]]
        assert bool(ends) == bool(found)
        if found:
            assert any([*tokens[e : e + 3], *found[len(tokens) - e :]][:3] == found for e in ends)


# -- Arguments --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "text"),
    [
        ({"method": "eagle"}, "method must be one of ngram, draft_model, got eagle"),
        ({"method": "draft_model"}, "model must be given for the method draft_model, got none"),
        ({"method": "ngram", "model": 1}, "model must be None for the method ngram, got one"),
        ({"num_speculative_tokens": 0}, r"num_speculative_tokens must be .* in \[1, 64\], got 0"),
        ({"num_speculative_tokens": True}, "num_speculative_tokens must be an integer"),
        ({"prompt_lookup_min": "2"}, "prompt_lookup_min must be an integer"),
        ({"prompt_lookup_min": 3, "prompt_lookup_max": 2}, r"prompt_lookup_max must .* \[3, 64\]"),
        ({"disable_by_batch_size": 0}, "disable_by_batch_size must be an integer"),
        ({"min_acceptance": 2}, r"min_acceptance must be a number in \[0, 1\], got 2"),
        ({"tokens": 2}, "names must be among method, .*, got 'tokens'"),
    ],
)
def test_wrong_configs(config, text):
    with pytest.raises(ValueError, match=f"^SpeculativeConfig: {text}"):
        engine(speculative_config=config)


def test_wrong_models():
    with pytest.raises(TypeError, match=r"speculative_config must be a Spec.* mapping, got str"):
        engine(speculative_config="ngram")
    with pytest.raises(TypeError, match=r"^SpeculativeConfig: model must be one that ipex"):
        engine(speculative_config={"model": torch.nn.Linear(2, 2)})
    with pytest.raises(ValueError, match=r"vocabulary of the large one, 64 tokens, got 32"):
        engine(speculative_config={"model": FakeRunner(vocab=32)})
    e = Engine(FakeRunner(), block_size=4, cache_bytes=4096, speculative_config=SpeculativeConfig())
    assert e.stats().blocks == 64
    config = SpeculativeConfig(model=FakeRunner())
    e = Engine(FakeRunner(), block_size=4, cache_bytes=4096, speculative_config=config)
    assert e.stats().blocks == 32  # both caches

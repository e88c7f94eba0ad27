# SPDX-License-Identifier: Apache-2.0
"""Guessed tokens in a model, its grammars, the server's answers and metrics, and the options of ``serve``."""

from __future__ import annotations

import copy
import json

import pytest
import torch

pytest.importorskip("fastapi")
pytest.importorskip("httpx")
pytest.importorskip("typer")

from entrypoints.test_serve import events
from entrypoints.test_serve_fields import ask, parts, serve  # noqa: F401

import ipex_llm
from ipex_llm.engine import Engine, SamplingParams, SpeculativeConfig
from ipex_llm.entrypoints.cli import read_speculation

NGRAM = {"method": "ngram", "num_speculative_tokens": 6, "prompt_lookup_min": 1}


@pytest.fixture(scope="module")
def configs(parts):  # noqa: F811
    """Guesses of the text, of the model itself, and of another model."""
    other = copy.deepcopy(parts[0])
    for parameter in other.parameters():
        noise = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1))
        parameter.data.add_(noise, alpha=0.02)
    other = ipex_llm.optimize(other, dtype=torch.float32)
    return {"ngram": NGRAM, "same": {"model": parts[1]}, "other": {"model": other}}


def engine(parts, **options):  # noqa: F811
    options = {"block_size": 8, "num_blocks": 96, "eos_token_ids": (1,)} | options
    return Engine(parts[1], parts[2], **options)


@pytest.mark.parametrize("config", ["ngram", "same", "other"])
def test_a_model_writes_the_same(parts, configs, config):  # noqa: F811
    draw = torch.Generator().manual_seed(5)
    some = [torch.randint(3, 500, (n,), generator=draw).tolist() for n in (3, 40, 17, 1)]
    some.append([*some[0], *some[0], *some[0]])
    params = [
        SamplingParams(max_new_tokens=40),
        SamplingParams(max_new_tokens=30, temperature=0.5, seed=1, top_p=0.9),
        SamplingParams(max_new_tokens=30, temperature=1.0, seed=2, repetition_penalty=1.2),
        SamplingParams(max_new_tokens=50, logprobs=2),
        SamplingParams(max_new_tokens=40),
    ]
    plain = engine(parts).generate(some, params)
    e = engine(parts, speculative_config=configs[config])
    for _ in range(2):  # the second time prompts are in the cache
        for one, other in zip(e.generate(some, params), plain, strict=True):
            assert (one.tokens, one.reason, one.text) == (other.tokens, other.reason, other.text)
            for a, b in zip(one.logprobs, other.logprobs, strict=True):
                assert a.token == b.token and abs(a.logprob - b.logprob) < 1e-3
    stats = e.stats()
    assert 0 < stats.accepted_tokens <= stats.draft_tokens and stats.blocks_held == 0
    if config == "same":
        assert stats.accepted_tokens > 0.8 * stats.draft_tokens


def test_answers_and_metrics(parts):  # noqa: F811
    bodies = [
        {"prompt": "one two one two one two", "max_tokens": 30, "temperature": 0, "n": 2},
        {"prompt": "a", "max_tokens": 30, "logprobs": 2, "seed": 3, "n": 3, "temperature": 0.5},
        {"prompt": "b", "max_tokens": 30, "stop": ["e"], "logit_bias": {"5": 9}, "seed": 1},
        {"prompt": "c", "max_tokens": 20, "echo": True, "logprobs": 1, "temperature": 0},
    ]
    answers = []

    def asked(server):
        found = []

        @server
        async def _(client):
            for body in bodies:
                whole = await ask(client, **body)
                found.append(whole["choices"])
                stream = await client.post("/v1/completions", json={**body, "stream": True})
                for index, choice in enumerate(whole["choices"]):
                    parts = [c for e in events(stream) for c in e["choices"] if c["index"] == index]
                    assert "".join(c["text"] for c in parts) == choice["text"]
                    if choice["logprobs"]:
                        tokens = [
                            t for c in parts if c["logprobs"] for t in c["logprobs"]["tokens"]
                        ]
                        assert tokens == choice["logprobs"]["tokens"]
            answers.append((await client.get("/metrics")).text)

        return found

    plain = asked(serve(parts))
    guessed = asked(serve(parts, speculative_config=NGRAM))
    for one, other in zip(plain, guessed, strict=True):
        for a, b in zip(one, other, strict=True):
            assert (a["text"], a["finish_reason"]) == (b["text"], b["finish_reason"])
            if a["logprobs"]:
                assert a["logprobs"]["tokens"] == b["logprobs"]["tokens"]
                assert a["logprobs"]["text_offset"] == b["logprobs"]["text_offset"]
    assert "spec_decode" not in answers[0]
    values = {}
    for line in answers[1].splitlines():
        if line.startswith("vllm:spec_decode_num_"):
            name, value = line.rsplit(" ", 1)
            values[name.removeprefix("vllm:spec_decode_num_")] = float(value)
    total = next(v for k, v in values.items() if k.startswith("accepted_tokens_total"))
    places = [v for k, v in values.items() if k.startswith("accepted_tokens_per_pos_total")]
    assert len(places) == 6 and sum(places) == total > 0 and places == sorted(places)[::-1]
    drafts = next(v for k, v in values.items() if k.startswith("drafts_total"))
    tokens = next(v for k, v in values.items() if k.startswith("draft_tokens_total"))
    assert drafts <= tokens and total <= tokens
    assert answers[1].count("# TYPE vllm:spec_decode_num_accepted_tokens_per_pos_total") == 1
    assert 'position="0"} ' in answers[1]


SCHEMA = {
    "type": "object",
    "properties": {
        "names": {"type": "array", "items": {"enum": ["anna", "anton"]}, "maxItems": 4},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["names", "age"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("config", ["ngram", "other"])
def test_structured_output(parts, configs, config):  # noqa: F811
    pytest.importorskip("llguidance")
    rules = [
        {"json": SCHEMA},
        {"regex": "(ab|ba){8}"},
        {"choice": ["abababab", "abababac", "b"]},
    ]
    found = []

    def asked(server):
        texts = []

        @server
        async def _(client):
            for rule in rules:
                for more in ({"temperature": 0}, {"temperature": 1, "seed": 3}):
                    body = {"prompt": "ab ab ab", "max_tokens": 200, "structured_outputs": rule}
                    texts.append((await ask(client, **body, **more))["choices"][0])
            found.append((await client.get("/metrics")).text)

        return texts

    plain, guessed = asked(serve(parts)), asked(serve(parts, speculative_config=configs[config]))
    assert [c["text"] for c in plain] == [c["text"] for c in guessed]
    assert {c["finish_reason"] for c in guessed} == {"stop"}
    assert set(json.loads(guessed[0]["text"])) == {"names", "age"}
    if config == "ngram":  # (ab|ba) comes again
        line = next(n for n in found[1].splitlines() if n.startswith("vllm:spec_decode_num_acc"))
        assert float(line.rsplit(" ", 1)[1]) > 0


def test_options_of_serve(tmp_path):
    assert read_speculation(None, False, None, None) is None
    assert read_speculation(None, True, None, None) == SpeculativeConfig(method="ngram")
    found = read_speculation(None, False, tmp_path, 3)
    assert found == SpeculativeConfig(model=str(tmp_path), num_speculative_tokens=3)
    text = '{"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 4}'
    assert read_speculation(text, False, None, None).num_speculative_tokens == 5
    for arguments, message in (
        (("{", False, None, None), "--speculative-config must be JSON, got"),
        (("[1]", False, None, None), "--speculative-config must be an object, got list"),
        (('{"model": 3}', False, None, None), "model must be the folder of a model, got int"),
        (('{"n": 3}', False, None, None), "names must be among method, .*, got 'n'"),
        (("{}", True, None, None), "--prompt-lookup must be left out"),
        ((None, True, tmp_path, None), "--prompt-lookup must be without --speculative-model"),
        ((None, False, None, 4), "--num-speculative-tokens must be beside"),
        ((None, True, None, 99), r"num_speculative_tokens must be an integer in \[1, 64\], got 99"),
    ):
        with pytest.raises(ValueError, match=message):
            read_speculation(*arguments)

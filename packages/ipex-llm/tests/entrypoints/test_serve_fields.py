# SPDX-License-Identifier: Apache-2.0
"""Fields of completions and chats, on the real engine with a tiny model of seeded weights."""

from __future__ import annotations

import asyncio
import json
import math

import pytest
import torch

pytest.importorskip("fastapi")
pytest.importorskip("httpx")
pytest.importorskip("transformers")

from entrypoints.test_serve import events
from entrypoints.test_serve_pooling import Serve
from small_llama import llama

import ipex_llm
from ipex_llm.engine import Engine, SamplingParams
from ipex_llm.entrypoints.openai.grammar import Grammars, Wanted
from ipex_llm.model_loader.make import make_tokenizer

PROMPT = "The quick brown fox"
GREEDY = {"temperature": 0, "max_tokens": 6, "prompt": PROMPT}
#: As Qwen writes it: tools before the messages, calls in tags, reasoning.
TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}<|{{ m.role }}|>{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}</s>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}{% if think %}<think>{% endif %}"
)


@pytest.fixture(scope="module")
def parts():
    tokenizer = make_tokenizer()
    tokenizer.chat_template = TEMPLATE
    model = llama(vocab_size=512, max_position_embeddings=8192)
    for parameter in model.parameters():
        if parameter.dim() == 2:
            parameter.data.mul_(4)
    return model, ipex_llm.optimize(model, dtype=torch.float32), tokenizer


def serve(parts, **options):
    options = {
        "block_size": 4,
        "num_blocks": 256,
        "max_num_seqs": 4,
        "eos_token_ids": (1,),
    } | options
    return Serve(Engine(parts[1], parts[2], **options))


async def ask(client, path="/v1/completions", status=200, **body):
    response = await client.post(path, json=body)
    assert response.status_code == status, response.text
    return response.json()


def text_of(events):
    return "".join(c["text"] for e in events for c in e["choices"])


@torch.inference_mode()
def logprobs_of(model, tokens):
    return model(input_ids=torch.tensor([tokens])).logits[0].log_softmax(-1)


# -- the engine ---------------------------------------------------------------------------------------------------


def test_log_probabilities_of_the_prompt(parts):
    """In pieces, beside others, with a prefix that is in the cache, and after it gave way."""
    model, fast, _ = parts
    engine = Engine(fast, block_size=4, num_blocks=12, max_tokens_per_step=9, eos_token_ids=())
    prompt = list(range(10, 31))
    params = SamplingParams(max_new_tokens=8, prompt_logprobs=2)
    engine.generate([prompt], SamplingParams(max_new_tokens=1))
    others = [list(range(40, 60)), list(range(60, 80))]
    found = engine.generate([others[0], prompt, others[1]], [params] * 3)
    assert engine.stats().preemptions > 0
    for tokens, output in zip([others[0], prompt, others[1]], found, strict=True):
        expected = logprobs_of(model, tokens)
        assert [entry.token for entry in output.prompt_logprobs] == tokens[1:]
        for place, entry in enumerate(output.prompt_logprobs):
            assert entry.logprob == pytest.approx(
                float(expected[place, tokens[place + 1]]), abs=1e-3
            )
            assert entry.top[0][0] == int(expected[place].argmax())
        alone = engine.generate([tokens], SamplingParams(max_new_tokens=8))[0]
        assert output.tokens == alone.tokens and not alone.prompt_logprobs


def test_biases(parts):
    engine = Engine(parts[1], block_size=4, num_blocks=64, eos_token_ids=())
    prompt = list(range(10, 20))
    free = engine.generate([prompt], SamplingParams(max_new_tokens=4))[0].tokens
    banned = SamplingParams(max_new_tokens=4, logit_bias={free[0]: -100})
    assert free[0] not in engine.generate([prompt], banned)[0].tokens
    forced = SamplingParams(max_new_tokens=4, logit_bias={77: 100}, logprobs=1)
    found = engine.generate([prompt], forced)[0]
    assert found.tokens == (77,) * 4
    assert found.logprobs[0].top[0][0] == free[0]  # of the model, without the bias
    with pytest.raises(ValueError, match=r"logit_bias must have ids in \[0, 512\), got 512"):
        engine.add_request(prompt, SamplingParams(logit_bias={512: 1}))
    for bias, message in (
        ({-1: 1}, "of at least 0"),
        ({1: 101}, r"in \[-100, 100\]"),
        ({1: math.nan}, r"in \[-100, 100\]"),
        (dict.fromkeys(range(1025), 1), "at most 1024"),
    ):
        with pytest.raises(ValueError, match=message):
            SamplingParams(logit_bias=bias)


# -- completions --------------------------------------------------------------------------------------------------


def test_echo(parts):
    model, _, tokenizer = parts
    server = serve(parts)

    @server
    async def _(client):
        plain = (await ask(client, **GREEDY))["choices"][0]["text"]
        (choice,) = (await ask(client, **GREEDY, echo=True))["choices"]
        assert choice["text"] == PROMPT + plain and choice["logprobs"] is None
        ids = tokenizer.encode(PROMPT)
        found = await ask(client, **{**GREEDY, "prompt": ids}, echo=True, logprobs=2)
        (choice,) = found["choices"]
        assert choice["text"] == PROMPT + plain
        assert found["usage"]["completion_tokens"] == 6
        logprobs = choice["logprobs"]
        assert {len(v) for v in logprobs.values()} == {len(ids) + 6}
        assert logprobs["token_logprobs"][0] is logprobs["top_logprobs"][0] is None
        expected = logprobs_of(model, ids)
        for place in range(1, len(ids)):
            value = float(expected[place - 1, ids[place]])
            assert logprobs["token_logprobs"][place] == pytest.approx(value, abs=1e-3)
            best = max(logprobs["top_logprobs"][place].values())
            assert best == pytest.approx(float(expected[place - 1].max()), abs=1e-3)
        offsets = [sum(map(len, logprobs["tokens"][:n])) for n in range(len(ids) + 6)]
        assert logprobs["text_offset"] == offsets
        # No new token at all: what harnesses ask for that score texts.
        none = await ask(client, **{**GREEDY, "max_tokens": 0}, echo=True, logprobs=2)
        assert none["choices"][0]["text"] == PROMPT
        assert none["usage"]["completion_tokens"] == 0
        assert none["choices"][0]["logprobs"]["token_logprobs"] == pytest.approx(
            logprobs["token_logprobs"][: len(ids)], abs=1e-3
        )
        body = {**GREEDY, "echo": True, "logprobs": 2, "stream": True, "n": 2}
        chunks = events(await client.post("/v1/completions", json=body))
        for index in (0, 1):
            parts = [c for e in chunks for c in e["choices"] if c["index"] == index]
            assert "".join(c["text"] for c in parts) == PROMPT + plain
            for name in ("tokens", "text_offset"):
                joined = [x for c in parts for x in c["logprobs"][name]]
                assert joined == logprobs[name]


def test_biases_stops_and_special_tokens(parts):
    _, _, tokenizer = parts
    server = serve(parts)

    @server
    async def _(client):
        plain = (await ask(client, **GREEDY, ignore_eos=True))["choices"][0]["text"]
        forced = await ask(client, **GREEDY, logit_bias={"77": 100})
        assert forced["choices"][0]["text"] == tokenizer.decode([77] * 6)
        stop = plain[3:5]
        for include in (False, True):
            body = {**GREEDY, "stop": [stop], "include_stop_str_in_output": include}
            (choice,) = (await ask(client, **body))["choices"]
            expected = plain[: plain.index(stop) + len(stop) * include]
            assert choice["text"] == expected and choice["finish_reason"] == "stop"
            chunks = events(await client.post("/v1/completions", json={**body, "stream": True}))
            assert text_of(chunks) == expected
        body = {**GREEDY, "stop": [stop, plain[0]], "ignore_eos": True}
        assert (await ask(client, **body, min_tokens=6))["choices"][0]["text"] == plain
        late = (await ask(client, **body, min_tokens=1))["choices"][0]["text"]
        assert late and plain.startswith(late)
        end = await ask(client, **GREEDY, logit_bias={"3": 100})  # <|system|>
        assert end["choices"][0]["text"] == ""
        shown = await ask(client, **GREEDY, logit_bias={"3": 100}, skip_special_tokens=False)
        assert shown["choices"][0]["text"] == "<|system|>" * 6


def test_usage_with_each_chunk(parts):
    server = serve(parts)

    @server
    async def _(client):
        options = {"include_usage": True, "continuous_usage_stats": True}
        body = {**GREEDY, "stream": True, "stream_options": options, "ignore_eos": True}
        chunks = events(await client.post("/v1/completions", json=body))
        counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
        assert counts == sorted(counts) and counts[-1] == 6


def test_seeds_and_choices(parts):
    server = serve(parts)

    @server
    async def _(client):
        body = {"prompt": PROMPT, "max_tokens": 8, "temperature": 1.5, "seed": 5, "n": 3}
        one, two = await ask(client, **body), await ask(client, **body)
        texts = [c["text"] for c in one["choices"]]
        assert texts == [c["text"] for c in two["choices"]] and len(set(texts)) == 3
        drawn = await ask(client, **{**body, "seed": -1})
        assert [c["text"] for c in drawn["choices"]] != [
            c["text"] for c in (await ask(client, **{**body, "seed": -1}))["choices"]
        ]
        other = await ask(client, **{**body, "seed": 50})
        assert [c["text"] for c in other["choices"]] != texts


def test_max_completion_tokens(parts):
    server = serve(parts)

    @server
    async def _(client):
        body = {"messages": [{"role": "user", "content": "fox"}], "ignore_eos": True}
        for limits in (
            {"max_completion_tokens": 3.0},
            {"max_completion_tokens": 3, "max_tokens": 9},
        ):
            found = await ask(client, "/v1/chat/completions", **body, **limits)
            assert found["usage"]["completion_tokens"] == 3
        answers = []
        for names in (("max_tokens", "repetition_penalty"), ("n_predict", "repeat_penalty")):
            more = dict(zip(names, (9, 5.0), strict=True))
            found = await ask(client, "/v1/chat/completions", **body, **more, temperature=0)
            answers.append(found["choices"])
            assert answers[0] == answers[-1] and found["usage"]["completion_tokens"] == 9
            error = (await ask(client, status=400, prompt="A", **{names[1]: 0}))["error"]
            assert error["param"] == names[1]
        for field, path, more in (
            ("max_completion_tokens", "/v1/chat/completions", body),
            ("max_tokens", "/v1/chat/completions", body),
            ("max_tokens", "/v1/completions", {"prompt": "A"}),
            ("max_output_tokens", "/v1/responses", {"input": "A"}),
        ):
            error = (await ask(client, path, 400, **more, **{field: 10**30}))["error"]
            assert error["param"] == field and error["message"].startswith(f"{field} must be at")
        tools = [{"type": "function", "name": "f", "parameters": {"enum": ["long"] * 4000}}]
        error = (await ask(client, "/v1/responses", 400, input="A", tools=tools))["error"]
        assert error["param"] == "input"


def test_a_chat_without_a_limit_goes_as_far_as_the_cache(parts):
    server = serve(parts, num_blocks=16, eos_token_ids=())

    @server
    async def _(client):
        body = {"messages": [{"role": "user", "content": "fox"}], "min_tokens": 2}
        for path, request in (
            ("/v1/chat/completions", body),
            ("/v1/chat/completions", body | {"max_tokens": -1}),
            ("/v1/completions", {"prompt": PROMPT, "n_predict": -1}),
        ):
            found = await ask(client, path, **request)
            assert found["usage"]["total_tokens"] == 16 * 4 + 1
        error = (await ask(client, "/v1/chat/completions", 400, **body, max_tokens=64))["error"]
        assert "must fit the cache of 64 tokens" in error["message"]


# -- structured output --------------------------------------------------------------------------------------------

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "color": {"enum": ["red", "green"]},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["name", "color", "age"],
    "additionalProperties": False,
}
RANDOM = {"temperature": 1.0, "max_tokens": 120}


def check_object(text):
    found = json.loads(text)
    assert sorted(found) == ["age", "color", "name"]
    assert (
        len(found["name"]) <= 8 and found["color"] in ("red", "green") and 0 <= found["age"] < 100
    )


@pytest.fixture
def structured():
    return pytest.importorskip("llguidance")


def test_structured_outputs(parts, structured):
    import re

    server = serve(parts)
    wrapped = {
        "type": "json_schema",
        "json_schema": {"name": "x", "schema": SCHEMA, "strict": True},
    }

    def fits(pattern):
        return lambda text: re.fullmatch(pattern, text) or pytest.fail(text)

    number = fits(r"[0-9]{3}-[a-f]+")
    greeting = fits(r"hello (world|moon)!+")
    lark = 'start: "hello " ("world" | "moon") /!{1,3}/'
    gbnf = 'root ::= "hello " ("world" | "moon") "!"'

    @server
    async def _(client):
        for body, check in (
            ({"response_format": wrapped}, check_object),
            ({"response_format": {"type": "json_object", "schema": SCHEMA}}, check_object),
            ({"response_format": {"type": "json_schema", "schema": SCHEMA}}, check_object),
            ({"structured_outputs": {"json": SCHEMA}}, check_object),
            ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, check_object),
            ({"regex": "[0-9]{3}-[a-f]{1,9}"}, number),
            ({"structured_outputs": {"regex": "[0-9]{3}-[a-f]{1,9}"}}, number),
            ({"grammar": lark}, greeting),
            ({"structured_outputs": {"grammar": gbnf}}, greeting),
            ({"structured_outputs": {"choice": ["yes", "no"]}}, fits("yes|no")),
            # Text of special tokens, one of which ends an output.
            ({"structured_outputs": {"choice": ["a</s>b<|user|>"]}}, fits("a</s>b<[|]user[|]>")),
        ):
            for seed in (1, 2):
                request = {**RANDOM, **body, "prompt": PROMPT, "seed": seed, "n": 2}
                for choice in (await ask(client, **request))["choices"]:
                    assert choice["finish_reason"] == "stop"
                    check(choice["text"])
        stream = {**RANDOM, "prompt": PROMPT, "seed": 1, "response_format": wrapped, "stream": True}
        check_object(text_of(events(await client.post("/v1/completions", json=stream))))
        # JSON of any kind has no end of its own.
        body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 30, "seed": 3}
        body |= {"response_format": {"type": "json_object"}}
        found = (await ask(client, "/v1/chat/completions", **body))["choices"][0]
        assert found["message"]["content"].lstrip()[0] == "{"
        # Marks of reasoning in bound output are text.
        body = {"messages": body["messages"], "regex": "a<think>b", "max_tokens": 30}
        found = (await ask(client, "/v1/chat/completions", **body))["choices"][0]
        assert found["message"]["content"] == "a<think>b"
        # Tokens that are parts of characters have their bytes.
        body |= {"regex": "é中", "logprobs": True}
        found = (await ask(client, "/v1/chat/completions", **body))["choices"][0]
        entries = found["logprobs"]["content"]
        assert bytes(byte for entry in entries for byte in entry["bytes"]) == "é中".encode()
        plain = await ask(client, **GREEDY)
        beside = await asyncio.gather(
            ask(client, **GREEDY),
            ask(client, **RANDOM, prompt=PROMPT, seed=1, response_format=wrapped),
        )
        assert beside[0]["choices"] == plain["choices"]
        check_object(beside[1]["choices"][0]["text"])
        # Greedy, with penalties, and beside a bias against the only allowed token.
        body = {**GREEDY, "max_tokens": 60, "regex": "aaa", "logit_bias": {"70": -100}}
        assert (await ask(client, **body, repetition_penalty=1.5))["choices"][0]["text"] == "aaa"


def test_bounds_of_numbers(parts, structured):
    """Which texts may come for bounds that are part of the range, and for bounds that are not."""
    grammars = Grammars(Engine(parts[1], parts[2], num_blocks=4, eos_token_ids=(1,)))
    for rule, good, bad in (
        ({"type": "integer", "exclusiveMinimum": 3}, "4 30", "3 2"),
        ({"type": "integer", "exclusiveMaximum": 3}, "2 -9", "3 4"),
        ({"type": "number", "exclusiveMinimum": 3}, "3.1 3.0001 30", "3 3.0 3.00 2.9"),
        ({"type": "number", "exclusiveMaximum": 2.5}, "2.49 -9", "2.5 2.50 3"),
        ({"type": "number", "minimum": 3}, "3 3.0", "2.9"),
        # Larger ones than float64 has: moved inwards.
        ({"type": "integer", "minimum": 2**53 + 1}, f"{2**53 + 2}", f"{2**53} {2**53 + 1}"),
        ({"type": "integer", "exclusiveMaximum": 2**60}, "9", f"{2**60}"),
        ({"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1}, "-9 9", f"{2**63}"),
        ({"oneOf": [{"const": "a"}, {"type": "string", "enum": ["b"]}]}, '"a" "b"', '"c"'),
        ({"type": "string", "format": "path", "maxLength": 1}, '"a" ""', '"ab" 1'),
        ({"enum": [{"format": "path"}]}, '{"format":"path"}', "{}"),
        ({"const": [2**53 + 2]}, f"[{2**53 + 2}]", f"[{2**53}]"),
    ):
        grammar = grammars.make(Wanted("json", json.dumps(rule), "schema"))
        for text in f"{good} {bad}".split():
            matcher = grammar.matcher()
            for token in [*parts[2].encode(text, add_special_tokens=False), 1]:
                matcher.fill()
                row = torch.zeros(512)
                matcher.apply(row)
                if bool(row[token].isinf()):
                    break
                matcher.accept(token)
            else:
                token = None
            assert (token is None) == (text in good.split()), (rule, text)


def deep(count):
    schema = {"type": "string"}
    for _ in range(count):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


SCHEMAS = [
    ({"type": "nothing"}, "json_schema"),
    ({"$ref": "#/$defs/none"}, "json_schema"),
    ({"$ref": "#"}, "json_schema"),
    ({"$ref": "http://other.example/schema"}, "json_schema"),
    (False, "json_schema"),
    (5, "json_schema"),
    ([1], "json_schema"),
    ({"type": "integer", "minimum": 5, "maximum": 4}, "json_schema"),
    ({"type": "string", "pattern": "("}, "json_schema"),
    (deep(120), "json_schema"),
    ({"const": 2**53 + 1}, "json_schema must be a valid json, got const must have"),
    ({"type": "integer", "enum": [-(2**63)]}, "json_schema"),
    ({"enum": ["x" * 40_000]}, "json_schema must have at most 32768 characters"),
    ({"allOf": [{"type": "object"}, {"type": "string"}]}, "json_schema"),
]
RULES = [
    ({"regex": "("}, "regex"),
    ({"regex": 5}, "regex"),
    ({"regex": "a" * 40_000}, "regex"),
    ({"regex": r"(a{1,1000}){1,1000}(b{1,1000}){1,1000}"}, None),
    ({"regex": r"((a|b|ab)*c){1,500}"}, None),
    ({"regex": "((a{0,900}){0,900}){0,900}b"}, None),
    ({"regex": "(" * 3000 + "a" + ")" * 3000}, "regex"),
    ({"grammar": "start: nothing"}, "grammar"),
    ({"grammar": ""}, "grammar"),
    ({"grammar": "start: start"}, "grammar"),
    ({"grammar": 'root ::= "a" root2'}, "grammar"),
    ({"grammar": f'start: %json {{"type": "integer", "const": {-(2**63)}}}'}, "grammar"),
    ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
    ({"structured_outputs": {"choice": ["a"] * 2000}}, "structured_outputs.choice"),
    ({"structured_outputs": {"choice": [1]}}, "structured_outputs.choice"),
    ({"structured_outputs": {"regex": "a", "json": {}}}, "structured_outputs.json"),
    ({"structured_outputs": {"json": "{"}}, "structured_outputs.json"),
    ({"regex": "a", "grammar": "start: /a/"}, "regex"),
    ({"response_format": {"type": "xml"}}, "response_format.type"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    ({"response_format": {}}, "response_format.type"),
    ({"response_format": {"type": "json_object", "schema": 5}}, "response_format.schema"),
    ({"json_schema": SCHEMA}, "json_schema"),
    ({"response_format": 5}, "response_format"),
]


def test_rules_that_are_refused(parts, structured):
    """Or end within a bounded time: the others go on."""
    server = serve(parts)

    @server
    async def _(client):
        cases = [
            (
                {
                    "response_format": {
                        "type": "json_schema",
                        "json_schema": {"name": "a", "schema": s},
                    }
                },
                f"response_format.{message}",
            )
            for s, message in SCHEMAS
        ]
        for body, field in cases + RULES:
            for stream in (False, True):
                request = {"prompt": "A", "max_tokens": 4, "stream": stream, **body}
                response = await client.post("/v1/completions", json=request)
                if field is None:
                    assert response.status_code in (200, 400)
                    if response.status_code == 400:
                        assert response.json()["error"]["param"] in body, response.text
                    continue
                assert response.status_code == 400, (body, response.text)
                error = response.json()["error"]
                assert error["param"].startswith(field.split()[0]), (body, error)
                assert field.split(" ", 1)[-1] in error["message"]
                assert len(response.text) < 1000
        assert server.worker.unfinished == 0
        assert (await ask(client, **GREEDY))["choices"]


def test_without_the_library(parts, monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "llguidance", None)
    server = serve(parts)

    @server
    async def _(client):
        error = (await ask(client, prompt="A", regex="a", status=400))["error"]
        assert "needs llguidance" in error["message"]


# -- tools --------------------------------------------------------------------------------------------------------


def tool(name="add", **parameters):
    schema = {"type": "object", "properties": parameters, "required": sorted(parameters)}
    schema["additionalProperties"] = False
    return {"type": "function", "function": {"name": name, "parameters": schema}}


TOOLS = [
    tool(a={"type": "integer", "maximum": 99, "minimum": 0}, b={"enum": [1, 2]}),
    tool("stop"),
]
CHAT = {"messages": [{"role": "user", "content": "fox"}], "tools": TOOLS}


def only(mode, name):
    some = [{"type": "function", "function": {"name": name}}]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": some}}


def test_tools_that_must_be_called(parts, structured):
    server = serve(parts)

    def check(message, names):
        assert message["content"] is None
        for call in message["tool_calls"]:
            assert call["type"] == "function" and call["id"].startswith("call_")
            assert call["function"]["name"] in names
            arguments = json.loads(call["function"]["arguments"])
            assert set(arguments) == ({"a", "b"} if call["function"]["name"] == "add" else set())

    @server
    async def _(client):
        for choice, names in (
            ("required", {"add", "stop"}),
            ({"type": "function", "function": {"name": "add"}}, {"add"}),
            (only("required", "stop"), {"stop"}),
        ):
            body = {
                **CHAT,
                **RANDOM,
                "tool_choice": choice,
                "seed": 1,
                "parallel_tool_calls": False,
                "response_format": {"type": "json_object"},
            }
            (found,) = (await ask(client, "/v1/chat/completions", **body))["choices"]
            assert found["finish_reason"] == "tool_calls"
            check(found["message"], names)
            assert len(found["message"]["tool_calls"]) == 1
            chunks = events(
                await client.post("/v1/chat/completions", json={**body, "stream": True})
            )
            deltas = [c["delta"] for e in chunks for c in e["choices"]]
            calls = [call for delta in deltas for call in delta.get("tool_calls", ())]
            arguments = "".join(call["function"]["arguments"] for call in calls)
            whole = found["message"]["tool_calls"][0]["function"]
            assert calls[0]["function"]["name"] == whole["name"]
            assert json.loads(arguments) == json.loads(whole["arguments"])
            assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"


def test_messages_of_tools_reach_the_template(parts):
    _, _, tokenizer = parts
    server = serve(parts)
    seen = []
    apply = tokenizer.apply_chat_template

    @server
    async def _(client):
        def spy(messages, **options):
            seen.append((messages, options))
            return apply(messages, **options)

        tokenizer.apply_chat_template = spy
        try:
            call = {
                "id": "c",
                "type": "function",
                "function": {"name": "add", "arguments": '{"a": 1}'},
            }
            messages = [
                {"role": "user", "content": "x"},
                {"role": "assistant", "content": None, "tool_calls": [call]},
                {"role": "tool", "content": "3", "tool_call_id": "c"},
                {"role": "assistant", "content": "x", "reasoning": "because"},
                {"role": "assistant", "content": "x", "reasoning": {"effort": "low"}},
                {"role": "assistant", "content": [{"type": "thinking", "thinking": "because"}]},
            ]
            body = {"messages": messages, "tools": TOOLS, "max_tokens": 1}
            body["chat_template_kwargs"] = {"think": False}
            found = await ask(client, "/v1/chat/completions", **body)
            await ask(client, "/v1/chat/completions", **body, tool_choice="none")
            await ask(client, "/v1/chat/completions", **body, tool_choice=only("auto", "add"))
        finally:
            del tokenizer.apply_chat_template
        del body["max_tokens"]
        tokens = await ask(client, "/tokenize", **body)
        assert tokens["count"] == found["usage"]["prompt_tokens"]
        error = (await ask(client, "/tokenize", 400, **{**body, "tools": [1]}))["error"]
        assert error["param"] == "tools.0"
        (messages, options), (_, without), (_, some) = seen
        assert messages[1]["tool_calls"][0]["function"]["arguments"] == {"a": 1}
        assert messages[3] == {**messages[4], "reasoning_content": "because"}
        assert messages[5] == {**messages[3], "content": ""}
        assert messages[2]["tool_call_id"] == "c" and options["think"] is False
        assert [t["function"]["name"] for t in options["tools"]] == ["add", "stop"]
        assert "tools" not in without
        assert [t["function"]["name"] for t in some["tools"]] == ["add"]


def test_a_refusal_is_text_of_the_assistant(parts):
    server = serve(parts)

    @server
    async def _(client):
        said = [{"type": "text", "text": "sea "}, {"type": "refusal", "refusal": "fox"}]
        for answer in (
            {"content": "sea fox"},
            {"content": said},
            {
                "content": [
                    {**said[0], "type": "input_text"},
                    {"type": "output_text", "text": "fox"},
                ]
            },
            {"content": "sea ", "refusal": "fox"},
            {"content": None, "refusal": "sea fox"},
        ):
            body = {"messages": [{"role": "assistant", **answer}], "return_token_strs": True}
            found = await ask(client, "/tokenize", **body)
            assert "".join(found["token_strs"]).endswith("|>seaĠfox</s><|assistant|>"), found
        item = {"role": "assistant", "content": [{**said[0], "type": "output_text"}, said[1]]}
        answer = await ask(client, "/v1/responses", input=[item], max_output_tokens=1)
        assert answer["usage"]["input_tokens"] == found["count"]
        item["content"][1] = {"type": "refusal"}
        error = (await ask(client, "/v1/responses", 400, input=[item]))["error"]
        assert error["param"] == "input.0.content.1"


TOOL_ERRORS = [
    ({"tools": [TOOLS[0], TOOLS[0]]}, "tools", "got 'add' twice"),
    ({"tools": [tool("a b")]}, "tools.0.function.name", "pattern"),
    ({"tools": [tool("a" * 65)]}, "tools.0.function.name", "pattern"),
    ({"tools": [{"type": "function"}]}, "tools.0.function", "required"),
    ({"tools": [{"type": "other", "function": {"name": "a"}}]}, "tools.0.type", "function"),
    ({"tools": {"a": 1}}, "tools", "list"),
    ({"tools": [tool(f"t{i}") for i in range(129)]}, "tools", "at most 128 tools, got 129"),
    ({"tools": [1] * 100_000}, "tools", "at most 128 tools"),
    ({"tool_choice": "some"}, "tool_choice", "tool_choice"),
    ({"tool_choice": {"type": "function", "function": {"name": "x"}}}, "tool_choice", "got 'x'"),
    ({"tool_choice": "required", "tools": []}, "tool_choice", "tools to choose from"),
    ({"tool_choice": only("auto", "x")}, "tool_choice", "got 'x'"),
    ({"tool_choice": only("some", "add")}, "tool_choice.allowed_tools.mode", "'required'"),
    ({"tool_choice": "required", "regex": "a"}, "tool_choice", "leave room"),
    ({"tools": [tool("a", x={"type": "odd"})], "tool_choice": "required"}, "tools", "tools must"),
    (
        {"tools": [tool("a", x={"$ref": "#/$defs/none"})], "tool_choice": "required"},
        "tools",
        "tools must",
    ),
    ({"tools": [tool("a", x=deep(120))], "tool_choice": "required"}, "tools", "tools must"),
    (
        {"tools": [tool("a", x={"enum": ["x" * 40_000]})], "tool_choice": "required"},
        "tools",
        "at most",
    ),
    (
        {"chat_template_kwargs": {"chat_template": "{{ 1 }}"}},
        "chat_template_kwargs",
        "own template",
    ),
    ({"chat_template_kwargs": {"a": [1]}}, "chat_template_kwargs.a", "valid"),
    ({"functions": [{"name": "a"}]}, "functions", "not supported"),
    ({"guided_json": {"type": "integer"}}, "guided_json", "not supported"),
    ({"bad_words": ["a"], "documents": []}, "bad_words", "not supported"),
    ({"add_generation_prompt": False}, "add_generation_prompt", "not supported"),
    ({"top_logprobs": 21, "logprobs": True}, "top_logprobs", "top_logprobs"),
]


def test_tools_that_are_refused(parts, structured):
    server = serve(parts)

    @server
    async def _(client):
        whole = json.dumps({**CHAT, "tools": [tool(x="@")], "tool_choice": "required"})
        head = {"Content-Type": "application/json"}
        for depth in range(450, 500, 2):  # about as deep as Python reads
            schema = '{"type":"object","properties":{"a":' * depth + "{}" + "}}" * depth
            data = whole.replace('"@"', schema)
            found = await client.post("/v1/chat/completions", content=data, headers=head)
            assert found.status_code == 400, (depth, found.text)
        for body, field, message in TOOL_ERRORS:
            request = {**CHAT, "max_tokens": 4, **body}
            found = await ask(client, "/v1/chat/completions", 400, **request)
            assert found["error"]["param"] == field, (body, found)
            assert message in found["error"]["message"], (body, found)
        assert server.worker.unfinished == 0

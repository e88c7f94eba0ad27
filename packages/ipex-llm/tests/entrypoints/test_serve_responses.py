# SPDX-License-Identifier: Apache-2.0
"""`/v1/responses` on the real engine."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("httpx")
pytest.importorskip("transformers")

from entrypoints.test_serve_fields import ask, parts, serve  # noqa: F401

from ipex_llm.entrypoints.openai.responses import ResponsesRequest

PATH = "/v1/responses"
GREEDY = {"temperature": 0, "max_output_tokens": 6}


def events(response):
    found = []
    for block in response.text.strip().split("\n\n"):
        kind, data = block.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert kind == f"event: {found[-1]['type']}"
    assert [e["sequence_number"] for e in found] == list(range(len(found)))
    return found


def test_text(parts):  # noqa: F811
    server = serve(parts, eos_token_ids=())

    @server
    async def _(client):
        messages = [{"role": "system", "content": "sea"}, {"role": "user", "content": "fox"}]
        chat = {"messages": messages, "temperature": 0, "max_tokens": 6}
        found = await ask(client, "/v1/chat/completions", **chat)
        text = found["choices"][0]["message"]["content"]
        part = [{"type": "input_text", "text": "fox"}]
        for body in (
            {"input": "fox", "instructions": "sea"},
            {"input": [{"role": "user", "content": part}, {"role": "developer", "content": "sea"}]},
        ):
            answer = await ask(client, PATH, **GREEDY, **body)
            assert answer["object"] == "response" and answer["status"] == "incomplete"
            assert answer["incomplete_details"] == {"reason": "max_output_tokens"}
            (item,) = answer["output"]
            assert item["type"] == "message" and item["role"] == "assistant"
            assert item["status"] == "incomplete"
            assert "".join(part["text"] for part in item["content"]) == text
            assert answer["usage"]["output_tokens"] == 6
            assert answer["usage"]["input_tokens"] == found["usage"]["prompt_tokens"]
            # In the cache from the chat: full blocks of 4 tokens before the last one.
            cached = (found["usage"]["prompt_tokens"] - 1) // 4 * 4
            details = answer["usage"]["input_tokens_details"]
            assert details == {"cached_tokens": cached, "cache_write_tokens": 0} and cached
            assert answer["usage"]["output_tokens_details"] == {"reasoning_tokens": 0}
        # Templates take one system message, which is the first.
        said = [*messages, {"role": "developer", "content": "moon"}]
        asked = {"messages": said, "return_token_strs": True}
        count = (await ask(client, "/tokenize", **asked))["token_strs"]
        assert "".join(count) == "<|system|>seaĊĊmoon</s><|user|>fox</s><|assistant|>"
        for items in (said[1:], [{"role": "system", "content": "moon"}, messages[1]]):
            answer = await ask(client, PATH, **GREEDY, instructions="sea", input=items)
            assert answer["usage"]["input_tokens"] == len(count)
        made = events(await client.post(PATH, json={**GREEDY, **body, "stream": True}))
        kinds = [event["type"].removeprefix("response.") for event in made]
        assert kinds[:4] == ["created", "in_progress", "output_item.added", "content_part.added"]
        end = ["output_text.done", "content_part.done", "output_item.done", "incomplete"]
        assert kinds[-4:] == end and set(kinds[4:-4]) == {"output_text.delta"}
        assert "".join(e["delta"] for e in made if e["type"].endswith("text.delta")) == text
        assert made[-1]["response"]["output"][0]["content"] == item["content"]


def test_calls_and_what_they_returned(parts):  # noqa: F811
    pytest.importorskip("llguidance")
    server = serve(parts)
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]}
    schema["additionalProperties"] = False
    tools = [{"type": "function", "name": "add", "parameters": schema}]

    @server
    async def _(client):
        body = {"input": "fox", "tools": tools, "max_output_tokens": 60, "seed": 1}
        body["tool_choice"] = {"type": "function", "name": "add"}
        answer = await ask(client, PATH, **body)
        (call,) = answer["output"]
        assert answer["status"] == "completed"
        assert call["type"] == "function_call" and call["name"] == "add"
        assert call["status"] == "completed"
        assert json.loads(call["arguments"])["a"] in (1, 2)
        made = events(await client.post(PATH, json={**body, "stream": True}))
        done = next(e for e in made if e["type"] == "response.function_call_arguments.done")
        assert json.loads(done["arguments"]) == json.loads(call["arguments"])
        other = [{"type": "web_search"}, {"type": "namespace", "name": "x", "tools": tools}]
        more = [*other, *tools, {"type": "function", "name": "other"}]
        some = {"type": "allowed_tools", "mode": "required", "tools": [body["tool_choice"]]}
        changes = {"tools": more, "tool_choice": some, "max_output_tokens": 300}
        answer = await ask(client, PATH, **body | changes)
        assert answer["tool_choice"] == some and answer["output"][0]["name"] == "add"
        assert [tool["name"] for tool in answer["tools"]] == ["add", "other"]
        output = {"type": "function_call_output", "call_id": call["call_id"], "output": "3"}
        body["input"] = [{"role": "user", "content": "fox"}, call, output]
        body["tool_choice"] = "none"
        assert (await ask(client, PATH, **body))["output"][0]["type"] == "message"
        form = {"type": "json_schema", "name": "x", "schema": schema, "strict": True}
        answer = await ask(client, PATH, input="fox", text={"format": form}, max_output_tokens=60)
        assert json.loads(answer["output"][0]["content"][0]["text"])["a"] in (1, 2)
        # Fields beyond the API do what they do in a chat.
        answer = await ask(client, PATH, input="fox", regex="abc", max_output_tokens=60)
        assert answer["output"][0]["content"][0]["text"] == "abc"
        answer = await ask(client, PATH, input="fox", logit_bias={"77": 100}, **GREEDY)
        assert answer["output"][0]["content"][0]["text"] == parts[2].decode([77] * 6)


def test_log_probabilities_and_what_is_echoed(parts):  # noqa: F811
    server = serve(parts, eos_token_ids=())

    @server
    async def _(client):
        chat = {"messages": [{"role": "user", "content": "fox"}], "temperature": 0, "max_tokens": 6}
        found = await ask(client, "/v1/chat/completions", **chat, logprobs=True, top_logprobs=2)
        expected = found["choices"][0]["logprobs"]["content"]

        def same(entries):
            assert [e["token"] for e in entries] == [e["token"] for e in expected]
            for one, other in zip(entries, expected, strict=True):
                assert one["logprob"] == pytest.approx(other["logprob"], abs=1e-3)
                assert len(one["top_logprobs"]) == len(other["top_logprobs"]) == 2

        body = {**GREEDY, "input": "fox", "include": ["message.output_text.logprobs"]}
        body["top_logprobs"] = 2
        answer = await ask(client, PATH, **body)
        (part,) = answer["output"][0]["content"]
        assert len(expected) == 6
        same(part["logprobs"])
        made = events(await client.post(PATH, json={**body, "stream": True}))
        deltas = [e["logprobs"] for e in made if e["type"].endswith("text.delta")]
        done = next(e for e in made if e["type"].endswith("text.done"))
        same(done["logprobs"])
        told = [entry for delta in deltas for entry in delta]
        assert told == done["logprobs"][: len(told)] and len(told) > 1
        same(made[-1]["response"]["output"][0]["content"][0]["logprobs"])
        more = {"metadata": {"a": "b"}, "store": True, "truncation": "disabled"}
        more |= {"reasoning": {"effort": "low", "summary": "auto"}, "text": {"verbosity": "low"}}
        more |= {"user": "x", "service_tier": "auto", "include": ["reasoning.encrypted_content"]}
        answer = await ask(client, PATH, **{**body, **more})
        assert answer["output"][0]["content"][0]["logprobs"] == []
        assert answer["metadata"] == {"a": "b"} and answer["store"] is False
        assert answer["reasoning"] == {"effort": "low", "summary": "auto"}
        assert answer["text"] == {"verbosity": "low"} and answer["truncation"] == "disabled"


def test_the_effort_reaches_the_template():
    for effort, thinking in (("low", True), ("max", True), ("none", False)):
        body = ResponsesRequest(input="a", reasoning={"effort": effort})
        template = body.chat().template()
        assert template == {"reasoning_effort": effort, "enable_thinking": thinking}
    assert ResponsesRequest(input="a").chat().template() == {}


BAD = [
    ({}, "input", "input: Field required"),
    ({"input": []}, "input", "input: "),
    ({"input": 5}, "input", "input: "),
    ({"input": [{"type": "image"}]}, "input.0.type", "'message'"),
    (
        {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
        "input.0",
        "'input_text'",
    ),
    ({"input": [{"type": "function_call_output", "output": None}]}, "input.0.output", "got none"),
    ({"input": [{"type": "reasoning"}, {"type": "function_call"}]}, "input.1.name", "got none"),
    ({"input": [{"type": "reasoning"}, {"content": "a"}]}, "input.1.role", "got none"),
    ({"input": [1] * 100_000}, "input", "at most 4096 items"),
    ({"input": "a" * 200_000}, "input", "characters"),
    ({"input": "a", "max_output_tokens": 0}, "max_output_tokens", "max_output_tokens: "),
    ({"input": "a", "temperature": -1}, "temperature", "temperature: "),
    ({"input": "a", "previous_response_id": "x"}, "previous_response_id", "not supported"),
    ({"input": "a", "conversation": "x"}, "conversation", "not supported"),
    ({"input": "a", "background": True}, "background", "not supported"),
    ({"input": "a", "prompt": {"id": "x"}}, "prompt", "not supported"),
    ({"input": "a", "truncation": "auto"}, "truncation", "'disabled', got 'auto'"),
    ({"input": "a", "include": ["all"]}, "include", "got 'all'"),
    ({"input": "a", "include": ["x"] * 1000}, "include", "at most 8 names"),
    ({"input": "a", "top_logprobs": 21}, "top_logprobs", "20"),
    ({"input": "a", "metadata": {"a": 1}}, "metadata.a", "string"),
    ({"input": "a", "metadata": {"a": "b" * 513}}, "metadata", "at most 512"),
    ({"input": "a", "store": "yes"}, "store", "bool"),
    ({"input": "a", "reasoning": {"effort": "huge"}}, "reasoning.effort", "'low'"),
    ({"input": "a", "tools": [{"type": "function", "name": "a"}] * 2}, "tools", "'a' twice"),
    ({"input": "a", "tools": [{"name": "a"}]}, "tools.0.type", "required"),
    ({"input": "a", "tools": [{"type": "mcp"}] * 129}, "tools", "at most 128 tools"),
    ({"input": "a", "tools": [{"type": "mcp"}], "tool_choice": "required"}, "tool_choice", "none"),
    ({"input": "a", "tools": [{"type": "function", "name": "a b"}]}, "tools.0.name", "pattern"),
    ({"input": "a", "tool_choice": "required"}, "tool_choice", "tools to choose from"),
    ({"input": "a", "text": {"format": {"type": "xml"}}}, "text.format.type", "json_schema"),
    ({"input": "a", "text": {"format": {"type": "json_schema"}}}, "response_format", "a schema"),
    ({"input": "a", "top_k": 1.5}, "top_k", "integer"),
    ({"input": "a", "stop": [""]}, "stop", "not empty"),
    ({"input": "a", "bad_words": ["a"]}, "bad_words", "not supported"),
]


def test_what_is_refused(parts):  # noqa: F811
    server = serve(parts)

    @server
    async def _(client):
        for body, field, message in BAD:
            found = await ask(client, PATH, 400, **body)
            assert found["error"]["param"].startswith(field), (body, found)
            assert message in found["error"]["message"], (body, found)
        assert server.worker.unfinished == 0

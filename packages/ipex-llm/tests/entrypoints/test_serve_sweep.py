# SPDX-License-Identifier: Apache-2.0
"""Fields of requests to all endpoints with values of other kinds: never a 5xx, and errors that name a field."""

from __future__ import annotations

import asyncio
import copy
import json
import random
import time
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("httpx")
pytest.importorskip("transformers")

from entrypoints.test_serve_fields import parts, serve  # noqa: F401  (parts is a fixture)

JSON = {"Content-Type": "application/json"}
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer"}},
    "required": ["a"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "f", "description": "d", "parameters": SCHEMA}}
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a":1}'}}
USER = [{"role": "user", "content": "hi"}]
MESSAGES = [
    {"role": "system", "content": "s"},
    {"role": "user", "content": [{"type": "text", "text": "hi"}]},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "1", "content": "2"},
]
FORM = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}}
ITEM = {"role": "user", "content": [{"type": "input_text", "text": "hi"}]}
FLAT = {"type": "function", "name": "f", "parameters": SCHEMA, "strict": True}

#: Legal requests.
GOOD: tuple[tuple[str, dict[str, Any]], ...] = (
    (
        "/v1/completions",
        {
            **{"prompt": "The quick", "max_tokens": 3, "temperature": 0.7, "top_p": 0.9},
            **{"top_k": 5, "min_p": 0.1, "n": 1, "seed": 3, "stop": ["x"], "stop_token_ids": [7]},
            **{"logprobs": 2, "echo": True, "logit_bias": {"5": 1}, "presence_penalty": 0.1},
            **{"frequency_penalty": 0.1, "repetition_penalty": 1.1, "min_tokens": 1},
            **{"ignore_eos": True, "include_stop_str_in_output": True},
            **{"skip_special_tokens": False, "stream": False, "user": "u"},
        },
    ),
    (
        "/v1/completions",
        {
            **{"prompt": "The", "max_tokens": 2, "stream": True},
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        },
    ),
    ("/v1/completions", {"prompt": "A", "max_tokens": 2, "regex": "[ab]+"}),
    ("/v1/completions", {"prompt": "A", "max_tokens": 2, "grammar": 'start: "a"+'}),
    ("/v1/completions", {"prompt": "A", "max_tokens": 2, "structured_outputs": {"json": SCHEMA}}),
    ("/v1/completions", {"prompt": "A", "max_tokens": 2, "response_format": FORM}),
    (
        "/v1/chat/completions",
        {
            **{"messages": MESSAGES, "max_completion_tokens": 3, "tools": [TOOL]},
            **{"tool_choice": "auto", "parallel_tool_calls": True, "logprobs": True},
            **{"top_logprobs": 2, "chat_template_kwargs": {"think": True}, "seed": 1},
            "response_format": {"type": "text"},
        },
    ),
    (
        "/v1/responses",
        {
            **{"input": [ITEM], "instructions": "be", "max_output_tokens": 3, "tools": [FLAT]},
            **{"tool_choice": "auto", "text": {"format": {"type": "text"}}, "store": False},
            **{"metadata": {"a": "b"}, "truncation": "disabled", "top_p": 0.8},
        },
    ),
    ("/v1/embeddings", {"input": ["a", "b"], "encoding_format": "float", "dimensions": 4}),
    ("/rerank", {"query": "q", "documents": ["a", "b"], "top_n": 1, "return_documents": True}),
    ("/v1/score", {"text_1": "a", "text_2": ["b", "c"]}),
    ("/tokenize", {"prompt": "abc", "add_special_tokens": True, "return_token_strs": True}),
    ("/tokenize", {"messages": USER, "add_generation_prompt": True}),
    ("/detokenize", {"tokens": [5, 6]}),
)


def _nested(depth: int) -> dict[str, Any]:
    found: dict[str, Any] = {"type": "integer"}
    for _ in range(depth):
        found = {"type": "array", "items": found}
    return found


#: Values that are put in the place of each value of these.
VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 1.5, 1e308, 10**30, -(10**30), 2**63, 2**31, 8191, 8192),
    *("", "x", "\x00", "\ud800", "é" * 10, "1", "a" * 5000, "auto", "none", "required"),
    *([], [[]], [None], ["a"], [1], [-1], [10**20], [1.5], [""], [{}], ["a"] * 300, [5] * 9000),
    *({}, {"a": 1}, {"": None}, {"type": "x"}, {"type": ["a"]}, _nested(300), _nested(40)),
    {"type": "object", "properties": {"a": {"$ref": "#"}}},
    {"$ref": "http://x/y"},
    {"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"},
    *("(a+)+$" * 50, "((a{0,500}){0,500}){0,50}", "(.*a){25}", "[ab]*a[ab]{30}", "(" * 3000),
    *({"type": "function", "function": {"name": "g"}}, [TOOL, TOOL]),
)
COUNT = 250
#: Fields that must be there, and limits of tests.
KEPT = ("prompt", "messages", "input", "query", "documents", "text_1", "text_2", "tokens")
KEPT += ("max_tokens", "max_completion_tokens", "max_output_tokens")


def paths(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    if path:
        yield path
    if isinstance(value, dict):
        for key in value:
            yield from paths(value[key], (*path, key))
    elif isinstance(value, list):
        for index in range(len(value)):
            yield from paths(value[index], (*path, index))


def changed(body: dict[str, Any], path: tuple[Any, ...], value: Any) -> dict[str, Any]:
    found = copy.deepcopy(body)
    place: Any = found
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    return found


def named(error: dict[str, Any], path: tuple[Any, ...]) -> bool:
    """Return whether an error tells of the field, of what it makes too long, or of the whole body."""
    text = f"{error['message']} {error['param']}"
    if error["param"] in ("body", "messages", "input") or "model" in path:
        return True
    return any(name in text for name in path if isinstance(name, str))


@pytest.mark.parametrize("seed", [0, 1])
def test_other_values_in_the_place_of_each_field(parts: Any, seed: int) -> None:  # noqa: F811
    server = serve(parts)
    every = [(url, body, path) for url, body in GOOD for path in paths(body)]
    rng = random.Random(seed)
    picked = [(*rng.choice(every), rng.choice(VALUES)) for _ in range(COUNT)]

    @server
    async def _(client: Any) -> None:
        for url, body in GOOD if not seed else ():
            response = await client.post(url, json=body)
            assert response.status_code == 200, (url, response.text)
            # Clients that send all of their fields send null for what is not set.
            nulls = {name: value if name in KEPT else None for name, value in body.items()}
            response = await client.post(url, json=nulls)
            assert response.status_code == 200, (url, response.text)
        end = time.monotonic() + 45  # a slow machine tries fewer of them
        for url, body, path, value in picked:
            if time.monotonic() > end:
                break
            what = url, path, str(value)[:60]
            data = json.dumps(changed(body, path, value))
            answer = client.post(url, content=data, headers=JSON)
            response = await asyncio.wait_for(answer, 20)
            assert response.status_code < 500, (what, response.text)
            if response.status_code >= 400:
                assert named(response.json()["error"], path), (what, response.text)
            elif "data: " in response.text:
                assert '"error"' not in response.text, (what, response.text)
        assert server.worker.unfinished == 0

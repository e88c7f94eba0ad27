# SPDX-License-Identifier: Apache-2.0
"""Reasoning, text and calls in what models of each family of chat templates write."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("fastapi")

from ipex_llm.entrypoints.openai.chat import (
    Parser,
    family_of,
    forced_parser,
    forced_schema,
    merged,
)

QWEN = "{{ '<tool_call>' }} <think>"
CODER = "<tool_call> <function=name>"
LLAMA = "Environment: ipython <|python_tag|>"
MISTRAL = "[AVAILABLE_TOOLS] [TOOL_CALLS]"
MAGISTRAL = "[TOOL_CALLS] [THINK]"
DEEPSEEK = "<｜tool▁calls▁begin｜> <think>"
HARMONY = "<|start|>assistant<|channel|>"

ADD = ("add", {"a": 1, "b": "x}"})
STOP = ("stop", {})
JSON_ADD = '{"name": "add", "arguments": {"a": 1, "b": "x}"}}'

TOOLS = {"add": {"properties": {"a": {"type": "integer"}, "b": {"type": "string"}}}}
TOOLS |= {"stop": {}, "a.b": {}}

#: template, prompt, text -> reasoning, content, calls
CASES = {
    "qwen_text": (QWEN, "", "Hello <b>there</b>", None, "Hello <b>there</b>", []),
    "qwen_reasons": (QWEN, "", "<think>\nWell.\n</think>\n\nYes", "\nWell.\n", "Yes", []),
    "qwen_prompt_opened": (QWEN, "<think>\n", "Well.</think>\n\nYes", "Well.", "Yes", []),
    "qwen_never_closed": (QWEN, "<think>\n", "Well", "Well", "", []),
    "qwen_call": (QWEN, "", f"<tool_call>\n{JSON_ADD}\n</tool_call>", None, None, [ADD]),
    "qwen_all": (
        QWEN,
        "",
        f'<think>a</think>b<tool_call>{JSON_ADD}</tool_call>\n<tool_call>{{"name": "stop"}}</tool_call>',
        "a",
        "b",
        [ADD, STOP],
    ),
    "qwen_cut_off": (QWEN, "", f"<tool_call>{JSON_ADD}", None, None, [ADD]),
    "qwen_broken": (
        QWEN,
        "",
        '<tool_call>{"name"</tool_call>',
        None,
        '<tool_call>{"name"</tool_call>',
        [],
    ),
    "qwen_unknown": (
        QWEN,
        "",
        '<tool_call>{"name": "rm"}</tool_call>',
        None,
        '<tool_call>{"name": "rm"}</tool_call>',
        [],
    ),
    "coder": (
        CODER,
        "",
        "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n<parameter=b>\nx}\n</parameter>\n"
        "</function>\n</tool_call>",
        None,
        None,
        [ADD],
    ),
    "coder_text": (
        CODER,
        "",
        "<tool_call><function=add>\n<parameter=a>\n1\n</parameter>\n<parameter=b>\n2.0\n</parameter>\n"
        "<parameter=c>true</parameter></function></tool_call>",
        None,
        None,
        [("add", {"a": 1, "b": "2.0", "c": True})],
    ),
    "qwen_text_behind": (
        QWEN,
        "",
        f"<tool_call>{JSON_ADD}</tool_call>\n a  b ",
        None,
        "\n a  b ",
        [ADD],
    ),
    "llama_blanks": (LLAMA, "", f"\n\n{JSON_ADD}", None, None, [ADD]),
    "llama_blank_text": (LLAMA, "", "\n {a}", None, "\n {a}", []),
    "llama": (LLAMA, "", '{"name": "add", "parameters": {"a": 1, "b": "x}"}}', None, None, [ADD]),
    "llama_two": (
        LLAMA,
        "",
        f'{JSON_ADD}; {{"name": "stop", "parameters": {{}}}}',
        None,
        None,
        [ADD, STOP],
    ),
    "llama_tag": (LLAMA, "", f"<|python_tag|>{JSON_ADD}", None, None, [ADD]),
    "llama_json": (LLAMA, "", '{"a": 1}', None, '{"a": 1}', []),
    "llama_text": (LLAMA, "", 'It is {"a": 1}', None, 'It is {"a": 1}', []),
    "mistral": (MISTRAL, "", f"[TOOL_CALLS][{JSON_ADD}]", None, None, [ADD]),
    "mistral_new": (
        MISTRAL,
        "",
        'Ok[TOOL_CALLS]add[ARGS]{"a": 1, "b": "x}"}[TOOL_CALLS]stop[ARGS]{}',
        None,
        "Ok",
        [ADD, STOP],
    ),
    "magistral": (MAGISTRAL, "", "[THINK]a[/THINK]b", "a", "b", []),
    "deepseek_v3": (
        DEEPSEEK,
        "<think>",
        "a</think>b<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n```json\n"
        '{"a": 1, "b": "x}"}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>stop\n```json\n'
        "{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        "a",
        "b",
        [ADD, STOP],
    ),
    "deepseek_v31": (
        DEEPSEEK,
        "",
        '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>add<｜tool▁sep｜>{"a": 1, "b": "x}"}<｜tool▁call▁end｜>'
        "<｜tool▁calls▁end｜>",
        None,
        None,
        [ADD],
    ),
    "harmony_text": (
        HARMONY,
        "",
        "<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>final<|message|>b",
        "a",
        "b",
        [],
    ),
    "harmony_call": (
        HARMONY,
        "",
        "<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>commentary to=functions.add "
        '<|constrain|>json<|message|>{"a": 1, "b": "x}"}<|call|>',
        "a",
        None,
        [ADD],
    ),
    "harmony_dotted": (
        HARMONY,
        "",
        " to=functions.a.b<|message|>{}<|call|>",
        None,
        None,
        [("a.b", {})],
    ),
    "harmony_unknown": (HARMONY, "", " to=functions.rm<|message|>{}<|call|>", None, "{}", []),
    "harmony_cut_off": (HARMONY, "", ' to=functions.add<|message|>{"a', None, '{"a', []),
    "plain": (
        "{{ messages }}",
        "",
        "<think>a</think><tool_call>",
        None,
        "<think>a</think><tool_call>",
        [],
    ),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("size", [1, 3, 1000])
def test_parts_of_an_answer(name, size):
    template, prompt, text, reasoning, content, calls = CASES[name]
    parser = Parser(family_of(template), TOOLS, prompt)
    deltas = []
    for at in range(0, len(text), size):
        deltas += parser.feed(text[at : at + size])
    deltas += parser.feed("", last=True)
    message = merged(deltas)
    assert message.get("reasoning_content") == reasoning
    assert message["content"] == (content if calls or content is not None else "")
    found = [
        (c["function"]["name"], json.loads(c["function"]["arguments"]))
        for c in message.get("tool_calls", [])
    ]
    assert found == calls and parser.calls == len(calls)
    assert len({c["id"] for c in message.get("tool_calls", [])}) == len(calls)


def test_text_is_handed_on_as_it_comes():
    parser = Parser(family_of(QWEN), TOOLS)
    assert parser.feed("Hello") == [{"content": "Hello"}]
    assert parser.feed(" <thi") == [{"content": " "}]
    assert parser.feed("s") == [{"content": "<this"}]
    assert parser.feed("<think>so") == [{"reasoning_content": "so"}] and parser.reasons


def test_without_tools_calls_are_text():
    parser = Parser(family_of(QWEN))
    text = f"<tool_call>{JSON_ADD}</tool_call>"
    assert merged(parser.feed(text, last=True))["content"] == text


def test_answers_that_must_be_calls():
    for size in (1, 1000):
        text = json.dumps(
            [{"name": "add", "parameters": {"a": "}"}}, {"name": "stop", "parameters": {}}]
        )
        parser, deltas = forced_parser(None), []
        for at in range(0, len(text), size):
            deltas += parser.feed(text[at : at + size])
        calls = merged(deltas)["tool_calls"]
        assert [c["function"]["name"] for c in calls] == ["add", "stop"]
        assert json.loads(calls[0]["function"]["arguments"]) == {"a": "}"}
    parser = forced_parser("add")
    deltas = [*parser.feed('{"a"'), *parser.feed(": 1}"), *parser.feed("", last=True)]
    (call,) = merged(deltas)["tool_calls"]
    assert call["function"] == {"name": "add", "arguments": '{"a": 1}'}


def test_references_of_tools_mean_the_same_in_the_answer():
    class Function:
        def __init__(self, name, parameters):
            self.name, self.parameters = name, parameters

    one = Function("a", {"$defs": {"x": {}}, "properties": {"b": {"$ref": "#/$defs/x"}}})
    two = Function("b.c", {"properties": {"d": {"anyOf": [{"$ref": "#"}, {"$ref": "http://x"}]}}})
    found = forced_schema([one, two, Function("d", {})], None, True)["$defs"]
    assert found["a"]["properties"] == {"b": {"$ref": "#/$defs/a/$defs/x"}}
    kinds = found["b.c"]["properties"]["d"]["anyOf"]
    assert [kind["$ref"] for kind in kinds] == ["#/$defs/b.c", "http://x"]
    assert found["d"] == {"type": "object"} == forced_schema([Function("d", {})], "d", True)

# SPDX-License-Identifier: Apache-2.0
"""From the text of a model to the parts of an answer: reasoning, text, calls of tools, by family of chat template."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Any

__all__ = ["Family", "Parser", "family_of", "forced_parser"]

#: A call: name and arguments as JSON.
Call = tuple[str, str]


@dataclasses.dataclass(frozen=True)
class Family:
    """How models with one kind of chat template write.

    Attributes:
        name: Of the family.
        reasoning: Marks around the reasoning, or None.
        calls: Marks around calls, or None; an empty second one: up to the end.
        parse: Returns the calls between the marks, of these tools.
        bare: A text that begins with ``{`` and is a call has no marks.
    """

    name: str
    reasoning: tuple[str, str] | None = None
    calls: tuple[str, str] | None = None
    parse: Callable[[str, Mapping[str, Any]], list[Call]] | None = None
    bare: bool = False

    @property
    def special(self) -> bool:
        """Whether marks are special tokens, which the text must have then."""
        return self.name in ("harmony", "mistral", "deepseek", "llama")


def _call(value: Any, arguments: Sequence[str] = ("arguments", "parameters")) -> Call:
    """Return the call of a JSON object.

    Raises:
        ValueError: It has no name.
    """
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        raise ValueError(f"a call must have a name, got {type(value).__name__}")
    found: Any = next((value[name] for name in arguments if name in value), {})
    text = found if isinstance(found, str) else json.dumps(found, ensure_ascii=False)
    return value["name"], text


def _objects(text: str, tools: Mapping[str, Any]) -> list[Call]:
    """Return calls that are JSON objects, one after the other or in a list."""
    decoder = json.JSONDecoder()
    found: list[Call] = []
    at = 0
    while True:
        at = len(text) - len(text[at:].lstrip(" \t\r\n;,"))
        if at == len(text):
            return found
        value, at = decoder.raw_decode(text, at)
        found += map(_call, value if isinstance(value, list) else [value])


def _mistral(text: str, tools: Mapping[str, Any]) -> list[Call]:
    """Return calls as a list, or as ``name[ARGS]{...}`` and ``name{...}``."""
    text = text.strip()
    if text.startswith(("[", "{")):
        return _objects(text, tools)
    found = []
    for part in text.split("[TOOL_CALLS]"):
        name, brace, rest = part.partition("{")
        name = re.sub(r"\[(ARGS|CALL_ID)\].*", "", name, flags=re.DOTALL).strip()
        if not name or not brace:
            raise ValueError(f"a call must have a name and arguments, got {part[:40]!r}")
        found.append((name, json.dumps(json.loads(brace + rest), ensure_ascii=False)))
    return found


def _deepseek(text: str, tools: Mapping[str, Any]) -> list[Call]:
    """Return calls of DeepSeek V3 and R1 (``function<sep>name```json ...```) and V3.1 (``name<sep>{...}``)."""
    found = []
    for part in text.split("<｜tool▁call▁begin｜>")[1:]:
        head, _, body = part.partition("<｜tool▁call▁end｜>")[0].partition("<｜tool▁sep｜>")
        name, fence, code = body.partition("```json")
        if fence:
            body = code.rpartition("```")[0] or code
        else:
            name = head
        found.append((name.strip(), json.dumps(json.loads(body), ensure_ascii=False)))
    if not found:
        raise ValueError("calls must have at least one, got none")
    return found


def _qwen_coder(text: str, tools: Mapping[str, Any]) -> list[Call]:
    """Return a call in the tags of Qwen3-Coder; values that are JSON are taken as such, unless they must be strings."""
    match = re.search(r"<function=([^>\n]+)>(.*)", text, re.DOTALL)
    if match is None:
        return _objects(text, tools)
    name = match[1].strip()
    rules = (tools.get(name) or {}).get("properties")
    values: dict[str, Any] = {}
    for part in match[2].split("<parameter=")[1:]:
        key, _, rest = part.partition(">")
        value = rest.partition("</parameter>")[0].removeprefix("\n").removesuffix("\n")
        rule = rules.get(key) if isinstance(rules, dict) else None
        values[key] = value
        if not (isinstance(rule, dict) and rule.get("type") == "string"):
            with contextlib.suppress(ValueError):
                values[key] = json.loads(value)
    return [(name, json.dumps(values, ensure_ascii=False))]


_THINK = ("<think>", "</think>")
_TAGS = ("<tool_call>", "</tool_call>")


def family_of(template: str) -> Family:
    """Return the family of a chat template; one without calls and reasoning if it has no known marks."""
    reasoning = _THINK if "<think>" in template or "</think>" in template else None
    if "<|channel|>" in template:
        return Family("harmony")
    if "[TOOL_CALLS]" in template:
        marks = ("[THINK]", "[/THINK]") if "[THINK]" in template else reasoning
        return Family("mistral", marks, ("[TOOL_CALLS]", ""), _mistral)
    if "<｜tool▁calls▁begin｜>" in template:
        calls = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
        return Family("deepseek", reasoning, calls, _deepseek)
    if "<tool_call>" in template:
        parse = _qwen_coder if "<function=" in template else _objects
        return Family("qwen", reasoning, _TAGS, parse)
    if "<|python_tag|>" in template or "ipython" in template:
        return Family("llama", reasoning, ("<|python_tag|>", ""), _objects, bare=True)
    return Family("plain", reasoning)


class Parser:
    """Splits the text of one answer as it comes.

    Args:
        family: How the model writes.
        tools: Parameters of the tools that may be called, by name; without any, calls stay text.
        prompt: The end of the prompt, which may have opened the reasoning.
    """

    def __init__(
        self, family: Family, tools: Mapping[str, Any] | None = None, prompt: str = ""
    ) -> None:
        self._family = family
        self._tools = tools or {}
        self._buffer = ""
        self._state = "text"
        self._begun = False  # there was text since the last call, so that a brace begins no call
        self._skips = False  # blank lines behind the reasoning
        self._name = ""
        self.calls = 0
        marks = family.reasoning
        if marks is not None and prompt.rstrip().endswith(marks[0]):
            self._state = "reasoning"
        if family.name == "harmony":
            # The prompt ends with <|start|>assistant.
            self._state = "head"

    @property
    def reasons(self) -> bool:
        """Whether the next text is reasoning."""
        return self._state == "reasoning"

    def feed(self, text: str, last: bool = False) -> list[dict[str, Any]]:
        """Take text and return what of the message is certain by now, as deltas of the API.

        Args:
            text: New text.
            last: Nothing comes after.
        """
        self._buffer += text
        found: list[dict[str, Any]] = []
        step = self._harmony if self._family.name == "harmony" else self._marks
        while step(found, last):
            pass
        return found

    def _emit(self, found: list[dict[str, Any]], kind: str, text: str) -> None:
        if text:
            found.append({kind: text})

    def _until(self, marks: Sequence[str], last: bool) -> tuple[str, str | None]:
        """Take the text up to the first mark, and the mark; else what cannot begin one."""
        places = [(at, mark) for mark in marks if (at := self._buffer.find(mark)) >= 0]
        if places:
            at, mark = min(places)
            text, self._buffer = self._buffer[:at], self._buffer[at + len(mark) :]
            return text, mark
        keep = 0 if last else max((_overlap(self._buffer, mark) for mark in marks), default=0)
        end = len(self._buffer) - keep
        text, self._buffer = self._buffer[:end], self._buffer[end:]
        return text, None

    def _marks(self, found: list[dict[str, Any]], last: bool) -> bool:
        """Make one step; return whether another one may follow."""
        family = self._family
        if self._state == "reasoning":
            assert family.reasoning is not None
            text, mark = self._until(family.reasoning[1:], last)
            self._emit(found, "reasoning_content", text)
            if mark is not None:
                self._state = "text"
                self._skips = True
            return mark is not None
        if self._state == "call":
            assert family.calls is not None
            close = family.calls[1]
            done = self._buffer.find(close) if close else -1
            if done < 0 and not last:
                return False
            body = self._buffer if done < 0 else self._buffer[:done]
            self._buffer = "" if done < 0 else self._buffer[done + len(close) :]
            self._state = "text"
            self._parse(found, body, family.calls[0] + body + (close if done >= 0 else ""))
            return bool(self._buffer)
        if self._skips:
            self._buffer = self._buffer.lstrip("\n")
            self._skips = not self._buffer
        opening = [family.reasoning[0]] if family.reasoning else []
        if self._tools and family.calls:
            opening.append(family.calls[0])
        if self._tools and family.bare and not self._begun and self._buffer.lstrip()[:1] == "{":
            if last:
                body, self._buffer = self._buffer, ""
                self._parse(found, body, body)
            return False
        text, mark = self._until(opening, last)
        self._begun = self._begun or bool(text.strip())
        if not self._begun and (self.calls or family.bare):
            if mark is None and not last:  # what follows tells whether blanks are part of a text
                self._buffer = text + self._buffer
                return False
            text = "" if self.calls else text  # blanks between calls
        self._emit(found, "content", text)
        if mark is None:
            return False
        self._state = "reasoning" if family.reasoning and mark == family.reasoning[0] else "call"
        return True

    def _harmony(self, found: list[dict[str, Any]], last: bool) -> bool:
        """Make a step through messages of ``head<|message|>body<|end|>``."""
        if self._state == "head":
            at = self._buffer.find("<|message|>")
            if at < 0:
                return False
            head = self._buffer[:at]
            self._buffer = self._buffer[at + len("<|message|>") :]
            match = re.search(r"to=functions\.([\w.-]+)", head)
            self._name = match[1] if match else ""
            channel = head.partition("<|channel|>")[2].strip()
            self._state = "call" if match else "text"
            if not match and channel.startswith("analysis"):
                self._state = "reasoning"
            return True
        ends = ("<|end|>", "<|call|>", "<|return|>", "<|start|>")
        if self._state == "call":
            if not last and not any(mark in self._buffer for mark in ends):
                return False
            text, mark = self._until(ends, True)
            self._parse(found, text.strip() or "{}", text)
        else:
            text, mark = self._until(ends, last)
            kind = "reasoning_content" if self._state == "reasoning" else "content"
            self._emit(found, kind, text)
        if mark is not None:
            self._state = "head"
        return mark is not None

    def _parse(self, found: list[dict[str, Any]], body: str, raw: str) -> None:
        """Emit the calls of a text, or the text where it has none."""
        try:
            if self._family.parse is None:  # harmony, whose head has the name
                json.loads(body)
                calls = [(self._name, body)]
            else:
                calls = self._family.parse(body, self._tools)
            if not calls or any(name not in self._tools for name, _ in calls):
                raise ValueError(f"calls must be of the tools, got {calls!r}"[:200])
        except (ValueError, RecursionError):
            self._emit(found, "content", raw)
            return
        for name, arguments in calls:
            self._add(found, name, arguments)

    def _add(self, found: list[dict[str, Any]], name: str, arguments: str) -> None:
        found.append({"tool_calls": [call_delta(self.calls, name, arguments)]})
        self.calls += 1
        self._begun = False


def call_delta(index: int, name: str, arguments: str) -> dict[str, Any]:
    """Return a call in the form of the API."""
    function = {"name": name, "arguments": arguments}
    identity = f"call_{secrets.token_hex(12)}"
    return {"index": index, "id": identity, "type": "function", "function": function}


def _overlap(text: str, mark: str) -> int:
    """Return the length of the longest end of the text that begins a mark."""
    lengths = range(min(len(mark) - 1, len(text)), 0, -1)
    return next((n for n in lengths if text.endswith(mark[:n])), 0)


class NamedCall:
    """An answer that is the arguments of one tool: they are handed on as they come.

    Args:
        name: Of the tool.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self.calls = 0

    def feed(self, text: str, last: bool = False) -> list[dict[str, Any]]:
        """As for `Parser`."""
        if not text and self.calls:
            return []
        if not self.calls:
            self.calls = 1
            return [{"tool_calls": [call_delta(0, self._name, text)]}]
        return [{"tool_calls": [{"index": 0, "function": {"arguments": text}}]}]


class RequiredCalls:
    """An answer that is a JSON list of calls: each is handed on when it is complete."""

    def __init__(self) -> None:
        self._buffer = ""
        self.calls = 0

    def feed(self, text: str, last: bool = False) -> list[dict[str, Any]]:
        """As for `Parser`."""
        self._buffer += text
        found: list[dict[str, Any]] = []
        while "}" in text:
            rest = self._buffer.lstrip("[, \t\r\n")
            try:
                value, end = json.JSONDecoder().raw_decode(rest)
                name, arguments = _call(value)
            except (ValueError, RecursionError):
                break
            self._buffer = rest[end:]
            found.append({"tool_calls": [call_delta(self.calls, name, arguments)]})
            self.calls += 1
        return found


def forced_parser(name: str | None) -> NamedCall | RequiredCalls:
    """Return what reads an answer that must be calls: of this tool, or of any."""
    return RequiredCalls() if name is None else NamedCall(name)


def forced_schema(tools: Sequence[Any], name: str | None, parallel: bool) -> dict[str, Any]:
    """Return the schema of an answer that must be calls.

    Args:
        tools: With ``name`` and ``parameters``.
        name: The tool to call, None for any.
        parallel: Whether there may be more than one.
    """
    if name is not None:
        found: dict[str, Any] = next(t.parameters for t in tools if t.name == name)
        return found or {"type": "object"}
    calls = [
        {
            "type": "object",
            "properties": {
                "name": {"const": tool.name},
                "parameters": {"$ref": f"#/$defs/{tool.name}"},
            },
            "required": ["name", "parameters"],
            "additionalProperties": False,
        }
        for tool in tools
    ]
    return {
        "$defs": {tool.name: _moved(tool.parameters, f"#/$defs/{tool.name}") for tool in tools},
        "type": "array",
        "minItems": 1,
        "maxItems": 16 if parallel else 1,
        "items": calls[0] if len(calls) == 1 else {"anyOf": calls},
    }


def _moved(schema: dict[str, Any], place: str) -> Any:
    """Return a schema whose references from its root lead to the same rules when it is at a place of another one."""

    def moved(part: dict[str, Any]) -> dict[str, Any]:
        reference = part.get("$ref")
        if isinstance(reference, str) and reference.startswith("#"):
            part["$ref"] = place + reference[1:]
        return part

    return json.loads(json.dumps(schema or {"type": "object"}), object_hook=moved)


def merged(deltas: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the message of all deltas."""
    message: dict[str, Any] = {"role": "assistant", "content": None}
    calls: list[dict[str, Any]] = []
    for delta in deltas:
        for kind in ("content", "reasoning_content"):
            if kind in delta:
                message[kind] = (message.get(kind) or "") + delta[kind]
        for call in delta.get("tool_calls", ()):
            if call["index"] == len(calls):
                function = dict(call["function"])
                calls.append({"id": call["id"], "type": "function", "function": function})
            else:
                calls[call["index"]]["function"]["arguments"] += call["function"]["arguments"]
    if calls:
        message["tool_calls"] = calls
    else:
        message["content"] = message["content"] or ""
    return message

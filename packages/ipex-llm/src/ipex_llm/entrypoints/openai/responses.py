# SPDX-License-Identifier: Apache-2.0
"""``/v1/responses``: a chat under other names, with events of its own."""

from __future__ import annotations

import itertools
import json
import secrets
import time
from collections.abc import AsyncIterator, Iterator
from typing import Annotated, Any, Literal

from ipex_core.errors import MissingComponentError
from ipex_llm.engine import StepOutput
from ipex_llm.entrypoints.openai.job import failure
from ipex_llm.entrypoints.openai.protocol import (
    FUNCTION_NAME,
    MAX_MESSAGES,
    MAX_PARTS,
    REFUSED,
    ApiError,
    ChatRequest,
    Effort,
    Fields,
    Flag,
    Integer,
    Number,
    Refusal,
    chat_of,
    few,
    few_tools,
    joined,
    wrong,
)
from ipex_llm.entrypoints.openai.worker import Failed

try:
    from pydantic import (
        BaseModel,
        BeforeValidator,
        ConfigDict,
        Field,
        ValidationInfo,
        field_validator,
    )
except ImportError as _error:
    raise MissingComponentError("the server needs FastAPI: pip install 'ipex[serve]'") from _error


_LOGPROBS = "message.output_text.logprobs"
#: What an answer can have besides. All but the first belong to tools of the provider, which are left out.
_INCLUDED = (
    _LOGPROBS,
    "reasoning.encrypted_content",
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "message.input_image.image_url",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
)


class Format(Fields):
    type: Literal["text", "json_object", "json_schema"]
    name: str = Field("", max_length=200)
    schema_: Any = Field(None, alias="schema")
    strict: Flag | None = None


class Text(Fields):
    format: Format | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class Reasoning(Fields):
    effort: Effort | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None


class FlatTool(Fields):
    type: Literal["function"]
    name: str = Field(pattern=FUNCTION_NAME)
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: Flag | None = None


def _functions(value: Any) -> Any:
    """Leave out tools that are no functions: agents offer what only their provider has to every server."""

    def other(tool: Any) -> bool:
        kind = tool.get("type") if isinstance(tool, dict) else None
        return isinstance(kind, str) and kind != "function"

    return [tool for tool in value if not other(tool)] if isinstance(value, list) else value


class FlatChoice(Fields):
    type: Literal["function"]
    name: str


class FlatAllowed(Fields):
    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[list[FlatChoice], few_tools]


class Part(Fields):
    type: Literal["input_text", "output_text", "text", "reasoning_text"]
    text: str


#: Field that an item of a type must have.
_NEEDED = {"message": "role", "function_call": "name", "function_call_output": "output"}


class Item(Fields):
    """What was said, called or returned before."""

    type: Literal["message", "function_call", "function_call_output", "reasoning"] = "message"
    role: str | None = Field(default=None, validate_default=True)
    content: str | list[Annotated[Part | Refusal, Field(discriminator="type")]] | None = None
    call_id: str | None = None
    name: str | None = Field(default=None, validate_default=True)
    arguments: str | None = None
    output: str | list[Part] | None = Field(default=None, validate_default=True)

    @field_validator("role", "name", "output")
    @classmethod
    def _needed(cls, value: Any, info: ValidationInfo) -> Any:
        kind = str(info.data.get("type"))
        if value is None and _NEEDED.get(kind) == info.field_name:
            raise wrong(f"must be there in an item of type {kind!r}, got none")
        return value

    def message(self) -> dict[str, Any] | None:
        """Return a message of a chat; None for reasoning, which is not repeated."""
        if self.type == "reasoning":
            return None
        if self.type == "function_call":
            function = {"name": self.name, "arguments": self.arguments or "{}"}
            call = {"id": self.call_id, "type": "function", "function": function}
            return {"role": "assistant", "content": None, "tool_calls": [call]}
        if self.type == "function_call_output":
            return {"role": "tool", "content": joined(self.output), "tool_call_id": self.call_id}
        return {"role": self.role, "content": joined(self.content)}


#: Fields of chats that are not of this API: each is taken, or refused, as in a chat.
_MORE = (
    *("top_k", "min_p", "repetition_penalty", "repeat_penalty", "presence_penalty"),
    *("frequency_penalty", "min_tokens", "stop", "stop_token_ids", "ignore_eos"),
    *("logit_bias", "regex", "grammar"),
    *("include_stop_str_in_output", "skip_special_tokens", "structured_outputs"),
    *("chat_template_kwargs", "add_generation_prompt", *REFUSED),
)
#: Fields of responses by the names that chats have for them.
FIELDS = {"prompt": "input", "messages": "input", "max_completion_tokens": "max_output_tokens"}


class ResponsesRequest(Fields):
    """Body of ``/v1/responses``."""

    model_config = ConfigDict(extra="allow")
    model: str | None = None
    input: Annotated[str | list[Item], few(MAX_MESSAGES, "items", MAX_PARTS)] = Field(min_length=1)
    instructions: str | None = None
    max_output_tokens: Annotated[Integer, Field(ge=1)] | None = None
    temperature: Number | None = None
    top_p: Number | None = None
    tools: Annotated[list[FlatTool] | None, BeforeValidator(_functions), few_tools] = None
    tool_choice: (
        Literal["none", "auto", "required"]
        | Annotated[FlatChoice | FlatAllowed, Field(discriminator="type")]
        | None
    ) = None
    parallel_tool_calls: Flag = True
    text: Text | None = None
    stream: Flag = False
    seed: Integer | None = None
    include: Annotated[list[str] | None, few(len(_INCLUDED), "names")] = None
    top_logprobs: Integer = Field(0, ge=0, le=20)
    reasoning: Reasoning | None = None
    metadata: Annotated[dict[str, str] | None, few(16, "pairs")] = None
    store: Flag | None = None
    truncation: Literal["auto", "disabled"] | None = None
    previous_response_id: Any = None
    background: Any = None
    conversation: Any = None
    prompt: Any = None

    @field_validator("include")
    @classmethod
    def _known(cls, value: list[str] | None) -> Any:
        for name in value or ():
            if name not in _INCLUDED:
                raise wrong(f"must have names of {', '.join(_INCLUDED)}, got {name[:80]!r}")
        return value

    @field_validator("metadata")
    @classmethod
    def _short(cls, value: dict[str, str] | None) -> Any:
        for name, text in (value or {}).items():
            if len(name) > 64 or len(text) > 512:
                what = "names of at most 64 characters and values of at most 512"
                raise wrong(f"must have {what}, got {len(name)} and {len(text)}")
        return value

    @property
    def logprobs(self) -> bool:
        """Whether the answer tells the log probabilities of its tokens."""
        return _LOGPROBS in (self.include or ())

    def chat(self) -> ChatRequest:
        """Return the chat that this is.

        Raises:
            ApiError: A field has no meaning here: nothing is kept between requests.
        """
        for name in ("previous_response_id", "background", "conversation", "prompt"):
            if getattr(self, name):
                raise ApiError(400, f"{name} is not supported: send the whole input", param=name)
        if self.truncation == "auto":
            text = (
                "truncation must be 'disabled', got 'auto': leave items out of the input yourself"
            )
            raise ApiError(400, text, param="truncation")
        items = (
            [Item(role="user", content=self.input)] if isinstance(self.input, str) else self.input
        )
        messages: list[dict[str, Any]] = []
        if self.instructions is not None:
            messages.append({"role": "developer", "content": self.instructions})
        for item in items:
            message = item.message()
            if message is None:
                continue
            last = messages[-1] if messages else {}
            if "tool_calls" in message and last.get("role") == "assistant":
                last.setdefault("tool_calls", []).extend(message["tool_calls"])
            else:
                messages.append(message)
        found: dict[str, Any] = {
            "model": self.model,
            "messages": messages,
            "max_completion_tokens": self.max_output_tokens,
            "parallel_tool_calls": self.parallel_tool_calls,
            "stream": self.stream,
            "seed": self.seed,
            "logprobs": self.logprobs,
            "top_logprobs": self.top_logprobs if self.logprobs else 0,
            "reasoning_effort": None if self.reasoning is None else self.reasoning.effort,
        }
        more = self.model_extra or {}
        found |= {name: more[name] for name in _MORE if name in more}
        for name in ("temperature", "top_p"):
            if getattr(self, name) is not None:
                found[name] = getattr(self, name)
        if self.tools is not None:
            found["tools"] = [
                {
                    "type": "function",
                    "function": tool.model_dump(exclude_none=True, exclude={"type"}),
                }
                for tool in self.tools
            ]
        choice = self.tool_choice
        if isinstance(choice, FlatAllowed):
            some = {"mode": choice.mode, "tools": [_named(tool) for tool in choice.tools]}
            found["tool_choice"] = {"type": choice.type, "allowed_tools": some}
        else:
            found["tool_choice"] = _named(choice) if isinstance(choice, FlatChoice) else choice
        form = None if self.text is None else self.text.format
        if form is not None:
            schema = {"name": form.name, "schema": form.schema_}
            found["response_format"] = {"type": form.type}
            if form.type == "json_schema":
                found["response_format"]["json_schema"] = schema
        return chat_of(found, FIELDS)


def _named(choice: FlatChoice) -> dict[str, Any]:
    return {"type": "function", "function": {"name": choice.name}}


#: Kind of an item -> its part and the events of its text.
_EVENTS = {
    "message": ("output_text", "response.output_text"),
    "reasoning": ("reasoning_text", "response.reasoning_text"),
    "function_call": ("", "response.function_call_arguments"),
}


class Answer:
    """Makes the object and the events of one answer from the deltas of a chat.

    Args:
        model: Name of the model.
        body: The request.
    """

    def __init__(self, model: str, body: ResponsesRequest) -> None:
        self.id = f"resp_{secrets.token_hex(16)}"
        self.reasoning_tokens = 0
        self._numbers = itertools.count()
        self._items: list[dict[str, Any]] = []
        self._open: dict[str, Any] | None = None
        self._text = ""
        #: Of the tokens of the open message; and of tokens whose text has not come yet.
        self._logprobs: list[Any] = []
        self._pending: list[Any] = []
        self._head = {
            "id": self.id,
            "object": "response",
            "created_at": int(time.time()),
            "model": model,
            "error": None,
            "incomplete_details": None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
            "background": False,
            "store": False,
            "top_logprobs": body.top_logprobs,
            "reasoning": _dumped(body.reasoning) or {"effort": None, "summary": None},
            "parallel_tool_calls": body.parallel_tool_calls,
            "previous_response_id": None,
            "temperature": body.temperature,
            "top_p": body.top_p,
            "tool_choice": _dumped(body.tool_choice) or "auto",
            "tools": [_dumped(tool) for tool in body.tools or ()],
            "text": _dumped(body.text) or {"format": {"type": "text"}},
            "truncation": "disabled",
        }

    def whole(self, status: str, usage: dict[str, Any] | None = None) -> dict[str, Any]:
        """Return the object with all that is complete.

        Args:
            status: ``"in_progress"``, ``"completed"`` or ``"incomplete"``.
            usage: Of the chat.
        """
        found = {**self._head, "status": status, "output": list(self._items), "usage": None}
        if status == "incomplete":
            found["incomplete_details"] = {"reason": "max_output_tokens"}
        if usage is not None:
            found["usage"] = {
                "input_tokens": usage["prompt_tokens"],
                "input_tokens_details": {**usage["prompt_tokens_details"], "cache_write_tokens": 0},
                "output_tokens": usage["completion_tokens"],
                "output_tokens_details": {"reasoning_tokens": self.reasoning_tokens},
                "total_tokens": usage["total_tokens"],
            }
        return found

    def event(self, kind: str, **fields: Any) -> dict[str, Any]:
        """Return an event with its number."""
        return {"type": kind, "sequence_number": next(self._numbers), **fields}

    def note(self, logprobs: list[Any]) -> None:
        """Take the log probabilities of tokens, before the deltas that their text is in."""
        self._pending += logprobs

    def add(self, delta: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Take a delta of the chat and yield its events."""
        if delta.get("reasoning_content"):
            self._pending.clear()
            yield from self._more("reasoning", delta["reasoning_content"])
        if delta.get("content"):
            yield from self._more("message", delta["content"])
        for call in delta.get("tool_calls", ()):
            function = call["function"]
            self._pending.clear()
            if "id" in call:
                yield from self.close()
                start = {"call_id": call["id"], "name": function["name"], "arguments": ""}
                yield from self._begin("function_call", **start)
            yield from self._more("function_call", function["arguments"])

    def _begin(self, kind: str, **fields: Any) -> Iterator[dict[str, Any]]:
        prefix = {"message": "msg", "reasoning": "rs", "function_call": "fc"}[kind]
        item = {"type": kind, "id": f"{prefix}_{secrets.token_hex(12)}", "status": "in_progress"}
        if kind != "function_call":
            fields = {"content": []}
        if kind == "message":
            fields["role"] = "assistant"
        if kind == "reasoning":
            fields["summary"] = []
        self._open = {**item, **fields}
        self._text = ""
        self._logprobs = []
        at = len(self._items)
        yield self.event("response.output_item.added", output_index=at, item=dict(self._open))
        part = _EVENTS[kind][0]
        if part:
            empty = self._part(part)
            where = {"item_id": item["id"], "output_index": at, "content_index": 0}
            yield self.event("response.content_part.added", **where, part=empty)

    def _part(self, kind: str) -> dict[str, Any]:
        found: dict[str, Any] = {"type": kind, "text": self._text}
        if kind == "output_text":
            found |= {"annotations": [], "logprobs": list(self._logprobs)}
        return found

    def _more(self, kind: str, text: str) -> Iterator[dict[str, Any]]:
        if self._open is None or self._open["type"] != kind:
            yield from self.close()
            yield from self._begin(kind)
        assert self._open is not None
        self._text += text
        where = self._where(kind)
        if kind == "message":
            where["logprobs"], self._pending = self._pending, []
            self._logprobs += where["logprobs"]
        yield self.event(f"{_EVENTS[kind][1]}.delta", **where, delta=text)

    def _where(self, kind: str) -> dict[str, Any]:
        assert self._open is not None
        found = {"item_id": self._open["id"], "output_index": len(self._items)}
        if kind != "function_call":
            found["content_index"] = 0
        return {**found, "logprobs": list(self._logprobs)} if kind == "message" else found

    def close(self, status: str = "completed") -> Iterator[dict[str, Any]]:
        """End the item that is open, if there is one."""
        if self._open is None:
            return
        item, kind = self._open, self._open["type"]
        part, name = _EVENTS[kind]
        if kind == "message":  # what ended it has no text
            self._logprobs += self._pending
        self._pending = []
        where = self._where(kind)
        if part:
            yield self.event(f"{name}.done", **where, text=self._text)
            whole = self._part(part)
            where.pop("logprobs", None)
            yield self.event("response.content_part.done", **where, part=whole)
            item["content"] = [whole]
        else:
            more = {"name": item["name"], "arguments": self._text}
            yield self.event(f"{name}.done", **where, **more)
            item["arguments"] = self._text
        item["status"] = status
        at = len(self._items)
        self._items.append(item)
        self._open = None
        yield self.event("response.output_item.done", output_index=at, item=item)


def _dumped(value: Any) -> Any:
    if isinstance(value, BaseModel):
        return value.model_dump(by_alias=True, exclude_none=True)
    return value


async def events(answer: Answer, job: Any, reply: Any) -> AsyncIterator[dict[str, Any]]:
    """Yield the events of an answer as they come; the last one has the whole.

    Args:
        answer: Makes them.
        job: A `Generation` of one choice that the engine has accepted.
        reply: Tells why the answer ended.

    Raises:
        ApiError: The engine failed.
    """
    yield answer.event("response.created", response=answer.whole("in_progress"))
    yield answer.event("response.in_progress", response=answer.whole("in_progress"))
    (ticket,), (parser,) = job.tickets, job.parsers
    while True:
        event = await job.event(ticket)
        if isinstance(event, Failed):
            raise failure(event, job.names)
        assert isinstance(event, StepOutput)
        job.count(0, event)
        if getattr(parser, "reasons", False):
            answer.reasoning_tokens += len(event.tokens)
        logprobs, _ = await job.logprobs(0, event, False, reply, 0)
        if logprobs is not None:
            answer.note(logprobs["content"])
        for delta in parser.feed(event.text, event.finished):
            for made in answer.add(delta):
                yield made
        if event.finished:
            break
    status = "incomplete" if reply.reason(event.reason, parser) == "length" else "completed"
    for made in answer.close(status):
        yield made
    yield answer.event(f"response.{status}", response=answer.whole(status, job.usage()))


def sse(event: dict[str, Any]) -> str:
    """Return an event as it is sent."""
    return f"event: {event['type']}\ndata: {json.dumps(event, separators=(',', ':'))}\n\n"

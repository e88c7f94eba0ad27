# SPDX-License-Identifier: Apache-2.0
"""What clients send, as the OpenAI API defines it, and what becomes of it."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import math
import re
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal, TypeVar

from ipex_core.errors import MissingComponentError
from ipex_llm.engine import SamplingParams
from ipex_llm.engine.params import MAX_BIASES, MAX_STOP, MAX_STOP_TOKENS
from ipex_llm.entrypoints.openai.chat import forced_schema
from ipex_llm.entrypoints.openai.grammar import Wanted

#: Characters of a message that is sent; more would repeat what the client sent.
_LONGEST = 600


class ApiError(Exception):
    """An answer that is an error.

    Args:
        status: The HTTP status, which is the ``code`` too.
        message: For people.
        kind: The ``type``.
        param: The field of the request that is wrong, or None.
        headers: Headers of the answer besides those that follow from the status.
    """

    def __init__(
        self,
        status: int,
        message: str,
        kind: str = "invalid_request_error",
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message if len(message) <= _LONGEST else f"{message[:_LONGEST]}...")
        self.status = status
        self.kind = kind
        self.param = param
        self._headers = dict(headers or {})

    @property
    def headers(self) -> dict[str, str]:
        """The headers of the answer."""
        found = {"Content-Type": "application/json", **self._headers}
        if self.status in (429, 503):
            found["Retry-After"] = "1"
        if self.status == 401:
            found["WWW-Authenticate"] = "Bearer"
        return found

    def json(self) -> str:
        """Return the answer; in ASCII, since a message may quote what is no valid text."""
        error = {
            "message": str(self),
            "type": self.kind,
            "param": self.param,
            "code": self.status,
        }
        return json.dumps({"error": error})


# -- What clients send, as the OpenAI API defines it, and what becomes of it ------------------------------------------


try:
    from pydantic import (
        AliasChoices,
        BaseModel,
        BeforeValidator,
        Field,
        ValidationError,
        field_validator,
        model_validator,
    )
    from pydantic_core import PydanticCustomError
    from starlette.requests import Request
except ImportError as _error:
    raise MissingComponentError("the server needs FastAPI: pip install 'ipex[serve]'") from _error


#: Most choices and prompts of one request.
MAX_CHOICES = 16
#: Most messages of a conversation, and most parts of all of them.
MAX_MESSAGES, MAX_PARTS = 4096, 4096
#: Most tools of a request, calls of a message, and texts that an output can be chosen from.
MAX_TOOLS, MAX_CALLS, MAX_TEXTS = 128, 128, 1000

#: Bytes of a body that is read at once, on the event loop.
_AT_ONCE = 16 << 10
#: Times as long as a larger body took, and at most so many seconds, pass before the next one is read: clients that send
#: one after the other would take the interpreter and a core from the streams.
_REST, _LONGEST_REST = 3.0, 1.0


def _whole(value: Any) -> Any:
    """Return a number without a fraction as an integer: many languages write all numbers with one."""
    return int(value) if type(value) is float and value.is_integer() else value


#: JSON has numbers, texts and truth values; one is not taken for another.
Number = Annotated[float, Field(strict=True)]
_Exact = Annotated[int, Field(strict=True)]
Integer = Annotated[_Exact, BeforeValidator(_whole)]
Flag = Annotated[bool, Field(strict=True)]

Body = TypeVar("Body", bound=BaseModel)


def wrong(text: str) -> PydanticCustomError:
    """Return the error of a field; what it says is no template."""
    return PydanticCustomError("field", "{text}", {"text": text})


def short(value: Any, most: int, name: str, parts: int | None = None) -> Any:
    """Return a list or an object, after a check of its length: pydantic reads all of it before it looks at that."""
    if isinstance(value, (list, dict)):
        if len(value) > most:
            raise wrong(f"must have at most {most} {name}, got {len(value)}")
        if parts is not None:
            contents = [part.get("content") for part in value if isinstance(part, dict)]
            count = sum(len(content) for content in contents if isinstance(content, list))
            if count > parts:
                raise wrong(f"must have at most {parts} parts, got {count}")
    return value


def few(most: int, name: str, parts: int | None = None) -> BeforeValidator:
    """Return what checks the length of a list or an object; see `short`."""
    return BeforeValidator(lambda value: short(value, most, name, parts))


#: Of a request; their names are checked where they are all in one form.
few_tools = few(MAX_TOOLS, "tools")


class Fields(BaseModel):
    """An object of a request. A field that is null is as one that is not there, unless it must be there."""

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        needed = {name for name, field in cls.model_fields.items() if field.is_required()}
        return {name: v for name, v in value.items() if v is not None or name in needed}


class StreamOptions(Fields):
    include_usage: Flag = False
    continuous_usage_stats: Flag = False


class StructuredOutputs(Fields):
    """What an output must be, as vLLM has it; one of them."""

    # "json" would hide a method of pydantic's models.
    schema_: Any = Field(None, alias="json")
    regex: str | None = None
    choice: Annotated[list[str] | None, few(MAX_TEXTS, "texts")] = Field(None, min_length=1)
    grammar: str | None = None
    json_object: Flag = False

    def wanted(self, field: str) -> list[Wanted]:
        """Return what is asked for."""
        found = []
        if self.schema_ is not None:
            found.append(schema_wanted(self.schema_, f"{field}.json"))
        if self.json_object:
            found.append(schema_wanted({"type": "object"}, f"{field}.json_object"))
        if self.choice is not None:
            text = json.dumps(self.choice, ensure_ascii=False)
            found.append(Wanted("choice", text, f"{field}.choice"))
        if self.regex is not None:
            found.append(Wanted("regex", self.regex, f"{field}.regex"))
        if self.grammar is not None:
            found.append(Wanted("grammar", self.grammar, f"{field}.grammar"))
        return found


class JsonSchema(Fields):
    name: str = Field("", max_length=200)
    schema_: Any = Field(None, alias="schema")
    strict: Flag | None = None


class ResponseFormat(Fields):
    """The form of the output, as the OpenAI API has it."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None
    schema_: Any = Field(None, alias="schema")  # as llama.cpp has it

    def wanted(self, field: str) -> list[Wanted]:
        """Return what is asked for."""
        if self.type == "text":
            return []
        if self.schema_ is not None:
            return [schema_wanted(self.schema_, f"{field}.schema")]
        if self.type == "json_object":
            return [schema_wanted({"type": "object"}, field)]
        schema = None if self.json_schema is None else self.json_schema.schema_
        name = f"{field}.json_schema"
        if schema is None:
            raise ValueError(f"{name} must have a schema, got none")
        return [schema_wanted(schema, name)]


def schema_wanted(schema: Any, field: str) -> Wanted:
    """Return what a JSON schema asks for.

    Raises:
        ValueError: It is no JSON object.
    """
    if isinstance(schema, str):
        return Wanted("json", schema, field)
    if not isinstance(schema, (dict, bool)):
        raise ValueError(f"{field} must be a JSON object, got {type(schema).__name__}")
    return Wanted("json", json.dumps(schema, ensure_ascii=False), field)


#: Fields of the OpenAI API and of vLLM that would change the answer, and are not supported.
REFUSED = (
    *("suffix", "functions", "audio", "web_search_options", "bad_words", "allowed_token_ids"),
    *("guided_json", "guided_regex", "guided_choice", "guided_grammar", "logits_processors"),
    *("use_beam_search", "truncate_prompt_tokens", "prompt_logprobs", "prompt_embeds", "echo"),
    *("continue_final_message", "chat_template", "documents"),
    *("return_token_ids", "return_tokens_as_token_ids", "json_schema"),
)


def _also(name: str, other: str, default: Any) -> Any:
    """Return a field that llama.cpp has by another name."""
    return Field(default, validation_alias=AliasChoices(name, other))


class _Common(Fields):
    model: str | None = None
    max_tokens: Annotated[Integer, Field(ge=-1)] | None = _also("max_tokens", "n_predict", None)
    min_tokens: Integer = Field(0, ge=0)
    temperature: Number = Field(1.0, ge=0, le=100)
    top_p: Number = Field(1.0, ge=0, le=1)
    top_k: Integer = Field(0, ge=-1)
    min_p: Number = Field(0.0, ge=0, le=1)
    seed: Integer | None = None
    n: Integer = Field(1, ge=1, le=MAX_CHOICES)
    stop: Annotated[str | list[str] | None, few(MAX_STOP, "strings")] = None
    stop_token_ids: Annotated[list[Integer], few(MAX_STOP_TOKENS, "tokens")] = []
    ignore_eos: Flag = False
    presence_penalty: Number = Field(0.0, ge=-2, le=2)
    frequency_penalty: Number = Field(0.0, ge=-2, le=2)
    repetition_penalty: Annotated[Number, Field(ge=0.01, le=1e6)] = _also(
        "repetition_penalty", "repeat_penalty", 1.0
    )
    stream: Flag = False
    stream_options: StreamOptions | None = None
    logit_bias: Annotated[dict[str, Number] | None, few(MAX_BIASES, "tokens")] = None
    include_stop_str_in_output: Flag = False
    skip_special_tokens: Flag = True
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    regex: str | None = None
    grammar: str | None = None

    @field_validator("logit_bias")
    @classmethod
    def _biases(cls, value: dict[str, float] | None) -> Any:
        for token, bias in (value or {}).items():
            if not re.fullmatch(r"[0-9]{1,9}", token):
                raise wrong(f"must have ids of tokens as names, got {token[:40]!r}")
            if not -100 <= bias <= 100:
                raise wrong(f"must have numbers in [-100, 100], got {bias:g}")
        return value

    def refused(self, found: dict[str, Any]) -> str | None:
        """Return a field of the body ``found`` that is not supported, or None."""
        if found.get("add_generation_prompt") is False:
            return "add_generation_prompt"
        names = (name for name in REFUSED if name not in type(self).model_fields)
        return next((name for name in names if found.get(name)), None)

    def wanted(self) -> Wanted | None:
        """Return what the output must be, or None.

        Raises:
            ValueError: It must be several things, or a rule has a wrong form.
        """
        found: list[Wanted] = []
        for name in ("response_format", "structured_outputs"):
            part = getattr(self, name)
            found += [] if part is None else part.wanted(name)
        if self.regex is not None:
            found.append(Wanted("regex", self.regex, "regex"))
        if self.grammar is not None:
            found.append(Wanted("grammar", self.grammar, "grammar"))
        if len(found) > 1:
            names = " and ".join(one.field for one in found)
            raise ValueError(f"{found[0].field} must be the one rule for the output, got {names}")
        for one in found:
            one.check()
        return found[0] if found else None


class CompletionRequest(_Common):
    """Body of ``/v1/completions``."""

    prompt: Any
    logprobs: Annotated[Integer, Field(ge=0, le=50)] | None = None
    echo: Flag = False
    best_of: Integer | None = None

    @field_validator("prompt")
    @classmethod
    def _known(cls, value: Any) -> Any:
        return check_prompts(value, MAX_CHOICES, "prompts")

    def prompts(self) -> list[str | list[int]]:
        """Return the prompts, one for each set of choices."""
        return prompts_of(self.prompt)

    def refused(self, found: dict[str, Any]) -> str | None:
        """As for all requests."""
        return "best_of" if self.best_of not in (None, self.n) else super().refused(found)

    @property
    def alternatives(self) -> int | None:
        """How many alternatives to report at each place, or None."""
        return self.logprobs


class TextPart(Fields):
    type: Literal["text", "input_text", "output_text"]
    text: str


class Thinking(Fields):
    """What the assistant thought, as vLLM and Mistral have it."""

    type: Literal["thinking"]
    thinking: str | list[TextPart]

    @property
    def text(self) -> str:
        return ""  # no part of what was said


class Refusal(Fields):
    """What the assistant said instead of an answer."""

    type: Literal["refusal"]
    refusal: str

    @property
    def text(self) -> str:
        return self.refusal


def joined(value: str | list[Any] | None) -> str:
    """Return a text, or the text of its parts."""
    if value is None or isinstance(value, str):
        return value or ""
    return "".join(part.text for part in value)


class CalledFunction(Fields):
    name: str
    arguments: str = "{}"


class ToolCall(Fields):
    id: str | None = None
    type: Literal["function"] = "function"
    function: CalledFunction

    def plain(self) -> dict[str, Any]:
        """Return the call as chat templates take it: with its arguments as an object, if they are one."""
        try:
            arguments = json.loads(self.function.arguments or "{}")
        except (ValueError, RecursionError):
            arguments = self.function.arguments
        function = {"name": self.function.name, "arguments": arguments}
        found: dict[str, Any] = {"type": "function", "function": function}
        return found if self.id is None else {"id": self.id, **found}


MessagePart = Annotated[TextPart | Refusal | Thinking, Field(discriminator="type")]


class Message(Fields):
    """One message of a conversation."""

    role: str
    content: str | list[MessagePart] | None = None
    refusal: str | None = None
    name: str | None = None
    reasoning_content: str | None = None
    reasoning: Any = None  # another name of it, in vLLM too; elsewhere no text
    tool_calls: Annotated[list[ToolCall] | None, few(MAX_CALLS, "calls")] = None
    tool_call_id: str | None = None

    def plain(self) -> dict[str, Any]:
        """Return the message as chat templates take it."""
        content = self.content or ""
        text = joined(content) + (self.refusal or "")
        found: dict[str, Any] = {"role": self.role, "content": text}
        parts = () if isinstance(content, str) else content
        thoughts = [joined(part.thinking) for part in parts if isinstance(part, Thinking)]
        if any(thoughts):
            found["reasoning_content"] = "".join(thoughts)
        if isinstance(self.reasoning, str):
            found["reasoning_content"] = self.reasoning
        for name in ("name", "reasoning_content", "tool_call_id"):
            if getattr(self, name) is not None:
                found[name] = getattr(self, name)
        if self.tool_calls:
            found["tool_calls"] = [call.plain() for call in self.tool_calls]
        return found


def plain_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Return messages as chat templates take them.

    Most templates take one system message, the first, and fail at the role ``developer`` or leave it out: such messages
    are joined to the system message.
    """
    found = [message.plain() for message in messages]
    if any(message["role"] == "developer" for message in found):
        start = next((m for m in found if m["role"] != "developer"), found[0])
        if start["role"] == "system":
            start["role"] = "developer"
        text = "\n\n".join(m["content"] for m in found if m["role"] == "developer")
        others = [m for m in found if m["role"] != "developer"]
        found = [{"role": "system", "content": text}, *others]
    return found


#: Of a conversation.
Messages = Annotated[list[Message], few(MAX_MESSAGES, "messages", MAX_PARTS)]

FUNCTION_NAME = r"^[A-Za-z0-9_.-]{1,64}$"


class Function(Fields):
    name: str = Field(pattern=FUNCTION_NAME)
    description: str | None = None
    parameters: dict[str, Any] = Field(default_factory=lambda: {"type": "object"})
    strict: Flag | None = None


class Tool(Fields):
    type: Literal["function"]
    function: Function


class NamedFunction(Fields):
    name: str


class NamedTool(Fields):
    type: Literal["function"] = "function"
    function: NamedFunction


class Allowed(Fields):
    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], few_tools]


class AllowedTools(Fields):
    """Some of the tools may be called, or one of them must be."""

    type: Literal["allowed_tools"]
    allowed_tools: Allowed


#: Names of the chat template's arguments that clients cannot set.
_RESERVED = frozenset(
    {"chat_template", "tokenize", "messages", "conversation", "tools", "return_tensors"}
    | {"return_dict", "padding", "truncation", "max_length", "tokenizer_kwargs", "documents"}
    | {"return_assistant_tokens_mask", "self"}
)


Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class ChatRequest(_Common):
    """Body of ``/v1/chat/completions``."""

    messages: Messages = Field(min_length=1)
    max_completion_tokens: Annotated[Integer, Field(ge=1)] | None = None
    logprobs: Flag = False
    top_logprobs: Integer = Field(0, ge=0, le=20)
    tools: Annotated[list[Tool] | None, few_tools] = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | AllowedTools | None = None
    parallel_tool_calls: Flag = True
    reasoning_effort: Effort | None = None
    chat_template_kwargs: dict[str, str | Flag | _Exact | Number | None] | None = None

    @field_validator("tools")
    @classmethod
    def _other_names(cls, value: list[Tool] | None) -> Any:
        names = Counter(tool.function.name for tool in value or ())
        if names and (first := names.most_common(1)[0])[1] > 1:
            raise wrong(f"must have names of their own, got {first[0]!r} twice")
        return value

    @field_validator("chat_template_kwargs", mode="before")
    @classmethod
    def _few_arguments(cls, value: Any) -> Any:
        if isinstance(value, dict) and (taken := sorted(_RESERVED & value.keys())):
            raise wrong(f"must have arguments of the model's own template, got {taken[0]!r}")
        return short(value, MAX_TOOLS, "arguments")

    @property
    def named(self) -> list[str]:
        """The tools that the choice names."""
        choice = self.tool_choice
        found = choice.allowed_tools.tools if isinstance(choice, AllowedTools) else [choice]
        return [one.function.name for one in found if isinstance(one, NamedTool)]

    @property
    def offered(self) -> list[Tool]:
        """The tools that may be called."""
        found = [] if self.tool_choice == "none" else self.tools or []
        if isinstance(self.tool_choice, AllowedTools):
            names = set(self.named)
            found = [tool for tool in found if tool.function.name in names]
        return found

    @property
    def allowed_tools(self) -> dict[str, dict[str, Any]]:
        """Parameters of the tools that may be called, by name."""
        return {tool.function.name: tool.function.parameters for tool in self.offered}

    @property
    def forced(self) -> bool:
        """Whether the answer must be calls."""
        choice = self.tool_choice
        if isinstance(choice, AllowedTools):
            choice = choice.allowed_tools.mode
        return choice == "required" or isinstance(choice, NamedTool)

    @property
    def forced_name(self) -> str | None:
        """The tool that must be called, or None."""
        return self.tool_choice.function.name if isinstance(self.tool_choice, NamedTool) else None

    def wanted(self) -> Wanted | None:
        """As for completions; the calls, where there must be some."""
        found = super().wanted()
        # A response_format is about texts, of which an answer that must be calls has none.
        if self.forced and found is not None and not found.field.startswith("response_format"):
            raise ValueError(f"tool_choice must leave room for {found.field}, got both")
        if self.forced and not (self.offered or self.named):
            raise ValueError("tool_choice must have tools to choose from, got none")
        for name in self.named:
            if name not in self.allowed_tools:
                raise ValueError(f"tool_choice must be one of the tools, got {name[:64]!r}")
        if not self.forced:
            return found
        schema = forced_schema(
            [tool.function for tool in self.offered], self.forced_name, self.parallel_tool_calls
        )
        wanted = schema_wanted(schema, "tools")
        wanted.check()
        return wanted

    def template(self) -> dict[str, Any]:
        """Return the further arguments of the chat template."""
        found: dict[str, Any] = {}
        if self.reasoning_effort is not None:
            # By the first name gpt-oss reads it, by the second Qwen.
            found["reasoning_effort"] = self.reasoning_effort
            found["enable_thinking"] = self.reasoning_effort != "none"
        found |= self.chat_template_kwargs or {}
        if self.offered:
            found["tools"] = [tool.model_dump(exclude_none=True) for tool in self.offered]
        return found

    @property
    def alternatives(self) -> int | None:
        """How many alternatives to report at each place, or None."""
        return self.top_logprobs if self.logprobs else None


def sampling_params(
    body: CompletionRequest | ChatRequest, choice: int, most: int, default: int
) -> SamplingParams:
    """Return the parameters of one choice.

    Args:
        body: The request.
        choice: Its number; choices of a seeded request get seeds that follow each other.
        most: Most new tokens that the server allows.
        default: New tokens if the request does not say.

    Raises:
        ValueError: A value is out of its range.
    """
    count = getattr(body, "max_completion_tokens", None)
    field = "max_tokens" if count is None else "max_completion_tokens"
    count = body.max_tokens if count is None else count
    echo = getattr(body, "echo", False)
    if count == 0 and not echo:
        raise ValueError("max_tokens must be at least 1 without echo, got 0")
    if count == -1:  # without a limit, as in llama.cpp
        count = most
    count = default if count is None else max(count, 1)  # the one token is left out of the answer
    if count > most:
        raise ValueError(f"{field} must be at most {most}, got {count}")
    stop = [body.stop] if isinstance(body.stop, str) else body.stop or []
    return SamplingParams(
        max_new_tokens=count,
        min_new_tokens=body.min_tokens,
        temperature=body.temperature if body.temperature >= 1e-6 else 0.0,
        top_k=max(body.top_k, 0),
        top_p=body.top_p,
        min_p=body.min_p,
        seed=None if body.seed in (None, -1) else body.seed + choice,  # -1 is any, as in vLLM
        repetition_penalty=body.repetition_penalty,
        presence_penalty=body.presence_penalty,
        frequency_penalty=body.frequency_penalty,
        stop=tuple(stop),
        stop_token_ids=tuple(body.stop_token_ids),
        ignore_eos=body.ignore_eos,
        logprobs=body.alternatives,
        prompt_logprobs=body.alternatives if echo else None,
        logit_bias={int(token): bias for token, bias in (body.logit_bias or {}).items()},
        include_stop=body.include_stop_str_in_output,
        skip_special_tokens=body.skip_special_tokens,
    )


def prompts_of(value: Any) -> list[str | list[int]]:
    """Return the prompts that a field has: one text, token ids, or several of them."""
    one = isinstance(value, str) or (value and isinstance(value[0], int))
    return [value] if one else list(value)


def check_prompts(value: Any, most: int, name: str) -> Any:
    """Return a field with prompts, after a check of its form.

    Args:
        value: What it has.
        most: Most prompts.
        name: Of what there may be so many.
    """
    # By hand: of a union of lists pydantic would report each of a million elements, for each kind of list.
    if isinstance(value, list):
        texts = all(type(part) is str for part in value[:most])
        lists = all(type(part) is list for part in value[:most])
        if value and (texts or lists) and len(value) > most:
            raise wrong(f"must have at most {most} {name}, got {len(value)}")
        good = all(map(_text, value)) if texts else all(map(_ids, value if lists else [value]))
    else:
        good = _text(value)
    if not good:
        got = "a list of something else" if isinstance(value, list) else type(value).__name__
        raise wrong(
            f"must be text, a list of texts, token ids, or a list of lists of token ids, got {got}"
        )
    return value


#: Words of the engine for fields.
_FIELDS = {"max_new_tokens": "max_tokens", "min_new_tokens": "min_tokens", "lora": "model"}


def field_of(error: BaseException, names: Mapping[str, str] = {}) -> str | None:
    """Return the field that an error of the engine or of a check tells of, or None.

    Args:
        error: Its message has the form ``place: name must ...``.
        names: Names of the request for names of the engine.
    """
    match = re.match(
        r"(?:[\w.]+: )?([a-z_][\w.]*)(?: in the chat template| and output)? must ", str(error)
    )
    name = match[1] if match else None
    return None if name is None else {**_FIELDS, **(names or {})}.get(name, name)


def _text(value: Any) -> bool:
    return type(value) is str


def _ids(value: Any) -> bool:
    return type(value) is list and set(map(type, value)) <= {int}


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        # What checks the request before us may take the other value.
        name = Counter(name for name, _ in pairs).most_common(1)[0][0]
        raise ValueError(f"each name must be there once in an object, got {name[:80]!r} twice")
    return found


def _constant(name: str) -> Any:
    raise ValueError(f"numbers must be finite, got {name}")


@contextlib.contextmanager
def _collector_paused() -> Iterator[None]:
    """Let no garbage be collected: a megabyte of empty lists has it look at all of the process again and again."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


#: What pydantic puts into the place of an error for the part of a union that was tried.
_PARTS = frozenset({"str", "bool", "int", "float", "NamedTool", "AllowedTools"})


def _place(parts: Sequence[int | str], names: Mapping[str, str]) -> str:
    """Return the field that an error is in; the first part may have another name."""
    named = [p for p in parts if isinstance(p, int) or (p.isidentifier() and p not in _PARTS)]
    if named:
        named[0] = names.get(str(named[0]), named[0])
    return ".".join(str(part)[:80] for part in named[:4]) or "body"


async def read_body(kind: type[Body], request: Request, turn: asyncio.Semaphore) -> Body:
    """Return the body of a request.

    Args:
        kind: What it must be.
        request: The request, whose body has come.
        turn: Lets one large body be read at a time, in a thread: many must not stop the event loop and its streams.

    Raises:
        ApiError: It is no JSON, or does not have the form of ``kind``.
    """
    content = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    data = await request.body()
    if content != "application/json" and not content.endswith("+json"):
        # Pages of other sites can send other types here without asking.
        raise ApiError(400, "Content-Type must be application/json", param="body")
    if len(data) <= _AT_ONCE:
        return parse_body(kind, data)
    await turn.acquire()
    begun = time.monotonic()
    try:
        return await asyncio.to_thread(parse_body, kind, data)
    finally:
        rest = min(_REST * (time.monotonic() - begun), _LONGEST_REST)
        asyncio.get_running_loop().call_later(rest, turn.release)


def parse_body(kind: type[Body], data: bytes) -> Body:
    """Return what a body says.

    Raises:
        ApiError: As for `read_body`.
    """
    infinite: list[str] = []

    def number(text: str) -> float:
        if math.isinf(value := float(text)):
            infinite.append(text[:20])
        return value

    try:
        with _collector_paused():
            found = json.loads(
                data.decode("utf-8"),
                object_pairs_hook=_object,
                parse_constant=_constant,
                parse_float=number,
            )
        if b"\\ud" in data or b"\\uD" in data:  # may be half of a surrogate pair, which is no text
            json.dumps(found, ensure_ascii=False).encode("utf-8")
    except UnicodeDecodeError as error:
        text = (
            f"body: must be JSON in UTF-8, got the byte {data[error.start]:#04x} at {error.start}"
        )
        raise ApiError(400, text, param="body") from None
    except UnicodeEncodeError:
        text = "body: must be JSON of valid Unicode, got half of a surrogate pair"
        raise ApiError(400, text, param="body") from None
    except RecursionError:
        raise ApiError(400, "body: must be JSON that is not nested deeply", param="body") from None
    except ValueError as error:
        raise ApiError(400, f"body: must be JSON, got {error}"[:300], param="body") from None
    made = _validated(kind, found, {})  # most fields have an error with their name
    if infinite:
        text = f"body: must be JSON of finite numbers, got {infinite[0]}"
        raise ApiError(400, text, param="body")
    return made


def chat_of(found: dict[str, Any], names: Mapping[str, str]) -> ChatRequest:
    """Return a chat that another form of request asks for.

    Args:
        found: Its fields.
        names: Fields of the other form for fields of a chat.

    Raises:
        ApiError: As for `read_body`.
    """
    return _validated(ChatRequest, found, names)


def _validated(kind: type[Body], found: Any, names: Mapping[str, str]) -> Body:
    try:
        made = kind.model_validate(found)
    except ValidationError as error:
        errors = error.errors(include_url=False, include_context=False, include_input=False)
        # Of a union each kind has an error: the one that came deepest tells most.
        deepest = max(errors, key=lambda one: len(one["loc"]))
        place = _place(deepest["loc"], names)
        text = f"{place}: {deepest['msg']}"[:300]
        raise ApiError(400, text, param=place) from None
    refused = made.refused(found) if isinstance(made, _Common) else None
    if refused is not None:
        text = f"{refused} is not supported: remove it from the request"
        raise ApiError(400, text, param=refused)
    return made

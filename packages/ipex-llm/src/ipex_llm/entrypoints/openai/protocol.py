# SPDX-License-Identifier: Apache-2.0
"""What clients send, as the OpenAI API defines it, and what becomes of it."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal, TypeVar

from ipex_core.errors import MissingComponentError
from ipex_llm.engine import SamplingParams
from ipex_llm.engine.params import MAX_STOP, MAX_STOP_TOKENS

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
    from pydantic import BaseModel, Field, ValidationError, field_validator
    from pydantic_core import PydanticCustomError
    from starlette.requests import Request
except ImportError as _error:
    raise MissingComponentError("the server needs FastAPI: pip install 'ipex[serve]'") from _error


#: Most choices and prompts of one request.
MAX_CHOICES = 16
#: Most messages of a conversation, and most parts of all of them.
MAX_MESSAGES, MAX_PARTS = 4096, 4096

#: Bytes of a body that is read at once, on the event loop.
_AT_ONCE = 16 << 10

#: JSON has numbers, texts and truth values; one is not taken for another.
Number = Annotated[float, Field(strict=True)]
Integer = Annotated[int, Field(strict=True)]
Flag = Annotated[bool, Field(strict=True)]

Body = TypeVar("Body", bound=BaseModel)


class StreamOptions(BaseModel):
    include_usage: Flag = False


class _Common(BaseModel):
    model: str | None = None
    max_tokens: Annotated[Integer, Field(ge=1)] | None = None
    min_tokens: Integer = Field(0, ge=0)
    temperature: Number = Field(1.0, ge=0, le=100)
    top_p: Number = Field(1.0, ge=0, le=1)
    top_k: Integer = Field(0, ge=-1)
    min_p: Number = Field(0.0, ge=0, le=1)
    seed: Integer | None = None
    n: Integer = Field(1, ge=1, le=MAX_CHOICES)
    stop: str | list[str] | None = None
    stop_token_ids: list[Integer] = []
    ignore_eos: Flag = False
    presence_penalty: Number = Field(0.0, ge=-2, le=2)
    frequency_penalty: Number = Field(0.0, ge=-2, le=2)
    repetition_penalty: Number = Field(1.0, ge=0.01, le=1e6)
    stream: Flag = False
    stream_options: StreamOptions | None = None
    # Would change the answer, and is not supported: refused unless it has no effect.
    logit_bias: Any = None

    @field_validator("stop", mode="before")
    @classmethod
    def _few_stops(cls, value: Any) -> Any:
        return _short(value, MAX_STOP, "strings")

    @field_validator("stop_token_ids", mode="before")
    @classmethod
    def _few_tokens(cls, value: Any) -> Any:
        return _short(value, MAX_STOP_TOKENS, "tokens")


class CompletionRequest(_Common):
    """Body of ``/v1/completions``."""

    prompt: Any
    logprobs: Annotated[Integer, Field(ge=0, le=50)] | None = None
    echo: Flag = False
    suffix: str | None = None
    best_of: Integer | None = None

    @field_validator("prompt")
    @classmethod
    def _known(cls, value: Any) -> Any:
        # By hand: of a union of lists pydantic would report each of a million elements, for each kind of list.
        if isinstance(value, list):
            texts = all(type(part) is str for part in value[:MAX_CHOICES])
            lists = all(type(part) is list for part in value[:MAX_CHOICES])
            if value and (texts or lists) and len(value) > MAX_CHOICES:
                what = f"must have at most {MAX_CHOICES} prompts, got {len(value)}"
                raise PydanticCustomError("prompt", what)  # type: ignore[arg-type]
            good = all(map(_text, value)) if texts else all(map(_ids, value if lists else [value]))
        else:
            good = _text(value)
        if not good:
            got = "a list of something else" if isinstance(value, list) else type(value).__name__
            what = f"must be text, a list of texts, token ids, or a list of lists of token ids, got {got}"
            raise PydanticCustomError("prompt", what)  # type: ignore[arg-type]
        return value

    def prompts(self) -> list[str | list[int]]:
        """Return the prompts, one for each set of choices."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if self.prompt and isinstance(self.prompt[0], int):
            return [self.prompt]
        return list(self.prompt)

    def refused(self) -> str | None:
        """Return the field that is not supported, or None."""
        if self.logit_bias:
            return "logit_bias"
        if self.echo:
            return "echo"
        if self.suffix:
            return "suffix"
        return "best_of" if self.best_of not in (None, self.n) else None

    @property
    def alternatives(self) -> int | None:
        """How many alternatives to report at each place, or None."""
        return self.logprobs


class TextPart(BaseModel):
    type: Literal["text"]
    text: str


class Message(BaseModel):
    """One message of a conversation."""

    role: str
    content: str | list[TextPart] | None = None

    def plain(self) -> dict[str, str]:
        """Return the message as chat templates take it."""
        content = self.content or ""
        text = content if isinstance(content, str) else "".join(part.text for part in content)
        return {"role": self.role, "content": text}


class ChatRequest(_Common):
    """Body of ``/v1/chat/completions``."""

    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: Annotated[Integer, Field(ge=1)] | None = None
    logprobs: Flag = False
    top_logprobs: Integer = Field(0, ge=0, le=20)
    tools: Any = None
    functions: Any = None

    @field_validator("messages", mode="before")
    @classmethod
    def _few(cls, value: Any) -> Any:
        return _short(value, MAX_MESSAGES, "messages", MAX_PARTS)

    response_format: dict[str, Any] | None = None

    def refused(self) -> str | None:
        """Return the field that is not supported, or None."""
        for name in ("logit_bias", "tools", "functions"):
            if getattr(self, name):
                return name
        if self.response_format and self.response_format.get("type") != "text":
            return "response_format"
        return None

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
    count = getattr(body, "max_completion_tokens", None) or body.max_tokens or default
    if count > most:
        raise ValueError(f"max_tokens must be at most {most}, got {count}")
    stop = [body.stop] if isinstance(body.stop, str) else body.stop or []
    return SamplingParams(
        max_new_tokens=count,
        min_new_tokens=body.min_tokens,
        temperature=body.temperature if body.temperature >= 1e-6 else 0.0,
        top_k=max(body.top_k, 0),
        top_p=body.top_p,
        min_p=body.min_p,
        seed=None if body.seed is None else body.seed + choice,
        repetition_penalty=body.repetition_penalty,
        presence_penalty=body.presence_penalty,
        frequency_penalty=body.frequency_penalty,
        stop=tuple(stop),
        stop_token_ids=tuple(body.stop_token_ids),
        ignore_eos=body.ignore_eos,
        logprobs=body.alternatives,
    )


def _short(value: Any, most: int, name: str, parts: int | None = None) -> Any:
    """Return a list, after a check of its length: pydantic reads all elements before it looks at that."""
    if isinstance(value, list):
        if len(value) > most:
            what = f"must have at most {most} {name}, got {len(value)}"
            raise PydanticCustomError("length", what)  # type: ignore[arg-type]
        if parts is not None:
            contents = [part.get("content") for part in value if isinstance(part, dict)]
            count = sum(len(content) for content in contents if isinstance(content, list))
            if count > parts:
                what = f"must have at most {parts} parts, got {count}"
                raise PydanticCustomError("length", what)  # type: ignore[arg-type]
    return value


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
    async with turn:
        return await asyncio.to_thread(parse_body, kind, data)


def parse_body(kind: type[Body], data: bytes) -> Body:
    """Return what a body says.

    Raises:
        ApiError: As for `read_body`.
    """
    try:
        with _collector_paused():
            found = json.loads(
                data.decode("utf-8"), object_pairs_hook=_object, parse_constant=_constant
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
    try:
        return kind.model_validate(found)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        place = ".".join(str(part)[:80] for part in first["loc"][:4]) or "body"
        text = f"{place}: {first['msg']}"[:300]
        raise ApiError(400, text, param=place) from None

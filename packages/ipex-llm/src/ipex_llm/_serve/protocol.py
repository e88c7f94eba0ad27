# SPDX-License-Identifier: Apache-2.0
"""What clients send, as the OpenAI API defines it, and what becomes of it."""

from __future__ import annotations

from typing import Any, Literal

from ipex_core.errors import MissingComponentError
from ipex_llm.engine import SamplingParams

try:
    from pydantic import BaseModel, Field
except ImportError as _error:
    raise MissingComponentError("the server needs FastAPI: pip install 'ipex[serve]'") from _error

__all__ = ["ChatRequest", "CompletionRequest", "Message", "sampling_params"]

#: Most choices and prompts of one request.
MAX_CHOICES = 16


class StreamOptions(BaseModel):
    include_usage: bool = False


class _Common(BaseModel):
    model: str | None = None
    max_tokens: int | None = Field(None, ge=1)
    min_tokens: int = Field(0, ge=0)
    temperature: float = Field(1.0, ge=0, le=100)
    top_p: float = Field(1.0, ge=0, le=1)
    top_k: int = Field(0, ge=-1)
    min_p: float = Field(0.0, ge=0, le=1)
    seed: int | None = None
    n: int = Field(1, ge=1, le=MAX_CHOICES)
    stop: str | list[str] | None = None
    stop_token_ids: list[int] = []
    ignore_eos: bool = False
    presence_penalty: float = Field(0.0, ge=-2, le=2)
    frequency_penalty: float = Field(0.0, ge=-2, le=2)
    repetition_penalty: float = Field(1.0, gt=0)
    stream: bool = False
    stream_options: StreamOptions | None = None
    # Would change the answer, and is not supported: refused unless it has no effect.
    logit_bias: dict[str, float] | None = None


class CompletionRequest(_Common):
    """Body of ``/v1/completions``."""

    prompt: str | list[str] | list[int] | list[list[int]]
    logprobs: int | None = Field(None, ge=0, le=50)
    echo: bool = False
    suffix: str | None = None
    best_of: int | None = None

    def prompts(self) -> list[str | list[int]]:
        """Return the prompts, one for each set of choices."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if self.prompt and isinstance(self.prompt[0], int):
            return [self.prompt]  # type: ignore[list-item]
        return list(self.prompt)  # type: ignore[arg-type]

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
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool = False
    top_logprobs: int = Field(0, ge=0, le=20)
    tools: list[Any] | None = None
    functions: list[Any] | None = None
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

# SPDX-License-Identifier: Apache-2.0
"""Answers in the form of the OpenAI API."""

from __future__ import annotations

import dataclasses
import secrets
import time
from typing import Any

from ipex_llm.engine import TokenLogprobs

__all__ = ["Reply"]


@dataclasses.dataclass
class Reply:
    """Makes the parts of the answer to one request.

    Attributes:
        chat: Whether it is a chat completion.
        model: Name of the model.
        tokenizer: For the texts of tokens in log probabilities.
    """

    chat: bool
    model: str
    tokenizer: Any

    def __post_init__(self) -> None:
        self.id = ("chatcmpl-" if self.chat else "cmpl-") + secrets.token_hex(12)
        self.created = int(time.time())

    def _head(self, chunk: bool) -> dict[str, Any]:
        kind = "text_completion"
        if self.chat:
            kind = "chat.completion.chunk" if chunk else "chat.completion"
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}

    def whole(self, choices: list[dict[str, Any]], usage: dict[str, Any]) -> dict[str, Any]:
        """Return the answer that is not streamed."""
        return {**self._head(False), "choices": choices, "usage": usage}

    def choice(
        self, index: int, text: str, reason: str, logprobs: list[TokenLogprobs] | None
    ) -> dict[str, Any]:
        """Return a choice of such an answer."""
        found = {"index": index, "finish_reason": reason, "logprobs": self.logprobs(logprobs)}
        if self.chat:
            return {**found, "message": {"role": "assistant", "content": text}}
        return {**found, "text": text}

    def chunk(
        self,
        index: int,
        text: str,
        reason: str | None,
        logprobs: list[TokenLogprobs] | None = None,
        first: bool = False,
    ) -> dict[str, Any]:
        """Return a piece of a streamed answer."""
        found = {"index": index, "finish_reason": reason, "logprobs": self.logprobs(logprobs)}
        if self.chat:
            delta = {"role": "assistant", "content": ""} if first else {}
            if text:
                delta["content"] = text
            return {**self._head(True), "choices": [{**found, "delta": delta}]}
        return {**self._head(True), "choices": [{**found, "text": text}]}

    def last_chunk(self, usage: dict[str, Any]) -> dict[str, Any]:
        """Return the piece with the usage."""
        return {**self._head(True), "choices": [], "usage": usage}

    def logprobs(self, entries: list[TokenLogprobs] | None) -> dict[str, Any] | None:
        """Return log probabilities in the form of this kind of answer."""
        if entries is None:
            return None
        if self.chat:
            return {"content": [self._chat_entry(entry) for entry in entries]}
        return {
            "tokens": [self._text(entry.token) for entry in entries],
            "token_logprobs": [entry.logprob for entry in entries],
            "top_logprobs": [
                {self._text(token): value for token, value in entry.top} for entry in entries
            ],
        }

    def _chat_entry(self, entry: TokenLogprobs) -> dict[str, Any]:
        def one(token: int, value: float) -> dict[str, Any]:
            text = self._text(token)
            return {"token": text, "logprob": value, "bytes": list(text.encode())}

        top = [one(token, value) for token, value in entry.top]
        return {**one(entry.token, entry.logprob), "top_logprobs": top}

    def _text(self, token: int) -> str:
        return str(self.tokenizer.decode([token]))


def usage(prompt: int, completion: int) -> dict[str, int]:
    """Return the numbers of tokens."""
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
    }

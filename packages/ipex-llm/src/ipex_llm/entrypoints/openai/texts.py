# SPDX-License-Identifier: Apache-2.0
"""From what clients send to token ids, and from tokens to answers in the form of the OpenAI API."""

from __future__ import annotations

import dataclasses
import secrets
import time
from collections.abc import Callable, Sequence
from typing import Any

from ipex_llm.engine import Engine, TokenLogprobs
from ipex_llm.engine.limits import check_prompt

#: Characters of a prompt for each token of the context, if nothing else is said. English text has 4 per token, source
#: code with long indents up to 10: what is longer cannot fit, and is refused before it is tokenized.
CHARACTERS_PER_TOKEN = 16


class Prompts:
    """Makes token ids.

    Args:
        engine: For its tokenizer and limits.
        max_characters: Most characters of a prompt or of all messages; None: `CHARACTERS_PER_TOKEN` for each token of
            the context.
    """

    def __init__(self, engine: Engine, max_characters: int | None = None) -> None:
        self._tokenizer: Any = engine.tokenizer
        self._most = engine.max_model_len
        self._vocab = engine.vocab_size
        # The first call may set up a fast tokenizer, which must not happen in two threads at once.
        if hasattr(self._tokenizer, "set_truncation_and_padding"):
            self._tokenizer.encode("")
        self._characters = max_characters or CHARACTERS_PER_TOKEN * self._most

    def check(self, prompt: Any, chat: bool) -> None:
        """Check the length of a prompt, or of messages, before anything is tokenized.

        Raises:
            ValueError: It is too long.
        """
        if chat:
            length = sum(len(m["role"]) + len(m["content"]) for m in prompt)
            self._check_characters(length, "messages")
            # Each message becomes a token at least.
            self._check_tokens(len(prompt), "messages")
        elif isinstance(prompt, str):
            self._check_characters(len(prompt), "prompt")
        else:
            self._check_tokens(len(prompt), "prompt")

    def _check_characters(self, length: int, name: str) -> None:
        if length > self._characters:
            raise ValueError(
                f"{name} must have at most {self._characters} characters for the context of {self._most} tokens,"
                f" got {length}"
            )

    def _check_tokens(self, length: int, name: str) -> None:
        if length >= self._most:
            raise ValueError(
                f"{name} must have fewer than {self._most} tokens, the context of this engine, got {length}"
            )

    def tokens(self, prompt: Any, chat: bool) -> Callable[[], Sequence[int]]:
        """Return a function that gives the tokens.

        Args:
            prompt: Text, token ids, or the messages of a conversation.
            chat: Whether it is the last.
        """

        def made() -> list[int]:
            found = self._encode(prompt, chat)
            check_prompt(found, self._most, self._vocab)
            return found

        return made

    def _encode(self, prompt: Any, chat: bool) -> list[int]:
        if isinstance(prompt, str):
            return [int(token) for token in self._tokenizer.encode(prompt)]
        if not chat:
            return list(prompt)
        if not getattr(self._tokenizer, "chat_template", None):
            raise ValueError(
                "messages need a chat template, got a model that has no chat template: use /v1/completions"
            )
        try:
            text = self._tokenizer.apply_chat_template(
                prompt, tokenize=False, add_generation_prompt=True
            )
        except Exception as error:  # templates raise errors of their own for roles they do not know
            raise ValueError(f"messages must fit the chat template, got {error}") from error
        self._check_characters(len(text), "messages in the chat template")
        return [int(token) for token in self._tokenizer.encode(text, add_special_tokens=False)]


# -- Answers in the form of the OpenAI API ----------------------------------------------------------------------------


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
        self, index: int, text: str, reason: str, logprobs: dict[str, Any] | None
    ) -> dict[str, Any]:
        """Return a choice of such an answer, with the log probabilities of `joined`."""
        found = {"index": index, "finish_reason": reason, "logprobs": logprobs}
        if self.chat:
            return {**found, "message": {"role": "assistant", "content": text}}
        return {**found, "text": text}

    def chunk(
        self,
        index: int,
        text: str,
        reason: str | None,
        logprobs: Sequence[TokenLogprobs] | None = None,
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

    def joined(self, parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Return the log probabilities of an answer: the ones of its parts, in their order."""
        names = self.logprobs(()) or {}
        return {name: [entry for part in parts for entry in part[name]] for name in names}

    def logprobs(self, entries: Sequence[TokenLogprobs] | None) -> dict[str, Any] | None:
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

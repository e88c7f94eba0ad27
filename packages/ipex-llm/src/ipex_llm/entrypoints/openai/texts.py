# SPDX-License-Identifier: Apache-2.0
"""From what clients send to token ids, and from tokens to answers in the form of the OpenAI API."""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ipex_llm.engine import Engine, TokenLogprobs
from ipex_llm.engine.encoder import EncoderEngine
from ipex_llm.engine.limits import check_prompt
from ipex_llm.entrypoints.openai.chat import merged
from ipex_llm.entrypoints.openai.worker import Prompt

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

    def __init__(self, engine: Engine | EncoderEngine, max_characters: int | None = None) -> None:
        self._tokenizer: Any = engine.tokenizer
        self.most = engine.max_model_len
        self.vocab = engine.vocab_size
        # The first call may set up a fast tokenizer, which must not happen in two threads at once.
        if hasattr(self._tokenizer, "set_truncation_and_padding"):
            self._tokenizer.encode("")
        self._characters = max_characters or CHARACTERS_PER_TOKEN * self.most

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
        else:
            self.check_text(prompt, "prompt", room=1)

    def check_text(self, prompt: str | Sequence[int], name: str, room: int = 0) -> None:
        """Check the length of a text or of token ids.

        Args:
            prompt: What it is.
            name: Of the field.
            room: Tokens that must follow.

        Raises:
            ValueError: It is too long.
        """
        if isinstance(prompt, str):
            self._check_characters(len(prompt), name)
        else:
            self._check_tokens(len(prompt), name, room)

    def _check_characters(self, length: int, name: str) -> None:
        if length > self._characters:
            raise ValueError(
                f"{name} must have at most {self._characters} characters for the context of {self.most} tokens,"
                f" got {length}"
            )

    def _check_tokens(self, length: int, name: str, room: int = 1) -> None:
        if length + room > self.most:
            raise ValueError(
                f"{name} must have fewer than {self.most - room + 1} tokens, the context of this engine, got {length}"
            )

    def maker(
        self,
        prompt: Any,
        chat: bool,
        changes: Callable[[int], Mapping[str, Any]],
        **template: Any,
    ) -> Callable[[], Prompt]:
        """Return a function that makes the prompt.

        Args:
            prompt: Text, token ids, or the messages of a conversation.
            chat: Whether it is the last.
            changes: Gives fields of the parameters that take long to make, or depend on the number of tokens.
            **template: Further arguments of the chat template.
        """

        def made() -> Prompt:
            text, found = self.encode(prompt, chat, **template)
            check_prompt(found, self.most, self.vocab)
            return Prompt(found, changes(len(found)), text)

        return made

    def encode(
        self, prompt: Any, chat: bool, special: bool = True, **template: Any
    ) -> tuple[str, list[int]]:
        """Return the text of a conversation in the chat template, or nothing; and the tokens.

        Args:
            prompt: As for `maker`.
            chat: As for `maker`.
            special: Add what the tokenizer has for the begin and the end of a text.
            **template: As for `maker`.

        Raises:
            ValueError: The messages do not fit the template, or are too long in it.
        """
        if isinstance(prompt, str):
            options = {} if special else {"add_special_tokens": False}
            return "", [int(token) for token in self._tokenizer.encode(prompt, **options)]
        if not chat:
            return "", list(prompt)
        if not getattr(self._tokenizer, "chat_template", None):
            raise ValueError(
                "messages must be for a model with a chat template, got one that has no chat template: send a text"
            )
        try:
            options = {"add_generation_prompt": True, **template}
            text = self._tokenizer.apply_chat_template(prompt, tokenize=False, **options)
        except Exception as error:  # templates raise errors of their own for roles they do not know
            raise ValueError(f"messages must fit the chat template, got {error}") from error
        self._check_characters(len(text), "messages in the chat template")
        return text, [int(t) for t in self._tokenizer.encode(text, add_special_tokens=False)]


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
        self,
        index: int,
        text: str,
        reason: str,
        logprobs: dict[str, Any] | None,
        parser: Any = None,
    ) -> dict[str, Any]:
        """Return a choice of such an answer, with the log probabilities of `joined`; a chat needs a parser."""
        found = {"index": index, "finish_reason": reason, "logprobs": logprobs}
        if self.chat:
            message = merged(parser.feed(text, last=True))
            return {**found, "finish_reason": self.reason(reason, parser), "message": message}
        return {**found, "text": text}

    @staticmethod
    def reason(reason: str | None, parser: Any) -> str | None:
        """Return why an answer ended, as the API tells it where tools were called."""
        return "tool_calls" if reason == "stop" and parser.calls else reason

    def chunk(
        self,
        index: int,
        part: str | dict[str, Any],
        reason: str | None,
        logprobs: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Return a piece of a streamed answer: text of a completion, or the delta of a chat."""
        found = {"index": index, "finish_reason": reason, "logprobs": logprobs}
        name = "delta" if self.chat else "text"
        return {**self._head(True), "choices": [{**found, name: part}]}

    def last_chunk(self, usage: dict[str, Any]) -> dict[str, Any]:
        """Return the piece with the usage."""
        return {**self._head(True), "choices": [], "usage": usage}

    def joined(self, parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Return the log probabilities of an answer: the ones of its parts, in their order."""
        names = self.logprobs(())
        return {name: [entry for part in parts for entry in part[name]] for name in names}

    def logprobs(self, entries: Sequence[TokenLogprobs], offset: int = 0) -> dict[str, Any]:
        """Return log probabilities in the form of this kind of answer.

        Args:
            entries: Of tokens that follow each other; NaN for the first token of a prompt.
            offset: Characters of the tokens in front.
        """
        if self.chat:
            return {"content": [self._chat_entry(entry) for entry in entries]}
        texts = [self._text(entry.token) for entry in entries]
        known = [not math.isnan(entry.logprob) for entry in entries]
        return {
            "tokens": texts,
            "token_logprobs": [
                e.logprob if k else None for e, k in zip(entries, known, strict=True)
            ],
            "top_logprobs": [
                self._top(e) if k else None for e, k in zip(entries, known, strict=True)
            ],
            "text_offset": [
                offset + n for n in itertools.accumulate(map(len, texts[:-1]), initial=0)
            ][: len(texts)],
        }

    def _top(self, entry: TokenLogprobs) -> dict[str, float]:
        """Return texts of the most likely tokens and of the token itself; of those with one text the likeliest."""
        found: dict[str, float] = {}
        for token, value in (*entry.top, (entry.token, entry.logprob)):
            found.setdefault(self._text(token), value)
        return found

    def _chat_entry(self, entry: TokenLogprobs) -> dict[str, Any]:
        def one(token: int, value: float) -> dict[str, Any]:
            text = self._text(token)
            return {"token": text, "logprob": value, "bytes": self._bytes(token, text)}

        top = [one(token, value) for token, value in entry.top]
        return {**one(entry.token, entry.logprob), "top_logprobs": top}

    def _text(self, token: int) -> str:
        return str(self.tokenizer.decode([token]))

    def _bytes(self, token: int, text: str) -> list[int]:
        """Return the bytes of a token, which may be a part of a character."""
        if "\ufffd" in text and hasattr(self.tokenizer, "convert_ids_to_tokens"):
            name = str(self.tokenizer.convert_ids_to_tokens(token))
            if re.fullmatch("<0x[0-9A-F]{2}>", name):
                return [int(name[3:5], 16)]
            if all(letter in _BYTES for letter in name):
                return [_BYTES[letter] for letter in name]
        return list(text.encode())


#: Bytes by the letters that byte-level tokenizers have for them.
_PLAIN = {*range(33, 127), *range(161, 173), *range(174, 256)}
_BYTES = {chr(b): b for b in _PLAIN}
_BYTES |= {chr(256 + n): b for n, b in enumerate(sorted({*range(256)} - _PLAIN))}


def usage(prompt: int, completion: int, cached: int) -> dict[str, Any]:
    """Return the numbers of tokens; ``cached`` of the prompt were found in the cache."""
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
    }

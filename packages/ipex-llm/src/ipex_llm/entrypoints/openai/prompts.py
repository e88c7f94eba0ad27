# SPDX-License-Identifier: Apache-2.0
"""From what clients send to token ids; runs in threads of its own, since it may take seconds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ipex_llm.engine import Engine
from ipex_llm.engine.limits import check_prompt

__all__ = ["CHARACTERS_PER_TOKEN", "Prompts"]

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

# SPDX-License-Identifier: Apache-2.0
"""The state of one request inside the engine, and its text: from tokens to text, piece by piece."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from typing import Any

import torch

from ipex_llm.engine.params import SamplingParams, TokenLogprobs
from ipex_llm.kv_cache.blocks import block_key

__all__ = ["Request", "TextStream"]

#: What tokenizers decode bytes to that are no whole character.
_UNFINISHED = "\ufffd"


class TextStream:
    """The text of a growing list of tokens, up to a stop string.

    A token is no text of its own: a character may need several, and the blank before a word depends on the token in
    front. So each new piece is the difference of two decoded texts, of a few tokens each.

    Args:
        tokenizer: Has ``decode(ids, skip_special_tokens=...)``.
        stop: Texts that end the stream.
        context: Tokens in front of the first, whose text is not part of the stream.
    """

    def __init__(
        self, tokenizer: Any, stop: Sequence[str] = (), context: Sequence[int] = ()
    ) -> None:
        self._tokenizer = tokenizer
        self._stop = tuple(stop)
        self._tokens = list(context)
        self._start = 0  # the context that decoding begins with
        self._done = len(self._tokens)  # tokens whose text has been given out
        self._held = ""  # may be the beginning of a stop string
        self.stopped = False

    def _decode(self, tokens: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(tokens), skip_special_tokens=True))

    def add(self, token: int, last: bool = False) -> str:
        """Add a token and return the text that is certain by now.

        Args:
            token: The token.
            last: Nothing comes after: give out what was held back.
        """
        if self.stopped:
            return ""
        self._tokens.append(token)
        return self._search(self._piece(last), last)

    def finish(self) -> str:
        """Return what was held back, when nothing comes any more."""
        return "" if self.stopped else self._search(self._piece(True), True)

    def _piece(self, last: bool) -> str:
        before = self._decode(self._tokens[self._start : self._done])
        now = self._decode(self._tokens[self._start :])
        if len(now) <= len(before) or (now.endswith(_UNFINISHED) and not last):
            return ""
        self._start = self._done
        self._done = len(self._tokens)
        return now[len(before) :]

    def _search(self, piece: str, last: bool) -> str:
        text = self._held + piece
        places = [place for stop in self._stop if (place := text.find(stop)) >= 0]
        if places:
            self.stopped = True
            self._held = ""
            return text[: min(places)]
        keep = 0 if last else self._overlap(text)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def _overlap(self, text: str) -> int:
        """Return the length of the longest end of the text that begins a stop string."""
        longest = 0
        for stop in self._stop:
            for length in range(min(len(stop) - 1, len(text)), longest, -1):
                if text.endswith(stop[:length]):
                    longest = length
                    break
        return longest


class Request:
    """One request: its tokens, how many of them are in the cache, and where.

    Attributes:
        tokens: Prompt and output.
        computed: The first so many tokens are in the cache.
        blocks: Their blocks, in order.
        row: Row of the block tables, -1 while waiting.
        limit: Most tokens of prompt and output together.
        long: Whether what is in the cache belongs to a sequence beyond the switch of LongRoPE.
    """

    def __init__(
        self,
        request_id: str,
        prompt: list[int],
        params: SamplingParams,
        limit: int,
        ends: frozenset[int],
        stream: TextStream | None,
    ) -> None:
        self.id = request_id
        self.prompt_length = len(prompt)
        self.tokens = list(prompt)
        self.params = params
        self.limit = limit
        self.ends = ends
        self.stream = stream
        self.computed = 0
        self.cached_tokens = 0
        self.blocks: list[int] = []
        self.keys: list[bytes] = []
        self.row = -1
        self.written = 0  # blocks that are in the row of the tables
        self.preemptions = 0
        self.long = False
        self.logprobs: list[TokenLogprobs] = []
        self.arrived = time.monotonic()
        self.first_token_at: float | None = None
        self._generator: torch.Generator | None = None

    @property
    def missing(self) -> int:
        """Tokens that are not in the cache."""
        return len(self.tokens) - self.computed

    @property
    def new_tokens(self) -> int:
        """Length of the output."""
        return len(self.tokens) - self.prompt_length

    def extend_keys(self, block_size: int, length: int) -> list[bytes]:
        """Return the keys of the full blocks of the first ``length`` tokens."""
        while (len(self.keys) + 1) * block_size <= length:
            start = len(self.keys) * block_size
            before = self.keys[-1] if self.keys else b"long" * self.long
            self.keys.append(block_key(before, self.tokens[start : start + block_size]))
        return self.keys[: length // block_size]

    def noise(self) -> float:
        """Return the next random number of this request, in ``[0, 1)``: one is drawn for each token."""
        if self._generator is None:
            seed = self.params.seed
            self._generator = torch.Generator()
            self._generator.manual_seed(secrets.randbits(63) if seed is None else seed)
        return float(torch.rand((), generator=self._generator))

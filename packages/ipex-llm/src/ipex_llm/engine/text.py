# SPDX-License-Identifier: Apache-2.0
"""From tokens to text, piece by piece."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

__all__ = ["TextStream"]

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

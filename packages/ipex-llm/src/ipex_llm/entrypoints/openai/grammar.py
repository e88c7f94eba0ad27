# SPDX-License-Identifier: Apache-2.0
"""What an output must be: JSON by a schema, a regular expression, a grammar; the masks are llguidance's."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, Literal

import torch

from ipex_core.errors import MissingComponentError
from ipex_llm.engine import Grammar, Matcher

__all__ = ["Grammars", "Wanted"]

#: Most characters of a schema, a regular expression or a grammar, and compiled ones that are kept.
MAX_GRAMMAR, _KEPT = 32 << 10, 32
#: Blanks between parts of JSON: some models write nothing else once they have begun.
_BLANKS = r"[\x20\x0A\x0D\x09]{1,32}"
#: Seconds that the tokens of one place may take; more ends the request with an error.
_SLOWEST = 1.0
#: Steps that lexer and parser may take; a request that needs more is refused, or ends with an error.
_LIMITS = {
    "initial_lexer_fuel": 300_000,
    "step_lexer_fuel": 100_000,
    "step_max_items": 20_000,
    "max_items_in_row": 3_000,
    "max_lexer_states": 50_000,
    "max_grammar_size": 200_000,
}
#: Largest float64 below 2**63. llguidance reads numbers as float64, and integers from -2**63 down overflow its stack.
_LARGEST = 2**63 - 1024
#: Where a schema has numbers that bind the output, and the direction in which they may be rounded.
_NUMBERS = {"minimum": 1, "exclusiveMinimum": 1, "maximum": -1, "exclusiveMaximum": -1}
_VALUES = ("const", "enum")
#: Formats of strings that llguidance knows. Others are notes for readers, as JSON Schema has it.
_FORMATS = frozenset(
    ("date", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "time", "uri", "uuid")
)


@dataclasses.dataclass(frozen=True)
class Wanted:
    """What an output must be.

    Attributes:
        kind: ``"json"``: the text is a JSON schema; ``"regex"``; ``"grammar"``: in GBNF or Lark; ``"choice"``: a JSON
            list of texts.
        text: The rule itself.
        field: The field of the request that it comes from.
    """

    kind: Literal["json", "regex", "grammar", "choice"]
    text: str
    field: str

    def check(self) -> None:
        """Raise a ValueError if the text is too long."""
        if len(self.text) > MAX_GRAMMAR:
            raise ValueError(
                f"{self.field} must have at most {MAX_GRAMMAR} characters, got {len(self.text)}"
            )


class Grammars:
    """Compiles what outputs must be, for the tokenizer of an engine. Can be used from several threads.

    Args:
        engine: For its tokenizer and vocabulary.
    """

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._lock = threading.Lock()
        self._tokens: Any = None
        #: Bits of tokens that are not special.
        self._ordinary = torch.empty(0, dtype=torch.int32)
        self._known: OrderedDict[Wanted, Any] = OrderedDict()

    def check(self) -> None:
        """Raise an error if the server cannot do it."""
        try:
            import llguidance  # noqa: F401
        except ImportError as error:
            text = "structured output needs llguidance: pip install 'ipex-llm[structured]'"
            raise MissingComponentError(text) from error
        tokenizer = self._engine.tokenizer
        if getattr(tokenizer, "backend_tokenizer", None) is None:
            raise ValueError(
                f"structured output must have a fast tokenizer, got {type(tokenizer).__name__}"
            )

    def prepare(self) -> None:
        """Read the vocabulary, if the server can do it: this takes a second, in which no stream should run."""
        with contextlib.suppress(MissingComponentError, ValueError):
            self.check()
            with self._lock:
                self._read_tokens()

    def _read_tokens(self) -> None:
        from llguidance.hf import from_tokenizer

        if self._tokens is None:
            tokenizer, vocab = self._engine.tokenizer, self._engine.vocab_size
            ends = sorted(self._engine.eos_token_ids) or None
            self._tokens = from_tokenizer(tokenizer, vocab, eos_token=ends)
            flags = torch.ones(-(-vocab // 32) * 32, dtype=torch.bool)
            added = tokenizer.added_tokens_decoder.items()
            flags[[id for id, token in added if token.special and id < vocab]] = False
            self._ordinary = (flags.view(-1, 32).long() << torch.arange(32)).sum(1).int()

    def make(self, wanted: Wanted) -> Grammar:
        """Compile; this takes milliseconds, and has limits where it would take long.

        Raises:
            ValueError: It is no valid rule, not supported, too complex, or nothing fits it.
        """
        with self._lock:
            found = self._known.get(wanted)
            if found is None:
                found = self._compile(wanted)
                self._known[wanted] = found
                while len(self._known) > _KEPT:
                    self._known.popitem(last=False)
            self._known.move_to_end(wanted)
        return _Compiled(found, self._tokens, self._ordinary, wanted)

    def _compile(self, wanted: Wanted) -> Any:
        from llguidance import LLMatcher, LLParserLimits, grammar_from

        self._read_tokens()
        try:
            if wanted.kind == "json":
                # Alternatives that exclude each other are left to the schema, as in other servers.
                options = {"whitespace_pattern": _BLANKS, "coerce_one_of": True}
                text = json.dumps(_exact(json.loads(wanted.text)))
                grammar = LLMatcher.grammar_from_json_schema(text, overrides=options)  # type: ignore[arg-type]
            else:
                text = _exact_parts(wanted.text) if wanted.kind == "grammar" else wanted.text
                grammar = grammar_from(wanted.kind, text)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{wanted.field} must be a valid {wanted.kind}, got {error}") from None
        found = LLMatcher(self._tokens, grammar, log_level=0, limits=LLParserLimits(**_LIMITS))
        first = _Matcher(found.deep_copy(), self._tokens, self._ordinary, wanted)
        first.fill()
        if first.error is not None:
            raise ValueError(first.error)
        if first.empty:
            raise ValueError(
                f"{wanted.field} must allow some output, got a {wanted.kind} that nothing fits"
            )
        return found


def _exact(value: Any, name: str = "") -> Any:
    """Return a schema that llguidance has exactly: bounds are moved so that no number outside them fits.

    Args:
        value: The schema, or a part of it.
        name: Of the part.

    Raises:
        ValueError: There is no such number.
    """
    if isinstance(value, dict) and name in _VALUES:
        return {key: _exact(part, name) for key, part in value.items()}
    if isinstance(value, dict):
        unknown = isinstance(value.get("format"), str) and value["format"] not in _FORMATS
        left_out = {"format"} if unknown else {}
        return {key: _exact(part, key) for key, part in value.items() if key not in left_out}
    if isinstance(value, list):
        return [_exact(part, name) for part in value]
    side = _NUMBERS.get(name, 0)
    if type(value) not in (int, float) or not (side or name in _VALUES):
        return value
    near = float(min(max(value, -_LARGEST), _LARGEST))
    # Of larger numbers the next integer is no float64, so that an exclusive bound would be part of the range.
    apart = "exclusive" in name and abs(near) >= 2**53
    if apart or (near < value and side > 0) or (near > value and side < 0):
        near = math.nextafter(near, side * math.inf)
    if abs(near) > _LARGEST or (near != value and not side):
        what = f"{name} must have numbers that float64 has exactly, up to {_LARGEST}"
        raise ValueError(f"{what}, got {str(value)[:40]}: use a string")
    return int(near) if near == int(near) else near  # digits: an exponent is not read exactly


def _exact_parts(grammar: str) -> str:
    """Return a grammar with the same done to the schemas in it."""
    start, *parts = grammar.split("%json")
    for part in parts:
        value, end = json.JSONDecoder().raw_decode(part := part.lstrip())
        start += f"%json {json.dumps(_exact(value))}{part[end:]}"
    return start


@dataclasses.dataclass(frozen=True)
class _Compiled:
    start: Any
    tokens: Any
    ordinary: torch.Tensor
    wanted: Wanted

    def matcher(self) -> Matcher:
        return _Matcher(self.start.deep_copy(), self.tokens, self.ordinary, self.wanted)


class _Matcher:
    """One output on its way through a grammar; see `ipex_llm.engine.Matcher`."""

    def __init__(self, inner: Any, tokens: Any, ordinary: torch.Tensor, wanted: Wanted) -> None:
        self._inner = inner
        self._tokens = tokens
        self._ordinary = ordinary
        # For each token of each request, in half of the time that tensors take.
        self._words = (ordinary != -1).nonzero().flatten().numpy()
        self._special = ~ordinary.numpy()[self._words]
        self._wanted = wanted
        self._bits = torch.zeros_like(ordinary)
        #: What may come behind each of the drafts that may come.
        self._ahead: list[torch.Tensor] = []
        self.done = False
        self.error: str | None = None

    def _fail(self, why: str) -> None:
        rule = f"{self._wanted.field} must be a valid, simple {self._wanted.kind}"
        self.error = f"{rule}, got: {' '.join(why.partition('<state>')[0].split())}"

    @property
    def empty(self) -> bool:
        """Whether no token may come."""
        return not bool(self._bits.any())

    def fill(self, drafts: Sequence[int] = ()) -> None:
        self._ahead = []
        begun = time.monotonic()
        if self.error is None:
            self._next(self._inner, self._bits)
        if self._inner.is_error():
            self._fail(str(self._inner.get_error()))
        elif time.monotonic() - begun > _SLOWEST:
            self._fail(f"more than {_SLOWEST:g} seconds for one token")
        if self.error is not None:
            self._bits.zero_()
        elif drafts:
            self._look_ahead(drafts)

    def _look_ahead(self, drafts: Sequence[int]) -> None:
        """Find what may come behind drafts, on a copy; a limit that is met there only ends the look."""
        ahead = self._inner.deep_copy()
        bits = self._bits
        begun = time.monotonic()
        for token in drafts:
            known = bool(int(bits[token // 32]) >> token % 32 & 1) and not ahead.is_stopped()
            if not known or not ahead.consume_token(token) or ahead.is_stopped():
                return
            bits = torch.zeros_like(bits)
            self._next(ahead, bits)
            if ahead.is_error() or time.monotonic() - begun > _SLOWEST:
                return
            self._ahead.append(bits)

    def _next(self, inner: Any, bits: torch.Tensor) -> None:
        if inner.is_error():
            return
        inner.unsafe_compute_mask_ptr(bits.data_ptr(), bits.numel() * bits.element_size())
        if not (bits.numpy()[self._words] & self._special).any() or inner.is_accepting():
            return
        if (bits & self._ordinary).any():
            return
        # Where only one text fits, llguidance takes the text of a special token for the token, which has no text.
        text = inner.compute_ff_bytes().decode(errors="ignore")
        if text:
            token = self._tokens.greedy_tokenize(text)[0]
            bits.zero_()
            bits[token // 32] = -(2**31) if token % 32 == 31 else 1 << token % 32

    def apply(self, row: torch.Tensor, ahead: int = 0) -> None:
        if ahead > len(self._ahead):
            row.fill_(-torch.inf)
            return
        bits = self._ahead[ahead - 1] if ahead else self._bits
        # What is not finite stays so, and ends the request.
        torch.ops.ipex.apply_token_bitmask(row, bits)

    def accept(self, token: int) -> None:
        if not self._inner.consume_token(token):
            self._fail(str(self._inner.get_error()))
        # With nothing that can follow, there is no need for an end token.
        self.done = bool(self._inner.is_stopped()) and self.error is None

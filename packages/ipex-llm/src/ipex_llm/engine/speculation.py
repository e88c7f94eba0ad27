# SPDX-License-Identifier: Apache-2.0
"""Speculation: guessed tokens that the model checks in one pass, several for the price of one.

A guess comes from an earlier place of the request's own text (prompt lookup) or from a smaller model. The model
computes logits behind each guessed token, and a token is chosen from each with the random number that it would have
without speculation. As long as the chosen token is the guessed one, the next choice is valid too. So the output is the
one of plain decoding, token by token, whatever the guesses are: no other test of acceptance is needed.

Source: Leviathan, Kalman and Matias, "Fast Inference from Transformers via Speculative Decoding", 2023; for guesses out
of the text Saxena, "Prompt Lookup Decoding", 2023.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Literal, get_args

from torch import Tensor

from ipex_llm.engine.limits import runner_of
from ipex_llm.engine.request import BlockTables, Place, Request, choose

Method = Literal["ngram", "draft_model"]

#: Most tokens that can be guessed at a time.
MAX_TOKENS = 64


@dataclasses.dataclass(frozen=True)
class SpeculativeConfig:
    """How an engine speculates; names as in vLLM's ``speculative_config``.

    Args:
        method: ``"ngram"``: what followed the last tokens at an earlier place of prompt and output;
            ``"draft_model"``: what a smaller model writes. None: the latter if there is a model.
        model: The smaller model, prepared by `ipex.llm.optimize`, with the vocabulary of the large one. For
            `ipex llm serve` the folder of one.
        num_speculative_tokens: Most tokens that are guessed at a time, from 1 to 64.
        prompt_lookup_max: Most last tokens that are compared with an earlier place; the longest match counts.
        prompt_lookup_min: Tokens that must be equal there.
        disable_by_batch_size: Requests in the batch above which nothing is guessed: a large batch leaves no idle
            arithmetic. None for no such number.
        min_acceptance: Share of guessed tokens, in [0, 1], that must turn out right, or the request stops guessing
            for a while, which doubles each time.

    Raises:
        ValueError: A value is not as described.
    """

    method: Method | None = None
    model: Any = None
    num_speculative_tokens: int = 4
    prompt_lookup_max: int = 4
    prompt_lookup_min: int = 2
    disable_by_batch_size: int | None = None
    min_acceptance: float = 0.3

    def __post_init__(self) -> None:
        if self.method is None:
            method = "ngram" if self.model is None else "draft_model"
            object.__setattr__(self, "method", method)
        known = get_args(Method)
        _check(self.method in known, "method", f"be one of {', '.join(known)}", self.method)
        if self.method == "ngram":
            _check(self.model is None, "model", "be None for the method ngram", "one")
        else:
            _check(self.model is not None, "model", "be given for the method draft_model", "none")
        for name, least, most in (
            ("num_speculative_tokens", 1, MAX_TOKENS),
            ("prompt_lookup_min", 1, MAX_TOKENS),
            ("prompt_lookup_max", self.prompt_lookup_min, MAX_TOKENS),
            ("disable_by_batch_size", 1, 2**31 - 1),
        ):
            value = getattr(self, name)
            if value is None and name == "disable_by_batch_size":
                continue
            good = isinstance(value, int) and not isinstance(value, bool)
            good = good and isinstance(least, int) and least <= value <= most
            _check(good, name, f"be an integer in [{least}, {most}]", repr(value))
        share = self.min_acceptance
        good = isinstance(share, (int, float)) and not isinstance(share, bool) and 0 <= share <= 1
        _check(good, "min_acceptance", "be a number in [0, 1]", repr(share))

    @staticmethod
    def of(value: SpeculativeConfig | Mapping[str, Any]) -> SpeculativeConfig:
        """Return a config, given as one or as a mapping of its fields.

        Raises:
            TypeError: It is neither.
            ValueError: A field is unknown or wrong.
        """
        if isinstance(value, SpeculativeConfig):
            return value
        if not isinstance(value, Mapping):
            raise TypeError(
                "Engine: speculative_config must be a SpeculativeConfig or a mapping, got"
                f" {type(value).__name__}"
            )
        names = [field.name for field in dataclasses.fields(SpeculativeConfig)]
        for name in value:
            if name not in names:
                raise ValueError(
                    f"SpeculativeConfig: names must be among {', '.join(names)}, got {name!r}"
                )
        return SpeculativeConfig(**value)


def _check(condition: bool, name: str, wanted: str, got: object) -> None:
    if not condition:
        raise ValueError(f"SpeculativeConfig: {name} must {wanted}, got {got}")


#: What is left of the measured numbers of a request after each check: about 16 checks count.
_MEMORY = 0.94
#: Guessed tokens after which a share is taken for measured, and tokens of the first stop.
_MEASURED, _STOP = 8, 32


class Acceptance:
    """How many tokens are guessed for one request, by what became of the guesses before.

    Args:
        most: Most tokens.
        least: Share of guessed tokens that must be right.
    """

    def __init__(self, most: int, least: float) -> None:
        self._most = self._length = most
        self._least = least
        self._drafted = self._accepted = 0.0
        self._resume, self._stop = 0, _STOP

    def wanted(self, place: int) -> int:
        """Return how many tokens to guess behind so many tokens of the output; 0 while it has stopped."""
        return self._length if place >= self._resume else 0

    def note(self, place: int, drafted: int, accepted: int) -> None:
        """Note how many of the guessed tokens were right, behind so many tokens of the output."""
        self._drafted = _MEMORY * self._drafted + drafted
        self._accepted = _MEMORY * self._accepted + accepted
        # One more than was right; all of them were right: it may be worth more.
        longer = self._length + 2 if accepted == drafted else accepted + 1
        self._length = min(longer, self._most)
        if self._drafted >= _MEASURED and self._accepted < self._least * self._drafted:
            self._resume = place + self._stop
            self._stop *= 2
            self._drafted = self._accepted = 0.0


class Speculation:
    """What an engine knows of one request for its guesses."""

    def __init__(self, config: SpeculativeConfig) -> None:
        self.acceptance = Acceptance(config.num_speculative_tokens, config.min_acceptance)
        self.lookup: Matches | None = None
        #: The first so many tokens are in the cache of the smaller model.
        self.computed = 0
        #: How often the request had given way when that was counted: it has other blocks afterwards.
        self.start = -1


# -- Prompt lookup ----------------------------------------------------------------------------------------------------


#: Earlier places that are compared, the latest first.
_CANDIDATES = 16
#: Tokens that are read at once: the others of a long prompt in the next steps, so that no step takes long.
_READ = 4096


class Matches:
    """Finds earlier places of a growing list of tokens that end like the list.

    Places with equal last tokens form a chain, as in LZ77, so that no search reads the list again.

    Args:
        least: Tokens that must be equal.
        most: Tokens that are compared.
    """

    def __init__(self, least: int, most: int) -> None:
        self._least, self._most = least, most
        self._latest: dict[int, int] = {}
        self._before: list[int] = []  # of the place `least` + i

    def draft(self, tokens: Sequence[int], count: int) -> list[int]:
        """Return what followed at the best earlier place, up to ``count`` tokens; a repetition goes on.

        Of a long list some tokens are read, and nothing is found until all are.
        """
        length, least = len(tokens), self._least
        first = least + len(self._before)
        for end in range(first, min(length + 1, first + _READ)):
            key = hash(tuple(tokens[end - least : end]))
            self._before.append(self._latest.get(key, -1))
            self._latest[key] = end
        if length < least + 1 or least + len(self._before) <= length:
            return []
        best, matched = -1, least - 1
        place = self._before[length - least]
        for _ in range(_CANDIDATES):
            if place < 0:
                break
            equal = 0
            while (
                equal < self._most
                and equal < place
                and tokens[place - 1 - equal] == tokens[length - 1 - equal]
            ):
                equal += 1
            if equal > matched:
                best, matched = place, equal
            if matched == self._most:
                break
            place = self._before[place - least]
        if best < 0:
            return []
        found: list[int] = []
        for at in range(best, best + count):
            found.append(tokens[at] if at < length else found[at - length])
        return found


class PromptLookup:
    """Guesses from the text of the request."""

    def __init__(self, config: SpeculativeConfig) -> None:
        self.config = config

    def propose(self, wanted: Sequence[tuple[Request, int]]) -> None:
        """Set the drafts of requests, at most so many each."""
        config = self.config
        for request, count in wanted:
            state = request.speculation
            assert state is not None
            if state.lookup is None:
                state.lookup = Matches(config.prompt_lookup_min, config.prompt_lookup_max)
            request.drafts = state.lookup.draft(request.tokens, count)


# -- A smaller model --------------------------------------------------------------------------------------------------


class DraftModel:
    """Guesses that a smaller model makes, with a cache of its own in the same blocks.

    Block ``b`` of a request holds the same tokens in both caches. The smaller model computes them only when it is asked
    for a guess, and remembers of which prefix a block is full.

    Args:
        runner: Runs the smaller model.
        blocks: Blocks of the cache.
        block_size: Tokens in a block.
        tables: The blocks of the running requests.
        most: Most tokens that it computes for the prompts of a step.
    """

    def __init__(
        self, runner: Any, blocks: int, block_size: int, tables: BlockTables, most: int
    ) -> None:
        self.runner = runner
        self._cache = runner.new_cache(blocks, block_size, None)
        self._size = block_size
        self._tables = tables
        self._most = most
        self._context: int = runner.plan.max_positions
        self._full: dict[int, bytes] = {}

    def propose(self, wanted: Sequence[tuple[Request, int]]) -> None:
        """Set the drafts of requests, at most so many each; of a long prompt some tokens are computed, and no more."""
        active: list[tuple[Request, int]] = []
        spans: list[tuple[Request, int, Sequence[int]]] = []
        budget = self._most
        for request, count in wanted:
            count = min(count, self._context - len(request.tokens))
            if count < 1 or budget < 1:
                continue
            first = self._begin(request)
            tokens = request.tokens[first : first + budget]
            budget -= len(tokens)
            spans.append((request, first, tokens))
            if first + len(tokens) == len(request.tokens):
                active.append((request, count))
        if not spans:
            return
        logits = self._forward(spans)
        whole = [i for i, (r, first, t) in enumerate(spans) if first + len(t) == len(r.tokens)]
        logits = logits if len(whole) == len(spans) else logits[whole]
        while active:
            chosen = choose([Place(r, len(r.drafts)) for r, _ in active], logits, rules=False)
            left = []
            for (request, count), token in zip(active, chosen, strict=True):
                if token is None:  # not finite: there is no guess
                    continue
                request.drafts = [*request.drafts, token]
                if len(request.drafts) < count:
                    left.append((request, count))
            active = left
            if active:
                logits = self._forward(
                    [(r, len(r.tokens) + len(r.drafts) - 1, r.drafts[-1:]) for r, _ in active]
                )

    def _begin(self, request: Request) -> int:
        """Return how many tokens of a request are in the cache."""
        state = request.speculation
        assert state is not None
        size = self._size
        keys = request.extend_keys(size, request.computed)
        if state.start != request.preemptions:  # new blocks
            state.start, state.computed = request.preemptions, 0
            for block, key in zip(request.blocks, keys, strict=False):
                if self._full.get(block) != key:
                    break
                state.computed += size
        return min(state.computed, len(request.tokens) - 1)

    def _forward(self, spans: Sequence[tuple[Request, int, Sequence[int]]]) -> Tensor:
        """Compute tokens of requests that begin at some place, and return the logits behind the last of each."""
        size = self._size
        for request, first, tokens in spans:
            last = first + len(tokens)
            for block in request.blocks[first // size : -(-last // size)]:
                self._full.pop(block, None)
        batch = self._tables.arguments(spans)
        found: Tensor = self.runner.forward(self._cache, *batch)
        for request, first, tokens in spans:
            state = request.speculation
            assert state is not None
            # Drafts are not counted: they may be wrong.
            state.computed = min(first + len(tokens), len(request.tokens))
            full = min(state.computed, request.computed) // size
            keys = request.extend_keys(size, full * size)
            for at in range(first // size, full):
                self._full[request.blocks[at]] = keys[at]
        return found


Proposer = PromptLookup | DraftModel


def draft_runner(config: SpeculativeConfig, vocab_size: int) -> Any:
    """Return the runner of the smaller model, or None for prompt lookup.

    Raises:
        TypeError: An engine cannot run the model.
        ValueError: It has another vocabulary.
    """
    if config.method == "ngram":
        return None
    runner = runner_of(config.model, "SpeculativeConfig")
    if runner.vocab_size != vocab_size:
        raise ValueError(
            f"SpeculativeConfig: model must have the vocabulary of the large one, {vocab_size} tokens, got"
            f" {runner.vocab_size}"
        )
    if getattr(runner.plan, "has_states", False):
        raise ValueError(
            "SpeculativeConfig: model must have no recurrent layers, whose state cannot go back behind a wrong guess,"
            " got one that has"
        )
    return runner


def proposer(
    config: SpeculativeConfig,
    runner: Any,
    blocks: int,
    block_size: int,
    tables: BlockTables,
    most: int,
) -> Proposer:
    """Return what guesses; see `DraftModel` for the arguments."""
    if runner is None:
        return PromptLookup(config)
    return DraftModel(runner, blocks, block_size, tables, most)

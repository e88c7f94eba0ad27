# SPDX-License-Identifier: Apache-2.0
"""What a request to the engine asks for, and what it gets back."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal, Protocol, get_args

import torch

#: Most alternatives whose log probabilities can be asked for.
MAX_LOGPROBS = 50

#: Most stop strings of a request; each is looked for after each token.
MAX_STOP = 16

#: Most characters of a stop string; the end of the output is compared with its beginnings after each token.
MAX_STOP_CHARACTERS = 1000

#: Most stop tokens of a request.
MAX_STOP_TOKENS = 1000

#: Most tokens with a bias of their own.
MAX_BIASES = 1024

#: How the states of a prompt become one: the last one, the first one, their mean.
Pooling = Literal["last", "first", "mean"]


class Matcher(Protocol):
    """Follows one output through a grammar. Used by one thread at a time.

    Attributes:
        done: The output is complete: nothing can follow.
        error: Why the grammar cannot be followed any further, as ``name must be ..., got ...``; or None.
    """

    done: bool
    error: str | None

    def fill(self, drafts: Sequence[int] = ()) -> None:
        """Find the tokens that may come next, while the model runs; may be called again for the same place.

        Args:
            drafts: Guessed tokens: find what may come behind each of them, too, up to the first that may not come.
        """

    def apply(self, row: torch.Tensor, ahead: int = 0) -> None:
        """Set the logits ``[vocab]`` of all other tokens to minus infinity.

        Args:
            row: Of the place behind the first ``ahead`` drafts.
            ahead: Number of drafts; behind one that may not come, nothing may.
        """

    def accept(self, token: int) -> None:
        """Go on behind a token that `apply` allowed."""


class Grammar(Protocol):
    """What an output must be."""

    def matcher(self) -> Matcher:
        """Return a matcher at the start of an output."""


def _check(condition: bool, name: str, wanted: str, got: object) -> None:
    if not condition:
        raise ValueError(f"SamplingParams: {name} must {wanted}, got {got}")


def _number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


@dataclasses.dataclass(frozen=True)
class SamplingParams:
    """How the tokens of one request are chosen, and when it ends.

    Args:
        max_new_tokens: Most tokens to generate; fewer where the context of the model ends.
        min_new_tokens: Tokens before which neither end nor stop tokens can be chosen, and no stop string is looked for.
        temperature: 0 for the most likely token, otherwise between 1e-6 and 1e6.
        top_k: Only the most likely tokens, 0 for all.
        top_p: Only the most likely tokens that have this probability together, 1 for all.
        min_p: Only tokens at least so many times as likely as the most likely one, 0 for all.
        seed: Of the random numbers of this request, which do not depend on what else runs; None for any.
        repetition_penalty: Divides positive and multiplies negative logits of tokens in prompt or output; 1 for none,
            otherwise from 0.01 to 1e6, so that logits stay finite.
        presence_penalty: Taken from the logits of tokens in the output; 0 for none.
        frequency_penalty: Taken from the logits of tokens in the output for each time they are; 0 for none.
        stop: Texts that end the output, which then ends before them. Needs an engine with a tokenizer.
        stop_token_ids: Tokens that end the output, besides the end tokens of the engine.
        ignore_eos: End tokens of the engine do not end the output.
        logprobs: How many alternatives to report with their log probabilities at each place, None for no report.
            They are computed before temperature and limits are applied.
        prompt_logprobs: The same for the places of the prompt, which is computed without shared prefixes then.
        logit_bias: Added to the logits of these tokens, a number in [-100, 100] for each.
        include_stop: The stop string that ends the output is part of its text.
        skip_special_tokens: Special tokens are no part of the text.
        grammar: What the output must be, or None.
        lora: Name of an adapter that the engine has loaded (`Engine.load_lora`), or None.

    Raises:
        ValueError: A value is not as described.

    Example:
        >>> SamplingParams(max_new_tokens=8, temperature=0.7, top_p=0.9, seed=1).greedy
        False
    """

    max_new_tokens: int = 128
    min_new_tokens: int = 0
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logit_bias: Mapping[int, float] = dataclasses.field(default_factory=dict)
    include_stop: bool = False
    skip_special_tokens: bool = True
    grammar: Grammar | None = None
    lora: str | None = None

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        object.__setattr__(self, "stop", tuple(self.stop))
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
        n = self.max_new_tokens
        _check(_integer(n) and n >= 1, "max_new_tokens", "be a positive integer", n)
        least = self.min_new_tokens
        wanted = f"be between 0 and max_new_tokens, {n}"
        _check(_integer(least) and 0 <= least <= n, "min_new_tokens", wanted, least)
        t = self.temperature
        wanted = "be 0 or in [1e-06, 1e+06]"
        _check(_number(t) and (t == 0 or 1e-6 <= t <= 1e6), "temperature", wanted, t)
        _check(
            _integer(self.top_k) and 0 <= self.top_k < 2**31,
            "top_k",
            "be an integer in [0, 2^31)",
            self.top_k,
        )
        for name in ("top_p", "min_p"):
            value = getattr(self, name)
            _check(_number(value) and 0 <= value <= 1, name, "be in [0, 1]", value)
        seed = self.seed
        wanted = "be None or an integer of 64 bits"
        _check(seed is None or (_integer(seed) and -(2**63) <= seed < 2**64), "seed", wanted, seed)
        value = self.repetition_penalty
        wanted = "be positive, from 0.01 to 1e+06"
        _check(_number(value) and 0.01 <= value <= 1e6, "repetition_penalty", wanted, value)
        for name in ("presence_penalty", "frequency_penalty"):
            value = getattr(self, name)
            _check(_number(value), name, "be a finite number", value)
        usable = all(isinstance(text, str) and text for text in self.stop)
        _check(usable, "stop", "be strings that are not empty", self.stop)
        wanted = f"have at most {MAX_STOP} strings"
        _check(len(self.stop) <= MAX_STOP, "stop", wanted, len(self.stop))
        longest = max(map(len, self.stop), default=0)
        wanted = f"have at most {MAX_STOP_CHARACTERS} characters each"
        _check(longest <= MAX_STOP_CHARACTERS, "stop", wanted, longest)
        count = len(self.stop_token_ids)
        wanted = f"have at most {MAX_STOP_TOKENS} tokens"
        _check(count <= MAX_STOP_TOKENS, "stop_token_ids", wanted, count)
        usable = all(_integer(token) and token >= 0 for token in self.stop_token_ids)
        wanted = "be integers of at least 0"
        _check(usable, "stop_token_ids", wanted, self.stop_token_ids)
        for name in ("logprobs", "prompt_logprobs"):
            asked = getattr(self, name)
            known = asked is None or (_integer(asked) and 0 <= asked <= MAX_LOGPROBS)
            _check(known, name, f"be None or in [0, {MAX_LOGPROBS}]", asked)
        biases = self.logit_bias
        count = len(biases)
        _check(count <= MAX_BIASES, "logit_bias", f"have at most {MAX_BIASES} tokens", count)
        for token, bias in biases.items():
            known = _integer(token) and token >= 0
            _check(known, "logit_bias", "have tokens of at least 0", token)
            known = _number(bias) and -100 <= bias <= 100
            _check(known, "logit_bias", "have numbers in [-100, 100]", bias)

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is taken: temperature 0, or a limit that leaves one."""
        return self.temperature == 0

    @property
    def penalized(self) -> bool:
        """Whether logits depend on the tokens before."""
        return (
            self.repetition_penalty != 1
            or self.presence_penalty != 0
            or self.frequency_penalty != 0
        )

    def replace(self, **changes: Any) -> SamplingParams:
        """Return a copy with other values."""
        return dataclasses.replace(self, **changes)


@dataclasses.dataclass(frozen=True)
class PoolingParams:
    """Asks for one vector for a prompt, and for no new tokens.

    Args:
        pooling: ``"last"``, ``"first"`` or ``"mean"``: which of the states behind the last norm.
        token_types: Kinds of the tokens of the prompt, 0 or 1 for each, for models that have them; or None.

    Raises:
        ValueError: There is no such pooling.
    """

    pooling: Pooling = "last"
    token_types: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        known = get_args(Pooling)
        if self.pooling not in known:
            raise ValueError(
                f"PoolingParams: pooling must be one of {', '.join(known)}, got {self.pooling!r}"
            )


@dataclasses.dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log probabilities at one place of the output.

    Attributes:
        token: The token that was chosen.
        logprob: Its log probability.
        top: The most likely tokens with theirs, falling.
    """

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclasses.dataclass(frozen=True, slots=True)
class StepOutput:
    """What one step of the engine added to one request.

    Attributes:
        request_id: As returned by `add_request`.
        tokens: New tokens; several where guesses were right, none where a request ends without one. The token that
            ends the output is there.
        text: New text, if the engine has a tokenizer. Text that may yet become a stop string, and bytes that are no
            whole character yet, come later.
        finished: Whether this is the last output of the request.
        reason: Why: ``"stop"`` (end token, stop token or stop string), ``"length"``, ``"cancelled"``, ``"error"``; None
            before.
        logprobs: For each new token, if they were asked for.
        error: With ``"error"``: what happened, for this request alone.
        prompt_logprobs: With the first token, if they were asked for: of each token of the prompt but the first.
        vector: float32 ``[H]``, the answer to `PoolingParams`.
        cached_tokens: With the first token: of the prompt, found in the cache.
        queued: With the first token: seconds between the arrival of the request and its first computation.
        refused: With ``"error"``: whether the request is to blame, by its grammar.
    """

    request_id: str
    tokens: tuple[int, ...]
    text: str
    finished: bool
    reason: str | None
    logprobs: tuple[TokenLogprobs, ...] = ()
    error: str | None = None
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    vector: torch.Tensor | None = None
    cached_tokens: int = 0
    queued: float | None = None
    refused: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class GenerationOutput:
    """The whole output of one request; fields as in `StepOutput`."""

    request_id: str
    prompt_tokens: int
    cached_tokens: int  # of the prompt, found in the cache
    tokens: tuple[int, ...]
    text: str
    reason: str
    logprobs: tuple[TokenLogprobs, ...] = ()
    error: str | None = None
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class EngineStats:
    """Numbers of an engine; those without "now" count from its start."""

    running: int  # now
    waiting: int  # now
    blocks: int  # now, all
    blocks_held: int  # now, by running requests
    steps: int
    finished: int
    cancelled: int
    failed: int
    preemptions: int
    evictions: int
    prompt_tokens: int
    cached_tokens: int
    generated_tokens: int
    drafts: int = 0  # times that tokens were guessed
    draft_tokens: int = 0
    accepted_tokens: int = 0  # of them
    accepted_at: tuple[int, ...] = ()  # the same by their place in a guess

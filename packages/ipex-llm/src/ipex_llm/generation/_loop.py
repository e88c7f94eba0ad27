# SPDX-License-Identifier: Apache-2.0
"""The loop for greedy search and sampling, and the batch of sequences that it generates."""

from __future__ import annotations

import dataclasses
import time
from typing import Any

import torch
from torch import Tensor

from ipex_llm.kv_cache.transformers import CacheState, state_of_cache
from ipex_llm.model_runner import Runner

#: Tokens of one call while a prompt is read: bounds the memory of activations, large enough for full speed.
CHUNK = 4096


class Session:
    """Runs the steps of a batch.

    Args:
        runner: Runs the decoder.
        state: Cache of the batch, empty.
    """

    def __init__(self, runner: Runner, state: CacheState) -> None:
        self.runner = runner
        self.state = state
        self.positions = torch.zeros(0, dtype=torch.int64)  # of the next token of each sequence

    def prefill(
        self, ids: Tensor, mask: Tensor | None, positions: Tensor | None, chunk: int | None = None
    ) -> Tensor:
        """Run the prompts and return the logits of their last tokens, ``[B, V]``.

        Args:
            ids: ``[B, N]``, padded on any side.
            mask: ``[B, N]``, 0 at padding; or None.
            positions: ``[B, N]`` or ``[1, N]``, or None: counted.
            chunk: Tokens of each prompt per call.
        """
        batch, count = ids.shape
        valid = None if mask is None or bool(mask.all()) else mask.bool()
        if positions is None:
            positions = torch.arange(count).unsqueeze(0)
            if valid is not None:
                positions = (valid.long().cumsum(1) - 1).clamp_min(0)
        positions = positions.expand(batch, count)
        size = chunk or max(CHUNK // batch, 1)
        logits: Tensor | None = None
        for start in range(0, count, size):
            end = min(start + size, count)
            part = None if valid is None else valid[:, start:end].contiguous()
            if part is not None and bool(part.all()) and self.state.valid is None:
                part = None
            logits = self._chunk(ids[:, start:end], positions[:, start:end], part, logits)
        assert logits is not None
        if valid is None:
            self.positions = positions[:, -1] + 1
        else:
            self.positions = torch.where(valid, positions, -1).amax(1) + 1
        return logits

    def _chunk(
        self, ids: Tensor, positions: Tensor, valid: Tensor | None, former: Tensor | None
    ) -> Tensor:
        batch, count = ids.shape
        step = self.state.append(batch, count, valid)
        if valid is None:
            tokens, at = ids.reshape(-1), positions.reshape(-1)
        else:
            tokens, at = ids[valid], positions[valid]
            if tokens.numel() == 0:
                return former if former is not None else torch.zeros(batch, self.runner.vocab_size)
        runner = self.runner
        starts = step.starts.long()
        some = starts[1:] > starts[:-1]
        whole = bool(some.all())
        rows = None if whole else (starts[1:] - 1)[some]
        cache, hidden = self.state.cache, runner.embed(tokens, at)
        out = runner.run(cache, hidden, at, step, rows, tokens=tokens, logits=True)
        if whole:
            return out
        if former is None:
            former = torch.zeros(batch, out.shape[1], dtype=out.dtype)
        former[some] = out
        return former

    def step(self, tokens: Tensor) -> Tensor:
        """Run one token ``[B]`` of each sequence and return logits ``[B, V]``."""
        runner, state, positions = self.runner, self.state, self.positions
        if state.valid is None:
            step = state.sequences.append(1)
            state.length += 1
        else:
            step = state.append(len(state.sequences), 1, None)
        hidden = runner.embed(tokens, positions)
        logits = runner.run(state.cache, hidden, positions, step, tokens=tokens, logits=True)
        self.positions = positions + 1
        return logits

    def select(self, indices: Any) -> None:
        """Let sequence i be what sequence ``indices[i]`` was (beams)."""
        self.state.select(indices.tolist())
        self.positions = self.positions[indices]


#: Processors of transformers that ``sample_token`` does, in the order in which it does them.
_WARPERS = (
    ("TemperatureLogitsWarper", "temperature"),
    ("TopKLogitsWarper", "top_k"),
    ("TopPLogitsWarper", "top_p"),
    ("MinPLogitsWarper", "min_p"),
)


@dataclasses.dataclass
class Choice:
    """How a token is chosen from logits.

    Attributes:
        sample: Draw it; otherwise take the most likely.
        processors: What transformers does to the logits before.
        options: Limits that ``sample_token`` applies.
    """

    sample: bool = False
    processors: list[Any] = dataclasses.field(default_factory=list)
    options: dict[str, Any] = dataclasses.field(default_factory=dict)

    def tokens(self, scores: Tensor) -> Tensor:
        """Return a token for each row ``[B, V]``."""
        if not self.sample:
            chosen: Tensor = torch.ops.ipex.argmax(scores)
            return chosen
        chosen = torch.ops.ipex.sample_token(scores, torch.rand(scores.shape[0]), **self.options)
        return chosen


def choose(config: Any, processors: Any) -> Choice:
    """Split processors into those that are called and those that ``sample_token`` does."""
    rest = list(processors)
    choice = Choice(bool(config.do_sample))
    for name, option in reversed(_WARPERS) if choice.sample else ():
        if not rest or type(rest[-1]).__name__ != name:
            continue
        value = _value(rest[-1], option)
        if value is None:
            break
        rest.pop()
        choice.options[option] = value
    choice.processors = rest
    return choice


def _value(warper: Any, option: str) -> float | int | None:
    """Return the number of a warper, or None if it does more than ``sample_token``."""
    if option != "temperature":
        if getattr(warper, "filter_value", -float("inf")) != -float("inf"):
            return None
        if option != "top_k" and getattr(warper, "min_tokens_to_keep", 1) != 1:
            return None
    value = getattr(warper, option, None)
    if not isinstance(value, (int, float)):
        return None
    if option == "temperature" and not 1e-6 <= value <= 1e6:
        return None
    return value


@dataclasses.dataclass
class Stop:
    """Stopping criteria, split into those that the loop knows and those that are called."""

    length: int | None = None
    ends: list[int] = dataclasses.field(default_factory=list)
    called: list[Any] = dataclasses.field(default_factory=list)

    @staticmethod
    def of(criteria: Any) -> Stop:
        stop = Stop()
        for one in criteria:
            kind = type(one).__name__
            if kind == "MaxLengthCriteria":
                stop.length = (
                    one.max_length if stop.length is None else min(stop.length, one.max_length)
                )
            elif kind == "EosTokenCriteria":
                stop.ends += one.eos_token_id.flatten().tolist()
            else:
                stop.called.append(one)
        return stop


class _Ended:
    """Which sequences have ended; they go on until all have, with padding where end tokens are looked for.

    Args:
        stop: When they end.
        batch: How many there are.
        pad: The padding.
    """

    def __init__(self, stop: Stop, batch: int, pad: int) -> None:
        self.stop, self.pad = stop, pad
        self.tokens = set(stop.ends)
        self.pads = bool(stop.ends) or any(hasattr(one, "eos_token_id") for one in stop.called)
        self.rows = [False] * batch

    def take(self, tokens: Tensor) -> Tensor:
        """Return the next tokens, padding where a sequence has ended, and see which of them end one."""
        if not self.pads:
            return tokens
        found = tokens.tolist()
        if any(self.rows):
            found = [
                self.pad if done else token for token, done in zip(found, self.rows, strict=True)
            ]
            tokens = torch.tensor(found)
        self.rows = [
            done or token in self.tokens for token, done in zip(found, self.rows, strict=True)
        ]
        return tokens

    def ask(self, sequences: Tensor, scores: list[Tensor] | None, parallel: Any) -> None:
        """Ask the criteria that are called."""
        if not self.stop.called:
            return
        kept = None if scores is None else tuple(scores)
        for criterion in self.stop.called:
            hit = criterion(sequences, kept)
            hits = [hit] * len(self.rows) if isinstance(hit, bool) else hit.tolist()
            self.rows = [a or bool(b) for a, b in zip(self.rows, hits, strict=True)]
        if parallel is not None:  # a criterion may look at the clock
            self.rows = [bool(value) for value in parallel.from_first(list(map(int, self.rows)))]

    def done(self, length: int) -> bool:
        """Return whether there is nothing more to do at this length."""
        return all(self.rows) or (self.stop.length is not None and length >= self.stop.length)


class Loop:
    """One call of ``generate``.

    Args:
        model: The model; for its config and the class of its output.
        runner: Runs it.
        cache: An empty `IpexCache`.
        ids: Prompts ``[B, N]``.
        mask: ``[B, N]``, 0 at padding; or None.
        positions: Of the prompts, or None.
        config: Generation config.
    """

    def __init__(
        self,
        model: Any,
        runner: Runner,
        cache: Any,
        ids: Tensor,
        mask: Tensor | None,
        positions: Tensor | None,
        config: Any,
    ) -> None:
        state = state_of_cache(cache)
        assert isinstance(state, CacheState)
        self.model, self.cache, self.config = model, cache, config
        self.ids, self.mask, self.positions = ids, mask, positions
        if positions is not None and (positions.dim() != 2 or positions.shape[1] != ids.shape[1]):
            self.positions = None
        self.session = Session(runner, state)
        self.choice = Choice()
        self.returns_cache = True

    def run(self, criteria: Any, streamer: Any) -> Any:
        """Generate until everything has ended.

        Returns:
            Token ids ``[B, N + new]``, or with ``return_dict_in_generate`` what transformers returns.
        """
        config, ids = self.config, self.ids
        stop = Stop.of(criteria)
        batch, length = ids.shape
        ended = _Ended(stop, batch, self._pad())
        room = stop.length or length + 64
        out = torch.empty(batch, max(room, length + 1), dtype=torch.int64)
        out[:, :length] = ids
        detailed = bool(config.return_dict_in_generate)
        scores: list[Tensor] | None = [] if detailed and config.output_scores else None
        raw: list[Tensor] | None = [] if detailed and config.output_logits else None
        times: list[float] = []
        started = time.perf_counter()
        logits = self.session.prefill(
            ids, self.mask, self.positions, getattr(config, "prefill_chunk_size", None)
        )
        while True:
            tokens = self.choice.tokens(self._processed(out[:, :length], logits, scores, raw))
            now = time.perf_counter()
            times.append(now - started)
            started = now
            tokens = ended.take(tokens)
            if length == out.shape[1]:
                out = torch.cat([out, torch.empty_like(out)], dim=1)
            out[:, length] = tokens
            length += 1
            if streamer is not None:
                streamer.put(tokens)
            ended.ask(out[:, :length], scores, self.session.runner.plan.parallel)
            if ended.done(length):
                break
            logits = self.session.step(tokens)
        if streamer is not None:
            streamer.end()
        sequences = out[:, :length].contiguous() if length < out.shape[1] else out
        return self._result(sequences, scores, raw, times)

    def _processed(
        self,
        sequences: Tensor,
        logits: Tensor,
        scores: list[Tensor] | None,
        raw: list[Tensor] | None,
    ) -> Tensor:
        """Return what tokens are chosen from, and keep what the caller wants to see of it."""
        if not self.choice.processors and scores is None and raw is None:
            return logits
        logits = logits.float()
        if raw is not None:
            raw.append(logits.clone())
        for processor in self.choice.processors:
            logits = processor(sequences, logits)
        if scores is not None:
            scores.append(self._limited(logits))
        return logits

    def _pad(self) -> int:
        pad = getattr(self.config, "_pad_token_tensor", None)
        return 0 if pad is None else int(pad)

    def _limited(self, logits: Tensor) -> Tensor:
        """Return scores as transformers reports them, with the limits of sampling applied."""
        if not self.choice.options:
            return logits.clone()
        from transformers.generation import logits_process

        for name, option in _WARPERS:
            if option in self.choice.options:
                logits = getattr(logits_process, name)(self.choice.options[option])(None, logits)
        return logits

    def _result(
        self,
        sequences: Tensor,
        scores: list[Tensor] | None,
        raw: list[Tensor] | None,
        times: list[float],
        kind: str = "GenerateDecoderOnlyOutput",
        more: dict[str, Any] | None = None,
    ) -> Any:
        result: Any = sequences
        if self.config.return_dict_in_generate:
            from transformers.generation import utils

            result = getattr(utils, kind)(
                sequences=sequences,
                scores=None if scores is None else tuple(scores),
                logits=None if raw is None else tuple(raw),
                past_key_values=self.cache if self.returns_cache else None,
                **(more or {}),
            )
        if getattr(self.model.config, "token_latency", False):
            return result, times
        return result

# SPDX-License-Identifier: Apache-2.0
"""The loop for beam search and beam sampling.

A prompt is read once, not once per beam: its beams begin as owners of the same blocks of the cache, and a beam that
leaves the others copies no more than the block that it writes to next.

What is kept, and when it ends, follows transformers: of each prompt the best continuations of all beams are looked at;
those that end are kept if they are among the best, and the best of the others go on.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from typing import Any

import torch
from torch import Tensor

from ipex_llm.generation._loop import Loop, Stop

#: What is added to the score of a beam that must not be chosen.
_NEVER = -1e9


@functools.cache
def _draws_are_sorted() -> bool:
    """Return whether transformers, from 5.24 on, keeps the best of the continuations it draws, not the first."""
    import transformers

    return tuple(map(int, transformers.__version__.split(".")[:2])) >= (5, 24)


@dataclasses.dataclass(frozen=True, slots=True)
class _Ended:
    """A beam that has ended.

    Attributes:
        score: Sum of log probabilities, divided by the length to the power of the penalty.
        tokens: Prompt and output.
        parents: int32, for each new token the beam that it was appended to.
    """

    score: float
    tokens: Tensor
    parents: Tensor


class _Prompt:
    """The beams of one prompt that have ended, best first."""

    def __init__(self, beams: int, early: bool) -> None:
        self.beams = beams
        self.early = early
        self.ended: list[_Ended] = []
        self.closed = False  # no beam can become better than those that have ended

    @property
    def full(self) -> bool:
        return len(self.ended) == self.beams

    def add(self, found: list[_Ended]) -> None:
        """Keep the best."""
        if self.closed or (self.early and self.full):
            return
        self.ended += [one for one in found if one.score > _NEVER]
        self.ended.sort(key=lambda one: -one.score)
        del self.ended[self.beams :]

    def look(self, best: float) -> None:
        """Close if ``best``, the most that a beam may reach, is no improvement."""
        worst = self.ended[-1].score if self.full else _NEVER
        self.closed = self.closed or not best > worst


class _Beams:
    """The beams of all prompts, ``rows = prompts * beams`` of them.

    Attributes:
        tokens: int64 ``[rows, limit]``; the first `length` are there.
        parents: int32 ``[rows, limit - start]``, the beam that each new token was appended to.
        scores: float32 ``[prompts, beams]``, sums of log probabilities.
    """

    def __init__(self, ids: Tensor, config: Any, ends: int) -> None:
        self.count = beams = int(config.num_beams)
        self.config = config
        #: So many continuations are looked at: enough remain if all that can end do.
        self.width = max(2, 1 + ends) * beams
        batch, self.start = ids.shape
        self.length, self.limit = self.start, int(config.max_length)
        self.tokens = torch.zeros(batch * beams, self.limit, dtype=torch.int64)
        self.tokens[:, : self.start] = ids.repeat_interleave(beams, 0)
        self.parents = torch.empty(batch * beams, self.limit - self.start, dtype=torch.int32)
        # At first all beams of a prompt are the same: only one counts.
        self.scores = torch.zeros(batch, beams)
        self.scores[:, 1:] = _NEVER
        self.prompts = [_Prompt(beams, config.early_stopping is True) for _ in range(batch)]
        self._first = torch.arange(batch).unsqueeze(1) * beams

    def candidates(self, found: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return scores, beams and tokens ``[prompts, width]`` of continuations; ``found`` is ``[rows, V]``."""
        batch, vocab = len(self.prompts), found.shape[-1]
        total = (found.view(batch, self.count, vocab) + self.scores.unsqueeze(-1)).flatten(1)
        if self.config.do_sample:
            at = torch.multinomial(total.softmax(-1), self.width)
            best = total.gather(1, at)
            if _draws_are_sorted():
                best, order = best.sort(-1, descending=True)
                at = at.gather(1, order)
        else:
            best, at = total.topk(self.width)
        return best, at // vocab + self._first, at % vocab

    def continued(self, source: Tensor, tokens: Tensor) -> Tensor:
        """Return the tokens ``[prompts * width, length + 1]`` of continuations."""
        return torch.cat([self.tokens[source.flatten(), : self.length], tokens.view(-1, 1)], dim=1)

    def end(self, best: Tensor, source: Tensor, tokens: Tensor, hits: Tensor) -> None:
        """Keep continuations that end, where they are among the first ``beams``."""
        steps = self.length - self.start
        values = (best / (steps + 1) ** self.config.length_penalty).tolist()
        found: list[list[_Ended]] = [[] for _ in self.prompts]
        for b, k in hits[:, : self.count].nonzero().tolist():
            row = source[b, k]
            ended = torch.cat([self.tokens[row, : self.length], tokens[b, k].view(1)])
            parents = torch.cat([self.parents[row, :steps], row.view(1).int()])
            found[b].append(_Ended(values[b][k], ended, parents))
        for prompt, some in zip(self.prompts, found, strict=True):
            prompt.add(some)

    def go_on(self, best: Tensor, source: Tensor, tokens: Tensor, hits: Tensor) -> Tensor:
        """Let the best continuations that do not end be the beams; return what each of them was ``[rows]``."""
        self.scores, order = (best + hits * _NEVER).topk(self.count)
        rows = source.gather(1, order).flatten()
        steps = self.length - self.start
        self.tokens[:, : self.length] = self.tokens[rows, : self.length]
        self.tokens[:, self.length] = tokens.gather(1, order).flatten()
        self.parents[:, :steps] = self.parents[rows, :steps]
        self.parents[:, steps] = rows
        self.length += 1
        return rows

    def finished(self) -> bool:
        """Return whether nothing can become better."""
        config = self.config
        length = self.length - self.start
        if config.early_stopping == "never" and config.length_penalty > 0:
            length = self.limit - self.start
        for prompt, best in zip(self.prompts, self.scores[:, 0].tolist(), strict=True):
            prompt.look(best / length**config.length_penalty)
        if all(prompt.closed for prompt in self.prompts):
            return True
        return config.early_stopping is True and all(prompt.full for prompt in self.prompts)

    def results(self, fill: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return tokens ``[R, N + new]``, scores ``[R]`` and parents ``[R, new]`` of what is asked for."""
        count = self.config.num_return_sequences
        some: list[_Ended | None] = []
        for prompt in self.prompts:
            some += prompt.ended[:count]
            some += [None] * (count - len(prompt.ended))
        new = max((one.parents.numel() for one in some if one is not None), default=0)
        tokens = torch.full((len(some), self.start + new), fill)
        parents = torch.full((len(some), new), -1, dtype=torch.int32)
        scores = torch.full((len(some),), _NEVER)
        for row, one in enumerate(some):
            if one is None:  # a criterion has ended everything before
                tokens[row, : self.start] = self.tokens[row // count * self.count, : self.start]
                continue
            tokens[row, : one.tokens.numel()] = one.tokens
            parents[row, : one.parents.numel()] = one.parents
            scores[row] = one.score
        return tokens, scores, parents


class BeamLoop(Loop):
    """One call of ``generate`` with beams; arguments as for `Loop`, with one row for each prompt."""

    def search(self, processors: Any, criteria: Any) -> Any:
        """Generate until no beam can become better.

        Args:
            processors: Change log probabilities.
            criteria: Say which beams have ended.

        Returns:
            Token ids ``[B * num_return_sequences, N + new]``, or with ``return_dict_in_generate`` what transformers
            returns.
        """
        config = self.config
        stop = Stop.of(criteria)
        ends = getattr(config, "_eos_token_tensor", None)
        beams = _Beams(self.ids, config, 0 if ends is None else ends.numel())
        detailed = bool(config.return_dict_in_generate)
        scores: list[Tensor] | None = [] if detailed and config.output_scores else None
        raw: list[Tensor] | None = [] if detailed and config.output_logits else None
        times: list[float] = []
        started = time.perf_counter()
        logits = self.session.prefill(
            self.ids, self.mask, self.positions, getattr(config, "prefill_chunk_size", None)
        )
        every = torch.arange(logits.shape[0]).repeat_interleave(beams.count)
        self.session.select(every)
        logits = logits[every]
        while True:
            logits = logits.float()
            if raw is not None:
                raw.append(logits.clone())
            found = logits.log_softmax(-1)
            for processor in processors:
                found = processor(beams.tokens[:, : beams.length], found)
            if scores is not None:
                scores.append(found.clone())
            best, source, tokens = beams.candidates(found)
            hits = _hits(stop, beams, source, tokens, scores)
            if bool(hits.any()):
                beams.end(best, source, tokens, hits)
            self.session.select(beams.go_on(best, source, tokens, hits))
            now = time.perf_counter()
            times.append(now - started)
            started = now
            if beams.finished() or bool(hits.all()):
                break
            logits = self.session.step(beams.tokens[:, beams.length - 1])
        # As in transformers, where a padding token 0 counts as none.
        fill = -1 if ends is None else self._pad() or int(ends[0])
        sequences, values, parents = beams.results(fill)
        more = {
            "sequences_scores": None if scores is None else values,
            "beam_indices": parents,
        }
        return self._result(sequences, scores, raw, times, "GenerateBeamDecoderOnlyOutput", more)


def _hits(
    stop: Stop, beams: _Beams, source: Tensor, tokens: Tensor, scores: list[Tensor] | None
) -> Tensor:
    """Return which continuations ``[prompts, width]`` end."""
    hits = torch.isin(tokens, torch.tensor(stop.ends, dtype=torch.int64))
    if stop.length is not None and beams.length + 1 >= stop.length:
        hits |= True
    if stop.called:
        rows = beams.continued(source, tokens)
        kept = None if scores is None else tuple(scores)
        for one in stop.called:
            hit = one(rows, kept)
            hits |= hit if isinstance(hit, bool) else hit.view(hits.shape)
    return hits

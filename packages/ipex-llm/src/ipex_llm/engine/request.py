# SPDX-License-Identifier: Apache-2.0
"""A request inside the engine: its state, its part of a batch, its next token, its text."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import math
import secrets
import time
from array import array
from collections import Counter, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from ipex_llm.engine.params import PoolingParams, SamplingParams, TokenLogprobs

if TYPE_CHECKING:
    from ipex_llm.engine.lora import LoadedAdapter
    from ipex_llm.engine.params import Matcher

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
        include_stop: The stop string that ends the stream is part of it.
        skip_special: Special tokens have no text.
        known: Texts of single tokens, which streams of the same tokenizer share; see `whole_tokens`. None: the text
            of a token is always decoded with the tokens in front of it.
    """

    def __init__(
        self,
        tokenizer: Any,
        stop: Sequence[str] = (),
        context: Sequence[int] = (),
        include_stop: bool = False,
        skip_special: bool = True,
        known: dict[int, str] | None = None,
    ) -> None:
        self._decode = _decoder(tokenizer, skip_special)
        self._known = known
        self._stop = tuple(stop)
        self._include_stop = include_stop
        self._tokens = list(context)
        self._start = 0  # the context that decoding begins with
        self._done = len(self._tokens)  # tokens whose text has been given out
        self._held = ""  # may be the beginning of a stop string
        self.stopped = False

    def add(self, token: int, last: bool = False, early: bool = False) -> str:
        """Add a token and return the text that is certain by now.

        Args:
            token: The token.
            last: Nothing comes after: give out what was held back.
            early: No stop string ends the stream here.
        """
        if self.stopped:
            return ""
        tokens = self._tokens
        tokens.append(token)
        piece = None
        if self._known is not None and self._done == len(tokens) - 1:  # no bytes are left over
            piece = self._known.get(token)
            if piece is None:
                piece = self._whole(token)
        if piece is None:
            piece = self._piece(last)
        else:
            self._start = self._done
            self._done += 1
        return self._search(piece, last) if self._stop and not early else piece

    def finish(self) -> str:
        """Return what was held back, when nothing comes any more."""
        return "" if self.stopped else self._search(self._piece(True), True)

    def _whole(self, token: int) -> str | None:
        """Return the text of a token if it is whole characters, or none."""
        assert self._known is not None
        text = self._decode([token])
        if _UNFINISHED in text:
            return None
        self._known[token] = text
        return text

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
        places = [(place, len(stop)) for stop in self._stop if (place := text.find(stop)) >= 0]
        if places:
            self.stopped = True
            self._held = ""
            place, length = min(places)
            return text[: place + length * self._include_stop]
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


def _decoder(tokenizer: Any, skip_special: bool) -> Callable[[list[int]], str]:
    """Return a function that decodes tokens.

    Args:
        tokenizer: Of transformers, or another one.
        skip_special: Special tokens have no text.
    """
    found = tokenizer
    backend = getattr(tokenizer, "_tokenizer", None)
    if hasattr(backend, "decode") and _plain(tokenizer):
        # What transformers does before its library is called takes longer than the library.
        found = backend
    return functools.partial(found.decode, skip_special_tokens=skip_special)


def whole_tokens(tokenizer: Any) -> dict[int, str] | None:
    """Return an empty table for the ``known`` of `TextStream`; None where the text of tokens depends on each other.

    Where tokens are bytes and nothing else, the text of tokens that are whole characters is the text of each.
    """
    if not _plain(tokenizer):
        return None
    from tokenizers.decoders import ByteLevel

    decoder = getattr(getattr(tokenizer, "_tokenizer", None), "decoder", None)
    return {} if isinstance(decoder, ByteLevel) else None


def _plain(tokenizer: Any) -> bool:
    """Return whether a tokenizer of transformers gives what its library gives."""
    for name in ("decode", "_decode"):
        owner = next((kind for kind in type(tokenizer).__mro__ if name in vars(kind)), object)
        own = name in getattr(tokenizer, "__dict__", ())
        if own or not owner.__module__.startswith("transformers.tokenization_utils"):
            return False
    return getattr(tokenizer, "clean_up_tokenization_spaces", True) is False


def block_key(before: bytes, tokens: Sequence[int]) -> bytes:
    """Return the key of a full block: a digest of its tokens and, through ``before``, of all tokens in front of them.

    Long enough that two different prefixes do not meet in practice, by accident or by intent: what is found under a
    key is used without another look at the tokens.
    """
    return hashlib.blake2b(before + array("q", tokens).tobytes(), digest_size=16).digest()


#: Most tokens of a prompt that get logits in a step, where its log probabilities are asked for: rows of a large
#: vocabulary take memory.
_SCORED = 128

#: Random numbers that are drawn at a time.
_DRAWN = 32


class Request:
    """One request: its tokens, how many of them are in the cache, and where.

    Attributes:
        most: Most tokens that a step computes.
        whole: Whether all tokens of the prompt must be computed, so that no shared prefix is of use.
        prompt_logprobs: Of the tokens of the prompt after the first, as far as they are computed.
        mask: Finds the tokens that the grammar allows behind the last one.
        vector: Of a request for a vector: the state, or the sum of the states, as far as they are computed.
        tokens: Prompt and output.
        computed: The first so many tokens are in the cache.
        blocks: Their blocks, in order.
        row: Row of the block tables, -1 while waiting.
        limit: Most tokens of prompt and output together.
        long: Whether what is in the cache belongs to a sequence beyond the switch of LongRoPE.
        room: Tokens that may be guessed in this step: there are places in the cache for them.
        drafts: Guessed tokens, which the model checks in this step.
        speculation: What `ipex_llm.engine.speculation` knows of the request, None without guesses.
        snapshot: Key of the latest state of the output that is kept, of recurrent layers.
        adapter: Whose factors are added to the model's weights, None for the model as it is.
    """

    def __init__(
        self,
        request_id: str,
        prompt: list[int],
        params: SamplingParams | PoolingParams,
        limit: int,
        ends: frozenset[int],
        stream: TextStream | None,
    ) -> None:
        self.pooling = params if isinstance(params, PoolingParams) else None
        params = SamplingParams() if isinstance(params, PoolingParams) else params
        scored = params.prompt_logprobs is not None
        self.most = _SCORED if scored else len(prompt) + limit
        self.whole = scored or (self.pooling is not None and self.pooling.pooling != "last")
        self.prompt_logprobs: list[TokenLogprobs] = []
        self.vector: torch.Tensor | None = None
        self.mask: Future[None] | None = None
        self.matcher = None if params.grammar is None else params.grammar.matcher()
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
        self.snapshot: bytes | None = None
        self.row = -1
        self.written = 0  # blocks that are in the row of the tables
        self.preemptions = 0
        self.long = False
        self.room = 0
        self.drafts: list[int] = []
        self.speculation: Any = None
        self.adapter: LoadedAdapter | None = None
        self.logprobs: list[TokenLogprobs] = []
        self.arrived = time.monotonic()
        self.admitted = self.arrived
        self.first_token_at: float | None = None
        #: What rows must share to be sampled by one call; None for the most likely token.
        self.group = None
        if not params.greedy:
            limits = (params.top_k, float(params.top_p), float(params.min_p))
            self.group = (float(params.temperature), *limits)
        #: Whether logits of this request may be changed before a token is chosen.
        self.changed = (
            params.penalized or bool(params.logit_bias or params.min_new_tokens)
        ) or self.matcher is not None
        self._generator: torch.Generator | None = None
        self._noise: deque[float] = deque()

    @property
    def missing(self) -> int:
        """Tokens that are not in the cache."""
        return len(self.tokens) - self.computed

    @property
    def new_tokens(self) -> int:
        """Length of the output."""
        return len(self.tokens) - self.prompt_length

    def scored(self, first: int, last: int) -> range:
        """Return the places of ``first`` to ``last`` whose logits tell of the next token of the prompt."""
        if self.params.prompt_logprobs is None or self.new_tokens:
            return range(0)
        return range(first, min(last, self.prompt_length - 1))

    def score(self, first: int, logits: torch.Tensor) -> None:
        """Note log probabilities of the prompt: of the tokens behind the places that begin with ``first``."""
        count = self.params.prompt_logprobs
        assert count is not None
        if first == 0:  # once more, after it gave way to another request
            self.prompt_logprobs.clear()
        for place, row in enumerate(logits, first + 1):
            self.prompt_logprobs.append(_logprobs(row, self.tokens[place], count))

    def pool(self, first: int, states: torch.Tensor) -> None:
        """Take the states of the tokens that begin with ``first``."""
        assert self.pooling is not None
        if self.pooling.pooling == "last":
            self.vector = states[-1].float()
        elif first == 0:
            rows = states if self.pooling.pooling == "mean" else states[:1]
            self.vector = rows.float().sum(0)
        elif self.pooling.pooling == "mean":
            assert self.vector is not None
            self.vector = self.vector + states.float().sum(0)

    def pooled(self) -> torch.Tensor:
        """Return the vector of the whole prompt."""
        assert self.pooling is not None and self.vector is not None
        return self.vector / (self.prompt_length if self.pooling.pooling == "mean" else 1)

    def extend_keys(self, block_size: int, length: int) -> list[bytes]:
        """Return the keys of the full blocks of the first ``length`` tokens."""
        while (len(self.keys) + 1) * block_size <= length:
            start = len(self.keys) * block_size
            adapter = b"" if self.adapter is None else self.adapter.key
            before = self.keys[-1] if self.keys else adapter + b"long" * self.long
            self.keys.append(block_key(before, self.tokens[start : start + block_size]))
        return self.keys[: length // block_size]

    def noise(self, ahead: int = 0) -> float:
        """Return the random number in ``[0, 1)`` of the next token, or of the token ``ahead`` places behind it."""
        if self._generator is None:
            seed = self.params.seed
            self._generator = torch.Generator()
            self._generator.manual_seed(secrets.randbits(63) if seed is None else seed)
        while len(self._noise) <= ahead:
            # Several at once are those that single draws give, and take as long as one.
            self._noise += torch.rand(_DRAWN, generator=self._generator).tolist()
        return self._noise[ahead]

    def append(self, token: int) -> None:
        """Add a token to the output, and go on to the random number of the next one."""
        self.tokens.append(token)
        if self._noise:
            self._noise.popleft()


# -- The arguments of one forward pass for the requests of a step -----------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True)
class Batch:
    """What `Runner.forward` takes, and the requests whose last token is in it.

    Attributes:
        tokens: int64 ``[T]``, of all requests back to back; `positions` and `slots` belong to them.
        tables: int32 ``[B, M]`` blocks of each request, the rest zero.
        starts: int32 ``[B + 1]``.
        lengths: int32 ``[B]``: tokens in the cache after the pass.
        rows: int64 ``[R + S]`` places of tokens whose logits are needed, None for the last one of each request.
        requests: The B requests.
        complete: The requests that get tokens by the first R rows: each has a row, and one more for each draft.
        scored: Requests with the place in the prompt and the number of further rows, S together.
    """

    tokens: Tensor
    positions: Tensor
    slots: Tensor
    tables: Tensor
    starts: Tensor
    lengths: Tensor
    rows: Tensor | None
    requests: list[Request]
    complete: list[Request]
    scored: list[tuple[Request, int, int]]


class BlockTables:
    """The blocks of all running requests as one tensor, into which only new blocks are written.

    Args:
        rows: Most requests.
        columns: Most blocks of a request.
        block_size: Tokens in a block.
    """

    def __init__(self, rows: int, columns: int, block_size: int) -> None:
        self._table = torch.zeros(rows, columns, dtype=torch.int32)
        self._block_size = block_size

    def _update(self, request: Request) -> None:
        blocks = request.blocks
        fresh = torch.tensor(blocks[request.written :], dtype=torch.int32)
        self._table[request.row, request.written : len(blocks)] = fresh
        request.written = len(blocks)

    def arguments(
        self, spans: Sequence[tuple[Request, int, Sequence[int]]]
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Return tokens, positions, slots, tables, starts and lengths, as in `Batch`.

        Args:
            spans: Requests with a position and the tokens from there on.
        """
        size = self._block_size
        tokens: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        starts, lengths = [0], []
        for request, first, part in spans:
            blocks = request.blocks
            if request.written < len(blocks):
                self._update(request)
            if len(part) == 1:
                last = first + 1
                tokens.append(part[0])
                positions.append(first)
                slots.append(blocks[first // size] * size + first % size)
            else:
                last = first + len(part)
                tokens += part
                positions += range(first, last)
                slots += [blocks[at // size] * size + at % size for at in range(first, last)]
            starts.append(len(tokens))
            lengths.append(last)
        width = -(-max(lengths) // size)
        order = torch.tensor([request.row for request, _, _ in spans])
        # Behind the blocks of a short request lie zeros or blocks of its row's last user: not read, but valid.
        return (
            torch.tensor(tokens),
            torch.tensor(positions),
            torch.tensor(slots),
            self._table[order, :width],
            torch.tensor(starts, dtype=torch.int32),
            torch.tensor(lengths, dtype=torch.int32),
        )

    def batch(self, chosen: Sequence[tuple[Request, int]]) -> Batch:
        """Return the arguments for requests with the number of tokens each computes, besides its drafts."""
        spans: list[tuple[Request, int, Sequence[int]]] = []
        rows: list[int] = []
        complete = []
        more: list[int] = []
        scored = []
        at = 0
        for request, count in chosen:
            first, last = request.computed, request.computed + count
            places = request.scored(first, last)
            if places:
                more += range(at, at + len(places))
                scored.append((request, first, len(places)))
            tokens = request.tokens[first:last]
            if last == len(request.tokens):
                tokens += request.drafts
                rows += range(at + count - 1, at + len(tokens))
                complete.append(request)
            spans.append((request, first, tokens))
            at += len(tokens)
        plain = len(rows) == len(complete) == len(chosen) and not more
        return Batch(
            *self.arguments(spans),
            rows=None if plain else torch.tensor(rows + more, dtype=torch.int64),
            requests=[request for request, _ in chosen],
            complete=complete,
            scored=scored,
        )


# -- Threads that find the tokens that grammars allow, while the model runs -----------------------------------------


class _Task(NamedTuple):
    done: Future[None]
    matcher: Matcher
    drafts: tuple[int, ...]


class MaskThreads:
    """Runs `Matcher.fill`, for one matcher beside a slow one.

    To wake a thread takes the caller longer than a mask takes. So the tasks of a step wake one thread, which wakes the
    next while there is more to do.

    Args:
        count: Number of threads.
    """

    def __init__(self, count: int) -> None:
        self._pool = ThreadPoolExecutor(count, "ipex-llm-masks")
        self._tasks: deque[_Task] = deque()

    def fill(self, wanted: Sequence[tuple[Matcher, Sequence[int]]]) -> list[Future[None]]:
        """Begin with matchers, each with the drafts that it is asked for; return what tells that each is done."""
        tasks = [_Task(Future(), matcher, tuple(drafts)) for matcher, drafts in wanted]
        self._tasks += tasks
        if tasks:
            self._pool.submit(_work, self._tasks, self._pool)
        return [task.done for task in tasks]


def _work(tasks: deque[_Task], pool: ThreadPoolExecutor) -> None:
    if len(tasks) > 1:
        pool.submit(_work, tasks, pool)
    while True:
        try:
            done, matcher, drafts = tasks.popleft()
        except IndexError:
            return
        try:
            matcher.fill(drafts)
        except BaseException as error:
            done.set_exception(error)
        else:
            done.set_result(None)


# -- The next token of each request from its row of logits ------------------------------------------------------------


class Place(NamedTuple):
    """A place behind the tokens of a request and the first ``ahead`` of its drafts."""

    request: Request
    ahead: int


#: Tokens of one request in order, each with its log probabilities if they are asked for; None for no token.
Run = list[tuple[int | None, TokenLogprobs | None]]


def verify(requests: Sequence[Request], logits: Tensor) -> list[Run]:
    """Choose the next tokens of each request: one, and one more for each draft that is what was chosen in its place.

    Args:
        requests: The requests, with their drafts.
        logits: ``[R, vocab]``: for each request a row, and one more for each of its drafts.

    Returns:
        A run of tokens for each request.
    """
    places = [Place(r, ahead) for r in requests for ahead in range(1 + len(r.drafts))]
    chosen = choose(places, logits)
    if len(places) == len(requests) and all(r.params.logprobs is None for r in requests):
        return [[(token, None)] for token in chosen]
    found: list[Run] = []
    at = 0
    for request in requests:
        run: Run = []
        for row in range(at, at + 1 + len(request.drafts)):
            token, count = chosen[row], request.params.logprobs
            noted = token is not None and count is not None
            run.append((token, _logprobs(logits[row], token, count) if noted else None))  # type: ignore[arg-type]
            if row - at < len(request.drafts) and token != request.drafts[row - at]:
                break
        found.append(run)
        at += 1 + len(request.drafts)
    return found


def choose(places: Sequence[Place], logits: Tensor, rules: bool = True) -> list[int | None]:
    """Choose a token for each place.

    Each row is treated on its own, so that the tokens of a request do not depend on what else is in the batch. The
    random number of a place depends on the request and the length of the output alone.

    Args:
        places: The places.
        logits: ``[R, vocab]``, a row for each place.
        rules: Ask the matchers of grammars which tokens may come.

    Returns:
        R tokens; None for a row that no token can be chosen from, since it has NaN or infinity or no finite number.
    """
    if any(place.request.changed for place in places) and any(
        _changed(place, rules) for place in places
    ):
        # Log probabilities are what the model said.
        if any(place.request.params.logprobs is not None for place in places):
            logits = logits.clone()
        for place, row in zip(places, logits, strict=True):
            if _changed(place, rules):
                _change(place, row, rules)
    common = places[0].request.group if places else None
    if common is not None and all(place.request.group == common for place in places):
        # Refused if a row has NaN or infinity: then the way of unlike rows finds out which.
        with contextlib.suppress(RuntimeError):
            return [*_draw(places, logits, common)]
    best = torch.ops.ipex.argmax(logits)
    # The maximum is NaN if anything is.
    highest = logits.gather(-1, best.unsqueeze(-1)).flatten().tolist()
    chosen: list[int | None] = best.tolist()
    groups: dict[tuple[float, int, float, float], list[int]] = {}
    for row, place in enumerate(places):
        if not math.isfinite(highest[row]):
            chosen[row] = None
        elif place.request.group is not None:
            groups.setdefault(place.request.group, []).append(row)
    for group, rows in groups.items():
        part = logits if len(rows) == len(places) else logits[rows]
        for row, value in zip(rows, _draw([places[r] for r in rows], part, group), strict=True):
            chosen[row] = value
    return chosen


def _draw(
    places: Sequence[Place], logits: Tensor, group: tuple[float, int, float, float]
) -> list[int]:
    noise = [request.noise(ahead) for request, ahead in places]
    found: list[int] = torch.ops.ipex.sample_token(
        logits, torch.tensor(noise, dtype=torch.float32), *group
    ).tolist()
    return found


def _changed(place: Place, rules: bool) -> bool:
    request, params = place.request, place.request.params
    early = request.new_tokens + place.ahead < params.min_new_tokens
    bound = rules and request.matcher is not None
    return params.penalized or early or bool(params.logit_bias) or bound


def _change(place: Place, row: Tensor, rules: bool) -> None:
    request, params = place.request, place.request.params
    drafts = request.drafts[: place.ahead]
    if params.repetition_penalty != 1:
        seen = torch.tensor(sorted({*request.tokens, *drafts}))
        values = row[seen]
        factor = params.repetition_penalty
        row[seen] = torch.where(values > 0, values / factor, values * factor)
    if params.presence_penalty or params.frequency_penalty:
        counts = Counter([*request.tokens[request.prompt_length :], *drafts])
        if counts:
            tokens = torch.tensor(list(counts))
            times = torch.tensor(list(counts.values()), dtype=torch.float32)
            row[tokens] -= (times * params.frequency_penalty + params.presence_penalty).to(
                row.dtype
            )
    if params.logit_bias:
        tokens = torch.tensor(list(params.logit_bias))
        row[tokens] += torch.tensor(list(params.logit_bias.values())).to(row.dtype)
    early = request.new_tokens + place.ahead < params.min_new_tokens
    if early and request.matcher is None:
        ends = sorted({*request.ends, *params.stop_token_ids})
        row[
            torch.tensor([end for end in ends if end < row.numel()], dtype=torch.int64)
        ] = -torch.inf
    if rules and request.matcher is not None:
        request.matcher.apply(row, place.ahead)


def _logprobs(row: Tensor, token: int, count: int) -> TokenLogprobs:
    values = row.float().log_softmax(-1)
    top = values.topk(min(count, values.numel()))
    alternatives = zip(top.indices.tolist(), top.values.tolist(), strict=True)
    return TokenLogprobs(token, float(values[token]), tuple(alternatives))

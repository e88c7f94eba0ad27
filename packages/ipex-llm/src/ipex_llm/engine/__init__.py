# SPDX-License-Identifier: Apache-2.0
"""Continuous batching: many requests share one model and one paged cache.

Example::

    engine = ipex.llm.Engine(model, tokenizer, max_num_seqs=16)
    engine.add_request("The capital of France", SamplingParams(max_new_tokens=8))
    while engine.has_work:
        for output in engine.step():
            print(output.request_id, output.text)
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, wait
from pathlib import Path
from typing import Any

import torch

from ipex_llm.engine.limits import (
    DEFAULT_MEMORY_SHARE,
    Origin,
    cache_blocks,
    check_positive,
    check_prompt,
    check_snapshots,
    end_tokens,
    prompt_ids,
    runner_of,
    snapshot_rows,
)
from ipex_llm.engine.lora import (
    MAX_LORAS,
    MAX_RANK,
    LoadedAdapter,
    Loras,
    adapters_of_rows,
    read_adapter,
)
from ipex_llm.engine.params import (
    EngineStats,
    GenerationOutput,
    Grammar,
    Matcher,
    PoolingParams,
    SamplingParams,
    StepOutput,
    TokenLogprobs,
)
from ipex_llm.engine.ranks import follow, lead
from ipex_llm.engine.request import (
    Batch,
    BlockTables,
    MaskThreads,
    Request,
    Run,
    TextStream,
    verify,
    whole_tokens,
)
from ipex_llm.engine.scheduler import BlockPool, Scheduler, StateSnapshots
from ipex_llm.engine.speculation import Speculation, SpeculativeConfig, draft_runner, proposer
from ipex_llm.kv_cache import CacheMemoryError

__all__ = [
    "CacheMemoryError",
    "Engine",
    "EngineStats",
    "GenerationOutput",
    "Grammar",
    "Matcher",
    "PoolingParams",
    "SamplingParams",
    "SpeculativeConfig",
    "StepOutput",
    "TokenLogprobs",
    "follow",
]

#: Seconds that a step waits for the tokens that a grammar allows, where it has nothing else to do.
_PATIENCE = 0.05

#: Tokens of the prompt that the text of the output is decoded with: blanks depend on what is in front.
_TEXT_CONTEXT = 6


class Engine:
    """Runs many requests on one model, with one batch for all and a paged cache of bounded size.

    Requests join and leave between steps. Prompts are computed in pieces beside the tokens of others. Requests that
    begin with the same tokens share the blocks of the cache that hold them. The tokens of a request are those it would
    get alone (the order of summation within a product depends on the size of the batch, which in bfloat16 may decide
    between two tokens that are equally likely).

    An engine belongs to one thread at a time. With a model that is divided among processes it is made on rank 0, and
    the other ranks call `follow`.

    Args:
        model: A model that `ipex.llm.optimize` has prepared, or a runner.
        tokenizer: For text in prompts and outputs and for stop strings; a tokenizer of transformers, or an object with
            ``encode(text) -> list[int]`` and ``decode(ids, skip_special_tokens=...)``.
        max_num_seqs: Most requests that run at the same time; others wait.
        max_tokens_per_step: Most tokens that a step computes, prompts and new tokens together; at least
            ``max_num_seqs`` are allowed.
        max_model_len: Most tokens of prompt and output together; the context of the model if None.
        block_size: Tokens in a block of the cache; whole blocks are shared.
        num_blocks: Size of the cache in blocks.
        cache_bytes: Size of the cache in bytes, instead of ``num_blocks``.
        memory_share: Part of the free memory that the cache takes with neither, but no more than ``max_num_seqs``
            requests of the greatest length can use; above 0, at most 1.
        cache_dtype: Element type of the cache, the dtype of the model if None.
        prefix_reuse: Whether full blocks are shared and kept for later requests.
        max_state_snapshots: Most prefixes whose states are kept, for a model with recurrent layers; each takes as much
            memory as the states of a request. None: ``max_num_seqs``, or fewer in little memory; 0: none, so that no
            prefix is reused.
        eos_token_ids: Tokens that end an output; from the model's generation config or the tokenizer if None.
        speculative_config: Guess tokens and check several in one pass, which changes no output; see
            `SpeculativeConfig`, or a mapping of its fields. None: nothing is guessed.
        max_loras: Most adapters that are loaded at the same time; see `load_lora`.
        max_lora_rank: Largest rank of an adapter.

    Raises:
        TypeError: The model is neither of the two.
        ValueError: A number is not as described, or the smaller model has another vocabulary.
        CacheMemoryError: The cache does not fit the free memory, or holds no block.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any = None,
        *,
        max_num_seqs: int = 32,
        max_tokens_per_step: int = 1024,
        max_model_len: int | None = None,
        block_size: int = 32,
        num_blocks: int | None = None,
        cache_bytes: int | None = None,
        memory_share: float = DEFAULT_MEMORY_SHARE,
        cache_dtype: torch.dtype | None = None,
        prefix_reuse: bool = True,
        max_state_snapshots: int | None = None,
        eos_token_ids: Iterable[int] | None = None,
        speculative_config: SpeculativeConfig | Mapping[str, Any] | None = None,
        max_loras: int = MAX_LORAS,
        max_lora_rank: int = MAX_RANK,
    ) -> None:
        for name, value in (
            ("max_loras", max_loras),
            ("max_lora_rank", max_lora_rank),
            ("max_num_seqs", max_num_seqs),
            ("max_tokens_per_step", max_tokens_per_step),
            ("block_size", block_size),
        ):
            check_positive(name, value)
        for name, optional in (
            ("max_model_len", max_model_len),
            ("num_blocks", num_blocks),
            ("cache_bytes", cache_bytes),
        ):
            if optional is not None:
                check_positive(name, optional)
        check_snapshots(max_state_snapshots)
        if not 0 < memory_share <= 1:
            raise ValueError(
                f"Engine: memory_share must be above 0 and at most 1, got {memory_share}"
            )
        if num_blocks is not None and cache_bytes is not None:
            raise ValueError("Engine: num_blocks and cache_bytes must not both be given, got both")
        runner = runner_of(model)
        self._origin = Origin(model, runner)
        self.runner = lead(runner)
        self._model = model
        self.max_lora_rank = max_lora_rank
        self._loras = Loras(self.runner, max_loras)
        self.tokenizer = tokenizer
        #: Texts of tokens, with special tokens as nothing or not.
        self._texts = {skip: whole_tokens(tokenizer) for skip in (False, True)}
        self.max_num_seqs = max_num_seqs
        self.vocab_size: int = self.runner.vocab_size
        context: int = self.runner.plan.max_positions
        if max_model_len is not None and max_model_len > context:
            raise ValueError(
                f"Engine: max_model_len must be at most {context}, the context of the model, got {max_model_len}"
            )
        self.max_model_len = context if max_model_len is None else max_model_len
        self.block_size = block_size
        self.eos_token_ids = frozenset(
            end_tokens(model, tokenizer) if eos_token_ids is None else eos_token_ids
        )
        longest = -(-self.max_model_len // block_size)
        one = self.runner.cache_bytes(1, block_size, cache_dtype)
        plan = self.runner.plan
        device = getattr(self.runner, "device", None)
        #: Whether layers keep a state of each sequence; their rows have the numbers of the running requests.
        self._states = bool(getattr(plan, "has_states", False))
        kept = 0
        if self._states and prefix_reuse:
            size = self.runner.state_bytes(1)
            kept = snapshot_rows(max_state_snapshots, max_num_seqs, size, device)
        rows = max_num_seqs + kept
        states = self.runner.state_bytes(rows) if self._states else 0
        if self._states and speculative_config is not None:
            raise ValueError(
                "Engine: speculative_config must be None for a model with recurrent layers, whose state cannot go"
                f" back behind a wrong guess, got {speculative_config!r}"
            )
        speculative = None
        if speculative_config is not None:
            speculative = SpeculativeConfig.of(speculative_config)
            draft = draft_runner(speculative, self.vocab_size)
            one += 0 if draft is None else draft.cache_bytes(1, block_size)
        self.speculative_config = speculative
        most = longest * max_num_seqs
        blocks = cache_blocks(one, num_blocks, cache_bytes, most, memory_share, states, device)
        if self._states:
            self._cache = self.runner.new_cache(blocks, block_size, cache_dtype, rows)
        else:
            self._cache = self.runner.new_cache(blocks, block_size, cache_dtype)
        #: A prefix needs the state at its end, which is larger than a block: few have one.
        self._snapshots = StateSnapshots(self._cache, max_num_seqs, kept) if kept else None
        self._pool = BlockPool(blocks, block_size, prefix_reuse and (not self._states or kept > 0))
        budget = max(max_tokens_per_step, max_num_seqs)
        switch: int | None = getattr(self.runner, "length_switch", None)
        guesses = None if speculative is None else self._guesses
        self._scheduler = Scheduler(
            self._pool, max_num_seqs, budget, switch, guesses, self._snapshots
        )
        self._tables = BlockTables(max_num_seqs, min(longest, blocks), block_size)
        self._proposer = None
        if speculative is not None:
            self._proposer = proposer(speculative, draft, blocks, block_size, self._tables, budget)
        self._requests: dict[str, Request] = {}
        self._ended: list[StepOutput] = []
        self._ids = itertools.count()
        #: Finds the tokens that grammars allow, beside the model.
        self._masks = MaskThreads(2)
        self._unmasked: list[Request] = []
        self._counts = dict.fromkeys(
            ("steps", "finished", "cancelled", "failed", "prompt", "cached", "generated"), 0
        )
        self._counts |= dict.fromkeys(("drafts", "draft_tokens"), 0)
        self._accepted = [0] * (0 if speculative is None else speculative.num_speculative_tokens)

    @property
    def lost(self) -> bool:
        """Whether a rank of a divided model has ended, so that nothing can be computed any more."""
        return bool(getattr(self.runner, "lost", False))

    # -- requests ------------------------------------------------------------------------------------------------

    def add_request(
        self,
        prompt: str | Sequence[int] | torch.Tensor,
        params: SamplingParams | PoolingParams | None = None,
        *,
        request_id: str | None = None,
    ) -> str:
        """Queue a request.

        Args:
            prompt: Token ids, or text for an engine with a tokenizer.
            params: How to sample and when to end; the default is greedy, 128 tokens. `PoolingParams` ask for one
                vector instead, which the only output of the request has.
            request_id: A name of its own; one is made if None.

        Returns:
            The id of the request.

        Raises:
            TypeError: The prompt is neither, or text without a tokenizer.
            ValueError: The prompt is empty, longer than the context or has ids that are none; stop strings without a
                tokenizer; a biased token is not in the vocabulary; kinds of tokens for a decoder; there is no such
                adapter; the id is in use.
            CacheMemoryError: Prompt and output could never fit the cache.
        """
        where = "Engine.add_request"
        params = SamplingParams() if params is None else params
        if not isinstance(params, (SamplingParams, PoolingParams)):
            what = "params must be SamplingParams or PoolingParams"
            raise TypeError(f"{where}: {what}, got {type(params).__name__}")
        tokens = prompt_ids(prompt, self.tokenizer)
        new = self._check_params(params)
        pools = isinstance(params, PoolingParams)
        check_prompt(tokens, self.max_model_len, self.vocab_size, room=not pools)
        if request_id is None:
            request_id = next(i for n in self._ids if (i := f"r{n}") not in self._requests)
        elif request_id in self._requests:
            raise ValueError(f"{where}: request_id must not be in use, got {request_id!r}")
        limit = len(tokens) + 1 if pools else min(len(tokens) + new, self.max_model_len)
        # The last token ends the request: it is never put into the cache.
        needed = -(-(limit - 1) // self.block_size)
        if needed > self._pool.num_blocks:
            raise CacheMemoryError(
                f"{where}: prompt and output must fit the cache of {self._pool.num_blocks * self.block_size} tokens,"
                f" got {len(tokens)} and up to {limit - len(tokens)}; ask for fewer, or give the engine more memory"
            )
        stream = None
        ends: frozenset[int] = frozenset()
        if isinstance(params, SamplingParams):
            if self.tokenizer is not None:
                stream = TextStream(
                    self.tokenizer,
                    params.stop,
                    tokens[-_TEXT_CONTEXT:],
                    params.include_stop,
                    params.skip_special_tokens,
                    self._texts[params.skip_special_tokens],
                )
            ends = frozenset() if params.ignore_eos else self.eos_token_ids
        request = Request(request_id, tokens, params, limit, ends, stream)
        if isinstance(params, SamplingParams) and params.lora is not None:
            request.adapter = self._loras.loaded[params.lora]
        if self.speculative_config is not None:
            request.speculation = Speculation(self.speculative_config)
        self._requests[request_id] = request
        self._scheduler.waiting.append(request)
        self._counts["prompt"] += len(tokens)
        return request_id

    def _check_params(self, params: SamplingParams | PoolingParams) -> int:
        """Check parameters against the model, and return how many tokens they ask for; 1 for a vector."""
        where = "Engine.add_request"
        if isinstance(params, PoolingParams):
            if params.token_types is not None:
                raise ValueError(f"{where}: token_types must be None for a decoder, got some")
            return 1
        if params.stop and self.tokenizer is None:
            raise ValueError(f"{where}: stop must be empty without a tokenizer, got {params.stop}")
        if params.lora is not None and params.lora not in self.loras:
            known = ", ".join(map(repr, self.loras)) or "none"
            raise ValueError(
                f"{where}: lora must be a loaded adapter ({known}), got {str(params.lora)[:200]!r}"
            )
        largest = max(params.logit_bias, default=0)
        if largest >= self.vocab_size:
            raise ValueError(
                f"{where}: logit_bias must have ids in [0, {self.vocab_size}), got {largest}"
            )
        return params.max_new_tokens

    # -- adapters ------------------------------------------------------------------------------------------------

    def load_lora(
        self,
        name: str,
        path: str | Path | LoadedAdapter,
        *,
        base_names: Iterable[str] | None = None,
    ) -> None:
        """Load a low-rank adapter, which requests name in `SamplingParams.lora`.

        Requests with several adapters and with none run in one batch.

        Args:
            name: A name of its own.
            path: Folder as peft writes it, or what `read_lora` returned.
            base_names: As for `read_lora`.

        Raises:
            TypeError: The name is no text.
            ValueError: The name is empty or in use, there are too many adapters, or see `read_lora`.
        """
        if not isinstance(name, str):
            got = type(name).__name__
            raise TypeError(f"Engine.load_lora: lora_name must be text, got {got}")
        if not name:
            raise ValueError("Engine.load_lora: lora_name must have a character, got none")
        adapter = path
        if not isinstance(adapter, LoadedAdapter):
            adapter = self.read_lora(adapter, base_names=base_names)
        self._loras.load(name, adapter, self._used_adapters())

    def read_lora(
        self, path: str | Path, *, base_names: Iterable[str] | None = None
    ) -> LoadedAdapter:
        """Read and check an adapter for `load_lora`; can be called in any thread.

        Args:
            path: Folder with ``adapter_config.json`` and ``adapter_model.safetensors``.
            base_names: Names of the base model; an adapter that names another one is refused. None: the name that
                the model's config has, if any. Empty: no such check.

        Raises:
            ValueError: It is no LoRA adapter of this model, or of a kind that is not supported.
        """
        if base_names is None:
            own = getattr(getattr(self._model, "config", None), "_name_or_path", None)
            base_names = [own] if own else []
        return read_adapter(
            *(self._model, self.runner, path), max_rank=self.max_lora_rank, base_names=base_names
        )

    def unload_lora(self, name: str) -> bool:
        """Drop an adapter. Requests that have it go on with it; new ones do not find it.

        Returns:
            False if there is no such adapter.
        """
        return self._loras.unload(name, self._used_adapters())

    @property
    def loras(self) -> Mapping[str, LoadedAdapter]:
        """The adapters by name; a mapping that does not change any more."""
        return self._loras.loaded

    def _used_adapters(self) -> list[LoadedAdapter]:
        return [r.adapter for r in self._requests.values() if r.adapter is not None]

    def cancel(self, request_id: str) -> bool:
        """End a request and free its blocks; the next step reports it with the reason ``"cancelled"``.

        Returns:
            False if there is no such request (any more).
        """
        request = self._requests.pop(request_id, None)
        if request is None:
            return False
        self._scheduler.remove(request)
        self._counts["cancelled"] += 1
        text = request.stream.finish() if request.stream else ""
        self._ended.append(StepOutput(request_id, (), text, True, "cancelled"))
        return True

    @property
    def has_work(self) -> bool:
        """Whether `step` has anything to do or to report."""
        return bool(self._requests or self._ended)

    # -- steps ---------------------------------------------------------------------------------------------------

    def step(self) -> list[StepOutput]:
        """Compute one batch.

        Returns:
            What is new, one entry for each request that got tokens or ended. May be empty although there is work: a
            long prompt takes several steps. A request whose logits are not finite ends with the reason ``"error"``;
            the others go on.

        Raises:
            StaleWeightsError: Weights or modules of the model changed since the engine was made.
            Exception: The model failed. Nothing has changed: the step can be repeated.
        """
        self._origin.check()
        outputs, self._ended = self._ended, []
        chosen = self._scheduler.plan()
        if not chosen:
            return outputs
        self._propose(chosen)
        chosen = self._ready(chosen)
        if not chosen:
            return outputs
        begun = time.monotonic()
        done: list[tuple[Request, Run]] = []
        pooled: list[Request] = []
        with torch.inference_mode(), self._restarting(chosen):
            found = [
                (pools, *self._forward(part, pools))
                for pools, long in itertools.product((False, True), repeat=2)
                if (
                    part := [
                        o for o in chosen if (o[0].pooling is not None, o[0].long) == (pools, long)
                    ]
                )
            ]
            late = self._late(chosen, time.monotonic() - begun)
            for pools, batch, rows in found:
                if pools:
                    self._gather(batch, rows)
                    pooled += batch.complete
                    continue
                complete = [r for r in batch.complete if r.id not in late]
                starts = list(
                    itertools.accumulate((1 + len(r.drafts) for r in batch.complete), initial=0)
                )
                at = starts[-1]
                if complete:
                    places = [
                        row
                        for r, start, end in zip(batch.complete, starts, starts[1:], strict=False)
                        if r.id not in late
                        for row in range(start, end)
                    ]
                    logits = rows if len(places) == len(rows) else rows[places]
                    done += zip(complete, verify(complete, logits), strict=True)
                for request, first, count in batch.scored:
                    if request.id not in late:
                        request.score(first, rows[at : at + count])
                    at += count
        # Only now, so that after an error the step can be done again.
        for request, count in chosen:
            if request.id not in late:  # its tokens are computed again
                self._scheduler.advance(request, count)
            elif self._states:  # from the first one on: the state has them already
                self._scheduler.restart(request)
        self._counts["steps"] += 1
        for request, run in done:
            outputs += self._extend(request, run)
        outputs += map(self._finish_pooled, pooled)
        if self._proposer is not None:
            for request, _ in chosen:
                self._scheduler.trim(request)
        return outputs

    @contextlib.contextmanager
    def _restarting(self, chosen: list[tuple[Request, int]]) -> Iterator[None]:
        """After an error let requests begin again if their states may have gone on."""
        try:
            yield
        except BaseException:
            if self._states:
                for request, _ in reversed(chosen):
                    self._scheduler.restart(request)
            raise

    def _guesses(self, request: Request) -> int:
        """Return how many tokens to guess for a request that runs."""
        config, state = self.speculative_config, request.speculation
        assert config is not None and state is not None
        most = config.disable_by_batch_size
        if most is not None and len(self._scheduler.running) > most:
            return 0
        # The mask that is being computed is for the place behind the last token alone.
        return 0 if request.mask is not None else state.acceptance.wanted(request.new_tokens)

    def _propose(self, chosen: list[tuple[Request, int]]) -> None:
        """Guess tokens for those that have room."""
        wanted = [(request, request.room) for request, _ in chosen if request.room]
        if self._proposer is None or not wanted:
            return
        with torch.inference_mode():
            self._proposer.propose(wanted)

    def _ready(self, chosen: list[tuple[Request, int]]) -> list[tuple[Request, int]]:
        """Note whose grammars are to be asked; leave out requests whose grammar is late still."""
        found = []
        waiting = []
        self._unmasked = []
        for request, count in chosen:
            if request.matcher is not None and count == request.missing:
                if request.mask is None:
                    self._unmasked.append(request)
                elif not request.mask.done():
                    waiting.append(request.mask)
                    continue
            found.append((request, count))
        if not found:
            wait(waiting, timeout=_PATIENCE, return_when=FIRST_COMPLETED)
        return found

    def _begin_masks(self) -> None:
        """Begin to find the tokens that grammars allow: just before the model, which lets other threads run."""
        wanted = [(r.matcher, r.drafts) for r in self._unmasked if r.matcher is not None]
        for request, mask in zip(self._unmasked, self._masks.fill(wanted), strict=True):
            request.mask = mask
        self._unmasked = []

    @staticmethod
    def _late(chosen: list[tuple[Request, int]], elapsed: float) -> set[str]:
        """Return the requests whose grammar takes longer than the others may wait, which is as long as the model."""
        masks = {r.id: r.mask for r, n in chosen if r.mask is not None and n == r.missing}
        if not masks:
            return set()
        others = any(request.id not in masks for request, _ in chosen)
        if not all(mask.done() for mask in masks.values()):
            wait(masks.values(), timeout=max(elapsed, _PATIENCE / 10) if others else _PATIENCE)
        for mask in masks.values():
            if mask.done():
                mask.result()  # raises what went wrong in it
        return {name for name, mask in masks.items() if not mask.done()}

    def _gather(self, batch: Batch, states: torch.Tensor) -> None:
        """Hand the states of the tokens of a batch to the requests that want vectors."""
        starts = batch.starts.tolist()
        for request, start, end in zip(batch.requests, starts, starts[1:], strict=False):
            request.pool(request.computed, states[start:end])

    def _finish_pooled(self, request: Request) -> StepOutput:
        """End a request for a vector."""
        vector = request.pooled()
        if not bool(vector.isfinite().all()):
            return self._fail(request)
        self._counts["cached"] += request.cached_tokens
        self._end(request)
        return StepOutput(request.id, (), "", True, "stop", vector=vector)

    def _end(self, request: Request) -> None:
        del self._requests[request.id]
        self._scheduler.remove(request)
        self._counts["finished"] += 1

    def _forward(
        self, chosen: list[tuple[Request, int]], states: bool
    ) -> tuple[Batch, torch.Tensor]:
        """Compute tokens of requests on the same side of the switch.

        Returns:
            The batch, and the logits of its rows, or the states of all its tokens.
        """
        batch = self._tables.batch(chosen)
        options: dict[str, Any] = {"states": True} if states else {}
        if self._scheduler.switch is not None:
            options["length"] = max(len(request.tokens) for request, _ in chosen)
        if self._states:
            rows = [request.row for request in batch.requests]
            options["state_rows"] = torch.tensor(rows, dtype=torch.int32)
        numbers = [self._loras.number(request.adapter) for request in batch.requests]
        adapters = adapters_of_rows(numbers, batch.starts)
        if adapters is not None:
            options["adapters"] = adapters
        self._begin_masks()
        result = self.runner.forward(
            self._cache,
            batch.tokens,
            batch.positions,
            batch.slots,
            batch.tables,
            batch.starts,
            batch.lengths,
            batch.rows,
            **options,
        )
        return batch, result

    def _fail(self, request: Request) -> StepOutput:
        """End a request that no token can be chosen for."""
        # Its keys and values may be as bad; a request with the same prompt computes them again.
        self._pool.hide(request.blocks)
        if self._snapshots is not None:
            self._snapshots.drop(request.keys)
        del self._requests[request.id]
        self._scheduler.remove(request)
        self._counts["failed"] += 1
        text = request.stream.finish() if request.stream else ""
        place = len(request.tokens)
        error = f"Engine.step: the logits after token {place} must be finite, got NaN or infinity"
        refused = None if request.matcher is None else request.matcher.error
        if refused is not None:
            error = f"Engine.step: {refused}"
        return StepOutput(
            request.id, (), text, True, "error", error=error, refused=refused is not None
        )

    def _extend(self, request: Request, run: Run) -> Iterator[StepOutput]:
        """Add tokens to a request, of which each but the last was a draft; yield what is new."""
        if request.drafts:
            drafted, accepted = len(request.drafts), len(run) - 1
            self._counts["drafts"] += 1
            self._counts["draft_tokens"] += drafted
            for place in range(accepted):
                self._accepted[place] += 1
            assert request.speculation is not None
            request.speculation.acceptance.note(request.new_tokens, drafted, accepted)
            request.drafts = []
        found: list[StepOutput] = []
        for token, logprobs in run:
            if token is None:
                if not found:
                    yield self._fail(request)
                break  # behind a draft: the next step finds out why
            if found:  # the token before was a draft, so it is in the cache
                self._scheduler.advance(request, 1)
            found.append(self._append(request, token, logprobs))
            if found[-1].finished:
                break
        yield from _merged(found)

    def _append(self, request: Request, token: int, logprobs: TokenLogprobs | None) -> StepOutput:
        """Add a token to a request, which may end it."""
        self._counts["generated"] += 1
        if request.first_token_at is None:
            request.first_token_at = time.monotonic()
            self._counts["cached"] += request.cached_tokens
        request.append(token)
        if logprobs is not None:
            request.logprobs.append(logprobs)
        reason = None
        matcher = request.matcher
        if matcher is not None:
            request.mask = None
            matcher.accept(token)
        ends = token in request.ends or token in request.params.stop_token_ids
        if ends or (matcher is not None and matcher.done):
            reason = "stop"
        elif len(request.tokens) >= request.limit:
            reason = "length"
        text = ""
        if request.stream is not None:
            # The token that stops is no part of the text.
            if ends:
                text = request.stream.finish()
            else:
                early = request.new_tokens <= request.params.min_new_tokens
                text = request.stream.add(token, reason is not None, early)
            if request.stream.stopped:
                reason = "stop"
        if reason is not None:
            self._end(request)
        first = request.new_tokens == 1
        return StepOutput(
            *(request.id, (token,), text, reason is not None, reason),
            () if logprobs is None else (logprobs,),
            prompt_logprobs=tuple(request.prompt_logprobs) if first else (),
            cached_tokens=request.cached_tokens if first else 0,
            queued=request.admitted - request.arrived if first else None,
        )

    def generate(
        self,
        prompts: Iterable[str | Sequence[int] | torch.Tensor],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[GenerationOutput]:
        """Run prompts to their ends, beside what the engine has already.

        Args:
            prompts: As for `add_request`.
            params: For all, or for each of them.

        Returns:
            The outputs in the order of the prompts.

        Raises:
            ValueError: The numbers of prompts and params differ.
            Exception: As `add_request`, before anything is computed.
        """
        prompts = list(prompts)
        if params is None or isinstance(params, SamplingParams):
            params = [params or SamplingParams()] * len(prompts)
        if len(params) != len(prompts):
            raise ValueError(
                f"Engine.generate: params must be one or {len(prompts)}, got {len(params)}"
            )
        ids: list[str] = []
        try:
            for prompt, each in zip(prompts, params, strict=True):
                ids.append(self.add_request(prompt, each))
        except BaseException:
            for request_id in ids:
                self.cancel(request_id)
            raise
        requests = {request_id: self._requests[request_id] for request_id in ids}
        texts: dict[str, list[str]] = {request_id: [] for request_id in ids}
        last: dict[str, StepOutput] = {}
        others: list[StepOutput] = []
        while len(last) < len(ids):
            for output in self.step():
                if output.request_id not in requests:
                    others.append(output)
                    continue
                texts[output.request_id].append(output.text)
                if output.finished:
                    last[output.request_id] = output
        self._ended += others
        return [
            GenerationOutput(
                request_id=request_id,
                prompt_tokens=request.prompt_length,
                cached_tokens=request.cached_tokens,
                tokens=tuple(request.tokens[request.prompt_length :]),
                text="".join(texts[request_id]),
                reason=last[request_id].reason or "",
                logprobs=tuple(request.logprobs),
                error=last[request_id].error,
                prompt_logprobs=tuple(request.prompt_logprobs),
            )
            for request_id, request in requests.items()
        ]

    def stream(
        self, prompt: str | Sequence[int] | torch.Tensor, params: SamplingParams | None = None
    ) -> Iterator[StepOutput]:
        """Run one prompt and yield its outputs as they come. Leaving the loop early cancels the request.

        The request is checked when the first output is asked for. Outputs of other requests are kept for `step`.
        """
        request_id = self.add_request(prompt, params)
        others: list[StepOutput] = []
        try:
            finished = False
            while not finished:
                for output in self.step():
                    if output.request_id == request_id:
                        finished = output.finished
                        yield output
                    else:
                        others.append(output)
        finally:
            if self.cancel(request_id):
                self._ended = [o for o in self._ended if o.request_id != request_id]
            self._ended += others

    def stats(self) -> EngineStats:
        """Return the numbers of this moment."""
        counts = self._counts
        return EngineStats(
            running=len(self._scheduler.running),
            waiting=len(self._scheduler.waiting),
            blocks=self._pool.num_blocks,
            blocks_held=self._pool.held,
            steps=counts["steps"],
            finished=counts["finished"],
            cancelled=counts["cancelled"],
            failed=counts["failed"],
            preemptions=self._scheduler.preemptions,
            evictions=self._pool.evictions,
            prompt_tokens=counts["prompt"],
            cached_tokens=counts["cached"],
            generated_tokens=counts["generated"],
            drafts=counts["drafts"],
            draft_tokens=counts["draft_tokens"],
            accepted_tokens=sum(self._accepted),
            accepted_at=tuple(self._accepted),
        )

    def forget_prefixes(self) -> None:
        """Keep no block for later requests, as after a change of the weights."""
        self._pool.forget()
        if self._snapshots is not None:
            self._snapshots.clear()


def _merged(outputs: list[StepOutput]) -> list[StepOutput]:
    """Return the outputs of one request in a step as one."""
    if len(outputs) < 2:
        return outputs
    last = outputs[-1]
    return [
        dataclasses.replace(
            last,
            tokens=tuple(token for output in outputs for token in output.tokens),
            text="".join(output.text for output in outputs),
            logprobs=tuple(entry for output in outputs for entry in output.logprobs),
            prompt_logprobs=outputs[0].prompt_logprobs,
            cached_tokens=outputs[0].cached_tokens,
            queued=outputs[0].queued,
        )
    ]

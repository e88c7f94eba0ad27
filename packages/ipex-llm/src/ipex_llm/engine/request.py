# SPDX-License-Identifier: Apache-2.0
"""The state of one request inside the engine."""

from __future__ import annotations

import secrets
import time

import torch

from ipex_llm.engine.params import SamplingParams, TokenLogprobs
from ipex_llm.engine.text import TextStream
from ipex_llm.kv_cache.blocks import block_key

__all__ = ["Request"]


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

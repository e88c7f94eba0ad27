# SPDX-License-Identifier: Apache-2.0
"""Which requests run in a step, and how many tokens of each."""

from __future__ import annotations

from collections import deque

from ipex_llm.engine.request import Request
from ipex_llm.kv_cache.blocks import BlockPool

__all__ = ["Scheduler"]


class Scheduler:
    """First come, first served, with a budget of tokens for each step.

    Requests that generate get their one token first, so that a long prompt delays no request by more than a step; what
    is left of the budget goes to prompts, in order, in pieces. A request that needs a block when no block is
    free takes the blocks of the request that came last. That request starts again later. Its full blocks are found
    again unless another request took them.

    Args:
        pool: The blocks.
        max_num_seqs: Most requests that run at the same time.
        max_tokens: Most tokens of a step, at least ``max_num_seqs``.
        switch: Length above which a sequence is computed in another way from its first token on; None: at no length.
    """

    def __init__(
        self, pool: BlockPool, max_num_seqs: int, max_tokens: int, switch: int | None = None
    ) -> None:
        self.pool = pool
        self.max_num_seqs = max_num_seqs
        self.max_tokens = max_tokens
        self.switch = switch
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.preemptions = 0
        self._rows = list(range(max_num_seqs - 1, -1, -1))

    def plan(self) -> list[tuple[Request, int]]:
        """Choose the requests of a step and take the blocks that they need.

        Returns:
            Requests with the number of tokens each computes now, at least 1.
        """
        if self.switch is not None:
            self._switch_lengths(self.switch)
        chosen: list[tuple[Request, int]] = []
        budget = self.max_tokens
        before = self.preemptions
        index = 0
        generating = sum(request.missing == 1 for request in self.running)
        while index < len(self.running):
            request = self.running[index]
            generating -= request.missing == 1
            count = min(request.missing, budget - generating)
            if count > 0 and self._make_room(request, count):
                chosen.append((request, count))
                budget -= count
            index += 1
        if self.preemptions == before:
            self._admit(chosen, budget)
        return chosen

    def _switch_lengths(self, switch: int) -> None:
        """Restart requests that are beyond the switch now."""
        for request in [*self.running, *self.waiting]:
            if not request.long and len(request.tokens) > switch:
                if request.row >= 0:
                    self._preempt(request)
                request.long = True
                request.keys.clear()

    def _make_room(self, request: Request, count: int) -> bool:
        """Take the blocks for ``count`` more tokens; return False if the request itself had to give way."""
        needed = -(-(request.computed + count) // self.pool.block_size) - len(request.blocks)
        while self.pool.available < needed:
            victim = self.running[-1]
            self._preempt(victim)
            if victim is request:
                return False
        request.blocks += [self.pool.take() for _ in range(needed)]
        return True

    def _preempt(self, request: Request) -> None:
        self.running.remove(request)
        self._give_back(request)
        request.preemptions += 1
        self.preemptions += 1
        self.waiting.appendleft(request)

    def _admit(self, chosen: list[tuple[Request, int]], budget: int) -> None:
        size = self.pool.block_size
        while self.waiting and len(self.running) < self.max_num_seqs and budget > 0:
            request = self.waiting[0]
            # The last token is always computed: its logits are needed.
            keys = request.extend_keys(size, len(request.tokens) - 1)
            found = self.pool.find(keys)
            fresh = -(-len(request.tokens) // size) - len(found)
            available = self.pool.available - sum(map(self.pool.is_kept, found))
            # One block more for each that runs: a request that is preempted at once has only cost time.
            if available < fresh + len(self.running):
                break
            self.waiting.popleft()
            self.pool.hold(found)
            request.blocks = found + [self.pool.take() for _ in range(fresh)]
            request.computed = len(found) * size
            if request.preemptions == 0:
                request.cached_tokens = request.computed
            request.row = self._rows.pop()
            request.written = 0
            self.running.append(request)
            count = min(request.missing, budget)
            chosen.append((request, count))
            budget -= count

    def advance(self, request: Request, count: int) -> None:
        """Note that ``count`` more tokens are in the cache, and let others find the blocks that are full."""
        size = self.pool.block_size
        full = request.computed // size
        request.computed += count
        keys = request.extend_keys(size, request.computed)
        for block, key in zip(request.blocks[full : len(keys)], keys[full:], strict=True):
            self.pool.publish(block, key)

    def _give_back(self, request: Request) -> None:
        self.pool.give_back(request.blocks)
        request.blocks = []
        request.computed = 0
        self._rows.append(request.row)
        request.row = -1

    def remove(self, request: Request) -> None:
        """Take a request out, whatever it does, and give up its blocks."""
        if request.row >= 0:
            self.running.remove(request)
            self._give_back(request)
        else:
            self.waiting.remove(request)

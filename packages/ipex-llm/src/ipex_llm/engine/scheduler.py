# SPDX-License-Identifier: Apache-2.0
"""Which requests run in a step, how many tokens of each, and which blocks of the cache they have."""

from __future__ import annotations

import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence

from ipex_llm.engine.request import Request
from ipex_llm.kv_cache import PagedCache

#: Most guessed tokens of a step: each has a row of logits, which takes memory with a large vocabulary.
_DRAFTS = 128
#: Blocks of a prompt for which a step of its own, up to their end, is worth a snapshot of the states.
_WORTH = 2
#: Blocks from one snapshot of an output to the next: a copy takes as long as reading the states in a step.
_APART = 4


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
        guesses: Returns how many tokens to guess for a request; None: no tokens are guessed.
        snapshots: States at the ends of blocks; None for a model without states, or without shared prefixes.
    """

    def __init__(
        self,
        pool: BlockPool,
        max_num_seqs: int,
        max_tokens: int,
        switch: int | None = None,
        guesses: Callable[[Request], int] | None = None,
        snapshots: StateSnapshots | None = None,
    ) -> None:
        self._snapshots = snapshots
        self._guesses = guesses
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
            count = self._piece(request, budget - generating)
            if count > 0 and self._make_room(request, count):
                chosen.append((request, count))
                budget -= count
            index += 1
        if self.preemptions == before:
            budget = self._admit(chosen, budget)
        if self._guesses is not None:
            self._make_room_for_drafts(chosen, budget)
        return chosen

    def _make_room_for_drafts(self, chosen: list[tuple[Request, int]], budget: int) -> None:
        """Take places for the tokens that can be guessed; no request gives way for them."""
        assert self._guesses is not None
        size = self.pool.block_size
        budget = min(budget, _DRAFTS)
        for request, count in chosen:
            request.room, request.drafts = 0, []
            if count != 1 or request.missing != 1 or request.new_tokens == 0:
                continue
            wanted = min(self._guesses(request), budget, request.limit - len(request.tokens) - 1)
            if self.switch is not None and not request.long:
                wanted = min(wanted, self.switch - len(request.tokens))
            # A block for each that runs stays free, as for those that come.
            free = max(self.pool.available - len(self.running), 0) + len(request.blocks)
            request.room = max(min(wanted, free * size - len(request.tokens)), 0)
            needed = -(-(len(request.tokens) + request.room) // size) - len(request.blocks)
            request.blocks += [self.pool.take() for _ in range(needed)]
            budget -= request.room

    def trim(self, request: Request) -> None:
        """Give up the blocks behind the tokens of a running request: the places of drafts that were wrong."""
        kept = -(-len(request.tokens) // self.pool.block_size)
        if request.row >= 0 and kept < len(request.blocks):
            self.pool.give_back(request.blocks[kept:])
            del request.blocks[kept:]
            request.written = min(request.written, kept)

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

    def restart(self, request: Request) -> None:
        """Let a running request begin again with its first token."""
        if request.row >= 0:
            self._preempt(request)

    def _preempt(self, request: Request) -> None:
        self.running.remove(request)
        self._give_back(request)
        request.preemptions += 1
        self.preemptions += 1
        self.waiting.appendleft(request)

    def _admit(self, chosen: list[tuple[Request, int]], budget: int) -> int:
        """Begin requests that wait; return what is left of the budget."""
        size = self.pool.block_size
        while self.waiting and len(self.running) < self.max_num_seqs and budget > 0:
            request = self.waiting[0]
            # The last token is always computed: its logits are needed.
            keys = request.extend_keys(size, len(request.tokens) - 1)
            found = self.pool.find(() if request.whole else keys)
            if self._snapshots is not None:
                while found and keys[len(found) - 1] not in self._snapshots:
                    found.pop()
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
                request.admitted = time.monotonic()
                request.cached_tokens = request.computed
            request.row = self._rows.pop()
            request.written = 0
            self.running.append(request)
            if found and self._snapshots is not None:
                self._snapshots.restore(keys[len(found) - 1], request.row)
            count = self._piece(request, budget)
            chosen.append((request, count))
            budget -= count
        return budget

    def _piece(self, request: Request, budget: int) -> int:
        """Return how many tokens of a request to compute now; a long prompt stops at its last full block."""
        count = min(request.missing, budget, request.most)
        end = self._last_end(request)
        worth = self._snapshots is not None and end >= _WORTH * self.pool.block_size
        if worth and request.computed < end < request.computed + count:
            return end - request.computed
        return count

    def _last_end(self, request: Request) -> int:
        """Return where the last full block before the last token ends."""
        size = self.pool.block_size
        return (len(request.tokens) - 1) // size * size

    def _keep_state(self, request: Request, key: bytes) -> None:
        """Keep the state at the end of a prompt's last full block, and the latest one of what is generated."""
        if self._snapshots is None:
            return
        if not request.new_tokens:
            if request.computed != self._last_end(request):
                return
        else:
            if request.computed % (_APART * self.pool.block_size):
                return
            if request.snapshot is not None:
                self._snapshots.drop([request.snapshot])
            request.snapshot = key
        self._snapshots.keep(key, request.row)

    def advance(self, request: Request, count: int) -> None:
        """Note that ``count`` more tokens are in the cache, and let others find the blocks that are full."""
        size = self.pool.block_size
        full = request.computed // size
        request.computed += count
        if request.computed // size == full:
            return
        keys = request.extend_keys(size, request.computed)
        for block, key in zip(request.blocks[full : len(keys)], keys[full:], strict=True):
            self.pool.publish(block, key)
        if request.computed % size == 0:
            self._keep_state(request, keys[-1])

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


# -- Which blocks of the cache belong to whom, and which hold a prefix that another request can use


class BlockPool:
    """Reference counts of the blocks, and the full ones by the prefix that they end.

    A block is in one of three states: held (by one or more requests), kept (held by none, but full and found by its
    key), or free. A new block is a free one, or else the kept one that was given up first.

    Args:
        num_blocks: Number of blocks, at least 1.
        block_size: Tokens in a block.
        reuse: Whether full blocks are kept and found.
    """

    def __init__(self, num_blocks: int, block_size: int, reuse: bool = True) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.reuse = reuse
        self._free = list(range(num_blocks - 1, -1, -1))
        self._holders = [0] * num_blocks
        self._key_of: dict[int, bytes] = {}
        self._block_of: dict[bytes, int] = {}
        self._kept: OrderedDict[int, None] = OrderedDict()
        self.evictions = 0

    @property
    def available(self) -> int:
        """Blocks that `take` can give out."""
        return len(self._free) + len(self._kept)

    @property
    def held(self) -> int:
        """Blocks of requests."""
        return self.num_blocks - self.available

    def take(self) -> int:
        """Return a block, held once. The caller has asked `available`."""
        if self._free:
            block = self._free.pop()
        else:
            block, _ = self._kept.popitem(last=False)
            del self._block_of[self._key_of.pop(block)]
            self.evictions += 1
        self._holders[block] = 1
        return block

    def find(self, keys: Iterable[bytes]) -> list[int]:
        """Return the blocks of the first keys that are there. Nothing is held by that."""
        found = []
        for key in keys:
            block = self._block_of.get(key)
            if block is None:
                break
            found.append(block)
        return found

    def hold(self, blocks: Iterable[int]) -> None:
        """Hold blocks once more."""
        for block in blocks:
            if self._holders[block] == 0:
                del self._kept[block]
            self._holders[block] += 1

    def is_kept(self, block: int) -> bool:
        """Return whether a block counts as `available`."""
        return block in self._kept

    def publish(self, block: int, key: bytes) -> None:
        """Let others find a full block. Does nothing if another one has the same tokens."""
        if self.reuse and key not in self._block_of and block not in self._key_of:
            self._key_of[block] = key
            self._block_of[key] = block

    def hide(self, blocks: Iterable[int]) -> None:
        """Make blocks with useless contents impossible to find; a holder keeps them."""
        for block in blocks:
            key = self._key_of.pop(block, None)
            if key is not None:
                del self._block_of[key]

    def give_back(self, blocks: Sequence[int]) -> None:
        """Give up blocks of one request, in its order: the last ones, which end a prefix, are reused first."""
        for block in reversed(blocks):
            self._holders[block] -= 1
            if self._holders[block] == 0:
                if block in self._key_of:
                    self._kept[block] = None
                else:
                    self._free.append(block)

    def forget(self) -> None:
        """Free all kept blocks, as after a change of the weights. Held ones are no longer found."""
        self._free += self._kept
        self._kept.clear()
        self._key_of.clear()
        self._block_of.clear()


# -- States of recurrent layers at the ends of blocks, by which prefixes are found again


class StateSnapshots:
    """States behind prefixes of texts, by the key of the block that ends the prefix.

    A key stands for all tokens of the prefix, so a snapshot stays true when the block is computed again. The one that
    was used least recently gives way to a new one.

    Args:
        cache: Has the states of requests and, behind them, rows for snapshots.
        first: The first row for snapshots.
        count: Number of rows for snapshots, at least 1.
    """

    def __init__(self, cache: PagedCache, first: int, count: int) -> None:
        self._cache = cache
        self._free = list(range(first + count - 1, first - 1, -1))
        self._rows: OrderedDict[bytes, int] = OrderedDict()

    def __len__(self) -> int:
        return len(self._rows)

    def __contains__(self, key: bytes) -> bool:
        return key in self._rows

    def keep(self, key: bytes, row: int) -> None:
        """Copy the state in a row of a request; does nothing if there is one with this key."""
        if key in self._rows:
            self._rows.move_to_end(key)
            return
        if not self._free:
            self._free.append(self._rows.popitem(last=False)[1])
        self._rows[key] = self._free.pop()
        self._cache.copy_states([row], [self._rows[key]])

    def restore(self, key: bytes, row: int) -> None:
        """Give a request the state behind a prefix.

        Raises:
            KeyError: No snapshot has this key.
        """
        self._cache.copy_states([self._rows[key]], [row])
        self._rows.move_to_end(key)

    def drop(self, keys: Iterable[bytes]) -> None:
        """Forget the snapshots with these keys."""
        for key in keys:
            row = self._rows.pop(key, None)
            if row is not None:
                self._free.append(row)

    def clear(self) -> None:
        """Forget all snapshots."""
        self.drop(list(self._rows))

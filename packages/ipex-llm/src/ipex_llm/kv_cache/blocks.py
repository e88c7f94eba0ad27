# SPDX-License-Identifier: Apache-2.0
"""Which blocks of the cache belong to whom, and which hold a prefix that another request can use."""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence

__all__ = ["BlockPool", "block_key"]


def block_key(before: bytes, tokens: Sequence[int]) -> bytes:
    """Return the key of a full block: a digest of its tokens and, through ``before``, of all tokens in front of them.

    Long enough that two different prefixes do not meet in practice, by accident or by intent: what is found under a
    key is used without another look at the tokens.
    """
    return hashlib.blake2b(before + array("q", tokens).tobytes(), digest_size=16).digest()


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

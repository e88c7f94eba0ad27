# SPDX-License-Identifier: Apache-2.0
"""Copies of the states of recurrent layers at the ends of blocks, by which prefixes are found again."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from ipex_llm.kv_cache import PagedCache


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
            KeyError: There is none.
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

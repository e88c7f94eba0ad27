# SPDX-License-Identifier: Apache-2.0
"""Who gets what: how heads and features are divided among ranks."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from ipex_core.errors import OpArgumentError
from ipex_llm.distributed.checkpoint import split_range, split_sizes

__all__ = ["HeadRange", "split_features", "split_heads"]

#: Features that should stay together: kernels work on so many columns at a time.
GRAINS = (64, 32, 8, 1)


@dataclasses.dataclass(frozen=True, slots=True)
class HeadRange:
    """Heads of a rank: query heads ``[query, query_end)``, and key/value heads likewise."""

    query: int
    query_end: int
    kv: int
    kv_end: int

    @property
    def heads(self) -> int:
        """Number of query heads."""
        return self.query_end - self.query

    @property
    def kv_heads(self) -> int:
        """Number of key/value heads."""
        return self.kv_end - self.kv


def split_heads(heads: int, kv_heads: int, rank: int, ranks: int) -> HeadRange:
    """Return the heads of a rank.

    A rank has whole groups (a key/value head with its query heads), the first ranks one more where they do not divide.
    If there are more ranks than groups, several ranks have the same key/value head and parts of its query heads:
    8 heads in 2 groups on 3 ranks are 4, 2 and 2.

    Raises:
        ValueError: There are fewer heads than ranks, so that one would have none; or groups are not alike.

    Example:
        >>> [split_heads(8, 4, rank, 3).heads for rank in range(3)]
        [4, 2, 2]
    """
    if heads % kv_heads:
        raise OpArgumentError(
            f"optimize: heads must be a multiple of kv_heads = {kv_heads}, got {heads}"
        )
    if ranks > heads:
        raise OpArgumentError(
            f"optimize: tp_group must have at most as many ranks as the model has heads = {heads}, got {ranks}:"
            " a head cannot be divided"
        )
    group = heads // kv_heads
    if ranks <= kv_heads:
        first, last = split_range(kv_heads, rank, ranks)
        return HeadRange(first * group, last * group, first, last)
    # Ranks of each group; the first groups have fewer, so that the first ranks have more, as above.
    sharing = sorted(split_sizes(ranks, kv_heads))
    for kv, members in enumerate(sharing):
        if rank < members:
            first, last = split_range(group, rank, members)
            if first == last:
                break
            return HeadRange(kv * group + first, kv * group + last, kv, kv + 1)
        rank -= members
    raise OpArgumentError(
        f"optimize: tp_group must leave a query head to each rank, got {ranks} ranks for {kv_heads} key/value heads"
        f" with {group} query heads each"
    )


def split_features(
    size: int, rank: int, ranks: int, what: str, grains: Sequence[int] = GRAINS
) -> tuple[int, int]:
    """Return the first feature of a rank and the one after its last.

    Args:
        size: Number of features.
        rank: The rank.
        ranks: Number of ranks.
        what: What has these features, for the message.
        grains: Numbers of features that stay together; the first that leaves a piece for each rank is taken.

    Raises:
        ValueError: No grain leaves a piece for each rank.

    Example:
        >>> split_features(96, 0, 2, "mlp"), split_features(96, 1, 2, "mlp")
        ((0, 64), (64, 96))
    """
    for grain in grains:
        if size % grain == 0 and size // grain >= ranks:
            first, last = split_range(size // grain, rank, ranks)
            return first * grain, last * grain
    raise OpArgumentError(
        f"optimize: tp_group must have at most as many ranks as {what} has pieces, got {ranks} ranks for {size}"
        f" features in pieces of {grains[-1]}"
    )

# SPDX-License-Identifier: Apache-2.0
"""The tokens of a batch as rows, with or without padding, and the groups of sequences that attention works on."""

from __future__ import annotations

import dataclasses

import torch

__all__ = ["Group", "Tokens", "padded", "unpadded"]

Tensor = torch.Tensor

#: A group holds sequences at least this share as long as its longest one.
_ALIKE = 0.75
#: Streams of random numbers that a block may use: one for each group.
MOST_GROUPS = 16


@dataclasses.dataclass
class Group:
    """Sequences that attention treats together, padded to the longest one.

    Attributes:
        count: Number of sequences.
        length: Tokens of each, padding included.
        rows: ``[count * length]`` int64: the row of each token; padding has any row. None: all rows, in order.
        padding: int64 places of padding in ``rows``, or None.
        mask: float32 ``[count, 1, 1, length]``, added to scores, or None.
    """

    count: int
    length: int
    rows: Tensor | None = None
    padding: Tensor | None = None
    mask: Tensor | None = None

    def take(self, x: Tensor) -> Tensor:
        """Return the rows of the group, ``[count * length, C]``."""
        return x if self.rows is None else x.index_select(0, self.rows)

    def take_gradient(self, x: Tensor) -> Tensor:
        """Return the rows of the group; padding rows are zero."""
        taken = self.take(x)
        return taken if self.padding is None else taken.index_fill_(0, self.padding, 0.0)


@dataclasses.dataclass
class Tokens:
    """How the rows belong to a batch.

    Attributes:
        shape: Batch and length of the padded input.
        groups: The sequences.
        index: int64: place of each row in the padded batch, ``batch * length + position``. None: there is a row for
            each place.
        inverse: int64: place of each row in the rows of all groups behind each other. None: the same order.
    """

    shape: tuple[int, int]
    groups: list[Group]
    index: Tensor | None = None
    inverse: Tensor | None = None

    def gather(self, outputs: list[Tensor]) -> Tensor:
        """Return one row for each token from what groups computed."""
        if self.inverse is None:
            return outputs[0]
        return torch.cat(outputs).index_select(0, self.inverse)

    def pack(self, x: Tensor) -> Tensor:
        """Return the rows of ``[batch, length, ...]``."""
        rows = x.reshape(-1, *x.shape[2:])
        return rows if self.index is None else rows.index_select(0, self.index)

    def unpack(self, rows: Tensor) -> Tensor:
        """Return ``[batch, length, C]``, zero where there was padding."""
        batch, length = self.shape
        if self.index is not None:
            full = rows.new_zeros(batch * length, rows.shape[-1])
            rows = full.index_copy(0, self.index, rows)
        return rows.view(batch, length, rows.shape[-1])


def padded(shape: tuple[int, int], mask: Tensor | None) -> Tokens:
    """Keep padding; ``mask`` is ``[batch, length]``, 0 for tokens that are not attended to."""
    added = None
    if mask is not None and not bool(mask.all()):
        lowest = torch.finfo(torch.float32).min
        added = torch.zeros(mask.shape).masked_fill_(mask == 0, lowest)[:, None, None]
    return Tokens(shape, [Group(*shape, mask=added)])


def unpadded(shape: tuple[int, int], mask: Tensor | None) -> Tokens:
    """Leave out the tokens whose mask is 0."""
    if mask is None or bool(mask.all()):
        return padded(shape, None)
    present = mask != 0
    index = present.reshape(-1).nonzero().squeeze(1)
    lengths = present.sum(1)
    starts = lengths.cumsum(0) - lengths
    groups = []
    inverse = torch.empty_like(index)
    begin = 0
    for members in _alike(lengths.tolist()):
        chosen = torch.tensor(members)
        longest = int(lengths[chosen].max())
        place = torch.arange(longest)
        inside = place < lengths[chosen, None]  # [count, longest]
        rows = torch.where(inside, starts[chosen, None] + place, 0).reshape(-1)
        missing = (~inside).reshape(-1).nonzero().squeeze(1)
        group = Group(len(members), longest, rows)
        if missing.numel():
            group.padding = missing
            lowest = torch.finfo(torch.float32).min
            group.mask = torch.zeros(inside.shape).masked_fill_(~inside, lowest)[:, None, None]
        kept = inside.reshape(-1).nonzero().squeeze(1)
        inverse[rows[kept]] = kept + begin
        begin += rows.numel()
        groups.append(group)
    return Tokens(shape, groups, index, inverse)


def _alike(lengths: list[int]) -> list[list[int]]:
    """Return the numbers of the sequences that are not empty, in groups of similar lengths."""
    order = sorted((i for i, n in enumerate(lengths) if n), key=lambda i: -lengths[i])
    groups: list[list[int]] = []
    for i in order:
        if groups and (lengths[i] >= _ALIKE * lengths[groups[-1][0]] or len(groups) == MOST_GROUPS):
            groups[-1].append(i)
        else:
            groups.append([i])
    return groups

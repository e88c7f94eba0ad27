# SPDX-License-Identifier: Apache-2.0
"""The arguments of one forward pass for the requests of a step."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch

from ipex_llm.engine.request import Request

__all__ = ["Batch", "BlockTables"]

Tensor = torch.Tensor


@dataclasses.dataclass(frozen=True, slots=True)
class Batch:
    """What `Runner.forward` takes, and the requests whose last token is in it.

    Attributes:
        tokens: int64 ``[T]``, of all requests back to back; `positions` and `slots` belong to them.
        tables: int32 ``[B, M]`` blocks of each request, the rest zero.
        starts: int32 ``[B + 1]``.
        lengths: int32 ``[B]``: tokens in the cache after the pass.
        rows: int64 ``[R]`` places of tokens whose logits are needed, None for the last one of each request.
        complete: The R requests.
    """

    tokens: Tensor
    positions: Tensor
    slots: Tensor
    tables: Tensor
    starts: Tensor
    lengths: Tensor
    rows: Tensor | None
    complete: list[Request]


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
        if request.written < len(blocks):
            fresh = torch.tensor(blocks[request.written :], dtype=torch.int32)
            self._table[request.row, request.written : len(blocks)] = fresh
            request.written = len(blocks)

    def batch(self, chosen: Sequence[tuple[Request, int]]) -> Batch:
        """Return the arguments for requests with the number of tokens each computes."""
        size = self._block_size
        tokens: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        starts, lengths, rows = [0], [], []
        complete = []
        for request, count in chosen:
            self._update(request)
            first, last = request.computed, request.computed + count
            tokens += request.tokens[first:last]
            positions += range(first, last)
            blocks = request.blocks
            slots += [blocks[at // size] * size + at % size for at in range(first, last)]
            starts.append(len(tokens))
            lengths.append(last)
            if last == len(request.tokens):
                rows.append(len(tokens) - 1)
                complete.append(request)
        width = -(-max(lengths) // size)
        order = torch.tensor([request.row for request, _ in chosen])
        # Behind the blocks of a short request lie zeros or blocks of its row's last user: not read, but valid.
        return Batch(
            tokens=torch.tensor(tokens),
            positions=torch.tensor(positions),
            slots=torch.tensor(slots),
            tables=self._table[order, :width],
            starts=torch.tensor(starts, dtype=torch.int32),
            lengths=torch.tensor(lengths, dtype=torch.int32),
            rows=None if len(rows) == len(chosen) else torch.tensor(rows, dtype=torch.int64),
            complete=complete,
        )

# SPDX-License-Identifier: Apache-2.0
"""Each rank sends each other rank some rows: over whatever a backend of `torch.distributed` can do."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

__all__ = ["exchange"]

Tensor = torch.Tensor
_Way = Callable[[Tensor, Sequence[int], Sequence[int], "dist.ProcessGroup | None"], Tensor]

#: How rows are exchanged in each group, found by trying.
_ways: weakref.WeakKeyDictionary[dist.ProcessGroup, _Way] = weakref.WeakKeyDictionary()


def exchange(
    rows: Tensor, sent: Sequence[int], received: Sequence[int], group: dist.ProcessGroup | None
) -> Tensor:
    """Return the rows that the other ranks sent here, those of rank 0 first.

    Args:
        rows: ``[sum(sent), ...]``, those for rank 0 first.
        sent: For each rank how many rows it gets.
        received: For each rank how many rows it sends here.
        group: None: the default group.

    Returns:
        ``[sum(received), ...]`` in the dtype of ``rows``.

    Raises:
        RuntimeError: A rank is gone, or did not come within the timeout of the group.
    """
    key = group or dist.group.WORLD
    assert key is not None
    if key not in _ways:
        _ways[key] = _find_way(rows.device, group)
    # As bytes: backends differ in the dtypes they know.
    width = rows[:1].numel() * rows.element_size() if rows.shape[0] else _row_bytes(rows)
    flat = rows.contiguous().view(-1).view(torch.uint8)
    got = _ways[key](flat, [n * width for n in sent], [n * width for n in received], group)
    return got.view(rows.dtype).view(sum(received), *rows.shape[1:])


def _row_bytes(rows: Tensor) -> int:
    return rows.shape[1:].numel() * rows.element_size()


def _find_way(device: torch.device, group: dist.ProcessGroup | None) -> _Way:
    """Return the first way that works; a backend refuses what it cannot do on all ranks at once."""
    ranks = dist.get_world_size(group)
    one = [1] * ranks
    refused = []
    for way in (_at_once, _by_list, _by_gathering):
        try:
            way(torch.zeros(ranks, dtype=torch.uint8, device=device), one, one, group)
        except (RuntimeError, NotImplementedError, ValueError) as error:
            # Only what was never sent: a rank that is gone must not send the others another way.
            if not _is_refusal(str(error)):
                raise
            refused.append(str(error))
            continue
        return way
    raise RuntimeError(f"the backend of the group can neither exchange nor gather rows: {refused}")


def _is_refusal(text: str) -> bool:
    return any(word in text.lower() for word in ("support", "not implement", "no backend"))


def _at_once(
    rows: Tensor, sent: Sequence[int], received: Sequence[int], group: dist.ProcessGroup | None
) -> Tensor:
    result = rows.new_empty(sum(received))
    dist.all_to_all_single(result, rows, list(received), list(sent), group=group)
    return result


def _by_list(
    rows: Tensor, sent: Sequence[int], received: Sequence[int], group: dist.ProcessGroup | None
) -> Tensor:
    result = rows.new_empty(sum(received))
    dist.all_to_all(list(result.split(list(received))), list(rows.split(list(sent))), group=group)
    return result


def _by_gathering(
    rows: Tensor, sent: Sequence[int], received: Sequence[int], group: dist.ProcessGroup | None
) -> Tensor:
    """Every rank gets everything, padded to one size, and takes its part."""
    ranks, own = dist.get_world_size(group), dist.get_rank(group)
    counts = rows.new_empty(ranks * ranks, dtype=torch.int64)
    mine = torch.tensor(list(sent), dtype=torch.int64, device=rows.device)
    dist.all_gather(list(counts.split(ranks)), mine, group=group)
    table = counts.view(ranks, ranks)
    most = int(table.sum(1).max())
    padded = rows.new_zeros(most)
    padded[: rows.shape[0]] = rows
    everything = [torch.empty_like(padded) for _ in range(ranks)]
    dist.all_gather(everything, padded, group=group)
    starts = table.cumsum(1) - table
    parts = [
        whole[int(starts[r, own]) : int(starts[r, own] + table[r, own])]
        for r, whole in enumerate(everything)
    ]
    return torch.cat(parts)

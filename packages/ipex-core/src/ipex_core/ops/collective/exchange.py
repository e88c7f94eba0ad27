# SPDX-License-Identifier: Apache-2.0
"""Memory that the processes of one host share to exchange tensors.

One buffer of bytes per group, mapped by each of its ranks (`ipex_core.distributed` makes it). It holds 64-byte lines
of 64-bit integers, so that no two ranks write to the same cache line, and behind them two slots for each rank:

========================  =======================================================================
line 0                    magic, number of ranks, bytes of a slot, 0 or 1 + a rank that was waited for in vain
line 1 + rank             exchanges this rank has entered, and what it brought to the odd and even ones of them
slots                     ``[2][ranks][slot_bytes]``: data of the even exchanges, data of the odd ones
========================  =======================================================================

An exchange: write the own slot, count up the own line, wait until all lines have the same count, read all slots. A
rank enters exchange ``n + 2``, which uses the slots of exchange ``n`` again, only after all have entered ``n + 1`` and
so have done with ``n``: one wait per exchange is enough.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import torch

from ipex_core.library.spec import check, dtype_name

__all__ = ["MAGIC", "MOST_RANKS", "SLOT_BYTES", "SharedBuffer", "buffer_bytes", "format_buffer"]

Tensor = torch.Tensor

MAGIC = 0x49504558_53484D31
LINE = 64
_LINE_WORDS = LINE // 8

#: Most ranks of a group.
MOST_RANKS = 64

#: Slots hold a message of this size; longer ones go in pieces, which still fit the second-level cache.
SLOT_BYTES = 256 * 1024

_SPINS = 200
_SLEEP = 50e-6

#: Codes of dtypes in the note of what a rank brings; the native ops write the same.
_CODES = {torch.float32: 1, torch.bfloat16: 2, torch.float16: 3}


def buffer_bytes(ranks: int, slot_bytes: int = SLOT_BYTES) -> int:
    """Return the size of the buffer of a group."""
    return LINE * (1 + ranks) + 2 * ranks * slot_bytes


def format_buffer(memory: Tensor, ranks: int, slot_bytes: int = SLOT_BYTES) -> None:
    """Write the first line of a buffer of zeros; by one rank, before another one uses it."""
    words = memory[:LINE].view(torch.int64)
    words[:4] = torch.tensor([MAGIC, ranks, slot_bytes, 0])


class SharedBuffer:
    """A rank's view of the buffer, in plain PyTorch: what the native ops do, slower.

    Args:
        op: Name in messages.
        memory: The buffer, uint8.
        rank: The own rank.

    Raises:
        OpArgumentError: The memory is not such a buffer, or the rank not one of it.
    """

    def __init__(self, op: str, memory: Tensor, rank: int) -> None:
        self.op = op
        words = memory[:LINE].view(torch.int64) if memory.numel() >= LINE else None
        known = words is not None and int(words[0]) == MAGIC
        found = [] if words is None else words[:4].tolist()
        if known:
            _, self.ranks, self.slot_bytes, _ = found
            known = 0 < self.ranks <= MOST_RANKS and memory.numel() == buffer_bytes(
                self.ranks, self.slot_bytes
            )
        check(known, op, "memory", "be the shared memory of a group", f"{memory.numel()} bytes")
        check(0 <= rank < self.ranks, op, "rank", f"be in [0, {self.ranks})", rank)
        self.rank = rank
        self.lines = memory[: LINE * (1 + self.ranks)].view(torch.int64).view(-1, _LINE_WORDS)
        self.slots = memory[LINE * (1 + self.ranks) :].view(2, self.ranks, self.slot_bytes)

    def exchange(self, mine: Tensor, note: int, timeout: float) -> Tensor:
        """Give ``mine`` (1-D, at most a slot) to all and return the slots ``[ranks, slot_bytes]`` of all, uint8.

        What is returned is valid until the next call.

        Args:
            mine: Contiguous.
            note: What all ranks must agree about.
            timeout: Seconds until a rank that is not there is given up.

        Raises:
            RuntimeError: A rank is missing.
            OpArgumentError: A rank came with another note.
        """
        count = int(self.lines[1 + self.rank, 0]) + 1
        parity = count % 2
        data = mine.view(torch.uint8)
        self.slots[parity, self.rank, : data.numel()] = data
        self.lines[1 + self.rank, 1 + parity] = note
        self.lines[1 + self.rank, 0] = count
        self._wait(count, timeout)
        notes = self.lines[1:, 1 + parity].tolist()
        other = next((rank for rank, one in enumerate(notes) if one != note), None)
        check(
            other is None,
            self.op,
            "x",
            "have the same size and dtype on all ranks",
            f"{_note_text(notes[other or 0])} on rank {other} and {_note_text(note)} on rank {self.rank}",
        )
        return self.slots[parity]

    def _wait(self, count: int, timeout: float) -> None:
        spins, end = 0, 0.0
        while True:
            behind = (self.lines[1:, 0] < count).nonzero()
            if not behind.numel():
                return
            failed = int(self.lines[0, 3])
            if failed:
                raise RuntimeError(
                    f"{self.op}: rank {failed - 1} of {self.ranks} is missing: another rank waited for it until its"
                    " timeout; all ranks must make the same calls"
                )
            spins += 1
            if spins < _SPINS:
                continue
            end = end or time.monotonic() + timeout
            if time.monotonic() > end:
                missing = int(behind[0])
                self.lines[0, 3] = 1 + missing
                raise RuntimeError(
                    f"{self.op}: rank {missing} of {self.ranks} did not arrive within {timeout:g} s:"
                    " it has ended, hangs or called something else; all ranks must make the same calls"
                )
            time.sleep(_SLEEP)


def note_of(size: int, dtype: torch.dtype, kind: int) -> int:
    """Return what the ranks of a call must agree about as one number; ``kind`` tells ops apart."""
    return size * 64 + _CODES.get(dtype, 0) * 8 + kind


def _note_text(note: int) -> str:
    names = {code: dtype_name(dtype) for dtype, code in _CODES.items()}
    op = "all_gather_columns" if note % 8 else "all_reduce_"
    return f"{note // 64} elements of {names.get(note // 8 % 8, 'unknown')} to {op}"


def pieces(size: int, slot_bytes: int, itemsize: int) -> Iterator[tuple[int, int]]:
    """Yield the ranges of elements that fit a slot; one empty range if there is no element."""
    step = slot_bytes // itemsize
    for begin in range(0, max(size, 1), step):
        yield begin, min(size, begin + step)

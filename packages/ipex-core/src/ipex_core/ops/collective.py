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

import math
import time
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from ipex_core.library.checks import (
    check_device,
    check_dtype_in,
    check_not_expanded,
    check_tensor,
    randn,
    strided,
)
from ipex_core.library.kernels import LIBRARY, define, register_op
from ipex_core.library.spec import Arguments, Sample, check, dtype_name

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


# --- the ops ----------------------------------------------------------------------------------------------------------


#: Of samples: in them all other ranks are there.
_SOON = 0.5

#: Most columns of a rank.
_MOST = 2**31 - 1


def _sum_over_backend(x: Tensor, group: str) -> Tensor:
    """Return the float32 sum of ``x`` over a group of torch.distributed, named as functional collectives do."""
    import torch.distributed  # (defines them)

    total = torch.ops._c10d_functional.all_reduce(x.float().contiguous(), "sum", group)
    result: Tensor = torch.ops._c10d_functional.wait_tensor(total)
    return result


# Kernels call it too: the stable ABI of torch has no way to name a group.
define("_sum_over_backend(Tensor x, str group) -> Tensor")
LIBRARY.impl("_sum_over_backend", _sum_over_backend, "CompositeExplicitAutograd")


def _all_reduce_(
    x: Tensor, memory: Tensor | None, rank: int, timeout: float = 1800.0, group: str = ""
) -> None:
    """Replace ``x`` on each rank of a group by the sum over all ranks.

    The sum is computed in float32 in the order of the ranks and rounded once, by each rank for itself: all get the
    same bits, whatever the number of threads. Each rank of the group must call with an ``x`` of the same size and
    dtype. With ``memory``, the ranks are processes of one host and exchange their data there.

    Args:
        x: Any shape; float32, bfloat16 or float16; written.
        memory: Shared memory of the group (uint8, from `ipex_core.distributed`), written; None: the backend that
            ``group`` has does the work.
        rank: Own rank in the group.
        timeout: Seconds to wait for the other ranks, positive.
        group: Name of the group in torch.distributed, where ``memory`` is None.

    Raises:
        RuntimeError: A rank did not arrive in time (the message names it), or sizes or dtypes differ.
    """
    if memory is None:
        x.copy_(_sum_over_backend(x, group))
        return
    buffer = SharedBuffer("all_reduce_", memory, rank)
    flat = x.contiguous().view(-1)
    size, width = flat.numel(), x.dtype.itemsize
    for begin, end in pieces(size, buffer.slot_bytes, width):
        slots = buffer.exchange(flat[begin:end], note_of(size, x.dtype, 0), timeout)
        parts = slots[:, : (end - begin) * width].view(x.dtype)
        total = parts[0].float()
        for part in parts[1:]:
            total = total + part
        flat[begin:end] = total
    if not x.is_contiguous():
        x.copy_(flat.view(x.shape))


def _all_gather_columns(
    x: Tensor,
    sizes: Sequence[int],
    memory: Tensor | None,
    rank: int,
    timeout: float = 1800.0,
    group: str = "",
) -> Tensor:
    """Return the columns of all ranks of a group side by side.

    Each rank of the group must call with the same leading dimensions, dtype and ``sizes``; the numbers of columns may
    differ, and be 0.

    Args:
        x: ``[..., sizes[rank]]``, float32, bfloat16 or float16.
        sizes: Columns of each rank.
        memory: Shared memory of the group (uint8), written; None: as in `all_reduce_`.
        rank: Own rank in the group.
        timeout: Seconds to wait for the other ranks, positive.
        group: Name of the group in torch.distributed, where ``memory`` is None.

    Returns:
        ``[..., sum(sizes)]``, in the dtype of ``x``.

    Raises:
        RuntimeError: A rank did not arrive in time (the message names it), or shapes or dtypes differ.
    """
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    result = x.new_zeros(*x.shape[:-1], sum(sizes))
    if memory is None:
        result.narrow(-1, starts[rank], sizes[rank]).copy_(x)
        return _sum_over_backend(result, group).to(x.dtype)
    buffer = SharedBuffer("all_gather_columns", memory, rank)
    text = f"have one entry per rank = {buffer.ranks}"
    check(len(sizes) == buffer.ranks, "all_gather_columns", "sizes", text, len(sizes))
    rows = math.prod(x.shape[:-1])
    flat = x.contiguous().view(-1)
    wide = result.view(rows, -1) if result.numel() else result
    width = x.dtype.itemsize
    note = note_of(rows * sum(sizes), x.dtype, 1)
    parts: list[list[Tensor]] = [[] for _ in sizes]
    for begin, end in pieces(rows * max(sizes), buffer.slot_bytes, width):
        slots = buffer.exchange(flat[begin:end], note, timeout)
        for part, slot, size in zip(parts, slots, sizes, strict=True):
            there = max(0, min(end, rows * size) - begin)
            part.append(slot[: there * width].view(x.dtype).clone())
    for part, start, size in zip(parts, starts, sizes, strict=True):
        if rows * size:
            wide[:, start : start + size] = torch.cat(part).view(rows, size)
    return result


def _check_group(a: Arguments) -> None:
    memory = a.memory
    if memory is None:
        a.require(bool(a.group), "memory", "be given where group is empty")
    else:
        check_device(a.op, "memory", memory, a.x)
        check_dtype_in(a.op, "memory", memory, torch.uint8)
        flat = memory.dim() == 1 and memory.is_contiguous()
        rest = "" if memory.is_contiguous() else " that is not contiguous"
        a.require(flat, "memory", "be 1-D and contiguous", f"{list(memory.shape)}{rest}")
    a.require(a.rank >= 0, "rank", "be >= 0")
    a.require(a.timeout > 0, "timeout", "be positive", f"{a.timeout:g}")


def _check_reduce(a: Arguments) -> None:
    check_tensor(a.op, "x", a.x, min_dim=0)
    check_not_expanded(a.op, "x", a.x)
    _check_group(a)


def _check_gather(a: Arguments) -> None:
    check_tensor(a.op, "x", a.x)
    _check_group(a)
    fine = a.rank < len(a.sizes) and all(0 <= size <= _MOST for size in a.sizes)
    a.require(fine, "sizes", "have an entry in [0, 2^31) for each rank", list(a.sizes))
    columns = a.sizes[a.rank]
    a.require(a.x.shape[-1] == columns, "x", f"have sizes[rank] = {columns} columns", a.x.shape[-1])


def _prepared(
    peers: Sequence[Tensor], rank: int, note: int, slot_bytes: int, entered: int = 0
) -> Tensor:
    """Return a buffer in which all other ranks have entered every exchange already, with the data of ``peers``."""
    ranks = len(peers)
    memory = torch.zeros(buffer_bytes(ranks, slot_bytes), dtype=torch.uint8)
    format_buffer(memory, ranks, slot_bytes)
    buffer = SharedBuffer("sample", memory, rank)
    for peer, data in enumerate(peers):
        buffer.lines[1 + peer, 0] = entered if peer == rank else 1 << 40
        if peer != rank:
            buffer.lines[1 + peer, 1:3] = note
            raw = data.contiguous().view(-1).view(torch.uint8)[:slot_bytes]
            buffer.slots[:, peer, : raw.numel()] = raw
    return memory


def _reduce_samples(dtype: torch.dtype) -> Iterator[Sample]:
    def make(x: Tensor, ranks: int, rank: int, slot: int = 4096, entered: int = 0) -> Sample:
        peers = [randn(x.numel(), dtype=dtype, seed=7 + i) for i in range(ranks)]
        memory = _prepared(peers, rank, note_of(x.numel(), dtype, 0), slot, entered)
        return Sample((x, memory, rank, _SOON), id=f"{ranks}ranks_{list(x.shape)}_{entered}")

    yield make(randn(5, dtype=dtype), 1, 0)
    yield make(randn(1, 64, dtype=dtype), 2, 0)
    yield make(randn(3, 37, dtype=dtype), 2, 1, entered=5)
    yield make(randn(2, 100, dtype=dtype), 3, 1)
    yield make(randn(301, dtype=dtype), 4, 3, slot=192)  # in pieces, the last one shorter
    yield make(strided(randn(4, 9, dtype=dtype)), 2, 0)
    yield make(randn(0, 8, dtype=dtype), 2, 0)
    yield make(randn(40000, dtype=dtype), 2, 1, slot=1 << 18)
    bad = randn(33, dtype=dtype)
    bad[3:6] = torch.tensor([float("nan"), float("inf"), -float("inf")], dtype=dtype)
    yield make(bad, 2, 0)


def _gather_samples(dtype: torch.dtype) -> Iterator[Sample]:
    def make(lead: list[int], sizes: list[int], rank: int, slot: int = 4096) -> Sample:
        rows = math.prod(lead)
        x = randn(*lead, sizes[rank], dtype=dtype)
        peers = [randn(rows * size, dtype=dtype, seed=3 + i) for i, size in enumerate(sizes)]
        memory = _prepared(peers, rank, note_of(rows * sum(sizes), dtype, 1), slot)
        return Sample((x, sizes, memory, rank, _SOON), id=f"{lead}x{sizes}_rank{rank}")

    yield make([2], [7], 0)
    yield make([1], [48, 48], 0)
    yield make([3], [5, 4], 1)
    yield make([2, 3], [9, 8, 8], 2)
    yield make([5], [11, 0, 3], 0, slot=64)
    yield make([5], [11, 0, 3], 1)
    yield make([0], [4, 4], 0)


register_op(
    mutates=("x", "memory"),
    reference=_all_reduce_,
    check=_check_reduce,
    samples=_reduce_samples,
    backward=None,
    lift=False,
    summary="Sum over the processes of a group, in place",
)

register_op(
    mutates=("memory",),
    reference=_all_gather_columns,
    check=_check_gather,
    fake=lambda a: a.x.new_empty(*a.x.shape[:-1], sum(a.sizes)),
    samples=_gather_samples,
    backward=None,
    lift=False,
    summary="Columns of the processes of a group side by side",
)

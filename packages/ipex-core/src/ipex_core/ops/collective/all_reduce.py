# SPDX-License-Identifier: Apache-2.0
"""Sums and concatenations over the processes of a group. `ipex_core.distributed` is the public face."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch

from ipex_core.library.arguments import Arguments
from ipex_core.library.checks import (
    check_device,
    check_dtype_in,
    check_not_expanded,
    check_tensor,
    randn,
    strided,
)
from ipex_core.library.kernels import LIBRARY, define, register
from ipex_core.library.spec import OpSpec, Sample, check
from ipex_core.ops.collective.exchange import (
    SharedBuffer,
    buffer_bytes,
    format_buffer,
    note_of,
    pieces,
)

Tensor = torch.Tensor

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


def _all_reduce(
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


def _all_gather(
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
    check(
        len(sizes) == buffer.ranks,
        "all_gather_columns",
        "sizes",
        f"have one entry per rank = {buffer.ranks}",
        len(sizes),
    )
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


def _check_group(
    op: str, x: Tensor, memory: Tensor | None, rank: int, timeout: float, group: str
) -> None:
    if memory is None:
        check(bool(group), op, "memory", "be given where group is empty", None)
    else:
        check_device(op, "memory", memory, x)
        check_dtype_in(op, "memory", memory, torch.uint8)
        flat = memory.dim() == 1 and memory.is_contiguous()
        rest = "" if memory.is_contiguous() else " that is not contiguous"
        check(flat, op, "memory", "be 1-D and contiguous", f"{list(memory.shape)}{rest}")
    check(rank >= 0, op, "rank", "be >= 0", rank)
    check(timeout > 0, op, "timeout", "be positive", f"{timeout:g}")


def _check_reduce(a: Arguments) -> None:
    check_tensor(a.op, "x", a.x, min_dim=0)
    check_not_expanded(a.op, "x", a.x)
    _check_group(a.op, a.x, a.memory, a.rank, a.timeout, a.group)


def _check_gather(a: Arguments) -> None:
    check_tensor(a.op, "x", a.x)
    _check_group(a.op, a.x, a.memory, a.rank, a.timeout, a.group)
    fine = a.rank < len(a.sizes) and all(0 <= size <= _MOST for size in a.sizes)
    a.require(fine, "sizes", "have an entry in [0, 2^31) for each rank", list(a.sizes))
    columns = a.sizes[a.rank]
    a.require(a.x.shape[-1] == columns, "x", f"have sizes[rank] = {columns} columns", a.x.shape[-1])


def _fake_reduce(a: Arguments) -> None:
    return None


def _fake_gather(a: Arguments) -> Tensor:
    return a.x.new_empty(*a.x.shape[:-1], sum(a.sizes))


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


register(
    OpSpec(
        name="all_reduce_",
        schema=(
            '(Tensor(a!) x, Tensor(b!)? memory, int rank, float timeout=1800.0, str group="") -> ()'
        ),
        reference=_all_reduce,
        check=_check_reduce,
        fake=_fake_reduce,
        samples=_reduce_samples,
        backward=None,
        lift=False,
        summary="Sum over the processes of a group, in place",
    )
)

register(
    OpSpec(
        name="all_gather_columns",
        schema=(
            "(Tensor x, int[] sizes, Tensor(a!)? memory, int rank, float timeout=1800.0,"
            ' str group="") -> Tensor'
        ),
        reference=_all_gather,
        check=_check_gather,
        fake=_fake_gather,
        samples=_gather_samples,
        backward=None,
        lift=False,
        summary="Columns of the processes of a group side by side",
    )
)

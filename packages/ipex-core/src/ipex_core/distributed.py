# SPDX-License-Identifier: Apache-2.0
"""Collective functions of inference over several processes: ``ipex.distributed``.

Each is the function of `torch.distributed` of the same name, for any backend. One is faster: the sum of a CPU tensor
over a group whose ranks all run on one host goes through memory that they share. It takes some microseconds where a
backend for networks takes some hundreds, and its result has the same bits on each rank.

Example:
    ``torchrun --nproc-per-node 2 script.py``, with in ``script.py``::

        from ipex_core import distributed

        distributed.init_process_group("gloo")
        x = torch.ones(4096, dtype=torch.bfloat16)
        distributed.all_reduce(x)  # 2.0 everywhere
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import logging
import mmap
import os
import secrets
import threading
import weakref
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ipex_core.library.spec import FLOATS
from ipex_core.ops.collective import MOST_RANKS, buffer_bytes, format_buffer

__all__ = [
    "SharedGroup",
    "all_gather",
    "all_gather_into_tensor",
    "all_reduce",
    "init_process_group",
    "shared_group",
]

_log = logging.getLogger("ipex.distributed")
_DEFAULT_TIMEOUT = datetime.timedelta(seconds=1800)

#: Where a file is memory.
_DIRECTORY = "/dev/shm"  # noqa: S108  (files of random names, which must not exist yet)

#: Variables in which launchers of MPI tell a process its rank and the number of processes.
_LAUNCHERS = (
    ("PMI_RANK", "PMI_SIZE"),
    ("PMIX_RANK", "PMIX_SIZE"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
)


@dataclasses.dataclass(frozen=True, slots=True)
class SharedGroup:
    """A process group whose ranks share memory: the arguments of ``all_reduce_`` and ``all_gather_columns``.

    Attributes:
        memory: The shared memory, uint8.
        rank: Own rank in the group.
        ranks: Number of ranks.
        timeout: Seconds until a rank that does not come is given up.
    """

    memory: Tensor
    rank: int
    ranks: int
    timeout: float


def init_process_group(
    backend: str | None = None,
    init_method: str | None = None,
    timeout: datetime.timedelta = _DEFAULT_TIMEOUT,
    world_size: int = -1,
    rank: int = -1,
    store: Any | None = None,
    group_name: str = "",
    pg_options: Any | None = None,
    device_id: torch.device | None = None,
) -> None:
    """Start the default process group; as `torch.distributed.init_process_group`.

    Where neither arguments nor ``RANK`` and ``WORLD_SIZE`` tell rank and size, the variables of MPI launchers do
    (``PMI_*``, ``PMIX_*``, ``OMPI_COMM_WORLD_*``).

    Args:
        backend: ``"gloo"``, or any other that torch has; None lets torch choose for each device.
        init_method: URL of the meeting point; None: ``"env://"``.
        timeout: How long a collective waits for a rank that does not come.
        world_size: Number of processes.
        rank: Number of this process.
        store: A `torch.distributed.Store`, instead of ``init_method``.
        group_name: Ignored by torch.
        pg_options: Options of the backend.
        device_id: Device that the process works on.

    Raises:
        ValueError: Rank or size are missing, or out of range.
    """
    if store is None and rank < 0 and "RANK" not in os.environ:
        for rank_name, size_name in _LAUNCHERS:
            if rank_name in os.environ:
                rank = int(os.environ[rank_name])
                if world_size < 0 and size_name in os.environ:
                    world_size = int(os.environ[size_name])
                break
    dist.init_process_group(
        backend,
        init_method,
        timeout,
        world_size,
        rank,
        store,
        group_name,
        pg_options,
        device_id,
    )


def all_reduce(
    tensor: Tensor,
    op: Any = dist.ReduceOp.SUM,
    group: dist.ProcessGroup | None = None,
    async_op: bool = False,
) -> Any:
    """Reduce ``tensor`` over all ranks of a group, in place.

    The sum of a float32, bfloat16 or float16 tensor on the CPU over the ranks of one host uses shared memory: it is
    computed in float32 in the order of the ranks, with the same bits on each. All else is
    `torch.distributed.all_reduce`. The first call with a group prepares the memory, so all ranks must take part in it.

    Args:
        tensor: Any shape; of the same size and dtype on each rank; written.
        op: A `torch.distributed.ReduceOp`.
        group: None: the default group.
        async_op: Return at once; always the work of the backend.

    Returns:
        A handle with ``wait()`` if ``async_op``, else None.

    Raises:
        RuntimeError: A rank did not come within the timeout of the group; the message names it.
        ValueError: There is no default group.
    """
    fits = (
        op == dist.ReduceOp.SUM
        and not async_op
        and tensor.device.type == "cpu"
        and tensor.dtype in FLOATS
        and tensor.layout == torch.strided
    )
    shared = shared_group(group) if fits else None
    if shared is None:
        return dist.all_reduce(tensor, op, group, async_op)
    with torch.no_grad():
        torch.ops.ipex.all_reduce_(tensor, shared.memory, shared.rank, shared.timeout)
    return None


def all_gather(
    tensor_list: list[Tensor],
    tensor: Tensor,
    group: dist.ProcessGroup | None = None,
    async_op: bool = False,
) -> Any:
    """Gather the tensors of all ranks in a list; as `torch.distributed.all_gather`."""
    return dist.all_gather(tensor_list, tensor, group, async_op)


def all_gather_into_tensor(
    output_tensor: Tensor,
    input_tensor: Tensor,
    group: dist.ProcessGroup | None = None,
    async_op: bool = False,
) -> Any:
    """Gather the tensors of all ranks in one; as `torch.distributed.all_gather_into_tensor`."""
    # torch 2.13 gave the function another name and warns of the one that older releases have.
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    return gather(output_tensor, input_tensor, group, async_op)


# ------------------------------------------------------------------------------------------------------- shared memory

#: What is known about each group: its shared memory, or None.
_groups: weakref.WeakKeyDictionary[dist.ProcessGroup, SharedGroup | None] = (
    weakref.WeakKeyDictionary()
)
_lock = threading.Lock()


def shared_group(group: dist.ProcessGroup | None = None) -> SharedGroup | None:
    """Return the shared memory of a group, or None if it has none.

    It has none if the ranks run on several hosts or ``IPEX_SHARED_MEMORY=0`` is set on one of them. The first call
    for a group is collective: all its ranks must make it.

    Args:
        group: None: the default group.

    Raises:
        ValueError: There is no default group, or this process is not in the group.
    """
    found = dist.group.WORLD if group is None else group
    if found is None:
        raise ValueError("shared_group: the default process group must be started, got none")
    if dist.get_rank(found) < 0:
        raise ValueError(
            f"shared_group: group must have this process as a member, got rank {dist.get_rank()}, which is not in it"
        )
    known = _groups.get(found, False)
    if known is not False:
        return known  # type: ignore[return-value]
    with _lock:
        if found not in _groups:
            _groups[found] = _make(found)
        return _groups[found]


def timeout_of(group: dist.ProcessGroup | None = None) -> float:
    """Return the seconds that collectives of a group wait, as it was started with."""
    found = dist.group.WORLD if group is None else group
    with contextlib.suppress(Exception):  # no public way to it in the oldest torch
        timeout = found._get_backend(torch.device("cpu")).options._timeout  # type: ignore[union-attr]
        if timeout > datetime.timedelta(0):
            return float(timeout.total_seconds())
    return _DEFAULT_TIMEOUT.total_seconds()


def _make(group: dist.ProcessGroup) -> SharedGroup | None:
    """Make the shared memory of a group. Every rank of it runs through the same collectives, whatever happens."""
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    path, memory = "", None
    host = _host() if ranks <= MOST_RANKS else ""
    if rank == 0 and host:
        path, memory = _create(ranks)
    told: list[Any] = [None] * ranks
    dist.all_gather_object(told, (host, path), group)
    path = told[0][1]
    alike = bool(path) and all(other == told[0][0] for other, _ in told)
    if alike and rank:
        memory = _map(path, buffer_bytes(ranks))
    dist.all_gather_object(told, alike and memory is not None, group)
    if rank == 0 and path:
        # All have it: without a name it goes with the last process, however that ends.
        with contextlib.suppress(OSError):
            os.unlink(path)
    if memory is None or not all(told):
        _log.info("group of %d ranks: no shared memory, the backend does all_reduce", ranks)
        return None
    _log.info("group of %d ranks: all_reduce uses shared memory", ranks)
    return SharedGroup(memory, rank, ranks, timeout_of(group))


def _host() -> str:
    """Return what processes that see the same shared memory have in common, or "" if it is not to be used."""
    from ipex_core import config

    if not config.get("shared_memory"):
        return ""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            boot = file.read().strip()
        # Containers of one host have the same boot id, but usually a /dev/shm of their own.
        return f"{boot}:{os.stat(_DIRECTORY).st_dev}"
    except OSError:
        return ""


def _create(ranks: int) -> tuple[str, Tensor | None]:
    path = f"{_DIRECTORY}/ipex-{secrets.token_hex(12)}"
    size = buffer_bytes(ranks)
    try:
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except OSError as cause:
        _log.info("cannot make %s: %s", path, cause)
        return "", None
    try:
        # Reserves the pages: writing to memory that cannot be had would end the process.
        os.posix_fallocate(file, 0, size)
    except OSError as cause:
        _log.info("no room for %d bytes in %s: %s", size, _DIRECTORY, cause)
        os.unlink(path)
        return "", None
    finally:
        os.close(file)
    memory = _map(path, size)
    if memory is None:
        os.unlink(path)
        return "", None
    format_buffer(memory, ranks)
    return path, memory


def _map(path: str, size: int) -> Tensor | None:
    try:
        file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError as cause:
        _log.info("cannot open %s: %s", path, cause)
        return None
    try:
        if os.fstat(file).st_size != size:
            return None
        # The tensor keeps the mapping, the mapping what it is of.
        return torch.frombuffer(mmap.mmap(file, size), dtype=torch.uint8)
    except (OSError, ValueError) as cause:
        _log.info("cannot map %s: %s", path, cause)
        return None
    finally:
        os.close(file)

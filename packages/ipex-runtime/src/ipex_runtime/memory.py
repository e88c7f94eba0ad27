# SPDX-License-Identifier: Apache-2.0
"""NUMA memory policy by system call: no `numactl`, no `libnuma`.

Many containers forbid the calls. That is no error: pages then lie on the node of the thread that first writes them,
which for pinned threads is the right one; it is told once.

Source: Linux, set_mempolicy(2), mbind(2), Documentation/admin-guide/mm/numa_memory_policy.rst.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import sys
import warnings
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

__all__ = ["MODES", "place_memory", "set_memory_policy"]

#: Name -> number of the kernel. ``local``: the node of the CPU that runs the thread.
MODES = {"default": 0, "preferred": 1, "bind": 2, "interleave": 3, "local": 4}

NODE_WORDS = 16  # 1024 nodes, what a kernel can be configured for
_MOVE = 2  # MPOL_MF_MOVE: pages that exist move, too

#: Machine -> numbers of mbind, set_mempolicy.
_CALLS = {"x86_64": (237, 238), "aarch64": (235, 237), "riscv64": (235, 237)}

_told: set[str] = set()


def set_memory_policy(mode: str, nodes: Iterable[int] = ()) -> bool:
    """Set the memory policy of the calling thread; threads and processes that it starts later inherit it.

    Args:
        mode: ``"default"``, ``"local"`` (both without nodes), ``"preferred"`` (one node or more), ``"bind"`` or
            ``"interleave"``.
        nodes: Numbers of NUMA nodes.

    Returns:
        Whether the system did it. If it refused, a `RuntimeWarning` says so once in a process.

    Raises:
        ValueError: The mode is unknown, or the nodes do not fit the mode or do not exist.
    """
    nodes = _checked("set_memory_policy", mode, nodes)
    mask = _mask(nodes)
    return _call("set_memory_policy", 1, MODES[mode], mask, _bits(nodes))


def place_memory(
    target: torch.Tensor | torch.nn.Module, mode: str, nodes: Iterable[int] = ()
) -> bool:
    """Move the memory of a tensor, or of all parameters and buffers of a module, to NUMA nodes.

    Whole pages are moved: what else lies on the first and the last page of a tensor stays where it is.

    Args:
        target: CPU tensor or module; tensors of other devices, without storage or smaller than a page are passed over.
        mode: As in `set_memory_policy`.
        nodes: Numbers of NUMA nodes.

    Returns:
        Whether the system did it for all of them. If it refused, a `RuntimeWarning` says so once in a process.

    Raises:
        TypeError: The target is neither a tensor nor a module.
        ValueError: As in `set_memory_policy`.
    """
    import torch

    nodes = _checked("place_memory", mode, nodes)
    if isinstance(target, torch.Tensor):
        tensors = [target]
    elif isinstance(target, torch.nn.Module):
        tensors = [*target.parameters(), *target.buffers()]
    else:
        raise TypeError(
            f"place_memory: target must be a tensor or a module, got {type(target).__name__}"
        )
    mask = _mask(nodes)
    page = os.sysconf("SC_PAGE_SIZE")
    done = True
    for tensor in tensors:
        if tensor.device.type != "cpu" or tensor.layout != torch.strided:
            continue
        storage = tensor.untyped_storage()
        start = -(-storage.data_ptr() // page) * page
        size = (storage.data_ptr() + storage.nbytes()) // page * page - start
        if size > 0:
            address = ctypes.c_void_p(start), ctypes.c_ulong(size)
            done &= _call("place_memory", 0, *address, MODES[mode], mask, _bits(nodes), _MOVE)
    return done


def policy_row(mode: str | None, nodes: Sequence[int]) -> tuple[int, list[int]]:
    """Return (mode number, mask words) for the native library; None leaves the policy of a thread alone."""
    if mode is None:
        return -1, [0] * NODE_WORDS
    words = [0] * NODE_WORDS
    if mode not in ("default", "local"):
        for node in nodes:
            words[node // 64] |= 1 << node % 64
    return MODES[mode], words


def _checked(function: str, mode: str, nodes: Iterable[int]) -> list[int]:
    from ipex_runtime import topology

    if mode not in tuple(MODES):
        raise ValueError(f"{function}: mode must be one of {', '.join(MODES)}, got {mode!r}")
    numbers = list(nodes) if isinstance(nodes, Iterable) else [nodes]
    if not isinstance(nodes, Iterable) or not all(isinstance(n, int) for n in numbers):
        raise TypeError(f"{function}: nodes must be numbers of NUMA nodes, got {nodes!r}")
    wanted = sorted(set(numbers))
    if mode in ("default", "local"):
        if wanted:
            raise ValueError(f"{function}: nodes must be empty with mode {mode!r}, got {wanted}")
        return []
    known = [node.id for node in topology.read().nodes]
    if not wanted or not set(wanted) <= set(known):
        raise ValueError(f"{function}: nodes must be some of {known}, got {wanted}")
    return wanted


def _mask(nodes: Sequence[int]) -> Any:
    words = (ctypes.c_uint64 * NODE_WORDS)()
    for node in nodes:
        words[node // 64] |= 1 << node % 64
    return words if nodes else None


def _bits(nodes: Sequence[int]) -> Any:
    # The kernel counts one bit less than it is told.
    return ctypes.c_ulong(NODE_WORDS * 64 + 1 if nodes else 0)


def _call(function: str, which: int, *args: Any) -> bool:
    numbers = _CALLS.get(platform.machine())
    if not sys.platform.startswith("linux") or numbers is None:
        tell_refusal(function, errno.ENOSYS)
        return False
    libc = ctypes.CDLL(None, use_errno=True)
    arguments = [ctypes.c_long(a) if isinstance(a, int) else a for a in args]
    if libc.syscall(ctypes.c_long(numbers[which]), *arguments) == 0:
        return True
    tell_refusal(function, ctypes.get_errno())
    return False


def tell_refusal(what: str, code: int, level: int = 4) -> None:
    """Warn, once per kind of call, that the system refused it."""
    if what in _told:
        return
    _told.add(what)
    reason = os.strerror(code)
    if code in (errno.EPERM, errno.ENOSYS):
        reason += " (containers often forbid it; Docker: --cap-add SYS_NICE)"
    warnings.warn(
        f"{what}: the system refused: {reason}; the program goes on without it",
        RuntimeWarning,
        stacklevel=level,
    )

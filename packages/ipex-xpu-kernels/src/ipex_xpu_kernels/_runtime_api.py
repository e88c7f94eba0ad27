# SPDX-License-Identifier: Apache-2.0
"""Names of IPEX's ``ipex.xpu`` about devices, memory and random numbers that ``torch.xpu`` does not have."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.xpu._utils import _get_device_index


def get_device_type(device: Any = None) -> str:
    """Return "gpu" or "cpu": what kind of SYCL device it is."""
    kind: str = torch.xpu.get_device_properties(device).type
    return kind


def getDeviceIdListForCard(card_id: int = -1) -> list[int]:
    """Return the indices of the devices of a card: all of them for -1, else the index of one device.

    Raises:
        ValueError: There is no such card.
    """
    count = torch.xpu.device_count()
    if card_id == -1:
        return list(range(count))
    if not 0 <= card_id < count:
        raise ValueError(
            f"getDeviceIdListForCard: card_id must be -1 to {count - 1}, got {card_id}"
        )
    return [card_id]


@contextlib.contextmanager
def fork_rng(devices: Iterable[Any] | None = None, enabled: bool = True) -> Iterator[None]:
    """Restore the random states of the host and of the devices at the end of a block.

    Args:
        devices: Devices of xpu, by default all.
        enabled: Without it nothing is done.
    """
    chosen = range(torch.xpu.device_count()) if devices is None else devices
    numbered = [torch.device("xpu", i) if isinstance(i, int) else i for i in chosen]
    with torch.random.fork_rng(numbered, enabled, device_type="xpu"):
        yield


def Generator(device: Any = "xpu") -> torch.Generator:
    """Return a new generator of random numbers of a device."""
    return torch.Generator(device)


#: Rows of `memory_summary`: title, name of the statistic, whether it counts bytes.
_ROWS = (
    ("Allocated memory", "allocated_bytes", True),
    ("Active memory", "active_bytes", True),
    ("Requested memory", "requested_bytes", True),
    ("Reserved memory", "reserved_bytes", True),
    ("Non-releasable memory", "inactive_split_bytes", True),
    ("Allocations", "allocation", False),
    ("Active allocations", "active", False),
    ("Segments", "segment", False),
    ("Non-releasable blocks", "inactive_split", False),
)


def memory_summary(device: Any = None, abbreviated: bool = False) -> str:
    """Return a table of what the allocator of a device holds.

    Args:
        device: The current one by default.
        abbreviated: Leave out the division into small and large blocks.
    """
    stats = torch.xpu.memory_stats(device)
    index = _get_device_index(device, optional=True)
    pools = [("all", "")]
    if not abbreviated:
        pools += [("large_pool", "  of large blocks"), ("small_pool", "  of small blocks")]
    line = "|" + "=" * 78 + "|"
    title = f"PyTorch XPU memory summary, device {index}"
    events = (
        f"retries: {stats.get('num_alloc_retries', 0)}   out of memory: {stats.get('num_ooms', 0)}"
    )
    out = [
        line,
        f"| {title:<76} |",
        f"| {events:<76} |",
        line,
        f"| {'Metric':<24}|{'Current':>12} |{'Peak':>12} |{'Allocated':>12} |{'Freed':>9} |",
        line,
    ]
    for name, key, is_bytes in _ROWS:
        for pool, label in pools:
            values = [
                stats.get(f"{key}.{pool}.{part}", 0)
                for part in ("current", "peak", "allocated", "freed")
            ]
            a, b, c, d = (_amount(v) if is_bytes else str(v) for v in values)
            out.append(f"| {label or name:<24}|{a:>12} |{b:>12} |{c:>12} |{d:>9} |")
    out.append(line)
    return "\n".join(out) + "\n"


def _amount(count: int) -> str:
    value = float(count)
    for unit in ("B", "KiB", "MiB"):
        if abs(value) < 10240:
            return f"{value:.0f} {unit}"
        value /= 1024
    return f"{value:.0f} GiB"


def _storage(name: str, dtype: torch.dtype) -> Any:
    """Return a class that makes typed storages of xpu, as ``torch.cuda.FloatStorage`` does for cuda."""

    def make(cls: Any, *arguments: Any, **keywords: Any) -> torch.TypedStorage:
        keywords.setdefault("device", "xpu")
        return torch.TypedStorage(*arguments, dtype=dtype, **keywords)

    return type(
        name,
        (),
        {"__new__": make, "dtype": dtype, "__doc__": f"A typed storage of {dtype} on xpu."},
    )


STORAGES: dict[str, torch.dtype] = {
    "ByteStorage": torch.uint8,
    "DoubleStorage": torch.float64,
    "FloatStorage": torch.float32,
    "HalfStorage": torch.float16,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "ShortStorage": torch.int16,
    "CharStorage": torch.int8,
    "BoolStorage": torch.bool,
    "BFloat16Storage": torch.bfloat16,
    "ComplexFloatStorage": torch.complex64,
    "ComplexDoubleStorage": torch.complex128,
}


def __getattr__(name: str) -> Any:
    if name in STORAGES:
        made = _storage(name, STORAGES[name])
        globals()[name] = made
        return made
    raise AttributeError(name)

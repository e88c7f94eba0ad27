# SPDX-License-Identifier: Apache-2.0
"""The paged cache of keys and values, the memory for it, and the sequences that live in it.

`PagedCache` is memory: blocks of rows, numbered alike in all layers. `Sequences` says which blocks belong to which
sequence. Sequences with a common past (beams) share blocks; a block is copied when one of several owners is about to
write to it.
"""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ipex_core.errors import IpexError
from ipex_core.ops.kv_cache import QUANTIZED


class CacheMemoryError(IpexError, MemoryError):
    """The cache of keys and values does not fit the memory, or a request does not fit the cache."""


def _number(path: str) -> int | None:
    try:
        return int(Path(path).read_text())
    except (OSError, ValueError):
        return None  # no such limit, or "max"


def available_memory(device: torch.device | None = None) -> int | None:
    """Return the bytes that this process can still use, without swapping; None if the system does not tell.

    Of a device, what it has left and what torch keeps of it for later. Of the CPU, on Linux the smaller of what the
    machine has left and what the control group of the process has left. Files that the system keeps in memory count as
    free: it drops them when the memory is needed.
    """
    if device is not None and device.type == "xpu":
        kept = torch.xpu.memory_reserved(device) - torch.xpu.memory_allocated(device)
        return torch.xpu.mem_get_info(device)[0] + kept
    found: list[int] = []
    try:
        with open("/proc/meminfo", encoding="ascii") as lines:
            found += [int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvail")]
    except (OSError, ValueError, IndexError):
        pass
    for limit, used in (
        ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
        (
            "/sys/fs/cgroup/memory/memory.limit_in_bytes",
            "/sys/fs/cgroup/memory/memory.usage_in_bytes",
        ),
    ):
        most, now = _number(limit), _number(used)
        if most is not None and now is not None and most < 1 << 60:
            kept = _kept_files(os.path.join(os.path.dirname(used), "memory.stat"))
            found.append(max(most - max(now - kept, 0), 0))
    if not found and hasattr(os, "sysconf"):
        try:
            found.append(os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
        except (OSError, ValueError):
            return None
    return min(found, default=None)


def _kept_files(path: str) -> int:
    """Return the bytes of files in memory that a control group counts as its own; 0 if the system does not tell."""
    names = ("inactive_file", "active_file")
    try:
        with open(path, encoding="ascii") as lines:
            found = dict(line.split(maxsplit=1) for line in lines)
            # With version 1 the lines of the whole tree have a word more.
            return sum(int(found.get(f"total_{name}", found.get(name, 0))) for name in names)
    except (OSError, ValueError):
        return 0


def _status(name: str) -> int:
    try:
        with open("/proc/self/status", encoding="ascii") as lines:
            return next((int(line.split()[1]) << 10 for line in lines if line.startswith(name)), 0)
    except OSError:
        return 0


def resident_memory() -> int:
    """Return the bytes of this process that are in memory and are no mapped file; 0 if the system does not tell."""
    return _status("RssAnon:")


def peak_memory() -> int:
    """Return the most bytes this process has had in memory, mapped files included; 0 if the system does not tell."""
    return _status("VmHWM:")


def format_bytes(count: float) -> str:
    """Return a size for people.

    Example:
        >>> format_bytes(3 << 20)
        '3.0 MiB'
    """
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


#: Names of cache dtypes, as options give them.
CACHE_DTYPES: dict[str, torch.dtype | None] = {
    "auto": None,
    "int8": torch.int8,
    "fp8": torch.float8_e5m2,
    "fp8_e5m2": torch.float8_e5m2,
    "fp8_e4m3": torch.float8_e4m3fn,
}


def cache_dtype(value: Any, own: torch.dtype) -> torch.dtype:
    """Return the dtype of a cache for rows of dtype ``own``.

    Raises:
        ValueError: It is not the model's own, int8, float8_e5m2 or float8_e4m3fn.
    """
    if isinstance(value, str) and value in CACHE_DTYPES:
        value = CACHE_DTYPES[value]
    if value is None:
        return own
    if value not in (own, *QUANTIZED):
        names = ", ".join(map(str, (own, *QUANTIZED)))
        raise ValueError(f"PagedCache: dtype must be one of {names} or None, got {value!r}")
    assert isinstance(value, torch.dtype)
    return value


@dataclasses.dataclass(frozen=True, slots=True)
class LayerShape:
    """What one layer stores for a token: ``kv_heads`` keys and values of ``head_dim``.

    With ``latent``, a single row that is key and value: the first ``latent`` elements are what both are made of. With
    ``values``, only so many elements of a value mean something; of a key too if it is ``biased``: behind them stands a
    bias, which the model itself does not cache. ``twice``: keys come twice, and so does each half of the value heads,
    behind itself; the model itself caches all once. ``whole``: rows of a token that are key and value in some form that
    the model itself does not cache.
    """

    kv_heads: int
    head_dim: int
    latent: int = 0
    values: int | None = None
    biased: bool = False
    twice: bool = False
    whole: bool = False

    @property
    def own(self) -> bool:
        """Whether the model itself caches something else, so that its own forward cannot go on with the rows."""
        return self.biased or self.twice or self.whole

    @property
    def parts(self) -> int:
        """Tensors of a layer."""
        return 1 if self.latent else 2


@dataclasses.dataclass(frozen=True, slots=True)
class StateShape:
    """What one layer stores for a whole sequence: the last steps of a short convolution, and the state of a recurrence.

    Attributes:
        history: Steps and channels; None: there is no convolution.
        state: Heads, keys and values, or keys and values, float32; None: there is no recurrence.
        dtype: dtype of the steps.
        values_first: Whether caches of transformers store the state with values before keys.
        portable: Whether caches of transformers store it at all.
        others: Channels of further convolutions with as many steps.
        streams: Steps and channels of a convolution over several streams, and how many tokens are kept; or None.
    """

    history: tuple[int, int] | None
    state: tuple[int, ...] | None
    dtype: torch.dtype
    values_first: bool = False
    portable: bool = True
    others: tuple[int, ...] = ()
    streams: tuple[int, int, int] | None = None

    @property
    def tensors(self) -> list[tuple[tuple[int, ...], torch.dtype]]:
        """Shapes and dtypes of what is stored for one sequence."""
        found: list[tuple[tuple[int, ...], torch.dtype]] = []
        if self.history is not None:
            steps, width = self.history
            found += [((steps, channels), self.dtype) for channels in (width, *self.others)]
        if self.state is not None:
            found.append((self.state, torch.float32))
        if self.streams is not None:
            found += [(self.streams[:2], self.dtype), (self.streams[2:], torch.int64)]
        return found

    @property
    def bytes(self) -> int:
        """Memory of one sequence."""
        return sum(math.prod(shape) * dtype.itemsize for shape, dtype in self.tensors)


#: What a layer stores: rows, a state, both, or nothing.
CacheShape = LayerShape | StateShape | tuple[LayerShape, StateShape] | None


def _parts(shape: CacheShape) -> tuple[LayerShape | None, StateShape | None]:
    """Return the shape of the rows that a layer stores, and of its state."""
    parts = shape if isinstance(shape, tuple) else (shape,)
    rows = next((one for one in parts if isinstance(one, LayerShape)), None)
    return rows, next((one for one in parts if isinstance(one, StateShape)), None)


def state_bytes(layers: Sequence[CacheShape]) -> int:
    """Return the memory that layers take for the state of one sequence."""
    return sum(state.bytes for _, state in map(_parts, layers) if state is not None)


class PagedCache:
    """Keys and values of all layers in blocks of rows; of layers with a state, a row for each sequence.

    Args:
        layers: Shapes of what each layer stores; None: it stores nothing.
        num_blocks: Number of blocks; all layers have as many.
        block_size: Rows (tokens) of a block.
        dtype: dtype of the elements.
        scales: Of each layer what a 1 of its keys and of its values stands for, if they are 8-bit numbers. Without
            them an int8 cache has a scale for each row.
        num_states: Sequences that layers with a state have room for.
        device: Where the memory is.

    Attributes:
        layers: Shapes of the keys and values of each layer, or None.
        states: Shapes of the states of each layer, or None.
        tensors: Keys ``[num_blocks, kv_heads, block_size, head_dim]``, values and scales of each layer, and
            histories ``[num_states, steps, channels]`` and states ``[num_states, heads, keys, values]``, and with
            `StateShape.streams` a further history and the last tokens ``[num_states, tokens]``.
    """

    def __init__(
        self,
        layers: Sequence[CacheShape],
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        scales: Sequence[tuple[float, float]] | None = None,
        num_states: int = 0,
        device: torch.device | str = "cpu",
    ) -> None:
        for name, value in (("num_blocks", num_blocks), ("block_size", block_size)):
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"PagedCache: {name} must be a positive int, got {value!r}")
        self._shapes = tuple(layers)
        self.layers = tuple(_parts(shape)[0] for shape in layers)
        self.states = tuple(_parts(shape)[1] for shape in layers)
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.dtype = dtype
        self.device = torch.device(device)
        self.scales = scales
        self.row_scales = dtype == torch.int8 and scales is None
        self.num_states = num_states
        self._states: dict[int, list[Tensor]] = self._new_states(num_states)
        self._allocate(num_blocks)

    @property
    def has_states(self) -> bool:
        """Whether a layer keeps a state instead of keys and values."""
        return any(shape is not None for shape in self.states)

    def _new_states(self, count: int) -> dict[int, list[Tensor]]:
        place: Any = {"device": self.device}
        return {
            index: [torch.zeros(count, *s, dtype=dtype, **place) for s, dtype in shape.tensors]
            for index, shape in enumerate(self.states)
            if shape is not None
        }

    def grow_states(self, count: int) -> None:
        """Make room for the states of more sequences; the former ones keep their rows."""
        if count <= self.num_states or not self.has_states:
            return
        needed = state_bytes(self._shapes) * count
        free = available_memory(self.device)
        if free is not None and needed > free:
            raise CacheMemoryError(
                f"PagedCache: the states must fit the free memory of {format_bytes(free)}, got"
                f" {count} sequences, {format_bytes(needed)}"
            )
        former, self._states = self._states, self._new_states(count)
        for index, tensors in former.items():
            for new, old in zip(self._states[index], tensors, strict=True):
                new[: self.num_states] = old
        self.num_states = count
        self._list_tensors()

    def copy_states(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy the states of sequences from rows to others."""
        if not sources:
            return
        at, to = (torch.tensor(rows, device=self.device) for rows in (sources, targets))
        for tensors in self._states.values():
            for one in tensors:
                one[to] = one[at]

    def _list_tensors(self) -> None:
        self._of = [
            [*self._rows.get(index, ()), *self._states.get(index, ())]
            for index in range(len(self.layers))
        ]
        self.tensors = [one for tensors in self._of for one in tensors]

    def _allocate(self, num_blocks: int) -> None:
        self._stores: list[Tensor] = []
        self._rows: dict[int, list[Tensor]] = {}
        start = 0
        while start < len(
            self.layers
        ):  # neighbors of one shape share an allocation: one copy moves a block
            shape = self.layers[start]
            end = start
            if shape is None:
                start += 1
                continue
            while end < len(self.layers) and self.layers[end] == shape:
                end += 1
            parts = shape.parts
            size = (parts * (end - start), num_blocks, shape.kv_heads, self.block_size)
            store = torch.empty(*size, shape.head_dim, dtype=self.dtype, device=self.device)
            self._stores.append(store)
            scales = None
            if self.row_scales:
                scales = torch.ones(*size, device=self.device)
                self._stores.append(scales)
            for i in range(end - start):
                first, last = parts * i, parts * (i + 1) - 1
                self._rows[start + i] = [store[first], store[last]]
                if scales is not None:
                    self._rows[start + i] += [scales[first], scales[last]]
            start = end
        self._list_tensors()

    @staticmethod
    def bytes(
        layers: Sequence[CacheShape],
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        scaled: bool = False,
    ) -> int:
        """Return the memory of the blocks of a cache, with scales of layers if it is ``scaled``."""
        more = 4 if dtype == torch.int8 and not scaled else 0
        row = sum(
            s.parts * s.kv_heads * (s.head_dim * dtype.itemsize + more)
            for s, _ in map(_parts, layers)
            if s is not None
        )
        return row * num_blocks * block_size

    def grow(self, num_blocks: int) -> None:
        """Make room for more blocks; the former ones keep numbers and contents."""
        if num_blocks <= self.num_blocks:
            return
        needed = self.bytes(
            self._shapes, num_blocks, self.block_size, self.dtype, self.scales is not None
        )
        free = available_memory(self.device)
        if free is not None and needed > free:  # both are there while the contents move
            raise CacheMemoryError(
                f"PagedCache: the cache must fit the free memory of {format_bytes(free)}, got"
                f" {num_blocks * self.block_size} tokens, {format_bytes(needed)}"
            )
        former, count = self._stores, self.num_blocks
        self._allocate(num_blocks)
        for new, old in zip(self._stores, former, strict=True):
            _raw(new)[:, :count] = _raw(old)
        self.num_blocks = num_blocks

    def copy_blocks(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy blocks of all layers."""
        if not sources:
            return
        at, to = (torch.tensor(rows, device=self.device) for rows in (sources, targets))
        for store in self._stores:
            raw = _raw(store)
            raw[:, to] = raw[:, at]

    def tensors_of(self, layer: int) -> list[Tensor]:
        """Return the entries of `tensors` that belong to a layer."""
        return self._of[layer]

    def states_of(self, layer: int) -> list[Tensor]:
        """Return the entries of `tensors` that are the state of a layer."""
        return self._states.get(layer, [])

    def rows(
        self, layer: int, blocks: Sequence[int] | Tensor, length: int
    ) -> tuple[Tensor, Tensor]:
        """Return the first ``length`` keys and values of some blocks as float rows ``[kv_heads, length, head_dim]``.

        Of a layer with a latent: the latents, and the rotated parts of the keys.
        """
        found = []
        tensors = self.tensors_of(layer)
        for part in (0, 1):
            data = tensors[part]
            index = torch.as_tensor(blocks, dtype=torch.int64, device=self.device)
            picked = _raw(data)[index].view(data.dtype)
            if self.row_scales:
                picked = picked.float() * tensors[2 + part][index].unsqueeze(-1)
            elif self.scales is not None:
                picked = picked.float() * self.scales[layer][part]
            elif self.dtype in QUANTIZED:
                picked = picked.float()
            found.append(picked.transpose(0, 1).flatten(1, 2)[:, :length])
        shape = self.layers[layer]
        latent = 0 if shape is None else shape.latent
        if latent:
            return found[0][..., :latent], found[0][..., latent:]
        if shape is None:
            return found[0], found[1]
        if shape.twice:
            own = shape.kv_heads // 4
            return found[0][: 2 * own], torch.cat([found[1][:own], found[1][2 * own : 3 * own]])
        keys = shape.values if shape.biased else None
        return found[0][..., :keys], found[1][..., : shape.values]


def _raw(store: Tensor) -> Tensor:
    """Bytes instead of 8-bit numbers: torch cannot index floats of them."""
    return store.view(torch.uint8) if store.dtype in QUANTIZED else store


@dataclasses.dataclass(frozen=True, slots=True)
class Step:
    """Where the tokens of one forward call go; the arguments of `Runner.forward` as tensors."""

    slots: Tensor  # int64 [T]
    tables: Tensor  # int32 [B, blocks]
    starts: Tensor  # int32 [B + 1]
    lengths: Tensor  # int32 [B], history and new tokens
    longest: int
    most: int  # tokens of the sequence that has most new ones
    singles: bool  # one token each
    states: Tensor | None = None  # int32 [B], the rows of layers with a state


class Sequences:
    """Sequences in a cache that grows when it is full.

    Args:
        cache: The memory. It must not be used by anybody else.
        count: Number of sequences, all empty.
    """

    def __init__(self, cache: PagedCache, count: int) -> None:
        self.cache = cache
        self.lengths = [0] * count
        self.blocks: list[list[int]] = [[] for _ in range(count)]
        self._owners: dict[int, int] = {}
        self._free: list[int] = list(range(cache.num_blocks - 1, -1, -1))
        self._tables: Tensor | None = None
        #: Rows of the layers with a state.
        self.states = list(range(count)) if cache.has_states else []
        cache.grow_states(len(self.states))

    def __len__(self) -> int:
        return len(self.lengths)

    # ------------------------------------------------------------------------------------------------------- appending

    def append(self, counts: Sequence[int] | int = 1) -> Step:
        """Make room for new tokens behind each sequence and say where they go.

        Args:
            counts: New tokens of each sequence, or one number for all.
        """
        size = self.cache.block_size
        number = len(self.lengths)
        if isinstance(counts, int):
            counts = [counts] * number
        slots: list[int] = []
        copies: tuple[list[int], list[int]] = ([], [])
        for i, count in enumerate(counts):
            blocks, first = self.blocks[i], self.lengths[i]
            end = first + count
            if count and first % size and self._owners[blocks[-1]] > 1:
                self._own_last(i, copies)
            while len(blocks) * size < end:
                blocks.append(self._take())
                self._tables = None
            if count == 1:
                slots.append(blocks[first // size] * size + first % size)
            else:
                for at in range(first // size, -(-end // size)):
                    low, high = max(first, at * size), min(end, (at + 1) * size)
                    base = blocks[at] * size - at * size
                    slots.extend(range(base + low, base + high))
            self.lengths[i] = end
        if copies[0]:
            self.cache.copy_blocks(*copies)
            self._tables = None
        starts = [0]
        for count in counts:
            starts.append(starts[-1] + count)
        return Step(
            torch.tensor(slots, dtype=torch.int64),
            self.tables(),
            torch.tensor(starts, dtype=torch.int32),
            torch.tensor(self.lengths, dtype=torch.int32),
            max(self.lengths, default=0),
            max(counts, default=0),
            starts[-1] == number and all(count == 1 for count in counts),
            torch.tensor(self.states, dtype=torch.int32) if self.states else None,
        )

    def _own_last(self, i: int, copies: tuple[list[int], list[int]]) -> None:
        """Give a sequence a copy of its last block, which others own too."""
        shared = self.blocks[i][-1]
        new = self._take()
        self._owners[shared] -= 1
        self.blocks[i][-1] = new
        copies[0].append(shared)
        copies[1].append(new)

    def _take(self) -> int:
        if not self._free:
            old = self.cache.num_blocks
            new = 2 * old
            self.cache.grow(new)
            self._free = list(range(new - 1, old - 1, -1))
        block = self._free.pop()
        self._owners[block] = 1
        return block

    def _drop(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            self._owners[block] -= 1
            if not self._owners[block]:
                del self._owners[block]
                self._free.append(block)

    def tables(self) -> Tensor:
        """Return the block tables, int32 ``[sequences, blocks]``."""
        if self._tables is None:
            width = max((len(b) for b in self.blocks), default=0) or 1
            rows = [b + [0] * (width - len(b)) for b in self.blocks]
            self._tables = torch.tensor(rows, dtype=torch.int32).view(len(rows), width)
        return self._tables

    # --------------------------------------------------------------------------------------------------------- changes

    def select(self, indices: Sequence[int]) -> None:
        """Let sequence i be what sequence ``indices[i]`` was; there may be more or fewer than before."""
        if list(indices) == list(range(len(self.lengths))):
            return
        former = self.blocks
        self.blocks = [list(former[i]) for i in indices]
        self.lengths = [self.lengths[i] for i in indices]
        for blocks in self.blocks:
            for block in blocks:
                self._owners[block] += 1
        for blocks in former:
            self._drop(blocks)
        self._tables = None
        if self.states:
            self._select_states(indices)

    def _select_states(self, indices: Sequence[int]) -> None:
        """Give each sequence the row of its source; those that share one get copies."""
        rows = [self.states[i] for i in indices]
        copies: tuple[list[int], list[int]] = ([], [])
        self.cache.grow_states(len(rows))
        free = sorted(set(range(self.cache.num_states)) - set(rows))
        taken: set[int] = set()
        for at, row in enumerate(rows):
            if row in taken:
                rows[at] = free.pop(0)
                copies[0].append(row)
                copies[1].append(rows[at])
            taken.add(row)
        self.cache.copy_states(*copies)
        self.states = rows

    def cut(self, counts: Sequence[int]) -> None:
        """Remove so many tokens from the end of each sequence."""
        size = self.cache.block_size
        partly = any(0 < n < old for n, old in zip(counts, self.lengths, strict=True))
        if self.states and partly:
            raise NotImplementedError(
                "IpexCache: tokens must not be removed from the end of a cache with states of recurrent layers, got"
                f" {max(counts)}: begin again with a new cache"
            )
        for i, count in enumerate(counts):
            length = max(self.lengths[i] - count, 0)
            kept = -(-length // size)
            self._drop(self.blocks[i][kept:])
            del self.blocks[i][kept:]
            self.lengths[i] = length
        self._tables = None

    def clear(self) -> None:
        """Remove all tokens."""
        self.cut(self.lengths)

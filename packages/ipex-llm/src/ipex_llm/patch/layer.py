# SPDX-License-Identifier: Apache-2.0
"""Decoder layers that run as one program each, in a model whose stack as a whole is not understood.

The model keeps its own forward, loop and cache. A layer's program writes keys and values to memory with room for more,
and shows the model's cache views of the part that is filled; code that replaces those (beams, another layer's own
forward) is noticed, and the views are copied once.
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import torch
from torch import Tensor, nn

from ipex_llm.arch.detect import Facts
from ipex_llm.kv_cache import LayerShape, Step
from ipex_llm.model_runner import Runner
from ipex_llm.patch.decoder import (
    CHANGED,
    Patch,
    Reason,
    check_inference,
    given_cache,
    patch_of,
    tell,
)
from ipex_llm.records import record_of, recorded, without

#: Rows that a new cache has room for beyond those that are needed.
ROOM = 64
#: Numbers of a mask up to which Python reads it faster than torch.
SMALL = 2048
OTHER = "the attention mask has more than what comes later and padding at both ends"
#: Of each sequence, the first key that is no padding, and the one after the last.
Spans = tuple[tuple[int, int], ...]
#: Caches of transformers 4 that have lists of keys and values.
_LISTS = ("DynamicCache", "HybridMambaAttentionDynamicCache")


# --------------------------------------------------------------------------------------------------------------- cache


@dataclasses.dataclass(frozen=True, slots=True)
class _Part:
    """What a cache of transformers has of one layer: rows from ``start`` on; earlier ones have left the window."""

    keys: Tensor
    values: Tensor
    start: int

    @property
    def end(self) -> int:
        return self.start + self.keys.shape[2]


@dataclasses.dataclass(slots=True)
class _Rows:
    """Keys and values of one layer, ``[B, kv_heads, capacity, head_dim]``; as programs see it, a block per sequence."""

    keys: Tensor
    values: Tensor

    @property
    def tensors(self) -> list[Tensor]:
        return [self.keys, self.values]

    @property
    def dtype(self) -> torch.dtype:
        return self.keys.dtype

    @property
    def block_size(self) -> int:
        return self.keys.shape[2]

    def shows(self, part: _Part) -> bool:
        """Return whether a part of a cache is a view of the rows from its place on."""
        return all(
            view.data_ptr() == whole[:, :, part.start :].data_ptr()
            and view.stride() == whole.stride()
            and view.shape[:2] == whole.shape[:2]
            for view, whole in ((part.keys, self.keys), (part.values, self.values))
        )

    @staticmethod
    def new(runner: Runner, batch: int, capacity: int) -> _Rows:
        shape = runner.shapes[0]
        assert isinstance(shape, LayerShape)  # layers with a state are not run alone
        size = (batch, shape.kv_heads, capacity, shape.head_dim)
        return _Rows(torch.zeros(size, dtype=runner.dtype), torch.zeros(size, dtype=runner.dtype))


class _Slot:
    """The place of one layer in a cache of transformers, of either form that it has had."""

    def __init__(self, cache: Any, index: int) -> None:
        from transformers.cache_utils import DynamicCache

        self.cache, self.index = cache, index
        self.layer: Any = None
        self.old = False
        layers = getattr(cache, "layers", None)
        if layers is not None:
            if index < len(layers):
                self.layer = layers[index]
            kind = type(self.layer).__name__
            if self.layer is not None and kind not in ("DynamicLayer", "DynamicSlidingWindowLayer"):
                raise Reason(f"the cache of a layer is a {kind}")
            if getattr(self.layer, "record_past", False):
                raise Reason("the cache of a layer keeps what leaves its window")
            if self.layer is None and type(cache) is not DynamicCache:
                raise Reason(f"past_key_values is a {type(cache).__name__}")
        elif type(cache).__name__ in _LISTS and hasattr(cache, "key_cache"):
            self.old = True
        else:
            raise Reason(f"past_key_values is a {type(cache).__name__}")
        if getattr(cache, "offloading", False):
            raise Reason("past_key_values is offloaded")

    def part(self) -> _Part | None:
        """Return what there is of the layer, or None if there is nothing."""
        if self.old:
            if self.index >= len(self.cache.key_cache):
                return None
            keys, values = self.cache.key_cache[self.index], self.cache.value_cache[self.index]
        elif self.layer is None or not self.layer.is_initialized:
            return None
        else:
            keys, values = self.layer.keys, self.layer.values
        if not keys.numel():
            return None
        seen = getattr(self.layer, "cumulative_length", keys.shape[2])
        return _Part(keys, values, seen - keys.shape[2])

    def show(self, rows: _Rows, past: int, new: int) -> None:
        """Let the layer have rows, the last ``new`` of which are new."""
        total = past + new
        if self.part() is None:  # the cache's own way to begin
            fresh = (whole[:, :, past:total] for whole in (rows.keys, rows.values))
            self.cache.update(*fresh, self.index)
            self.layer = None if self.old else self.cache.layers[self.index]
        elif self.old:
            if self.index == 0 and hasattr(self.cache, "_seen_tokens"):
                self.cache._seen_tokens += new
        elif hasattr(self.layer, "cumulative_length"):
            self.layer.cumulative_length += new
        window = getattr(self.layer, "sliding_window", None)
        first = 0 if window is None else max(0, total - window + 1)
        keys, values = rows.keys[:, :, first:total], rows.values[:, :, first:total]
        if self.old:
            self.cache.key_cache[self.index], self.cache.value_cache[self.index] = keys, values
        else:
            self.layer.keys, self.layer.values = keys, values


def _room(
    runner: Runner, slot: _Slot, part: _Part | None, batch: int, count: int, spare: int
) -> _Rows:
    """Return memory that has the rows of a layer and room for ``count`` more, and for ``spare`` that stay empty."""
    past = 0 if part is None else part.end
    record = recorded(slot.cache)
    if record.rows is None:
        record.rows = {}
    kept: dict[int, _Rows] = record.rows
    rows = kept.get(slot.index)
    if part is not None:
        if part.keys.shape[0] != batch or part.keys.dtype != runner.dtype:
            raise Reason("the cache was filled with another batch or dtype")
        if rows is not None and rows.shows(part) and past + count + spare <= rows.block_size:
            return rows
    # Rows of a cache that was emptied may still be somebody's: they are not taken again.
    needed = past + count + spare + ROOM
    rows = kept[slot.index] = _Rows.new(runner, batch, max(needed, 2 * past))
    if part is not None:
        rows.keys[:, :, part.start : past] = part.keys
        rows.values[:, :, part.start : past] = part.values
    return rows


@dataclasses.dataclass(frozen=True, slots=True)
class _Call:
    """Where the rows of one call go; the layers of one forward share it.

    Attributes:
        step: What a program must know.
        positions: int64 ``[rows]``, the places of all rows, which count where no others are given.
        spare: Rows at the end of the memory of a layer that stay empty.
        real: The rows that are no padding, among all of the call; None: all.
    """

    step: Step
    positions: Tensor
    spare: int = 0
    real: Tensor | None = None

    def shifted(self, rows: _Rows) -> _Rows:
        """Return the memory of a layer with a block that begins at each row, so that a sequence can begin anywhere."""
        if not self.spare:
            return rows
        batch, heads, capacity, size = rows.keys.shape
        count = (batch - 1) * heads * capacity + self.spare + 1
        shape = (count, heads, capacity - self.spare, size)
        strides = (size, capacity * size, size, 1)
        return _Rows(rows.keys.as_strided(shape, strides), rows.values.as_strided(shape, strides))


def _call(
    holder: Any,
    batch: int,
    past: int,
    count: int,
    rows: _Rows,
    spans: Spans | None,
    window: int = -1,
) -> _Call:
    """Return where new rows go.

    Args:
        holder: What the layers of one forward have in common, which remembers it: the mask or the cache, or None.
        batch: Number of sequences.
        past: Rows that each has, with its padding.
        count: New rows of each.
        rows: Memory of the layer.
        spans: Keys of each sequence that are no padding, or None: all.
        window: Keys before a row that it sees; negative: all.
    """
    capacity = rows.block_size
    if torch.compiler.is_compiling():
        holder = None  # Dynamo knows no attributes of tensors
    key = (batch, past, count, capacity, rows.keys.shape[1], spans, window)
    known = None if holder is None else record_of(holder).call
    if known is not None and known[0] == key:
        return known[1]  # type: ignore[no-any-return]
    if spans is None:
        first = torch.arange(batch, dtype=torch.int64).unsqueeze(1) * capacity + past
        step = Step(
            (first + torch.arange(count)).view(-1),
            torch.arange(batch, dtype=torch.int32).unsqueeze(1),
            torch.arange(batch + 1, dtype=torch.int32) * count,
            torch.full((batch,), past + count, dtype=torch.int32),
            past + count,
            count,
            count == 1,
        )
        made = _Call(step, _counted(batch, past, count))
    else:
        made = _padded(batch, past, count, rows, spans, window)
    if holder is not None:
        recorded(holder).call = key, made
    return made


def _spare(spans: Spans | None, total: int, window: int) -> int:
    """Return the last row that a sequence of `_padded` begins at."""
    if spans is None:
        return 0
    late = total - 1 - window if window >= 0 else 0
    return max(max(first, min(late, end - 1) if end < total else 0) for first, end in spans)


def _padded(batch: int, past: int, count: int, rows: _Rows, spans: Spans, window: int) -> _Call:
    # In Python: a call of torch takes longer than the numbers of a small batch.
    capacity, total = rows.block_size, past + count
    spare = _spare(spans, total, window)
    stride = rows.keys.shape[1] * capacity if spare else 1  # as `_Call.shifted` has the blocks
    starts = [max(past, first) for first, _ in spans]  # the first new rows behind the padding
    slots, sequences = [], []  # first key, new rows, keys
    for row, ((first, end), start) in enumerate(zip(spans, starts, strict=True)):
        block = row * stride
        slots.append(
            torch.arange(start - first, total - first) + (block + first) * (capacity - spare)
        )
        sequences.append((block + first, end - start, end - first))
        # A row of padding at the end sees no more than the last row before it: it is a sequence of its own. If all
        # keys have left its window, it sees nothing, and what comes out is nothing that anyone reads.
        for query in range(end, total):
            begin = max(first, min(query - window, end - 1)) if window >= 0 else first
            sequences.append((block + begin, 1, end - begin))
    real = None
    if any(start > past for start in starts):
        real = torch.cat(
            [torch.arange(at - past, count) + row * count for row, at in enumerate(starts)]
        )
    blocks, counts, lengths = zip(*sequences, strict=True)
    step = Step(
        torch.cat(slots),
        torch.tensor(blocks, dtype=torch.int32).unsqueeze(1),
        torch.tensor([0, *itertools.accumulate(counts)], dtype=torch.int32),
        torch.tensor(lengths, dtype=torch.int32),
        max(lengths),
        max(counts),
        count == 1,
    )
    return _Call(step, _counted(batch, past, count), spare, real)


def _counted(batch: int, past: int, count: int) -> Tensor:
    return torch.arange(past, past + count).expand(batch, count).reshape(-1)


def _spans(
    mask: Tensor, batch: int, start: int, past: int, count: int, window: int
) -> Spans | None:
    """Return the keys of each sequence that are no padding by a mask; None if no row sees padding.

    Args:
        mask: ``[B or 1, heads, count, keys from start on]``; the layers of one forward share it.
        batch: Number of sequences.
        start: Place of the first key.
        past: Rows that each sequence has.
        count: New rows of each.
        window: Keys before a row that it sees; negative: all.

    Raises:
        Reason: The mask says more than what comes later, is too far away, or is padding in front or at the end.
    """
    key = (batch, start, past, count, window)
    if torch.compiler.is_compiling():  # Dynamo knows no attributes of tensors
        found = _read(mask, *key)
    else:
        known = record_of(mask).pads
        if known is None or known[0] != key or not _unchanged(mask, known[1]):
            # Writes to an inference tensor are not counted: a copy tells whether there were any.
            state = mask.clone() if mask.is_inference() else mask._version
            known = key, state, _read(mask, *key)
            recorded(mask).pads = known
        found = known[2]
    if isinstance(found, str):
        raise Reason(found)
    return found


def _unchanged(mask: Tensor, state: Tensor | int) -> bool:
    if isinstance(state, int):
        return not mask.is_inference() and mask._version == state
    return torch.equal(mask, state)


def _read_small(seen: Tensor, batch: int, start: int, past: int, window: int) -> Spans | str | None:
    """Do as `_read` from where it knows which keys are seen; calls of torch take longer than a few hundred numbers."""
    total = start + seen.shape[-1]
    spans, plain = [], True
    for text in seen[:, 0].tolist():
        some = [row for row in text if True in row]
        if not some:
            return OTHER
        first = start + min(row.index(True) for row in some)
        end = total - min(row[::-1].index(True) for row in some)
        if end <= past:
            return OTHER
        for query, row in enumerate(text, past):
            low = max(first, query - window) if window >= 0 else first
            high = max(low, min(query + 1, end))
            low, high = min(low, total), min(high, total)
            expected = [False] * (low - start) + [True] * (high - low) + [False] * (total - high)
            if query >= first and row != expected:
                return OTHER
        plain &= first == max(start, past - window if window >= 0 else start) and end == total
        spans.append((first, end))
    return None if plain else tuple(spans * (batch // len(spans)))


def _read(
    mask: Tensor, batch: int, start: int, past: int, count: int, window: int
) -> Spans | str | None:
    other = OTHER
    total = past + count
    if mask.dim() != 4 or mask.shape[-2] != count or mask.shape[-1] < total - start:
        return other
    mask = mask[..., : total - start]  # transformers 4 makes one column too many
    if mask.dtype == torch.bool:
        seen = mask
    elif mask.is_floating_point():
        seen = mask == 0
        if not bool((seen | (mask <= torch.finfo(mask.dtype).min / 2)).all()):
            return other  # something is added to the scores
    else:
        return other
    if seen.numel() <= SMALL and seen.shape[1] == 1 and seen.shape[0] in (1, batch):
        return _read_small(seen, batch, start, past, window)
    queries, keys = torch.arange(past, total).unsqueeze(1), torch.arange(start, total)
    distance = queries - keys
    expected = distance >= 0
    if window >= 0:
        expected &= distance <= window
    if bool((seen == expected).all()):
        return None
    # The first key that any row sees; earlier ones are padding, or have left the window of all rows.
    some = seen[:, 0].any(1)
    if not bool(some.any(1).all()) or mask.shape[0] not in (1, batch):
        return other
    first = (start + some.to(torch.int8).argmax(1)).view(-1, 1, 1)
    # The key after the last one that any row sees: from there on is padding at the end.
    end = (total - some.flip(1).to(torch.int8).argmax(1)).view(-1, 1, 1)
    expected = expected & (keys >= first) & (keys < end)
    # What a row of padding in front sees is nothing that anyone reads.
    same = (seen == expected.unsqueeze(1)) | (queries < first).unsqueeze(1)
    if not bool(same.all() & (end > past).all()):
        return other
    pairs = torch.cat([first, end], 1).view(-1, 2).expand(batch, 2).tolist()
    return tuple((int(a), int(b)) for a, b in pairs)


# ---------------------------------------------------------------------------------------------------------- the layer


class LayerMixin(nn.Module):
    """Forward through a program; put in front of a decoder layer's class by `subclass`."""

    def __getstate__(self) -> dict[str, Any]:
        return without(self.__dict__, "runner")

    @property
    def _facts(self) -> Facts:
        patch: Patch = record_of(self).patch
        assert patch.layer is not None
        return patch.layer

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the layer."""
        facts = self._facts
        kwargs.update(zip(facts.names, args, strict=False))
        try:
            return self._run(kwargs)
        except Reason as reason:
            tell(f"{type(self).__name__}: runs its own forward: {reason}")
        return super().forward(**kwargs)

    def _run(self, kwargs: dict[str, Any]) -> Any:
        hidden = kwargs.get("hidden_states")
        runner = _usable(self, hidden)
        facts = self._facts
        if not isinstance(hidden, Tensor) or hidden.dim() != 3 or not hidden.numel():
            raise Reason("hidden_states is not [batch, tokens, width]")
        if hidden.dtype != runner.dtype or hidden.device.type != "cpu":
            raise Reason(f"hidden_states is {hidden.dtype} on {hidden.device}")
        for name in ("output_attentions", "output_router_logits", "return_shared_kv_states"):
            if kwargs.get(name) or _option(facts.config, name):
                raise Reason(f"argument {name}")
        batch, count = hidden.shape[:2]
        cache = given_cache(kwargs)
        cache = kwargs.get("past_key_value") if cache is None else cache
        slot = None if cache is None else _Slot(cache, facts.index)
        part = None if slot is None else slot.part()
        start, past = (0, 0) if part is None else (part.start, part.end)
        mask, spans = kwargs.get("attention_mask"), None
        attention = runner.plan.attentions[0]
        window = attention.window
        if mask is not None:
            hides = mask.dtype == torch.bool
            if hides and getattr(facts.config, "_attn_implementation", None) == "eager":
                raise Reason("the attention mask is bool, and the layer adds it to the scores")
            spans = _spans(mask, batch, start, past, count, window)
        if spans is not None and (
            attention.alibi_slopes is not None
            or (attention.rope is not None and kwargs.get("position_ids") is None)
        ):
            raise Reason("there is padding, and the places of the tokens are not given")
        spare = _spare(spans, past + count, window)
        if slot is None:
            rows = _Rows.new(runner, batch, count + spare)
        else:
            rows = _room(runner, slot, part, batch, count, spare)
        call = _call(cache if mask is None else mask, batch, past, count, rows, spans, window)
        given = kwargs.get("position_ids")
        positions = call.positions if given is None else _positions(given, batch, count)
        x = hidden.reshape(batch * count, -1)
        if call.real is None:
            y = runner.run(call.shifted(rows), x, positions, call.step)
        else:
            y = torch.zeros_like(x)
            real = call.real
            places = positions.index_select(0, real)
            some = runner.run(call.shifted(rows), x.index_select(0, real), places, call.step)
            y.index_copy_(0, real, some)
        if slot is not None:
            slot.show(rows, past, count)
        y = y.view(batch, count, -1)
        if not facts.in_tuple:
            return y
        return (y, cache) if kwargs.get("use_cache") else (y,)  # as some of transformers 4 do


def _option(config: Any, name: str) -> bool:
    """Return whether a configuration has an option on; a missing one takes transformers long to find."""
    return (name in vars(config) or hasattr(type(config), name)) and bool(getattr(config, name))


def _usable(layer: Any, hidden: Any) -> Runner:
    check_inference(layer, hidden)
    if torch.is_autocast_enabled("cpu"):
        raise Reason("autocast is on")
    runner = record_of(layer).runner
    if isinstance(runner, Runner) and runner.surroundings.changed():
        raise Reason(CHANGED)
    if not isinstance(runner, Runner) or not runner.fresh():
        patch = patch_of(layer)
        runner = None if patch is None else patch.rebuild(layer)
        if runner is None:
            raise Reason("its parameters have changed in a way that programs cannot follow")
    return runner


def _positions(given: Tensor, batch: int, count: int) -> Tensor:
    if given.dim() != 2 or given.shape[0] not in (1, batch) or given.shape[1] != count:
        raise Reason(f"position_ids of shape {list(given.shape)}")
    return given.to(torch.int64).expand(batch, count).reshape(-1)

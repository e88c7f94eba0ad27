# SPDX-License-Identifier: Apache-2.0
"""The cache of an encoder-decoder that runs as programs, as a cache of transformers.

Keys and values of the encoder's rows are made once and shared by all sequences of a row: choosing other beams moves
keys and values of their own tokens only. An empty EncoderDecoderCache is turned into one in place, and back when the
model's own forward needs it.
"""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ipex_core.module_swap.base import set_class
from ipex_llm.records import KEY, Record, update

if TYPE_CHECKING:
    from ipex_llm.model_runner.encoder_decoder import PairRunner


#: Tokens that there is room for at first, and at least as many more when it grows.
ROOM = 64


def _group(rows: Tensor, mask: Tensor | None) -> int:
    """Return how many neighbors always have the same rows and mask."""
    same = (rows[1:] == rows[:-1]).flatten(1).all(1)
    if mask is not None:
        same &= (mask[1:] == mask[:-1]).all(1)
    starts = ((~same).nonzero().flatten() + 1).tolist()
    return math.gcd(rows.shape[0], *starts)


class PairState:
    """What a batch of sequences has in the cache.

    Args:
        runner: Runs the decoder.
        rows: What the encoder gave, ``[R, S, width]``; equal neighbors share their keys and values.
        mask: int or bool ``[R, S]``, which of them are seen; None: all.

    Attributes:
        length: Tokens of each sequence.
        cross: Keys and values of the encoder's rows.
        cache: Keys and values of the tokens, layer by layer ``[R, heads, capacity, head_dim]``.
        mask: bool ``[G, 1, 1, S]``, or None.
        given: The mask as it came.
    """

    def __init__(self, runner: PairRunner, rows: Tensor, mask: Tensor | None) -> None:
        self.length = 0
        self.given = mask
        self.group = _group(rows, mask)
        self.sequences = rows.shape[0]
        self.cross = runner.cross(rows[:: self.group])
        self.mask: Tensor | None = None
        if mask is not None and not bool(mask.all()):
            self.mask = mask[:: self.group].bool()[:, None, None].contiguous()
        self._shape = (2 * len(runner.plan.layers), runner.heads, runner.head_dim)
        self._all = rows.new_empty(
            self._shape[0], self.sequences, runner.heads, 0, runner.head_dim, dtype=runner.dtype
        )
        self.cache: list[Tensor] = []

    def make_room(self, count: int) -> None:
        """Make room for ``count`` more tokens of each sequence."""
        total, (number, heads, size) = self.length + count, self._shape
        if total <= self._all.shape[3]:
            return
        former = self._all
        room = max(2 * former.shape[3], total + ROOM)
        self._all = former.new_empty(number, self.sequences, heads, room, size)
        self._all[:, :, :, : self.length] = former[:, :, :, : self.length]
        self.cache = list(self._all.unbind(0))

    def select(self, indices: Tensor) -> None:
        """Let sequence i be what sequence ``indices[i]`` was."""
        count = len(indices)
        if count == self.sequences and torch.equal(indices, torch.arange(count)):
            return
        used = self._all[:, :, :, : self.length].index_select(1, indices)
        places = indices // self.group
        within = count % self.group == 0 and bool(
            (places.view(-1, self.group) == places[:: self.group].unsqueeze(1)).all()
        )
        owners = places[:: self.group] if within else places
        if not within:
            self.group = 1
        if not torch.equal(owners, torch.arange(self.cross[0].shape[0])):
            self.cross = [one.index_select(0, owners) for one in self.cross]
            self.mask = None if self.mask is None else self.mask[owners]
            self.given = None if self.given is None else self.given[indices]
        if count != self.sequences:
            self.sequences = count
            self._all = used.new_empty(*used.shape[:3], self._all.shape[3], used.shape[4])
            self.cache = list(self._all.unbind(0))
        self._all[:, :, :, : self.length] = used

    def tokens_of(self, layer: int) -> tuple[Tensor, Tensor]:
        """Return keys and values of the tokens, ``[R, heads, length, head_dim]``."""
        key, value = self._all[2 * layer : 2 * layer + 2, :, :, : self.length].clone()
        return key, value

    def rows_of(self, layer: int) -> tuple[Tensor, Tensor]:
        """Return keys and values of the encoder's rows, ``[R, heads, S, head_dim]``."""
        key, value = (
            one.repeat_interleave(self.group, 0) for one in self.cross[2 * layer : 2 * layer + 2]
        )
        return key, value


def state_of(cache: Any) -> PairState | None:
    """Return the state of a cache that programs fill, or None."""
    record = getattr(cache, "__dict__", {}).get(KEY)
    state = None if record is None else record.cache
    return state if isinstance(state, PairState) else None


def give_back(cache: Any) -> None:
    """Make a cache that programs have filled one of transformers again; leave others alone."""
    state = state_of(cache)
    if state is None:
        return
    from transformers.cache_utils import EncoderDecoderCache

    set_class(cache, EncoderDecoderCache)
    update(cache, cache=None)
    for layer in range(len(state.cross) // 2):
        cache.self_attention_cache.update(*state.tokens_of(layer), layer)
        cache.cross_attention_cache.update(*state.rows_of(layer), layer)
        cache.is_updated[layer] = True


@functools.cache
def _class() -> Any:
    """Return the class of such a cache; transformers is imported now."""
    from transformers.cache_utils import EncoderDecoderCache

    def part(name: str) -> property:
        def get(self: Any) -> Any:
            give_back(self)  # somebody wants to see it
            return self.__dict__[name]

        return property(get, lambda self, value: self.__dict__.__setitem__(name, value))

    class IpexEncoderDecoderCache(EncoderDecoderCache):  # type: ignore[misc]
        """Keys and values of tokens and of the encoder's rows; see `ipex_llm`."""

        self_attention_cache = part("self_attention_cache")
        cross_attention_cache = part("cross_attention_cache")

        @property
        def _state(self) -> PairState:
            state: PairState = self.__dict__[KEY].cache
            return state

        def __repr__(self) -> str:
            state = self._state
            return f"IpexEncoderDecoderCache({state.sequences} sequences, {state.length} tokens)"

        def __len__(self) -> int:
            return len(self._state.cross) // 2

        def get_seq_length(self, layer_idx: int = 0, *_: Any) -> int:
            return self._state.length

        def get_max_length(self, *_: Any) -> int:
            return -1

        def get_max_cache_shape(self, *_: Any) -> int:
            return -1

        def reorder_cache(self, beam_idx: Tensor) -> None:
            self._state.select(beam_idx)

        def batch_select_indices(self, indices: Tensor) -> None:
            if indices.dtype == torch.bool:
                indices = indices.nonzero().flatten()
            self._state.select(indices)

        def batch_repeat_interleave(self, repeats: int) -> None:
            state = self._state
            state.select(torch.arange(state.sequences).repeat_interleave(repeats))

        @property
        def is_compileable(self) -> bool:
            return False

    IpexEncoderDecoderCache.__qualname__ = "IpexEncoderDecoderCache"
    return IpexEncoderDecoderCache


def adopt(
    cache: Any, runner: PairRunner, rows: Tensor, mask: Tensor | None
) -> tuple[Any, str | None]:
    """Turn a cache of transformers into ours, or make one.

    Args:
        cache: None, one of ours or an empty EncoderDecoderCache of two DynamicCaches.
        runner: Runs the decoder.
        rows: What the encoder gave, ``[R, S, width]``.
        mask: Which of the rows are seen, ``[R, S]``, or None.

    Returns:
        The cache and None, or ``cache`` and why it cannot be used.
    """
    from transformers.cache_utils import DynamicCache, EncoderDecoderCache

    if state_of(cache) is not None:
        return cache, None
    if cache is None:
        cache = EncoderDecoderCache(DynamicCache(), DynamicCache())
    if type(cache) is not EncoderDecoderCache:
        return cache, f"the cache is a {type(cache).__name__}"
    parts = (cache.self_attention_cache, cache.cross_attention_cache)
    if any(type(part) is not DynamicCache or getattr(part, "offloading", False) for part in parts):
        return cache, f"the cache is of {type(parts[0]).__name__} and {type(parts[1]).__name__}"
    if any(part.get_seq_length() > 0 for part in parts):
        return cache, "the cache was filled by the model's own forward or before optimize"
    cache.__dict__[KEY] = Record(cache=PairState(runner, rows, mask))
    set_class(cache, _class())
    return cache, None

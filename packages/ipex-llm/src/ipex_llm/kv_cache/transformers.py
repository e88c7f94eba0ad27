# SPDX-License-Identifier: Apache-2.0
"""The paged cache as a cache of transformers, for its own generation loops.

`IpexCache` is a `transformers.DynamicCache`, and an empty DynamicCache is turned into one in place, so references to
it stay valid. Its length is the length of the padded batch, as transformers counts; what is stored is unpadded.
"""

from __future__ import annotations

import copy
import functools
import inspect
import typing
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ipex_core.module_swap.base import set_class
from ipex_llm.kv_cache import (
    CacheMemoryError,
    PagedCache,
    Sequences,
    Step,
    available_memory,
    format_bytes,
)
from ipex_llm.records import KEY, Record

if TYPE_CHECKING:
    from ipex_llm.model_runner import Runner

#: Rows of a block: a beam that leaves its neighbors copies at most so many rows.
BLOCK = 32


class CacheState:
    """What a batch of sequences has in the cache, with the padding that transformers counts.

    Args:
        runner: Runs the decoder.
        batch: Number of sequences.
        tokens: Tokens per sequence to make room for at first.
        dtype: dtype of the cache, or None for the model's own.
    """

    def __init__(
        self, runner: Runner, batch: int, tokens: int, dtype: torch.dtype | None = None
    ) -> None:
        per = -(-max(tokens, 1) // BLOCK) + 1
        needed = runner.cache_bytes(max(batch, 1) * per, BLOCK, dtype) + runner.state_bytes(batch)
        free = available_memory(runner.device)
        if free is not None and needed > free:
            raise CacheMemoryError(
                f"IpexCache: the cache must fit the free memory of {format_bytes(free)}, got {batch} sequences of"
                f" {tokens} tokens, {format_bytes(needed)}; ask for fewer, or give optimize kv_cache_dtype='int8'"
            )
        self.cache: PagedCache = runner.new_cache(max(batch, 1) * per, BLOCK, dtype)
        self.sequences = Sequences(self.cache, batch)
        self.dtype = runner.dtype
        self.length = 0  # as transformers counts: with padding
        #: bool [batch, length]: which places are tokens and not padding; None: all.
        self.valid: Tensor | None = None
        self._fallback: tuple[Step, Tensor | None] | None = None
        self.next_valid: Tensor | None = None
        #: Keys and values of pictures ``[B, kv_heads, S, head_dim]``, for each layer that reads them; at first nothing.
        self.pictures: list[Tensor] = []

    def see(self, rows: list[Tensor]) -> None:
        """Store keys and values of pictures, behind earlier ones."""
        before = self.pictures
        both = zip(before, rows, strict=True)
        self.pictures = [torch.cat(pair, dim=2) for pair in both] if before else rows

    def append(self, batch: int, count: int, new: Tensor | None) -> Step:
        """Make room for ``count`` places of each sequence.

        Args:
            batch: Number of sequences; must equal the number in the cache.
            count: New places of each sequence.
            new: bool ``[batch, count]``, which of them are tokens; None: all.
        """
        if batch != len(self.sequences):
            raise ValueError(
                f"IpexCache: batch must be {len(self.sequences)}, the number of sequences in the cache, got {batch}"
            )
        if new is None:
            step = self.sequences.append(count)
        else:
            step = self.sequences.append(new.sum(1).tolist())
        if self.valid is not None or new is not None:
            past = self.valid
            if past is None:
                past = torch.ones(batch, self.length, dtype=torch.bool)
            if new is None:
                new = torch.ones(batch, count, dtype=torch.bool)
            self.valid = torch.cat([past, new], dim=1)
        self.length += count
        return step

    def select(self, indices: Sequence[int]) -> None:
        """Let sequence i be what sequence ``indices[i]`` was."""
        self.sequences.select(indices)
        rows = torch.tensor(indices, dtype=torch.int64)
        self.pictures = [one[rows] for one in self.pictures]
        if self.valid is not None:
            self.valid = self.valid[rows]

    def cut(self, count: int) -> None:
        """Remove the last ``count`` places."""
        count = min(count, self.length)
        if count <= 0:
            return
        if self.valid is None:
            self.sequences.cut([count] * len(self.sequences))
        else:
            self.sequences.cut(self.valid[:, self.length - count :].sum(1).tolist())
            self.valid = self.valid[:, : self.length - count]
        self.length -= count

    # ------------------------------------------------------------ for the own forward of a model (DynamicCache)

    def update(self, key: Tensor, value: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        """Store padded keys and values ``[B, kv_heads, n, head_dim]`` of a layer and return all of it."""
        batch, _, count, _ = key.shape
        if layer == 0:
            new, self.next_valid = self.next_valid, None
            if new is not None and bool(new.all()):
                new = None
            self._fallback = self.append(batch, count, new), new
        assert self._fallback is not None
        step, new = self._fallback
        shape: Any = self.cache.layers[layer]
        parts: tuple[Tensor, Tensor] = (key, value)
        if shape.latent:
            if key.shape[1] != 1 or key.shape[-1] != shape.latent:
                raise NotImplementedError(
                    f"IpexCache: keys must be latents of shape [B, 1, n, {shape.latent}], got {tuple(key.shape)}: this"
                    " version of the model's own forward has no latents. Pass use_cache=False."
                )
            both = torch.cat([key, value], dim=-1)
            parts = (both, both)
        elif shape.values is not None:
            missing = shape.head_dim - value.shape[-1]
            parts = key, torch.nn.functional.pad(value, (0, missing))
        repeats = key.shape[1] // shape.kv_heads
        if repeats > 1:  # Falcon's own forward repeats keys and values for each query head
            parts = (key[:, ::repeats], parts[1][:, ::repeats])
        rows = []
        for part in parts:
            flat = part.transpose(1, 2)
            flat = flat.flatten(0, 1) if new is None else flat[new.to(flat.device)]
            rows.append(flat.to(self.dtype).contiguous())
        tensors = self.cache.tensors_of(layer)
        scales: dict[str, Any] = {}
        if self.cache.row_scales:
            scales = {"key_scales": tensors[2], "value_scales": tensors[3]}
        elif self.cache.scales is not None:
            scales = dict(zip(("k_scale", "v_scale"), self.cache.scales[layer], strict=True))
        slots = step.slots.to(tensors[0].device)
        torch.ops.ipex.reshape_and_cache(*rows, tensors[0], tensors[1], slots, **scales)
        found = self.padded(layer)
        if repeats > 1:
            found = tuple(part.repeat_interleave(repeats, dim=1) for part in found)  # type: ignore[assignment]
        return found[0].to(key.dtype), found[1].to(value.dtype)

    def padded(self, layer: int) -> tuple[Tensor, Tensor]:
        """Return keys and values ``[B, kv_heads, length, head_dim]``, zeros at padding."""
        parts: tuple[list[Tensor], list[Tensor]] = ([], [])
        shape = self.cache.layers[layer]
        if shape is None:
            state = self.cache.states[layer]
            what = "which stores nothing" if state is None else "which keeps a state"
            raise NotImplementedError(
                f"IpexCache: layer must have keys and values, got layer {layer}, {what}"
            )
        for i, (blocks, length) in enumerate(
            zip(self.sequences.blocks, self.sequences.lengths, strict=True)
        ):
            for out, rows in zip(parts, self.cache.rows(layer, blocks, length), strict=True):
                if self.valid is not None:
                    wide = rows.new_zeros(rows.shape[0], self.length, rows.shape[-1])
                    wide[:, self.valid[i].to(rows.device)] = rows
                    rows = wide
                out.append(rows)
        return torch.stack(parts[0]), torch.stack(parts[1])


def state_of_cache(cache: Any) -> CacheState | None:
    """Return the state of an `IpexCache`, or None for other caches and for an unused one."""
    record = getattr(cache, "__dict__", {}).get(KEY)
    state = None if record is None else record.cache
    return state if isinstance(state, CacheState) else None


@functools.cache
def cache_class() -> Any:
    """Return the class `IpexCache`; transformers is imported now."""
    from transformers.cache_utils import Cache, DynamicCache

    removes = (
        "tokens_to_remove" in inspect.signature(Cache.crop).parameters
        if hasattr(Cache, "crop")
        else False
    )

    class IpexCache(DynamicCache):  # type: ignore[misc]
        """Keys and values in blocks; see `ipex_llm`."""

        @property
        def _state(self) -> CacheState:
            state: CacheState = self.__dict__[KEY].cache
            return state

        def __repr__(self) -> str:
            state = self._state
            return f"IpexCache({len(state.sequences)} sequences, {state.length} tokens)"

        def __len__(self) -> int:
            return len(self._state.cache.layers)

        def __iter__(self) -> Any:
            for layer in range(len(self)):
                yield (*self._state.padded(layer), None)

        def __getitem__(self, layer: int) -> tuple[Tensor, Tensor]:
            return self._state.padded(layer)

        def to_legacy_cache(self) -> tuple[tuple[Tensor, Tensor], ...]:
            return tuple(self._state.padded(layer) for layer in range(len(self)))

        def get_seq_length(self, layer_idx: int = 0, *_: Any) -> int:
            return self._state.length

        def get_max_length(self, *_: Any) -> int:
            return -1

        def get_max_cache_shape(self, *_: Any) -> int:
            return -1

        def get_mask_sizes(self, query_length: Any, layer_idx: int = 0) -> tuple[int, int]:
            if isinstance(query_length, torch.Tensor):  # a cache_position, in older versions
                query_length = query_length.shape[0]
            return self._state.length + query_length, 0

        def update(
            self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any
        ) -> tuple[Tensor, Tensor]:
            return self._state.update(key_states, value_states, layer_idx)

        def reorder_cache(self, beam_idx: Tensor) -> None:
            self._state.select(beam_idx.tolist())

        def batch_select_indices(self, indices: Tensor) -> None:
            if indices.dtype == torch.bool:
                indices = indices.nonzero().flatten()
            self._state.select(indices.tolist())

        def batch_repeat_interleave(self, repeats: int) -> None:
            count = len(self._state.sequences)
            self._state.select([i for i in range(count) for _ in range(repeats)])

        def crop(self, max_length: int) -> None:
            state = self._state
            max_length = int(max_length)  # a tensor where drafts are verified, in some releases
            if max_length < 0:
                state.cut(-max_length)
            elif max_length > 0 or not removes:
                state.cut(state.length - max_length)

        def reset(self) -> None:
            self._state.cut(self._state.length)
            self._state.pictures = []

        def activate_past_recording(self) -> None:
            pass

        @property
        def batch_size(self) -> int:
            return len(self._state.sequences)

        @property
        def is_compileable(self) -> bool:
            return False

        @property
        def is_initialized(self) -> bool:
            return True

        @property
        def is_croppable(self) -> bool:
            return not self._state.cache.has_states

        @property
        def is_sliding(self) -> list[bool]:
            return [False] * len(self)

        @property
        def is_linear(self) -> list[bool]:
            return [False] * len(self)

        @property
        def is_dummy(self) -> list[bool]:
            return [False] * len(self)

        @property
        def seen_tokens(self) -> int:
            return self._state.length

    IpexCache.__qualname__ = "IpexCache"
    return IpexCache


def is_filled(cache: Any) -> bool:
    """Return whether a cache of transformers has tokens."""
    if (
        state_of_cache(cache) is None
        and getattr(cache, "layers", None)
        and all(getattr(cache, "is_linear", [False]))
    ):
        return bool(cache.has_previous_state())  # such caches count no tokens
    return bool(cache.get_seq_length() > 0)


def _linear_class(decoder: Any) -> Any:
    """Return the class of caches that a decoder's forward names, if it keeps states of linear attention, or None."""
    parameters = inspect.signature(decoder.forward).parameters
    found = parameters.get("cache", parameters.get("past_key_values"))
    kinds = () if found is None else typing.get_args(found.annotation) or (found.annotation,)
    return next((kind for kind in kinds if hasattr(kind, "set_linear_cache")), None)


def give_up(cache: Any, config: Any, decoder: Any, places: Sequence[int] = ()) -> bool:
    """Turn an `IpexCache` into the cache that transformers makes for a decoder, with the same contents.

    Args:
        cache: The cache.
        config: Of the decoder.
        decoder: Its stock class.
        places: The indices that the layers of the cache have in the model, where layers that read pictures stand
            between them, or layers run several times; empty: it has no such layers.

    Returns:
        False if this transformers keeps states in caches of another form, and there are some.
    """
    from transformers.cache_utils import DynamicCache

    state = state_of_cache(cache)
    assert state is not None
    linear = _linear_class(decoder)
    portable = all(shape is None or shape.portable for shape in state.cache.states)
    plain = portable and hasattr(DynamicCache, "update_recurrent_state")
    whole = any(shape is not None and shape.whole for shape in state.cache.layers)
    if state.length and (whole or (not plain and linear is None)):
        return False
    set_class(cache, linear or DynamicCache)
    cache.__dict__.clear()
    cache.__init__(**({} if linear else {"config": config}))
    if not state.length:
        return True
    own: list[int] = []
    for place in places:
        # Where a layer runs again, transformers has a layer behind all others (Dory).
        if place in own:
            cache.layers.append(copy.deepcopy(cache.layers[place]))
            place = len(cache.layers) - 1
        own.append(place)
    rows = torch.tensor(state.sequences.states)
    begun = torch.tensor([length > 0 for length in state.sequences.lengths])
    for index, shape in enumerate(state.cache.states):
        place = own[index] if places else index
        if state.cache.layers[index] is not None:
            keys, values = state.padded(index)
            cache.update(keys.to(state.dtype), values.to(state.dtype), place)
        if shape is None:
            continue
        found = [part[rows] for part in state.cache.states_of(index)]
        for part in found:
            part[~begun] = 0
        if linear or shape.history is None:
            cache.set_linear_cache(place, found[0].to(state.dtype))
            continue
        steps, size = found[0].transpose(1, 2), shape.history[0] + 1
        if shape.others:  # keys and values, then what is behind each block
            behind = (x.transpose(1, 2) for x in found[1:3])
            for at, one in enumerate((*steps.chunk(2, 1), *behind)):
                cache.update_conv_state(one.float(), place, state_idx=at, conv_kernel_size=size)
            continue
        cache.update_conv_state(steps, place, conv_kernel_size=size)
        if shape.state is not None:
            swapped = found[1].transpose(-1, -2) if shape.values_first else found[1]
            cache.update_recurrent_state(swapped.contiguous(), place)
    others = [i for i in range(len(places) + len(state.pictures)) if i not in places]
    for keys, values, index in zip(state.pictures[::2], state.pictures[1::2], others, strict=False):
        cache.update(keys, values, index)
    return True


def adopt(
    cache: Any, runner: Runner, batch: int, tokens: int, dtype: torch.dtype | None = None
) -> tuple[Any, str | None]:
    """Turn a cache of transformers into ours, or make one.

    Args:
        cache: None, an `IpexCache` or a DynamicCache.
        runner: Runs the decoder.
        batch: Sequences of the batch.
        tokens: Tokens to make room for.
        dtype: dtype of a new cache.

    Returns:
        The cache and None, or ``cache`` and why it cannot be used.
    """
    from transformers.cache_utils import DynamicCache

    kind = cache_class()
    if cache is None:
        cache = kind.__new__(kind)
        DynamicCache.__init__(cache)
    elif isinstance(cache, kind):
        if state_of_cache(cache) is not None:
            return cache, None
    elif type(cache) is not DynamicCache:
        return cache, f"past_key_values is a {type(cache).__name__}"
    elif getattr(cache, "offloading", False):
        return cache, "past_key_values is offloaded"
    elif is_filled(cache):
        return cache, "past_key_values was filled by another model or before optimize"
    set_class(cache, kind)
    cache.layers = []
    cache.__dict__[KEY] = Record(cache=CacheState(runner, batch, tokens, dtype))
    return cache, None

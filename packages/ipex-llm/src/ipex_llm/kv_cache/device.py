# SPDX-License-Identifier: Apache-2.0
"""A quantized cache of keys and values on a device, for models that run their own forward there.

The model asks its cache of transformers for all keys and values of a layer, in each call. What is stored are the 8-bit
numbers of a paged cache in the memory of the device; the rows of one layer at a time are read back from it.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ipex_core.errors import OpArgumentError
from ipex_core.module_swap.base import set_class
from ipex_llm.arch import AttentionPlan, DecoderPlan
from ipex_llm.kv_cache import CacheShape, LayerShape, PagedCache
from ipex_llm.kv_cache.transformers import (
    CacheState,
    cache_class,
    is_filled,
    state_of_cache,
)
from ipex_llm.records import KEY, Record


class _Memory:
    """What `CacheState` asks of a runner: the memory of a cache."""

    def __init__(
        self,
        shapes: Sequence[CacheShape],
        dtype: torch.dtype,
        device: torch.device,
        scales: Sequence[tuple[float, float]] | None,
    ) -> None:
        self.shapes, self.dtype, self.device, self.scales = shapes, dtype, device, scales

    def cache_bytes(self, *_: Any) -> int:
        return 0  # the device tells itself what does not fit

    def state_bytes(self, *_: Any) -> int:
        return 0

    def new_cache(self, num_blocks: int, block_size: int, dtype: torch.dtype) -> PagedCache:
        return PagedCache(
            self.shapes, num_blocks, block_size, dtype, self.scales, device=self.device
        )


class DeviceCacheState(CacheState):
    """The state of a cache whose sequences are stored with their padding, so that all have the same length."""

    def padded(self, layer: int) -> tuple[Tensor, Tensor]:
        """Return keys and values ``[B, kv_heads, length, head_dim]``."""
        cache = self.cache
        table = self.sequences.tables().to(cache.device)
        batch, blocks = table.shape
        keys, values = cache.rows(layer, table.flatten(), batch * blocks * cache.block_size)
        found = []
        for rows in (keys, values):
            whole = rows.unflatten(1, (batch, blocks * cache.block_size)).transpose(0, 1)
            found.append(whole[:, :, : self.length])
        return found[0], found[1]


def shapes_of(plan: DecoderPlan | None, reason: str | None) -> list[CacheShape]:
    """Return what the layers of a decoder store.

    Raises:
        NotImplementedError: A quantized cache is not for this model.
    """
    problem = f"its structure is not understood: {reason}" if plan is None else None
    shapes: list[CacheShape] = []
    for layer in () if plan is None else plan.layers:
        attention = layer.attention
        if layer.beside is not None or layer.convs or not isinstance(attention, AttentionPlan):
            problem = "it has layers that keep a state"
        elif layer.picture is not None:
            problem = "it has layers that read pictures"
        elif attention.latent is not None:
            problem = "it caches latents"
        elif attention.value_dim is not None:
            problem = "its keys and values have unlike widths"
        else:
            shapes.append(LayerShape(attention.kv_heads, attention.head_dim))
    if problem is not None:
        raise NotImplementedError(
            f"optimize: kv_cache_dtype must be None for this model on device 'xpu', got one: {problem}"
        )
    return shapes


def quantize_cache(
    model: nn.Module,
    shapes: Sequence[CacheShape],
    dtype: torch.dtype,
    scales: Sequence[tuple[float, float]] | None,
) -> None:
    """Let a model on a device keep keys and values as 8-bit numbers.

    Args:
        model: The model; its calls get another cache.
        shapes: What its layers store.
        dtype: int8, float8_e4m3fn or float8_e5m2.
        scales: Of each layer what a 1 of its keys and of its values stands for; None: int8 rows have scales of their
            own, and floats none.
    """
    names = inspect.signature(model.forward).parameters
    place = next((name for name in ("cache", "past_key_values") if name in names), None)

    def before(
        module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        given = dict(zip(names, args, strict=False)) | kwargs
        key = next((n for n in ("cache", "past_key_values") if given.get(n) is not None), place)
        use = given.get("use_cache")
        if use is None:
            use = getattr(module.config, "use_cache", True)
        cache = given.get(key) if key is not None else None
        if key is None or module.training or (cache is None and not use):
            return args, kwargs
        inputs = given.get("input_ids")
        if inputs is None:
            inputs = given["inputs_embeds"]
        own = next(module.parameters()).dtype
        own = own if own.is_floating_point else torch.float32
        memory = _Memory(shapes, own, inputs.device, scales)
        given[key] = _adopt(cache, memory, inputs.shape[0], inputs.shape[1] + 64, dtype)
        return (), given

    model.register_forward_pre_hook(before, with_kwargs=True)


def _adopt(cache: Any, memory: _Memory, batch: int, tokens: int, dtype: torch.dtype) -> Any:
    from transformers.cache_utils import DynamicCache

    kind = cache_class()
    if cache is None:
        cache = kind.__new__(kind)
        DynamicCache.__init__(cache)
    elif isinstance(cache, kind) and state_of_cache(cache) is not None:
        return cache
    elif type(cache) is not DynamicCache or is_filled(cache):
        state = "one that is filled" if type(cache) is DynamicCache else type(cache).__name__
        raise OpArgumentError(
            f"{type(cache).__name__}: past_key_values must be None or an empty DynamicCache for a model with"
            f" kv_cache_dtype, got {state}"
        )
    set_class(cache, kind)
    cache.layers = []
    cache.__dict__[KEY] = Record(cache=DeviceCacheState(memory, batch, tokens, dtype))  # type: ignore[arg-type]
    return cache

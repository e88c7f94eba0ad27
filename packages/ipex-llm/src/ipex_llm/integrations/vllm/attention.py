# SPDX-License-Identifier: Apache-2.0
"""vLLM's V1 attention on the ops of ipex: a backend, its metadata and its implementation.

The cache of a layer is ``[num_blocks, kv_heads, block_size, 2 * head_size]`` to vLLM. The interior of a head's part of
a block is the backend's own: here the keys of all its rows, then the values.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionImpl,
    AttentionMetadataBuilder,
    AttentionType,
    MultipleOf,
)
from vllm.v1.kv_cache_interface import CrossAttentionSpec

from ipex_core.library.spec import FLOATS
from ipex_llm.integrations.vllm.cpu_platform import CACHE_DTYPES, MAX_HEAD_SIZE, check_cache_dtype

__all__ = ["IpexAttentionBackend", "IpexAttentionImpl", "IpexMetadata", "IpexMetadataBuilder"]

#: Kinds without a cache: queries, keys and values are of the same tokens.
_WITHOUT_CACHE = (AttentionType.ENCODER, AttentionType.ENCODER_ONLY)


class IpexAttentionBackend(AttentionBackend):
    """What vLLM asks a backend about."""

    # One call of vLLM's op for each layer, not two.
    forward_includes_kv_cache_update = True
    accept_output_buffer = True
    supported_dtypes: ClassVar = list(FLOATS)
    supported_kv_cache_dtypes: ClassVar = list(CACHE_DTYPES)

    @staticmethod
    def get_name() -> str:
        """Return a name of vLLM's enumeration of backends, which it looks up."""
        return "CPU_ATTN"

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[Any]:
        """Return that blocks may have any size."""
        return [MultipleOf(1)]

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        """Return no list: `supports_head_size` decides."""
        return []

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        """Return whether the ops have heads of this size."""
        return 0 < head_size <= MAX_HEAD_SIZE

    @classmethod
    def supported_kv_cache_layouts(cls) -> Any:
        """Return the one order of dimensions that the ops read: heads before rows."""
        from vllm.v1.kv_cache_interface import KVCacheLayout

        return (KVCacheLayout.LBHNC,)

    @classmethod
    def supports_non_causal(cls) -> bool:
        """Return True."""
        return True

    @classmethod
    def supports_sliding_window(cls) -> bool:
        """Return True."""
        return True

    @classmethod
    def supports_sink(cls) -> bool:
        """Return True."""
        return True

    @classmethod
    def supports_attn_type(cls, attn_type: str) -> bool:
        """Return whether the kind of attention is one of the four."""
        return attn_type in (
            AttentionType.DECODER,
            AttentionType.ENCODER_DECODER,
            *_WITHOUT_CACHE,
        )

    @staticmethod
    def get_impl_cls() -> type[IpexAttentionImpl]:
        """Return the implementation."""
        return IpexAttentionImpl

    @staticmethod
    def get_builder_cls() -> type[IpexMetadataBuilder]:
        """Return the builder of metadata."""
        return IpexMetadataBuilder


@dataclass
class IpexMetadata:
    """What all layers of a step share.

    Attributes:
        num_actual_tokens: Tokens without padding.
        max_query_len: Most new tokens of a sequence.
        max_seq_len: Most keys of a sequence.
        query_start_loc: ``[sequences + 1]`` int32, offsets of the new tokens.
        key_start_loc: ``[sequences + 1]`` int32, running sum of the numbers of keys.
        seq_lens: ``[sequences]`` int32, numbers of keys.
        block_table: ``[sequences, blocks]`` int32.
        slot_mapping: ``[tokens]`` int64, the rows of the cache for the new tokens.
        causal: Whether a query sees no later keys.
    """

    num_actual_tokens: int
    max_query_len: int
    max_seq_len: int
    query_start_loc: Tensor
    key_start_loc: Tensor
    seq_lens: Tensor
    block_table: Tensor
    slot_mapping: Tensor
    causal: bool = True


class IpexMetadataBuilder(AttentionMetadataBuilder):
    """Makes the metadata of a step from vLLM's description of the batch."""

    def __init__(
        self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self.cross = isinstance(kv_cache_spec, CrossAttentionSpec)

    def build(
        self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False
    ) -> IpexMetadata:
        """Return the metadata of a step.

        Raises:
            NotImplementedError: The batch mixes causal and other sequences.
        """
        batch = common_attn_metadata
        if isinstance(batch.causal, Tensor):
            raise NotImplementedError(
                "vLLM plug-in: causal must be one bool for the batch, got one for each sequence, which the attention"
                " ops do not have"
            )
        count = batch.num_reqs
        keys = torch.zeros(count + 1, dtype=torch.int32)
        torch.cumsum(batch.seq_lens[:count], 0, dtype=torch.int32, out=keys[1:])
        return IpexMetadata(
            num_actual_tokens=batch.num_actual_tokens,
            max_query_len=batch.max_query_len,
            max_seq_len=batch.max_seq_len,
            query_start_loc=batch.query_start_loc[: count + 1],
            key_start_loc=keys,
            seq_lens=batch.seq_lens[:count],
            block_table=batch.block_table_tensor[:count],
            slot_mapping=batch.slot_mapping,
            causal=bool(batch.causal) and not self.cross,
        )


class IpexAttentionImpl(AttentionImpl):
    """The attention of one layer."""

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int,
        alibi_slopes: list[float] | None,
        sliding_window: int | None,
        kv_cache_dtype: str,
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        sinks: Tensor | None = None,
    ) -> None:
        self.num_heads = num_heads
        self.head_size = head_size
        self.scale = float(scale)
        self.num_kv_heads = num_kv_heads
        self.alibi_slopes = (
            None if alibi_slopes is None else torch.tensor(alibi_slopes, dtype=torch.float32)
        )
        # vLLM counts the query itself, the ops do not.
        self.window = -1 if not sliding_window or sliding_window < 0 else sliding_window - 1
        self.kv_cache_dtype = kv_cache_dtype
        self.softcap = float(logits_soft_cap or -1.0)
        self.attn_type = attn_type
        self.kv_sharing_target_layer_name = kv_sharing_target_layer_name
        self.sinks = sinks
        self._views: tuple[Tensor, torch.dtype, Tensor, Tensor] | None = None
        if sinks is not None and sinks.shape[0] != num_heads:
            raise ValueError(
                f"vLLM plug-in: sinks must have one number for each of {num_heads} heads, got {sinks.shape[0]}"
            )

    def caches(self, kv_cache: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return keys and values ``[num_blocks, kv_heads, block_size, head_size]`` of a layer's cache, as views."""
        # A layer has the same cache in each step: the views are made once.
        made = self._views
        if made is not None and made[0] is kv_cache and made[1] == dtype:
            return made[2], made[3]
        whole = kv_cache
        stored = check_cache_dtype(self.kv_cache_dtype, dtype)
        if kv_cache.dtype != stored:
            kv_cache = kv_cache.view(stored)
        blocks, heads, size, _ = kv_cache.shape
        keys, values = kv_cache.view(blocks, heads, size * 2, -1).chunk(2, dim=2)
        self._views = whole, dtype, keys, values
        return keys, values

    def do_kv_cache_update(
        self, layer: Any, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor
    ) -> None:
        """Write the keys and values of new tokens ``[tokens, kv_heads, head_size]`` to their slots."""
        if self.attn_type in _WITHOUT_CACHE:
            return
        keys, values = self.caches(kv_cache, key.dtype)
        count = min(key.shape[0], slot_mapping.shape[0])
        torch.ops.ipex.reshape_and_cache(
            _first(key, count),
            _first(value, count),
            keys,
            values,
            _first(slot_mapping, count),
            "auto",
            layer._k_scale_float,
            layer._v_scale_float,
        )

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        kv_cache: Tensor,
        attn_metadata: IpexMetadata | None,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        """Write the step's keys and values to the cache and its attention into ``output``, and return that.

        Args:
            layer: vLLM's layer, which has the scales of an fp8 cache.
            query: ``[tokens, heads, head_size]``.
            key: ``[tokens, kv_heads, head_size]``, or None where an earlier step wrote them all.
            value: Like ``key``.
            kv_cache: The cache of the layer.
            attn_metadata: The step; None while vLLM measures memory.
            output: ``[tokens, heads * head_size]`` or with separate heads; written.
            output_scale: None.
            output_block_scale: None.
        """
        if output_scale is not None or output_block_scale is not None:
            raise NotImplementedError(
                "vLLM plug-in: output_scale must be None, got a tensor: the attention ops write no quantized output"
            )
        if attn_metadata is None:
            return output
        step = attn_metadata
        count = step.num_actual_tokens
        out = _first(output, count).view(count, self.num_heads, self.head_size)
        query = _first(query, count).view(count, self.num_heads, self.head_size)
        sinks = self._sinks(query.dtype)
        if self.attn_type in _WITHOUT_CACHE:
            assert key is not None and value is not None
            torch.ops.ipex.varlen_attention(
                query,
                key[:count].view(count, self.num_kv_heads, self.head_size),
                value[:count].view(count, self.num_kv_heads, self.head_size),
                out,
                step.query_start_loc,
                step.query_start_loc,
                self.alibi_slopes,
                step.max_query_len,
                step.max_query_len,
                0.0,
                self.scale,
                False,
                step.causal,
                False,
                self.window,
                self.window,
                self.softcap,
                sinks,
            )
            return output
        if key is not None and value is not None and self.kv_sharing_target_layer_name is None:
            self.do_kv_cache_update(layer, key, value, kv_cache, step.slot_mapping)
        keys, values = self.caches(kv_cache, query.dtype)
        torch.ops.ipex.flash_attn_varlen_func(
            out,
            query,
            keys,
            values,
            step.query_start_loc,
            step.key_start_loc,
            step.max_query_len,
            step.max_seq_len,
            self.scale,
            step.causal,
            step.block_table,
            self.alibi_slopes,
            self.window,
            -1,
            "auto",
            layer._k_scale_float,
            layer._v_scale_float,
            self.softcap,
            sinks,
        )
        return output

    def _sinks(self, dtype: torch.dtype) -> Tensor | None:
        """Return the sinks in a dtype that the ops take. They are loaded after the layer is made."""
        if self.sinks is None or self.sinks.dtype in (dtype, torch.float32):
            return self.sinks
        self.sinks = self.sinks.float()
        return self.sinks


def _first(tensor: Tensor, count: int) -> Tensor:
    """Return the first rows, without a view where that is all of them."""
    return tensor if tensor.shape[0] == count else tensor[:count]

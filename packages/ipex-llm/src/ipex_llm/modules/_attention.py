# SPDX-License-Identifier: Apache-2.0
"""Attention over packed sequences, over the cache that beams share, and over paged caches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ipex_core.library.spec import check
from ipex_core.module_swap.base import call
from ipex_core.util import also_named
from ipex_llm import functional
from ipex_llm.modules.utils import IPEXRuntimeCustomOps

_OPS = torch.ops.ipex


class VarlenAttention(nn.Module):
    """Attention within each of several sequences that lie behind each other.

    The module and ``apply_function`` both are `ipex_llm.functional.varlen_attention`; ``apply_function_flash_varlen``
    is `ipex_llm.functional.varlen_fwd`.
    """

    runtime_ops = IPEXRuntimeCustomOps()

    apply_function = staticmethod(functional.varlen_attention)
    apply_function_flash_varlen = staticmethod(
        also_named(block_tables_="block_table", p_dropout="pdropout")(functional.varlen_fwd)
    )
    forward = staticmethod(functional.varlen_attention)


class IndirectAccessKVCacheAttention(nn.Module):
    """Attention with a cache whose rows are found through the indices of the beams, so that none is ever copied.

    Args:
        text_max_length: Positions that the first call allocates; full caches grow.

    Raises:
        OpArgumentError: ``text_max_length`` is not positive.
    """

    def __init__(self, text_max_length: int = 2048) -> None:
        super().__init__()
        owner = "IndirectAccessKVCacheAttention"
        check(text_max_length > 0, owner, "text_max_length", "be positive", text_max_length)
        self.text_max_length = text_max_length

    runtime_ops = IPEXRuntimeCustomOps()
    apply_function = staticmethod(functional.indirect_access_kv_cache_attention)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scale_attn: float,
        layer_past: Any = None,
        head_mask: Tensor | None = None,
        attention_mask: Tensor | None = None,
        alibi: Tensor | None = None,
        add_casual_mask: bool = True,
        seq_info: Tensor | None = None,
    ) -> Any:
        """Attend; see `ipex_llm.functional.indirect_access_kv_cache_attention` for arguments and result."""
        return functional.indirect_access_kv_cache_attention(
            *(query, key, value, scale_attn, layer_past, head_mask, attention_mask, alibi),
            *(add_casual_mask, seq_info, self.text_max_length),
        )


class PagedAttention:
    """Writing and reading of caches made of blocks, ``[num_blocks, kv_heads, block_size, head_size]``.

    A cache has the dtype of the model, float8_e5m2, float8_e4m3fn or int8. Position ``p`` of a sequence is row
    ``p % block_size`` of the block that its table names at ``p // block_size``. Another order in memory works too as
    long as a row of a head is contiguous: pass ``[num_blocks, block_size, kv_heads, head_size]`` as its
    ``transpose(1, 2)``.

    There is nothing to make: all methods are class methods.
    """

    runtime_ops = IPEXRuntimeCustomOps()

    @classmethod
    @also_named(slots="slot_mapping")
    def reshape_and_cache(
        cls,
        key: Tensor,
        value: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        slot_mapping: Tensor,
        kv_cache_dtype: str = "auto",
        k_scale: float = 1.0,
        v_scale: float = 1.0,
    ) -> None:
        """Write the keys and values of new tokens into their slots.

        Args:
            key: ``[tokens, kv_heads, head_size]``, float32, bfloat16 or float16.
            value: Like ``key``.
            key_cache: See the class; written.
            value_cache: Like ``key_cache``; written.
            slot_mapping: ``[tokens]`` int32 or int64: ``block * block_size + row``; negative: the token is skipped.
                What is behind the last token is not read.
            kv_cache_dtype: ``"auto"`` (what the caches are), or a demand: ``"fp8"`` or ``"fp8_e5m2"``,
                ``"fp8_e4m3"``, ``"int8"``.
            k_scale: Value of 1 in a quantized key cache.
            v_scale: The same for the values.

        Raises:
            RuntimeError: For wrong dtypes or shapes, a slot outside of the cache, or a cache that is not of the dtype
                demanded; nothing has been written then.
        """
        call(
            _OPS.reshape_and_cache.default,
            *(key, value, key_cache, value_cache, _slots_of(key, slot_mapping)),
            *(kv_cache_dtype, k_scale, v_scale),
        )

    @classmethod
    def reshape_and_cache_flash(
        cls,
        key: Tensor,
        value: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        slot_mapping: Tensor,
        kv_cache_dtype: str = "auto",
        k_scale: float = 1.0,
        v_scale: float = 1.0,
    ) -> None:
        """Do as `reshape_and_cache`, for caches of the same layout."""
        call(
            _OPS.reshape_and_cache_flash.default,
            *(key, value, key_cache, value_cache, _slots_of(key, slot_mapping)),
            *(kv_cache_dtype, k_scale, v_scale),
        )

    @classmethod
    def single_query_cached_kv_attention(
        cls,
        output: Tensor,
        query: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        head_mapping: Tensor | None,
        scale: float,
        block_tables: Tensor,
        context_lens: Tensor,
        block_size: int,
        max_context_len: int,
        alibi_slopes: Tensor | None,
        *rest: Any,
        **named: Any,
    ) -> None:
        """Attend with the newest token of each sequence.

        The last arguments are ``(window_size=-1, k_scale=1.0, v_scale=1.0, softcap=-1.0)``, as on IPEX for CPUs, or
        ``(kv_cache_dtype="auto", window_size=-1, ...)``, as on XPU: a text comes first only there.

        Args:
            output: ``[sequences, heads, head_size]``; written.
            query: Like ``output``; float32, bfloat16 or float16.
            key_cache: See the class.
            value_cache: Like ``key_cache``.
            head_mapping: ``[heads]``, the cache head of each head, in equal groups; or None.
            scale: Factor on the scores; 0 means ``1 / sqrt(head_size)``.
            block_tables: ``[sequences, max_blocks]`` int32 or int64.
            context_lens: ``[sequences]``, with the newest token.
            block_size: Rows of a block.
            max_context_len: At least the largest of ``context_lens``.
            alibi_slopes: ``[heads]`` float32 or None.
            rest: ``kv_cache_dtype``: as for `reshape_and_cache`; the cache itself says it. ``window_size``: Keys that
                the query sees, its own included; -1: all. ``k_scale``: Factor on the numbers of a quantized key cache.
                ``v_scale``: The same for the values. ``softcap``: If positive, scores become
                ``softcap * tanh(scores / softcap)``.
            named: The same by name.

        Raises:
            RuntimeError: For wrong dtypes or shapes, or a block or length that is out of range.
            TypeError: For a name that is not one of these.
        """
        last = (
            _on_xpu(*rest, **named)
            if rest and isinstance(rest[0], str)
            else _on_cpu(*rest, **named)
        )
        call(
            _OPS.single_query_cached_kv_attention.default,
            *(output, query, key_cache, value_cache, head_mapping, scale, block_tables),
            *(context_lens, block_size, max_context_len, alibi_slopes, *last),
        )

    @classmethod
    def single_query_kv_attention(
        cls,
        output: Tensor,
        query: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        num_queries_per_kv: int,
        scale: float,
        block_tables: Tensor,
        context_lens: Tensor,
        block_size: int,
        max_context_len: int,
        alibi_slopes: Tensor | None,
        *rest: Any,
        **named: Any,
    ) -> None:
        """Do as `single_query_cached_kv_attention`, told how many heads share a cache head.

        Raises:
            OpArgumentError: ``num_queries_per_kv`` times the heads of the cache do not equal the heads of the query.
        """
        fits = num_queries_per_kv * key_cache.shape[1] == query.shape[1]
        text = f"be heads / kv_heads = {query.shape[1]} / {key_cache.shape[1]}"
        check(fits, "single_query_kv_attention", "num_queries_per_kv", text, num_queries_per_kv)
        cls.single_query_cached_kv_attention(
            *(output, query, key_cache, value_cache, None, scale, block_tables),
            *(context_lens, block_size, max_context_len, alibi_slopes, *rest),
            **named,
        )

    @classmethod
    def flash_attn_varlen_func(
        cls,
        output: Tensor,
        query: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        cu_seqlens_q: Tensor,
        cu_seqlens_kv: Tensor,
        max_seqlen_q: int,
        max_seqlen_kv: int,
        scale: float,
        is_cusal: bool,
        block_tables: Tensor,
        alibi_slopes: Tensor | None = None,
        window_size_left: int = -1,
        window_size_right: int = -1,
        kv_cache_dtype: str = "auto",
        k_scale: float = 1.0,
        v_scale: float = 1.0,
        softcap: float = -1.0,
    ) -> None:
        """Attend with any number of tokens of each sequence: prompts, pieces of prompts and new tokens in one batch.

        Args:
            output: ``[tokens, heads, head_size]``; written.
            query: Like ``output``; float32, bfloat16 or float16. A sequence's tokens are its newest.
            key_cache: See the class. It holds the keys of these tokens already.
            value_cache: Like ``key_cache``.
            cu_seqlens_q: ``[sequences + 1]`` int32 or int64: where the sequences start in ``query``, and the end.
            cu_seqlens_kv: ``[sequences + 1]``: running sum of the numbers of keys.
            max_seqlen_q: Length of the longest sequence; not needed.
            max_seqlen_kv: The same for the keys; not needed.
            scale: Factor on the scores; 0 means ``1 / sqrt(head_size)``.
            is_cusal: Let a token see no later ones. (Clients write the name in this way.)
            block_tables: ``[sequences, max_blocks]`` int32 or int64.
            alibi_slopes: ``[heads]`` or ``[sequences, heads]``, or None.
            window_size_left: How many earlier keys a token sees; negative: all.
            window_size_right: How many later keys; negative: all.
            kv_cache_dtype: As for `reshape_and_cache`.
            k_scale: Factor on the numbers of a quantized key cache.
            v_scale: The same for the values.
            softcap: If positive, scores become ``softcap * tanh(scores / softcap)``.

        Raises:
            RuntimeError: For wrong dtypes or shapes, or an offset or block that is out of range.
        """
        call(
            _OPS.flash_attn_varlen_func.default,
            *(output, query, key_cache, value_cache, cu_seqlens_q, cu_seqlens_kv, max_seqlen_q),
            *(max_seqlen_kv, scale, is_cusal, block_tables, alibi_slopes, window_size_left),
            *(window_size_right, kv_cache_dtype, k_scale, v_scale, softcap),
        )

    #: The name that IPEX's documentation gives to `flash_attn_varlen_func`.
    flash_atten_varlen = flash_attn_varlen_func

    @classmethod
    @also_named(key_cache="key_caches", value_cache="value_caches", block_map="block_mapping")
    def copy_blocks(
        cls,
        key_caches: Tensor | Sequence[Tensor],
        value_caches: Tensor | Sequence[Tensor],
        block_mapping: Tensor | Mapping[int, Sequence[int] | int],
    ) -> None:
        """Copy blocks within the caches of one or more layers.

        Args:
            key_caches: A cache, or one per layer; written.
            value_caches: Likewise.
            block_mapping: ``[n, 2]`` integers, from and to; or a dictionary from a block to one or more.

        Raises:
            OpArgumentError: A block is out of range.
        """
        for group in (key_caches, value_caches):
            for cache in [group] if isinstance(group, torch.Tensor) else group:
                source, target = _block_pairs("copy_blocks", block_mapping, cache, cache)
                cache[target] = cache[source]

    @classmethod
    @also_named(block_map="block_mapping")
    def swap_blocks(
        cls,
        src: Tensor,
        dst: Tensor,
        block_mapping: Tensor | Mapping[int, Sequence[int] | int],
    ) -> None:
        """Copy blocks from one cache to another, which may be on another device.

        Args:
            src: The cache to read.
            dst: The cache to write.
            block_mapping: As for `copy_blocks`.

        Raises:
            OpArgumentError: A block is out of range.
        """
        source, target = _block_pairs("swap_blocks", block_mapping, src, dst)
        dst[target.to(dst.device)] = src[source].to(dst.device)


def _slots_of(key: Tensor, slot_mapping: Tensor) -> Tensor:
    """Return the slots of the tokens: callers keep one buffer of slots for all steps, as IPEX allows."""
    return slot_mapping[: key.shape[0]]


def _on_cpu(
    window_size: int = -1,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    softcap: float = -1.0,
    *,
    kv_cache_dtype: str = "auto",
) -> tuple[int, float, float, float]:
    """Return the last arguments of a call in the order for CPUs."""
    return window_size, k_scale, v_scale, softcap


def _on_xpu(
    kv_cache_dtype: str,
    window_size: int = -1,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    softcap: float = -1.0,
) -> tuple[int, float, float, float]:
    """Return the last arguments of a call in the order for XPU."""
    return window_size, k_scale, v_scale, softcap


def _block_pairs(
    op: str, mapping: Tensor | Mapping[int, Sequence[int] | int], src: Tensor, dst: Tensor
) -> tuple[Tensor, Tensor]:
    if isinstance(mapping, torch.Tensor):
        fits = mapping.dim() == 2 and mapping.shape[1] == 2 and not mapping.is_floating_point()
        text = "be a dictionary or integers of shape [n, 2]"
        check(fits, op, "block_mapping", text, f"{mapping.dtype} {list(mapping.shape)}")
        pairs = mapping.tolist()
    else:
        pairs = [
            (int(a), int(b))
            for a, targets in mapping.items()
            for b in ([targets] if isinstance(targets, int) else targets)
        ]
    for pair in pairs:
        for block, cache in zip(pair, (src, dst), strict=True):
            text = f"hold blocks in [0, {cache.shape[0]})"
            check(0 <= block < cache.shape[0], op, "block_mapping", text, block)
    both = torch.tensor(pairs, dtype=torch.int64, device=src.device).view(-1, 2)
    return both[:, 0], both[:, 1]

# SPDX-License-Identifier: Apache-2.0
"""The ops of vLLM's C++ extension for CPUs that its Python calls without asking whether they are there.

They are defined in the library ``_C`` where nothing else has defined them.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from ipex_llm.integrations.vllm import speculative_ops

__all__ = ["OPS", "define"]

Tensor = torch.Tensor


def _init_cpu_memory_env(nodes: list[int]) -> None:
    """Bind to the nodes of the memory: nothing to do, as memory goes where the pinned threads touch it first."""
    del nodes


def _greedy_argmax(logits: Tensor) -> Tensor:
    """Return the place of the largest logit of each row."""
    rows = logits.reshape(-1, logits.shape[-1])
    result: Tensor = torch.ops.ipex.argmax(rows)
    return result.view(-1)


#: Odd constants of SplitMix64 as int64: Steele, Lea and Flood, "Fast Splittable Pseudorandom Number Generators", 2014.
_GAMMA, _FIRST, _SECOND = (
    x - 2**64 for x in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
)


def uniform(seeds: Tensor) -> Tensor:
    """Return a number in [0, 1) for each seed, float32; equal seeds give equal numbers."""

    def shift(x: Tensor, bits: int) -> Tensor:
        return (x >> bits) & ((1 << (64 - bits)) - 1)

    x = seeds + _GAMMA
    x = (x ^ shift(x, 30)) * _FIRST
    x = (x ^ shift(x, 27)) * _SECOND
    x = x ^ shift(x, 31)
    # 24 bits are exact in float32, so that the result stays below 1.
    return shift(x, 40).float() * 2.0**-24


def _fused_gumbel_argmax(logits: Tensor, seeds: Tensor) -> Tensor:
    """Draw a token from the softmax of each row: by inverting the sum, which has the distribution of Gumbel noise."""
    result: Tensor = torch.ops.ipex.sample_token(logits, uniform(seeds))
    return result


def _compute_slot_mapping(
    query_start_loc: Tensor,
    positions: Tensor,
    block_table: Tensor,
    slot_mapping: Tensor,
    block_size: int,
) -> None:
    """Write the row of the cache of each token; -1 for padding."""
    offsets = query_start_loc.tolist()
    # As arrays: the batches are small, and a call of torch takes longer than the work.
    places, table, slots = positions.numpy(), block_table.numpy(), slot_mapping.numpy()
    for row, (begin, end) in enumerate(itertools.pairwise(offsets)):
        place = places[begin:end]
        slots[begin:end] = table[row][place // block_size] * block_size + place % block_size
    slots[offsets[-1] :] = -1


def _rotary_embedding(
    positions: Tensor,
    query: Tensor,
    key: Tensor | None,
    head_size: int,
    cos_sin_cache: Tensor,
    is_neox: bool,
    rope_dim_offset: int = 0,
    inverse: bool = False,
) -> None:
    """Rotate query and key in place, from the table ``[positions, rotary_dim]``: cosines, then sines."""
    cos, sin = cos_sin_cache.chunk(2, dim=-1)
    places = positions.flatten()
    tokens = places.shape[0]

    def heads(x: Tensor) -> Tensor:
        return x.view(tokens, -1, head_size)[..., rope_dim_offset:]

    q = heads(query)
    k = q[:, :0] if key is None else heads(key)
    sines = -sin if inverse else sin
    torch.ops.ipex.rotary_embedding(q, k, sines, cos, cos_sin_cache.shape[-1], is_neox, places)


def _mla_decode_kvcache(
    out: Tensor,
    query: Tensor,
    kv_cache: Tensor,
    scale: float,
    block_tables: Tensor,
    seq_lens: Tensor,
) -> None:
    """Write the latent attention of one query per sequence ``[sequences, heads, kv_lora_rank]``."""
    out.copy_(
        torch.ops.ipex.mla_decode_attention(
            query, kv_cache, seq_lens, scale, out.shape[2], block_tables
        )
    )


def _gelu_tanh(out: Tensor, input: Tensor) -> None:
    """Write GELU with the tanh approximation; two names of vLLM are this one function."""
    out.copy_(torch.ops.ipex.gelu(input, "tanh"))


def _gelu_quick(out: Tensor, input: Tensor) -> None:
    """Write ``x * sigmoid(1.702 x)``."""
    out.copy_(torch.ops.ipex.gelu_quick(input))


def _to_fp8(result: Tensor, input: Tensor, scale: Tensor) -> None:
    """Write a weight divided by its scale; rows behind the input are padding."""
    largest = torch.finfo(result.dtype).max
    codes = (input.float() / scale).clamp(-largest, largest).to(result.dtype)
    result[: input.shape[0]] = codes


def _static_scaled_fp8_quant(
    result: Tensor, input: Tensor, scale: Tensor, group_shape: list[int] | None = None
) -> None:
    """Round ``[M, N]`` with given scales: one, or one for each group of ``group_shape``, where -1 is all."""
    if scale.numel() > 1:
        if group_shape is None:
            raise ValueError(
                "static_scaled_fp8_quant: group_shape must be given for more than one scale, got None"
            )
        sizes = [
            n if group == -1 else group for n, group in zip(input.shape, group_shape, strict=True)
        ]
        counts = [-(-n // size) for n, size in zip(input.shape, sizes, strict=True)]
        scale = scale.reshape(counts)
        for dim, size in enumerate(sizes):
            scale = scale.repeat_interleave(size, dim).narrow(dim, 0, input.shape[dim])
    _to_fp8(result, input, scale)


def _dynamic_scaled_fp8_quant(result: Tensor, input: Tensor, scale: Tensor) -> None:
    """Round ``[M, N]`` with one scale, of the largest magnitude, and write the scale."""
    scale.fill_(float(input.abs().amax()) / torch.finfo(result.dtype).max)
    _to_fp8(result, input, scale)


def _dynamic_per_token_scaled_fp8_quant(
    result: Tensor, input: Tensor, scale: Tensor, scale_ub: Tensor | None = None
) -> None:
    """Round ``[M, N]`` with a scale for each row, and write the scales ``[M, 1]``."""
    largest = input.float().abs().amax(-1, keepdim=True)
    if scale_ub is not None:
        largest = largest.clamp(max=float(scale_ub))
    number = torch.finfo(result.dtype).max
    scale.fill_(1.0)
    # The least scale of vLLM's kernels: rows of zeros stay zeros.
    scale[: input.shape[0]] = (largest / number).clamp(min=1.0 / (number * 512.0))
    _to_fp8(result, input, scale[: input.shape[0]])


class ExtensionOp(NamedTuple):
    """An op of ``_C``: its signature, what computes it, and what shape and dtype the result has."""

    signature: str
    function: Callable[..., Any]
    fake: Callable[..., Any]


def _one_of_each_row(logits: Tensor, *rest: Any) -> Tensor:
    return logits.new_empty(logits.shape[:1], dtype=torch.int64)


def _nothing(*args: Any) -> None:
    del args


_DRAFTS = "Tensor cu_num_draft_tokens, Tensor draft_token_ids"

#: Name without its ending -> op of speculative decoding.
SPECULATIVE = {
    name: ExtensionOp(signature + " -> ()", function, _nothing)
    for name, signature, function in (
        (
            "rejection_greedy_sample",
            f"(Tensor(a!) output_token_ids, {_DRAFTS}, Tensor target_argmax, Tensor bonus_token_ids,"
            " Tensor? is_greedy, int max_spec_len)",
            speculative_ops.rejection_greedy_sample,
        ),
        (
            "rejection_random_sample",
            f"(Tensor(a!) output_token_ids, {_DRAFTS}, Tensor? draft_probs, Tensor target_probs,"
            " Tensor bonus_token_ids, Tensor recovered_token_ids, Tensor uniform_probs, Tensor is_greedy,"
            " int max_spec_len, int vocab_size, bool no_draft_probs)",
            speculative_ops.rejection_random_sample,
        ),
        (
            "expand",
            "(Tensor(a!) output, Tensor input, Tensor cu_num_tokens, int replace_from, int replace_to)",
            speculative_ops.expand,
        ),
        (
            "sample_recovered_tokens",
            f"(Tensor(a!) output_token_ids, {_DRAFTS}, Tensor? draft_probs, Tensor target_probs, Tensor inv_q,"
            " int vocab_size, bool no_draft_probs)",
            speculative_ops.sample_recovered_tokens,
        ),
        (
            "eagle_prepare_inputs_padded",
            "(Tensor cu_num_draft_tokens, Tensor valid_sampled_tokens_count, Tensor query_start_loc,"
            " Tensor(a!) token_indices_to_sample, Tensor(b!) num_rejected_tokens, int num_reqs)",
            speculative_ops.eagle_prepare_inputs_padded,
        ),
        (
            "eagle_prepare_next_token_padded",
            "(Tensor sampled_token_ids, Tensor discard_request_mask, Tensor backup_next_token_ids,"
            " Tensor(a!) next_token_ids, Tensor(b!) valid_sampled_tokens_count, int vocab_size,"
            " int num_sampled_tokens_per_req, int num_reqs)",
            speculative_ops.eagle_prepare_next_token_padded,
        ),
        (
            "eagle_step_slot_mapping_metadata",
            "(Tensor positions, Tensor block_table, Tensor(a!) seq_lens, Tensor(b!) out_clamped_positions,"
            " Tensor(c!) out_slot_mapping, int block_size, int max_model_len, int pad_id)",
            speculative_ops.eagle_step_slot_mapping_metadata,
        ),
        (
            "copy_and_expand_eagle_inputs",
            "(Tensor target_token_ids, Tensor target_positions, Tensor next_token_ids, Tensor(a!) out_input_ids,"
            " Tensor(b!) out_positions, Tensor(c!) out_is_rejected_token_mask, Tensor(d!)"
            " out_is_masked_token_mask, Tensor(e!) out_new_token_indices, Tensor(f!) out_hidden_state_mapping,"
            " Tensor query_start_loc, Tensor query_end_loc, int padding_token_id, int"
            " parallel_drafting_token_id, int total_input_tokens, int num_padding_slots_per_request,"
            " bool shift_input_ids)",
            speculative_ops.copy_and_expand_eagle_inputs,
        ),
    )
}

#: Name -> op.
OPS = {
    "init_cpu_memory_env": ExtensionOp("(int[] nodes) -> ()", _init_cpu_memory_env, _nothing),
    "greedy_argmax": ExtensionOp("(Tensor logits) -> Tensor", _greedy_argmax, _one_of_each_row),
    "fused_gumbel_argmax": ExtensionOp(
        "(Tensor logits, Tensor seeds) -> Tensor", _fused_gumbel_argmax, _one_of_each_row
    ),
    "compute_slot_mapping_kernel_impl": ExtensionOp(
        "(Tensor query_start_loc, Tensor positions, Tensor block_table, Tensor(a!) slot_mapping,"
        " int block_size) -> ()",
        _compute_slot_mapping,
        _nothing,
    ),
    "rotary_embedding": ExtensionOp(
        "(Tensor positions, Tensor(a!) query, Tensor(b!)? key, int head_size, Tensor cos_sin_cache,"
        " bool is_neox, int rope_dim_offset=0, bool inverse=False) -> ()",
        _rotary_embedding,
        _nothing,
    ),
    **{
        name: ExtensionOp("(Tensor(a!) out, Tensor input) -> ()", function, _nothing)
        for name, function in (
            ("gelu_new", _gelu_tanh),
            ("gelu_fast", _gelu_tanh),
            ("gelu_quick", _gelu_quick),
        )
    },
    "mla_decode_kvcache": ExtensionOp(
        "(Tensor(a!) out, Tensor query, Tensor kv_cache, float scale, Tensor block_tables,"
        " Tensor seq_lens) -> ()",
        _mla_decode_kvcache,
        _nothing,
    ),
    "static_scaled_fp8_quant": ExtensionOp(
        "(Tensor(a!) result, Tensor input, Tensor scale, int[]? group_shape=None) -> ()",
        _static_scaled_fp8_quant,
        _nothing,
    ),
    "dynamic_scaled_fp8_quant": ExtensionOp(
        "(Tensor(a!) result, Tensor input, Tensor(b!) scale) -> ()",
        _dynamic_scaled_fp8_quant,
        _nothing,
    ),
    "dynamic_per_token_scaled_fp8_quant": ExtensionOp(
        "(Tensor(a!) result, Tensor input, Tensor(b!) scale, Tensor? scale_ub=None) -> ()",
        _dynamic_per_token_scaled_fp8_quant,
        _nothing,
    ),
    **{f"{name}_kernel_impl": op for name, op in SPECULATIVE.items()},
}

_libraries: list[torch.library.Library] = []


def define() -> tuple[str, ...]:
    """Define the ops of `OPS` that are not there, and return their names; calling it again does nothing."""
    import ipex_core  # noqa: F401  (registers the ops that these call)

    lacking = [name for name in OPS if not hasattr(torch.ops._C, name)]
    if not lacking:
        return ()
    library = torch.library.Library("_C", "FRAGMENT")
    _libraries.append(library)
    for name in lacking:
        op = OPS[name]
        library.define(name + op.signature)
        # An op without tensors among its arguments has no device to go by.
        key = "CPU" if "Tensor" in op.signature else "CompositeExplicitAutograd"
        library.impl(name, op.function, key)
        torch.library.register_fake(f"_C::{name}", op.fake, lib=library)
    return tuple(lacking)

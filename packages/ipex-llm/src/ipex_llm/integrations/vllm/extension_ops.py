# SPDX-License-Identifier: Apache-2.0
"""The ops of vLLM's C++ extension for CPUs that its Python calls without asking whether they are there.

They are defined in the library ``_C`` where nothing else has defined them. The native kernels have the ones that each
step calls; the others are functions on ops of ipex.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from ipex_llm.integrations.vllm import speculative_ops, state_ops

Tensor = torch.Tensor


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

_GATES = "Tensor A_log, Tensor dt_bias, Tensor q, Tensor k, Tensor v, Tensor a, Tensor b"
_SOFTPLUS = "bool use_qk_l2norm_in_kernel, float softplus_beta=1.0, float softplus_threshold=20.0"

#: Name -> op of recurrent layers.
RECURRENT = {
    name: ExtensionOp(signature, getattr(state_ops, name), fake)
    for name, signature, fake in (
        (
            "causal_conv1d_fwd_cpu",
            "(Tensor x, Tensor weight, Tensor? bias, Tensor(a!) conv_states, Tensor query_start_loc,"
            " Tensor cache_indices, Tensor? has_initial_state, bool silu_activation, int pad_slot_id,"
            " bool is_weight_packed) -> Tensor",
            lambda x, *rest: torch.empty_like(x),
        ),
        (
            "causal_conv1d_update_cpu",
            "(Tensor x, Tensor(a!) conv_states, Tensor weight, Tensor? bias, bool silu_activation,"
            " Tensor? num_accepted_tokens, Tensor conv_state_indices, int pad_slot_id,"
            " bool is_weight_packed) -> Tensor",
            lambda x, *rest: torch.empty_like(x),
        ),
        (
            "causal_conv1d_update_cpu_vec",
            "(Tensor x, Tensor(a!) conv_state, Tensor weight, Tensor? bias, str? activation,"
            " Tensor? conv_state_indices, Tensor? query_start_loc, int pad_slot_id) -> Tensor",
            lambda x, *rest: torch.empty_like(x),
        ),
        (
            "fused_gdn_gating_cpu",
            "(Tensor A_log, Tensor a, Tensor b, Tensor dt_bias) -> (Tensor, Tensor)",
            lambda A_log, a, *rest: (a.new_empty((1, *a.shape), dtype=torch.float32),) * 2,
        ),
        (
            "chunk_gated_delta_rule_cpu",
            "(Tensor query, Tensor key, Tensor value, Tensor g, Tensor beta, Tensor(a!) initial_state,"
            " bool output_final_state, Tensor cu_seqlens, bool head_first,"
            " bool use_qk_l2norm_in_kernel, Tensor initial_state_indices, float eps=1e-05)"
            " -> (Tensor, Tensor(a!))",
            lambda query, key, value, g, beta, state, *rest: (torch.empty_like(value), state),
        ),
        (
            "fused_sigmoid_gating_delta_rule_update_cpu",
            f"({_GATES}, Tensor(a!) initial_state_source, Tensor initial_state_indices,"
            f" Tensor cu_seqlens, {_SOFTPLUS}) -> Tensor",
            lambda A_log, dt_bias, q, k, v, *rest: torch.empty_like(v[0].unsqueeze(1)),
        ),
        (
            "fused_sigmoid_gating_delta_rule_update_spec_cpu",
            f"({_GATES}, Tensor(a!) initial_state_source, Tensor spec_state_indices,"
            f" Tensor num_accepted_tokens, Tensor cu_seqlens, {_SOFTPLUS}) -> Tensor",
            lambda A_log, dt_bias, q, k, v, *rest: torch.empty_like(v),
        ),
        (
            "mamba_chunk_scan_fwd_cpu",
            "(Tensor(a!) out, Tensor(b!) final_states, Tensor x, Tensor dt, Tensor A, Tensor B,"
            " Tensor C, Tensor? D, Tensor? z, Tensor cu_seqlens) -> ()",
            _nothing,
        ),
        (
            "selective_state_update_cpu",
            "(Tensor(a!) state, Tensor x, Tensor dt, Tensor A, Tensor B, Tensor C, Tensor? D, Tensor? z,"
            " Tensor? dt_bias, bool dt_softplus, Tensor? state_batch_indices,"
            " Tensor? dst_state_batch_indices, int null_block_id, Tensor(b!) out,"
            " Tensor? num_accepted_tokens, Tensor? cu_seqlens) -> ()",
            _nothing,
        ),
    )
}

#: Name -> what shape and dtype the result of an op has that is native code of the kernels, under another name.
NATIVE: dict[str, Callable[..., Any]] = {
    "init_cpu_memory_env": _nothing,
    "greedy_argmax": _one_of_each_row,
    "fused_gumbel_argmax": _one_of_each_row,
    "compute_slot_mapping_kernel_impl": _nothing,
    "rotary_embedding": _nothing,
}

#: Name -> op that is made of ops of ipex.
OPS = {
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
    **RECURRENT,
}

_libraries: list[torch.library.Library] = []


def define() -> tuple[str, ...]:
    """Define the ops of `NATIVE` and `OPS` that are not there, and return their names; again it does nothing.

    Raises:
        RuntimeError: The kernels of the CPU are not installed, or are of another release.
    """
    import ipex_core  # noqa: F401  (registers the ops that these call)
    from ipex_core.kernels.providers import provider_for

    lacking = [name for name in (*NATIVE, *OPS) if not hasattr(torch.ops._C, name)]
    if not lacking:
        return ()
    library = torch.library.Library("_C", "FRAGMENT")
    _libraries.append(library)
    kernels = provider_for("cpu")
    for name in lacking:
        if name in NATIVE:
            if kernels is None or not kernels.define("_C", name):
                raise RuntimeError(
                    f"vLLM plug-in: ipex-cpu-kernels must have {name}, got"
                    f" {'no such package' if kernels is None else kernels.version}:"
                    " pip install --upgrade ipex-cpu-kernels"
                )
            torch.library.register_fake(f"_C::{name}", NATIVE[name], lib=library)
            continue
        op = OPS[name]
        library.define(name + op.signature)
        library.impl(name, op.function, "CPU")
        torch.library.register_fake(f"_C::{name}", op.fake, lib=library)
    return tuple(lacking)

# SPDX-License-Identifier: Apache-2.0
"""The ops of vLLM's C++ extension for CPUs that its Python calls without asking whether they are there.

They are defined in the library ``_C`` where nothing else has defined them. The native kernels have the ones that each
step calls; the others are functions on ops of ipex.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ipex_llm.integrations.vllm import speculative_ops, state_ops


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


def _nothing(*args: Any) -> None:
    del args


class ExtensionOp(NamedTuple):
    """An op of ``_C``, whose signature is what the annotations of its function spell.

    Attributes:
        function: What computes it.
        mutates: Names of the arguments that it writes to.
        fake: What shape and dtype the result has.
        signature: Where annotations cannot spell it: the result is an argument.
    """

    function: Callable[..., Any]
    mutates: tuple[str, ...] = ()
    fake: Callable[..., Any] = _nothing
    signature: str = ""


def _one_of_each_row(logits: Tensor, *rest: Any) -> Tensor:
    return logits.new_empty(logits.shape[:1], dtype=torch.int64)


#: Name without its ending -> op of speculative decoding.
SPECULATIVE = {
    function.__name__: ExtensionOp(function, mutates)
    for function, mutates in (
        (speculative_ops.rejection_greedy_sample, ("output_token_ids",)),
        (speculative_ops.rejection_random_sample, ("output_token_ids",)),
        (speculative_ops.expand, ("output",)),
        (speculative_ops.sample_recovered_tokens, ("output_token_ids",)),
        (
            speculative_ops.eagle_prepare_inputs_padded,
            ("token_indices_to_sample", "num_rejected_tokens"),
        ),
        (
            speculative_ops.eagle_prepare_next_token_padded,
            ("next_token_ids", "valid_sampled_tokens_count"),
        ),
        (
            speculative_ops.eagle_step_slot_mapping_metadata,
            ("seq_lens", "out_clamped_positions", "out_slot_mapping"),
        ),
        (
            speculative_ops.copy_and_expand_eagle_inputs,
            (
                *("out_input_ids", "out_positions", "out_is_rejected_token_mask"),
                *("out_is_masked_token_mask", "out_new_token_indices", "out_hidden_state_mapping"),
            ),
        ),
    )
}


def _like_first(x: Tensor, *rest: Any) -> Tensor:
    return torch.empty_like(x)


#: Name -> op of recurrent layers.
RECURRENT = {
    op.function.__name__: op
    for op in (
        ExtensionOp(state_ops.causal_conv1d_fwd_cpu, ("conv_states",), _like_first),
        ExtensionOp(state_ops.causal_conv1d_update_cpu, ("conv_states",), _like_first),
        ExtensionOp(state_ops.causal_conv1d_update_cpu_vec, ("conv_state",), _like_first),
        ExtensionOp(
            state_ops.fused_gdn_gating_cpu,
            fake=lambda A_log, a, *rest: (a.new_empty((1, *a.shape), dtype=torch.float32),) * 2,
        ),
        ExtensionOp(
            state_ops.chunk_gated_delta_rule_cpu,
            fake=lambda query, key, value, g, beta, state, *rest: (torch.empty_like(value), state),
            signature="(Tensor query, Tensor key, Tensor value, Tensor g, Tensor beta, Tensor(a!) initial_state,"
            " bool output_final_state, Tensor cu_seqlens, bool head_first,"
            " bool use_qk_l2norm_in_kernel, Tensor initial_state_indices, float eps=1e-05)"
            " -> (Tensor, Tensor(a!))",
        ),
        ExtensionOp(
            state_ops.fused_sigmoid_gating_delta_rule_update_cpu,
            ("initial_state_source",),
            lambda A_log, dt_bias, q, k, v, *rest: torch.empty_like(v[0].unsqueeze(1)),
        ),
        ExtensionOp(
            state_ops.fused_sigmoid_gating_delta_rule_update_spec_cpu,
            ("initial_state_source",),
            lambda A_log, dt_bias, q, k, v, *rest: torch.empty_like(v),
        ),
        ExtensionOp(state_ops.mamba_chunk_scan_fwd_cpu, ("out", "final_states")),
        ExtensionOp(state_ops.selective_state_update_cpu, ("state", "out")),
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
    "gelu_new": ExtensionOp(_gelu_tanh, ("out",)),
    "gelu_fast": ExtensionOp(_gelu_tanh, ("out",)),
    "gelu_quick": ExtensionOp(_gelu_quick, ("out",)),
    "mla_decode_kvcache": ExtensionOp(_mla_decode_kvcache, ("out",)),
    "static_scaled_fp8_quant": ExtensionOp(_static_scaled_fp8_quant, ("result",)),
    "dynamic_scaled_fp8_quant": ExtensionOp(_dynamic_scaled_fp8_quant, ("result", "scale")),
    "dynamic_per_token_scaled_fp8_quant": ExtensionOp(
        _dynamic_per_token_scaled_fp8_quant, ("result", "scale")
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
    from ipex_core.library.spec import schema_of

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
        library.define(name + (op.signature or schema_of(op.function, op.mutates)))
        library.impl(name, op.function, "CPU")
        torch.library.register_fake(f"_C::{name}", op.fake, lib=library)
    return tuple(lacking)

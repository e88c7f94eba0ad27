# SPDX-License-Identifier: Apache-2.0
"""The ops of vLLM's C++ extension for CPUs that recurrent layers call: delta rule, Mamba-2, short convolution.

vLLM keeps the states of all layers in one cache, where the rows of a state lie apart, in the dtype of the cache. The
ops of ipex take the rows of the running sequences, in float32; they are copied there and back. Rows that are padding
(`-1`, or vLLM's block 0) are computed; a convolution does not write their states, and nothing reads what other ops
leave.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

__all__ = [
    "causal_conv1d_fwd_cpu",
    "causal_conv1d_update_cpu",
    "causal_conv1d_update_cpu_vec",
    "chunk_gated_delta_rule_cpu",
    "fused_gdn_gating_cpu",
    "fused_sigmoid_gating_delta_rule_update_cpu",
    "fused_sigmoid_gating_delta_rule_update_spec_cpu",
    "mamba_chunk_scan_fwd_cpu",
    "selective_state_update_cpu",
]


def _take(cache: Tensor, slots: Tensor) -> Tensor:
    """Return the rows of a cache as float32, contiguous."""
    return _rows(cache, slots).float()


def _rows(cache: Tensor, slots: Tensor) -> Tensor:
    return cache.index_select(0, slots.flatten().clamp(min=0).long())


def _put(cache: Tensor, slots: Tensor, rows: Tensor, padding: int = -1) -> None:
    slots = slots.flatten()
    there = (slots >= 0) & (slots != padding)
    cache.index_copy_(0, slots[there].long(), rows[there].to(cache.dtype))


def _starts(count: int) -> Tensor:
    return torch.arange(count + 1, dtype=torch.int32)


def _places(starts: Tensor, has_past: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Return query_starts, lengths and slots of ops of ipex, for states that were taken out of the cache."""
    starts = starts.int()
    counts = starts[1:] - starts[:-1]
    past = torch.ones_like(counts) if has_past is None else has_past.int()
    return starts, counts + past, torch.arange(counts.numel(), dtype=torch.int32)


def _softplus_of(steps: Tensor) -> Tensor:
    """Return what softplus turns into ``steps``, positive: the ops of ipex take the steps before it."""
    return steps + torch.log(-torch.expm1(-steps))


# --- the short convolution --------------------------------------------------------------------------------------------


def _convolve(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    silu: bool,
    states: Tensor,
    places: tuple[Tensor, Tensor, Tensor],
) -> Tensor:
    """Convolve ``[T, D]`` with filters ``[D, W]`` or ``[D, 1, W]``; ``states`` ``[B, W - 1, D]`` is overwritten."""
    taps = weight.reshape(weight.shape[0], -1).t().contiguous()
    activation = "silu" if silu else "none"
    y: Tensor = torch.ops.ipex.causal_conv1d_varlen(x, states, taps, bias, activation, *places)
    return y


def _through_cache(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    silu: bool,
    cache: Tensor,
    slots: Tensor,
    places: tuple[Tensor, Tensor, Tensor],
    padding: int,
) -> Tensor:
    # A cache for drafts is wider: what comes after the first columns is of them.
    columns = cache.narrow(2, 0, weight.shape[-1] - 1)
    past = _rows(columns, slots).transpose(1, 2)
    states = past.to(x.dtype).contiguous()
    y = _convolve(x, weight, bias, silu, states, places)
    _put(columns, slots, states.transpose(1, 2), padding)
    return y


def causal_conv1d_fwd_cpu(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    conv_states: Tensor,
    query_start_loc: Tensor,
    cache_indices: Tensor,
    has_initial_state: Tensor | None,
    silu_activation: bool,
    pad_slot_id: int,
    is_weight_packed: bool,
) -> Tensor:
    """Convolve prompts back to back ``[D, T]``; each has its row of ``conv_states`` ``[S, D, W - 1]``.

    The weight is ``[D, 1, W]``: the plug-in does not pack it, whatever vLLM says.
    """
    del is_weight_packed
    places = _places(query_start_loc, has_initial_state)
    options = (silu_activation, conv_states, cache_indices, places, pad_slot_id)
    return _through_cache(x.t(), weight, bias, *options).t()


def causal_conv1d_update_cpu(
    x: Tensor,
    conv_states: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    silu_activation: bool,
    num_accepted_tokens: Tensor | None,
    conv_state_indices: Tensor,
    pad_slot_id: int,
    is_weight_packed: bool,
) -> Tensor:
    """Convolve one row of each sequence ``[B, D]``, or with ``num_accepted_tokens`` the drafts ``[B, L, D]``.

    With drafts a row of ``conv_states`` has the inputs of the last step too, and the history ends with the accepted
    ones.
    """
    del is_weight_packed
    if num_accepted_tokens is None:
        options = (conv_state_indices, _places(_starts(x.shape[0])), pad_slot_id)
        return _through_cache(x, weight, bias, silu_activation, conv_states, *options)
    before = weight.shape[-1] - 1
    batch, length, channels = x.shape
    columns = num_accepted_tokens.long()[:, None] - 1 + torch.arange(before)
    wide = _rows(conv_states, conv_state_indices).transpose(1, 2)
    past = wide.gather(1, columns[..., None].expand(-1, -1, channels)).to(x.dtype).contiguous()
    kept = torch.cat([past, x], 1)[:, 1:]
    places = _places(_starts(batch) * length)
    y = _convolve(x.flatten(0, 1), weight, bias, silu_activation, past, places)
    _put(
        conv_states.narrow(2, 0, kept.shape[1]),
        conv_state_indices,
        kept.transpose(1, 2),
        pad_slot_id,
    )
    return y.view_as(x)


def causal_conv1d_update_cpu_vec(
    x: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str | None,
    conv_state_indices: Tensor | None,
    query_start_loc: Tensor | None,
    pad_slot_id: int,
) -> Tensor:
    """Convolve one row of each sequence ``[B, D]``, several ``[B, D, L]``, or with ``query_start_loc`` ``[T, D]``."""
    rows = x.transpose(1, 2).flatten(0, 1) if x.dim() == 3 else x
    if query_start_loc is None:
        length = x.shape[2] if x.dim() == 3 else 1
        query_start_loc = _starts(x.shape[0]) * length
    slots = conv_state_indices
    if slots is None:
        slots, pad_slot_id = torch.arange(query_start_loc.numel() - 1), -1
    silu, places = activation in ("silu", "swish"), _places(query_start_loc)
    y = _through_cache(rows, weight, bias, silu, conv_state, slots, places, pad_slot_id)
    return y.unflatten(0, (x.shape[0], -1)).transpose(1, 2) if x.dim() == 3 else y


# --- the gated delta rule ---------------------------------------------------------------------------------------------


def fused_gdn_gating_cpu(
    A_log: Tensor, a: Tensor, b: Tensor, dt_bias: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the logarithm of the decay and the strength of each row and head, float32 ``[1, T, H]``."""
    decay = -A_log.float().exp() * F.softplus(a.float() + dt_bias.float())
    return decay.unsqueeze(0), torch.sigmoid(b.float()).unsqueeze(0)


def _delta(
    rows: tuple[Tensor, ...],
    A: Tensor,
    dt_bias: Tensor,
    state: Tensor,
    starts: Tensor,
    normalize: bool,
) -> Tensor:
    """Run the rule on ``(q, k, v, a, b)``; ``state`` ``[B, H, K, V]`` is overwritten."""
    scale = rows[0].shape[-1] ** -0.5
    y: Tensor = torch.ops.ipex.gated_delta_rule(
        *rows, A, dt_bias, state, *_places(starts), scale, normalize
    )
    return y


def chunk_gated_delta_rule_cpu(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor,
    output_final_state: bool,
    cu_seqlens: Tensor,
    head_first: bool,
    use_qk_l2norm_in_kernel: bool,
    initial_state_indices: Tensor,
    eps: float = 1e-5,
) -> tuple[Tensor, Tensor]:
    """Run prompts back to back ``[1, T, heads, width]``; return rows of the same form, and the cache of states."""
    del output_final_state, eps
    if head_first:
        raise ValueError(
            "chunk_gated_delta_rule_cpu: head_first must be False, got True: transpose the rows"
        )
    heads = value.shape[2]
    state = _take(initial_state, initial_state_indices)
    rows = (
        *(one[0] for one in (query, key, value)),
        _softplus_of(-g.float()).reshape(-1, heads),
        torch.logit(beta.float()).reshape(-1, heads),
    )
    ones = torch.ones(heads)
    y = _delta(rows, -ones, 0 * ones, state, cu_seqlens, use_qk_l2norm_in_kernel)
    _put(initial_state, initial_state_indices, state)
    return y.unsqueeze(0), initial_state


def fused_sigmoid_gating_delta_rule_update_cpu(
    A_log: Tensor,
    dt_bias: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    initial_state_source: Tensor,
    initial_state_indices: Tensor,
    cu_seqlens: Tensor,
    use_qk_l2norm_in_kernel: bool,
    softplus_beta: float = 1.0,
    softplus_threshold: float = 20.0,
) -> Tensor:
    """Run one row of each sequence, ``[1, B, heads, width]``; return ``[B, 1, heads, width]``."""
    del softplus_beta, softplus_threshold  # what torch has by default
    state = _take(initial_state_source, initial_state_indices)
    rows = (q[0], k[0], v[0], a, b)
    A, dt_bias = -A_log.float().exp(), dt_bias.float()
    y = _delta(rows, A, dt_bias, state, cu_seqlens, use_qk_l2norm_in_kernel)
    _put(initial_state_source, initial_state_indices, state)
    return y.unsqueeze(1)


def _verify(
    cache: Tensor,
    slots: Tensor,
    accepted: Tensor,
    starts: Tensor,
    run: Callable[[Tensor, Tensor], None],
) -> None:
    """Run drafts row by row: from the state after the last accepted row, leaving the state after each.

    Args:
        cache: ``[S, ...]``.
        slots: ``[B, L]``, where the state after each row of a sequence is.
        accepted: ``[B]``, rows of the last step that were accepted.
        starts: ``[B + 1]``, where the rows of each sequence begin.
        run: Called with the rows of one step and their states, which it overwrites.
    """
    first = slots.gather(1, (accepted.long() - 1).clamp(min=0)[:, None])[:, 0]
    state = _take(cache, first)
    counts = (starts[1:] - starts[:-1]).long()
    for step in range(int(counts.max()) if counts.numel() else 0):
        live = (counts > step).nonzero().flatten()
        now = state[live]
        run(starts[:-1].long()[live] + step, now)
        state[live] = now
        _put(cache, slots[live, step], now)


def fused_sigmoid_gating_delta_rule_update_spec_cpu(
    A_log: Tensor,
    dt_bias: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    initial_state_source: Tensor,
    spec_state_indices: Tensor,
    num_accepted_tokens: Tensor,
    cu_seqlens: Tensor,
    use_qk_l2norm_in_kernel: bool,
    softplus_beta: float = 1.0,
    softplus_threshold: float = 20.0,
) -> Tensor:
    """Run the drafts of each sequence, ``[T, heads, width]``; return rows of the same form."""
    del softplus_beta, softplus_threshold
    y = torch.empty_like(v)
    A, dt_bias = -A_log.float().exp(), dt_bias.float()

    def run(rows: Tensor, state: Tensor) -> None:
        one = tuple(value[rows] for value in (q, k, v, a, b))
        starts = _starts(rows.numel())
        y[rows] = _delta(one, A, dt_bias, state, starts, use_qk_l2norm_in_kernel)

    _verify(initial_state_source, spec_state_indices, num_accepted_tokens, cu_seqlens, run)
    return y


# --- Mamba-2 ----------------------------------------------------------------------------------------------------------


def _of_heads(op: str, name: str, value: Tensor | None, heads: int, dim: int) -> Tensor:
    """Return one number for each head of a tensor that repeats it ``dim`` dimensions further; zeros for None."""
    if value is None:
        return torch.zeros(heads)
    while value.dim() > dim:
        if value.shape[-1] > 1 and value.stride(-1):
            raise ValueError(
                f"{op}: {name} must be one number for each head, as in Mamba-2, got {list(value.shape)}"
                " different ones: layers of Mamba-1 run on GPUs only in this vLLM"
            )
        value = value[..., 0]
    return value.float()


def _gated(y: Tensor, z: Tensor | None) -> Tensor:
    return y if z is None else (y.float() * F.silu(z.float())).to(y.dtype)


def mamba_chunk_scan_fwd_cpu(
    out: Tensor,
    final_states: Tensor,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    z: Tensor | None,
    cu_seqlens: Tensor,
) -> None:
    """Scan prompts back to back, ``[T, H, P]``, with steps ``[T, H]`` after their softplus.

    ``final_states`` float32 ``[B, H, P, N]`` has the states before, and is overwritten with those behind.
    """
    op, heads = "mamba_chunk_scan_fwd_cpu", x.shape[1]
    state = final_states.transpose(2, 3).contiguous()
    D = _of_heads(op, "D", D, heads, 1)
    A, zero = _of_heads(op, "A", A, heads, 1), torch.zeros(heads)
    places = _places(cu_seqlens)
    y = torch.ops.ipex.ssd_scan(x, _softplus_of(dt.float()), A, B, C, D, zero, state, *places)
    out.copy_(_gated(y, z))
    final_states.copy_(state.transpose(2, 3))


def selective_state_update_cpu(
    state: Tensor,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    z: Tensor | None,
    dt_bias: Tensor | None,
    dt_softplus: bool,
    state_batch_indices: Tensor | None,
    dst_state_batch_indices: Tensor | None,
    null_block_id: int,
    out: Tensor,
    num_accepted_tokens: Tensor | None,
    cu_seqlens: Tensor | None,
) -> None:
    """Write one row of each sequence, ``[B, H, P]``, or of its drafts; ``state`` is ``[S, H, P, N]``."""
    del null_block_id
    op, heads = "selective_state_update_cpu", x.shape[1]
    steps = _of_heads(op, "dt", dt, heads, 2)
    bias = _of_heads(op, "dt_bias", dt_bias, heads, 1)
    if not dt_softplus:
        steps, bias = _softplus_of(steps + bias), torch.zeros(heads)
    A, D = _of_heads(op, "A", A, heads, 1), _of_heads(op, "D", D, heads, 1)

    def run(rows: Tensor, now: Tensor) -> None:
        wide = now.transpose(2, 3).contiguous()
        one = (x[rows], steps[rows], A, B[rows], C[rows], D, bias, wide)
        y = torch.ops.ipex.ssd_scan(*one, *_places(_starts(rows.numel())))
        out[rows] = _gated(y, None if z is None else z[rows])
        now.copy_(wide.transpose(2, 3))

    slots = torch.arange(x.shape[0]) if state_batch_indices is None else state_batch_indices
    target = slots if dst_state_batch_indices is None else dst_state_batch_indices
    if num_accepted_tokens is not None and cu_seqlens is not None:
        _verify(state, target, num_accepted_tokens, cu_seqlens, run)
        return
    now = _take(state, slots)
    run(torch.arange(x.shape[0]), now)
    _put(state, target, now)

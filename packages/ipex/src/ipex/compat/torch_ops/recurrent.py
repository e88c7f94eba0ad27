# SPDX-License-Identifier: Apache-2.0
"""Second names of the ops of recurrent networks, RNN transducers, running sums and state space models."""

from __future__ import annotations

import torch
from torch import Tensor

from ipex.compat.torch_ops import alias_op
from ipex_core.library.kernels import specs

_OPS = torch.ops.ipex


@alias_op("ipex_lstm")
def _ipex_lstm(
    input: Tensor,
    hx: list[Tensor],
    params: list[Tensor],
    has_biases: bool,
    num_layers: int,
    dropout_p: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.lstm(
        input, hx, params, has_biases, num_layers, dropout_p, train, bidirectional, batch_first
    )


@alias_op("cumsum(Tensor self, int dim, *, ScalarType? dtype=None) -> Tensor")
def _cumsum(self: Tensor, dim: int, *, dtype: torch.dtype | None = None) -> Tensor:
    return torch.cumsum(self, dim, dtype=dtype)


@alias_op("cumsum_(Tensor(a!) self, int dim, *, ScalarType? dtype=None) -> Tensor(a!)")
def _cumsum_(self: Tensor, dim: int, *, dtype: torch.dtype | None = None) -> Tensor:
    return self.cumsum_(dim, dtype=dtype)


@alias_op(
    "cumsum.out(Tensor self, int dim, *, ScalarType? dtype=None, Tensor(a!) out) -> Tensor(a!)"
)
def _cumsum_out(self: Tensor, dim: int, *, dtype: torch.dtype | None = None, out: Tensor) -> Tensor:
    return torch.cumsum(self, dim, dtype=dtype, out=out)


@alias_op(
    "rnnt_embedding(Tensor table, Tensor idx, Tensor(a!) out, int _SOS, int batch, int dim) -> ()"
)
def _rnnt_embedding(
    table: Tensor, idx: Tensor, out: Tensor, sos: int, batch: int, dim: int
) -> None:
    rows = _OPS.rnnt_embedding(table, idx.reshape(-1), sos)
    if tuple(rows.shape) != (batch, dim) or out.numel() != rows.numel():
        raise RuntimeError(
            f"rnnt_embedding: out must hold a row of table for each idx and as many numbers as batch = {batch} times"
            f" dim = {dim}, got {list(out.shape)} for table {list(table.shape)} and idx {list(idx.shape)}"
        )
    out.copy_(rows.view(out.shape))


@alias_op(
    "rnnt_update_batch(Tensor k, Tensor out_lens, Tensor(a!) label_col, Tensor(b!) symbols_added,"
    " Tensor(c!) time_idxs, Tensor(d!) blankness_out, Tensor(e!) blankvec_out,"
    " Tensor(f!) not_blank_out, Tensor(g!) label_to_put_out, Tensor(h!) label_tensor_out,"
    " Tensor(i!) label_for_next_loop_out, Tensor(j!) hidden_0, Tensor(k!) hidden_1,"
    " Tensor hidden_prime_0, Tensor hidden_prime_1, Tensor x, Tensor(l!) f, int max_symbols,"
    " int blank_id, int batch, int _SOS, int max_len) -> bool"
)
def _rnnt_update_batch(k: Tensor, out_lens: Tensor, *rest: object) -> bool:
    *tensors, x, f, max_symbols, blank_id, _, sos, _ = rest
    assert isinstance(x, Tensor) and isinstance(f, Tensor)
    frames = f.unsqueeze(1) if f.dim() == 2 else f  # a view: what is written to it is written to f
    lengths = out_lens.to(torch.int32)
    args = (k.long(), lengths, *tensors, x, frames, max_symbols, blank_id, sos)
    # The op knows neither sequences that have ended before they begin nor those with more frames than x.
    if bool(((lengths < 1) | (lengths > x.shape[1])).any()):
        return bool(specs()["rnnt_update"].reference(*args, any_length=True))
    return bool(_OPS.rnnt_update(*args))


# -- The ops of state space models ------------------------------------------------------------------------------------


def _activation(silu: bool) -> str:
    return "silu" if silu else "none"


@alias_op("causal_conv1d_fn", mutates=("final_states_out",))
def _causal_conv1d_fn(
    x: Tensor,
    conv_weights: Tensor,
    conv_bias: Tensor | None,
    initial_states: Tensor | None,
    final_states_out: Tensor | None,
    silu_activation: bool,
) -> tuple[Tensor, Tensor]:
    y, last = _OPS.causal_conv1d_fn(
        x, conv_weights, conv_bias, initial_states, _activation(silu_activation)
    )
    if final_states_out is not None:
        final_states_out.copy_(last)
    return y, last


@alias_op(
    "causal_conv1d_update(Tensor hidden_states, Tensor(a!) conv_states, Tensor conv_weights,"
    " Tensor? conv_bias, bool silu_activation, Tensor? cache_seqlens=None)"
    " -> (Tensor, Tensor(a!))"
)
def _causal_conv1d_update(
    hidden_states: Tensor,
    conv_states: Tensor,
    conv_weights: Tensor,
    conv_bias: Tensor | None,
    silu_activation: bool,
    cache_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    y = _OPS.causal_conv1d_update(
        hidden_states,
        conv_states,
        conv_weights,
        conv_bias,
        _activation(silu_activation),
        cache_seqlens,
    )
    return y, conv_states


@alias_op("selective_scan_fn")
def _selective_scan_fn(
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    z: Tensor | None,
    delta_bias: Tensor | None,
    delta_softplus: bool,
    return_last_state: bool,
) -> tuple[Tensor, Tensor]:
    return _OPS.selective_scan_fn(u, delta, A, B, C, D, z, delta_bias, delta_softplus)  # type: ignore[no-any-return]


@alias_op("selective_state_update", mutates=("state",))
def _selective_state_update(
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
) -> Tensor:
    return _OPS.selective_state_update(state, x, dt, A, B, C, D, z, dt_bias, dt_softplus)  # type: ignore[no-any-return]

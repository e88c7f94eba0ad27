# SPDX-License-Identifier: Apache-2.0
"""Second names of the ops of state space models."""

from __future__ import annotations

import torch

from ipex.compat.torch_ops._alias_op import alias_op

Tensor = torch.Tensor
_OPS = torch.ops.ipex


def _activation(silu: bool) -> str:
    return "silu" if silu else "none"


@alias_op(
    "causal_conv1d_fn(Tensor x, Tensor conv_weights, Tensor? conv_bias, Tensor? initial_states,"
    " Tensor(a!)? final_states_out, bool silu_activation) -> (Tensor, Tensor)"
)
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


@alias_op(
    "selective_scan_fn(Tensor u, Tensor delta, Tensor A, Tensor B, Tensor C, Tensor? D, Tensor? z,"
    " Tensor? delta_bias, bool delta_softplus, bool return_last_state) -> (Tensor, Tensor)"
)
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


@alias_op(
    "selective_state_update(Tensor(a!) state, Tensor x, Tensor dt, Tensor A, Tensor B, Tensor C,"
    " Tensor? D, Tensor? z, Tensor? dt_bias, bool dt_softplus) -> Tensor"
)
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

# SPDX-License-Identifier: Apache-2.0
"""The state space functions with the signatures that models call them by."""

from __future__ import annotations

import torch
from torch import Tensor

from ipex_core.errors import OpArgumentError


def _activation(op: str, activation: str | None) -> str:
    if activation not in (None, "silu", "swish"):
        raise OpArgumentError(
            f"{op}: activation must be None, 'silu' or 'swish', got {activation!r}"
        )
    return "none" if activation is None else "silu"


def causal_conv1d_fn(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    initial_states: Tensor | None = None,
    return_final_states: bool = False,
    final_states_out: Tensor | None = None,
    activation: str | None = "silu",
) -> Tensor | tuple[Tensor, Tensor]:
    """Convolve each channel with its own short filter, looking back only, and apply an activation.

    Args:
        x: ``[B, D, L]``.
        weight: ``[D, W]``.
        bias: ``[D]``, or None.
        initial_states: ``[B, D, W - 1]``: the steps before the first one; None means zeros.
        return_final_states: Return the last W - 1 steps of the input too, for a sequence that goes on.
        final_states_out: Where to put these steps; it is then what is returned for them.
        activation: None, ``"silu"`` or ``"swish"`` (the same).

    Returns:
        The output like ``x``, or the output and the final states.

    Raises:
        OpArgumentError: For an unknown activation, or ``final_states_out`` without ``return_final_states``.
        RuntimeError: For wrong dtypes or shapes.
    """
    name = _activation("causal_conv1d_fn", activation)
    if final_states_out is not None and not return_final_states:
        raise OpArgumentError(
            "causal_conv1d_fn: final_states_out must be None without return_final_states, got a tensor"
        )
    y, last = torch.ops.ipex.causal_conv1d_fn(x, weight, bias, initial_states, name)
    if not return_final_states:
        return y
    if final_states_out is None:
        return y, last
    if final_states_out.shape != last.shape:
        raise OpArgumentError(
            f"causal_conv1d_fn: final_states_out must have shape {list(last.shape)}, "
            f"got {list(final_states_out.shape)}"
        )
    return y, final_states_out.copy_(last)


def causal_conv1d_update(
    x: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    cache_seqlens: Tensor | None = None,
) -> Tensor:
    """Convolve new steps with their history ``conv_state``, and put them into it.

    Args:
        x: ``[B, D]``, or ``[B, D, T]`` for T steps.
        conv_state: ``[B, D, S]`` with S at least W - 1; updated.
        weight: ``[D, W]``.
        bias: ``[D]``, or None.
        activation: None, ``"silu"`` or ``"swish"`` (the same).
        cache_seqlens: ``[B]``, the number of steps so far; makes ``conv_state`` a circular buffer.

    Returns:
        The output like ``x``.

    Raises:
        OpArgumentError: For an unknown activation.
        RuntimeError: For wrong dtypes or shapes, or a negative length.
    """
    name = _activation("causal_conv1d_update", activation)
    return torch.ops.ipex.causal_conv1d_update(x, conv_state, weight, bias, name, cache_seqlens)


def selective_scan_fn(
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    delta_bias: Tensor | None = None,
    delta_softplus: bool = False,
    return_last_state: bool = False,
    *,
    initial_state: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Run the selective state space recurrence of Mamba over whole sequences.

    Args:
        u: ``[B, D, L]``.
        delta: Like ``u``.
        A: ``[D, N]``, real.
        B: ``[D, N]``, ``[B, N, L]`` or ``[B, G, N, L]``.
        C: As ``B``.
        D: ``[D]``, or None.
        z: Gate like ``u``, or None.
        delta_bias: ``[D]``, or None.
        delta_softplus: Apply softplus to delta.
        return_last_state: Return the last state too.
        initial_state: ``[B, D, N]`` float32, the state before the first step.

    Returns:
        The output like ``u``, or the output and the last state, ``[B, D, N]`` float32.

    Raises:
        RuntimeError: For wrong dtypes or shapes.
    """
    y, state = torch.ops.ipex.selective_scan_fn(
        u, delta, A, B, C, D, z, delta_bias, delta_softplus, initial_state
    )
    return (y, state) if return_last_state else y


def selective_state_update(
    state: Tensor,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
) -> Tensor:
    """Advance the state of a selective state space model by one step, in place, and return the output.

    Args:
        state: ``[B, D, N]`` or ``[B, H, D, N]``; updated.
        x: ``[B, D]`` or ``[B, H, D]``.
        dt: Like ``x``.
        A: ``[D, N]`` or ``[H, D, N]``, real.
        B: ``[B, N]`` or ``[B, G, N]``.
        C: As ``B``.
        D: ``[D]`` or ``[H, D]``, or None.
        z: Gate like ``x``, or None.
        dt_bias: As ``D``.
        dt_softplus: Apply softplus to dt.

    Returns:
        The output like ``x``.

    Raises:
        RuntimeError: For wrong dtypes or shapes.
    """
    return torch.ops.ipex.selective_state_update(state, x, dt, A, B, C, D, z, dt_bias, dt_softplus)

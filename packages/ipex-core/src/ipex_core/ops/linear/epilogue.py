# SPDX-License-Identifier: Apache-2.0
"""What can follow a matrix product before it is stored: checks and meaning, shared by linear, woq_linear, int8_linear.

``y = activation(x W^T + bias) * mul + residual + residual2``, or with a gate
``y = gate(g + bias_g) * (u + bias_u) * mul + residual + residual2``, where the rows of the weight (and of the bias)
alternate between gate and up in blocks of 32: `ipex_core.woq.interleave_gate_up` makes such a weight.
"""

from __future__ import annotations

import torch
from torch.nn import functional

from ipex_core.library.checks import acc, check_device, check_dtype, check_one_of, check_shape
from ipex_core.library.spec import check
from ipex_core.packing.dense import PANEL, deinterleave_gate_up

__all__ = [
    "ACTIVATIONS",
    "GATES",
    "activate",
    "apply_epilogue",
    "check_activation",
    "check_operands",
    "weight_rows",
]

Tensor = torch.Tensor

ACTIVATIONS = ("none", "relu", "gelu", "gelu_tanh", "silu")
GATES = ("none", "silu", "gelu", "gelu_tanh")


def activate(y: Tensor, activation: str) -> Tensor:
    """Apply one of `ACTIVATIONS`."""
    if activation == "relu":
        return functional.relu(y)
    if activation == "gelu":
        return functional.gelu(y)
    if activation == "gelu_tanh":
        return functional.gelu(y, approximate="tanh")
    if activation == "silu":
        return functional.silu(y)
    return y


def weight_rows(out_features: int, gate: str = "none") -> int:
    """Return how many rows the weight has for ``out_features`` columns of the result."""
    return out_features if gate == "none" else -(-out_features // PANEL) * 2 * PANEL


def check_activation(op: str, activation: str, gate: str = "none") -> None:
    """Check the names; the first check of a kernel, because they say how many rows the weight has."""
    check_one_of(op, "activation", activation, ACTIVATIONS)
    check_one_of(op, "gate", gate, GATES)
    check(
        gate == "none" or activation == "none",
        op,
        "activation",
        "be none where there is a gate",
        activation,
    )


def check_operands(
    op: str,
    x: Tensor,
    out_features: int,
    bias: Tensor | None = None,
    mul: Tensor | None = None,
    residual: Tensor | None = None,
    residual2: Tensor | None = None,
    gate: str = "none",
    *,
    dtype: torch.dtype | None = None,
    of: str = "x",
) -> None:
    """Check the tensors; the result has the shape of ``x`` with ``out_features`` last.

    Their dtype is the dtype of ``x``, or ``dtype``: the dtype of the tensor that messages call ``of``.
    """
    like = x if dtype is None else x.new_empty((), dtype=dtype)
    if bias is not None:
        n = weight_rows(out_features, gate)
        source = "out_features" if gate == "none" else "of the interleaved weight"
        check_device(op, "bias", bias, x)
        check_dtype(op, "bias", bias, like, of, or_float32=True)
        check(
            bias.dim() == 1 and bias.shape[0] == n,
            op,
            "bias",
            f"be 1-D of size {source} = {n}",
            list(bias.shape),
        )
    shape = [*x.shape[:-1], out_features]
    for name, value in (("mul", mul), ("residual", residual), ("residual2", residual2)):
        if value is None:
            continue
        check_device(op, name, value, x)
        check_dtype(op, name, value, like, of)
        check_shape(op, name, value, shape)


def apply_epilogue(
    y: Tensor,
    out_features: int,
    bias: Tensor | None = None,
    activation: str = "none",
    mul: Tensor | None = None,
    residual: Tensor | None = None,
    residual2: Tensor | None = None,
    gate: str = "none",
) -> Tensor:
    """Return what follows the product ``y`` = x W^T, in the dtype of ``y``."""
    if bias is not None:
        y = y + bias.to(y.dtype)
    if gate == "none":
        y = activate(y, activation)
    else:
        first, up = deinterleave_gate_up(y, out_features, dim=-1)
        y = activate(first, gate) * up
    if mul is not None:
        y = y * acc(mul)
    if residual is not None:
        y = y + acc(residual)
    if residual2 is not None:
        y = y + acc(residual2)
    return y

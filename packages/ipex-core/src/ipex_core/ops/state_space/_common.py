# SPDX-License-Identifier: Apache-2.0
"""Checks and fakes shared by the state space ops."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ipex_core.library.checks import check_device, check_dtype, check_dtype_in, check_shape
from ipex_core.library.spec import check

__all__ = [
    "ACTIVATIONS",
    "channels_last",
    "check_activation",
    "check_float32",
    "check_shaped",
    "check_writable",
    "fake_sequence",
]

Tensor = torch.Tensor

ACTIVATIONS = ("none", "silu")


def check_shaped(
    op: str,
    name: str,
    value: Tensor | None,
    shape: Sequence[int],
    x: Tensor,
    of: str,
    *,
    or_float32: bool = False,
) -> None:
    """Check device, dtype and shape of an argument that may be None."""
    if value is None:
        return
    check_device(op, name, value, x, of)
    check_dtype(op, name, value, x, of, or_float32=or_float32)
    check_shape(op, name, value, shape)


def check_float32(
    op: str, name: str, value: Tensor, shape: Sequence[int], x: Tensor, of: str
) -> None:
    """Check that an argument is float32 and has this shape."""
    check_device(op, name, value, x, of)
    check_dtype_in(op, name, value, torch.float32)
    check_shape(op, name, value, shape)


def check_writable(op: str, name: str, value: Tensor) -> None:
    """Check that no two elements of an argument that is written to share memory by broadcasting."""
    check(
        all(
            stride != 0 or size <= 1
            for size, stride in zip(value.shape, value.stride(), strict=True)
        ),
        op,
        name,
        "have no broadcast dimension",
        f"strides {list(value.stride())}",
    )


def check_activation(op: str, activation: str) -> None:
    """Check the name of an activation."""
    check(activation in ACTIVATIONS, op, "activation", "be 'none' or 'silu'", repr(activation))


def channels_last(x: Tensor) -> bool:
    """Return whether ``x [B, D, L]`` is stored with its channels side by side, as a projection leaves it."""
    return x.stride(1) == 1 and x.stride(2) != 1


def fake_sequence(x: Tensor) -> Tensor:
    """Return a new tensor like ``x [B, D, L]``, dense in the order of ``x``."""
    batch, dim, length = x.shape
    if channels_last(x):
        return x.new_empty(batch, length, dim).transpose(1, 2)
    return x.new_empty(batch, dim, length)

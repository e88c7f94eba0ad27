# SPDX-License-Identifier: Apache-2.0
"""Activations, and their products with a second factor."""

from __future__ import annotations

import torch
from torch.nn import functional

from ipex_core.library.checks import dtype_name
from ipex_core.library.spec import check
from ipex_core.module_swap.base import call

__all__ = ["gelu_and_mul", "gelu_mul", "gelu_quick", "silu_and_mul", "silu_mul"]

Tensor = torch.Tensor
_OPS = torch.ops.ipex


def _given(op: str, y: Tensor, out: Tensor | None) -> Tensor:
    """Return the result, in ``out`` if there is one."""
    if out is None:
        return y
    check(out.device == y.device, op, "out", f"be on the device of x = {y.device}", out.device)
    check(
        out.dtype == y.dtype, op, "out", f"have dtype {dtype_name(y.dtype)}", dtype_name(out.dtype)
    )
    text = f"have shape {list(y.shape)}"
    check(out.shape == y.shape, op, "out", text, list(out.shape))
    return out.copy_(y)


def silu_mul(x: Tensor, y: Tensor, out: Tensor | None = None) -> Tensor:
    """Return ``silu(x) * y``.

    Args:
        x: Any shape, float32, bfloat16 or float16.
        y: Like ``x``; a shape that is broadcast and another dtype work too, with stock ops.
        out: Where to put the result; may be ``x`` or ``y``.

    Returns:
        ``out``, or a new tensor.

    Raises:
        OpArgumentError: ``out`` has not the shape, dtype and device of the result.
        RuntimeError: The shapes cannot be broadcast.
    """
    if x.shape == y.shape and x.dtype == y.dtype and x.dim() > 0:
        return _given("silu_mul", call(_OPS.silu_mul.default, x, y), out)
    return _given("silu_mul", functional.silu(x) * y, out)


def gelu_mul(x: Tensor, y: Tensor, out: Tensor | None = None, approximate: str = "none") -> Tensor:
    """Return ``gelu(x) * y``.

    Args:
        x: Any shape, float32, bfloat16 or float16.
        y: Like ``x``; a shape that is broadcast and another dtype work too, with stock ops.
        out: Where to put the result; may be ``x`` or ``y``.
        approximate: ``"none"`` (erf) or ``"tanh"``.

    Returns:
        ``out``, or a new tensor.

    Raises:
        OpArgumentError: ``approximate`` is neither, or ``out`` has not the shape, dtype and device of the result.
        RuntimeError: The shapes cannot be broadcast.
    """
    known = approximate in ("none", "tanh")
    check(known, "gelu_mul", "approximate", "be one of none, tanh", approximate)
    if x.shape == y.shape and x.dtype == y.dtype and x.dim() > 0:
        return _given("gelu_mul", call(_OPS.gelu_mul.default, x, y, approximate), out)
    return _given("gelu_mul", functional.gelu(x, approximate=approximate) * y, out)


def silu_and_mul(x: Tensor, out: Tensor | None = None) -> Tensor:
    """Return ``silu(first half) * second half`` of the last dimension.

    Args:
        x: ``[..., 2 * N]``, float32, bfloat16 or float16.
        out: ``[..., N]``: where to put the result.

    Returns:
        ``out``, or a new tensor ``[..., N]``.

    Raises:
        OpArgumentError: ``out`` has not the shape, dtype and device of the result.
        RuntimeError: For wrong dtypes, or a last dimension of odd size.
    """
    return _given("silu_and_mul", call(_OPS.silu_and_mul.default, x), out)


def gelu_and_mul(x: Tensor, out: Tensor | None = None, approximate: str = "none") -> Tensor:
    """Return ``gelu(first half) * second half`` of the last dimension.

    Args:
        x: ``[..., 2 * N]``, float32, bfloat16 or float16.
        out: ``[..., N]``: where to put the result.
        approximate: ``"none"`` (erf) or ``"tanh"``.

    Returns:
        ``out``, or a new tensor ``[..., N]``.

    Raises:
        OpArgumentError: ``out`` has not the shape, dtype and device of the result.
        RuntimeError: For wrong dtypes, an unknown ``approximate``, or a last dimension of odd size.
    """
    return _given("gelu_and_mul", call(_OPS.gelu_and_mul.default, x, approximate), out)


def gelu_quick(x: Tensor, out: Tensor | None = None) -> Tensor:
    """Return ``x * sigmoid(1.702 * x)``.

    Args:
        x: Any shape, float32, bfloat16 or float16.
        out: Where to put the result; may be ``x``.

    Returns:
        ``out``, or a new tensor.

    Raises:
        OpArgumentError: ``out`` has not the shape, dtype and device of the result.
        RuntimeError: For wrong dtypes.
    """
    return _given("gelu_quick", call(_OPS.gelu_quick.default, x), out)

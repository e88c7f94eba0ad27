# SPDX-License-Identifier: Apache-2.0
"""Norms, alone and after an addition."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ipex_core.library.spec import check
from ipex_core.module_swap.base import call

__all__ = ["add_layer_norm", "add_rms_norm", "fast_layer_norm", "rms_norm"]

Tensor = torch.Tensor
_OPS = torch.ops.ipex


def rms_norm(hidden_states: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """Normalize over the last dimension by the root mean square, computed in float32.

    Args:
        hidden_states: ``[..., N]``, float32, bfloat16 or float16.
        weight: ``[N]`` in the dtype of ``hidden_states`` or float32, or None for ones.
        eps: Added to the mean square.

    Returns:
        A new tensor like ``hidden_states``.

    Raises:
        RuntimeError: For wrong dtypes or shapes.

    Example:
        >>> rms_norm(torch.tensor([[3.0, 4.0]]), torch.ones(2), 0.0)
        tensor([[0.8485, 1.1314]])
    """
    y: Tensor = call(_OPS.rms_norm.default, hidden_states, weight, eps)
    return y


def fast_layer_norm(
    hidden_states: Tensor,
    normalized_shape: int | Sequence[int],
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
) -> Tensor:
    """Normalize over the last dimensions by mean and variance, computed in float32.

    Args:
        hidden_states: ``[..., *normalized_shape]``, float32, bfloat16 or float16.
        normalized_shape: The last dimensions.
        weight: ``normalized_shape`` in the dtype of ``hidden_states`` or float32, or None for ones.
        bias: Likewise, or None for zeros.
        eps: Added to the variance.

    Returns:
        A new tensor like ``hidden_states``.

    Raises:
        OpArgumentError: ``normalized_shape`` is not the shape of the last dimensions, of ``weight`` or of ``bias``.
        RuntimeError: For wrong dtypes.
    """
    op = "fast_layer_norm"
    shape = [normalized_shape] if isinstance(normalized_shape, int) else list(normalized_shape)
    last = list(hidden_states.shape[-len(shape) :]) if shape else []
    check(bool(shape), op, "normalized_shape", "name at least one dimension", "none")
    text = f"be the shape of the last dimensions of hidden_states = {list(hidden_states.shape)}"
    check(last == shape, op, "normalized_shape", text, shape)
    for name, value in (("weight", weight), ("bias", bias)):
        if value is not None:
            fits = list(value.shape) == shape
            check(fits, op, name, f"have shape {shape}", list(value.shape))
    if len(shape) == 1:
        y: Tensor = call(_OPS.layer_norm.default, hidden_states, weight, bias, eps)
        return y
    y = _OPS.layer_norm(
        hidden_states.flatten(-len(shape)),
        None if weight is None else weight.flatten(),
        None if bias is None else bias.flatten(),
        eps,
    )
    return y.view(hidden_states.shape)


def add_rms_norm(
    residual: Tensor | None,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    add_back: bool = False,
) -> Tensor:
    """Return the RMS norm of ``residual + x``.

    Args:
        residual: ``[..., N]`` like ``x``; None for the norm of ``x`` alone.
        x: ``[..., N]``, float32, bfloat16 or float16.
        weight: ``[N]`` in the dtype of ``x`` or float32, or None for ones.
        bias: None: an RMS norm has none.
        eps: Added to the mean square.
        add_back: Write the sum to ``residual``.

    Returns:
        A new tensor like ``x``.

    Raises:
        OpArgumentError: There is a bias.
        RuntimeError: For wrong dtypes or shapes; or ``add_back`` where a gradient is required.
    """
    check(bias is None, "add_rms_norm", "bias", "be None", "a tensor")
    y: Tensor
    if residual is None:
        y = call(_OPS.rms_norm.default, x, weight, eps)
    elif add_back:
        y = call(_OPS.add_rms_norm_.default, x, residual, weight, eps)
    else:
        y = call(_OPS.add_rms_norm.default, x, residual, weight, eps)[0]
    return y


def add_layer_norm(
    residual: Tensor | None,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    add_back: bool = False,
) -> Tensor:
    """Return the layer norm of ``residual + x`` over the last dimension.

    Args:
        residual: ``[..., N]`` like ``x``; None for the norm of ``x`` alone.
        x: ``[..., N]``, float32, bfloat16 or float16.
        weight: ``[N]`` in the dtype of ``x`` or float32, or None for ones.
        bias: Likewise, or None for zeros.
        eps: Added to the variance.
        add_back: Write the sum to ``residual``.

    Returns:
        A new tensor like ``x``.

    Raises:
        RuntimeError: For wrong dtypes or shapes; or ``add_back`` where a gradient is required.
    """
    y: Tensor
    if residual is None:
        y = call(_OPS.layer_norm.default, x, weight, bias, eps)
    elif add_back:
        y = call(_OPS.add_layer_norm_.default, x, residual, weight, bias, eps)
    else:
        y = call(_OPS.add_layer_norm.default, x, residual, weight, bias, eps)[0]
    return y

# SPDX-License-Identifier: Apache-2.0
"""Norms, activations and low-rank adapters: what works on each row alone."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from ipex_core.library.checks import check_like, dtype_name
from ipex_core.library.spec import check
from ipex_core.module_swap.base import call
from ipex_core.nn.ipex_api import lora
from ipex_core.ops.rms_norm import of_rows, times
from ipex_core.util import also_named

_OPS = torch.ops.ipex


def rms_norm(hidden_states: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """Normalize over the last dimension by the root mean square, computed in float32, or in float64 for that.

    Args:
        hidden_states: ``[..., N]``, floating.
        weight: ``[N]``, or another shape that broadcasts to ``hidden_states``; floating. None for ones.
        eps: Added to the mean square.

    Returns:
        A new tensor like ``hidden_states``.

    Raises:
        RuntimeError: For wrong dtypes or shapes.

    Example:
        >>> rms_norm(torch.tensor([[3.0, 4.0]]), torch.ones(2), 0.0)
        tensor([[0.8485, 1.1314]])
    """
    if not of_rows(hidden_states, weight):
        return times("rms_norm", hidden_states, weight, eps)
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
        x: ``[..., N]``, floating.
        weight: ``[N]``, or another shape that broadcasts to ``x``; floating. None for ones.
        bias: None: an RMS norm has none.
        eps: Added to the mean square.
        add_back: Write the sum to ``residual``.

    Returns:
        A new tensor like ``x``.

    Raises:
        OpArgumentError: There is a bias.
        RuntimeError: For wrong dtypes or shapes; or ``add_back`` to a leaf that requires a gradient.
    """
    check(bias is None, "add_rms_norm", "bias", "be None", "a tensor")
    y: Tensor
    if residual is None:
        return rms_norm(x, weight, eps)
    if not of_rows(x, weight):
        check_like("add_rms_norm", "residual", residual, x)
        y = times("add_rms_norm", x + residual, weight, eps)
        if add_back:
            residual += x
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
        RuntimeError: For wrong dtypes or shapes; or ``add_back`` to a leaf that requires a gradient.
    """
    y: Tensor
    if residual is None:
        y = call(_OPS.layer_norm.default, x, weight, bias, eps)
    elif add_back:
        y = call(_OPS.add_layer_norm_.default, x, residual, weight, bias, eps)
    else:
        y = call(_OPS.add_layer_norm.default, x, residual, weight, bias, eps)[0]
    return y


# -- Activations, and their products with a second factor -------------------------------------------------------------


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


# -- Low-rank adapters of many users in one batch, an adapter per row -------------------------------------------------


_also_named = also_named(
    inputs="input",
    lora_a_weights="lora_weights",
    lora_b_weights="lora_weights",
    output_tensor="output",
    lora_indices_tensor="token_lora_mapping",
)


@_also_named
def bgmv_shrink(
    input: Tensor,
    lora_weights: Tensor,
    output: Tensor,
    token_lora_mapping: Tensor,
    scaling: float = 1.0,
) -> Tensor:
    """Write ``scaling * lora_weights[adapter] @ row`` to ``output`` for each row.

    Args:
        input: ``[rows, features]``.
        lora_weights: ``[adapters, rank, features]`` or ``[adapters, 1, rank, features]``.
        output: ``[rows, rank]``, float32 or the dtype of the weights; written.
        token_lora_mapping: ``[rows]``: the adapter of each row, -1 for none (its outputs stay as they are).
        scaling: Factor on the product.

    Returns:
        ``output``.

    Raises:
        RuntimeError: For wrong dtypes or shapes, or an adapter that is out of range.
    """
    return lora.bgmv_shrink(input, lora_weights, output, token_lora_mapping, scaling)


@_also_named
def bgmv_expand(
    input: Tensor,
    lora_weights: Tensor,
    output: Tensor,
    token_lora_mapping: Tensor,
    add_inputs: bool = True,
) -> Tensor:
    """Add ``lora_weights[adapter] @ row`` to ``output`` for each row, or write it.

    Args:
        input: ``[rows, rank]``.
        lora_weights: ``[adapters, features, rank]`` or ``[adapters, 1, features, rank]``.
        output: ``[rows, features]``; written.
        token_lora_mapping: ``[rows]``: the adapter of each row, -1 for none (its outputs stay as they are).
        add_inputs: Add to ``output``; otherwise overwrite it.

    Returns:
        ``output``.

    Raises:
        RuntimeError: For wrong dtypes or shapes, or an adapter that is out of range.
    """
    return lora.bgmv_expand(input, lora_weights, output, token_lora_mapping, add_inputs)


@_also_named
def bgmv_expand_slice(
    input: Tensor,
    lora_weights: Tensor,
    output: Tensor,
    token_lora_mapping: Tensor,
    slice_offset: int,
    slice_size: int,
    add_inputs: bool = True,
) -> Tensor:
    """Do as `bgmv_expand` on ``slice_size`` columns of ``output`` from ``slice_offset`` on.

    Args:
        input: ``[rows, rank]``.
        lora_weights: ``[adapters, at least slice_size, rank]``, or with a dimension of 1 after the first.
        output: ``[rows, columns]``; written.
        token_lora_mapping: ``[rows]``: the adapter of each row, -1 for none.
        slice_offset: First column.
        slice_size: Number of columns.
        add_inputs: Add to ``output``; otherwise overwrite it.

    Returns:
        ``output``.

    Raises:
        RuntimeError: For wrong dtypes or shapes, or an adapter or a column that is out of range.
    """
    return lora.bgmv_expand_slice(
        *(input, lora_weights, output, token_lora_mapping, slice_offset, slice_size, add_inputs)
    )

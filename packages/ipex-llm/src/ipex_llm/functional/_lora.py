# SPDX-License-Identifier: Apache-2.0
"""Low-rank adapters of many users in one batch, an adapter per row."""

from __future__ import annotations

import torch

from ipex_core.nn.ipex_api import lora
from ipex_core.util import also_named

__all__ = ["bgmv_expand", "bgmv_expand_slice", "bgmv_shrink"]

Tensor = torch.Tensor
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
    lora.bgmv_shrink(input, lora_weights, output, token_lora_mapping, scaling)
    return output


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
    lora.bgmv_expand(input, lora_weights, output, token_lora_mapping, add_inputs)
    return output


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
    lora.bgmv_expand_slice(
        *(input, lora_weights, output, token_lora_mapping, slice_offset, slice_size, add_inputs)
    )
    return output

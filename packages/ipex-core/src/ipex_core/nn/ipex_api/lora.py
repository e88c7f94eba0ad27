# SPDX-License-Identifier: Apache-2.0
"""The multi-LoRA functions with the signatures that serving engines call them by."""

from __future__ import annotations

import torch
from torch import Tensor

from ipex_core.library.spec import check
from ipex_core.util import also_named

#: Names of what says which rows have which adapter.
_SEQUENCES = ("lora_indices_tensor", "seq_len_tensor", "b_seq_start_loc")


def _first(op: str, batches: int, *tensors: Tensor) -> list[Tensor]:
    """Return the first ``batches`` entries of the tensors that ``_SEQUENCES`` names."""
    for name, tensor in zip(_SEQUENCES, tensors, strict=True):
        check(tensor.dim() == 1, op, name, "be 1-D", f"{tensor.dim()}-D")
        size = tensor.shape[0]
        fits = 0 <= batches <= size
        check(fits, op, "batches", f"be between 0 and {size}, the size of {name}", batches)
    return [tensor[:batches] for tensor in tensors]


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
    torch.ops.ipex.bgmv_shrink(output, input, lora_weights, token_lora_mapping, scaling)
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
    torch.ops.ipex.bgmv_expand(output, input, lora_weights, token_lora_mapping, add_inputs)
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
    torch.ops.ipex.bgmv_expand_slice(
        *(output, input, lora_weights, token_lora_mapping, slice_offset, slice_size, add_inputs)
    )
    return output


def sgmv_shrink(
    inputs: Tensor,
    lora_a_weights: Tensor,
    output_tensor: Tensor,
    b_seq_start_loc: Tensor,
    seq_len_tensor: Tensor,
    lora_indices_tensor: Tensor,
    batches: int,
    max_seq_length: int,
    scaling: float,
) -> Tensor:
    """Do as `bgmv_shrink` with one adapter per sequence of consecutive rows.

    Args:
        inputs: ``[rows, features]``.
        lora_a_weights: ``[adapters, rank, features]`` or ``[adapters, 1, rank, features]``.
        output_tensor: ``[rows, rank]``; written.
        b_seq_start_loc: First row of each sequence, ascending.
        seq_len_tensor: Rows of each sequence.
        lora_indices_tensor: The adapter of each sequence, -1 for none.
        batches: Number of sequences: the tensors above may be longer.
        max_seq_length: Not needed here: the lengths say it.
        scaling: Factor on the product.

    Returns:
        ``output_tensor``.

    Raises:
        RuntimeError: For wrong dtypes or shapes, an index that is out of range, or sequences that overlap or leave
            the rows of ``inputs``.
    """
    indices, lengths, starts = _first(
        "sgmv_shrink", batches, lora_indices_tensor, seq_len_tensor, b_seq_start_loc
    )
    torch.ops.ipex.sgmv_shrink(
        output_tensor, inputs, lora_a_weights, indices, lengths, scaling, starts
    )
    return output_tensor


def sgmv_expand(
    inputs: Tensor,
    lora_b_weights: Tensor,
    output_tensor: Tensor,
    b_seq_start_loc: Tensor,
    seq_len_tensor: Tensor,
    lora_indices_tensor: Tensor,
    batches: int,
    max_seq_length: int,
    add_inputs: bool = False,
) -> Tensor:
    """Do as `bgmv_expand` with one adapter per sequence of consecutive rows.

    The sequences are given as for `sgmv_shrink`, everything else as for `bgmv_expand`.
    """
    indices, lengths, starts = _first(
        "sgmv_expand", batches, lora_indices_tensor, seq_len_tensor, b_seq_start_loc
    )
    torch.ops.ipex.sgmv_expand(
        output_tensor, inputs, lora_b_weights, indices, lengths, add_inputs, starts
    )
    return output_tensor


def sgmv_expand_slice(
    inputs: Tensor,
    lora_b_weights: Tensor,
    output_tensor: Tensor,
    b_seq_start_loc: Tensor,
    seq_len_tensor: Tensor,
    lora_indices_tensor: Tensor,
    batches: int,
    max_seq_length: int,
    slice_offset: int,
    slice_size: int,
    add_inputs: bool = False,
) -> Tensor:
    """Do as `bgmv_expand_slice` with one adapter per sequence of consecutive rows.

    The sequences are given as for `sgmv_shrink`, everything else as for `bgmv_expand_slice`.
    """
    indices, lengths, starts = _first(
        "sgmv_expand_slice", batches, lora_indices_tensor, seq_len_tensor, b_seq_start_loc
    )
    torch.ops.ipex.sgmv_expand_slice(
        output_tensor,
        inputs,
        lora_b_weights,
        indices,
        lengths,
        slice_offset,
        slice_size,
        add_inputs,
        starts,
    )
    return output_tensor

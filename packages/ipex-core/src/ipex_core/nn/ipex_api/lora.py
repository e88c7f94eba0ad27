# SPDX-License-Identifier: Apache-2.0
"""The multi-LoRA functions with the signatures that serving engines call them by."""

from __future__ import annotations

import torch
from torch import Tensor

from ipex_core.library.spec import check

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


def bgmv_shrink(
    inputs: Tensor,
    lora_a_weights: Tensor,
    output_tensor: Tensor,
    lora_indices_tensor: Tensor,
    scaling: float = 1.0,
) -> Tensor:
    """Write ``scaling * lora_a_weights[index] @ row`` to ``output_tensor`` for each row.

    Args:
        inputs: ``[rows, features]``.
        lora_a_weights: ``[adapters, rank, features]`` or ``[adapters, 1, rank, features]``.
        output_tensor: ``[rows, rank]``, float32 or the dtype of the weights; written.
        lora_indices_tensor: ``[rows]``: the adapter of each row, -1 for none (its outputs are left as they are).
        scaling: Factor on the product.

    Returns:
        ``output_tensor``.

    Raises:
        RuntimeError: For wrong dtypes or shapes, or an index that is out of range.
    """
    torch.ops.ipex.bgmv_shrink(output_tensor, inputs, lora_a_weights, lora_indices_tensor, scaling)
    return output_tensor


def bgmv_expand(
    inputs: Tensor,
    lora_b_weights: Tensor,
    output_tensor: Tensor,
    lora_indices_tensor: Tensor,
    add_inputs: bool = True,
) -> Tensor:
    """Add ``lora_b_weights[index] @ row`` to ``output_tensor`` for each row, or write it.

    Args:
        inputs: ``[rows, rank]``.
        lora_b_weights: ``[adapters, features, rank]`` or ``[adapters, 1, features, rank]``.
        output_tensor: ``[rows, features]``; written.
        lora_indices_tensor: ``[rows]``: the adapter of each row, -1 for none (its outputs are left as they are).
        add_inputs: Add to ``output_tensor``; otherwise overwrite it.

    Returns:
        ``output_tensor``.

    Raises:
        RuntimeError: For wrong dtypes or shapes, or an index that is out of range.
    """
    torch.ops.ipex.bgmv_expand(
        output_tensor, inputs, lora_b_weights, lora_indices_tensor, add_inputs
    )
    return output_tensor


def bgmv_expand_slice(
    inputs: Tensor,
    lora_b_weights: Tensor,
    output_tensor: Tensor,
    lora_indices_tensor: Tensor,
    slice_offset: int,
    slice_size: int,
    add_inputs: bool = True,
) -> Tensor:
    """Do as `bgmv_expand` on ``slice_size`` columns of ``output_tensor`` from ``slice_offset`` on.

    Args:
        inputs: ``[rows, rank]``.
        lora_b_weights: ``[adapters, at least slice_size, rank]``, or with a dimension of 1 after the first.
        output_tensor: ``[rows, columns]``; written.
        lora_indices_tensor: ``[rows]``: the adapter of each row, -1 for none.
        slice_offset: First column.
        slice_size: Number of columns.
        add_inputs: Add to ``output_tensor``; otherwise overwrite it.

    Returns:
        ``output_tensor``.

    Raises:
        RuntimeError: For wrong dtypes or shapes, or an index or a column that is out of range.
    """
    torch.ops.ipex.bgmv_expand_slice(
        output_tensor,
        inputs,
        lora_b_weights,
        lora_indices_tensor,
        slice_offset,
        slice_size,
        add_inputs,
    )
    return output_tensor


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

# SPDX-License-Identifier: Apache-2.0
"""Low-rank adapters for batches in which every row may have another one (multi-LoRA, after punica).

Six ops: ``shrink`` multiplies by the first factor of the adapter, ``expand`` by the second one, ``expand_slice`` writes
to some columns only. ``bgmv`` has an adapter per row, ``sgmv`` one per sequence of consecutive rows.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch

from ipex_core.library.arguments import Arguments
from ipex_core.library.checks import acc
from ipex_core.library.kernels import register
from ipex_core.library.spec import OpSpec
from ipex_core.ops.lora._checks import (
    adapter_of_rows,
    adapter_of_sequences,
    check_lora,
    lora_bench,
    lora_samples,
    lora_stock,
)

Tensor = torch.Tensor


def _matrices(weights: Tensor) -> Tensor:
    return weights.squeeze(1) if weights.dim() == 4 else weights


def _apply(
    out: Tensor,
    input: Tensor,
    weights: Tensor,
    adapter_of: list[int],
    scale: float,
    add: bool,
) -> None:
    """Write ``scale * input @ weights[adapter].T`` to the first columns of ``out``, or add it."""
    matrices = _matrices(weights)
    count = min(out.shape[1], matrices.shape[1])
    for adapter in sorted(set(adapter_of) - {-1}):
        rows = [row for row, number in enumerate(adapter_of) if number == adapter]
        product = scale * (acc(input[rows]) @ acc(matrices[adapter][:count]).t())
        if add:
            product = product + acc(out[rows, :count])
        out[rows, :count] = product.to(out.dtype)


def _bgmv_shrink(
    out: Tensor, input: Tensor, weights: Tensor, indices: Tensor, scale: float = 1.0
) -> None:
    """Multiply each row by the first factor of its adapter: ``out[i] = scale * weights[indices[i]] @ input[i]``.

    A row whose index is -1 has no adapter: its outputs are left as they are. Sums are computed in float32.

    Args:
        out: ``[rows, at least rank]``, float32 or the dtype of ``weights``; the first ``rank`` columns are written.
        input: ``[rows, features]``, float32 or the dtype of ``weights``.
        weights: ``[adapters, rank, features]`` or ``[adapters, 1, rank, features]``, float32, bfloat16 or float16.
        indices: ``[rows]``, int32 or int64: the adapter of each row, or -1.
        scale: Factor on the product.

    Raises:
        RuntimeError: For wrong dtypes, shapes or devices, and for an index that is out of range; before anything is
            written.

    Source: Chen et al., "Punica: Multi-Tenant LoRA Serving", 2023.
    """
    numbers = adapter_of_rows("bgmv_shrink", indices, weights.shape[0])
    _apply(out, input, weights, numbers, scale, add=False)


def _bgmv_expand(
    out: Tensor, input: Tensor, weights: Tensor, indices: Tensor, add_inputs: bool = True
) -> None:
    """Multiply each row by the second factor of its adapter: ``out[i] += weights[indices[i]] @ input[i]``.

    A row whose index is -1 has no adapter: its outputs are left as they are. Sums are computed in float32. Where
    ``out`` and the matrices differ in width, by padding, the columns that both have are written.

    Args:
        out: ``[rows, features]``, float32 or the dtype of ``weights``; written.
        input: ``[rows, rank]``, float32 or the dtype of ``weights``.
        weights: ``[adapters, features, rank]`` or ``[adapters, 1, features, rank]``, float32, bfloat16 or float16.
        indices: ``[rows]``, int32 or int64: the adapter of each row, or -1.
        add_inputs: Add to ``out``; otherwise overwrite it.

    Raises:
        RuntimeError: For wrong dtypes, shapes or devices, and for an index that is out of range; before anything is
            written.

    Source: Chen et al., "Punica: Multi-Tenant LoRA Serving", 2023.
    """
    numbers = adapter_of_rows("bgmv_expand", indices, weights.shape[0])
    _apply(out, input, weights, numbers, 1.0, add_inputs)


def _bgmv_expand_slice(
    out: Tensor,
    input: Tensor,
    weights: Tensor,
    indices: Tensor,
    slice_offset: int,
    slice_size: int,
    add_inputs: bool = True,
) -> None:
    """Do as `bgmv_expand` on the columns ``[slice_offset, slice_offset + slice_size)`` of ``out``.

    For layers whose output is several projections side by side, each with an adapter of its own.

    Args:
        out: ``[rows, columns]``, float32 or the dtype of ``weights``; written.
        input: ``[rows, rank]``, float32 or the dtype of ``weights``.
        weights: ``[adapters, at least slice_size, rank]``, or with a dimension of 1 after the first.
        indices: ``[rows]``, int32 or int64: the adapter of each row, or -1.
        slice_offset: First column.
        slice_size: Number of columns.
        add_inputs: Add to ``out``; otherwise overwrite it.

    Raises:
        RuntimeError: As `bgmv_expand`, and for columns that ``out`` or ``weights`` do not have.

    Source: Chen et al., "Punica: Multi-Tenant LoRA Serving", 2023.
    """
    numbers = adapter_of_rows("bgmv_expand_slice", indices, weights.shape[0])
    part = _matrices(weights)[:, :slice_size]
    _apply(out.narrow(1, slice_offset, slice_size), input, part, numbers, 1.0, add_inputs)


def _sgmv_shrink(
    out: Tensor,
    input: Tensor,
    weights: Tensor,
    indices: Tensor,
    seq_lens: Tensor,
    scale: float = 1.0,
    seq_starts: Tensor | None = None,
) -> None:
    """Do as `bgmv_shrink` with one adapter per sequence of consecutive rows.

    Rows of no sequence and rows of a sequence whose index is -1 are left as they are.

    Args:
        out: ``[rows, at least rank]``; the first ``rank`` columns are written.
        input: ``[rows, features]``.
        weights: ``[adapters, rank, features]`` or ``[adapters, 1, rank, features]``.
        indices: ``[sequences]``, int32 or int64: the adapter of each sequence, or -1.
        seq_lens: ``[sequences]``, int32 or int64: rows of each sequence.
        scale: Factor on the product.
        seq_starts: ``[sequences]``, int32 or int64: first rows, ascending and without overlap. None means that each
            sequence begins where the one before ends.

    Raises:
        RuntimeError: As `bgmv_shrink`, and for sequences that overlap or leave the rows of ``input``.

    Source: Chen et al., "Punica: Multi-Tenant LoRA Serving", 2023.
    """
    numbers = adapter_of_sequences(
        "sgmv_shrink", indices, seq_lens, seq_starts, weights.shape[0], input.shape[0]
    )
    _apply(out, input, weights, numbers, scale, add=False)


def _sgmv_expand(
    out: Tensor,
    input: Tensor,
    weights: Tensor,
    indices: Tensor,
    seq_lens: Tensor,
    add_inputs: bool = False,
    seq_starts: Tensor | None = None,
) -> None:
    """Do as `bgmv_expand` with one adapter per sequence of consecutive rows.

    Args:
        out: ``[rows, features]``; written.
        input: ``[rows, rank]``.
        weights: ``[adapters, features, rank]`` or ``[adapters, 1, features, rank]``.
        indices: ``[sequences]``, int32 or int64: the adapter of each sequence, or -1.
        seq_lens: ``[sequences]``, int32 or int64: rows of each sequence.
        add_inputs: Add to ``out``; otherwise overwrite it.
        seq_starts: First rows, as in `sgmv_shrink`.

    Raises:
        RuntimeError: As `bgmv_expand`, and for sequences that overlap or leave the rows of ``input``.

    Source: Chen et al., "Punica: Multi-Tenant LoRA Serving", 2023.
    """
    numbers = adapter_of_sequences(
        "sgmv_expand", indices, seq_lens, seq_starts, weights.shape[0], input.shape[0]
    )
    _apply(out, input, weights, numbers, 1.0, add_inputs)


def _sgmv_expand_slice(
    out: Tensor,
    input: Tensor,
    weights: Tensor,
    indices: Tensor,
    seq_lens: Tensor,
    slice_offset: int,
    slice_size: int,
    add_inputs: bool = False,
    seq_starts: Tensor | None = None,
) -> None:
    """Do as `bgmv_expand_slice` with one adapter per sequence of consecutive rows.

    Args:
        out: ``[rows, columns]``; written.
        input: ``[rows, rank]``.
        weights: ``[adapters, at least slice_size, rank]``, or with a dimension of 1 after the first.
        indices: ``[sequences]``, int32 or int64: the adapter of each sequence, or -1.
        seq_lens: ``[sequences]``, int32 or int64: rows of each sequence.
        slice_offset: First column.
        slice_size: Number of columns.
        add_inputs: Add to ``out``; otherwise overwrite it.
        seq_starts: First rows, as in `sgmv_shrink`.

    Raises:
        RuntimeError: As `bgmv_expand_slice`, and for sequences that overlap or leave the rows of ``input``.

    Source: Chen et al., "Punica: Multi-Tenant LoRA Serving", 2023.
    """
    numbers = adapter_of_sequences(
        "sgmv_expand_slice", indices, seq_lens, seq_starts, weights.shape[0], input.shape[0]
    )
    part = _matrices(weights)[:, :slice_size]
    _apply(out.narrow(1, slice_offset, slice_size), input, part, numbers, 1.0, add_inputs)


def _fake(a: Arguments) -> None:
    """Return nothing: all results are in ``out``."""


_TENSORS = "(Tensor(a!) out, Tensor input, Tensor weights, Tensor indices"
_OPS: dict[str, tuple[Callable[..., None], str, str]] = {
    "bgmv_shrink": (_bgmv_shrink, ", float scale=1.0", "First factor of an adapter per row"),
    "bgmv_expand": (_bgmv_expand, ", bool add_inputs=True", "Second factor of an adapter per row"),
    "bgmv_expand_slice": (
        _bgmv_expand_slice,
        ", int slice_offset, int slice_size, bool add_inputs=True",
        "Second factor of an adapter per row, into some columns",
    ),
    "sgmv_shrink": (
        _sgmv_shrink,
        ", Tensor seq_lens, float scale=1.0, Tensor? seq_starts=None",
        "First factor of an adapter per sequence",
    ),
    "sgmv_expand": (
        _sgmv_expand,
        ", Tensor seq_lens, bool add_inputs=False, Tensor? seq_starts=None",
        "Second factor of an adapter per sequence",
    ),
    "sgmv_expand_slice": (
        _sgmv_expand_slice,
        ", Tensor seq_lens, int slice_offset, int slice_size, bool add_inputs=False,"
        " Tensor? seq_starts=None",
        "Second factor of an adapter per sequence, into some columns",
    ),
}

for _name, (_reference, _arguments, _summary) in _OPS.items():
    register(
        OpSpec(
            name=_name,
            schema=f"{_TENSORS}{_arguments}) -> ()",
            reference=_reference,
            check=check_lora,
            fake=_fake,
            samples=functools.partial(lora_samples, _name),
            stock=functools.partial(lora_stock, _name),
            backward=None,
            tolerance={
                torch.float32: (1e-4, 1e-4),
                torch.bfloat16: (1.6e-2, 2e-2),
                torch.float16: (2e-3, 2e-3),
            },
            bench=functools.partial(lora_bench, _name),
            summary=_summary,
        )
    )

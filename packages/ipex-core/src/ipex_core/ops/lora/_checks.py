# SPDX-License-Identifier: Apache-2.0
"""Checks of the arguments of the ops for low-rank adapters."""

from __future__ import annotations

import torch

from ipex_core.errors import OpArgumentError
from ipex_core.library.arguments import Arguments
from ipex_core.library.checks import (
    check_device,
    check_dtype,
    check_shape,
    check_tensor,
    dtype_name,
)
from ipex_core.library.spec import check
from ipex_core.ops.state_space._common import check_writable

__all__ = ["adapter_of_rows", "adapter_of_sequences", "check_lora"]

Tensor = torch.Tensor


def _values(tensor: Tensor) -> list[int]:
    return [int(value) for value in tensor.tolist()]


def adapter_of_rows(op: str, indices: Tensor, adapters: int) -> list[int]:
    """Return the adapter of each row or sequence, -1 for those without."""
    values = _values(indices)
    for value in values:
        if not -1 <= value < adapters:
            raise OpArgumentError(f"{op}: indices must be in [-1, {adapters}), got {value}")
    return values


def adapter_of_sequences(
    op: str, indices: Tensor, seq_lens: Tensor, seq_starts: Tensor | None, adapters: int, rows: int
) -> list[int]:
    """Return the adapter of each row, given those of the sequences; -1 for rows without."""
    numbers, lengths = adapter_of_rows(op, indices, adapters), _values(seq_lens)
    starts = None if seq_starts is None else _values(seq_starts)
    adapter_of = [-1] * rows
    end = 0
    for i, (number, length) in enumerate(zip(numbers, lengths, strict=True)):
        if length < 0:
            raise OpArgumentError(f"{op}: seq_lens must not be negative, got {length}")
        start = end if starts is None else starts[i]
        if start < end:
            raise OpArgumentError(
                f"{op}: seq_starts must be ascending without overlap, got {start} after row {end}"
            )
        if start > rows or length > rows - start:
            raise OpArgumentError(
                f"{op}: seq_lens must stay within the {rows} rows of input, got {length} from row {start}"
            )
        end = start + length
        adapter_of[start:end] = [number] * length
    return adapter_of


def _check(
    op: str,
    out: Tensor,
    input: Tensor,
    weights: Tensor,
    indices: Tensor,
    seq_lens: Tensor | None = None,
    seq_starts: Tensor | None = None,
) -> None:
    check_tensor(op, "weights", weights)
    check(
        weights.dim() == 3 or (weights.dim() == 4 and weights.shape[1] == 1),
        op,
        "weights",
        "have shape [adapters, outputs, inputs] or [adapters, 1, outputs, inputs]",
        list(weights.shape),
    )
    check_device(op, "input", input, weights, "weights")
    check_dtype(op, "input", input, weights, "weights", or_float32=True)
    inputs = weights.shape[-1]
    check(
        input.dim() == 2 and input.shape[1] == inputs,
        op,
        "input",
        f"have shape [rows, {inputs}]",
        list(input.shape),
    )
    check_device(op, "out", out, weights, "weights")
    check_dtype(op, "out", out, weights, "weights", or_float32=True)
    rows = input.shape[0]
    check(
        out.dim() == 2 and out.shape[0] == rows,
        op,
        "out",
        f"have shape [{rows}, outputs]",
        list(out.shape),
    )
    check_writable(op, "out", out)
    _check_integers(op, "indices", indices, weights)
    if seq_lens is None:
        check(indices.shape[0] == rows, op, "indices", f"have shape [{rows}]", list(indices.shape))
        return
    for name, value in (("seq_lens", seq_lens), ("seq_starts", seq_starts)):
        if value is None:
            continue
        _check_integers(op, name, value, weights)
        shape = list(indices.shape)
        check_shape(op, name, value, shape)


def _check_integers(op: str, name: str, value: Tensor, weights: Tensor) -> None:
    check_device(op, name, value, weights, "weights")
    check(
        value.dtype in (torch.int32, torch.int64),
        op,
        name,
        "have dtype int32 or int64",
        dtype_name(value.dtype),
    )
    check(value.dim() == 1, op, name, "be 1-D", list(value.shape))


def _check_shrink(op: str, out: Tensor, weights: Tensor) -> None:
    outputs = weights.shape[-2]
    check(
        out.shape[1] >= outputs,
        op,
        "out",
        f"have at least the {outputs} columns of weights",
        list(out.shape),
    )


def _check_slice(op: str, out: Tensor, weights: Tensor, offset: int, size: int) -> None:
    outputs = weights.shape[-2]
    check(
        0 <= size <= outputs,
        op,
        "slice_size",
        f"be in [0, {outputs}], the rows of each matrix of weights",
        size,
    )
    columns = out.shape[1]
    check(
        0 <= offset <= columns - size,
        op,
        "slice_offset",
        f"be in [0, {columns - size}] for {size} of {columns} columns",
        offset,
    )


def check_lora(a: Arguments) -> None:
    """Check a call of any of the six ops."""
    given = vars(a)
    _check(
        a.op,
        a.out,
        a.input,
        a.weights,
        a.indices,
        given.get("seq_lens"),
        given.get("seq_starts"),
    )
    if a.op.endswith("_shrink"):
        _check_shrink(a.op, a.out, a.weights)
    elif a.op.endswith("_slice"):
        _check_slice(a.op, a.out, a.weights, a.slice_offset, a.slice_size)

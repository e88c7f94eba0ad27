# SPDX-License-Identifier: Apache-2.0
"""Samples and checks of the ops for low-rank adapters."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from ipex_core.errors import OpArgumentError
from ipex_core.library.checks import (
    acc,
    check_device,
    check_kind,
    check_shape,
    check_tensor,
    dtype_name,
    randn,
)
from ipex_core.library.kernels import register_op
from ipex_core.library.spec import Arguments, BenchCase, Sample
from ipex_core.ops.state_space import check_writable


def _operands(
    dtype: torch.dtype, op: str, rows: int, adapters: int, rank: int, features: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return out, input, weights: shrink reads the dtype of the weights and writes float32, expand the other way."""
    if op.endswith("_shrink"):
        return (
            randn(rows, rank, seed=91),
            randn(rows, features, dtype=dtype, seed=92),
            randn(adapters, rank, features, dtype=dtype, seed=93, scale=features**-0.5),
        )
    return (
        randn(rows, features, dtype=dtype, seed=91),
        randn(rows, rank, seed=92),
        randn(adapters, features, rank, dtype=dtype, seed=93, scale=rank**-0.5),
    )


def _selection(op: str, numbers: list[int], lengths: list[int]) -> tuple[Tensor, ...]:
    """Return indices, or indices and seq_lens."""
    if op.startswith("bgmv"):
        rows = [
            number for number, length in zip(numbers, lengths, strict=True) for _ in range(length)
        ]
        return (torch.tensor(rows, dtype=torch.int64),)
    return (
        torch.tensor(numbers, dtype=torch.int64),
        torch.tensor(lengths, dtype=torch.int32),
    )


def _rest(op: str, features: int, add: bool = True) -> tuple[Any, ...]:
    if op.endswith("_shrink"):
        return (0.5,)
    return (features // 3, features // 2, add) if op.endswith("_slice") else (add,)


def lora_samples(op: str, dtype: torch.dtype) -> Iterator[Sample]:
    """Yield the samples of one of the six ops."""
    for numbers, lengths, adapters, rank, features in (
        ([0], [1], 1, 1, 1),
        ([1, 0, -1], [2, 1, 2], 2, 4, 7),
        ([2, 0, 2, 1], [1, 1, 1, 1], 3, 8, 40),
        ([0, 1], [9, 3], 2, 16, 130),
        ([1, -1, 1, 0], [37, 2, 5, 1], 2, 16, 64),
        ([0, 2], [5, 6], 3, 21, 33),
        ([1], [1], 2, 64, 300),
        ([0, 1], [0, 3], 2, 5, 1030),
    ):
        rows = sum(lengths)
        operands = _operands(dtype, op, rows, adapters, rank, features)
        chosen = _selection(op, numbers, lengths)
        name = f"{rows}x{adapters}x{rank}x{features}"
        yield Sample((*operands, *chosen, *_rest(op, features)), id=name)
    out, input, weights = _operands(dtype, op, 7, 3, 8, 48)
    chosen = _selection(op, [2, -1, 0], [3, 1, 3])
    yield Sample((out, input, weights, *chosen, *_rest(op, 48, add=False)), id="overwrite")
    both = out.to(dtype), input.to(dtype)
    yield Sample((*both, weights[:, None], *chosen, *_rest(op, 48)), id="one_dtype")
    floats = out.float(), input.float()
    yield Sample((*floats, weights, *chosen, *_rest(op, 48)), id="float32_around")
    wide = randn(7, 100, dtype=out.dtype, seed=94)
    yield Sample((wide[:, 20:80], input, weights, *chosen, *_rest(op, 48)), id="out_in_a_buffer")
    yield Sample(
        (
            out,
            torch.stack([input, input], -1)[..., 0],
            weights.transpose(1, 2).contiguous().transpose(1, 2),
            *chosen,
            *_rest(op, 48),
        ),
        id="noncontiguous",
    )
    yield Sample(
        (out.t().contiguous().t(), input, weights, *(i.int() for i in chosen), *_rest(op, 48)),
        id="out_transposed",
    )
    special = input.clone()
    special[1, 3] = float("nan")
    special[5, 4] = float("inf")
    yield Sample((out, special, weights, *chosen, *_rest(op, 48)), id="special_values")
    none = _selection(op, [-1], [7])
    yield Sample((out, input, weights[:0], *none, *_rest(op, 48)), id="no_adapters")
    empty = _selection(op, [], [])
    yield Sample((out[:0], input[:0], weights, *empty, *_rest(op, 48)), id="no_rows")
    if op.startswith("sgmv"):
        yield Sample(
            (out, input, weights, *chosen, *_rest(op, 48), torch.tensor([0, 3, 4])), id="starts"
        )
        fewer = _selection(op, [2, 1], [2, 3])
        yield Sample(
            (out, input, weights, *fewer, *_rest(op, 48), torch.tensor([1, 4], dtype=torch.int32)),
            id="starts_with_gaps",
        )


def lora_stock(op: str, out: Tensor, input: Tensor, weights: Tensor, *args: Any) -> None:
    """Compute one of the six ops with one product of stock torch per adapter."""
    indices = args[0]
    rest = args[1:]
    if op.startswith("sgmv"):
        indices = torch.repeat_interleave(indices, rest[0])
        rest = rest[1:]
    if op.endswith("_slice"):
        out, rest = out.narrow(1, rest[0], rest[1]), rest[2:]
        weights = weights[:, : out.shape[1]]
    for adapter in indices.unique().tolist():
        rows = (indices == adapter).nonzero()[:, 0]
        product = (input[rows].to(weights.dtype) @ weights[adapter].t()).to(out.dtype)
        if op.endswith("_shrink"):
            out[rows] = product * rest[0]
        elif rest[0]:
            out[rows] += product
        else:
            out[rows] = product


def lora_bench(op: str) -> Iterator[BenchCase]:
    """Yield the benchmark cases of one of the six ops."""
    rank, features, adapters = 16, 4096, 8
    lengths = ((1,), (1,) * 8, (1,) * 32) if op.startswith("bgmv") else ((64, 64), (256,) * 4)
    for each in lengths:
        rows, used = sum(each), min(adapters, len(each))
        columns = features // 2 if op.endswith("_slice") else features
        moved = rows * (features + rank) + used * rank * columns
        yield BenchCase(
            f"{len(each)}x{each[0]}-rank{rank}x{features}",
            lambda dtype, each=each: (
                *_operands(dtype, op, sum(each), adapters, rank, features),
                *_selection(op, [i % adapters for i in range(len(each))], list(each)),
                *_rest(op, features),
            ),
            lambda dtype, moved=moved: moved * dtype.itemsize,
            flops=2 * rows * rank * columns,
        )


# --- checks -----------------------------------------------------------------------------------------------------------


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
    """Return the adapter of each row from the adapters of the sequences; -1 for rows without."""
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


def check_lora(a: Arguments) -> None:
    """Check a call of any of the six ops."""
    check_tensor(a.op, "weights", a.weights)
    fits = a.weights.dim() == 3 or (a.weights.dim() == 4 and a.weights.shape[1] == 1)
    text = "have shape [adapters, outputs, inputs] or [adapters, 1, outputs, inputs]"
    a.require(fits, "weights", text, list(a.weights.shape))
    check_kind(a.op, "input", a.input, a.weights, "weights", or_float32=True)
    outputs, inputs = a.weights.shape[-2:]
    shape = list(a.input.shape)
    fits = len(shape) == 2 and shape[1] == inputs
    a.require(fits, "input", f"have shape [rows, {inputs}]", shape)
    check_kind(a.op, "out", a.out, a.weights, "weights", or_float32=True)
    rows, shape = shape[0], list(a.out.shape)
    a.require(len(shape) == 2 and shape[0] == rows, "out", f"have shape [{rows}, outputs]", shape)
    check_writable(a.op, "out", a.out)
    _check_integers(a, "indices")
    if a.op.startswith("sgmv"):
        for name in ("seq_lens", "seq_starts"):
            if getattr(a, name) is not None:
                _check_integers(a, name)
                check_shape(a.op, name, getattr(a, name), list(a.indices.shape))
    else:
        check_shape(a.op, "indices", a.indices, [rows])
    columns = shape[1]
    if a.op.endswith("_shrink"):
        a.require(
            columns >= outputs, "out", f"have at least the {outputs} columns of weights", shape
        )
    elif a.op.endswith("_slice"):
        within = f"be in [0, {outputs}], the rows of each matrix of weights"
        a.require(0 <= a.slice_size <= outputs, "slice_size", within)
        most = columns - a.slice_size
        within = f"be in [0, {most}] for {a.slice_size} of {columns} columns"
        a.require(0 <= a.slice_offset <= most, "slice_offset", within)


def _check_integers(a: Arguments, name: str) -> None:
    value = getattr(a, name)
    check_device(a.op, name, value, a.weights, "weights")
    known = value.dtype in (torch.int32, torch.int64)
    a.require(known, name, "have dtype int32 or int64", dtype_name(value.dtype))
    a.require(value.dim() == 1, name, "be 1-D", list(value.shape))


# --- the ops ----------------------------------------------------------------------------------------------------------


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


_OPS: dict[str, tuple[Callable[..., None], str]] = {
    "bgmv_shrink": (_bgmv_shrink, "First factor of an adapter per row"),
    "bgmv_expand": (_bgmv_expand, "Second factor of an adapter per row"),
    "bgmv_expand_slice": (
        _bgmv_expand_slice,
        "Second factor of an adapter per row, into some columns",
    ),
    "sgmv_shrink": (_sgmv_shrink, "First factor of an adapter per sequence"),
    "sgmv_expand": (_sgmv_expand, "Second factor of an adapter per sequence"),
    "sgmv_expand_slice": (
        _sgmv_expand_slice,
        "Second factor of an adapter per sequence, into some columns",
    ),
}

for _name, (_reference, _summary) in _OPS.items():
    register_op(
        name=_name,
        mutates=("out",),
        reference=_reference,
        check=check_lora,
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

# SPDX-License-Identifier: Apache-2.0
"""Backward and optimizer step of many embedding bags in one call."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from ipex_core.library.checks import (
    acc,
    check_contiguous,
    check_device,
    check_dtype_in,
    check_kind,
    check_shape,
    dtype_name,
)
from ipex_core.library.kernels import register_op
from ipex_core.library.spec import Arguments, BenchCase, Sample, check
from ipex_core.ops.merged_embeddingbag import (
    Shape,
    bag_bench,
    bag_count,
    bags_of,
    check_bags,
    check_table_list,
    check_values,
    indices_for,
    large_tables,
)

_SGD, _ADAGRAD = "merged_embeddingbag_sgd", "merged_embeddingbag_adagrad"


def _wide(weight: Tensor, trail: Tensor) -> Tensor:
    """Return the float32 numbers whose upper halves are ``weight`` and whose lower halves are ``trail``, if any."""
    if trail.numel() == 0:
        return acc(weight)
    top = weight.view(torch.int16).int() << 16
    return (top | (trail.view(torch.int16).int() & 0xFFFF)).view(torch.float32)


def _store(rows: Tensor, values: Tensor, weight: Tensor, trail: Tensor) -> None:
    """Write ``values`` to rows of a table; split in halves if there is a trail."""
    if trail.numel() == 0:
        weight[rows] = values.to(weight.dtype)
        return
    bits = values.view(torch.int32)
    weight[rows] = (bits >> 16).to(torch.int16).view(torch.bfloat16)
    trail[rows] = bits.to(torch.int16).view(torch.bfloat16)


def _gradients(
    weights: Sequence[Tensor],
    grads: Sequence[Tensor],
    indices: Sequence[Tensor],
    offsets: Sequence[Tensor],
    per_sample_weights: Sequence[Tensor],
    pooling_mode: str,
    include_last_offset: bool,
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the rows of each table that were looked up and their gradients."""
    dtype = acc(weights[0]).dtype
    bags = bags_of(indices, offsets, per_sample_weights, pooling_mode, include_last_offset, dtype)
    for grad, table in zip(grads, bags, strict=True):
        rows, place = torch.unique(table.rows, return_inverse=True)
        terms = acc(grad)[table.bag] * table.scale[:, None]
        sums = torch.zeros(rows.shape[0], grad.shape[1], dtype=dtype, device=grad.device)
        yield rows, sums.index_add_(0, place, terms)


def _sgd(
    grads: Sequence[Tensor],
    weights: Sequence[Tensor],
    trails: Sequence[Tensor],
    indices: Sequence[Tensor],
    offsets: Sequence[Tensor],
    per_sample_weights: Sequence[Tensor],
    pooling_mode: str,
    include_last_offset: bool,
    lr: float,
    weight_decay: float,
) -> None:
    """Take a step of SGD on the rows that were looked up: ``w -= lr * (g + weight_decay * w)``.

    ``g`` is the sum over all lookups of the row. Rows that were not looked up stay as they are.

    Args:
        grads: T gradients ``[B, D]`` of the results of `merged_embeddingbag_forward`, in the dtype of the tables.
        weights: T contiguous tables ``[rows, D]``, which are written to: float32, bfloat16 or float16.
        trails: For each table the lower 16 bits of its float32 numbers, of whose upper 16 bits it consists: bfloat16,
            contiguous, of the shape of the table. Written to; empty for a table that is not split.
        indices: As in the forward call.
        offsets: As in the forward call.
        per_sample_weights: As in the forward call.
        pooling_mode: As in the forward call.
        include_last_offset: As in the forward call.
        lr: Learning rate.
        weight_decay: Factor of the L2 penalty, of the rows that were looked up.

    Raises:
        RuntimeError: An argument does not fit, an index is not in its table, or offsets decrease.
    """
    check_values(_SGD, weights, indices, offsets)
    _check_memory(_SGD, weights, trails)
    found = _gradients(
        weights, grads, indices, offsets, per_sample_weights, pooling_mode, include_last_offset
    )
    for weight, trail, (rows, grad) in zip(weights, trails, found, strict=True):
        old = _wide(weight, trail)[rows]
        if weight_decay:
            grad = grad + weight_decay * old
        _store(rows, old - lr * grad, weight, trail)


def _adagrad(
    grads: Sequence[Tensor],
    weights: Sequence[Tensor],
    trails: Sequence[Tensor],
    hessians: Sequence[Tensor],
    indices: Sequence[Tensor],
    offsets: Sequence[Tensor],
    per_sample_weights: Sequence[Tensor],
    pooling_mode: str,
    include_last_offset: bool,
    lr: float,
    eps: float,
) -> None:
    """Take a step of Adagrad on the rows that were looked up: ``h += g * g; w -= lr * g / (sqrt(h) + eps)``.

    ``g`` is the sum over all lookups of the row. Rows that were not looked up stay as they are.

    Args:
        grads: T gradients ``[B, D]`` of the results of `merged_embeddingbag_forward`, in the dtype of the tables.
        weights: T contiguous tables ``[rows, D]``, which are written to: float32, bfloat16 or float16.
        trails: As in `merged_embeddingbag_sgd`.
        hessians: T sums of squares, float32, contiguous, of the shapes of the tables; written to.
        indices: As in the forward call.
        offsets: As in the forward call.
        per_sample_weights: As in the forward call.
        pooling_mode: As in the forward call.
        include_last_offset: As in the forward call.
        lr: Learning rate.
        eps: Added to the root.

    Raises:
        RuntimeError: An argument does not fit, an index is not in its table, or offsets decrease.
    """
    check_values(_ADAGRAD, weights, indices, offsets)
    _check_memory(_ADAGRAD, weights, trails, hessians)
    found = _gradients(
        weights, grads, indices, offsets, per_sample_weights, pooling_mode, include_last_offset
    )
    for weight, trail, hessian, (rows, grad) in zip(weights, trails, hessians, found, strict=True):
        squares = hessian[rows] + grad * grad
        hessian[rows] = squares
        old = _wide(weight, trail)[rows]
        _store(rows, old - lr * (grad / (squares.sqrt() + eps)), weight, trail)


def _check_memory(op: str, *lists: Sequence[Tensor]) -> None:
    """Check that no two tensors that are written to share memory."""
    places = sorted(
        (value.data_ptr(), value.data_ptr() + value.nbytes)
        for values in lists
        for value in values
        if value.numel()
    )
    for (_, end), (begin, _) in itertools.pairwise(places):
        check(end <= begin, op, "weights", "not share memory", "overlapping tensors")


def _check_table(op: str, name: str, value: Tensor, weight: Tensor, dtype: torch.dtype) -> None:
    check_device(op, name, value, weight, "weights[0]")
    check_dtype_in(op, name, value, dtype)
    shape = list(weight.shape)
    check_shape(op, name, value, shape)
    check_contiguous(op, name, value)


def _check_update(a: Arguments) -> None:
    check_bags(a)
    first = a.weights[0]
    tables = len(a.weights)
    shape = [bag_count(a.offsets, a.include_last_offset), first.shape[1]]
    check_table_list(a.op, "grads", a.grads, tables)
    for i, grad in enumerate(a.grads):
        check_kind(a.op, f"grads[{i}]", grad, first, "weights[0]")
        check_shape(a.op, f"grads[{i}]", grad, shape)
    check_table_list(a.op, "trails", a.trails, tables)
    for i, (weight, trail) in enumerate(zip(a.weights, a.trails, strict=True)):
        _check_table(a.op, f"weights[{i}]", weight, weight, first.dtype)
        if trail.numel() == 0:
            continue
        split = first.dtype == torch.bfloat16
        got = dtype_name(first.dtype)
        a.require(split, f"trails[{i}]", f"be empty for tables of {got}", list(trail.shape))
        _check_table(a.op, f"trails[{i}]", trail, weight, torch.bfloat16)


def _check_adagrad(a: Arguments) -> None:
    _check_update(a)
    check_table_list(a.op, "hessians", a.hessians, len(a.weights))
    for i, (weight, hessian) in enumerate(zip(a.weights, a.hessians, strict=True)):
        _check_table(a.op, f"hessians[{i}]", hessian, weight, torch.float32)


def _exact(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return multiples of 1/8: their sums do not depend on the order, so split tables are compared bit by bit."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.randint(-16, 17, shape, generator=generator) / 8).to(dtype)


def _split(tables: list[Tensor], seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    bits = [torch.randint(-(2**15), 2**15, t.shape, generator=generator) for t in tables]
    return [b.to(torch.int16).view(torch.bfloat16) for b in bits]


def _updates(dtype: torch.dtype) -> Iterator[tuple[str, tuple[Any, ...]]]:
    """Yield ``(id, (grads, weights, trails, indices, offsets, factors, pooling_mode, include_last_offset))``."""
    none = torch.empty(0, dtype=torch.bfloat16)
    for rows, bags, most, dim in (
        ((1,), 1, 1, 1),
        ((5, 1, 9), 4, 3, 7),
        ((30, 17), 6, 5, 16),
        ((50, 3, 8, 5000), 33, 1, 64),
        ((40, 200), 9, 30, 130),
        ((60,) * 26, 20, 2, 32),
        ((3000, 2), 1000, 2, 16),
    ):
        tables = [_exact(n, dim, seed=n + dim + i, dtype=dtype) for i, n in enumerate(rows)]
        grads = [_exact(bags, dim, seed=7 * i, dtype=dtype) for i in range(len(rows))]
        lookups = indices_for(rows, bags, most, seed=dim)
        trails = [none] * len(rows)
        name = f"{len(rows)}x{bags}x{dim}"
        yield f"{name}-sum", (grads, tables, trails, *lookups, [], "sum", False)
        if most == 1 or bags == 4:  # the mean of three is not exact
            yield f"{name}-mean", (grads, tables, trails, *lookups, [], "mean", False)
        if dtype == torch.bfloat16:
            trails = _split(tables, seed=dim)
            yield f"{name}-split", (grads, tables, trails, *lookups, [], "sum", False)
    rows, bags, dim = (50, 3, 8), 12, 24
    tables = [_exact(n, dim, seed=n, dtype=dtype) for n in rows]
    trails = [none] * 3
    narrow = indices_for(rows, bags, 4, dtype=torch.int32, include_last_offset=True, seed=1)
    grads = [_exact(bags, 2 * dim, seed=i, dtype=dtype)[:, dim // 2 : -(dim // 2)] for i in rows]
    yield "int32-last_offset", (grads, tables, trails, *narrow, [], "sum", True)
    indices, offsets = indices_for(rows, bags, 4, seed=2)
    factors = [_exact(i.shape[0], seed=90, dtype=dtype) for i in indices]
    yield "factors", (grads, tables, trails, indices, offsets, factors, "sum", False)
    grads = [_exact(1, dim, seed=i, dtype=dtype).expand(bags, dim) for i in rows]
    yield "grads_expanded", (grads, tables, trails, indices, offsets, [], "sum", False)
    empty = [i[:0] for i in indices], [torch.zeros_like(o) for o in offsets]
    yield "no_indices", (grads, tables, trails, *empty, [], "sum", False)
    special = [g.clone() for g in grads]
    special[0][2, 3], special[1][4, 5] = float("nan"), float("inf")
    yield "special_values", (special, tables, trails, indices, offsets, [], "sum", False)


def _samples_sgd(dtype: torch.dtype) -> Iterator[Sample]:
    for i, (name, args) in enumerate(_updates(dtype)):
        yield Sample((*args, 0.25, 0.5 if i % 2 else 0.0), id=name)


def _samples_adagrad(dtype: torch.dtype) -> Iterator[Sample]:
    for name, (grads, tables, trails, *rest) in _updates(dtype):
        # Roots of other numbers may differ in the last bit, which a comparison of halves would see.
        factor = 0.0 if "split" in name else 1.0
        squares = [_exact(*t.shape, seed=3).abs() * factor for t in tables]
        yield Sample((grads, tables, trails, squares, *rest, 0.25, 1e-10), id=name)


def _bench_for(adagrad: bool) -> Iterator[BenchCase]:
    def make(shape: Shape, dtype: torch.dtype) -> tuple[Any, ...]:
        count, rows, bags, most, dim = shape
        tables = large_tables(count, rows, dim, dtype)
        grads = [torch.empty(bags, dim, dtype=dtype).uniform_(-1, 1) for _ in range(count)]
        trails = [torch.empty(0, dtype=torch.bfloat16)] * count
        more = [[torch.zeros(rows, dim) for _ in range(count)]] if adagrad else []
        lookups = indices_for([rows] * count, bags, most)
        rest: tuple[Any, ...] = ([], "sum", False, 0.01, 1e-10 if adagrad else 0.0)
        return (grads, tables, trails, *more, *lookups, *rest)

    def moved(lookups: float, shape: Shape, dtype: torch.dtype) -> float:
        count, _, bags, _, dim = shape
        row = dim * (2 * dtype.itemsize + (8 if adagrad else 0))
        return lookups * (row + 8) + count * bags * dim * dtype.itemsize

    return bag_bench(make, moved, "26x128x128")


def _stock_step(step: Callable[[], Any], backward: Callable[[], None]) -> None:
    # Sparse gradients of inference mode cannot be added up.
    with torch.inference_mode(False), torch.no_grad():
        backward()
        step()


def _stock_args(
    optimizer: Callable[[list[Tensor], float], torch.optim.Optimizer], args: Sequence[Any]
) -> tuple[Callable[[], Any], Callable[[], None]]:
    """Return the step of the stock optimizer and what makes the sparse gradients it works on."""
    grads, weights, indices, offsets = args[0], args[1], args[-7], args[-6]
    leaves: list[Tensor] = [torch.nn.Parameter(w.clone()) for w in weights]
    step = optimizer(leaves, args[-2])
    with torch.no_grad():
        made = [
            torch.ops.aten._embedding_bag(w, i, o, False, 0, True)
            for w, i, o in zip(leaves, indices, offsets, strict=True)
        ]

    def backward() -> None:
        for leaf, grad, index, offset, found in zip(
            leaves, grads, indices, offsets, made, strict=True
        ):
            bag, size, most = found[1:4]
            if bag.numel() == 0:  # left out by the forward pass where nothing needs it
                counts = torch.cat([offset, offset.new_tensor([index.shape[0]])]).diff()
                bag = torch.repeat_interleave(torch.arange(offset.shape[0]), counts)
            leaf.grad = torch.ops.aten._embedding_bag_backward(
                grad, index, offset, bag, size, most, leaf.shape[0], False, 0, True, None
            )

    def run() -> None:
        with torch.sparse.check_sparse_tensor_invariants(False):
            step.step()

    return run, backward


def _sgd_stock_args(*args: Any) -> tuple[Any, ...]:
    return _stock_args(lambda leaves, lr: torch.optim.SGD(leaves, lr=lr), args)


def _adagrad_stock_args(*args: Any) -> tuple[Any, ...]:
    return _stock_args(lambda leaves, lr: torch.optim.Adagrad(leaves, lr=lr), args)


register_op(
    name=_SGD,
    mutates=("weights", "trails"),
    reference=_sgd,
    check=_check_update,
    samples=_samples_sgd,
    stock=_stock_step,
    stock_args=_sgd_stock_args,
    backward=None,
    lift=False,
    bench=lambda: _bench_for(False),
    summary="Backward and SGD step of many embedding bags",
)

register_op(
    name=_ADAGRAD,
    mutates=("weights", "trails", "hessians"),
    reference=_adagrad,
    check=_check_adagrad,
    samples=_samples_adagrad,
    stock=_stock_step,
    stock_args=_adagrad_stock_args,
    backward=None,
    lift=False,
    bench=lambda: _bench_for(True),
    summary="Backward and Adagrad step of many embedding bags",
)

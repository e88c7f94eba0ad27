# SPDX-License-Identifier: Apache-2.0
"""Indexing on kernels of the device, against the host, and what wrong indices raise."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from kernel_checks import FLOATS, TELLS_AT_ONCE, check, raises, rand

import ipex_xpu_kernels

pytestmark = pytest.mark.usefixtures("needs_device", "always")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64], ids=str)
def test_indexing(dtype: torch.dtype) -> None:
    x = (rand(6, 4, 5) * 9).to(dtype)
    y = x.flip(0)
    i, j = torch.tensor([5, 0, 3, 3]), torch.tensor([[-1], [2]])
    k = i % 4
    for table in (x, x.transpose(0, 2).contiguous().transpose(0, 2)):
        check(lambda x, i: x.index_select(0, i), table, i)
        check(lambda x, i: x.index_select(1, i), table, k.int())
        check(lambda x, i: x[i], table, i)
        check(lambda x, i, j: x[i, :, j], table, i, j)
        check(lambda x, i, j: x[:, i, j], table, k, j)
        check(lambda x, i, k, j: x[i, k, j], table, i, k, j)
    at = torch.tensor([[[0, 3, 1], [2, 2, 0]]])
    for dim in range(3):
        check(lambda x, i, d=dim: x.gather(d, i), x, at)
        check(lambda x, i, y, d=dim: x.scatter_add(d, i, y), x, at, y)
        check(lambda x, i, d=dim: x.index_add(d, i, x.index_select(d, i)), x, at[0, 0])
    unique = torch.tensor([3, 0, 1])
    check(lambda x, i, y: x.scatter(0, i.view(3, 1, 1).expand(3, 2, 2), y), x, unique, y)
    check(lambda x, i: x.scatter(1, i.view(1, 3, 1), 7), x, unique)
    check(lambda x, i, y: x.index_put_((i,), y[:3]), x, unique, y)
    check(lambda x, i, j: x.index_put_((i, j), x[0, 0, 0].clone()), x, unique, unique)
    check(lambda x, i, y: x.index_put_((i,), y[:4], accumulate=True), x, i, y)
    check(lambda x, i, k, j, y: x.index_put_((i, k, j), y[0, 0, 1], True), x, i, k, j, y)


def test_embedding() -> None:
    ids = torch.tensor([[1, 5, 1], [0, 5, 5]])
    for dtype in FLOATS:
        table, grad = rand(7, 33, dtype=dtype), rand(2, 3, 33, dtype=dtype)
        check(F.embedding, ids, table)
        for padding in (-1, 5):
            check(
                lambda g, i, p=padding: torch.ops.aten.embedding_dense_backward(g, i, 7, p, False),
                grad,
                ids,
                atol=2e-2 if dtype != torch.float32 else 0,
            )


CALLS: dict[str, Callable[..., Any]] = {
    "index": lambda x, i: x[i],
    "index_select": lambda x, i: x.index_select(0, i),
    "embedding": lambda x, i: F.embedding(i, x),
    "gather": lambda x, i: x.gather(0, i.view(2, 1)),
    "scatter": lambda x, i: x.scatter_(0, i.view(2, 1), 1.0),
    "scatter_add": lambda x, i: x.scatter_add_(0, i.view(2, 1), x[:2, :1] + 1),
    "index_put_": lambda x, i: x.index_put_((i,), x[0] + 1),
    "index_add": lambda x, i: x.index_add_(0, i, x[:2] + 1),
}


@pytest.mark.parametrize("op", CALLS)
@pytest.mark.parametrize("mode", ["silent", "error"])
def test_an_index_out_of_bounds_is_named(op: str, mode: str) -> None:
    x = torch.zeros(4, 3, device="xpu")
    ipex_xpu_kernels.set_fallback_mode(mode)
    for bad in ([0, 4], [-5, 0]):
        index = torch.tensor(bad, device="xpu")
        wrong = next(i for i in bad if i != 0)
        text = rf"{op}: index {wrong} is out of bounds for dimension 0 with size 4"
        with raises(IndexError, match=text):
            CALLS[op](x, index)
    if TELLS_AT_ONCE:
        assert x.eq(0).all()


def test_the_dimension_of_a_wrong_index_is_named() -> None:
    x = torch.zeros(4, 0, 5, device="xpu")
    i = torch.tensor([1, 3], device="xpu")
    text = "index: index 5 is out of bounds for dimension 2 with size 5"
    with raises(IndexError, match=text):
        torch.zeros(4, 3, 5, device="xpu")[i, :, i + 2]
    with raises(IndexError, match="index_put_: index 7 is out of bounds for dimension 1"):
        torch.zeros(4, 6, device="xpu")[i, i + 4] = 1
    ipex_xpu_kernels.set_fallback_mode("error")
    assert x[:, :, i[:0]].shape == (4, 0, 0)
    assert torch.ones(3, 2, device="xpu")[i[:0]].shape == (0, 2)


def test_a_device_that_the_host_cannot_read_tells_later() -> None:
    native = ipex_xpu_kernels._device.native()
    x, i = torch.zeros(4, 3, device="xpu"), torch.tensor([0, 9], device="xpu")
    native.set_zero_copy(False)
    try:
        x.index_select(0, i)
        with pytest.raises(IndexError, match=r"index_select: index 9 .*that was started before"):
            x.gather(0, i.view(2, 1) % 2)
        assert x.gather(0, i.view(2, 1) % 2).tolist() == [[0.0], [0.0]]
    finally:
        native.set_zero_copy(True)


def test_positions_without_a_row_are_named() -> None:
    q, table = torch.zeros(2, 1, 4, device="xpu"), torch.zeros(5, 4, device="xpu")
    positions = torch.tensor([1, 5], device="xpu")
    for op in ("rotary_embedding", "rotary_embedding_functional"):
        text = rf"{op}: position_ids must hold rows in \[0, 5\), got 5"
        for mode in ("silent", "error"):
            ipex_xpu_kernels.set_fallback_mode(mode)
            with raises(RuntimeError, match=text):
                getattr(torch.ops.ipex, op)(q, q.clone(), table, table, 4, True, positions)

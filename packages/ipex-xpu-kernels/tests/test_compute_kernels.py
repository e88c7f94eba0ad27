# SPDX-License-Identifier: Apache-2.0
"""Products of matrices, attention, convolutions and cells on kernels of the device, against the host."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.nn import functional
from torch.utils import _pytree as pytree

import ipex_xpu_kernels as xpu
from ipex_core.library.kernels import specs
from ipex_xpu_kernels._settings import XPUComputeEng, compute_eng

pytestmark = pytest.mark.usefixtures("needs_device", "kernels_always")

Tensor = torch.Tensor
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}
ON_HOST = ("mm", "addmm", "bmm", "baddbmm", "addmv", "convolution", "_softmax", "thnn", "pool")


@pytest.fixture
def kernels_always() -> Iterator[None]:
    xpu.set_kernel_mode("always")
    with compute_eng(XPUComputeEng.BASIC):  # without oneDNN
        yield
    xpu.set_kernel_mode("auto")


def on_device(value: Any) -> Any:
    def move(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        moved = leaf.detach().to("xpu")
        if moved.dim() > 1 and leaf.stride() != moved.stride():
            moved = torch.empty_strided(
                leaf.size(), leaf.stride(), dtype=leaf.dtype, device="xpu"
            ).copy_(moved)
        return moved.requires_grad_(leaf.requires_grad)

    return pytree.tree_map(move, value)


def same(function: Callable[..., Any], *args: Any, scale: float = 1.0) -> None:
    """Compare values and gradients; no kernel may have given its work to the host."""
    xpu.reset_fallback_stats()
    results = []
    for values in (args, on_device(args)):
        out = function(*values)
        leaves = [t for t in pytree.tree_leaves(values) if isinstance(t, Tensor)]
        wanted = [t for t in leaves if t.requires_grad]
        outputs = [t for t in pytree.tree_leaves(out) if isinstance(t, Tensor)]
        if wanted:
            torch.manual_seed(1)
            sums = [(t * torch.randn(t.shape).to(t)).sum() for t in outputs]
            outputs += torch.autograd.grad(sums, wanted)
        results.append([t.detach().cpu() for t in outputs])
    used = [name for name in xpu.fallback_stats() if any(part in name for part in ON_HOST)]
    assert used == []
    tolerance = TOLERANCE[results[0][0].dtype] * scale
    for actual, expected in zip(results[1], results[0], strict=True):
        torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance, equal_nan=True)


def randn(*shape: int, dtype: torch.dtype, grad: bool = False) -> Tensor:
    return torch.randn(*shape).to(dtype).requires_grad_(grad)


@pytest.mark.parametrize("dtype", DTYPES)
def test_products(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    shapes = (
        (1, 1, 1),
        (3, 5, 7),
        (65, 130, 67),
        (130, 140, 129),
        (128, 0, 5),
        (0, 4, 3),
        (200, 33, 1),
    )
    for m, k, n in shapes:
        a, b, c = (randn(*s, dtype=dtype) for s in ((m, k), (k, n), (n,)))
        for left, right in itertools.product((a, a.t().contiguous().t()), (b, b.t().clone().t())):
            same(torch.mm, left, right, scale=10)
        same(lambda c, a, b: torch.addmm(c, a, b, beta=0.5, alpha=2), c, a, b, scale=20)
        same(torch.mv, a, torch.randn(k).to(dtype), scale=10)
    a, b = randn(5, 33, 40, dtype=dtype), randn(5, 40, 31, dtype=dtype)
    same(lambda a, b: a[::2] @ b[::2], a, b, scale=10)
    same(lambda a, b: torch.einsum("bij,bjk->ik", a, b), a, b, scale=40)
    same(torch.baddbmm, randn(33, 31, dtype=dtype), a, b, scale=10)
    weight, bias = randn(9, 40, dtype=dtype, grad=True), randn(9, dtype=dtype, grad=True)
    same(functional.linear, a.requires_grad_(), weight, bias, scale=40)


def test_products_in_parts() -> None:
    # One operand, or those of a batch, take more memory than is packed at a time.
    same(torch.mm, torch.randn(50, 70000), torch.randn(70000, 40), scale=1000)
    a, b = torch.randn(5, 20, 50000), torch.randn(50000, 9)
    same(lambda a, b: torch.bmm(a, b.expand(5, -1, -1)), a, b, scale=1000)


def test_products_of_special_values() -> None:
    a = torch.randn(3, 4)
    a[1, 2], a[2, 0] = float("nan"), float("inf")
    same(torch.mm, a, torch.rand(4, 5))
    hole = torch.full((3, 5), float("nan"))  # which beta = 0 leaves out
    same(lambda c, a, b: torch.addmm(c, a, b, beta=0), hole, torch.rand(3, 4), torch.rand(4, 5))
    with pytest.raises(RuntimeError, match="cannot be multiplied"):
        torch.mm(torch.ones(2, 2, device="xpu"), torch.ones(3, 2, device="xpu"))


@pytest.mark.parametrize("dtype", DTYPES)
def test_attention(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    attend = functional.scaled_dot_product_attention
    for b, heads, kv, q, k, size in (
        (1, 1, 1, 1, 1, 8),
        (2, 4, 2, 17, 33, 64),
        (1, 3, 3, 40, 9, 20),
    ):
        query, key, value = (
            randn(b, h, rows, size, dtype=dtype) for h, rows in ((heads, q), (kv, k), (kv, k))
        )
        masks = (None, torch.rand(q, k) > 0.3, randn(b, 1, q, k, dtype=dtype))
        for mask, causal in (*((mask, False) for mask in masks), (None, True)):

            def run(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
                return attend(query, key, value, mask, is_causal=causal, enable_gqa=True)  # noqa: B023

            same(run, query, key, value, mask, scale=4)
    rows = randn(2, 5, 3, 16, dtype=dtype).transpose(1, 2)
    same(attend, rows, rows, rows, scale=4)
    special = rows.clone()
    special[0, 0, 4, 3], special[1, 2, 1, 2] = float("inf"), float("nan")
    same(attend, rows, rows, special, scale=4)


@pytest.mark.parametrize("dtype", DTYPES[1:])
@pytest.mark.parametrize(
    "name",
    [
        "attention",
        "decode_attention",
        "flash_attn_varlen_func",
        "single_query_cached_kv_attention",
        "varlen_attention",
        "woq_linear",
    ],
)
def test_ipex_ops(name: str, dtype: torch.dtype) -> None:
    rtol, atol = specs()[name].tolerance[dtype]
    op = getattr(torch.ops.ipex, name)
    for sample in itertools.islice(specs()[name].samples(dtype), 6):
        own = pytree.tree_map(
            lambda v: v.clone() if isinstance(v, Tensor) else v, (sample.args, sample.kwargs)
        )
        there = on_device((sample.args, sample.kwargs))
        for actual, expected in zip(
            *(
                [t for t in pytree.tree_leaves((op(*a, **k), a)) if isinstance(t, Tensor)]
                for a, k in (there, own)
            ),
            strict=True,
        ):
            torch.testing.assert_close(
                actual.cpu(), expected, rtol=2 * rtol, atol=2 * atol, equal_nan=True
            )


@pytest.mark.parametrize("dtype", DTYPES)
def test_convolutions(dtype: torch.dtype) -> None:
    torch.manual_seed(0)

    def conv(x: Tensor, weight: Tensor, bias: Tensor | None, options: dict[str, Any]) -> Tensor:
        transposed = options.get("transposed", False)
        name = f"conv{'_transpose' if transposed else ''}{x.dim() - 2}d"
        rest = {key: value for key, value in options.items() if key != "transposed"}
        return getattr(functional, name)(x, weight, bias, **rest)

    cases: list[tuple[tuple[int, ...], tuple[int, ...], dict[str, Any]]] = [
        ((2, 3, 11), (4, 3, 3), {"stride": 2, "padding": 1}),
        ((2, 4, 9, 7), (6, 2, 3, 2), {"groups": 2, "dilation": 2, "padding": (2, 1)}),
        ((1, 6, 8, 8), (6, 1, 3, 3), {"groups": 6, "padding": 1}),
        ((2, 3, 9, 7), (6, 1, 3, 2), {"groups": 3, "stride": (2, 1), "padding": (0, 1)}),
        ((2, 6, 19), (9, 2, 4), {"groups": 3, "dilation": 2, "padding": 3}),
        ((1, 2, 4, 5, 6), (2, 1, 2, 3, 3), {"groups": 2, "stride": 2, "padding": 1}),
        ((1, 10, 7, 7), (10, 5, 3, 3), {"groups": 2, "padding": 1}),
        ((1, 2, 4, 5, 6), (3, 2, 2, 3, 1), {"stride": (1, 2, 1)}),
        ((2, 4, 5, 6), (4, 3, 3, 3), {"transposed": True, "stride": 2, "output_padding": 1}),
        (
            (1, 4, 7),
            (4, 2, 3),
            {"transposed": True, "groups": 2, "dilation": 3, "output_padding": 2},
        ),
        ((2, 4, 5, 6), (4, 1, 3, 3), {"transposed": True, "groups": 4, "stride": 2}),
    ]
    for shape, weight_shape, options in cases:
        outputs = weight_shape[0]
        if options.get("transposed"):
            outputs = weight_shape[1] * options.get("groups", 1)
        x, weight, bias = (
            randn(*s, dtype=dtype, grad=True) for s in (shape, weight_shape, (outputs,))
        )
        same(conv, x, weight, bias, options, scale=30)
    x = randn(2, 3, 6, 6, dtype=dtype).to(memory_format=torch.channels_last)
    weight = randn(4, 3, 3, 3, dtype=dtype)
    same(functional.conv2d, x, weight, scale=10)
    x.requires_grad_()
    same(lambda x, w: functional.conv2d(x, w, groups=3, padding=1), x, weight[:3, :1], scale=30)
    assert functional.conv2d(*on_device((x, weight))).is_contiguous(
        memory_format=torch.channels_last
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("channels_last", [False, True])
def test_pooling(dtype: torch.dtype, channels_last: bool) -> None:
    torch.manual_seed(0)
    x = randn(2, 3, 11, 9, dtype=dtype)
    x[0, 1, 4, 4], x[1, 0, 0, 0] = float("nan"), float("-inf")
    if channels_last:
        x = x.to(memory_format=torch.channels_last)
    rounds: tuple[dict[str, Any], ...] = (
        {"kernel_size": 3},
        {"kernel_size": (3, 2), "stride": (2, 1), "padding": (1, 0)},
        {"kernel_size": 3, "stride": 2, "padding": 1, "ceil_mode": True},
    )
    for options in rounds:
        for image in (x, x[0], x[:, :, 1:, ::2]):
            for dilation in (1, 2):
                same(
                    lambda x: functional.max_pool2d(
                        x,
                        dilation=dilation,  # noqa: B023
                        return_indices=True,
                        **options,  # noqa: B023
                    ),
                    image,
                )
            for more in ({}, {"count_include_pad": False}, {"divisor_override": 5}):
                same(lambda x: functional.avg_pool2d(x, **options, **more), image)  # noqa: B023
        y = x.nan_to_num(0, 0, 0).requires_grad_()
        same(lambda x: functional.max_pool2d(x, **options), y, scale=3)  # noqa: B023
        same(lambda x: functional.avg_pool2d(x, **options), y, scale=3)  # noqa: B023
    for sizes in ((3, 4), (11, 1), (13, 5)):
        same(lambda x: functional.adaptive_avg_pool2d(x, sizes), y, scale=4)  # noqa: B023
        adaptive = functools.partial(functional.adaptive_max_pool2d, output_size=sizes)
        for image in (x, x[0], x[:, :, 1:, ::2]):
            same(functools.partial(adaptive, return_indices=True), image)
        same(adaptive, y, scale=4)
    same(lambda x: functional.adaptive_max_pool1d(x, 4), y[0], scale=4)
    with pytest.raises(RuntimeError, match="pool"):
        functional.adaptive_max_pool2d(y.to("xpu")[0, 0], 2)
    with pytest.raises(RuntimeError, match="pad should be at most half"):
        functional.max_pool2d(y.to("xpu"), 2, padding=2)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("cell", [torch.nn.LSTM, torch.nn.GRU])
def test_recurrent_cells(cell: type[torch.nn.Module], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    for bias in (True, False):
        model = cell(5, 7, num_layers=2, bias=bias).to(dtype)
        names = [name for name, _ in model.named_parameters()]

        def run(x: Tensor, *parameters: Tensor) -> Any:
            values = dict(zip(names, parameters, strict=True))  # noqa: B023
            return torch.func.functional_call(model, values, (x,))  # noqa: B023

        parameters = [p.detach().requires_grad_() for p in model.parameters()]
        same(run, randn(6, 3, 5, dtype=dtype, grad=True), *parameters, scale=20)

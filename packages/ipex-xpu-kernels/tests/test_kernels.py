# SPDX-License-Identifier: Apache-2.0
"""Ops that have kernels: that these run, and agree with the host for layouts, dtypes and numbers of all kinds."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from kernel_checks import FLOATS, check, on, on_cpu_device, raises, rand, since_torch_2_13

import ipex_core  # noqa: F401  (defines torch.ops.ipex)
import ipex_xpu_kernels

pytestmark = pytest.mark.usefixtures("needs_device", "always")
# Norms, softmax, rotary embedding


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_softmax_and_norms(dtype: torch.dtype) -> None:
    for shape in ((3, 5), (2, 3, 100), (5, 1), (4, 1000), (1, 4097)):
        x, grad = rand(*shape, dtype=dtype), rand(*shape, dtype=dtype)
        for dim in range(x.dim()):
            for forward, backward in (
                (torch.softmax, torch._softmax_backward_data),
                (torch.log_softmax, torch._log_softmax_backward_data),
            ):
                check(functools.partial(forward, dim=dim), x)
                y = forward(x, dim)
                check(
                    lambda g, y, f=backward, d=dim: f(g, y, d, y.dtype),
                    grad,
                    y,
                    atol=1e-2 if dtype != torch.float32 else 0,
                )
        columns = shape[-1]
        for weight_dtype in {dtype, torch.float32}:
            w, b = rand(columns, dtype=weight_dtype), rand(columns, 1, dtype=weight_dtype)[:, 0]
            check(torch.ops.ipex.rms_norm, x, w)
            check(torch.ops.ipex.rms_norm, x, None, 1e-5, 1.0)
            check(torch.ops.ipex.add_rms_norm, x, grad, w)
            check(torch.ops.ipex.add_rms_norm_, x, grad, w, 1e-6, 1.0)
            check(torch.ops.ipex.layer_norm, x, w, b)
            check(torch.ops.ipex.add_layer_norm, x, grad, w, None)
            check(torch.ops.ipex.add_layer_norm_, x, grad, None, b)
    x = rand(6, 8, dtype=dtype).t()
    check(lambda x: F.layer_norm(x, (8, 6)), x)
    x = torch.tensor(
        [[1.0, float("nan"), 2.0], [-float("inf"), 0.0, 1.0], [-float("inf")] * 3], dtype=dtype
    )
    check(functools.partial(torch.softmax, dim=-1), x)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_gradients_of_layer_norm_are_those_in_float64(dtype: torch.dtype) -> None:
    x, grad = rand(70, 33, dtype=dtype), rand(70, 33, dtype=dtype)
    w, b = rand(33, dtype=dtype), rand(33, dtype=dtype)
    results = []
    for device, to in (("cpu", torch.float64), ("xpu", dtype)):
        leaves = [t.to(device, to).requires_grad_() for t in (x, w, b)]
        F.layer_norm(leaves[0], (33,), leaves[1], leaves[2]).backward(grad.to(device, to))
        results.append([t.grad.cpu().double() for t in leaves])  # type: ignore[union-attr]
    for exact, actual in zip(*results, strict=True):
        error = (actual - exact).norm() / exact.norm()
        assert error < {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}[dtype]


@pytest.mark.parametrize("half_split", [True, False])
def test_rotary_embedding(half_split: bool) -> None:
    sin, cos = rand(9, 16), rand(9, 16) + 1
    fused = rand(2, 5, 6, 40)
    q, k = fused[:, :, :4], fused[:, :, 4:]
    ids = torch.tensor([[3, 0, 8, 8, 1], [8, 7, 2, 0, 5]])
    for positions in (None, ids, ids[1].int()):
        for columns in (8, 16):
            args = (q, k, sin[:, :columns], cos[:, :columns], 16, half_split, positions)
            check(torch.ops.ipex.rotary_embedding_functional, *args)
            check(torch.ops.ipex.rotary_embedding, *args)
    with raises(RuntimeError, match=r"rotary_embedding: position_ids must"):
        torch.ops.ipex.rotary_embedding(*on("xpu", (q, k, sin, cos, 16, half_split, ids + 1)))


# Elementwise


@pytest.mark.parametrize("dtype", [*FLOATS, torch.int64, torch.int32], ids=str)
def test_arithmetic_of_all_layouts(dtype: torch.dtype) -> None:
    a = (rand(3, 1, 5, 7) * 5).to(dtype)
    pairs = [
        (a, (rand(7) * 5).to(dtype)),
        (a, (rand(3, 4, 1, 1) * 5).to(dtype)),
        (a.transpose(1, 3), (rand(7, 5, 1) * 5).to(dtype)),
        (a[..., ::2], a[..., 1:5]),
        (a[0, 0, 0, 0], a),
        (a[:0], a[:0]),
    ]
    for left, right in pairs:
        for op in (
            torch.add,
            torch.sub,
            torch.mul,
            torch.maximum,
            torch.minimum,
            torch.eq,
            torch.lt,
            torch.ge,
        ):
            check(op, left, right)
    for op in (torch.add, torch.mul, torch.sub, torch.gt, torch.ne, torch.le):
        check(lambda x, f=op: f(x, 3), a.transpose(1, 2))


def test_copies_between_all_dtypes() -> None:
    dtypes = (*FLOATS, torch.int64, torch.int32, torch.bool)
    for source in dtypes:
        x = (rand(4, 6).abs() * 3).to(source).t()
        for target in (*dtypes, torch.uint8):
            if source == torch.bool and target == torch.uint8:
                continue
            check(lambda x, t=target: x.to(t), x)
            check(
                lambda x, t=target: x.to(t, memory_format=torch.contiguous_format).contiguous(), x
            )


def test_moving_and_filling() -> None:
    nan = torch.tensor([1.0, float("nan"), -1.0])
    check(torch.maximum, nan, nan.flip(0))
    for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.int32):
        x, y = (rand(4, 5, 6) * 2).to(dtype), (rand(6) * 2).to(dtype)
        mask = rand(4, 1, 6) > 0
        check(torch.where, mask, x, y)
        check(lambda m, x: torch.where(m, x, 1), mask, x)
        check(lambda x, m: x.masked_fill_(m, 1), x, mask)
        check(lambda x: x[:, ::2].fill_(1), x)
        check(lambda x: x[:, ::2].zero_(), x)
        check(lambda x: x.tril(1), x)
        check(lambda x: x.triu(-2), x.transpose(0, 1))
        check(lambda a, b: torch.cat([a, b, a[:, :1]], 1), x, x.flip(1))
    check(torch.logical_and, mask, ~mask)
    check(torch.logical_not, rand(3) > 0)
    # On the device: the host has no device to read off the arguments.
    ipex_xpu_kernels.set_fallback_mode("error")
    assert torch.arange(3, -4, -2, device="xpu").tolist() == [3, 1, -1, -3]
    assert torch.arange(0, 1, 0.25, device="xpu").tolist() == [0, 0.25, 0.5, 0.75]
    with pytest.raises(NotImplementedError):
        torch.arange(3, device="xpu", dtype=torch.float64)


# Reductions


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_reductions(dtype: torch.dtype) -> None:
    exact = dtype == torch.float32
    for x in (
        rand(3, 4, 5, dtype=dtype),
        rand(5, 300, dtype=dtype).t(),
        rand(1, dtype=dtype)[0],
        rand(20000, 2, dtype=dtype),
        rand(9000, dtype=dtype),
    ):
        dims: list[Any] = [None, *range(x.dim())]
        if x.dim() == 3:
            dims += [(0, 2), (0, 1), (1, 2), (-1, 0)]
        tolerance = {"rtol": 1e-4 if exact else 2e-2, "atol": 1e-3 if exact else 1e-1}
        for dim in dims:
            for keepdim in (False, True):
                if dim is None and keepdim:
                    continue
                args = {} if dim is None else {"dim": dim, "keepdim": keepdim}
                for op in (torch.sum, torch.mean):
                    check(
                        functools.partial(op, **args),
                        x,
                        **(tolerance if x.numel() < 20000 or exact else {"rtol": 3e-2, "atol": 1}),
                    )
                for op in (torch.amax, torch.amin):
                    check(functools.partial(op, **args), x)
                if not isinstance(dim, tuple):
                    check(functools.partial(torch.aminmax, **args), x)
                if x.numel() > 2 and (dim is None or isinstance(dim, tuple) or x.shape[dim] > 1):
                    check(functools.partial(torch.linalg.vector_norm, **args), x, **tolerance)
                    for op in (torch.var, torch.std):
                        check(functools.partial(op, **args), x, **tolerance)
                if not isinstance(dim, tuple):
                    check(functools.partial(torch.argmax, **args), x)
                    if dim is not None:
                        check(functools.partial(torch.max, **args), x)
                        check(functools.partial(torch.min, **args), x)
        for dim in range(x.dim()):
            if x.numel() < 20000:
                check(
                    functools.partial(torch.cumsum, dim=dim),
                    x,
                    rtol=1e-3 if exact else 3e-2,
                    atol=1e-3 if exact else 1,
                )


@pytest.mark.parametrize("dtype", [*FLOATS, torch.int64], ids=str)
def test_topk(dtype: torch.dtype) -> None:
    x = (rand(4, 3, 700) * 9).to(dtype)  # with equal numbers, of which any may come first
    if dtype.is_floating_point:
        x[0, 0, :5] = torch.tensor([1.0, float("nan"), -float("inf"), float("inf"), -0.0])
        x[1, 2] = float("nan")
    for values in (x, x.transpose(0, 2), x[..., ::3], x[0, 0, :1]):
        for dim in range(values.dim()):
            for k in {1, min(5, values.shape[dim]), min(300, values.shape[dim])}:
                for largest in (True, False):
                    check(lambda x, k=k, d=dim, b=largest: x.topk(k, d, b).values, values)
                    found = on("xpu", values).topk(k, dim, largest)
                    places = found.indices.movedim(dim, -1).sort(-1).values.cpu()
                    assert (places.diff(dim=-1) > 0).all()
                    torch.testing.assert_close(
                        on("xpu", values).gather(dim, found.indices).cpu(),
                        found.values.cpu(),
                        rtol=0,
                        atol=0,
                        equal_nan=True,
                    )
    extremes = torch.tensor([0, -(2**63), 2**63 - 1, -1, 1])
    check(lambda x: x.topk(5), extremes)
    check(lambda x: x.topk(2, largest=False), extremes)
    with pytest.raises(RuntimeError, match="selected index k out of range"):
        x.to("xpu").topk(701)


@since_torch_2_13  # gradients of aminmax
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_gradients_of_selections(dtype: torch.dtype) -> None:
    for function in (lambda x: x.topk(3, 0).values, lambda x: torch.stack(x.aminmax(dim=1))):
        results = []
        for device in ("cpu", "xpu"):
            x = (torch.randperm(60, generator=torch.Generator().manual_seed(0)) / 8).view(6, 10)
            x = x.to(device, dtype).requires_grad_()
            y = function(x)
            weights = torch.arange(1.0, y.numel() + 1).view(y.shape).to(y)
            results.append(torch.autograd.grad(y, x, weights)[0].cpu())
        assert torch.equal(*results) and results[0].any()


def test_numbers_that_a_dtype_cannot_hold() -> None:
    for dtype, value in (
        (torch.float16, 2**40),
        (torch.float8_e4m3fn, 1e30),
        (torch.uint8, 300),
        (torch.float16, 1 + 2j),
    ):
        with pytest.raises(RuntimeError, match="without overflow") as host:
            torch.full((3,), value, dtype=dtype)
        with pytest.raises(RuntimeError, match="without overflow") as device:
            torch.full((3,), value, dtype=dtype, device="xpu")
        assert str(device.value) == str(host.value)
    assert torch.full((3,), -1, dtype=torch.uint8, device="xpu").tolist() == [255] * 3


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.uint8], ids=str)
def test_counts_of_whole_numbers(dtype: torch.dtype) -> None:
    x = torch.tensor([0, 1, 1, 3, 5], dtype=dtype, device="xpu")
    counts = torch.histc(x, bins=4, min=0, max=3)
    assert counts.dtype == dtype and counts.tolist() == [1, 2, 0, 1]
    out = torch.empty(0, dtype=dtype, device="xpu")
    assert torch.histc(x, 6, out=out) is out and out.tolist() == [1, 2, 0, 1, 0, 1]
    with pytest.raises(RuntimeError, match="histc: out must be"):
        torch.histc(x, 4, out=torch.empty(0, device="xpu"))


def test_reductions_of_whole_numbers_and_nan() -> None:
    n = torch.arange(-30, 30).view(3, 4, 5)
    for x in (n, n.int(), n % 3 == 0):
        for dim in (None, 0, 1, 2):
            args = {} if dim is None else {"dim": dim}
            check(functools.partial(torch.sum, **args), x)
            check(functools.partial(torch.any, **args), x)
            check(functools.partial(torch.all, **args), x)
    check(functools.partial(torch.amax, dim=(0, 2)), n)
    check(functools.partial(torch.cumsum, dim=1), n)
    nan = torch.tensor([[1.0, float("nan"), 2.0, float("nan")], [-float("inf"), 1.0, 1.0, 0.0]])
    for op in (torch.amax, torch.amin, torch.sum, torch.argmax, torch.argmin):
        check(functools.partial(op, dim=1), nan)
        check(functools.partial(op, dim=0), nan)
    check(functools.partial(torch.max, dim=1), nan)
    x = torch.randn(1 << 20, device="xpu")
    assert len({x.sum().item() for _ in range(3)}) == 1


# Optimizers


@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.optim.Adam(p, 0.1, weight_decay=0.1, amsgrad=True, fused=True),
        lambda p: torch.optim.AdamW(p, 0.1, maximize=True, fused=True),
        lambda p: torch.optim.SGD(
            p, 0.1, momentum=0.9, nesterov=True, weight_decay=0.1, fused=True
        ),
    ],
    ids=["adam", "adamw", "sgd"],
)
def test_fused_optimizers(make: Callable[..., torch.optim.Optimizer]) -> None:
    results = []
    for device in ("cpu", "xpu"):
        params = [rand(5, 3).to(device).requires_grad_(), rand(7).to(device).requires_grad_()]
        optimizer = make(params)
        for step in range(3):
            for p in params:
                p.grad = p.detach() * 0.5 + step
            if device == "xpu" and step:
                ipex_xpu_kernels.set_fallback_mode("error")
            torch.nn.utils.clip_grad_norm_(params, 1.0) if step == 0 else None
            optimizer.step()
            ipex_xpu_kernels.set_fallback_mode("silent")
        results.append([p.detach().cpu() for p in params])
    torch.testing.assert_close(results[1], results[0], rtol=1e-5, atol=1e-6)


def test_moving_average() -> None:
    from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

    results = []
    for device in ("cpu", "xpu"):
        torch.manual_seed(0)
        model = torch.nn.Linear(300, 70).to(device)
        average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
        for step in range(3):
            with torch.no_grad():
                model.weight.mul_(0.5).add_(step)
            if device == "xpu" and step:  # the first one copies
                ipex_xpu_kernels.set_fallback_mode("error")
            average.update_parameters(model)
            ipex_xpu_kernels.set_fallback_mode("silent")
        results.append(average.module.weight.detach().cpu())
    torch.testing.assert_close(results[1], results[0])


def test_steps_of_ipex() -> None:
    w, m, v, g = rand(4, 5), rand(4, 5) * 0.1, rand(4, 5).square(), rand(5, 4).t().contiguous()
    numbers = (0.9, 0.999, 1e-2, 1e-2, 1e-8)
    check(torch.ops.ipex.adam_fused_step, w, m, v, v + 1, g, None, True, 3.0, *numbers, True, False)
    check(torch.ops.ipex.sgd_fused_step, w, g, m, None, 0.9, 0.1, 0.1, 0.0, True, False, False)
    check(torch.ops.ipex.lamb_fused_step, w, m, v, g, None, 3, *numbers)


def test_gated_activations() -> None:
    for dtype in FLOATS:
        x = rand(3, 4, 10, dtype=dtype)
        check(torch.ops.ipex.silu_and_mul, x)
        check(torch.ops.ipex.silu_mul, x, x.flip(0))
        for approximate in ("none", "tanh"):
            check(torch.ops.ipex.gelu_and_mul, x, approximate)
            check(torch.ops.ipex.gelu_mul, x, x.flip(0), approximate)


@on_cpu_device
def test_small_tensors_stay_with_the_host() -> None:
    ipex_xpu_kernels.set_kernel_mode("auto")
    for elements, expected in ((100, {"aten::_softmax.out": 1}), (1 << 15, {})):
        x = torch.ones(elements, device="xpu")
        ipex_xpu_kernels.reset_fallback_stats()
        x.softmax(0)
        assert ipex_xpu_kernels.fallback_stats() == expected

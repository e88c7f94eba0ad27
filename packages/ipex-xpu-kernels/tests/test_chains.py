# SPDX-License-Identifier: Apache-2.0
"""Element-wise chains of compiled graphs as kernels of their own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from kernel_checks import FLOATS, TOLERANCE, rand

import ipex_core  # noqa: F401  (the back end)
from ipex_xpu_kernels import _chains

pytestmark = pytest.mark.usefixtures("needs_device")


def every_op(x: torch.Tensor, y: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    z = F.gelu(x * 0.5 + bias) + F.silu(y) - F.gelu(y, approximate="tanh")
    z = torch.sigmoid(z) * torch.tanh(x) / (1 + y.abs()) + torch.relu(x - 2 * y)
    return 1 - torch.exp(-z.square()) + torch.rsqrt(z * z + 1).sqrt() + torch.add(x, y, alpha=3)


def two_results(x: torch.Tensor, y: torch.Tensor, bias: torch.Tensor) -> Any:
    shared = (x + y) * 2
    return shared.exp().neg(), (shared * bias).sin(), shared.sum(-1)


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    torch._dynamo.reset()
    return torch.compile(function, backend="ipex", fullgraph=True)


@pytest.fixture
def count(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that gets the number of nodes of each chain that is made."""
    lengths: list[int] = []
    find = _chains._chains

    def counted(graph: torch.fx.Graph) -> list[list[torch.fx.Node]]:
        found = find(graph)
        lengths.extend(map(len, found))
        return found

    monkeypatch.setattr(_chains, "_chains", counted)
    return lengths


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_a_chain_is_one_kernel(dtype: torch.dtype, count: list[int]) -> None:
    inputs = [
        rand(64, 96, dtype=dtype),
        rand(64, 96, dtype=dtype).flip(0) / 2,
        rand(96, dtype=dtype),
    ]
    with torch.no_grad():
        actual = compiled(every_op)(*(t.to("xpu") for t in inputs))
    assert len(count) == 1 and count[0] > 20
    assert actual.dtype == dtype
    expected = every_op(*(t.double() for t in inputs))
    rtol, atol = TOLERANCE[dtype]
    torch.testing.assert_close(actual.cpu(), expected.to(dtype), rtol=rtol, atol=atol)


def test_values_that_others_use_are_written(count: list[int]) -> None:
    inputs = [rand(2, 40, 60), rand(2, 40, 60), rand(40, 60)]
    with torch.no_grad():
        actual = compiled(two_results)(*(t.to("xpu") for t in inputs))
    assert count == [2, 2, 2]  # the shared sum; exp and neg; mul and sin
    for a, b in zip(actual, two_results(*inputs), strict=True):
        torch.testing.assert_close(a.cpu(), b)


def test_gradients(count: list[int]) -> None:
    x, y, bias = rand(50, 90), rand(50, 90).flip(0), rand(50, 90) / 2
    results = []
    for device, function in (("cpu", every_op), ("xpu", compiled(every_op))):
        leaves = [t.detach().to(device, copy=True).requires_grad_() for t in (x, y, bias)]
        function(*leaves).sum().backward()
        results.append([t.grad.cpu() for t in leaves])
    assert count
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(b, a, rtol=1e-4, atol=1e-4)


def test_what_is_left_as_it_is(count: list[int]) -> None:
    small, strided = rand(5, 5).to("xpu"), rand(80, 80).to("xpu").t()
    whole = torch.arange(6400, device="xpu").view(80, 80)
    with torch.no_grad():
        for x in (small, strided, whole):
            torch.testing.assert_close(compiled(lambda t: (t + 1) * 2)(x).cpu(), (x.cpu() + 1) * 2)
        options = {"ipex.disable": ("elementwise",)}
        function = torch.compile(lambda t: (t + 1) * 2, backend="ipex", options=options)
        function(rand(80, 80).to("xpu"))
    assert count == []


def test_a_source_that_does_not_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_chains, "_kernels", {})
    ops = dict(_chains._OPS)
    ops[torch.ops.aten.exp.default] = ({}, lambda a: f"no_such_function({a})")
    monkeypatch.setattr(_chains, "_OPS", ops)
    x = rand(70, 70)
    with torch.no_grad():
        actual = compiled(lambda t: (t * 2).exp())(x.to("xpu"))
    torch.testing.assert_close(actual.cpu(), (x * 2).exp())

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
import ipex_xpu_kernels as xpu
from ipex_core import compiler

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
def notes(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list that gets what the passes of the device tell."""
    found: list[str] = []
    passes = list(compiler.xpu_passes)
    assert passes

    def noted(graph: torch.fx.GraphModule) -> list[str]:
        new = [note for one in passes for note in one(graph)]
        found.extend(new)
        return new

    monkeypatch.setattr(compiler, "xpu_passes", [noted])
    return found


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_a_chain_is_one_kernel(dtype: torch.dtype, notes: list[str]) -> None:
    inputs = [
        rand(64, 96, dtype=dtype),
        rand(64, 96, dtype=dtype).flip(0) / 2,
        rand(96, dtype=dtype),
    ]
    with torch.no_grad():
        actual = compiled(every_op)(*(t.to("xpu") for t in inputs))
    assert len(notes) == 1
    chains, nodes = (int(word) for word in notes[0].split() if word.isdigit())
    assert chains == 1 and nodes > 20
    assert actual.dtype == dtype
    expected = every_op(*(t.double() for t in inputs))
    rtol, atol = TOLERANCE[dtype]
    torch.testing.assert_close(actual.cpu(), expected.to(dtype), rtol=rtol, atol=atol)


def test_values_that_others_use_are_written(notes: list[str]) -> None:
    inputs = [rand(2, 40, 60), rand(2, 40, 60), rand(40, 60)]
    with torch.no_grad():
        actual = compiled(two_results)(*(t.to("xpu") for t in inputs))
    # The shared sum and its product; exp and neg; mul and sin.
    assert notes == ["3 chains of 6 element-wise ops as SYCL kernels"]
    for a, b in zip(actual, two_results(*inputs), strict=True):
        torch.testing.assert_close(a.cpu(), b)


def test_gradients(notes: list[str]) -> None:
    x, y, bias = rand(50, 90), rand(50, 90).flip(0), rand(50, 90) / 2
    results = []
    for device, function in (("cpu", every_op), ("xpu", compiled(every_op))):
        leaves = [t.detach().to(device, copy=True).requires_grad_() for t in (x, y, bias)]
        function(*leaves).sum().backward()
        results.append([t.grad.cpu() for t in leaves])
    assert len(notes) == 2  # forward and backward
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(b, a, rtol=1e-4, atol=1e-4)


def test_what_is_left_as_it_is(notes: list[str]) -> None:
    small, strided = rand(5, 5).to("xpu"), rand(80, 80).to("xpu").t()
    whole = torch.arange(6400, device="xpu").view(80, 80)
    with torch.no_grad():
        for x in (small, strided, whole):
            torch.testing.assert_close(compiled(lambda t: (t + 1) * 2)(x).cpu(), (x.cpu() + 1) * 2)
        options = {"ipex.disable": ("elementwise",)}
        function = torch.compile(lambda t: (t + 1) * 2, backend="ipex", options=options)
        function(rand(80, 80).to("xpu"))
    assert notes == []


def test_a_source_that_does_not_compile(notes: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def load_inline(*arguments: object) -> None:
        raise xpu.SyclCompileError("load_inline: chains does not compile:\n'type_traits' not found")

    monkeypatch.setattr("ipex_xpu_kernels._inline.load_inline", load_inline)
    x = rand(70, 70)
    with torch.no_grad():
        actual = compiled(lambda t: (t * 2).sin().cos())(x.to("xpu"))
    torch.testing.assert_close(actual.cpu(), (x * 2).sin().cos())
    assert notes == ["element-wise chains were not compiled: 'type_traits' not found"]

# SPDX-License-Identifier: Apache-2.0
"""Linear layers on quantized weights as torch and torchao spell them, under torch.compile(backend="ipex")."""

from __future__ import annotations

import pytest
import torch
from compile_checks import DTYPES, fired, fuse, randn, reasons
from torch import nn

import ipex_core

K, N = 64, 48


def codes():
    return torch.randint(-128, 128, (N, K), dtype=torch.int8)


def scales(dtype, *shape):
    return (torch.rand(*shape) * 0.01 + 0.001).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_int8_product(dtype):
    x = randn(5, K, dtype=dtype)
    report, gm = fuse(
        torch.ops.aten._weight_int8pack_mm, x, codes(), scales(dtype, N), constants=(1, 2)
    )
    assert fired(report) == {"woq": 1}
    assert any(n.target is torch.ops.ipex.woq_linear.default for n in gm.graph.nodes)


@pytest.mark.parametrize("group", [32, 64])
@pytest.mark.parametrize("dtype", DTYPES)
def test_int4_product(dtype, group):
    k = 320  # more rows than are read at once
    packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(
        torch.randint(0, 16, (N, k), dtype=torch.int32), 1
    )
    both = torch.stack([scales(dtype, k // group, N), randn(k // group, N, dtype=dtype)], -1)
    both[1, :3, 0] = 0  # groups of equal numbers
    both[2, 0] = 0

    def function(x, packed, both):
        return torch.ops.aten._weight_int4pack_mm_for_cpu(x, packed, group, both)

    inputs = (randn(5, k, dtype=dtype), packed, both)
    report, _ = fuse(function, *inputs, constants=(1, 2))
    assert fired(report) == {"woq": 1}
    report, _ = fuse(function, *inputs, constants=(1,))
    assert not fired(report) and "not frozen" in reasons(report)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_torchao_int8(dtype, bias):
    """The product and then the scales, as ``Int8Tensor`` does; the rest moves into the op."""

    def function(x, q, s, *bias):
        y = torch.mm(x.reshape(-1, K), q.t().to(x.dtype)) * s.to(x.dtype).flatten()
        y = y.reshape(*x.shape[:-1], N)
        return torch.relu(y + bias[0] if bias else y)

    given = [randn(N, dtype=dtype)] if bias else []
    inputs = (randn(2, 3, K, dtype=dtype), codes(), scales(dtype, N, 1), *given)
    report, _ = fuse(function, *inputs, constants=range(1, len(inputs)))
    assert fired(report) == {"woq": 1, "post_op": 1 + bias}


@pytest.mark.parametrize("shape", [(N, 1), (N, K // 16, 1)])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_dequantized_weight(dtype, bias, shape):
    def function(x, q, s, *bias):
        wide = q.view(N, -1, 16) if s.dim() == 3 else q
        weight = (wide.to(s.dtype) * s).reshape(N, K).to(x.dtype)
        return nn.functional.linear(x, weight, *bias)

    given = [randn(N, dtype=dtype)] if bias else []
    for kind in {dtype, torch.float32}:
        inputs = (randn(2, 3, K, dtype=dtype), codes(), scales(kind, *shape), *given)
        report, _ = fuse(function, *inputs, constants=range(1, len(inputs)))
        assert fired(report) == {"woq": 1}


def test_products_that_are_not():
    x, q, s = randn(5, K), codes(), scales(torch.float32, N)

    def wrong_side(x, q, s):
        return x @ (q.float() * s[:, None].expand(N, K).flip(1)).t()

    def columns(x, q, s):
        return x @ (q.float() * torch.cat((s, s))[:K]).t()

    def used(x, q, s):
        y = x @ q.t().float()
        return y * s, y

    def rows(x, q, s):
        return (x @ q.t().float()) * s[:5, None]

    def unsigned(x, q, s):
        return x @ (q.to(torch.uint8).float() * s[:, None]).t()

    def rounded(x, q, s):
        return x @ (q.float() * s[:, None]).int().float().t()

    for function in (wrong_side, columns, used, rows, unsigned, rounded):
        report, _ = fuse(function, x, q, s, constants=(1, 2))
        assert not report.count("woq"), function
    square = torch.randint(-128, 128, (K, K), dtype=torch.int8)
    report, _ = fuse(
        lambda x, q, s: (x @ q.float()) * s, x, square, scales(torch.float32, K), constants=(1, 2)
    )
    assert not report.count("woq")
    report, _ = fuse(lambda x, q, s: (x @ q.t().float()) * s, x, q, s, constants=(1,))
    assert not report.count("woq") and "not frozen" in reasons(report)
    report, _ = fuse(
        torch.ops.aten._weight_int8pack_mm, x, q, s, constants=(1, 2), disabled=["woq"]
    )
    assert not fired(report)
    report, _ = fuse(
        torch.ops.aten._weight_int8pack_mm,
        *(x, q, s),
        constants=(1, 2),
        kernels=lambda op: op != "woq_linear",
    )
    assert "no kernel package" in reasons(report)


class Int8Linear(nn.Module):
    def __init__(self, n, k):
        super().__init__()
        self.register_buffer("codes", torch.randint(-128, 128, (n, k), dtype=torch.int8))
        self.register_buffer("scales", torch.rand(n, 1) * 0.01)

    def forward(self, x):
        return nn.functional.linear(x, self.codes.to(x.dtype) * self.scales.to(x.dtype))


def test_compiled(monkeypatch, tmp_path):
    """With code generation: the weights are packed once, as constants."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr("ipex_core.kernels.policy.has_kernel", lambda op: True)
    model = nn.Sequential(Int8Linear(48, 64), nn.ReLU(), Int8Linear(32, 48)).eval()
    compiled = torch.compile(model, backend="ipex", fullgraph=True)
    x = torch.randn(5, 64)
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), model(x), rtol=1e-4, atol=1e-4)
    (report,) = ipex_core.explain(compiled).graphs
    assert fired(report) == {"woq": 2, "post_op": 1}

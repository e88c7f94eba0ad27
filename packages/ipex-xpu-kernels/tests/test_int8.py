# SPDX-License-Identifier: Apache-2.0
"""INT8 on the device: products of codes on the kernel, and models that were quantized on the host."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_ipex_kernels import FLOATS, moved, raises_as_on_the_host, run
from torch import nn

from ipex_core.library.kernels import specs
from ipex_core.ops.int8_linear import int8_randn

pytestmark = pytest.mark.usefixtures("always")


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_linear_layers_on_codes(dtype: torch.dtype) -> None:
    spec = specs()["int8_linear"]
    for sample in spec.samples(dtype):
        x, _, _, _, scale, *_ = (*sample.args, None)
        if x.is_floating_point() and scale is None:  # the range of activations: partly on the host
            found = [_run(sample, d) for d in ("cpu", "xpu")]
        else:
            found = [run("int8_linear", sample, d)[0] for d in ("cpu", "xpu")]
        expected, actual = found
        rtol, atol = spec.tolerance[expected.dtype]
        assert actual.dtype == expected.dtype and actual.is_contiguous()
        torch.testing.assert_close(
            actual.cpu().float(), expected.float(), rtol=rtol, atol=atol, equal_nan=True
        )


def _run(sample: Any, device: str) -> torch.Tensor:
    args, kwargs = moved((sample.args, sample.kwargs), device)  # type: ignore[misc]
    return torch.ops.ipex.int8_linear(*args, **kwargs)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_codes(dtype: torch.dtype) -> None:
    spec = specs()["quantize_per_tensor"]
    samples = [s for s in spec.samples(dtype) if len(s.args) > 1 and s.args[1] is not None]
    assert len(samples) >= 3
    for sample in samples:
        expected, actual = (run("quantize_per_tensor", sample, d)[:3] for d in ("cpu", "xpu"))
        for one, wanted in zip(actual, expected, strict=True):
            assert one.dtype == wanted.dtype and torch.equal(one.cpu(), wanted), sample.id


def test_sums_are_exact() -> None:
    """Of codes whose sum a float cannot hold."""
    x = torch.full((9, 65536), 255, dtype=torch.uint8)
    x[3, 5], x[8] = 254, 0
    weight = torch.full((33, 65536), 127, dtype=torch.int8)
    weight[7] = -128
    packed, scale = torch.ops.ipex.pack_int8_weight(weight), torch.full((1,), 2.0**-10)
    zero = torch.tensor([3], dtype=torch.int32)
    arguments = (x, packed, 33, scale, scale, zero)
    actual = torch.ops.ipex.int8_linear(
        *(a.to("xpu") if isinstance(a, torch.Tensor) else a for a in arguments)
    )
    exact = (x.long() - 3) @ weight.long().T
    torch.testing.assert_close(actual.cpu(), exact.double().mul(2.0**-20).float(), rtol=0, atol=0)


def test_codes_that_do_not_fit() -> None:
    packed = torch.ops.ipex.pack_int8_weight(int8_randn(8, 12))
    scale, x = torch.ones(8), int8_randn(3, 12).view(torch.uint8)
    raises_as_on_the_host("int8_linear", x, packed, 9, torch.ones(9), torch.ones(1))
    raises_as_on_the_host("int8_linear", x[:, :8], packed, 8, scale, torch.ones(1))
    raises_as_on_the_host("int8_linear", x, packed, 8, scale)
    wrong = torch.tensor([300], dtype=torch.int32)
    raises_as_on_the_host("int8_linear", x, packed, 8, scale, torch.ones(1), wrong)
    raises_as_on_the_host("int8_linear", x.float(), packed, 8, scale, torch.zeros(1))


class Network(nn.Module):
    """Convolutions with a sum, pooling, a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 16, 3, padding=1)
        self.second = nn.Conv2d(16, 16, 3, padding=1, groups=4)
        self.pool = nn.MaxPool2d(2)
        self.third = nn.Conv2d(16, 8, 1, stride=2)
        self.last = nn.Linear(8 * 4 * 4, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.first(x))
        x = torch.relu(x + self.second(x))
        x = torch.relu(self.third(self.pool(x)))
        return self.last(x.flatten(1))


class Sequence(nn.Module):
    """A convolution of sequences, and a product of two activations."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(4, 8, 3)
        self.query, self.key = nn.Linear(8, 16), nn.Linear(8, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.conv(x).transpose(1, 2)
        return torch.matmul(self.query(y), self.key(y).transpose(1, 2))


@torch.no_grad()
@pytest.mark.parametrize(
    ("network", "shape"), [(Network, (2, 3, 16, 16)), (Sequence, (3, 4, 20))], ids=["2-D", "1-D"]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_models_that_were_quantized(network: Any, shape: tuple[int, ...], dtype: Any) -> None:
    quant = pytest.importorskip("ipex_quant")
    torch.manual_seed(0)
    model, x = network().eval(), torch.randn(*shape)
    prepared = quant.prepare(model, quant.default_static_qconfig_mapping, example_inputs=(x,))
    for _ in range(3):
        prepared(torch.randn(*shape))
    converted = quant.convert(prepared).to(dtype)
    expected = converted(x.to(dtype))
    moved = converted.to("xpu")
    actual = moved(x.to("xpu", dtype))
    assert actual.dtype == expected.dtype
    exact = model(x)
    error, off = (expected.float() - exact).norm(), (actual.cpu().float() - expected.float()).norm()
    assert off < 0.3 * error, (float(off), float(error))

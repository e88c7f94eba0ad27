# SPDX-License-Identifier: Apache-2.0
"""What optimized convolutions and linear layers say about wrong arguments: what the stock layer says."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from ipex_core import optimize
from ipex_core.optimization.passes import prepack

KINDS = {f"Conv{transposed}{dims}d": dims for transposed in ("", "Transpose") for dims in (1, 2, 3)}


def text_of(model, x):
    with pytest.raises(RuntimeError) as caught, torch.no_grad():
        model(x)
    return str(caught.value)


def check(stock, x, dtype, sample):
    model = nn.Sequential(stock).eval()
    wanted = text_of(copy.deepcopy(model).to(dtype), x.to(dtype))
    optimized = optimize(model, dtype=dtype, sample_input=sample)
    assert text_of(optimized, x.to(dtype)) == wanted
    return optimized[0]


@pytest.fixture(params=[False, True], ids=["plain", "packed"])
def packed(request, monkeypatch):
    always = prepack.LinearChoice("mkldnn", "always")
    monkeypatch.setattr(prepack, "measure_conv", lambda *_: always)
    return request.param


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_convolutions(kind, dtype, packed):
    if dtype == torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        pytest.skip("oneDNN has no bfloat16 on this CPU")
    dims = KINDS[kind]
    good = torch.randn(2, 16, *[5] * dims)
    for wrong in ({"padding": -1}, {"stride": 0}, {"dilation": 0}):
        check(getattr(nn, kind)(16, 8, 3, **wrong), good, dtype, None)
    sizes = [[2, 16, *[5] * (dims - 1)], [2, 5, *[5] * dims], [5] * (dims + 3)]
    if "Transpose" not in kind:
        sizes += [[2, 16, *[1] * dims], [2, 16, *[0] * dims]]
    for size in sizes:
        layer = getattr(nn, kind)(16, 8, 3)
        found = check(layer, torch.randn(size), dtype, good if packed else None)
        if packed and kind in ("Conv2d", "Conv3d"):
            assert getattr(found, "_packed", None) is not None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [16, 512])
def test_linear(size, dtype, packed):
    for shape in ([3], [2, 5], [2, 3, 5], [0, 5]):
        found = check(
            nn.Linear(size, size),
            torch.randn(shape),
            dtype,
            torch.randn(2, size) if packed else None,
        )
        assert size == 16 or getattr(found, "_packed", None) is not None

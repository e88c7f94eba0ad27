# SPDX-License-Identifier: Apache-2.0
"""Quantized models under torch.compile(backend="ipex"): the results of eager execution in each context, one graph."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

import ipex_core
from ipex_quant import (
    WoqLowpMode,
    WoqWeightDtype,
    convert,
    default_dynamic_qconfig_mapping,
    default_static_qconfig_mapping,
    prepare,
    quantize_linears,
    woq_qconfig,
)

Tensor = torch.Tensor
pytestmark = [
    pytest.mark.usefixtures("no_code_generation"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning"),
]


class Net(nn.Module):
    """A block of a transformer; ``x [batch, length, 64]``."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.gate, self.down = nn.Linear(64, 96), nn.Linear(64, 96), nn.Linear(96, 64)
        self.norm = nn.LayerNorm(64)

    def forward(self, x: Tensor) -> Tensor:
        y = nn.functional.silu(self.gate(x)) * self.up(x)
        return self.norm(x + self.down(y))  # type: ignore[no-any-return]


def given(length: int = 5) -> Tensor:
    return torch.randn(2, length, 64, generator=torch.Generator().manual_seed(length))


def weight_only(dtype: WoqWeightDtype, lowp: WoqLowpMode = WoqLowpMode.NONE) -> nn.Module:
    model = Net().eval()
    quantize_linears(model, woq_qconfig(weight_dtype=dtype, group_size=32, lowp_mode=lowp))
    return model


def integers(mapping: Any) -> nn.Module:
    with torch.no_grad():
        prepared = prepare(Net().eval(), mapping, given())
        prepared(given())
        return convert(prepared)


MODELS = {
    "int8 weights": lambda: weight_only(WoqWeightDtype.INT8),
    "int4 weights": lambda: weight_only(WoqWeightDtype.INT4, WoqLowpMode.INT8),
    "nf4 weights": lambda: weight_only(WoqWeightDtype.NF4, WoqLowpMode.BF16),
    "static": lambda: integers(default_static_qconfig_mapping),
    "dynamic": lambda: integers(default_dynamic_qconfig_mapping),
}

CONTEXTS = ("inference_mode", "autocast", "grad")


@contextlib.contextmanager
def entered(context: str) -> Any:
    with contextlib.ExitStack() as stack:
        if "inference_mode" in context:
            stack.enter_context(torch.inference_mode())
        elif context != "grad":
            stack.enter_context(torch.no_grad())
        if "autocast" in context:
            stack.enter_context(torch.autocast("cpu", torch.bfloat16))
        yield


def close(found: Tensor, expected: Tensor) -> None:
    assert found.dtype == expected.dtype
    # A sum in another order may move an activation to the next code.
    torch.testing.assert_close(found, expected, rtol=0, atol=0.05)


@pytest.mark.parametrize("context", CONTEXTS)
@pytest.mark.parametrize("name", MODELS)
def test_contexts(name: str, context: str) -> None:
    model = MODELS[name]()
    compiled = torch.compile(model, backend="ipex", fullgraph=True, options={"ipex.always": True})
    with entered(context):
        for _ in range(2):
            close(compiled(given()), model(given()))
    (graph,) = ipex_core.explain(compiled).graphs
    assert graph.inference == graph.frozen


@pytest.mark.parametrize("name", ["int4 weights", "static", "dynamic"])
def test_lengths(name: str) -> None:
    model = MODELS[name]()
    counter = CompileCounterWithBackend("ipex")
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    with entered("inference_mode autocast"):
        for length in range(1, 21):
            close(compiled(given(length)), model(given(length)))
    assert counter.frame_count <= 2

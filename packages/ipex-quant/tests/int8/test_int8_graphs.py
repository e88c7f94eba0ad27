# SPDX-License-Identifier: Apache-2.0
"""INT8 models in compiled, traced and frozen graphs: equal outputs, on integers all the way."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch._inductor.utils import run_and_get_code

from ipex_quant import convert, default_static_qconfig_mapping, load, prepare, save

Tensor = torch.Tensor
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = (nn.Conv2d(8, 8, 3, padding=1, bias=False) for _ in range(2))
        self.norm = nn.BatchNorm2d(8)

    def forward(self, x: Tensor) -> Tensor:
        y = self.b(nn.functional.relu(self.norm(self.a(x))))
        return nn.functional.relu(y + x)


class Net(nn.Module):
    """All kinds of layers on the way of codes."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1), nn.ReLU(), nn.MaxPool2d(3, 2, 1))
        self.blocks = nn.Sequential(
            Block(), nn.AvgPool2d(2), Block(), nn.ConvTranspose2d(8, 8, 2, 2)
        )
        self.line = nn.Conv1d(8, 8, 3, padding=1)
        self.head = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 5))

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks(self.stem(x))
        return self.head(self.line(x.flatten(2)).mean(2))  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def model() -> Any:
    torch.manual_seed(0)
    with torch.no_grad():
        prepared = prepare(Net().eval(), default_static_qconfig_mapping, images())
        prepared(images())
        return convert(prepared)


def images(batch: int = 2, seed: int = 0) -> Tensor:
    return torch.randn(batch, 3, 32, 32, generator=torch.Generator().manual_seed(seed))


#: Products in this model: 8 convolutions, one of them for average pooling, and 2 linear layers.
CONVS, LINEARS = 8, 2


@torch.no_grad()
def test_compiled(model: Any) -> None:
    inductor = {"ipex.program": False}
    compiled = torch.compile(
        copy.deepcopy(model), backend="ipex", fullgraph=True, dynamic=False, options=inductor
    )
    x = images()
    found, sources = run_and_get_code(compiled, x)
    torch.testing.assert_close(found, model(x), atol=0.02, rtol=0)
    torch.testing.assert_close(compiled(x), model(x), atol=0.02, rtol=0)
    source = "\n".join(sources)
    lines = [line for line in source.splitlines() if " = torch.ops." in line and "(" in line]
    convs = [line for line in lines if "ipex_quant.int8_conv" in line]
    linears = [line for line in lines if "ipex.int8_linear" in line]
    assert (len(convs), len(linears)) == (CONVS, LINEARS)
    assert "dequantize" not in source and "aten.convolution" not in "\n".join(lines)
    assert "mkldnn" not in source and "mm(" not in "\n".join(lines)
    # All but the one before the mean over positions give codes.
    assert sum("torch.uint8" in line for line in convs) == CONVS
    torch.compiler.reset()
    program = torch.compile(copy.deepcopy(model), backend="ipex", fullgraph=True, dynamic=False)
    found, sources = run_and_get_code(program, x)
    assert not sources  # a program, none of whose code Inductor writes
    torch.testing.assert_close(found, model(x), atol=0.02, rtol=0)


@torch.no_grad()
def test_traced(model: Any) -> None:
    traced = torch.jit.freeze(torch.jit.trace(model, images(), check_trace=False))
    for seed in range(3):
        assert torch.equal(traced(images(seed=seed)), model(images(seed=seed)))
    kinds = [node.kind() for node in traced.inlined_graph.nodes()]
    convs = [kind for kind in kinds if kind.startswith("ipex_quant::int8_conv")]
    assert (len(convs), kinds.count("ipex::int8_linear")) == (CONVS, LINEARS)
    assert not {"aten::dequantize", "aten::conv2d", "aten::_convolution", "aten::linear"} & set(
        kinds
    )


@torch.no_grad()
def test_exported(model: Any) -> None:
    program = torch.export.export(model, (images(),))
    assert torch.equal(program.module()(images()), model(images()))
    names = [str(node.target) for node in program.graph.nodes if node.op == "call_function"]
    assert sum("int8_conv" in name for name in names) == CONVS
    assert sum("int8_linear" in name for name in names) == LINEARS


class WithDtype(nn.Module):
    """As models of transformers have them: properties that read the first floating parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 2, 1))

    @property
    def dtype(self) -> torch.dtype:
        return next(p.dtype for p in self.parameters() if p.is_floating_point())

    @property
    def device(self) -> torch.device:
        return next(p.device for p in self.parameters())

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x.to(self.device, self.dtype))  # type: ignore[no-any-return]


@torch.no_grad()
def test_dtype_without_float_layers(tmp_path: Any) -> None:
    x = images()
    prepared = prepare(nn.Sequential(WithDtype()).eval(), default_static_qconfig_mapping, x)
    prepared(x)
    converted = convert(prepared)
    traced = torch.jit.freeze(torch.jit.trace(converted, x))
    assert torch.equal(traced(x), converted(x))
    save(converted, tmp_path / "m")
    with torch.device("meta"):
        other = nn.Sequential(WithDtype())
    made = load(tmp_path / "m", other)
    assert torch.equal(made(x), converted(x)) and made[0].device.type == "cpu"
    half = copy.deepcopy(converted).to(torch.bfloat16)
    assert half[0].dtype == torch.bfloat16 == half(x).dtype and converted[0].dtype == torch.float32
    again = convert(prepared)
    again.load_state_dict(converted.state_dict())
    assert torch.equal(again(x), converted(x))

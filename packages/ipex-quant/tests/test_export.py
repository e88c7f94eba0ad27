# SPDX-License-Identifier: Apache-2.0
"""`ipex.export` of quantized models: the same numbers, with ops that C++ has."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from ipex_core import export, exporter
from ipex_core.errors import ExportError
from ipex_core.library.spec import PORTABLE
from ipex_quant import (
    WoqWeightDtype,
    convert,
    default_static_qconfig_mapping,
    get_weight_only_quant_qconfig_mapping,
    prepare,
)
from ipex_quant.int8 import ops


class Net(nn.Module):
    """Convolutions with a sum, one of images in one dimension, an embedding bag and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, padding=1)
        self.second = nn.Conv2d(8, 8, 3, padding=1)
        self.line = nn.Conv1d(8, 8, 3, padding=1)
        self.bag = nn.EmbeddingBag(50, 8, mode="sum")
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        y = torch.relu(self.first(x))
        y = torch.relu(self.second(y) + y)
        return self.head(self.line(y.flatten(2)).mean(2) + self.bag(ids))


class Both(nn.Module):
    """A model in static INT8 and one with quantized weights: compiled together, since compiling takes its time."""

    def __init__(self, int8: nn.Module, weight_only: nn.Module) -> None:
        super().__init__()
        self.int8 = int8
        self.weight_only = weight_only

    def forward(self, x: Tensor, ids: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        return self.int8(x, ids), self.weight_only(rows)


def test_files_that_would_hand_over_a_wrong_dtype_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of torch 2.11 give float64 to an op that is to give float32."""
    monkeypatch.setattr("ipex_core.exporter._DTYPES_ARRIVE", False)
    x = torch.randn(4, 32)
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32)).eval()
    prepared = prepare(model, default_static_qconfig_mapping, example_inputs=x)
    prepared(x)
    with pytest.raises(ExportError, match=r"calls ipex.int8_linear.* wrong dtype .*torch>=2\.12"):
        export(convert(prepared), x, tmp_path / "model.pt2")


@pytest.mark.skipif(not exporter._DTYPES_ARRIVE, reason="refused with this torch")
def test_static_int8_and_weight_only(tmp_path: Path) -> None:
    torch.manual_seed(0)
    images, ids = torch.randn(2, 3, 6, 6), torch.randint(50, (2, 5))
    prepared = prepare(Net().eval(), default_static_qconfig_mapping, example_inputs=(images, ids))
    prepared(images, ids)
    rows = torch.randn(3, 64, dtype=torch.bfloat16)
    linears = nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 32)).eval().bfloat16()
    mapping = get_weight_only_quant_qconfig_mapping(weight_dtype=WoqWeightDtype.INT4)
    weight_only = convert(prepare(linears, mapping, example_inputs=rows))
    model = Both(convert(prepared), weight_only).eval()
    inputs = (images, ids, rows)

    path = export(model, inputs, tmp_path / "model.pt2")
    with torch.no_grad():
        wanted = model(*inputs)
    got = torch._inductor.aoti_load_package(str(path))(*inputs)
    # A code may be rounded the other way, which later layers see.
    limit = 2e-2 * wanted[0].abs().max().item()
    torch.testing.assert_close(got[0], wanted[0], rtol=0, atol=limit)
    torch.testing.assert_close(got[1], wanted[1], rtol=0, atol=0)

    with zipfile.ZipFile(path) as archive:
        names = [name for name in archive.namelist() if name.endswith((".cpp", ".json"))]
        text = "".join(archive.read(name).decode() for name in names)
    assert "ipex_quant" not in text
    assert "ipex::int8_linear" in text and "ipex::woq_linear" in text
    assert "embedding_bag_byte_rowwise_offsets" in text and "qconv_pointwise" in text


def convolution(
    dims: int,
    *,
    activation: str = "none",
    dtype: torch.dtype = torch.uint8,
    residual: torch.dtype | None = None,
    image: bool = False,
    groups: int = 1,
) -> tuple[object, ...]:
    """Return arguments of `int8_conv` with 8 input and 8 output channels."""
    shape = (*(() if image else (2,)), 8, *(6, 5, 4)[:dims])
    x = torch.randint(0, 256, shape, dtype=torch.uint8)
    weight = torch.randint(-127, 128, (8, 8 // groups, *(3,) * dims), dtype=torch.int8)
    other = None
    if residual is not None:
        other = torch.randint(0, 256, shape).to(residual)
    scales = torch.rand(8) * 0.01 + 0.001
    geometry = ([1] * dims, [1] * dims, [1] * dims, groups)
    output = (activation, dtype, *((0.4, 120) if dtype == torch.uint8 else (1.0, 0)))
    return (x, weight, scales, 0.02, 128, torch.randn(8), *geometry, *output, other, 0.05, 3)


@pytest.mark.parametrize(
    "case",
    [
        {"dims": 1},
        {"dims": 1, "dtype": torch.float32, "activation": "relu"},
        {"dims": 2, "activation": "relu"},
        {"dims": 2, "activation": "relu6", "dtype": torch.bfloat16, "groups": 4},
        {"dims": 2, "image": True, "dtype": torch.float32},
        {"dims": 2, "residual": torch.uint8, "activation": "relu"},
        {"dims": 2, "residual": torch.float32, "dtype": torch.float32, "activation": "relu"},
        {"dims": 3, "activation": "relu"},
        {"dims": 3, "dtype": torch.float32, "activation": "silu"},
    ],
    ids=lambda case: "-".join(str(value) for value in case.values()),
)
def test_convolutions_of_onednn_in_graphs(
    case: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The form for torch 2.14 and newer, whose Inductor finds no convolutions in dequantized operands."""
    monkeypatch.setattr(ops, "_inductor_finds_convolutions", lambda: False)
    args = convolution(**case)  # type: ignore[arg-type]
    wanted = torch.ops.ipex_quant.int8_conv(*args)
    got = PORTABLE[ops.int8_conv](*args)
    assert got.dtype == wanted.dtype and got.shape == wanted.shape
    # A sum of codes may be rounded the other way, since oneDNN does it in one step.
    limit = 1 if got.dtype == torch.uint8 and "residual" in case else 0
    away = (got.float() - wanted.float()).abs()
    tolerance = limit if got.dtype == torch.uint8 else 1e-6 * wanted.float().abs().max().item()
    assert away.max().item() <= tolerance


# torch's own use of what it has deprecated.
@pytest.mark.filterwarnings("ignore:.*treespec.*:FutureWarning")
def test_graphs_pack_for_sizes_that_vary(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ops, "_inductor_finds_convolutions", lambda: False)
    x, *rest = convolution(2)
    names = ("weight", "scales", "bias")
    kept = dict(zip(names, (rest[0], rest[1], rest[4]), strict=True))

    class Codes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            for name, value in kept.items():
                self.register_buffer(name, value)

        def forward(self, x: Tensor) -> Tensor:
            packed = (self.weight, self.scales, *rest[2:4], self.bias, *rest[5:])
            return torch.ops.ipex_quant.int8_conv(x, *packed)  # type: ignore[no-any-return]

    model, batch = Codes(), torch.export.Dim("batch", min=1, max=64)
    program = torch.export.export(model, (x,), dynamic_shapes=({0: batch},), strict=False)
    program = program.run_decompositions(dict(PORTABLE))
    found = {str(node.target) for node in program.graph.nodes}
    assert {"onednn.qconv_prepack.default", "onednn.qconv_pointwise.default"} <= found
    assert not any("ipex_quant" in name for name in found)
    larger = torch.randint(0, 256, (5, *x.shape[1:]), dtype=torch.uint8)
    assert torch.equal(program.module()(larger), model(larger))

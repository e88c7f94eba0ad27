# SPDX-License-Identifier: Apache-2.0
"""`ipex.export` of quantised models: the same numbers, with ops that C++ has."""

from __future__ import annotations

import zipfile
from pathlib import Path

import torch
from torch import Tensor, nn

from ipex_core import export
from ipex_quant import (
    WoqWeightDtype,
    convert,
    default_static_qconfig_mapping,
    get_weight_only_quant_qconfig_mapping,
    prepare,
)


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
    """A model in static INT8 and one with quantised weights: compiled together, since compiling takes its time."""

    def __init__(self, int8: nn.Module, weight_only: nn.Module) -> None:
        super().__init__()
        self.int8 = int8
        self.weight_only = weight_only

    def forward(self, x: Tensor, ids: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        return self.int8(x, ids), self.weight_only(rows)


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

# SPDX-License-Identifier: Apache-2.0
"""`ipex.export` of quantised models: the same numbers, with ops that C++ has."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import pytest
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


def run(model: nn.Module, inputs: tuple[Tensor, ...], path: Path) -> tuple[Any, Any, str]:
    """Return the outputs of the file and of the model, and the text of the file's programs."""
    export(model, inputs, path)
    with torch.no_grad():
        wanted = model(*inputs)
    got = torch._inductor.aoti_load_package(str(path))(*inputs)
    with zipfile.ZipFile(path) as archive:
        names = [name for name in archive.namelist() if name.endswith((".cpp", ".json"))]
        text = "".join(archive.read(name).decode() for name in names)
    return got, wanted, text


def test_static_int8(tmp_path: Path) -> None:
    torch.manual_seed(0)
    inputs = torch.randn(2, 3, 6, 6), torch.randint(50, (2, 5))
    prepared = prepare(Net().eval(), default_static_qconfig_mapping, example_inputs=inputs)
    prepared(*inputs)
    got, wanted, text = run(convert(prepared), inputs, tmp_path / "int8.pt2")
    # A code may be rounded the other way, which later layers see.
    torch.testing.assert_close(got, wanted, rtol=0, atol=2e-2 * wanted.abs().max().item())
    assert "ipex_quant" not in text
    assert "ipex::int8_linear" in text and "embedding_bag_byte_rowwise_offsets" in text
    assert "qconv_pointwise" in text


@pytest.mark.parametrize("dtype", [WoqWeightDtype.INT4])
def test_weight_only(dtype: WoqWeightDtype, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 32)).eval().bfloat16()
    x = torch.randn(3, 64, dtype=torch.bfloat16)
    mapping = get_weight_only_quant_qconfig_mapping(weight_dtype=dtype)
    quantised = convert(prepare(model, mapping, example_inputs=x))
    got, wanted, text = run(quantised, (x,), tmp_path / "woq.pt2")
    torch.testing.assert_close(got, wanted, rtol=0, atol=0)
    assert text.count("ipex::woq_linear") >= 2

# SPDX-License-Identifier: Apache-2.0
"""The ``weight`` of INT8 layers is the float one: forwards cast activations to its dtype."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ipex_quant import (
    convert,
    default_dynamic_qconfig_mapping,
    default_static_qconfig_mapping,
    get_smooth_quant_qconfig_mapping,
    load,
    prepare,
    save,
)

Tensor = torch.Tensor


class Casting(nn.Module):
    """Casts to the dtype of the weight of each layer, as CLIP does with images and T5 in its feed-forward."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
        y: Tensor = self.layer(x.to(self.layer.weight.dtype))
        return y if scale is None else y * scale


CASES: dict[str, tuple[Any, tuple[int, ...]]] = {
    "linear": (lambda: nn.Linear(16, 8), (5, 16)),
    "conv": (lambda: nn.Conv2d(4, 6, 3, groups=2), (2, 4, 6, 6)),
    "transposed": (lambda: nn.ConvTranspose2d(4, 6, 3, 2, groups=2), (2, 4, 5, 5)),
}


def quantized(model: nn.Module, x: Tensor, mapping: Any = default_static_qconfig_mapping) -> Any:
    prepared = prepare(model, mapping, example_inputs=x)
    prepared(x)
    return convert(prepared)


@pytest.mark.parametrize("case", CASES)
@torch.no_grad()
def test_weight_is_the_float_one(case: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    make, shape = CASES[case]
    model, x = Casting(make()).eval(), torch.randn(shape)
    fast, want = quantized(model, x), model(x)
    # Activations cast to int8 would lose all but some integers.
    assert nn.functional.cosine_similarity(fast(x).flatten(), want.flatten(), dim=0) > 0.999
    weight, float_weight = fast.layer.weight, model.layer.weight
    assert (weight.shape, weight.dtype) == (float_weight.shape, torch.float32)
    step = float_weight.abs().max().item() / 127
    torch.testing.assert_close(weight + 0, float_weight.detach(), rtol=0, atol=step)
    assert torch.equal(weight.detach() * 1, weight + 0)
    assert fast.state_dict()["layer.weight"].dtype in (torch.int8, torch.uint8)
    with pytest.raises(RuntimeError, match="cannot be changed in place"):
        weight.zero_()
    save(fast, tmp_path / "m")
    again = load(tmp_path / "m", Casting(make()).bfloat16())
    assert again.layer.weight.dtype == torch.bfloat16
    for other in (copy.deepcopy(fast), pickle.loads(pickle.dumps(fast))):
        assert torch.equal(other(x), fast(x))
        assert torch.equal(other.layer.weight + 0, weight + 0)
    assert copy.deepcopy(fast).bfloat16().layer.weight.dtype == torch.bfloat16


@torch.no_grad()
def test_in_graphs() -> None:
    torch.manual_seed(0)
    model = Casting(nn.Linear(16, 8)).eval()
    x = torch.randn(5, 16)
    fast = quantized(model, x)
    traced = torch.jit.freeze(torch.jit.trace(fast, x))
    torch.testing.assert_close(traced(x), fast(x))
    assert "unpack_int8_weight" not in str(traced.graph)
    torch._dynamo.reset()
    compiled = torch.compile(fast, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), fast(x))


@torch.no_grad()
def test_dynamic_and_smoothed() -> None:
    torch.manual_seed(0)
    model, x = Casting(nn.Linear(16, 8)).eval(), torch.randn(40, 16)
    x[:, 3] *= 30
    for mapping in (default_dynamic_qconfig_mapping, get_smooth_quant_qconfig_mapping(alpha=0.5)):
        fast = quantized(model, x, mapping)
        assert fast.layer.weight.dtype == torch.float32
        torch.testing.assert_close(
            fast.layer.weight + 0, model.layer.weight.detach(), rtol=0.05, atol=0.02
        )


@torch.no_grad()
def test_image_tower_of_transformers() -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.CLIPVisionConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=1,
        num_attention_heads=2,
        image_size=32,
        patch_size=8,
    )
    model, x = transformers.CLIPVisionModel(config).eval(), torch.randn(2, 3, 32, 32)
    found, want = quantized(model, x)(x)[0], model(x)[0]
    assert nn.functional.cosine_similarity(found.flatten(), want.flatten(), dim=0) > 0.999

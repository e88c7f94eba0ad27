# SPDX-License-Identifier: Apache-2.0
"""FP8: numbers, scales and histories against their definition in `fp8_bits`; names, contexts, bad input."""

from __future__ import annotations

import importlib
import math
from fractions import Fraction

import fp8_bits
import pytest
import torch
from torch import nn

import ipex_quant
from ipex_core.packing.quantize import amax, power_of_two_scale, to_fp8
from ipex_quant.fp8 import (
    DelayedScaling,
    Float8Format,
    FP8Linear,
    FP8TensorMeta,
    cast_from_fp8,
    cast_to_fp8,
    default_amax_and_scale_update,
    fp8_autocast,
    get_fp8_recipe,
    is_fp8_calibration,
    is_fp8_enabled,
    prepare_fp8,
    update_amax_history,
)

Tensor = torch.Tensor

_BITS = {torch.float8_e4m3fn: fp8_bits.E4M3, torch.float8_e5m2: fp8_bits.E5M2}


def _numbers() -> Tensor:
    """Numbers of all magnitudes, ties and their neighbors, too large ones."""
    exact = torch.tensor(
        [float(v) for v in fp8_bits.E4M3.values + fp8_bits.E5M2.values if v], dtype=torch.float32
    )
    ties = (exact[1:] + exact[:-1]) / 2
    inf = torch.tensor(math.inf)
    some = torch.cat([exact, ties, ties.nextafter(inf), ties.nextafter(-inf)])
    some = torch.cat([some, torch.randn(300) * 10.0 ** torch.randint(-7, 6, (300,))])
    return torch.cat([some, -some, torch.zeros(1)])


@pytest.mark.parametrize("dtype", list(_BITS))
@pytest.mark.parametrize("scale", [1.0, 0.125, 64.0])
def test_rounding(dtype: torch.dtype, scale: float) -> None:
    x = _numbers()
    got = to_fp8(x, torch.tensor(scale), dtype).double().tolist()
    want = [float(_BITS[dtype].nearest(float(Fraction(v) * Fraction(scale)))) for v in x.tolist()]
    assert got == want


def test_not_finite() -> None:
    x = torch.tensor([math.inf, -math.inf, math.nan, 1e30])
    five = to_fp8(x, torch.tensor(1.0), torch.float8_e5m2).float()
    assert five[:2].tolist() == [math.inf, -math.inf] and five[2].isnan() and five[3] == 57344
    four = to_fp8(x, torch.tensor(1.0), torch.float8_e4m3fn).float()
    assert four[:3].isnan().all() and four[3] == 448
    assert amax(x) == 0 and amax(torch.empty(0)) == 0  # nothing to learn from such a step
    assert amax(torch.tensor([1.0, -3.0], dtype=torch.float16)) == 3


@pytest.mark.parametrize("limit", [448, 57344])
def test_scale(limit: int) -> None:
    near = [limit * 2.0**e for e in (-20, -1, 0, 5)]
    largest = torch.tensor([*near, 0.1, 3.0, 1e-30, 1e30])
    both = torch.cat(
        [largest, largest.nextafter(torch.tensor(math.inf)), largest.nextafter(-1 * largest)]
    )
    for margin in (0, 2, -1):
        got = power_of_two_scale(both, torch.ones_like(both), limit, margin)
        assert got.tolist() == [float(fp8_bits.scale_of(v, limit, margin)) for v in both.tolist()]
    odd = torch.tensor([0.0, math.inf, math.nan])
    assert power_of_two_scale(odd, torch.tensor([3.0, 4.0, 5.0]), limit, 0).tolist() == [3, 4, 5]
    tiny = power_of_two_scale(torch.tensor([1e-44]), torch.ones(1), limit, 0)
    assert tiny.isfinite().all() and (1 / tiny > 0).all()


def test_history() -> None:
    history = torch.tensor([[1.0, 20.0], [2.0, 0.0], [400.0, 0.0]])
    new, scale, inverse = default_amax_and_scale_update(history, torch.ones(2), 448, 1, "max")
    assert scale.tolist() == [0.5, 8.0] and torch.equal(inverse, 1 / scale)
    assert new.tolist() == [[0, 0], [400, 0], [1, 20]]
    assert update_amax_history(history[:1]).tolist() == [[0, 0]]
    _, scale, _ = default_amax_and_scale_update(history, torch.ones(2), 448, 0, "most_recent")
    assert scale.tolist() == [256, 16]
    _, scale, _ = default_amax_and_scale_update(history, torch.ones(2), 448, 0, lambda h: h[2])
    assert scale.tolist() == [1, 1]
    with pytest.raises(ValueError, match=r"amax_compute_algo must return a tensor of shape \[2\]"):
        default_amax_and_scale_update(history, torch.ones(2), 448, 0, lambda h: h)


def test_casts() -> None:
    meta = FP8TensorMeta(3, 2)
    meta.scale[1] = 16.0
    x = torch.randn(5, 7)
    low = cast_to_fp8(x, meta, 1, Float8Format.kFloat8_E5M2)
    assert low.dtype == torch.float8_e5m2 and meta.amax_history[0, 1] == x.abs().max()
    for given in (low, low.view(torch.uint8)):
        back = cast_from_fp8(given, meta, 1, Float8Format.kFloat8_E5M2, torch.float32)
        assert back.tolist() == fp8_bits.rounded(x.tolist(), fp8_bits.E5M2, Fraction(16))
    with pytest.raises(ValueError, match="inp must have dtype"):
        cast_from_fp8(x, meta, 1, Float8Format.kFloat8_E5M2, torch.float32)


def test_nesting() -> None:
    mine = DelayedScaling(margin=3)
    assert not is_fp8_enabled()
    with fp8_autocast(enabled=True, fp8_recipe=mine):
        assert is_fp8_enabled() and get_fp8_recipe() is mine
        with fp8_autocast(enabled=False, calibrating=True):
            assert not is_fp8_enabled() and is_fp8_calibration()
            assert get_fp8_recipe() == DelayedScaling()
        assert is_fp8_enabled() and not is_fp8_calibration() and get_fp8_recipe() is mine
    with pytest.raises(KeyError), fp8_autocast(enabled=True):
        raise KeyError
    assert not is_fp8_enabled()


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: DelayedScaling(margin=0.5), "margin must be an int, got 0.5"),
        (lambda: DelayedScaling(interval=0), "interval must be an int of at least 1, got 0"),
        (lambda: DelayedScaling(amax_history_len=0), "amax_history_len must be an int of at least"),
        (lambda: DelayedScaling(fp8_format="E4M3"), "fp8_format must be a Format"),
        (lambda: DelayedScaling(amax_compute_algo="min"), "amax_compute_algo must be 'max'"),
        (lambda: fp8_autocast(enabled=1).__enter__(), "enabled must be True or False"),
        (lambda: fp8_autocast(fp8_recipe=1).__enter__(), "fp8_recipe must be a DelayedScaling"),
        (lambda: fp8_autocast(device="xpu").__enter__(), "device must be 'cpu'"),
        (lambda: prepare_fp8(3), "m must be a torch.nn.Module"),
        (lambda: prepare_fp8(nn.Linear(1, 1), 3), "optimizer must be a torch.optim.Optimizer"),
        (lambda: prepare_fp8(nn.Linear(1, 1), device="xpu"), "device must be 'cpu'"),
        (lambda: FP8Linear(0, 1), "in_features must be a positive int"),
        (lambda: FP8Linear(1, 1, params_dtype=torch.int8), "params_dtype must be one of float32"),
        (lambda: FP8Linear(2, 2)(torch.ones(2, dtype=torch.int64)), "input must have dtype"),
        (lambda: FP8Linear(2, 2)(torch.ones(3)), r"input must have 2 features .*, got \[3\]"),
    ],
)
def test_bad_input(call: object, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        call()  # type: ignore[operator]


@pytest.mark.parametrize("name", ["fp8", "base", "linear", "recipe", "util"])
def test_paths_of_ipex(name: str) -> None:
    wanted = {
        "fp8": ("fp8_autocast", "amax_and_scale_update", "get_fp8_dtype", "get_fp8_device_type"),
        "base": ("Fp8BaseModule", "prepare_backward"),
        "linear": ("FP8Linear",),
        "recipe": ("DelayedScaling", "Format"),
        "util": ("cast_to_fp8", "cast_from_fp8", "convert", "convert_rec", "prepare_fp8"),
    }
    module = importlib.import_module(f"ipex_quant.fp8.{name}")
    for each in wanted[name]:
        assert getattr(module, each).__name__ == each


def test_facade() -> None:
    facade = pytest.importorskip("intel_extension_for_pytorch")
    if not hasattr(facade, "quantization"):
        pytest.skip("ipex-quant is not installed as a component")
    module = importlib.import_module("intel_extension_for_pytorch.quantization.fp8")
    assert module is ipex_quant.fp8 is facade.quantization.fp8
    helper = importlib.import_module("ipex._isa_help")
    assert helper.FP8TensorMeta is FP8TensorMeta and helper.Float8Format is Float8Format

# SPDX-License-Identifier: Apache-2.0
"""Scales of quantized caches: observed, read from checkpoints, saved."""

from __future__ import annotations

import types

import pytest
import torch
from torch import nn

from ipex_quant import KVCacheScales, calibrate_kv_cache, read_kv_cache_scales

SCALES = KVCacheScales((12.7, 4.0), (1.0, 0.5))


class Model(nn.Module):
    """Caches ``factor`` times its tokens as keys, and their negative halves as values."""

    def __init__(self, factor: float = 1.0, layers: int = 2) -> None:
        super().__init__()
        self.factor, self.layers = factor, layers

    def forward(self, input_ids, attention_mask=None, use_cache=False):
        keys = self.factor * input_ids[:, None, :, None].float()
        cache = [(keys * (i + 1), -keys / 2) for i in range(self.layers)]
        return types.SimpleNamespace(past_key_values=cache if use_cache else None)


def test_calibrate():
    scales = calibrate_kv_cache(Model(), [torch.tensor([[1, 5, 2]]), torch.tensor([[3, 3, 3]])])
    assert scales == KVCacheScales((5.0, 10.0), (2.5, 2.5))
    padded = {
        "input_ids": torch.tensor([[9, 1, 2], [1, 1, 4]]),
        "attention_mask": torch.tensor([[0, 1, 1], [1, 1, 1]]),
    }
    assert calibrate_kv_cache(Model(), [padded]).keys == (4.0, 8.0)
    assert calibrate_kv_cache(Model(), [padded], nsamples=1).keys == (2.0, 4.0)
    assert calibrate_kv_cache(Model(), [torch.ones(1, 3)], pad_max_length=2).keys == (1.0, 2.0)
    assert calibrate_kv_cache(Model(0.0), [padded]).keys == (1.0, 1.0)  # nothing to scale


def test_scales():
    assert SCALES.of(torch.int8) == ((12.7 / 127, 1 / 127), (4 / 127, 0.5 / 127))
    assert SCALES.of(torch.float8_e5m2) == SCALES.of(torch.float8_e4m3fn)
    assert SCALES.of(torch.float8_e5m2)[1] == (4 / 448, 0.5 / 448)


def test_save_and_load(tmp_path):
    path = tmp_path / "scales.json"
    SCALES.save(path)
    assert KVCacheScales.load(path) == SCALES
    assert [p.name for p in tmp_path.iterdir()] == ["scales.json"]
    path.write_text('{"keys": [1.0]}')
    with pytest.raises(ValueError, match=r"path must be a file of KVCacheScales\.save"):
        KVCacheScales.load(path)
    with pytest.raises(FileNotFoundError):
        KVCacheScales.load(tmp_path / "none.json")


def _tensors(*names, value=0.5):
    return {n: torch.tensor(value * (i + 1)) for i, n in enumerate(names)}


@pytest.mark.parametrize(
    ("names", "keys", "values"),
    [
        (
            ["model.layers.{}.self_attn.k_scale", "model.layers.{}.self_attn.v_scale"],
            (0.5, 1.5),
            (1.0, 2.0),
        ),
        (
            ["layers.{}.self_attn.attn.k_scale", "layers.{}.self_attn.attn.v_scale"],
            (0.5, 1.5),
            (1.0, 2.0),
        ),
        (
            ["h.{}.attn.k_proj.output_scale", "h.{}.attn.v_proj.output_scale"],
            (0.5, 1.5),
            (1.0, 2.0),
        ),
        (
            ["h.{}.attn.k_proj.k_scale", "h.{}.attn.v_proj.v_scale"],
            (0.5, 1.5),
            (1.0, 2.0),
        ),
        (["model.layers.{}.self_attn.kv_scale"], (0.5, 1.0), (0.5, 1.0)),
    ],
)
def test_read(names, keys, values):
    state = _tensors(*(name.format(i) for i in (0, 1) for name in names))
    state |= _tensors("model.layers.0.self_attn.q_proj.weight_scale", "model.layers.0.q_scale")
    found = read_kv_cache_scales(state)
    assert found == KVCacheScales([448 * k for k in keys], [448 * v for v in values])
    config = {"kv_cache_scheme": {"num_bits": 8, "type": "int"}}
    assert read_kv_cache_scales(state, config).of(torch.int8) == tuple(
        (pytest.approx(k), pytest.approx(v)) for k, v in zip(keys, values, strict=True)
    )


def test_read_nothing():
    assert (
        read_kv_cache_scales({"model.layers.0.self_attn.k_proj.weight": torch.ones(2, 2)}) is None
    )


def test_scales_of_heads():
    state = {f"layers.0.attn.{k}_scale": torch.tensor([0.1, 0.3, 0.2]) for k in "kv"}
    assert read_kv_cache_scales(state).keys == (pytest.approx(0.3 * 448),)


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: KVCacheScales((1.0,), ()), "values must have 1 numbers, got 0"),
        (lambda: KVCacheScales((), ()), "keys must have a number for each layer"),
        (lambda: KVCacheScales((1.0, 0.0), (1.0, 1.0)), "keys of layer 1 must be positive"),
        (lambda: SCALES.of(torch.bfloat16), "dtype must be one of torch.int8"),
        (lambda: calibrate_kv_cache(Model(), []), "dataloader must have samples, got none"),
        (lambda: calibrate_kv_cache(3, []), "model must be a torch.nn.Module, got int"),
        (
            lambda: calibrate_kv_cache(Model(layers=0), [torch.ones(1, 1)]),
            "model must return keys and values of each layer as past_key_values, got list",
        ),
        (
            lambda: calibrate_kv_cache(nn.Identity(), [{"input": torch.ones(1, 1)}]),
            "use_cache",
        ),
        (
            lambda: calibrate_kv_cache(Model(float("nan")), [torch.ones(1, 1)]),
            "keys of layer 0 must be finite, got nan",
        ),
        (
            lambda: read_kv_cache_scales(
                _tensors("layers.1.attn.k_scale", "layers.1.attn.v_scale")
            ),
            "have a k_scale of layer 0",
        ),
        (
            lambda: read_kv_cache_scales(_tensors("layers.0.attn.k_scale")),
            "have a v_scale of layer 0",
        ),
        (
            lambda: read_kv_cache_scales(_tensors("layers.0.attn.k_scale", value=-1)),
            "layers.0.attn.k_scale must be positive and finite, got -1",
        ),
        (
            lambda: read_kv_cache_scales(
                _tensors("a.0.k_scale", "a.0.v_scale"), {"kv_cache_scheme": {"num_bits": 4}}
            ),
            "num_bits of kv_cache_scheme must be 8, got 4",
        ),
    ],
)
def test_bad_input(call, text):
    with pytest.raises((ValueError, TypeError), match=text):
        call()

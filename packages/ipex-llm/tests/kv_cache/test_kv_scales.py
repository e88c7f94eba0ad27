# SPDX-License-Identifier: Apache-2.0
"""Caches of 8-bit numbers with a scale for the keys and one for the values of each layer."""

from __future__ import annotations

import copy

import pytest
import torch
from families import FAMILIES, UNPROVEN, tokens

import ipex_core
from ipex_llm import Engine
from ipex_llm.kv_cache.transformers import state_of_cache
from ipex_llm.optimization import optimize
from ipex_llm.records import record_of
from ipex_quant import KVCacheScales, calibrate_kv_cache, read_kv_cache_scales

pytest.importorskip("transformers")

pytestmark = pytest.mark.filterwarnings("ignore")


def scales_of(model):
    return calibrate_kv_cache(model, [tokens(2, 40)])


def cache_of(model, ids):
    with torch.no_grad():
        out = model(ids, use_cache=True)
    return state_of_cache(out.past_key_values), out.logits


def test_calibration_sees_what_is_cached():
    model = FAMILIES["llama"]()
    stock, fast = scales_of(model), scales_of(optimize(model))
    for name in ("keys", "values"):
        torch.testing.assert_close(
            torch.tensor(getattr(fast, name)), torch.tensor(getattr(stock, name))
        )


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma2", "bloom", "qwen3", "phi", "mixtral"])
@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e5m2, torch.float8_e4m3fn])
def test_cached_numbers(name, dtype):
    if name in UNPROVEN:
        pytest.skip("less is proven with transformers 4")
    model = FAMILIES[name]()
    scales = scales_of(model)
    fast = optimize(model, kv_cache_dtype=dtype, kv_cache_scales=scales)
    ids = tokens(1, 30)
    small, _ = cache_of(fast, ids)
    assert small.cache.dtype == dtype and len(small.cache.tensors) == 2 * len(scales.keys)
    # The first layer reads the same in both, so its cache is known number by number.
    exact, _ = cache_of(optimize(model), ids)
    largest = 127 if dtype == torch.int8 else 448
    pairs = zip(small.padded(0), exact.padded(0), strict=True)
    for (got, want), top in zip(pairs, (scales.keys[0], scales.values[0]), strict=True):
        scale = top / largest
        codes = want / scale
        codes = codes.round().clamp(-127, 127) if largest == 127 else codes.to(dtype).float()
        wrong = (got - codes * scale).abs() > 1e-5 * top
        assert wrong.float().mean() < 0.01  # of numbers in the middle of two codes
    # and what is computed from it, in one step and token by token
    out = fast.generate(
        ids, max_new_tokens=4, do_sample=False, return_dict_in_generate=True, output_logits=True
    )
    with torch.no_grad():
        want = model(out.sequences).logits[0, -2]
    close = torch.nn.functional.cosine_similarity(out.logits[-1][0], want, dim=0)
    assert close > (0.995 if dtype == torch.int8 else 0.95)


def test_memory_and_explain():
    model = FAMILIES["llama"]()
    fast = optimize(model, kv_cache_dtype="int8", kv_cache_scales=scales_of(model))
    rows = optimize(model, kv_cache_dtype="int8")
    a, b = (record_of(m).runner for m in (fast, rows))
    assert a.cache_bytes(2, 32, torch.int8) < b.cache_bytes(2, 32, torch.int8)
    assert a.cache_bytes(2, 32) == b.cache_bytes(2, 32)  # of the model's own dtype
    texts = [
        next(r.text for r in ipex_core.explain(m).rows if r.step == "llm") for m in (fast, rows)
    ]
    assert "torch.int8, a scale for keys and values of each layer" in texts[0]
    assert "torch.int8, a scale for each row" in texts[1]


def test_engine_beams_and_copies():
    model = FAMILIES["llama"]()
    scales = scales_of(model)
    fast = optimize(model, kv_cache_dtype="int8", kv_cache_scales=scales)
    prompt = tokens(1, 12)
    want = fast.generate(prompt, max_new_tokens=6, do_sample=False, pad_token_id=0)[0, 12:]
    engine = Engine(fast, num_blocks=8, cache_dtype=torch.int8)
    assert engine._cache.scales == scales.of(torch.int8)
    again = copy.deepcopy(fast)
    same = again.generate(prompt, max_new_tokens=6, do_sample=False, pad_token_id=0)[0, 12:]
    assert torch.equal(same, want)
    assert record_of(again).runner.kv_scales == scales
    beams = fast.generate(prompt, max_new_tokens=6, num_beams=3, do_sample=False, pad_token_id=0)
    assert beams.shape == (1, 18)
    with torch.no_grad():  # the model's own forward goes on with the cache
        past = fast(prompt, use_cache=True).past_key_values
        own = model(tokens(1, 1), past_key_values=copy.deepcopy(past)).logits
        torch.testing.assert_close(
            own, fast(tokens(1, 1), past_key_values=past).logits, atol=0.05, rtol=0.05
        )
    assert "kv_scales" not in ipex_core.restore(fast).__dict__


def checkpoint(model):
    """Return an int8 checkpoint of a model."""
    state = dict(model.state_dict())
    for name in [n for n in state if "proj.weight" in n]:
        weight = state.pop(name)
        scale = weight.abs().amax(1, keepdim=True) / 127
        state[name] = (weight / scale).round().to(torch.int8)
        state[f"{name}_scale"] = scale
    return state, {"quant_method": "int8"}


@pytest.mark.parametrize("dtype", ["int8", "fp8_e5m2", "fp8_e4m3"])
def test_scales_of_a_checkpoint(dtype):
    model = FAMILIES["llama"]()
    state, config = checkpoint(model)
    scales = scales_of(model)
    for layer, (k, v) in enumerate(scales.of(torch.float8_e4m3fn)):
        state[f"model.layers.{layer}.self_attn.k_scale"] = torch.tensor(k)
        state[f"model.layers.{layer}.self_attn.v_scale"] = torch.tensor([v])
    fast = optimize(model, low_precision_checkpoint=(state, config), kv_cache_dtype=dtype)
    used = record_of(fast).runner.kv_scales
    if dtype == "int8":  # scales of rows are better
        assert used is None
    else:
        torch.testing.assert_close(torch.tensor(used.keys), torch.tensor(scales.keys))
    found = read_kv_cache_scales(state, config)
    given = optimize(
        model, low_precision_checkpoint=(state, config), kv_cache_dtype=dtype, kv_cache_scales=found
    )
    assert record_of(given).runner.kv_scales == found


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (
            {"kv_cache_scales": KVCacheScales((1.0,), (1.0,))},
            "kv_cache_dtype must be 'int8', 'fp8_e4m3' or",
        ),
        (
            {"kv_cache_dtype": "int8", "kv_cache_scales": KVCacheScales((1.0,), (1.0,))},
            "kv_cache_scales must have scales of 2 layers, got 1",
        ),
        ({"kv_cache_dtype": "int8", "kv_cache_scales": 3}, "kv_cache_scales must be KVCacheScales"),
    ],
)
def test_bad_arguments(options, text):
    with pytest.raises(ValueError, match=text):
        optimize(FAMILIES["llama"](), **options)


def test_file(tmp_path):
    model = FAMILIES["llama"]()
    scales = scales_of(model)
    scales.save(tmp_path / "scales.json")
    fast = optimize(model, kv_cache_dtype="int8", kv_cache_scales=tmp_path / "scales.json")
    assert record_of(fast).runner.kv_scales == scales

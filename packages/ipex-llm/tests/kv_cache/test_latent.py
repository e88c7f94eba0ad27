# SPDX-License-Identifier: Apache-2.0
"""Latent attention: what is cached, and that a model's own forward can go on with it."""

from __future__ import annotations

import pytest
import torch
from families import FAMILIES, OLD, randomize, tokens

import ipex_core
from ipex_llm.arch.detect import match
from ipex_llm.model_runner import Runner
from ipex_llm.optimization import optimize

pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore")

NAMES = [name for name in ("deepseek_v2", "deepseek_v3") if name in FAMILIES]


@pytest.mark.parametrize("name", NAMES)
def test_plan_and_cache(name):
    model = FAMILIES[name]()
    plan = match(model)
    latent = plan.layers[0].attention.latent
    assert latent is not None and (latent.rank, latent.value_dim) == (32, 16)
    assert plan.layers[0].attention.rope.half == (name == "deepseek_v3")
    runner = Runner(plan, torch.float32)
    assert runner.cache_bytes(3, 16) == 2 * 3 * 16 * (32 + 8) * 4
    cache = runner.new_cache(3, 16)
    keys, values = cache.tensors_of(1)
    assert keys is not cache.tensors_of(0)[0] and keys.shape == (3, 1, 16, 40)
    assert keys.data_ptr() == values.data_ptr()
    before = keys[1].fill_(3.0)
    cache.copy_blocks([1], [2])
    assert torch.equal(keys[2], before)


@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_parameters_come_back(name):
    model = FAMILIES[name]()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    fast = optimize(model)
    for values in (fast.state_dict(), ipex_core.restore(fast).state_dict()):
        assert list(values) == list(before)
        assert all(torch.equal(values[key], value) for key, value in before.items())


@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_own_forward_with_the_cache(name):
    model = FAMILIES[name]()
    if OLD:  # it scores experts of other groups as 0, above negative scores, and is not proven: keep all groups
        model.config.topk_group = model.config.n_group
        model = randomize(type(model)(model.config))
    fast = optimize(model)
    first, second, third = tokens(2, 12), tokens(2, 2, seed=5), tokens(2, 1, seed=6)
    cache = fast(first, use_cache=True).past_key_values
    if OLD:
        with pytest.raises(NotImplementedError, match="keys must be latents"):
            fast(second, past_key_values=cache, output_attentions=True)
        return
    plain = model(first, use_cache=True).past_key_values
    for ids, options in ((second, {"output_attentions": True}), (third, {})):
        got = fast(ids, past_key_values=cache, **options).logits
        want = model(ids, past_key_values=plain).logits
        torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("dtype", ["int8", "fp8_e5m2", "fp8_e4m3"])
@torch.no_grad()
def test_small_caches(dtype):
    model = FAMILIES["deepseek_v3"]()
    fast = optimize(model, kv_cache_dtype=dtype)
    ids = tokens(2, 12)
    got = fast(ids).logits
    cache = fast(ids[:, :-1]).past_key_values
    one = fast(ids[:, -1:], past_key_values=cache).logits
    want = model(ids, use_cache=False).logits
    apart = 1 - torch.nn.functional.cosine_similarity(got, want, dim=-1)
    assert float(apart.median()) < 1e-2
    torch.testing.assert_close(one[:, 0], got[:, -1], rtol=0.1, atol=0.2)


def test_ranks_do_not_divide_it():
    from types import SimpleNamespace

    from ipex_llm.distributed.shard import _check

    layer = match(FAMILIES["deepseek_v3"]()).layers[0]
    with pytest.raises(ValueError, match="got latent attention"):
        _check(layer, SimpleNamespace(rank=0, ranks=2), (1,))

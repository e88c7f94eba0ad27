# SPDX-License-Identifier: Apache-2.0
"""Models whose stock form in bfloat16 runs: they run when `optimize` casts them, at each depth."""

from __future__ import annotations

import copy

import pytest
import torch
import transformers

import ipex_core
from ipex_llm.optimization import optimize
from ipex_llm.optimization.proof.small import small_model

pytestmark = pytest.mark.filterwarnings("ignore")

IDS = torch.randint(3, 90, (2, 10), generator=torch.Generator().manual_seed(0))


def make(prefix, config=None):
    kind = getattr(transformers, f"{prefix}ForCausalLM", None)
    made = getattr(transformers, config or f"{prefix}Config", None)
    if kind is None or made is None:
        pytest.skip(f"this transformers has no {prefix}")
    return small_model(kind, made())


def off(model, want):
    """Return by how much the logits of the tokens in the middle of a batch differ: experts flip for a few."""
    got = model(IDS).logits.float()
    return float(((got - want).abs().amax(-1) / want.abs().max()).median())


def ways(model):
    yield ipex_core.optimize(model, dtype=torch.bfloat16)
    for depth in (1, 2, 3):
        yield optimize(model, dtype=torch.bfloat16, depth=depth)


@torch.no_grad()
def test_decays_in_buffers():
    model = make("MiniMax")
    want = model(IDS).logits
    plain = off(copy.deepcopy(model).bfloat16(), want)
    for fast in ways(model):
        assert off(fast, want) < 2 * plain
        frequencies = [b for n, b in fast.named_buffers() if "inv_freq" in n]
        assert frequencies and all(b.dtype == torch.float32 for b in frequencies)
        decays = [b for n, b in fast.named_buffers() if n.endswith("slope_rate")]
        assert decays and all(b.dtype == torch.bfloat16 for b in decays)
        saved, former = fast.state_dict(), model.state_dict()
        assert list(saved) == list(former)
        assert all(torch.equal(saved[name], former[name]) for name in former if "rate" in name)


@torch.no_grad()
def test_routers_that_stay_float32(tmp_path):
    model = make("Inkling2", "Inkling2TextConfig")
    want = model(IDS).logits
    model.save_pretrained(tmp_path)
    stock = type(model).from_pretrained(tmp_path, dtype=torch.bfloat16).eval()
    plain = off(stock, want)
    for fast in (*ways(model), *ways(stock)):
        assert off(fast, want) < 2 * plain
        for name, parameter in fast.named_parameters():
            assert parameter.dtype == stock.get_parameter(name).dtype, name

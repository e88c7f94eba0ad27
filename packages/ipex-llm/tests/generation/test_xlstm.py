# SPDX-License-Identifier: Apache-2.0
"""xLSTM as one program, in the mode "inference" of its published models; see test_recurrent, too.

The stock model moves no states for beams, and takes no mask, so that padding counts; so it does in programs.
"""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
import transformers
from families import VOCAB, randomize
from recurrent_models import NAMES, build

import ipex
from ipex_llm.arch import CellPlan
from ipex_llm.arch.detect import match
from ipex_llm.arch.reference import verify
from ipex_llm.engine import Engine, SamplingParams
from ipex_llm.kv_cache.transformers import state_of_cache
from ipex_llm.records import record_of

pytestmark = [
    pytest.mark.usefixtures("no_gradients"),
    pytest.mark.skipif("xlstm" not in NAMES, reason="newer than this transformers"),
]

GREEDY: dict[str, Any] = {"do_sample": False, "pad_token_id": 0, "max_new_tokens": 12}


@functools.cache
def optimized() -> Any:
    fast = ipex.llm.optimize(build("xlstm"), dtype=torch.float32)
    assert record_of(fast).runner is not None, str(ipex.explain(fast))
    return fast


def made(monkeypatch: pytest.MonkeyPatch | None = None, **more: Any) -> Any:
    """Return a model of another configuration; transformers fails to initialize fused weights, which we do here."""
    options = {"hidden_size": 128, "num_heads": 4, "num_hidden_layers": 2, "vocab_size": VOCAB}
    config = transformers.xLSTMConfig(**{**options, "eos_token_id": None, **more})
    if monkeypatch is not None:
        monkeypatch.setattr(transformers.xLSTMPreTrainedModel, "_init_weights", lambda *_: None)
    return randomize(transformers.xLSTMForCausalLM(config))


def text(batch: int, length: int, seed: int = 1) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCAB, (batch, length), generator=generator)


def logits(model: Any, ids: torch.Tensor, **more: Any) -> torch.Tensor:
    found: torch.Tensor = model(input_ids=ids, use_cache=False, **more).logits
    return found


def close(got: torch.Tensor, want: torch.Tensor, most: float = 1e-4) -> None:
    torch.testing.assert_close(got, want, rtol=0, atol=most * float(want.abs().max()))


@pytest.mark.parametrize("length", [1, 3, 17, 70])
@pytest.mark.parametrize("batch", [1, 2])
def test_tokens(batch: int, length: int) -> None:
    model, fast, ids = build("xlstm"), optimized(), text(batch, length)
    close(logits(fast, ids), logits(model, ids))
    want = model.generate(ids, **GREEDY)
    assert torch.equal(fast.generate(ids, **GREEDY), want)
    assert torch.equal(fast.generate(ids, prefill_chunk_size=5, **GREEDY), want)


@pytest.mark.parametrize(
    "more",
    [
        {"use_bias": True},
        {"add_out_norm": False, "norm_reduction_force_float32": False},
        {"num_heads": 1, "v_dim_factor": 0.5, "gate_soft_cap": 30.0},
        {"qk_dim_factor": 1.5, "hidden_size": 256, "num_heads": 8, "output_logit_soft_cap": 2.0},
    ],
)
def test_variants(more: dict[str, Any]) -> None:
    model, ids = made(**more), text(2, 33)
    plan = match(model)
    assert all(isinstance(layer.attention, CellPlan) for layer in plan.layers)
    assert plan.logit_softcap == model.config.output_logit_soft_cap
    assert verify(model, plan) < 1e-4
    fast = ipex.llm.optimize(copy.deepcopy(model), dtype=torch.float32)
    assert ipex.llm.plan(model, dtype=torch.float32).depth == 3
    close(logits(fast, ids), logits(model, ids))
    assert torch.equal(fast.generate(ids, **GREEDY), model.generate(ids, **GREEDY))


def test_fused_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = made(monkeypatch, weight_mode="fused"), text(2, 33)
    fast = ipex.llm.optimize(copy.deepcopy(model), dtype=torch.float32)
    assert record_of(fast).runner is not None, str(ipex.explain(fast))
    close(logits(fast, ids), logits(model, ids))
    assert torch.equal(fast.generate(ids, **GREEDY), model.generate(ids, **GREEDY))


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ({"gate_soft_cap": 0.0}, r"mlstm_layer: .*gate_soft_cap .* at most 30, got 0\.0"),
        ({"gate_soft_cap": 31.0}, r"mlstm_layer: .*gate_soft_cap .* at most 30, got 31\.0"),
        ({"mode": "train"}, "fails on 7 tokens: ValueError"),
    ],
)
def test_others_are_left_to_the_stock_forward(more: dict[str, Any], reason: str) -> None:
    model, ids = made(**more), text(2, 64)
    plan = ipex.llm.plan(model, dtype=torch.float32)
    assert plan.depth < 3
    with pytest.raises(ValueError, match=reason):
        match(model)
    fast = ipex.llm.optimize(copy.deepcopy(model), dtype=torch.float32)
    assert record_of(fast).runner is None
    close(logits(fast, ids), logits(model, ids))


@pytest.mark.parametrize("entry", [-30.0, -10.0, 0.0, 10.0, 30.0])
def test_gates_of_any_size(entry: float) -> None:
    """Sums are kept without the factor that the stock model divides them by; its norms remove factors."""
    model, ids = build("xlstm"), text(2, 200)
    for at, block in enumerate(model.backbone.blocks):
        block.mlstm_layer.igate_preact.bias.fill_(entry)
        block.mlstm_layer.fgate_preact.bias.fill_((-30.0, -3.0, 4.0, 30.0)[at])
    fast = ipex.llm.optimize(copy.deepcopy(model), dtype=torch.float32)
    got = logits(fast, ids)
    assert bool(got.isfinite().all())
    close(got, logits(model, ids), 1e-3)
    assert torch.equal(fast.generate(ids, **GREEDY), model.generate(ids, **GREEDY))


@pytest.mark.parametrize("beams", [1, 3])
def test_padding(beams: int) -> None:
    model, fast, ids = build("xlstm"), optimized(), text(3, 21)
    mask = torch.ones_like(ids)
    mask[0, :6], mask[1, 9:12], mask[2, 20:] = 0, 0, 0
    options = {**GREEDY, "attention_mask": mask, "num_beams": beams}
    want = model.generate(ids, use_cache=False, **options)
    assert torch.equal(fast.generate(ids, **options), want)
    cache = fast(input_ids=ids[:, :9], attention_mask=mask[:, :9], use_cache=True).cache
    rest = fast(input_ids=ids[:, 9:], attention_mask=mask, cache=cache)
    close(rest.logits, logits(model, ids)[:, 9:])
    assert state_of_cache(rest.cache) is not None


def test_calls_that_programs_do_not_answer() -> None:
    model, fast, ids = build("xlstm"), optimized(), text(2, 12)
    got, want = (one(input_ids=ids, use_cache=False, labels=ids) for one in (fast, model))
    close(got.loss, want.loss)
    close(got.logits, want.logits)
    found = [one(ids, use_cache=False, output_hidden_states=True) for one in (fast, model)]
    for one, other in zip(*(result.hidden_states for result in found), strict=True):
        close(one, other)
    cache = model(input_ids=ids[:, :7], use_cache=True).cache
    rest = fast(input_ids=ids[:, 7:], cache=cache)  # of the stock model
    close(rest.logits, logits(model, ids)[:, 7:])
    assert state_of_cache(rest.cache) is None
    ours = fast(input_ids=ids[:, :7], use_cache=True).cache
    assert state_of_cache(ours) is not None
    with pytest.raises(NotImplementedError, match="must go on as it began"):
        fast(input_ids=ids[:, 7:], cache=ours, output_attentions=True)
    fast.train()
    try:
        with torch.enable_grad():
            close(logits(fast, ids).detach(), logits(model, ids).detach())
    finally:
        fast.eval()


def test_weights_that_change_are_packed_again() -> None:
    model, ids = build("xlstm"), text(1, 9)
    fast = ipex.llm.optimize(build("xlstm"), dtype=torch.float32)
    for part in ("multihead_norm.weight", "igate_preact.bias"):
        before = logits(fast, ids)
        for one in (model, fast):
            one.backbone.blocks[1].mlstm_layer.get_parameter(part).mul_(0.5)
        close(logits(fast, ids), logits(model, ids))
        assert not torch.equal(before, logits(fast, ids))


def test_engine_in_bfloat16() -> None:
    """Each request gives alone what it gives beside others, in prompts of pieces."""
    fast = ipex.llm.optimize(build("xlstm"), dtype=torch.bfloat16)
    prompts = [text(1, n, seed=n)[0].tolist() for n in (5, 40, 17)]
    engine = Engine(fast, max_tokens_per_step=16, block_size=8, num_blocks=40, max_num_seqs=3)
    params = SamplingParams(max_new_tokens=8, ignore_eos=True)
    names = [engine.add_request(prompt, params) for prompt in prompts]
    found: dict[str, list[int]] = {name: [] for name in names}
    while engine.has_work:
        for output in engine.step():
            found[output.request_id].extend(output.tokens)
    options = {**GREEDY, "max_new_tokens": 8}
    for name, prompt in zip(names, prompts, strict=True):
        want = fast.generate(torch.tensor([prompt]), **options)[0, len(prompt) :]
        assert found[name] == want.tolist()

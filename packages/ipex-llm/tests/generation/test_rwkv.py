# SPDX-License-Identifier: Apache-2.0
"""RWKV as one program.

The stock model mixes up the texts of a batch in steps of one token with a state, moves no states for beams, and counts
padding as tokens. What is compared with is one text at a time, or calls without a state.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import transformers
from families import VOCAB, randomize
from plain_weights import with_plain_weights

import ipex
import ipex_quant as q
from ipex_core.errors import OpArgumentError
from ipex_llm.arch import ShiftPlan, WkvPlan
from ipex_llm.arch.detect import MatchError, match
from ipex_llm.arch.reference import verify
from ipex_llm.distributed.group import TensorParallel
from ipex_llm.distributed.shard import check_shards
from ipex_llm.engine import Engine, SamplingParams
from ipex_llm.kv_cache.transformers import state_of_cache
from ipex_llm.records import record_of

pytestmark = pytest.mark.usefixtures("no_gradients")

Dtype = q.WoqWeightDtype
FORMS = (Dtype.INT8, Dtype.INT4, Dtype.NF4, Dtype.FP8, Dtype.MXFP4)
GREEDY: dict[str, Any] = {"do_sample": False, "pad_token_id": 0, "max_new_tokens": 10}


def build(**more: Any) -> Any:
    """Return a tiny model whose stream is halved behind two of its four layers."""
    options = {"num_hidden_layers": 4, "rescale_every": 2, **more}
    config = transformers.RwkvConfig(
        vocab_size=VOCAB,
        context_length=256,
        hidden_size=64,
        intermediate_size=96,
        bos_token_id=1,
        eos_token_id=None,
        **options,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return randomize(transformers.RwkvForCausalLM(config))


@functools.cache
def optimized() -> Any:
    fast = ipex.llm.optimize(build(), dtype=torch.float32)
    assert record_of(fast).runner is not None, str(ipex.explain(fast))
    return fast


def text(batch: int, length: int, seed: int = 1) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCAB, (batch, length), generator=generator)


def logits(model: Any, ids: torch.Tensor, **more: Any) -> torch.Tensor:
    return model(input_ids=ids, use_cache=False, **more).logits  # type: ignore[no-any-return]


def close(got: torch.Tensor, want: torch.Tensor, most: float = 1e-5) -> None:
    torch.testing.assert_close(got, want, rtol=0, atol=most * float(want.abs().max()))


@pytest.mark.parametrize("more", [{}, {"rescale_every": 0}, {"num_hidden_layers": 3}])
def test_structure(more: dict[str, Any]) -> None:
    model = build(**more)
    plan, count = match(model), model.config.num_hidden_layers
    assert [type(layer.attention) for layer in plan.layers] == [WkvPlan, ShiftPlan] * count
    every = model.config.rescale_every
    halved = [2 * (i + 1) - 1 for i in range(count) if every and (i + 1) % every == 0]
    assert [i for i, layer in enumerate(plan.layers) if layer.stream_scale == 0.5] == halved
    assert plan.embedding_norm is not None and not plan.attentions and plan.has_states
    assert verify(model, plan) < 1e-5
    fast = ipex.llm.optimize(model, dtype=torch.float32)
    ids = text(2, 33)
    close(logits(fast, ids), logits(build(**more), ids))


def test_what_is_not_understood_is_named() -> None:
    model = build()
    model.rwkv.blocks[1].attention.time_shift = torch.nn.ZeroPad2d((0, 0, 2, -2))
    with pytest.raises(MatchError, match=r"blocks\.1\.attention: \w+ computes something else"):
        match(model)


def test_tokens_of_one_text() -> None:
    model, fast, ids = build(), optimized(), text(1, 21)
    want = model.generate(ids, **GREEDY)
    assert torch.equal(fast.generate(ids, **GREEDY), want)
    assert torch.equal(fast.generate(ids, prefill_chunk_size=5, **GREEDY), want)


@pytest.mark.parametrize("beams", [1, 3])
@pytest.mark.parametrize("padding", [0, 6])
def test_tokens_of_batches(beams: int, padding: int) -> None:
    model, fast, ids = build(), optimized(), text(3, 21)
    mask = torch.ones_like(ids)
    mask[0, :padding] = 0
    options = {**GREEDY, "attention_mask": mask, "num_beams": beams}
    want = model.generate(ids, use_cache=False, **options)
    if beams > 1 and padding:  # in the loop of transformers, which moves no states of this model
        options["use_cache"] = False
    assert torch.equal(fast.generate(ids, **options), want)


def test_pieces_and_order() -> None:
    model, fast, ids = build(), optimized(), text(3, 17, seed=4)
    want = logits(model, ids)
    first = fast(input_ids=ids[:, :6], use_cache=True)
    cache = first.state
    assert state_of_cache(cache) is not None
    second = fast(input_ids=ids[:, 6:9], state=cache)
    close(torch.cat([first.logits, second.logits], 1), want[:, :9])
    order = torch.tensor([2, 0, 0, 1])  # one more sequence than before
    cache.reorder_cache(order)
    for at in range(9, 17):
        close(fast(input_ids=ids[order, at : at + 1], state=cache).logits[:, 0], want[order, at])


def test_other_calls_run_the_stock_forward() -> None:
    model, fast, ids = build(), optimized(), text(1, 12)
    for name in ("output_hidden_states", "output_attentions"):
        got, want = (one(input_ids=ids, use_cache=False, **{name: True}) for one in (fast, model))
        close(got.logits, want.logits)
        part = name.removeprefix("output_")
        assert len(getattr(got, part)) == len(getattr(want, part))
    state = model(input_ids=ids[:, :7], use_cache=True).state
    got = fast(input_ids=ids[:, 7:], state=[one.clone() for one in state])
    close(got.logits, logits(model, ids)[:, 7:])
    ours = fast(input_ids=ids[:, :7], use_cache=True).state
    with pytest.raises(NotImplementedError, match="must go on as it began"):
        fast(input_ids=ids[:, 7:], state=ours, output_attentions=True)


def test_bfloat16_is_as_near_as_the_stock_model() -> None:
    model, ids = build(), text(3, 21)
    want = logits(model, ids)
    half, fast = build().bfloat16(), ipex.llm.optimize(build(), dtype=torch.bfloat16)
    assert record_of(fast).runner is not None

    def off(other: Any) -> float:
        found = logits(other, ids).float()
        return float((1 - torch.nn.functional.cosine_similarity(found, want, dim=-1)).median())

    assert off(fast) < max(2e-3, 2 * off(half))


def served(fast: Any, prompts: list[list[int]]) -> list[list[int]]:
    """Return the tokens of requests that join and leave, whose prompts come in pieces."""
    engine = Engine(fast, max_tokens_per_step=16, block_size=8, num_blocks=40, max_num_seqs=3)
    params = SamplingParams(max_new_tokens=8, ignore_eos=True)
    later, names, step = {0: prompts[:2], 2: prompts[2:3], 5: prompts[3:]}, [], 0
    found: dict[str, list[int]] = {}
    while step < 6 or engine.has_work:
        names += [engine.add_request(prompt, params) for prompt in later.get(step, ())]
        for output in engine.step():
            found.setdefault(output.request_id, []).extend(output.tokens)
        step += 1
    return [found[name] for name in names]


def prompts() -> list[list[int]]:
    return [text(1, n, seed=n)[0].tolist() for n in (5, 40, 17, 3, 29)]


def alone(model: Any) -> list[list[int]]:
    options = {**GREEDY, "max_new_tokens": 8}
    made = (model.generate(torch.tensor([one]), **options)[0, len(one) :] for one in prompts())
    return [one.tolist() for one in made]


def test_engine() -> None:
    assert served(optimized(), prompts()) == alone(build())


@pytest.mark.parametrize("form", FORMS, ids=lambda one: one.name)
def test_weights(form: Dtype) -> None:
    size = {Dtype.INT8: {}, Dtype.MXFP4: {"group_size": 32}}.get(form, {"group_size": 16})
    config = q.woq_qconfig(weight_dtype=form, **size)
    fast = ipex.llm.optimize(build(), dtype=torch.float32, quantization_config=config)
    assert record_of(fast).runner is not None
    model, ids = build(), text(2, 12)
    logits(model, ids)  # divides weights for inference, as those that were quantized are
    model = with_plain_weights(model, fast)
    close(logits(fast, ids), logits(model, ids), 1e-4)
    assert served(fast, prompts()) == alone(model)


def test_is_not_divided() -> None:
    ranks = TensorParallel(None, 0, 2, None, 1.0, "")
    with pytest.raises(OpArgumentError, match="to be divided"):
        check_shards(match(build()), ranks, (1,))

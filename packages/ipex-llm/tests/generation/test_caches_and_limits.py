# SPDX-License-Identifier: Apache-2.0
"""Attention with narrow values, gates of heads, indexers, and other rotations: caches and limits.

The matrix of families compares logits and tokens; here are calls that go on with a cache, and what is refused.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from families import CAUSAL, build, tokens

import ipex
import ipex_core
from ipex.llm import Engine, SamplingParams
from ipex_core.errors import OpArgumentError
from ipex_llm.arch.detect import MatchError, match
from ipex_llm.distributed.group import TensorParallel
from ipex_llm.distributed.shard import check_shards
from ipex_llm.records import record_of

pytestmark = pytest.mark.usefixtures("no_gradients")

_NAMES = (
    *("laguna", "mimo_v2_flash", "minicpm3", "nanochat", "axk1", "kolibri1", "beam", "dory"),
    *("doge", "diffllama", "inkling", "jetmoe", "dbrx", "longcat_flash", "mllama_text"),
    *("gpt_neox_japanese", "inkling2", "inkling2_loop"),
)
NAMES = [n for n in _NAMES if n in CAUSAL]
_MORE = ("dots3_note", "axk2", "hy_v4", "deepseek_v4")
_INDEXED = ("deepseek_v32", "glm_moe_dsa", "minimax_m3", *_MORE)
INDEXED = [n for n in _INDEXED if n in CAUSAL]


def optimized(name: str) -> Any:
    fast = ipex.llm.optimize(build(name), dtype=torch.float32)
    assert record_of(fast).runner is not None, str(ipex.explain(fast))
    return fast


def cache_of(result: Any) -> dict[str, Any]:
    cache = getattr(result, "cache", None)
    return {"past_key_values": result.past_key_values} if cache is None else {"cache": cache}


def close(got: torch.Tensor, want: torch.Tensor) -> None:
    torch.testing.assert_close(got, want, rtol=0, atol=1e-4 * float(want.abs().max()))


@pytest.mark.parametrize("name", NAMES)
def test_the_stock_forward_goes_on_with_the_same_cache(name: str) -> None:
    model, fast, ids = build(name), optimized(name), tokens(2, 19)
    want = model(input_ids=ids, use_cache=False).logits
    first = fast(input_ids=ids[:, :11], use_cache=True)
    close(first.logits, want[:, :11])
    # Attentions are what programs do not give.
    second = fast(input_ids=ids[:, 11:15], **cache_of(first), output_attentions=True)
    close(second.logits, want[:, 11:15])
    third = fast(input_ids=ids[:, 15:], **cache_of(second))
    close(third.logits, want[:, 15:])


@pytest.mark.parametrize("name", INDEXED)
def test_as_many_tokens_as_an_indexer_chooses(name: str) -> None:
    model, fast, ids = build(name), optimized(name), tokens(1, 12)
    plan = match(model)
    assert plan.indexed
    assert plan.max_positions == plan.attention_chunk == 96
    options = {"do_sample": False, "pad_token_id": 0}
    for new in (40, 100):  # the second one goes beyond
        found = fast.generate(ids, max_new_tokens=new, **options)
        assert torch.equal(found, model.generate(ids, max_new_tokens=new, **options))
    longer = tokens(1, 120)
    close(fast(input_ids=longer, use_cache=False).logits, model(input_ids=longer).logits)


@pytest.mark.parametrize("name", INDEXED)
def test_caches_have_the_keys_of_indexers(name: str) -> None:
    model, fast, ids = build(name), optimized(name), tokens(1, 120)
    want = model(input_ids=ids, use_cache=False).logits
    first = fast(input_ids=ids[:, :50], use_cache=True)
    second = fast(input_ids=ids[:, 50:], **cache_of(first))
    close(torch.cat([first.logits, second.logits], 1), want)
    # Our own loop has kept no keys of indexers: its cache goes on as long as all are chosen.
    options = {"do_sample": False, "pad_token_id": 0, "return_dict_in_generate": True}
    made = fast.generate(ids[:, :8], max_new_tokens=4, **options)
    place, given = torch.tensor([[11]]), made.sequences[:, -1:]
    step = fast(input_ids=given, **cache_of(made), position_ids=place)
    close(step.logits[:, -1], model(input_ids=made.sequences, use_cache=False).logits[:, -1])
    with pytest.raises(NotImplementedError, match="must go on as it began"):
        fast(input_ids=ids[:, :100], **cache_of(step))


@pytest.mark.parametrize("name", INDEXED[:1])
def test_the_engine_takes_as_many_tokens(name: str) -> None:
    model = build(name)
    engine = Engine(optimized(name), max_num_seqs=2, num_blocks=24)
    assert engine.max_model_len == 96
    prompts = [tokens(1, n, seed=n)[0].tolist() for n in (20, 33)]
    found = engine.generate(prompts, SamplingParams(max_new_tokens=8, ignore_eos=True))
    for prompt, output in zip(prompts, found, strict=True):
        ids = torch.tensor([prompt])
        want = model.generate(ids, max_new_tokens=8, do_sample=False, pad_token_id=0)
        assert list(output.tokens) == want[0, len(prompt) :].tolist()


@pytest.mark.parametrize("name", [n for n in NAMES if n == "doge"])
def test_beyond_as_many_keys_as_are_kept_the_stock_forward_goes_on(name: str) -> None:
    model, fast, ids = build(name), optimized(name), tokens(1, 110)
    want = model(input_ids=ids, use_cache=False).logits
    close(fast(input_ids=ids, use_cache=False).logits, want)
    result = fast(input_ids=ids[:, :90], use_cache=True)
    close(result.logits, want[:, :90])
    found = []
    for start in range(90, 110, 5):
        result = fast(input_ids=ids[:, start : start + 5], **cache_of(result))
        found.append(result.logits)
    other = model(input_ids=ids[:, :90], use_cache=True)
    for start, got in zip(range(90, 110, 5), found, strict=True):
        other = model(input_ids=ids[:, start : start + 5], **cache_of(other))
        close(got, other.logits)
    with pytest.raises(ValueError, match="max_model_len must be"):
        Engine(fast, num_blocks=8, max_model_len=100)


@pytest.mark.parametrize("name", [n for n in NAMES if n == "mimo_v2_flash"])
def test_layers_with_narrow_values_have_no_program_of_their_own(name: str) -> None:
    fast = ipex.llm.optimize(build(name), dtype=torch.float32, depth=2)
    rows = [row for row in ipex_core.explain(fast).rows if row.step == "layer"]
    assert {row.text for row in rows} == {"its values are narrower than its keys"}


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("mimo_v2_flash", "got narrower values"),
        ("laguna", "got gated attention"),
        ("minimax_m3", "no indexers to be divided"),
        ("modernbert_decoder", "no block before its head to be divided"),
        ("doge", "got a bias made of all values"),
        ("diffllama", "got a difference of heads"),
        ("inkling", "got short convolutions of them"),
        ("inkling2", "got gated attention"),
        ("jetmoe", "got experts in their places"),
        ("dbrx", "got ones that lie behind each other"),
        ("mllama_text", "got one that reads a picture"),
        ("gpt_neox_japanese", "got a parameter that a layer adds"),
    ],
)
def test_is_not_divided(name: str, text: str) -> None:
    if name not in CAUSAL:
        pytest.skip("newer than this transformers")
    ranks = TensorParallel(None, 0, 2, None, 1.0, "")
    with pytest.raises(OpArgumentError, match=text):
        check_shards(match(build(name)), ranks, (1,))


@pytest.mark.parametrize("name", [n for n in INDEXED if n == "minimax_m3"])
def test_layers_with_an_indexer_have_no_program_of_their_own(name: str) -> None:
    fast, ids = ipex.llm.optimize(build(name), dtype=torch.float32, depth=2), tokens(1, 120)
    rows = [row for row in ipex_core.explain(fast).rows if row.step == "layer"]
    assert [row.text for row in rows if not row.done] == [
        "has an indexer, which chooses the keys of each query"
    ]
    close(fast(input_ids=ids).logits, build(name)(input_ids=ids).logits)


@pytest.mark.parametrize("name", INDEXED[:1])
def test_an_indexer_of_unknown_size_is_named(name: str) -> None:
    model = build(name)
    model.model.layers[1].self_attn.indexer.index_topk = 5  # fewer than the tokens of a match
    with pytest.raises(MatchError, match=r"layers\.1\.self_attn: has an indexer, which chooses"):
        match(model)


@pytest.mark.parametrize("name", [n for n in CAUSAL if n == "xglm"])
def test_texts_beyond_a_table_of_sinusoids_run_the_stock_forward(name: str) -> None:
    model, fast, ids = build(name), optimized(name), tokens(1, 270)  # of 256 positions
    want = model(input_ids=ids, use_cache=False).logits
    first = fast(input_ids=ids[:, :250], use_cache=True)
    second = fast(input_ids=ids[:, 250:], **cache_of(first))
    close(torch.cat([first.logits, second.logits], 1), want)
    options = {"max_new_tokens": 20, "do_sample": False, "pad_token_id": 0}
    found = fast.generate(ids[:, :245], **options)
    assert torch.equal(found, model.generate(ids[:, :245], **options))

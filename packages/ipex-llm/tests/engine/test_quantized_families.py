# SPDX-License-Identifier: Apache-2.0
"""Families of many kinds with quantized weights and quantized caches: logits, tokens, beams, the engine, reloading.

The matrix of families has float weights and INT8 for all of them; here are the others for each kind of attention,
recurrence and experts. What is compared with has the weights that codes and scales stand for.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
import recurrent_models
import torch
from families import CAUSAL, build, tokens
from plain_weights import with_plain_weights
from transformers import DynamicCache

import ipex_llm
import ipex_quant as q
from ipex_llm.engine import Engine, SamplingParams
from ipex_llm.kv_cache.transformers import state_of_cache
from ipex_llm.records import record_of

pytestmark = [
    pytest.mark.usefixtures("no_gradients"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]

Dtype = q.WoqWeightDtype
UNCACHED = ("minimax", "recurrent_gemma", "xlstm")  # stock caches reorder no states for beams
_STATES = ("kimi_linear", "bailing_hybrid", "lfm3", *UNCACHED, "inkling", "inkling2")
STATES = [n for n in _STATES if n in recurrent_models.NAMES or n in CAUSAL]
LATENTS = [
    n
    for n in (
        *("minicpm3", "deepseek_v32", "glm_moe_dsa", "axk1", "glm4_moe_lite", "longcat_flash"),
        *("dots3_note", "axk2", "hy_v4", "deepseek_v4"),
    )
    if n in CAUSAL
]
KEYS = [
    name
    for name in (
        *("mimo_v2_flash", "laguna", "nanochat", "modernbert_decoder", "minimax_m3"),
        *("gpt_neox_japanese", "mllama_text", "dbrx", "doge"),
        *("diffllama", "jetmoe", "kolibri1", "beam", "dory"),
    )
    if name in CAUSAL
]
NAMES = [*KEYS, *LATENTS, *STATES]
FORMS = (Dtype.INT8, Dtype.NF4, Dtype.FP8, Dtype.MXFP4)
#: Each family with int4 weights and one other form, each form with families of each kind.
CASES = [
    (name, form)
    for kind in (KEYS, LATENTS, STATES)
    for at, name in enumerate(kind)
    for form in (Dtype.INT4, FORMS[at % len(FORMS)])
]
CASES += [(name, Dtype.INT8) for name in ("inkling2_loop",) if name in CAUSAL]
GREEDY: dict[str, Any] = {"do_sample": False, "pad_token_id": 0}
NEW = 8
ENGINE: dict[str, Any] = {"block_size": 8, "num_blocks": 40, "max_num_seqs": 3}


def make(name: str) -> Any:
    return recurrent_models.build(name) if name in recurrent_models.CONFIGS else build(name)


def quantized(model: Any, form: Dtype, dtype: torch.dtype = torch.float32) -> Any:
    size = {Dtype.INT8: {}, Dtype.MXFP4: {"group_size": 32}}.get(form, {"group_size": 16})
    config = q.woq_qconfig(weight_dtype=form, **size)
    fast = ipex_llm.optimize(model, dtype=dtype, quantization_config=config)
    assert record_of(fast).runner is not None
    return fast


def close(got: torch.Tensor, want: torch.Tensor, most: float = 1e-4) -> None:
    torch.testing.assert_close(got, want, rtol=0, atol=most * float(want.abs().max()))


def prompts() -> list[list[int]]:
    return [tokens(1, n, seed=n)[0].tolist() for n in (5, 40, 17, 3, 29)]


def greedy(model: Any, prompt: list[int]) -> list[int]:
    text = model.generate(torch.tensor([prompt]), max_new_tokens=NEW, **GREEDY)
    found: list[int] = text[0, len(prompt) :].tolist()
    return found


def served(fast: Any, **options: Any) -> tuple[list[list[int]], Engine]:
    """Return the tokens of requests that join and leave, whose prompts come in pieces, and the engine."""
    engine = Engine(fast, max_tokens_per_step=16, **{**ENGINE, **options})
    params = SamplingParams(max_new_tokens=NEW, ignore_eos=True)
    later, names, step = {0: prompts()[:2], 2: prompts()[2:3], 5: prompts()[3:]}, [], 0
    found: dict[str, list[int]] = {}
    while step < 6 or engine.has_work:
        names += [engine.add_request(prompt, params) for prompt in later.get(step, ())]
        for output in engine.step():
            found.setdefault(output.request_id, []).extend(output.tokens)
        step += 1
    return [found[name] for name in names], engine


@functools.cache
def answers(name: str) -> list[list[int]]:
    stock = make(name)
    return [greedy(stock, prompt) for prompt in prompts()]


@pytest.mark.parametrize(
    ("name", "form"), CASES, ids=[f"{name}-{form.name}" for name, form in CASES]
)
def test_weights(name: str, form: Dtype) -> None:
    fast = quantized(make(name), form)
    model = with_plain_weights(make(name), fast)
    ids, mask = tokens(2, 12), torch.ones(2, 12, dtype=torch.int64)
    want = model(ids, use_cache=False).logits
    close(fast(ids, use_cache=False).logits, want)
    close(fast(ids, use_cache=False, output_attentions=True).logits, want)  # its own forward
    mask[1, :5] = 0
    own = {"use_cache": name not in UNCACHED}
    for options in ({"attention_mask": mask}, {"num_beams": 3}):
        both = [
            one.generate(ids * mask, max_new_tokens=NEW, **GREEDY, **options, **more)
            for one, more in ((fast, {}), (model, own))
        ]
        assert torch.equal(*both)
    assert served(fast)[0] == [greedy(model, prompt) for prompt in prompts()]
    other = make(name)
    for parameter in other.parameters():
        parameter.mul_(0.5)
    other = quantized(other, form)
    other.load_state_dict({key: value.clone() for key, value in fast.state_dict().items()})
    torch.testing.assert_close(
        other(ids, use_cache=False).logits, fast(ids, use_cache=False).logits
    )


@pytest.mark.parametrize("name", NAMES)
def test_int4_in_bfloat16(name: str) -> None:
    fast, ids = quantized(make(name), Dtype.INT4, torch.bfloat16), tokens(2, 12)
    want = with_plain_weights(make(name), fast)(ids, use_cache=False).logits
    apart = 1 - torch.cosine_similarity(fast(ids, use_cache=False).logits.float(), want, dim=-1)
    assert float(apart.median()) < 2e-3


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e5m2, torch.float8_e4m3fn])
@pytest.mark.parametrize("name", [n for n in NAMES if n != "deepseek_v4"])
def test_caches(name: str, dtype: torch.dtype) -> None:
    fast, model, ids = (
        ipex_llm.optimize(make(name), kv_cache_dtype=dtype),
        make(name),
        tokens(2, 24),
    )
    # RecurrentGemma returns no cache, and only takes one.
    own = {"cache": DynamicCache(config=fast.config)} if name == "recurrent_gemma" else {}
    first = fast(ids[:, :20], use_cache=True, **own)
    cache = own.get("cache") or getattr(first, "cache", None) or first.past_key_values
    if not record_of(fast).runner.plan.indexed:  # whose cache is one of transformers
        assert state_of_cache(cache).cache.dtype == dtype
    step = fast(ids[:, 20:21], past_key_values=cache, position_ids=torch.tensor([[20]])).logits
    apart = 1 - torch.cosine_similarity(step, model(ids[:, :21]).logits[:, -1:], dim=-1)
    assert float(apart.max()) < (1e-3 if dtype == torch.int8 else 0.15)
    found, engine = served(fast, cache_dtype=dtype)
    assert engine._cache.dtype == dtype
    same = sum(
        a == b for x, y in zip(found, answers(name), strict=True) for a, b in zip(x, y, strict=True)
    )
    assert same > NEW


@pytest.mark.parametrize("name", [*LATENTS[:1], *STATES[:1]])
def test_scales_for_layers_are_refused(name: str) -> None:
    model = make(name)
    scales = q.KVCacheScales((1.0,) * 4, (1.0,) * 4)
    with pytest.raises(ValueError, match=r"kv_cache_scales must be None for a model (that|with)"):
        ipex_llm.optimize(model, kv_cache_dtype="int8", kv_cache_scales=scales)
    if name in STATES:
        for one in (model, ipex_llm.optimize(model)):
            with pytest.raises(ValueError, match="return keys and values of each layer"):
                q.calibrate_kv_cache(one, [tokens(2, 12)])


@pytest.mark.parametrize("name", [n for n in LATENTS if n == "deepseek_v4"])
def test_rows_of_windows_have_the_dtype_of_the_model(name: str) -> None:
    with pytest.raises(ValueError, match="kv_cache_dtype must be None for a model that caches row"):
        ipex_llm.optimize(make(name), kv_cache_dtype="int8")
    with pytest.raises(ValueError, match="dtype must be None with rows of windows"):
        served(ipex_llm.optimize(make(name)), cache_dtype=torch.int8)


@pytest.mark.parametrize("method", ["ngram", "draft"])
@pytest.mark.parametrize("name", [*KEYS, *LATENTS])
def test_guesses(name: str, method: str) -> None:
    fast = ipex_llm.optimize(make(name))
    config: dict[str, Any] = {"method": "ngram", "prompt_lookup_min": 1}
    if method == "draft":
        config = {"model": ipex_llm.optimize(make(name))}
    config["num_speculative_tokens"] = 3
    found, engine = served(fast, speculative_config=config)
    assert found == answers(name)
    stats = engine.stats()
    assert stats.draft_tokens > 0 and stats.blocks_held == 0
    assert method == "ngram" or stats.accepted_tokens == stats.draft_tokens


@pytest.mark.parametrize("name", STATES)
def test_guesses_are_refused_where_states_cannot_go_back(name: str) -> None:
    with pytest.raises(ValueError, match="speculative_config must be None for a model with recur"):
        Engine(ipex_llm.optimize(make(name)), num_blocks=8, speculative_config={"method": "ngram"})
